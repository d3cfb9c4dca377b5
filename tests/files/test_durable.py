"""Checkpoints: what is saved comes back to the bit, and what is damaged never does."""

import contextlib
import itertools
import os
import pickle
import random
import sys

import optree
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from processes import output

SEEDS = [5, 3, 8, 1]
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """A layer, a norm with buffers, noise, a tied weight."""

    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.layer.weight

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.layer(x)).relu()))


def loss_fn(model, batch, hparams):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets) * hparams["weight"], {"size": model.layer.weight.abs().mean()}


def make(optimizer=None, width=3, seeds=SEEDS, **options):
    """A step and its first state."""
    step = hfta.make_train_step(
        Net(width),
        loss_fn,
        optimizer or hfta.adam(lr=hfta.schedules.step_lr([0.1, 0.2, 0.3, 0.4][: len(seeds)], 2)),
        **options,
    )
    hparams = {"weight": [1.0, 2.0, 3.0, 4.0][: len(seeds)]}
    return step, step.init(*hfta.init_params(lambda: Net(width), seeds), seeds=seeds, hparams=hparams)


def trained(steps=2, **options):
    step, state = make(**options)
    for batch in itertools.islice(loader_of(len(state.keys)), steps):
        state, _ = step(state, batch)
    return state


def loader_of(count):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(12, 3, generator=generator), torch.randn(12, 3, generator=generator)
    return hfta.ArrayLoader(data, 4, seeds=SEEDS[:count])


def bits(tree):
    """A tree's structure and all of its bytes."""
    leaves, structure = optree.tree_flatten(tree)
    plain = [torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu").copy_(leaf.detach()) for leaf in leaves]
    return structure, [(leaf.dtype, leaf.shape, leaf.untyped_storage().tolist()) for leaf in plain]


@contextlib.contextmanager
def refused(error, *fragments):
    """The block raises exactly ``error`` with every fragment in its message."""
    with pytest.raises(hfta.HFTAError) as caught:
        yield caught
    assert type(caught.value) is error, caught.value
    for fragment in fragments:
        assert fragment in str(caught.value)


OPTIMIZERS = {
    "sgd": hfta.sgd(lr=0.1, momentum=0.9),
    "adam": hfta.adam(lr=[0.1, 0.2, 0.3, 0.4]),
    "schedule": hfta.adamw(lr=hfta.schedules.warmup(hfta.schedules.cosine(0.1, T_max=9), steps=3)),
    "chain": hfta.chain(hfta.clip_grad_norm(1.0), hfta.sgd(lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_come_back(tmp_path, optimizer):
    state = trained(optimizer=OPTIMIZERS[optimizer])
    before = bits(state)
    path = tmp_path / "state.safetensors"
    hfta.save(state, path)
    like = hfta.take(make(OPTIMIZERS[optimizer])[1], [0, 1])
    untouched = bits(like)
    loaded = hfta.load(path, like=like)
    assert bits(loaded) == before == bits(state)
    assert bits(like) == untouched
    assert os.listdir(tmp_path) == ["state.safetensors"]
    # What was loaded is the caller's own, whatever becomes of the file.
    path.write_bytes(b"")
    for leaf in optree.tree_leaves(loaded):
        leaf.zero_()


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
]


def test_every_dtype_and_layout(tmp_path):
    tree = {str(dtype): torch.randn(3, 5).mul(9).abs().to(dtype) for dtype in DTYPES}
    shared = torch.randn(3, 4)
    tree["layouts"] = (
        *(torch.randn(4, 3).T, torch.randn(3, 1).expand(3, 6), torch.randn(6, 2)[::2], shared, shared, shared[:, 1]),
        *(torch.zeros(3, 0), torch.zeros(3), torch.randn(3, 2, dtype=torch.complex64).conj()),
        torch.nn.Parameter(torch.randn(3, 2)),
    )
    path = tmp_path / "tree"
    hfta.save(tree, path)
    loaded = hfta.load(path, like=tree)
    expected = optree.tree_map(lambda leaf: leaf.detach().resolve_conj(), tree)
    assert bits(loaded) == bits(expected)
    # Other tools read it.
    plain = safetensors.torch.load_file(path)
    assert len(plain) == len(optree.tree_leaves(tree))
    assert torch.equal(plain["state['torch.float32']"], tree["torch.float32"])


@pytest.mark.parametrize(("tree", "name"), [(torch.arange(3.0), "state"), ([torch.arange(3.0)], "state[0]")])
def test_any_tree(tmp_path, tree, name):
    hfta.save(tree, tmp_path / "tree")
    assert bits(hfta.load(tmp_path / "tree", like=tree)) == bits(tree)
    assert list(hfta.files.read_metadata(tmp_path / "tree")["shapes"]) == [name]


def test_another_default_device(tmp_path):
    state = trained()
    with torch.device("meta"):
        hfta.save(state, tmp_path / "state")
        assert bits(hfta.load(tmp_path / "state", like=state)) == bits(state)


def test_floats_are_cast_to_those_of_like(tmp_path):
    state = trained()
    hfta.save(state, tmp_path / "state")
    wide = optree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state)
    narrow = optree.tree_map(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, state)
    for like in (wide, narrow):
        assert bits(hfta.load(tmp_path / "state", like=like)) == bits(like)
    meta = optree.tree_map(lambda leaf: leaf.to("meta"), state)
    assert all(leaf.is_meta for leaf in optree.tree_leaves(hfta.load(tmp_path / "state", like=meta)))


def test_metadata(tmp_path):
    state = trained()
    path = tmp_path / "state"
    metadata = {"data": "digits", "split": [1, 2], "ü": None, "nested": {"tensor": "state"}}
    hfta.save(state, path, metadata=metadata)
    header = hfta.files.read_metadata(path)
    assert header["format_version"] == 1 and header["package_version"] == hfta.__version__
    assert header["num_models"] == 4 and header["seeds"] == SEEDS
    assert header["shapes"]["state.params['layer.weight']"] == [3, 3]
    assert header["hyperparameters"]["state.hparams['weight']"] == [1.0, 2.0, 3.0, 4.0]
    lrs = [values for name, values in header["hyperparameters"].items() if "'lr'" in name and len(set(values)) == 4]
    assert lrs == [[0.1, 0.2, 0.3, 0.4]]
    assert header["metadata"] == metadata
    hfta.save(hfta.models.Stacked(state.params, state.buffers), path)
    header = hfta.files.read_metadata(path)
    assert header["seeds"] is None and header["hyperparameters"] == {} and header["metadata"] == {}


def test_the_same_state_makes_the_same_file(tmp_path):
    for name in "ab":
        hfta.save(trained(), tmp_path / name, metadata={"a": 1, "b": 2})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("tree", "metadata", "error", "message"),
    [
        ({"a": 1.0}, None, hfta.errors.StackError, r"tree\['a'\] is a float; every leaf must be a tensor \[M, ...\]"),
        ({}, None, hfta.errors.StackError, "tree has no tensors"),
        ([torch.zeros(2).cdouble()], None, hfta.errors.CheckpointError, "which safetensors does not support; convert"),
        (torch.zeros(2), {"a": torch.zeros(2)}, TypeError, "Object of type Tensor is not JSON serializable"),
        (torch.zeros(2), {"a": [NAN]}, ValueError, "Out of range float values"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tree, metadata, error, message):
    with pytest.raises(error, match=message):
        hfta.save(tree, tmp_path / "tree", metadata=metadata)
    assert os.listdir(tmp_path) == []


def test_hyperparameters_without_a_number(tmp_path):
    state = trained()._replace(hparams={"weight": torch.tensor([NAN, INF, -INF, 1.5])})
    hfta.save(state, tmp_path / "state")
    found = hfta.files.read_metadata(tmp_path / "state")["hyperparameters"]["state.hparams['weight']"]
    assert found == ["nan", "inf", "-inf", 1.5]
    assert bits(hfta.load(tmp_path / "state", like=state)) == bits(state)


def test_another_architecture_names_every_path(tmp_path):
    path = tmp_path / "state"
    hfta.save(trained(optimizer=OPTIMIZERS["sgd"]), path)
    _, like = make(hfta.sgd(lr=0.1, weight_decay=[0.1] * 4), width=2)
    del like.buffers["norm.running_var"]
    like = like._replace(step=like.step.float())
    before = bits(like)
    with refused(hfta.errors.StateError) as caught:
        hfta.load(path, like=like)
    assert bits(like) == before
    first, *lines = str(caught.value).split("\n")
    cure = "pass a state of the same model, optimizer and step options as were saved:"
    assert first == f"{path} does not fit like: 13 paths differ; {cure}" and len(lines) == 13
    assert {
        "  state.params['layer.weight'] is [3, 3] per member in the file, [2, 2] in like",
        "  state.opt_state.hyperparams['weight_decay'] is only in like",
        "  state.step is torch.int64 in the file, torch.float32 in like",
        "  state.buffers['norm.running_var'] is only in the file",
        *(f"  state.opt_state.momentum['{name}'] is only in the file" for name in like.params),
    } <= {*lines}


def test_members_of_a_file(tmp_path):
    state = trained()
    path = tmp_path / "state"
    hfta.save(state, path)
    for members in (2, [3, 0], slice(1, 3), torch.tensor([True, False, True, False]), [-1, -1]):
        assert bits(hfta.load(path, like=state, members=members)) == bits(hfta.take(state, members))
    with refused(hfta.errors.StackError, "selects no members of an array of 4: index 4 is out of bounds"):
        hfta.load(path, like=state, members=[0, 4])


def test_no_file(tmp_path):
    for read in (lambda path: hfta.load(path, like=torch.zeros(2)), hfta.files.read_metadata):
        with pytest.raises(FileNotFoundError, match="nothing"):
            read(tmp_path / "nothing")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_foreign_files(tmp_path, monkeypatch):
    state, marker = trained(), tmp_path / "executed"
    other = "is not a file of hfta_func.save, or its header is damaged; a module loads a plain state_dict, and"
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "plain.safetensors")
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "described.safetensors", {"checksum": "0" * 64})
    torch.save({"a": Trap(marker)}, tmp_path / "torch.pt")
    torch.save({"a": Trap(marker)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    contents = {"pickle.pkl": pickle.dumps(Trap(marker)), "empty": b"", "text": b"M = 3\n" * 99, "long": b"\xff" * 9999}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    messages = {name: "is damaged" if name.startswith("described") else other for name in os.listdir(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(hfta.files.storage, "_FORMAT", 2)
        hfta.save(state, tmp_path / "future")
    later = f"has format version 2, but hfta_func {hfta.__version__} reads versions up to 1; install a later hfta_func"
    before = bits(state)
    for name, message in (messages | {"future": later}).items():
        for read in (lambda path: hfta.load(path, like=state), hfta.files.read_metadata):
            with refused(hfta.errors.CheckpointError, str(tmp_path / name), message):
                read(tmp_path / name)
    assert bits(state) == before and not marker.exists()


def damaged(content, generator):
    """Files that are not ``content`` any more; every bit that flips is another test."""
    start = 8 + int.from_bytes(content[:8], "little")
    place, length = generator.randrange(len(content)), generator.randrange(1, 99)
    yield content[:place]
    yield content[: generator.randrange(start)]
    yield content[:-length]
    yield content + generator.randbytes(length)
    yield content[:place] + content[place + length :] + b" "
    yield content[:place] + generator.randbytes(length) + content[place + length :]


def test_damaged_files(tmp_path):
    state = trained()
    path = tmp_path / "state"
    hfta.save(state, path, metadata={"data": "digits"})
    whole, before = path.read_bytes(), bits(state)
    generator = random.Random(0)
    contents = set(itertools.chain.from_iterable(damaged(whole, generator) for _ in range(60))) - {whole}
    assert len(contents) > 300
    kinds = set()
    for content in contents:
        path.write_bytes(content)
        with refused(hfta.errors.CheckpointError, f"{path} is ") as caught:
            hfta.load(path, like=state)
        kinds.add(str(caught.value))
        # The header alone may be whole; if not, that too is one clear error.
        with contextlib.suppress(hfta.errors.CheckpointError):
            assert isinstance(hfta.files.read_metadata(path), dict)
    assert len(kinds) == 2
    assert bits(state) == before
    path.write_bytes(whole)
    assert bits(hfta.load(path, like=state)) == before


def test_every_bit_counts(tmp_path):
    tree = torch.arange(3.0)
    path = tmp_path / "state"
    hfta.save(tree, path)
    whole = path.read_bytes()
    for place, bit in itertools.product(range(len(whole)), range(8)):
        content = bytearray(whole)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        with refused(hfta.errors.CheckpointError, str(path)):
            hfta.load(path, like=tree)


FULL_DISK = """
import os, resource, sys
import torch
import hfta_func as hfta

disk = sys.argv[1]
path = os.path.join(disk, "state")
small, large = {"a": torch.zeros(3, 100)}, {"a": torch.zeros(3, 1_000_000)}

def refused(cause):
    before = open(path, "rb").read()
    try:
        hfta.save(large, path)
    except hfta.errors.CheckpointError as error:
        end = "its former content is unchanged. Save to an existing, writable directory with free space"
        assert str(error) == f"{path} cannot be written: {cause}; {end}", error
    else:
        raise AssertionError("nothing was refused")
    assert open(path, "rb").read() == before and os.listdir(disk) == ["state"]
    assert torch.equal(hfta.load(path, like=small)["a"], small["a"])

hfta.save(small, path)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
refused("File too large")
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_disk_that_is_full(tmp_path):
    output(FULL_DISK, tmp_path, PYTHONWARNINGS="error")


def test_directories_that_are_not_there(tmp_path):
    (tmp_path / "file").touch()
    for path, cause in (("missing/state", "No such file or directory"), ("file/state", "Not a directory")):
        message = f"{tmp_path / path} cannot be written: {cause}", "an existing, writable directory"
        with refused(hfta.errors.CheckpointError, *message):
            hfta.save(torch.zeros(2), tmp_path / path)
    assert os.listdir(tmp_path) == ["file"]


def test_exported_models_are_plain(tmp_path):
    state, model = trained(), Net()
    for index in (0, 2, -1):
        exported = hfta.export_model(model, state, index)
        assert type(exported) is Net and exported.head.weight is exported.layer.weight
        for path, value in exported.state_dict().items():
            stacked = {**state.params, **state.buffers}
            assert torch.equal(value, stacked.get(path, state.params["layer.weight"])[index])
            assert value.untyped_storage().nbytes() == value.nbytes
    # Plain PyTorch reads it, without this package.
    torch.save(exported.state_dict(), tmp_path / "model.pt")
    plain = Net()
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    inputs = torch.randn(5, 3)
    assert torch.equal(plain.eval()(inputs), exported.eval()(inputs))
    stacked = hfta.models.Stacked(state.params, state.buffers)
    assert torch.equal(hfta.export_model(model, stacked, 1).layer.bias, state.params["layer.bias"][1])
    with refused(hfta.errors.StackError, "selects no members of an array of 4: index 4 is out of bounds"):
        hfta.export_model(model, state, 4)
    with refused(hfta.errors.StackError, "'layer.weight' is [3, 3] per member but [2, 2] in the model"):
        hfta.export_model(Net(2), state, 0)
