"""Time of a training step of an array, against training the same members one after another with ``torch.optim``.

Rows: the serial loop in the benchmark's own process and, as users have it today, in a process whose allocator nothing has
set up; the array's step, eager and compiled; and ``torch.func.vmap`` with PyTorch's own batching rules and a plain update.
Every row carries its state from call to call. The rows take turns; a ratio is the median over rounds of the serial time of
a round by the other time of that round. Before a ratio is shown, the same run checks that array and serial loop agree.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import hfta_func as hfta
from benchmarks._measure import ROOT, demo, interleaved, seconds, table
from benchmarks.models import ResNet18, TransformerLM

MOMENTUM = 0.9
TOLERANCE = 1e-3
SERIAL = "serial"


class Workload(NamedTuple):
    """What every row trains."""

    title: str
    make: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor]
    batches: list[tuple[Tensor, Tensor]]
    lr: Sequence[float]
    optimizer: Callable[[], hfta.GradientTransformation]
    solo_optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]

    @property
    def seeds(self) -> range:
        """One seed per member."""
        return range(len(self.lr))

    def models(self, dropout: bool = True) -> list[nn.Module]:
        """The members as ordinary modules."""
        models = hfta.unstack_params(self.make(), *hfta.init_params(self.make, self.seeds))
        for module in [] if dropout else itertools.chain.from_iterable(model.modules() for model in models):
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        return models


def mlp(num_models: int, batch_size: int) -> Workload:
    """A small MLP on random data, SGD with momentum."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    generator = torch.Generator().manual_seed(0)
    shape, lr = (num_models, batch_size), torch.logspace(-3, -1, num_models).tolist()
    batches = [
        (torch.randn(*shape, 64, generator=generator), torch.randint(0, 10, shape, generator=generator))
        for _ in range(8)
    ]
    return Workload(
        f"MLP 64-64-64-10, M = {num_models}, N = {batch_size}, SGD with momentum",
        *(make, cross_entropy, batches, lr),
        lambda: hfta.sgd(lr=lr, momentum=MOMENTUM),
        lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM),
    )


def digits(num_models: int, batch_size: int) -> Workload:
    """The demo's CNN with batch normalisation and dropout on its images, Adam."""
    train, _ = demo().load_digits()
    loader = hfta.ArrayLoader(train, batch_size=batch_size, seeds=range(num_models), drop_last=True)
    lr = torch.logspace(-4, -1, num_models).tolist()
    return Workload(
        f"digits CNN, M = {num_models}, N = {batch_size}, Adam",
        *(demo().CNN, demo().loss_fn, list(itertools.islice(loader, 8)), lr),
        lambda: hfta.adam(lr=lr),
        lambda model, rate: torch.optim.Adam(model.parameters(), lr=rate),
    )


def resnet18(num_models: int, batch_size: int) -> Workload:
    """HFTA's ResNet-18 on random images of CIFAR-10's size, SGD with momentum."""
    generator = torch.Generator().manual_seed(0)
    shape, lr = (num_models, batch_size), torch.logspace(-3, -2, num_models).tolist()
    batches = [
        (torch.randn(*shape, 3, 32, 32, generator=generator), torch.randint(0, 10, shape, generator=generator))
        for _ in range(4)
    ]
    return Workload(
        f"ResNet-18 (ImageNet stem) on 32x32, M = {num_models}, N = {batch_size}, SGD with momentum",
        *(ResNet18, cross_entropy, batches, lr),
        lambda: hfta.sgd(lr=lr, momentum=MOMENTUM),
        lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM),
    )


def language_model(num_models: int, batch_size: int, vocabulary: int) -> Workload:
    """HFTA's Transformer on random tokens, sequences of 32, SGD."""
    generator = torch.Generator().manual_seed(0)
    lr, length = torch.logspace(-3, -1, num_models).tolist(), 32
    batches = [
        tuple(torch.randint(vocabulary, (num_models, batch_size, length), generator=generator) for _ in range(2))
        for _ in range(4)
    ]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(
        f"Transformer LM, vocabulary {vocabulary}, M = {num_models}, N = {batch_size}, L = {length}, SGD",
        *(lambda: TransformerLM(vocabulary, length), loss_fn, batches, lr),
        lambda: hfta.sgd(lr=lr),
        lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
    )


WORKLOADS = {"mlp": mlp, "digits": digits, "resnet18": resnet18, "lm": language_model, "lm small": language_model}

PLAN = {
    "mlp": ((32, 32), 30, 20),
    "digits": ((48, 32), 30, 4),
    "resnet18": ((8, 8), 9, 1),
    "lm small": ((8, 8, 2000), 9, 2),
    "lm": ((8, 8, 33278), 9, 1),
}
"""The sizes of each workload, rounds, and steps in a row."""


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of one model."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def serial(work: Workload, models: list[nn.Module]) -> Callable[..., Tensor]:
    """``step(batch) -> losses`` of all members, one after another."""
    optimizers = [work.solo_optimizer(model, rate) for model, rate in zip(models, work.lr, strict=True)]

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = []
        for model, optimizer, *own in zip(models, optimizers, *batch, strict=True):
            optimizer.zero_grad()
            loss = work.loss_fn(model, tuple(own))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return step


def array(step: Callable[..., Any], state: hfta.TrainState) -> Callable[..., Any]:
    """``step(batch) -> losses`` of an array that carries its state."""

    def run(batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return run


def stock(work: Workload) -> Callable[..., Any]:
    """``step(batch) -> losses`` with ``torch.func.vmap`` and SGD with momentum written out."""
    params, _ = hfta.stack_params(work.models())
    momentum = {path: torch.zeros_like(param) for path, param in params.items()}
    model, lr = work.make(), torch.tensor(work.lr)

    def loss(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (images,)), labels)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal params, momentum
        grads, losses = torch.func.vmap(grad_and_value(loss))(params, *batch)
        momentum = {path: MOMENTUM * momentum[path] + grad for path, grad in grads.items()}
        params = {
            path: param - lr.view(-1, *[1] * (param.dim() - 1)) * momentum[path] for path, param in params.items()
        }
        return losses

    return step


def timer(work: Workload, step: Callable[..., Any], calls: int) -> Callable[[], float]:
    """The time of a step, on one batch after another."""
    batches = itertools.cycle(work.batches)
    return lambda: seconds(lambda: step(next(batches)), calls)


class Elsewhere:
    """A row in a process of its own, which measures when it is told to: other allocator settings, no batching rules."""

    def __init__(self, row: str, name: str, sizes: Sequence[int], calls: int):
        order = json.dumps([row, name, list(sizes), calls, torch.get_num_threads()])
        command = [sys.executable, "-m", "benchmarks.training", order]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True)

    def __call__(self) -> float:
        """The time of a step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def answer(order: str) -> None:
    """What that process runs."""
    row, name, sizes, calls, threads = json.loads(order)
    torch.set_num_threads(threads)
    work = WORKLOADS[name](*sizes)
    if row == "stock":
        hfta.keep_memory()
    step = stock(work) if row == "stock" else serial(work, work.models())
    clock = timer(work, step, calls)
    for _ in sys.stdin:
        print(clock(), flush=True)


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a member, relative to the largest value it should have; NaN counts as infinite."""
    difference, scale = (t.flatten(1).abs().amax(1) for t in (found - expected, expected))
    return (difference / scale.clamp(min=1e-12)).nan_to_num(nan=float("inf")).max().item()


def agreement(work: Workload, steps: Iterable[Callable[..., Any]], start: hfta.TrainState) -> dict[str, float]:
    """How far the rows are from each other; without dropout where the serial loop is one of them.

    Adam divides by the size of a gradient and so makes noise of a gradient that should be zero: parameters are compared
    after a step of SGD, and with the workload's own optimizer the losses of three steps.
    """
    models = work.models(dropout=False)
    params, buffers = hfta.stack_params(models)
    step = hfta.make_train_step(models[0], work.loss_fn, work.optimizer())
    run, loop = array(step, step.init(params, buffers, seeds=work.seeds)), serial(work, copy.deepcopy(models))
    found = {"losses": difference(work, run, loop)}

    step = hfta.make_train_step(models[0], work.loss_fn, hfta.sgd(lr=work.lr))
    state, _ = step(step.init(params, buffers, seeds=work.seeds), work.batches[0])
    plain = work._replace(solo_optimizer=lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate))
    serial(plain, models)(work.batches[0])
    expected = hfta.stack_params(models).params
    found["parameters"] = max(relative(state.params[path], param) for path, param in expected.items())

    runs = [array(step, start) for step in steps]
    if len(runs) > 1:
        found["compiled to eager"] = difference(work, runs[1], runs[0])
    return found


def difference(work: Workload, found: Callable[..., Any], expected: Callable[..., Any]) -> float:
    """Of two rows, in the losses of their first three steps."""
    return max(relative(found(batch)[:, None], expected(batch)[:, None]) for batch in work.batches[:3])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every workload: what the check found, and the rows where it passed."""
    hfta.keep_memory()
    plan = {"mlp": ((4, 8), 3, 2), "digits": ((4, 8), 3, 1)} if args.quick else PLAN
    return {name: compare(name, *how, args.compile) for name, how in plan.items() if args.filter in name}


def compare(name: str, sizes: Sequence[int], rounds: int, calls: int, compiled: bool) -> dict[str, Any]:
    """One workload."""
    work = WORKLOADS[name](*sizes)
    step = hfta.make_train_step(work.make(), work.loss_fn, work.optimizer())
    state = step.init(*hfta.init_params(work.make, work.seeds), seeds=work.seeds)
    steps, compile_seconds = {"array eager": step}, None
    if compiled:
        # Other workloads' shapes would make the compiler take this one's for variables.
        steps["array compiled"] = torch.compile(step, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        steps["array compiled"](state, work.batches[0])
        compile_seconds = time.perf_counter() - start
    found = agreement(work, steps.values(), state)
    result = {"title": work.title, "rounds": rounds, "calls": calls, "agreement": found}
    result["agrees"] = max(found.values()) < TOLERANCE
    if not result["agrees"]:
        return result
    runs = {SERIAL: serial(work, work.models())}
    runs |= {row: array(each, state) for row, each in steps.items()}
    timers = {row: timer(work, run, calls) for row, run in runs.items()}
    apart = {"serial, default allocator": "serial"} | ({"stock vmap eager": "stock"} if name == "mlp" else {})
    elsewhere = {row: Elsewhere(kind, name, sizes, calls) for row, kind in apart.items()}
    try:
        # glibc's heap grows for some steps until every large block finds a place.
        times = interleaved({**timers, **elsewhere}, rounds, warmup=8 if rounds > 3 else 1)
    finally:
        for each in elsewhere.values():
            each.close()
    result["rows"] = {
        row: {
            "seconds": statistics.quantiles(own, n=4, method="inclusive"),
            "ratio": statistics.median(a / b for a, b in zip(times[SERIAL], own, strict=True)),
            "compile_seconds": compile_seconds if row == "array compiled" else None,
        }
        for row, own in times.items()
    }
    return result


def show(result: dict[str, Any]) -> str:
    """The tables."""
    return "\n\n".join(map(section, result.values()))


def section(result: dict[str, Any]) -> str:
    """The table of one workload, or why there is none."""
    agreement = ", ".join(f"{name} {value:.1e}" for name, value in result["agreement"].items())
    verdict = "below" if result["agrees"] else "NOT below"
    title = f"{result['title']}\nlargest relative difference: {agreement}; {verdict} {TOLERANCE:.0e}"
    if not result["agrees"]:
        return f"{title}, so there is nothing to compare"
    rows = []
    for name, row in result["rows"].items():
        first, median, third = (1e3 * value for value in row["seconds"])
        compiling = "" if row["compile_seconds"] is None else f"{row['compile_seconds']:.0f} s"
        rows.append([name, f"{median:.3f}", f"{first:.3f} - {third:.3f}", f"{row['ratio']:.2f}x", compiling])
    head = [f"{result['rounds']} rounds of {result['calls']} steps", "ms per step", "quartiles", "ratio", "compiling"]
    return f"{title}\n{table(head, rows)}"


if __name__ == "__main__":
    answer(sys.argv[1])
