"""What reaches the disk, and in what order, when a file is written."""

import copy
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import stat

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_no_descriptor_stays_open(tmp_path, monkeypatch):
    opened = set()

    def opening(*args, call=os.open):
        opened.add(descriptor := call(*args))
        return descriptor

    def closing(descriptor, call=os.close):
        opened.discard(descriptor)
        call(descriptor)

    monkeypatch.setattr(atomic.os, "open", opening)
    monkeypatch.setattr(atomic.os, "close", closing)
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
    with pytest.raises(hfta.errors.CheckpointError, match="format version 2"):
        hfta.files.read_metadata(path)
    storage.write(path, {}, {"format_version": 1})
    assert storage.read_header(path)["format_version"] == 1


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    path = tmp_path / "state"
    hfta.save({"a": torch.zeros(1, 1)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for shown in (length + 1, len(data), 2**62):
        path.write_bytes(shown.to_bytes(8, "little") + data[8:])
        for read in (hfta.files.read_metadata, lambda path: hfta.load(path, like={"a": torch.zeros(1, 1)})):
            with pytest.raises(hfta.errors.CheckpointError, match="damaged"):
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


@pytest.mark.parametrize("name", ["__metadata__", "metadata[0]", "metadata[x", "\ud800", "a\n\udfff", 5, None])
def test_names_that_cannot_be_read_are_refused(tmp_path, name):
    with pytest.raises(
        hfta.errors.CheckpointError, match=r"a tensor in a file cannot be called .*; give it another name"
    ):
        storage.write(tmp_path / "state", {name: TREE["half"]}, {"metadata": torch.zeros(2)})
    assert os.listdir(tmp_path) == []


def test_names_may_be_odd(tmp_path):
    names = ["", "a\x00b", '"\\', "\u2028ü\U0001f600", "__metadata__\n", "a metadata[0]", "metadata", "x" * 9999]
    storage.write(tmp_path / "state", {name: torch.tensor([number]) for number, name in enumerate(names)}, {})
    _, tensors = storage.read(tmp_path / "state")
    plain = safetensors.torch.load_file(tmp_path / "state")
    for number, name in enumerate(names):
        assert tensors[name].tolist() == plain[name].tolist() == [number]


def test_headers_that_are_too_long_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "state"
    storage.write(path, TREE, {"text": "x" * 1000})
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(storage, "_LONGEST", length)
    storage.read(path)
    storage.write(path, TREE, {"text": "x" * 1000})
    monkeypatch.setattr(storage, "_LONGEST", length - 1)
    with pytest.raises(
        hfta.errors.CheckpointError, match=f"has {length} bytes, the limit is {length - 1}; save less metadata"
    ):
        storage.write(path, TREE, {"text": "x" * 1000})


LIKE = {"a": torch.ones(2, 3), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(2, 0)}


@functools.cache
def parts():
    """Entries of a file's header with its metadata apart, and its data, which are all zero."""
    tree = {name: torch.zeros_like(leaf) for name, leaf in LIKE.items()}
    header, tensors = storage.encode(
        {f"state['{name}']": leaf for name, leaf in tree.items()},
        {"num_models": 2, "shapes": {}, "hyperparameters": {}, "seeds": None, "metadata": {"t": [torch.zeros(2), 5]}},
    )
    entries = json.loads(header[8:])
    return entries, json.loads(entries.pop("__metadata__")["hfta_func"]), bytes(sum(leaf.nbytes for leaf in tensors))


def forged(header, data):
    """A file whose header goes on with ``header`` after its checksum, which is right."""
    beginning = b'{"__metadata__":{"checksum":"'
    length = (len(beginning) + 64 + len(header)).to_bytes(8, "little")
    digest = hashlib.sha256(length + beginning + header + data).hexdigest().encode()
    return length + beginning + digest + header + data


def rest(entries, about):
    """What follows the checksum in a header."""
    text = about if isinstance(about, str) else json.dumps(about)
    return b'",' + json.dumps({"hfta_func": text}).encode()[1:] + b"," + json.dumps(entries).encode()[1:]


def outcome(path, content):
    """How many of three readers take a file; others raise this package's errors, and no byte of the header is ever data."""
    path.write_bytes(content)
    errors = []
    for read in (hfta.files.read_metadata, lambda path: hfta.load(path, like=LIKE), storage.read):
        try:
            found = read(path)
        except hfta.errors.CheckpointError as error:
            assert str(error).startswith(f"{path} ")
            errors.append(error)
        except hfta.errors.StateError:
            assert read not in (hfta.files.read_metadata, storage.read)
        else:
            if read is storage.read:
                found = found[1]
            if read is not hfta.files.read_metadata:
                assert not any(tensor.view(torch.uint8).any() for tensor in found.values())
                assert sum(tensor.nbytes for tensor in found.values()) <= len(content)
    return 3 - len(errors)


def changed(tree, keys, value):
    """A tree of JSON with another value in a place."""
    tree = copy.deepcopy(tree)
    *keys, last = keys
    functools.reduce(lambda held, key: held[key], keys, tree)[last] = value
    return tree


def test_forged_files_are_as_written_files(tmp_path):
    entries, about, data = parts()
    assert outcome(tmp_path / "state", forged(rest(entries, about), data)) == 3
    assert all(not leaf.any() for leaf in hfta.load(tmp_path / "state", like=LIKE).values())


A = "state['a']"
ENTRY_CHANGES = [
    *((["dtype"], value) for value in ("F99", "f32", None, 5, ["F32"], {}, "I64")),
    *(
        (["shape"], value)
        for value in ([2, -3], [-2, -3], [2, 3.0], [True, 6], ["2", "3"], None, 6, "23", {}, [2, 3, 1.5])
    ),
    *((["shape"], value) for value in ([2, 4], [2, 2], [2**62, 2**62], [2**64, 0], [10**400, 10**400], [2, [3]], [])),
    *((["data_offsets"], value) for value in ([0, 24], [-24, 0], [-8, 16], [10**30, 10**30 + 24], [40, 16], [15, 39])),
    *(
        (["data_offsets"], value)
        for value in ([16], [16, 40, 64], None, "ab", {}, [16.0, 40.0], ["16", "40"], [16, 10**30])
    ),
    *((["data_offsets"], value) for value in ([False, 24], [[16], [40]], 16, [24, 48], [2**63, 2**63 + 24])),
    *(([], value) for value in (None, [], {}, 5, "F32", {"dtype": "F32"}, {"shape": [2, 3], "data_offsets": [16, 40]})),
]


@pytest.mark.parametrize("change", ENTRY_CHANGES, ids=str)
def test_forged_entries(tmp_path, change):
    entries, about, data = parts()
    keys, value = change
    for extra in (b"", bytes(8)):
        assert not outcome(tmp_path / "state", forged(rest(changed(entries, [A, *keys], value), about), data + extra))


ABOUT_CHANGES = [
    *((["format_version"], value) for value in (None, "1", 1.5, math.inf, -math.inf, math.nan, 2, 10**400, [], {})),
    *((["metadata", "t", 0, "__tensor__"], value) for value in ("metadata[1]", A, None, 5, [], {}, "")),
    *((["metadata"], value) for value in ({"__tensor__": A}, None, 5, [], [{"__tensor__": "metadata[0]"}] * 2, {})),
    *((["num_models"], value) for value in (3, 2.5, None, "2", [2])),
]


@pytest.mark.parametrize("change", ABOUT_CHANGES, ids=str)
def test_forged_metadata(tmp_path, change):
    entries, about, data = parts()
    assert outcome(tmp_path / "state", forged(rest(entries, changed(about, *change)), data)) < 3
    for gone in about:
        if gone != "package_version":
            short = {name: value for name, value in about.items() if name != gone}
            assert outcome(tmp_path / "state", forged(rest(entries, short), data)) < 2
    # No tensor can have such a shape, although it has no bytes.
    for shape in ([2**62, 2**62, 0], [2**70, 0], [0, 10**400]):
        large = changed(entries, ["state['c']", "shape"], shape)
        assert outcome(tmp_path / "state", forged(rest(large, about), data)) <= 1


def test_metadata_that_is_a_tensor_as_a_whole(tmp_path):
    entries, about, data = parts()
    about = changed(about, ["metadata"], {}) | {"__tensor__": "metadata[0]"}
    (tmp_path / "state").write_bytes(forged(rest(entries, about), data))
    with pytest.raises(hfta.errors.CheckpointError, match="is damaged"):
        storage.read(tmp_path / "state")


def test_forged_headers(tmp_path):
    entries, about, data = parts()
    path = tmp_path / "state"
    own = rest(entries, about)
    deep = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000]
    last = {**entries, "more": {"dtype": "U8", "shape": [2, 4], "data_offsets": [len(data), len(data) + 8]}}
    first = {"more": {"dtype": "U8", "shape": [2, 0], "data_offsets": [0, 0]}, **entries}
    assert outcome(path, forged(rest(last, about), data + bytes(8))) == 3
    assert outcome(path, forged(rest(first, about), data)) == 3
    for header in [
        *(b"", b'"', b'"}}', b'",', b'","hfta_func":5},"a":1}', own[:-1], own + b"}", own[:-1] + b","),
        *(b'","a":' + nest + b"}}" for nest in deep),
        *(own[:-1] + b',"a":' + nest + b"}" for nest in deep),
        *(rest(entries, nest.decode()) for nest in deep),
        *(rest(entries, json.dumps(about)[:-1] + ',"a":' + nest.decode() + "}") for nest in deep),
        *(rest(entries, text) for text in ("", "5", "null", "[]", '"a"', "[" + json.dumps(about) + "]", "9" * 5000)),
        *(own.replace(b"state", other) for other in (b"\xff\xfe", b"\xed\xa0\x80", b"\x00")),
        # Data that nothing names, and two names for the same.
        rest({name: entry for name, entry in entries.items() if name != A}, about),
        rest({**entries, "b": entries[A]}, about),
        rest(last, about),
    ]:
        assert not outcome(path, forged(header, data)), header[:99]


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.sampled_from([A, "F32", "U8", "metadata[0]"])
    )
    | st.integers(-9, 99)
    | st.integers(-(2**70), 2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
fuzzed = settings(derandomize=True, deadline=None, max_examples=300, database=None)


def places(tree):
    """Keys to every value in a tree of JSON."""
    yield []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else []
    for key, value in items:
        yield from ([key, *keys] for keys in places(value))


@pytest.mark.exhaustive
@fuzzed
@given(data=st.data())
def test_values_of_headers_at_random(tmp_path_factory, data):
    *trees, content = parts()
    for _ in range(data.draw(st.integers(1, 2), "changes")):
        number = data.draw(st.integers(0, 1), "tree")
        keys = data.draw(st.sampled_from([keys for keys in places(trees[number]) if keys]), "place")
        trees[number] = changed(trees[number], keys, data.draw(JSON, "value"))
    outcome(
        tmp_path_factory.getbasetemp() / "state",
        forged(rest(*trees), content + bytes(8 * data.draw(st.integers(0, 1)))),
    )


@fuzzed
@given(data=st.data(), signed=st.booleans())
def test_bytes_of_files_at_random(tmp_path_factory, data, signed):
    entries, about, content = parts()
    header = bytearray(rest(entries, about))
    whole = bytearray(forged(bytes(header), content))
    target = header if signed else whole
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        place = data.draw(st.integers(0, len(target)), "place")
        target[place : place + data.draw(st.integers(0, 9), "length")] = data.draw(st.binary(max_size=9), "bytes")
    if signed:
        outcome(tmp_path_factory.getbasetemp() / "state", forged(bytes(header), content))
    elif whole != forged(bytes(header), content):
        assert outcome(tmp_path_factory.getbasetemp() / "state", bytes(whole)) < 2


JSON_TO_SAVE = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=9,
)


@pytest.mark.exhaustive
@fuzzed
@given(metadata=st.dictionaries(st.text(max_size=3), JSON_TO_SAVE, max_size=3), names=st.sets(st.text(), max_size=4))
def test_what_is_written_is_read(tmp_path_factory, metadata, names):
    path = tmp_path_factory.getbasetemp() / "state"
    tree = {name: torch.full((2, number), number) for number, name in enumerate(sorted(names))} or LIKE
    hfta.save(tree, path, metadata=metadata)
    assert hfta.files.read_metadata(path)["metadata"] == metadata
    assert all(torch.equal(leaf, tree[name]) for name, leaf in hfta.load(path, like=tree).items())


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
