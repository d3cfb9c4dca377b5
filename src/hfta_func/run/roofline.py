"""The least time that the products and the memory traffic of recorded operators take on this machine."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hfta_func.run.timeline import Span
from hfta_func.step.chunks import now

_BYTES = {
    **{"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "short int": 2},
    **{"bool": 1, "unsigned char": 1, "signed char": 1, "c10::complex<float>": 8, "c10::complex<double>": 16},
}
_REDUCTIONS = ("sum", "mean", "amax", "amin", "all", "any", "norm", "argmax", "argmin", "var", "var_mean", "max", "min")
_SECONDS = 0.05
"""How long each rate of the machine is measured."""


class Roofline(NamedTuple):
    """The least time of a step: products at the rate of a large one, traffic at the rate of a large copy."""

    flops: float  # floating-point operations of its matrix products and convolutions
    bytes: float  # that its kernels read and write, caches aside
    flops_per_second: float  # of a large matrix product of the parameters' dtype on this machine
    bytes_per_second: float  # of a large copy
    seconds: float  # sum over the kernels of the larger of both times


def roofline(recorded: Sequence[Span], device: torch.device, dtype: torch.dtype) -> Roofline:
    """The roofline of the operators that were recorded with their shapes."""
    flops_rate, bytes_rate = rates(device, dtype)
    flops, moved, seconds = 0.0, 0.0, 0.0
    for products, traffic in itertools.chain.from_iterable(map(_work, recorded)):
        flops, moved = flops + products, moved + traffic
        seconds += max(products / flops_rate, traffic / bytes_rate)
    return Roofline(flops, moved, flops_rate, bytes_rate, seconds)


def _work(span: Span) -> Iterator[tuple[float, float]]:
    """Floating-point operations and bytes of each product, and of each kernel besides."""
    if span.mark is None and span.operator in _FORMULAS:
        products = flops_of(span.operator, span.event.shapes(), span.event.concrete_inputs())
        yield products, sum(_traffic(kernel) for kernel in span if kernel.is_kernel)
    elif span.is_kernel:
        yield 0.0, _traffic(span)
    else:
        for inner in span.inside:
            yield from _work(inner)


def flops_of(operator: str, shapes: Any, inputs: Any) -> float:
    """Floating-point operations of a product or a convolution, by its arguments by position; 0 for other operators."""
    formula = _FORMULAS.get(operator, _FORMULAS.get(operator.removeprefix("aten::")))
    return 0.0 if formula is None else float(formula(shapes, inputs))


@functools.cache
def rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Floating-point operations and bytes per second of a large product and a large copy, the best of several."""
    size, entries = (512, 2**24) if device.type == "cpu" else (4096, 2**27)
    a, source = torch.ones(size, size, dtype=dtype, device=device), torch.ones(entries, device=device)
    target = torch.empty_like(source)
    return 2 * size**3 / _best(lambda: a @ a, device), 8 * entries / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    begin, best = time.perf_counter(), math.inf
    work()
    while time.perf_counter() - begin < _SECONDS or best == math.inf:
        start = now(device)
        work()
        best = min(best, now(device) - start)
    return best


def _traffic(span: Span) -> float:
    """Bytes that a kernel reads, and of its result: as large as the largest operand unless it multiplies or reduces."""
    shapes = span.event.shapes()
    sizes = [math.prod(shape) * _BYTES.get(kind, 0) for shape, kind in zip(shapes, span.event.dtypes(), strict=False)]
    if span.operator in _RESULTS:
        result = _RESULTS[span.operator](shapes) * max(_BYTES.get(kind, 0) for kind in span.event.dtypes())
    else:
        result = 0 if span.operator in _REDUCTIONS else max(sizes, default=0)
    return sum(sizes) + result


_RESULTS: dict[str, Callable[[Any], int]] = {
    "mm": lambda x: x[0][0] * x[1][1],
    "addmm": lambda x: x[1][0] * x[2][1],
    "bmm": lambda x: math.prod(x[0][:2]) * x[1][2],
    "baddbmm": lambda x: math.prod(x[1][:2]) * x[2][2],
}
"""Entries of the result by the shapes of the operands."""


def _convolution(shapes: Any, inputs: Any) -> int:
    x, weight = shapes[:2]
    stride, padding, dilation, transposed = inputs[3:7]
    if transposed:
        return 2 * math.prod(x) * math.prod(weight[1:])
    # One number for all axes, or one each.
    each = (list(option) * ((len(x) - 2) // len(option)) for option in (stride, padding, dilation))
    axes = zip(x[2:], weight[2:], *each, strict=True)
    pixels = math.prod((size + 2 * pad - apart * (taps - 1) - 1) // step + 1 for size, taps, step, pad, apart in axes)
    return 2 * x[0] * weight[0] * pixels * math.prod(weight[1:])


def _convolution_backward(shapes: Any, inputs: Any) -> int:
    grad, x, weight = shapes[:3]
    pixels = x if inputs[7] else grad
    # The gradient of the input and that of the weight take as many products as the convolution.
    return 2 * math.prod(pixels) * math.prod(weight[1:]) * sum(inputs[10][:2])


def _attention(passes: float, first: int) -> Callable[[Any, Any], float]:
    def count(shapes: Any, inputs: Any) -> float:
        query, key, value = shapes[first : first + 3]
        return 2 * passes * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

    return count


_FORMULAS: dict[str, Callable[[Any, Any], float]] = {
    **{name: lambda x, _: 2 * math.prod(x[0]) * x[1][-1] for name in ("mm", "bmm")},
    **{name: lambda x, _: 2 * math.prod(x[1]) * x[2][-1] for name in ("addmm", "baddbmm")},
    "mv": lambda x, _: 2 * math.prod(x[0]),
    "dot": lambda x, _: 2 * math.prod(x[0]),
    **dict.fromkeys(("_convolution", "aten::convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_flash_attention{kind}": _attention(1, 0) for kind in ("", "_for_cpu")},
    **{f"_scaled_dot_product_flash_attention{kind}_backward": _attention(2.5, 1) for kind in ("", "_for_cpu")},
}
"""Floating-point operations by shapes and other arguments; groups of a convolution are in its weight's shape."""
