"""The update alone: an array's optimizer against M optimizers of PyTorch, and against one over the same bytes.

Four ResNet-18 (wide leaves) and 32 small MLPs (many small updates), random gradients. ``M x torch.optim`` is M optimizers
with their best kernels, ``fused=True`` or else ``foreach=True``; ``one torch.optim`` is one of them over the stacked leaves,
with the same hyperparameters for all members: the time that the bytes take in place. Optimizers that PyTorch does not have
are measured alone.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Callable
from typing import Any

import torch
from examples.resnet.model import ResNet18
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks._measure import interleaved, peak_bytes, resident_bytes, seconds, table
from hfta_func._tree import write

THEIRS = {name.lower(): own for name, own in vars(torch.optim).items() if inspect.isclass(own)}
VARIANTS = {
    "sgd, momentum": (hfta.sgd, {"momentum": 0.9, "weight_decay": 1e-3}),
    "adam, amsgrad": (hfta.adam, {"amsgrad": True}),
    "rmsprop, centered": (hfta.rmsprop, {"centered": True, "momentum": 0.9}),
}


def optimizers() -> dict[str, tuple[Callable[..., hfta.GradientTransformation], Any, dict[str, Any]]]:
    """Every optimizer of the package and its variants by name: ours, PyTorch's of the same name or None, and options."""
    functions = {name: make for name, make in vars(hfta.optim).items() if inspect.isfunction(make)}
    # One evaluates losses itself: python -m benchmarks lbfgs.
    updates = {name: make for name, make in functions.items() if name != "lbfgs"}
    plain = {name: (make, {}) for name, make in updates.items() if "lr" in inspect.signature(make).parameters}
    table = plain | VARIANTS
    return {name: (make, THEIRS.get(make.__name__), options) for name, (make, options) in sorted(table.items())}


OPTIMIZERS = optimizers()

M_SOLO, ONE = "M x torch.optim", "one torch.optim"
# Relative to the total change of a parameter, which is at most a thousandth of the parameter.
TOLERANCE = 1e-2
# Newton-Schulz runs in bfloat16, in which batched products are rounded differently.
ROUGH = {"muon": 5e-2}


def plan(quick: bool) -> dict[str, tuple[Callable[[], nn.Module], int]]:
    """Models and how many of them."""
    wide = (lambda: nn.Linear(64, 32)) if quick else ResNet18
    return {"resnet18": (wide, 4), "mlp": (_mlp, 4 if quick else 32)}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def leaves(model: nn.Module, count: int, matrices: bool) -> dict[str, Tensor]:
    """Random tensors ``[M, ...]`` in the shapes of the model's parameters; with ``matrices``, as Muon takes them."""
    shapes = {path: own.shape for path, own in model.named_parameters() if own.dim() > 1 or not matrices}
    if matrices:
        shapes = {path: torch.Size((shape[0], shape[1:].numel())) for path, shape in shapes.items()}
    return {path: torch.randn(count, *shape) for path, shape in shapes.items()}


class Race:
    """One optimizer over one array's leaves in every mode; each mode has its own tensors."""

    def __init__(self, name: str, model: nn.Module, count: int, compiled: bool):
        make, theirs, options = OPTIMIZERS[name]
        lr = torch.linspace(1e-4, 1e-3, count).tolist()
        self.grads = leaves(model, count, name == "muon")
        # Small, so that what an update adds to a parameter is not lost in its rounding.
        self.start = {path: 1e-2 * leaf for path, leaf in leaves(model, count, name == "muon").items()}
        self.optimizer = make(lr=lr, **options)
        self.runs: dict[str, Callable[[], object]] = {}
        self.results: dict[str, Callable[[], dict[str, Tensor]]] = {}
        has = () if theirs is None else inspect.signature(theirs).parameters
        kernels = next(({kind: True} for kind in ("fused", "foreach") if kind in has), {})
        if theirs is not None:
            own = [{path: nn.Parameter(leaf[i].clone()) for path, leaf in self.start.items()} for i in range(count)]
            for i, member in enumerate(own):
                for path, parameter in member.items():
                    parameter.grad = self.grads[path][i].clone()
            optimizers = [
                theirs(list(member.values()), lr=rate, **kernels, **options)
                for member, rate in zip(own, lr, strict=True)
            ]
            self._add(M_SOLO, lambda: [optimizer.step() for optimizer in optimizers], lambda: _stacked(own))
        if theirs is not None and name != "muon":
            whole = {path: nn.Parameter(leaf.clone()) for path, leaf in self.start.items()}
            for path, parameter in whole.items():
                parameter.grad = self.grads[path].clone()
            self._add(ONE, theirs(list(whole.values()), lr=1e-3, **kernels, **options).step)
        self._array("array, donated", self._in_place())
        self._array("array", self._pure())
        if compiled:
            self._array("array, compiled", self._compiled())

    def _add(self, row: str, run: Callable[[], object], result: Callable[[], dict[str, Tensor]] | None = None) -> None:
        self.runs[row] = run
        if result is not None:
            self.results[row] = result

    def _array(self, row: str, step: Callable[[dict[str, Any]], None]) -> None:
        held: dict[str, Any] = {"params": {path: leaf.clone() for path, leaf in self.start.items()}}
        held["state"] = self.optimizer.init(held["params"])
        held["grads"] = {path: leaf.clone() for path, leaf in self.grads.items()}
        self._add(row, lambda: step(held), lambda: held["params"])

    def _in_place(self) -> Callable[[dict[str, Any]], None]:
        def step(held: dict[str, Any]) -> None:
            hfta.update_(self.optimizer, held["grads"], held["state"], held["params"])

        return step

    def _pure(self) -> Callable[[dict[str, Any]], None]:
        def step(held: dict[str, Any]) -> None:
            updates, held["state"] = self.optimizer.update(held["grads"], held["state"], held["params"])
            held["params"] = hfta.apply_updates(held["params"], updates)

        return step

    def _compiled(self) -> Callable[[dict[str, Any]], None]:
        @torch.compile(fullgraph=True, dynamic=False)
        def update(grads: dict[str, Tensor], state: Any, params: dict[str, Tensor]) -> None:
            updates, new = self.optimizer.update(grads, state, params)
            write((params, state), (hfta.apply_updates(params, updates), new), None)

        return lambda held: update(held["grads"], held["state"], held["params"])


def _stacked(members: list[dict[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {path: torch.stack([member[path].detach() for member in members]) for path in members[0]}


def _difference(a: dict[str, Tensor], b: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Largest difference over all leaves, relative to the largest change of the leaf."""
    return max(float((a[p] - b[p]).abs().max() / (b[p] - start[p]).abs().max()) for p in b)


def titles() -> list[str]:
    """All that are measured: every optimizer over both arrays."""
    return [f"{work}, {name}" for work in plan(quick=True) for name in OPTIMIZERS]


@torch.no_grad()
def one(title: str, args: argparse.Namespace) -> dict[str, Any]:
    """One of :func:`titles` on PyTorch's default device, which is that of ``args``."""
    work, name = title.split(", ", 1)
    make, count = plan(args.quick)[work]
    torch._dynamo.reset()
    return _measure(Race(name, make(), count, args.compile), name, work, args)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every optimizer over both arrays."""
    hfta.step.keep_memory()
    found = {}
    with torch.device(args.device):
        for title in titles():
            if args.filter in title:
                found[title] = one(title, args)
                if args.verbose:
                    print(show({title: found[title]}), flush=True)
    return found


def _measure(race: Race, name: str, work: str, args: argparse.Namespace) -> dict[str, Any]:
    for _ in range(3):
        for run in race.runs.values():
            run()
    results = {row: result() for row, result in race.results.items()}
    first = next(iter(results))
    difference = max(_difference(own, results[first], race.start) for own in results.values())
    calls, rounds = (1, 2) if args.quick else (3, 9) if work == "resnet18" else (30, 15)
    times = interleaved(
        {row: lambda run=run: seconds(run, calls, args.device) for row, run in race.runs.items()}, rounds
    )
    resident = resident_bytes([race.start, race.optimizer.init(race.start), race.grads])
    return {
        "agrees": difference < ROUGH.get(name, TOLERANCE),
        "difference": difference,
        "seconds": {row: statistics.median(values) for row, values in times.items()},
        "ratios": {
            row: {
                base: statistics.median(b / a for a, b in zip(values, times[base], strict=True))
                for base in (M_SOLO, ONE)
                if base in times
            }
            for row, values in times.items()
            if row.startswith("array")
        },
        "memory": {
            row: (resident + peak_bytes(race.runs[row], args.device)) / resident
            for row in times
            if row != "array" and row not in (M_SOLO, ONE)
        },
    }


def show(results: dict[str, Any]) -> str:
    """A table of the speed relative to PyTorch's optimizers, and of memory beside parameters, state and gradient."""
    rows = []
    for name, result in results.items():
        if not result["agrees"]:
            rows.append([name, f"NOT below the tolerance: {result['difference']:.2g}", "", "", "", ""])
            continue
        for row, ratios in result["ratios"].items():
            memory = result["memory"].get(row)
            shown = [f"{ratios[base]:.2f}x" if base in ratios else "" for base in (M_SOLO, ONE)]
            own = f"{1e3 * result['seconds'][row]:.2f}"
            rows.append([name, row, own, *shown, "" if memory is None else f"{memory:.3f}"])
    return table(["update", "", "ms", f"against {M_SOLO}", f"against {ONE}", "peak / held"], rows)
