"""What reaches the disk, and in what order, when a file is written."""

import itertools
import json
import os
import pathlib
import stat

import pytest
import safetensors.torch
import torch

import hfta_func as hfta
from hfta_func.files import atomic, storage

NAN, INF = float("nan"), float("inf")
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

    monkeypatch.setattr(atomic.os, "fsync", synced)
    monkeypatch.setattr(atomic.os, "replace", replaced)
    hfta.save(TREE, path)
    assert events == [path.read_bytes(), "renamed", "directory"]
    assert os.listdir(tmp_path) == [path.name]


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


def test_metadata_may_hold_tensors(tmp_path):
    path = tmp_path / "state"
    about = {"sums": [torch.randn(2, 3, dtype=torch.float64), {"step": torch.tensor([4, -5])}], "epoch": 3}
    storage.write(path, {"a": TREE["half"]}, {"metadata": about})
    found, tensors = storage.read(path)
    assert tensors.keys() == {"a"} and torch.equal(tensors["a"], TREE["half"])
    assert found["metadata"]["epoch"] == 3
    assert torch.equal(found["metadata"]["sums"][0], about["sums"][0])
    assert torch.equal(found["metadata"]["sums"][1]["step"], about["sums"][1]["step"])


def test_files_of_format_1(tmp_path):
    """Written by the first version: four steps of two members, whose score was NaN in one and infinite in the other."""
    step = hfta.make_train_step(
        torch.nn.Linear(2, 1), lambda model, batch: model(batch).square().mean(), hfta.sgd(lr=[0.1, 0.2], momentum=0.9)
    )
    start = step.init(*hfta.init_params(lambda: torch.nn.Linear(2, 1), [5, 3]), seeds=[5, 3])
    kept = pathlib.Path(__file__).parent / "data"
    run = tmp_path / "run"
    run.write_bytes((kept / "run-format-1.safetensors").read_bytes())
    batches = [torch.arange(8.0).reshape(2, 2, 2)]
    state, history = hfta.fit(step, start, batches, epochs=2, resume=run, progress=False)
    assert state.step.tolist() == [2, 2] and history["score"].tolist() == [pytest.approx([NAN, INF], nan_ok=True)] * 2
    again, _ = hfta.fit(step, start, batches, epochs=2, progress=False)
    torch.testing.assert_close(state.params, again.params)
    best = hfta.load(kept / "best-format-1.safetensors", like=start)
    assert best.step.tolist() == [1, 1]
    # NaN was a number there, which keep_best still compares.
    (tmp_path / "best").write_bytes((kept / "best-format-1.safetensors").read_bytes())
    history.epochs[-1]["score"] = torch.tensor([7.0, 8.0])
    hfta.callbacks.keep_best(tmp_path / "best", "score")(state, history)
    assert hfta.files.read_metadata(tmp_path / "best")["metadata"]["value"] == [7.0, 8.0]
