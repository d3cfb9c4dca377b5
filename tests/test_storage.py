"""What reaches the disk, and in what order, when a file is written."""

import itertools
import json
import os
import stat

import pytest
import safetensors.torch
import torch

import hfta_func as hfta
from hfta_func.files import storage

TREE = {
    "half": torch.randn(2, 3, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False]),
    "wide": torch.randn(2, 5, dtype=torch.float64),
    "empty": torch.zeros(2, 0),
    "word": torch.tensor([[1], [-(2**63)]]),
    "byte": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
}


@pytest.mark.parametrize("existing", [False, True])
def test_files_are_on_the_disk_before_they_take_the_place_of_others(tmp_path, monkeypatch, existing):
    path = tmp_path / "state.safetensors"
    if existing:
        path.write_bytes(b"before")
    events = []

    def synced(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert os.path.samestat(os.fstat(descriptor), os.stat(tmp_path))
            events.append("directory")
        else:
            (written,) = (tmp_path / name for name in os.listdir(tmp_path) if name != path.name)
            assert os.path.samestat(os.fstat(descriptor), os.stat(written))
            # What the process still holds in its own buffers is not on the disk.
            events.append(written.read_bytes())

    def replaced(source, target, move=os.replace):
        assert os.path.realpath(target) == os.path.realpath(path)
        assert (path.read_bytes() == b"before") if existing else not path.exists()
        move(source, target)
        events.append("renamed")

    monkeypatch.setattr(storage.os, "fsync", synced)
    monkeypatch.setattr(storage.os, "replace", replaced)
    hfta.save(TREE, path)
    assert events == [path.read_bytes(), "renamed", "directory"]
    assert os.listdir(tmp_path) == [path.name]


def test_no_descriptor_stays_open(tmp_path, monkeypatch):
    opened = set()

    def opening(*args, call=os.open):
        opened.add(descriptor := call(*args))
        return descriptor

    def closing(descriptor, call=os.close):
        opened.discard(descriptor)
        call(descriptor)

    monkeypatch.setattr(storage.os, "open", opening)
    monkeypatch.setattr(storage.os, "close", closing)
    hfta.save(TREE, tmp_path / "state")
    assert not opened


def test_tensors_lie_aligned_one_after_another(tmp_path):
    path = tmp_path / "state.safetensors"
    hfta.save(TREE, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    entries = json.loads(data[8 : 8 + length])
    del entries["__metadata__"]
    places = sorted(entry["data_offsets"] for entry in entries.values())
    assert places[0][0] == 0 and places[-1][1] == len(data) - 8 - length
    assert all(one[1] == other[0] for one, other in itertools.pairwise(places))
    plain = safetensors.torch.load_file(path)
    for name, tensor in TREE.items():
        key = f"state['{name}']"
        assert entries[key]["data_offsets"][0] % tensor.element_size() == 0
        assert plain[key].dtype == tensor.dtype and torch.equal(plain[key], tensor)


def test_loaded_tensors_are_no_views_of_the_file(tmp_path):
    path = tmp_path / "state.safetensors"
    hfta.save(TREE, path)
    before = path.read_bytes()
    loaded = hfta.load(path, like=TREE)
    for name, tensor in loaded.items():
        assert tensor.dtype == TREE[name].dtype and torch.equal(tensor, TREE[name])
        tensor.zero_()
    assert path.read_bytes() == before
    assert all(torch.equal(tensor, TREE[name]) for name, tensor in hfta.load(path, like=TREE).items())


def test_a_file_of_a_later_format_is_refused(tmp_path):
    path = tmp_path / "state"
    storage.write(path, {}, {"format_version": 2})
    with pytest.raises(hfta.CheckpointError, match="format version 2"):
        hfta.read_metadata(path)
    storage.write(path, {}, {"format_version": 1})
    assert hfta.read_metadata(path)["format_version"] == 1


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    path = tmp_path / "state"
    hfta.save({"a": torch.zeros(1, 1)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for shown in (length + 1, len(data), 2**62):
        path.write_bytes(shown.to_bytes(8, "little") + data[8:])
        for read in (hfta.read_metadata, lambda path: hfta.load(path, like={"a": torch.zeros(1, 1)})):
            with pytest.raises(hfta.CheckpointError, match="damaged"):
                read(path)


def test_metadata_may_hold_tensors(tmp_path):
    path = tmp_path / "state"
    about = {"sums": [torch.randn(2, 3, dtype=torch.float64), {"step": torch.tensor([4, -5])}], "epoch": 3}
    storage.write(path, {"a": TREE["half"]}, {"metadata": about})
    found, tensors = storage.read(path)
    assert tensors.keys() == {"a"} and torch.equal(tensors["a"], TREE["half"])
    assert found["metadata"]["epoch"] == 3
    assert torch.equal(found["metadata"]["sums"][0], about["sums"][0])
    assert torch.equal(found["metadata"]["sums"][1]["step"], about["sums"][1]["step"])
    with pytest.raises(TypeError, match="a set cannot be saved"):
        storage.write(path, {}, {"metadata": {1, 2}})
