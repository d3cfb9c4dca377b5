"""The order of rooms: what may import what, how long a file is, and what an import of the package does."""

import ast
import functools
import pathlib
import re

import pytest

import hfta_func as hfta
from processes import output

SOURCE = pathlib.Path(hfta.__file__).parent

# From bottom to top: a room, a file or a folder, imports only from rooms before its own.
ROOMS = [
    *("errors", "_types", "_torch", "_kernels", "_tree", "random", "optim", "schedules", "calls", "rules", "models"),
    *("verify", "step", "files", "workers", "run", "callbacks", "testing", "plot", "integrations", "__init__", "tune"),
    *("cluster", "rl", "signals", "sklearn", "es"),
]
APART = {("optim", "calls"), ("optim", "rules"), ("optim", "models")}
"""Rooms that never import each other, whatever their order; they are brought together in the step."""

# From bottom to top inside a folder. Files that are not named stand side by side above these and import none of each
# other, so that families of operators and optimizers stay apart.
FILES_IN = {
    folder: names.split()
    for folder, names in {
        "_kernels": "native operators noise nonfinite",
        "_torch": "_release levels dispatcher compiler modules recorded tape",
        "optim": "_base _kernel _leafwise",
        "calls": "body copies autodiff made rewrites draws padding routing scan recompute",
        "rules": "_layout _products _lowering _loop _measured _registry _choice _operator _direct _tables "
        "_recurrence _direction _autocast _functions _install _extend _advice vmap",
        "models": "scalar_attributes structure sharing sizes padding stack remat padded_calls attributes "
        "skeleton functional adapters",
        "step": "state allocator batch options chunks members gradients replay commit many train indexed joint "
        "evaluate prediction layers ensemble exchange",
        "verify": "held reached alone compare oracle",
        "testing": "_laws",
        "files": "atomic storage checkpoint",
        "run": "memory recording profile history compare row_sampling data dataset evaluation kept background "
        "trainer run trainers fit experiment plan",
        "rl": "environment classic rollouts buffers gymnasium_envs",
        "integrations": "lightning_steps",
        "workers": "process pool",
        "signals": "signal processing cutting",
        "sklearn": "estimators search",
        "cluster": "ray_actors torchrun_ranks",
        "tune": "array groups folder population cohorts sampling options schedulers study search run",
    }.items()
}
EXPORTING = "_torch calls cluster files integrations models rules run signals sklearn step testing tune verify workers"
LAST = {**{room: ["__init__"] for room in EXPORTING.split()}, "optim": ["_hyperparams", "__init__"]}
"""Files above those side by side."""

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


parsed = functools.cache(ast.parse)


def imports(file, source):
    """Every file of the package that a file imports, at any depth of its code."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}.py:{node.lineno}: write imports in full"
            if (node.module or "").split(".")[0] == "hfta_func":
                yield from file_of(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hfta_func":
                    yield from file_of(alias.name, [])


def room(file):
    """The room a file stands in."""
    return file.split("/")[0]


def place(file):
    """Where a file stands in its folder: below, among or above the files side by side."""
    folder, _, name = file.partition("/")
    for level, names in ((0, FILES_IN.get(folder, [])), (2, LAST.get(folder, []))):
        if name in names:
            return level, names.index(name)
    return 1, 0


def may_import(file, other):
    """Whether the order of rooms lets ``file`` import ``other``."""
    here, there = room(file), room(other)
    if here == there:
        return place(other) < place(file)
    return ROOMS.index(there) < ROOMS.index(here) and (there, here) not in APART


def test_every_file_has_its_place():
    assert {room(file) for file in FILES} == set(ROOMS)
    named = {f"{folder}/{name}" for table in (FILES_IN, LAST) for folder, names in table.items() for name in names}
    assert named <= set(FILES), sorted(named - set(FILES))


def test_files_import_from_below_only():
    every = {(file, other) for file in FILES for other in imports(file, FILES[file].read_text())}
    assert not sorted(f"{file} imports {other}" for file, other in every if not may_import(file, other))


def test_there_are_few_rooms_and_few_ways_between_them():
    ways = {(room(file), room(other)) for file in FILES for other in imports(file, FILES[file].read_text())}
    assert len(ROOMS) <= 27
    # Law-suites reach every room whose contract they test; everybody may use the types and errors.
    counted = {way for way in ways if way[0] not in (way[1], "testing") and way[1] not in ("_types", "errors")}
    assert len(counted) <= 95


def test_the_walk_sees_every_way_to_import():
    source = """
import hfta_func
import hfta_func.optim._elementwise
from hfta_func import random, take
from hfta_func.rules._registry import install
def late():
    from hfta_func import rules
    from hfta_func.optim import adam as other
"""
    assert set(imports("example", source)) == {
        *("__init__", "optim/_elementwise", "random", "rules/_registry", "rules/__init__", "optim/__init__")
    }


@pytest.mark.parametrize(
    ("file", "other"),
    [
        ("rules/conv", "rules/norm"),
        ("optim/_adam", "optim/_elementwise"),
        ("optim/_base", "rules/_layout"),
        ("rules/__init__", "optim/__init__"),
        ("models/stack", "__init__"),
        ("step/commit", "step/train"),
        ("random", "calls/routing"),
    ],
)
def test_the_table_forbids(file, other):
    assert file in FILES and other in FILES and not may_import(file, other)


def test_no_file_is_two_rooms():
    lengths = {file: len(path.read_text().splitlines()) for file, path in FILES.items()}
    assert not {file: length for file, length in lengths.items() if length > 350}


LONG = {"leafwise": "functions that share twelve options, each shorter than a page; apart, they would hand these on"}
"""Functions whose bodies have more than 60 lines, and why."""


def bodies(source):
    """Every function of a file with the number of its lines, without signature and docstring."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1 if ast.get_docstring(node) is not None else 0 :]
            yield node.name, node.end_lineno - first[0].lineno + 1 if first else 0


def test_functions_are_short():
    every = [(file, *body) for file, path in FILES.items() for body in bodies(path.read_text())]
    assert not [f"{file}: {name}" for file, name, lines in every if lines > 60 and name not in LONG]


def test_there_is_no_room_for_odds_and_ends():
    odds = ("utils", "util", "helpers", "misc", "common")
    assert not [file for file in FILES if file.split("/")[-1].strip("_") in odds]


# Modules and attributes of PyTorch that begin with an underscore, and its checks of graphs. Operators' names are no names of
# Python.
PRIVATE = re.compile(
    r"torch(\.\w+)*\._[a-zA-Z]|from torch[\w.]* import .*\b_[a-z]|forward_ad|"
    r"\.(_version|_parameters|_buffers|_modules|_flat_weights|_destroy|_dynamo\w+|_torchdynamo\w+)\b|[A-Z]+_MATCH\b"
)


def test_private_names_of_pytorch_stand_in_one_room():
    lines = [(file, line) for file, path in FILES.items() for line in path.read_text().splitlines()]
    private = [one for one in lines if PRIVATE.search(re.sub(r"torch\.ops\.aten\._", "torch.ops.aten.", one[1]))]
    assert not [f"{file}: {line}" for file, line in private if room(file) != "_torch"]


def in_a_new_process(code):
    output(code, PYTHONWARNINGS="error")


@pytest.mark.exhaustive
def test_import_does_nothing():
    in_a_new_process("""
import sys
import torch
kernels = lambda: torch._C._dispatch_dump("aten::convolution")
before, modules = kernels(), set(sys.modules)
state = torch.get_rng_state()
import hfta_func
new = set(sys.modules) - modules
heavy = ("torch_xla", "torch._inductor", "torch._dynamo", "pandas", "matplotlib", "scipy", "sklearn")
assert not [name for name in new if name.startswith(heavy)], sorted(new)
assert not hfta_func.rules.is_installed()
assert kernels() == before
assert torch.equal(torch.get_rng_state(), state)
assert torch.get_num_threads() and not torch._C._functorch.peek_interpreter_stack()
""")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "optimizer", ["adamw(lr=0.1)", "sgd(lr=0.1, momentum=0.9)", "partition({'': ''}, {'': muon(lr=0.1)})"]
)
def test_first_steps_do_not_import_what_takes_long(optimizer):
    in_a_new_process(f"""
import sys
import torch
import hfta_func as hfta
from hfta_func import adamw, muon, partition, sgd
model = torch.nn.Linear(2, 2, bias=False)
step = hfta.make_train_step(model, lambda model, batch: model(batch).square().mean(), {optimizer})
state = step.init(*hfta.stack_params([model] * 2), seeds=[0, 1])
step(state, torch.ones(2, 3, 2))
assert not {{"sympy", "torch._inductor", "torch._dynamo", "pandas", "scipy"}} & set(sys.modules)
""")


@pytest.mark.exhaustive
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


def test_every_room_says_why_it_is_as_it_is():
    for folder in {path.parent for path in FILES.values()} - {SOURCE}:
        assert 5 <= len((folder / "README.md").read_text().splitlines()) <= 15, folder
