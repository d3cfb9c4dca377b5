"""The order of rooms: what may import what, how long a file is, and what an import of the package does."""

import ast
import pathlib
import subprocess
import sys

import pytest
import torch

import hfta_func as hfta

SOURCE = pathlib.Path(hfta.__file__).parent

# From bottom to top. In an ordered floor a file may import those listed before it; in the others it imports none of
# them, so that families of operators and optimizers stay apart. Every file has its place here.
ORDERED, APART = True, False
FLOORS = [
    (ORDERED, ["_types", "_errors", "_storage"]),
    (ORDERED, ["_tree", "_batch", "_gradient", "_chunks", "random", "allocator"]),
    (ORDERED, ["_composites", "_draws", "_routing", "_checkpoint", "_structure"]),
    (ORDERED, ["rules/_layout", "rules/_affine", "rules/_products", "rules/_lowering", "rules/_choice"]),
    (
        ORDERED,
        ["rules/_registry", "rules/_operator", "rules/_recurrence", "optim/_base", "optim/_leafwise", "schedules"],
    ),
    (
        APART,
        [
            *("rules/activation", "rules/attention", "rules/composite", "rules/conv", "rules/ctc", "rules/distance"),
            *("rules/embedding", "rules/linear", "rules/loss", "rules/norm", "rules/norm_batch", "rules/pooling"),
            *("rules/recurrent", "rules/resampling", "rules/shape"),
            *(
                "optim/adadelta",
                "optim/adagrad",
                "optim/adam",
                "optim/adamax",
                "optim/lamb",
                "optim/lion",
                "optim/muon",
            ),
            *("optim/nadam", "optim/radam", "optim/rmsprop", "optim/sgd", "optim/transforms", "optim/wrappers"),
        ],
    ),
    (APART, ["rules/__init__", "optim/__init__"]),
    (ORDERED, ["stack", "functional", "transforms"]),
    (ORDERED, ["_loss", "failures", "amp", "train", "evaluate", "data"]),
    (ORDERED, ["history", "checkpoint", "callbacks", "fit", "plan"]),
    (ORDERED, ["plot", "testing"]),
    (ORDERED, ["__init__"]),
]
FLOOR = {file: number for number, (_, files) in enumerate(FLOORS) for file in files}

FILES = {str(path.relative_to(SOURCE).with_suffix("")): path for path in sorted(SOURCE.rglob("*.py"))}


def file_of(module, names):
    """The files that ``from module import names`` reads, as keys of FILES."""
    base = module.split(".")[1:]
    for name in names or [None]:
        path = "/".join([*base, name] if name else base)
        if path in FILES:
            yield path
        elif f"{path}/__init__".lstrip("/") in FILES:
            yield f"{path}/__init__".lstrip("/")
        elif "/".join(base) in FILES:
            yield "/".join(base)
        else:
            yield "/".join([*base, "__init__"])


def imports(file, source):
    """Every file of the package that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}.py:{node.lineno}: write imports in full"
            if (node.module or "").split(".")[0] == "hfta_func":
                yield from file_of(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hfta_func":
                    yield from file_of(alias.name, [])


def may_import(file, other):
    """Whether the order of rooms lets ``file`` import ``other``."""
    rooms = {"rules", "optim"}
    if {file.split("/")[0], other.split("/")[0]} == rooms and "/" in file and "/" in other:
        return False
    if FLOOR[file] != FLOOR[other]:
        return FLOOR[other] < FLOOR[file]
    ordered, files = FLOORS[FLOOR[file]]
    # Schedules stand beside the contract of optimizers, not on it.
    return ordered and files.index(other) < files.index(file) and file != "schedules"


def test_every_file_has_its_place():
    assert set(FILES) == set(FLOOR), f"give {sorted(set(FILES) ^ set(FLOOR))} a place in FLOORS, or take it out"
    assert len(FLOOR) == sum(len(files) for _, files in FLOORS)


@pytest.mark.parametrize("file", FILES)
def test_files_import_from_below_only(file):
    found = set(imports(file, FILES[file].read_text()))
    assert not [other for other in found if not may_import(file, other)]


def test_the_walk_sees_every_way_to_import():
    source = """
import hfta_func
import hfta_func.optim.sgd
from hfta_func import random, take
from hfta_func.rules._registry import install
def late():
    from hfta_func import rules
    from hfta_func.optim import adam as other
"""
    assert set(imports("example", source)) == {
        *("__init__", "optim/sgd", "random", "rules/_registry", "rules/__init__", "optim/adam"),
    }


@pytest.mark.parametrize(
    ("file", "other"),
    [
        ("rules/conv", "rules/norm"),
        ("optim/adam", "optim/sgd"),
        ("optim/_base", "rules/_layout"),
        ("rules/conv", "optim/_base"),
        ("rules/__init__", "optim/__init__"),
        ("_tree", "random"),
        ("schedules", "optim/_base"),
        ("stack", "functional"),
        ("stack", "__init__"),
        ("functional", "train"),
        ("fit", "plot"),
        ("random", "_routing"),
    ],
)
def test_the_table_forbids(file, other):
    assert not may_import(file, other)


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_two_rooms(file):
    assert len(FILES[file].read_text().splitlines()) <= 400


def test_there_is_no_room_for_odds_and_ends():
    assert not [
        file for file in FILES if file.split("/")[-1].strip("_") in ("utils", "util", "helpers", "misc", "common")
    ]


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_does_nothing():
    in_a_new_process("""
import sys
import torch
kernels = lambda: torch._C._dispatch_dump("aten::convolution")
before, modules = kernels(), set(sys.modules)
state = torch.get_rng_state()
import hfta_func
new = set(sys.modules) - modules
heavy = ("torch._inductor", "torch._dynamo", "pandas", "matplotlib", "scipy", "sklearn")
assert not [name for name in new if name.startswith(heavy)], sorted(new)
assert not hfta_func.rules.is_installed()
assert kernels() == before
assert torch.equal(torch.get_rng_state(), state)
assert torch.get_num_threads() and not torch._C._functorch.peek_interpreter_stack()
""")


def test_uninstall_restores_the_kernels_of_torch():
    in_a_new_process("""
import torch
import hfta_func as hfta
from hfta_func.rules._registry import RULES
# The first vmap of a process registers PyTorch's own decompositions.
torch.func.vmap(torch.sin)(torch.ones(2))
kernels = lambda: {op: torch._C._dispatch_dump("aten::" + op) for op in RULES}
own = kernels()
for _ in range(2):
    hfta.rules.install()
    hfta.rules.install()
    assert hfta.rules.is_installed()
    replaced = kernels()
    assert all(replaced[op] != own[op] for op in RULES)
    hfta.rules.uninstall()
    hfta.rules.uninstall()
    assert not hfta.rules.is_installed()
    assert kernels() == own
""")


def test_first_use_installs():
    in_a_new_process("""
import torch
import hfta_func as hfta
hfta.vmap(torch.sin)(torch.ones(2))
assert hfta.rules.is_installed()
hfta.rules.uninstall()
step = hfta.make_train_step(torch.nn.Linear(2, 1), lambda model, batch: model(batch).mean(), hfta.sgd())
state = step.init(*hfta.stack_params([torch.nn.Linear(2, 1)]), seeds=[0])
assert not hfta.rules.is_installed()
step(state, torch.ones(1, 4, 2))
assert hfta.rules.is_installed()
""")


def test_results_are_those_of_torch_after_uninstall():
    installed = hfta.rules.is_installed()
    x, weight = torch.randn(3, 2, 4, 6, 6).double(), torch.randn(3, 5, 4, 3, 3).double()
    expected = torch.stack([torch.conv2d(*pair) for pair in zip(x, weight, strict=True)])
    try:
        for change in (hfta.rules.install, hfta.rules.uninstall):
            change()
            torch.testing.assert_close(torch.func.vmap(torch.conv2d)(x, weight), expected, rtol=1e-12, atol=1e-12)
    finally:
        if installed:
            hfta.rules.install()
