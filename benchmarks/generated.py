"""What inductor generates for updates and for grouped convolutions, against hand-written kernels, on one thread.

Updates: the kernel in C of the optimizer, called eagerly and from a graph, and the code that inductor generates for its rule.
Convolutions, alone and with gradients: one call in groups, of oneDNN or cuDNN, eagerly and from a graph; as the table of
lowerings has it; as a batched product, which inductor fuses with what is around it; and by hand, in C, or on a GPU in Triton
and without gradients. Code by hand has its inputs in the layout that it is written for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from examples.resnet.model import ResNet18
from torch import nn

import hfta_func as hfta
from benchmarks import convolution_kernels
from benchmarks._measure import interleaved, machine, seconds, table
from hfta_func.optim import _kernel

MODELS = {
    "MLP 64-64-64-10": lambda: nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ),
    "ResNet-18": ResNet18,
}
CONVOLUTIONS = {"N 8, 8 of 8x8": (8, 8, 8), "N 8, 16 of 16x16": (8, 16, 16), "N 8, 64 of 16x16": (8, 64, 16)}
"""N, channels in and out, and pixels; filters are 3x3."""


def update(make: Callable[[], nn.Module], models: int, device: str) -> dict[str, Callable[[], object]]:
    """Adam on all leaves of some models, in place, by kernel; a graph calls the kernel or has generated code."""
    optimizer = hfta.adam(lr=[1e-3] * models)
    params, _ = hfta.init_params(lambda: make().to(device), seeds=range(models))
    grads = {path: torch.randn_like(leaf) for path, leaf in params.items()}
    state = optimizer.init(params)

    def run(grads: Any, state: Any, params: Any) -> Any:
        return hfta.update_(optimizer, grads, state, params)

    ways: dict[str, Callable[[], object]] = {"eager": lambda: run(grads, state, params)}
    for name, inline in (("kernel in a graph", 0), ("generated", 10**6)):
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, dynamic=False)
        with mock.patch.object(_kernel, "MAX_INLINE_LEAVES", inline):
            compiled(grads, state, params)
        ways[name] = lambda compiled=compiled: compiled(grads, state, params)
    return ways


def convolution(
    shape: tuple[int, int, int], models: int, device: str, has_gradients: bool
) -> dict[str, Callable[[], object]]:
    """One convolution of all models, and its gradients, by lowering, eagerly and compiled, and by hand."""
    samples, channels, pixels = shape
    x = torch.randn(models, samples, channels, pixels, pixels, device=device)
    weight = torch.randn(models, channels, channels, 3, 3, device=device)

    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        alone = lambda x, weight: torch.conv2d(x, weight, padding=1)  # noqa: E731
        loss = lambda x, weight: alone(x, weight).relu().square().sum()  # noqa: E731
        return hfta.vmap(torch.func.grad(loss, argnums=(0, 1)) if has_gradients else alone)(x, weight)

    def grouped() -> Any:
        with hfta.rules.override(conv="grouped"):
            return run(x, weight)

    ways: dict[str, Callable[[], object]] = {"grouped, eager": grouped, "table, eager": lambda: run(x, weight)}
    for lowering in ("grouped", "matmul"):
        with hfta.rules.override(conv=lowering):
            torch._dynamo.reset()
            compiled = torch.compile(run, fullgraph=True, dynamic=False)
            compiled(x, weight)
        ways[f"{lowering}, compiled"] = lambda compiled=compiled: compiled(x, weight)
    # [M, N, C, H, W] -> [M, N, H, W, C], [M, O, C, 3, 3] -> [M, 3, 3, C, O]
    last, filters = x.permute(0, 1, 3, 4, 2).contiguous(), weight.permute(0, 3, 4, 2, 1).contiguous()

    def by_hand() -> Any:
        y = convolution_kernels.forward(last, filters)
        if not has_gradients:
            return y
        grad = y.relu_().mul_(2)
        return convolution_kernels.input_grad(grad, filters), convolution_kernels.weight_grad(last, grad)

    if device == "cpu":
        ways["by hand"] = by_hand
    elif not has_gradients and channels >= 16:
        ways["by hand"] = lambda: convolution_kernels.triton_forward(last, filters)
    return ways


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks generated", description=__doc__)
    parser.add_argument("--models", type=int, default=8, help="M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--filter", default="", help="only operators whose name holds this")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="on a GPU inductor generates Triton")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("{cpu}, torch {torch}, {threads} thread, {date}".format(**machine()), flush=True)
    cases = {f"Adam, {name}": lambda make=make: update(make, args.models, args.device) for name, make in MODELS.items()}
    cases |= {
        f"convolution{kind}, {name}": lambda shape=shape, kind=kind: convolution(
            shape, args.models, args.device, bool(kind)
        )
        for kind in ("", " and gradients")
        for name, shape in CONVOLUTIONS.items()
    }
    lines = []
    for name, make in cases.items():
        if args.filter not in name:
            continue
        timers = {way: lambda work=work: seconds(work, 3, args.device) for way, work in make().items()}
        best = {way: min(times) for way, times in interleaved(timers, args.rounds).items()}
        lines.append([name, "  ".join(f"{way} {1e3 * time:.3f}" for way, time in best.items())])
        print(*lines[-1], flush=True)
    print(table(["operator", "ms, the least of rounds"], lines))
    return 0
