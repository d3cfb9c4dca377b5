"""Compiled steps, and those on disk: a later process takes them up at its first call, without the compiler.

A graph is a folder named by a digest of all that it rests on: the values that the step's functions can reach, shapes,
settings, rules, versions and the machine. Whatever is wrong with a folder, the step is compiled instead.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pathlib
import pickle
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._kernels import native
from hfta_func._kernels.operators import is_defined
from hfta_func._torch import Tape, compile_ahead, load_ahead, may_change, stays
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Schedule, Tree, recipe
from hfta_func.optim._base import GradientTransformation, is_of_package
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.step.replay import kind_of, only_computing, reached_by, recorded
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep
from hfta_func.workers.process import SETTINGS

MOST_BYTES = 2**30
"""How much the graphs may take on disk; those that were not used for longest go first."""
_LIBRARY, _ABOUT = "step.so", "about"


# It trusts the processor's own list of its instructions, instead of compiling a program for each of them, which takes longer
# than a small graph; and does not look again at shapes that have been looked at to choose the graph.
_TRUSTING = {"cpp.vec_isa_ok": True, "size_asserts": False, "alignment_asserts": False}
_TOGETHER = 16
"""With more parameters than this, the calls are compiled apart from the kernels: at the same time and with less optimisation,
which saves a third of a deep model's time to compile. With fewer, the calls are much of a step."""
_REPLAYED = "triton.cudagraphs"


def options(step: Callable[..., Any], state: Any, device: str) -> tuple[dict[str, Any], ...]:
    """Options of inductor for a step with this state on this type of device, to be tried in turn."""
    if device == "cpu":
        # The first calls kernels from C++, not Python.
        apart = len(leaves(getattr(state, "params", state))) > _TOGETHER
        return {**_TRUSTING, "cpp_wrapper": True, "cpp_wrapper_build_separate": apart}, {}
    # A CUDA graph launches all kernels at once; a state not written in place would be copied into its memory and back.
    in_place = device == "cuda" and getattr(getattr(step, "options", None), "donate", False)
    return ({_REPLAYED: True}, {}) if in_place else ({},)


def graph(step: Callable[..., Any], chosen: Mapping[str, Any]) -> Any:
    """The step, compiled when it is called, with these options; a call checks only what may change between calls."""
    options: Any = {**chosen, "guard_filter_fn": may_change}
    run = torch.compile(step, fullgraph=True, dynamic=False, options=options)
    if not chosen.get(_REPLAYED):
        return run

    def replay(state: Any, batch: Any) -> Any:
        # What lies where it lay is not copied into the graph's memory. Elsewhere, the graph is recorded anew.
        held = leaves(state)
        for leaf in (*held, *getattr(step, "base", {}).values()):
            stays(leaf)
        known = set(map(id, held))
        # Copies of what lies in the graph's memory, where the next call writes.
        return tree_map(lambda leaf: leaf if id(leaf) in known else leaf.clone(), run(state, batch))

    return replay


def folder() -> pathlib.Path:
    """Where graphs are kept: a folder beside the kernels in C."""
    return native.folder() / "graphs"


def can_be_kept(step: Any, state: Any) -> bool:
    """Whether the step is of a kind whose graphs are kept: training of single networks on a CPU."""
    return (
        type(step) is TrainStep
        and type(state) is TrainState
        and step.options.nonfinite != "raise"
        and not (state.shared or step.options.network)
        and is_of_package(step.optimizer, closed=True)
        and step.optimizer.search is None
        and all(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in leaves(state))
    )


def name_of(step: Any, digest: str, inputs: tuple[Tree, Tree]) -> str:
    """The name of the graph of this step for inputs like these."""
    parts, layout = optree.tree_flatten(inputs)  # pyright: ignore[reportArgumentType]
    settings = [get() for get, _ in SETTINGS[:4]]
    rules = _choice.state, sorted(OUTSIDE.items())
    kinds = [repr(kind_of(leaf)) for leaf in parts]
    update = recipe_digest(step.optimizer, inputs[0].opt_state)
    facts = repr((digest, update, str(layout), kinds, settings, rules, _machine()))
    return hashlib.sha256(facts.encode()).hexdigest()[:40]


def recipe_digest(value: Any, state: Tree) -> str:
    """The calls that made an optimizer, without the numbers that its ``state`` holds as hyperparameters of these names."""
    states = optree.tree_leaves(state, is_leaf=lambda node: hasattr(node, "hyperparams"))  # pyright: ignore
    hyperparams = [getattr(one, "hyperparams", {}) for one in states]
    names = {name for path in optree.tree_paths(hyperparams) for name in path if isinstance(name, str)}  # pyright: ignore

    def said(part: Any, name: str = "") -> Any:
        if isinstance(part, (GradientTransformation, Schedule)):
            make, parts = recipe(part)
            call = getattr(make, "func", make)
            given = inspect.signature(call).bind(*parts, **getattr(make, "keywords", {})).arguments
            return call.__qualname__, said(given)
        if isinstance(part, Mapping):
            return [(name, said(one, name)) for name, one in part.items()]
        if name in names:
            return "number"
        return [*map(said, part)] if isinstance(part, (tuple, list)) else repr(part)

    return repr(said(value))


@functools.cache
def _machine() -> str:
    """Versions, this package's own code, and what the processor can do."""
    digest = hashlib.sha256()
    for source in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    facts = sys.version, torch.__version__, torch.version.git_version, platform.platform(), native.processor()
    return repr((digest.hexdigest(), native.compiler(), *facts))


def recorded_whole(step: Any, state: TrainState, batch: Tree) -> tuple[Tape, Any]:
    """The tape of a step as compilers see it, and the layout of its results: not in place, and without a look at values."""
    step = step.many.in_graph
    with torch.no_grad():
        # The first call learns what the model does.
        step.eagerly(state, batch)

        def at_once(state: TrainState, batch: Tree) -> Any:
            return step.finish(state, *step.decide(state, batch), looks=False)

        tape, result = recorded(at_once, state, batch, compiling=True)
    return tape, optree.tree_structure(result)


def make(step: TrainStep, inputs: tuple[TrainState, Tree], name: str) -> None:
    """Compile the step for inputs like these, and keep it by this name; raises if a graph cannot repeat the step."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder(), prefix="new-") as temporary:
        reached, parts = reached_by(step), leaves(inputs)
        with only_computing(reached, step._made_from[1], inputs[0].keys.device):
            tape, layout = recorded_whole(step, *inputs)
        written = len(leaves(inputs[0])) if step.options.donate else 0
        built, path = pathlib.Path(temporary), pathlib.Path(temporary) / "graph"
        level = "O0" if len(leaves(inputs[0].params)) > _TOGETHER else "O1"
        ahead = {**_TRUSTING, "aot_inductor.compile_wrapper_opt_level": level}
        library = compile_ahead(tape, parts, reached.tensors, written, ahead, str(built / _LIBRARY))
        path.mkdir(mode=0o700)
        # Sources lie there, too.
        for one in [*built.glob(f"{_LIBRARY.partition('.')[0]}.*")]:
            one.rename(path / one.name)
        about = path / _ABOUT
        about.write_bytes(native.signed(pickle.dumps((library, layout))))
        about.chmod(0o600)
        drop(name)
        path.rename(folder() / name)
    total = 0
    for other, size, _ in kept():
        total += size
        if total > MOST_BYTES:
            drop(other)


def make_elsewhere(step: TrainStep, inputs: tuple[TrainState, Tree], name: str, threads: int) -> None:
    """:func:`make` a graph in a worker, for this number of threads."""
    torch.set_num_threads(threads)
    make(step, inputs, name)


def load(name: str, tensors: Sequence[Tensor]) -> Callable[[TrainState, Tree], Any] | None:
    """The graph of this name as a step whose functions reach these tensors; None if there is none that can be used."""
    path = folder() / name
    try:
        if not native.is_whole(path / _ABOUT):
            return None
        library, layout = pickle.loads((path / _ABOUT).read_bytes()[:-32])
        held = [tensors[number] for number in library.captured]
        if not all(map(is_defined, library.operators)):
            return None
        function = load_ahead(str(path / _LIBRARY))
        os.utime(path / _ABOUT)
    except Exception:
        # Whatever is wrong with the files, the step is compiled anew.
        return None

    def run(state: TrainState, batch: Tree) -> Any:
        inputs = [*leaves((state, batch)), *held]
        with torch.no_grad():
            results = function(inputs)
        return layout.unflatten([results[place] if place >= 0 else inputs[~place] for place in library.outputs])

    return run


def drop(name: str) -> None:
    """Keep a graph no longer."""
    shutil.rmtree(folder() / name, ignore_errors=True)


def kept() -> list[tuple[str, int, float]]:
    """Name, bytes and time of last use of every graph, the latest first."""
    graphs: list[tuple[str, int, float]] = []
    with contextlib.suppress(OSError):
        for path in folder().iterdir():
            with contextlib.suppress(OSError):
                used = (path / _ABOUT).stat().st_mtime if (path / _ABOUT).exists() else path.stat().st_mtime
                graphs.append((path.name, sum(one.stat().st_size for one in path.rglob("*")), used))
    return sorted(graphs, key=lambda graph: -graph[2])
