"""The examples: models of the published sizes, both ways to train, the command line, and what it refuses."""

import csv
import functools
import importlib
import itertools
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import optree
import pytest
import torch
from examples.bert.model import BERT
from examples.common import fused, solo
from examples.common.flags import AdamFlags, parse
from examples.dcgan import fused as gan
from examples.dcgan.model import Discriminator, Generator, on_fake, on_real
from examples.mobilenet.model import MobileNet
from examples.pointnet.model import PointNetClassifier
from examples.resnet.model import ResNet18
from examples.transformer.model import TransformerLM
from matplotlib import pyplot
from torch import nn

import hfta_func as hfta
from hfta_func.testing import assert_matches_solo

SMALL = ["--size", "small", "--limit", "24", "--batch-size", "8", "--epochs", "1"]

RUNS = {
    "resnet": ["--lr", "0.1", "0.3", "1.0"],
    "mobilenet v3": ["--lr", "0.01", "0.003", "0.001", "--beta1", "0.9", "0.8", "0.7", "--flip"],
    "mobilenet v2": ["--version", "v2", "--lr", "0.01", "0.003", "0.001", "--weight_decay", "0", "0.01", "0.1"],
    "pointnet cls": ["--lr", "0.01", "0.003", "0.001", "--points", "32", "--feature-transform"],
    "pointnet seg": ["--lr", "0.01", "0.003", "0.001", "--points", "32", "--task", "seg"],
    "transformer": ["--lr", "1", "3", "0.3", "--length", "16", "--gamma", "0.5", "0.9", "0.1"],
    "bert masked": ["--lr", "1", "3", "0.3", "--length", "16"],
    "bert next": ["--lr", "1", "3", "0.3", "--length", "16", "--objective", "next"],
    "dcgan": ["--lr", "0.0002", "0.0001", "0.001", "--beta1", "0.5", "0.9", "0.2"],
}
"""Flags for three members of each workload; the first word is the example."""

SEEDS = ["--seeds", "3", "4", "5"]

pytestmark = pytest.mark.usefixtures("one_thread")


def only(member, argv):
    """The flags of one member of three."""
    found, flag = {}, ""
    for word in argv:
        flag = word if word.startswith("--") else flag
        found.setdefault(flag, []).extend([] if word == flag else [word])
    return [
        w
        for flag, values in found.items()
        for w in (flag, *(values[member : member + 1] if len(values) == 3 else values))
    ]


@pytest.fixture
def call(tmp_path, capsys):
    """Run an example in this process: exit status, lines printed, lines of errors, rows of the table."""

    def call(name, *argv):
        example = name.split()[0]
        main = importlib.import_module(f"examples.{example}.main").main
        status = main([*RUNS.get(name, []), *SMALL, "--out", str(tmp_path), "--data", str(tmp_path / "data"), *argv])
        out, err = (stream.splitlines() for stream in capsys.readouterr())
        table = tmp_path / f"{example}.csv"
        rows = list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []
        return status, out, err, rows

    return call


@pytest.mark.parametrize(
    ("make", "count"),
    [
        # As torchvision counts them, with ImageNet's classes.
        (lambda: ResNet18(1000), 11_689_512),
        (lambda: MobileNet("v2", 1000), 3_504_872),
        (lambda: MobileNet("v3s", 1000), 2_542_856),
        (lambda: MobileNet("v3l", 1000), 5_483_032),
        # 3.5 million in the paper.
        (lambda: PointNetClassifier(40), 3_471_473),
        # As in PyTorch's tutorial.
        (Generator, 3_576_704),
        (Discriminator, 2_765_568),
        # Tables of tokens and places with their norm, eight layers, the head. 41.4 million; segments are left out.
        (lambda: BERT(30522, 512), (30522 + 512 + 2) * 512 + 8 * 3_152_384 + 512 * 513 + 2 * 512 + 30522),
        # Tables before and after, and two layers in which everything is 128 wide.
        (lambda: TransformerLM(33278, 32), 33278 * 257 + 2 * (6 * 128 * 129 + 4 * 128)),
    ],
)
def test_published_sizes(make, count):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == count


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_array_then_a_member_of_it_then_plain_pytorch(name, call, tmp_path):
    status, lines, err, rows = call(name, "--hfta", "--eval", *SEEDS)
    assert status == 0 and not err
    assert lines[0].startswith("Array of members 0 1 2: seeds 3 4 5, lr ")
    assert lines[1].startswith("Epoch 1 took ") and lines[1].endswith(" s!")
    quality, final = lines[-1].removeprefix("Final ").split(": ")
    assert [f"{float(row[quality]):.4f}" for row in rows] == final.split() and len(rows) == 3
    loss = "loss_g" if name == "dcgan" else "loss"
    assert [(row["member"], row["seed"], row["how"], row["models"]) for row in rows] == [
        (str(i), str(seed), "array", "3") for i, seed in enumerate((3, 4, 5))
    ]
    assert len({row[loss] for row in rows}) == 3 and all(float(row["seconds"]) > 0 for row in rows)
    pixels = pyplot.imread(tmp_path / f"{name.split()[0]}.png")
    assert pixels.shape[0] > 400 and pixels[..., :3].std() > 0.01

    status, lines, err, (row,) = call(name, *only(1, [*RUNS[name], *SEEDS]), "--hfta", "--eval")
    assert status == 0 and lines[0].startswith("Array of members 0: seeds 4")
    assert {k: row[k] for k in ("lr", "seed")} == {k: rows[1][k] for k in ("lr", "seed")}
    assert float(row[loss]) == pytest.approx(float(rows[1][loss]), rel=0.1 if "mobilenet" in name else 1e-3)

    status, lines, err, rows = call(name, *SEEDS)
    assert status == 0 and not err and [row["how"] for row in rows] == ["solo"] * 3
    assert sum(line.startswith("Plain PyTorch, member ") for line in lines) == 3
    assert len(lines[-1].removeprefix(f"Final {quality}: ").split()) == 3
    assert len({row[loss] for row in rows}) == 3
    # Another order of data and other noise, but the same weights at first.
    assert float(rows[1][loss]) == pytest.approx(float(row[loss]), rel=0.3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in RUNS if name != "dcgan"])
def test_member_i_is_the_solo_run_i(name):
    main = importlib.import_module(f"examples.{name.split()[0]}.main")
    (own,) = parse(main.Flags, [*RUNS[name], *SMALL, *SEEDS, "--hfta"], None)
    task = main.task(own.flags)
    step, state, loader = fused.prepare(task, own.flags, torch.device("cpu"))
    assert len(loader) == 3
    torch.manual_seed(4)
    for path, parameter in task.factory().named_parameters():
        assert torch.equal(state.params[path][1], parameter)
    state = step.init(double(state.params), double(state.buffers), seeds=own.flags.seeds)
    batches = double(list(itertools.islice(loader, 3)))
    if task.optimizer == "adadelta":
        assert_matches_solo(step, state, batches)
        return
    # Adam makes steps of the rounding of gradients that should be zero, as of a bias before batch normalisation: losses
    # are compared, which such parameters do not change.
    losses = [run_through(step, hfta.take(state, [member]), hfta.take(batches, [member])) for member in range(3)]
    torch.testing.assert_close(run_through(step, state, batches), torch.cat(losses, 1), rtol=1e-8, atol=0)


def run_through(step, state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return torch.stack(losses)


def double(tree):
    return optree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def test_dcgan_trains_as_an_ordinary_loop():
    (own,) = parse(importlib.import_module("examples.dcgan.main").Flags, [*RUNS["dcgan"], *SMALL, *SEEDS], None)
    makers = functools.partial(Generator, 16, 8, 8), functools.partial(Discriminator, 16, 8)
    step, state = gan.prepare(*makers, 8, own.flags)
    state = double(state)
    begin = optree.tree_map(torch.clone, state)
    batches = torch.rand(4, 3, 6, 3, 16, 16, dtype=torch.float64)
    for batch in batches:
        state, metrics = step(state, (batch,))
    models = [
        [
            hfta.unstack_params(make().double(), *each)
            for make, each in zip(makers, (s.generator, s.discriminator), strict=True)
        ]
        for s in (begin, state)
    ]
    for i, (lr, beta1) in enumerate(zip(own.flags.lr, own.flags.beta1, strict=True)):
        generator, discriminator = (both[i] for both in models[0])
        options = {"lr": lr, "betas": (beta1, 0.999)}
        adams = [torch.optim.Adam(model.parameters(), **options) for model in (generator, discriminator)]
        for number, batch in enumerate(batches):
            key = hfta.random.fold_in(begin.keys[i], number)
            fake = generator(hfta.random.normal(key, (6, 8, 1, 1), dtype=torch.float64))
            adams[1].zero_grad()
            loss_d = on_real(discriminator(batch[i])) + on_fake(discriminator(fake.detach()))
            loss_d.backward()
            adams[1].step()
            adams[0].zero_grad()
            loss_g = on_real(discriminator(fake))
            loss_g.backward()
            adams[0].step()
        torch.testing.assert_close(metrics["loss_d"][i], loss_d.detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(metrics["loss_g"][i], loss_g.detach(), rtol=1e-9, atol=0)
        for trained, expected in zip((both[i] for both in models[1]), (generator, discriminator), strict=True):
            torch.testing.assert_close(trained.state_dict(), expected.state_dict(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["adam", "adadelta"])
def test_both_ways_have_the_same_optimizer(name):
    argv = (
        "--lr 0.1 0.2 --beta1 0.9 0.5 --beta2 0.99 0.9 --weight-decay 0 0.1 --gamma 0.5 0.3 --step-size 1 2 --seeds 0 1"
    )
    (own,) = parse(AdamFlags, argv.split(), None)
    optimizer = fused.OPTIMIZERS[name](own.flags.per_model(), 3)
    params, grads = ({"w": torch.randn(2, 4, dtype=torch.float64)} for _ in range(2))
    moved, state = params, optimizer.init(params)
    for _ in range(4 * 3):
        updates, state = optimizer.update(grads, state, moved)
        moved = hfta.apply_updates(moved, updates)
    for member in range(2):
        model = nn.Linear(4, 1, bias=False).double()
        model.weight.data.copy_(params["w"][member])
        alone, schedule = solo.make_optimizer(name, model, own.flags.member(member))
        model.weight.grad = grads["w"][member : member + 1].clone()
        for _ in range(4):
            for _ in range(3):
                alone.step()
            schedule.step()
        torch.testing.assert_close(model.weight.data[0], moved["w"][member], rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.soak(ids="way1|resnet")
@pytest.mark.parametrize("name", ["resnet", "dcgan"])
@pytest.mark.parametrize("way", [["--hfta"], []])
def test_a_run_that_is_resumed_ends_the_same(name, way, call, tmp_path):
    def last(*argv):
        status, lines, err, rows = call(name, *way, *argv)
        assert status == 0 and not err
        return lines[-1], [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    whole = last("--epochs", "3", "--eval")
    keep = ["--save", str(tmp_path / "kept"), "--eval"]
    last("--epochs", "2", *keep)
    assert last("--epochs", "3", "--resume", *keep) == whole
    # Without --resume it begins anew.
    _, anew = last("--epochs", "1", *keep)
    first, whole_first = (
        [[row[name] for name in row if name.startswith("loss")] for row in rows if row["epoch"] == "1"]
        for rows in (anew, whole[1])
    )
    assert all(first) and first == whole_first
    models = sorted(path.name for path in (tmp_path / "kept").glob("*.pt"))
    kinds = ["model"] if name == "resnet" else ["discriminator", "generator"]
    assert models == [f"{name}-{kind}-{member}.pt" for kind in kinds for member in range(3)]
    assert all(torch.load(tmp_path / "kept" / model, weights_only=True) for model in models)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["transformer", "dcgan"])
def test_compiled(name, call, monkeypatch):
    _, eager, _, _ = call(name, "--hfta")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    status, lines, err, _ = call(name, "--hfta", "--compile")
    assert status == 0 and not err
    found, expected = (torch.tensor([float(n) for n in line[-1].split()[2:]]) for line in (lines, eager))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert call(name, *only(0, RUNS[name]), "--compile")[0] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["resnet", "transformer", "dcgan"])
@pytest.mark.parametrize("way", [["--hfta"], []])
def test_mixed_precision_and_tests_after_every_epoch(name, way, call):
    loss = "loss_g" if name == "dcgan" else "loss"
    _, final, _, full = call(name, *way, "--epochs", "2")
    _, tested, _, others = call(name, *way, "--epochs", "2", "--eval")
    assert [row[loss] for row in full] == [row[loss] for row in others] and final[-1] == tested[-1]
    status, _, err, rows = call(name, *way, "--epochs", "2", "--amp")
    assert status == 0 and not err
    for row, expected in zip(rows, full, strict=True):
        assert row[loss] != expected[loss]
        assert float(row[loss]) == pytest.approx(float(expected[loss]), rel=0.1)


@pytest.mark.exhaustive
# What is imported meanwhile does not stay, because it knows other modules than what was imported before.
@mock.patch.dict(sys.modules)
def test_plain_pytorch_imports_nothing_of_the_package(call, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("examples", "hfta_func")]:
        del sys.modules[name]
    sys.modules["hfta_func"] = None
    # Curves are drawn by the package's plot, once training is over; without it, nothing is trained.
    run = importlib.import_module("examples.common.run")
    monkeypatch.setattr(run, "_check", lambda flags: None)
    monkeypatch.setattr(run, "_draw", lambda rows, path: path)
    for name in RUNS:
        assert call(name, *only(0, RUNS[name]))[0] == 0
    refuses(call, "import of hfta_func halted", "resnet", "--hfta")


# Run by path


EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*/main.py"), EXAMPLES / "digits.py", EXAMPLES / "convergence.py"])

RUN_EACH = """
import pathlib, runpy, sys
path, failed = list(sys.path), []
for script in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]
    # As Python itself runs a file.
    sys.path[:], sys.argv = [str(pathlib.Path(script).parent), *path[1:]], [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        failed += [script] if end.code else []
sys.exit(" ".join(failed) or 0)
"""


@pytest.mark.exhaustive
def test_every_example_runs_by_its_path(tmp_path):
    command = [sys.executable, "-c", RUN_EACH, *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(SCRIPTS) > 12


# Ctrl-C


def press_in(monkeypatch, where, numbers):
    """Ctrl-C during some calls of a function, counted from 1."""
    module, _, name = where.rpartition(".")
    original, calls = getattr(importlib.import_module(module), name), itertools.count(1)

    def pressing(*args):
        for _ in range(numbers.count(next(calls))):
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(where, pressing)


LOSS, TEST = "examples.resnet.main.cross_entropy", "examples.resnet.main.accuracy"
TWO_ARRAYS = ["--batch-size", "8", "8", "6", *SEEDS]


@pytest.mark.exhaustive
@pytest.mark.soak(ids="second|serial")
@pytest.mark.parametrize(
    ("where", "number", "presses", "argv", "finished"),
    [
        # Three steps and three batches of tests an epoch.
        pytest.param(LOSS, 5, 2, [], 1, id="twice"),
        pytest.param(LOSS, 8, 1, ["--epochs", "2"], 2, id="in the second array"),
        pytest.param(TEST, 2, 1, [], 3, id="in the last test"),
    ],
)
@pytest.mark.parametrize("way", ["array", "solo"])
def test_ctrl_c_keeps_what_is_finished(where, number, presses, argv, finished, way, call, tmp_path, monkeypatch):
    flags = ["--epochs", "3", *TWO_ARRAYS, *argv, *(["--hfta"] if way == "array" else [])]
    whole = call("resnet", *flags)
    (tmp_path / "resnet.csv").unlink()
    save = ["--save", str(tmp_path / "kept")]
    with monkeypatch.context() as patch:
        # The first step of an array also calls the loss for two members alone.
        press_in(patch, where, [number + 2 * (way == "array" and where == LOSS)] * presses)
        status, lines, err, rows = call("resnet", *flags, *save)
    assert status == 130 and len(err) == 1 and not any(line.startswith("Final") for line in lines)
    table = f"; the epochs that are finished: {tmp_path / 'resnet.csv'}"
    assert err[0] == f"resnet: interrupted{table}; --resume goes on"
    members = ["0", "1"] if way == "array" else ["0"]
    expected = [(member, str(epoch)) for member in members for epoch in range(1, finished + 1)]
    assert [(row["member"], row["epoch"]) for row in rows[: len(expected)]] == expected
    again = call("resnet", *flags, *save, "--resume")
    assert again[0] == 0 and again[1][-1] == whole[1][-1]
    assert [row["loss"] for row in again[3]] == [row["loss"] for row in whole[3]]
    assert not [*tmp_path.glob("**/*.part")] and not [*tmp_path.glob("**/*.tmp")]


# Bad input


def refuses(call, message, name, *argv):
    status, out, err, _ = call(name, *argv)
    assert status == 2 and len(err) == 1 and not any(line.startswith("Final") for line in out)
    assert err[0].startswith(f"{name.split()[0]}: error: ") and message in err[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "resnet --lr 0.1 0.2 --seeds 1 2 3",
            "--seeds has 3 values but --lr has 2; give one value for all members, or",
        ),
        ("resnet --lr fast", "argument --lr: invalid float value: 'fast'"),
        ("dcgan --hfta --chunk-size auto", "--chunk-size auto: two networks take turns"),
        ("resnet --epochs 0", "argument --epochs: 0 is too small; the least is 1"),
        ("resnet --resume", "--resume needs --save DIR"),
        ("mobilenet --beta1 0.5 1 --hfta", "model 1: beta1 is 1.0"),
        ("pointnet --task seg --dataset modelnet40", "ModelNet40 has no parts"),
        ("pointnet --dataset shapenet", "get it from https://shapenet"),
        ("resnet --device xla", "torch_xla is not installed"),
        ("resnet --device cuda", "PyTorch finds no CUDA device here"),
    ],
)
def test_refused(argv, message, call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    refuses(call, message, *argv.split())


def test_files_that_are_not_what_they_should_be(call, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(b"something else")
    refuses(call, "instead of sha256:c4a38c50a1bc", "resnet", "--dataset", "cifar10")
    for way, kept in (["--hfta"], "resnet-array-0.run"), ([], "resnet-solo-0.run"):
        (tmp_path / kept).write_bytes(b"something else")
        refuses(call, kept, "resnet", *only(0, RUNS["resnet"]), *way, "--save", str(tmp_path), "--resume")
    refuses(call, "Not a directory", "resnet", "--out", str(tmp_path / "data" / "cifar-10-binary.tar.gz" / "out"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [["--hfta"], []])
def test_a_run_goes_on_with_the_flags_that_it_was_begun_with(way, call, tmp_path):
    keep = [*way, "--save", str(tmp_path / "kept"), "--resume", "--lr", "0.1", "0.3"]
    assert call("mobilenet", *keep)[0] == 0
    members = "array-0-1" if way else "solo-1"
    kept = tmp_path / "kept" / f"mobilenet-{members}.run"
    for flag, given, now, then in (
        ("--lr", ["0.1", "0.2"], *(("0.1 0.2", "0.1 0.3") if way else ("0.2", "0.3"))),
        ("--beta1", ["0.9", "0.8"], *(("0.9 0.8", "0.9 0.9") if way else ("0.8", "0.9"))),
        ("--seeds", ["0", "7"], *(("0 7", "0 0") if way else ("7", "0"))),
        ("--batch-size", ["8", "8"], "8", "8"),
    ):
        if now != then:
            message = f"{flag} is {now}, but {kept} was begun with {then}; give that again, or remove the file"
            refuses(call, message, "mobilenet", *keep, flag, *given)
    refuses(call, "--amp is True, but ", "mobilenet", *keep, "--amp")
    refuses(call, "--limit is 16, but ", "mobilenet", *keep, "--limit", "16")
    status, lines, _, _ = call("mobilenet", *keep, "--epochs", "2", "--eval")
    assert status == 0 and not any("Epoch 1" in line for line in lines)
    kept.with_suffix(".json").unlink()
    refuses(call, f"{kept}, is missing or damaged; remove both", "mobilenet", *keep)
    # Without --resume it begins anew, with any flags.
    assert call("mobilenet", *keep[: keep.index("--resume")], "--lr", "0.5", "0.6")[0] == 0
    assert call("mobilenet", *keep, "--lr", "0.5", "0.6")[0] == 0


@pytest.mark.parametrize("package", ["hfta_func", "pandas", "matplotlib"])
def test_what_the_picture_needs_is_missed_before_training(package, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    message = f"the picture needs {package}, which is not installed; pip install 'hfta_func[examples]'"
    assert call("resnet") == (2, [], [f"resnet: error: {message}"], [])


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [["--hfta"], [], ["--hfta", "--compile"], ["--compile"]])
def test_batches_too_small_for_batch_normalisation(way, call, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    message = "--batch-size 1 --limit 24: batch normalisation cannot train on one value per channel"
    refuses(call, message, "resnet", "--batch-size", "1", *way)


@pytest.mark.parametrize("way", [["--hfta"], []])
def test_out_of_memory_is_told_and_other_failures_are_not_hidden(call, monkeypatch, way):
    loss = "examples.resnet.main.cross_entropy"
    monkeypatch.setattr(loss, lambda model, batch: model(torch.empty(1 << 40, *batch[0].shape[1:])).sum())
    message = (
        f"out of memory with M = {3 if way else 1} models at once and batches of 8; hfta.plan(step, state, batch) "
    )
    refuses(call, message, "resnet", *way)

    def broken(model, batch):
        raise RuntimeError("broken")

    monkeypatch.setattr(loss, broken)
    with pytest.raises(RuntimeError, match="broken"):
        call("resnet", *way)
