"""Convolutions of M members as one.

The table chooses a lowering for the forward pass and for each of the two gradients:

- ``grouped``: one convolution with a group per member;
- ``matmul``: one batched matrix product per direction over unfolded inputs;
- ``sample_matmul``: for 1x1 filters, one matrix product per sample, without moving channels or pixels in memory;
- ``direct``: a kernel in C, for channels that fill no blocks of PyTorch's kernels;
- ``loop``: one convolution per member;
- ``wide``: for an input that all members share, the filters of all members in one convolution.

Dimension letters: M models, N batch, G groups, I and O channels of one group in and out, S space, L space of the output,
K kernel.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import has_tangents
from hfta_func.calls.rewrites import LOWERED
from hfta_func.rules import _direct, _measured, _products
from hfta_func.rules._choice import choose, measure, remembered
from hfta_func.rules._layout import align, expand, fold, models_first, split
from hfta_func.rules._lowering import Case, convolution_of, make_case
from hfta_func.rules._operator import Operator
from hfta_func.rules._products import Geometry, is_pointwise
from hfta_func.rules._registry import Call, Result, register

CONVOLUTION_GRADS = "convolution_input_grad", "convolution_weight_grad"
_plain: Any = torch.convolution
_convolution_backward = _torch.operator("convolution_backward")


@register("convolution", "conv")
def convolution(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Result:
    """Convolution and transposed convolution, any number of space axes, any mix of shared and per-member inputs."""
    num_models, (x_dim, weight_dim, bias_dim) = call.num_models, call.dims[:3]
    case = _case(num_models, x, weight, x_dim, weight_dim, *options)
    crop, geometry, lowerings = _plan(case)
    # A bias that is per member exactly when the filters are goes into the kernel; any other is added afterwards.
    separate = bias is not None and (weight_dim is None) != (bias_dim is None)
    inner = None if separate or bias is None else models_first(bias, bias_dim)
    if weight_dim is not None:
        weight = models_first(weight, weight_dim)
        if crop is not None:
            # Negative padding is a single operator, whose gradient is written once.
            weight = F.pad(weight, crop)
    if weight_dim is None:
        # [M,N,GI,S], [GO,I,K] -> [MN,GI,S], [GO,I,K] -> [MN,GO,S] -> [M,N,GO,S]
        if x_dim is None:
            y, dim = _convolution(x, weight, None, *geometry), None
        else:
            y = _convolution(fold(x, x_dim, 0, num_models), weight, inner, *geometry)
            y, dim = split(y, 0, num_models), 0
    elif x_dim is None and lowerings[0] == "wide":
        y, dim = _wide(num_models, x, weight, inner, geometry), 1
    elif lowerings == _ALL_GROUPED:
        y, dim = _in_groups(x, x_dim, weight, inner, geometry), 1
    else:
        y, dim = _stacked(expand(x, x_dim, num_models), weight, inner, *geometry, list(lowerings)), 0
    if separate and bias is not None:
        # [M,N,O,S] + [M,1,O,1]
        rank = y.dim() - (dim is not None)
        y, dim = models_first(y, dim) + align(bias, bias_dim, rank, rank - 2), 0
    return y, dim


def _of_one_model(
    func: Callable[..., Tensor], transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any,
    **named: Any,
) -> Tensor:  # fmt: skip
    """PyTorch's function; in an array of one, which runs without ``vmap``, the lowerings that are faster than it."""
    names = "stride", "padding", *(("output_padding", "groups", "dilation") if transposed else ("dilation", "groups"))
    given: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}
    # Compilers take any zip for a strict one.
    given |= dict(zip(names[: len(options)], options, strict=True)) | named
    observed = torch.compiler.is_compiling() or _torch.inside_transform() or torch.is_autocast_enabled("cpu")
    is_known = len(given) == 5 and not isinstance(given["padding"], str) and weight.dim() == x.dim() > 2
    if is_known and not observed and x.is_cpu and x.dtype == weight.dtype:
        sizes = [[n] * (x.dim() - 2) if isinstance(n, int) else [*n] for n in given.values()]
        alone = x.unsqueeze(0), weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0)
        crop, geometry, lowerings = _plan(_case(1, *alone[:2], 0, 0, *sizes[:3], transposed, sizes[3], given["groups"]))
        if crop is None and not {*lowerings} <= {"grouped", "loop"}:
            return _stacked(*alone, *geometry, list(lowerings)).squeeze(0)
    return func(x, weight, bias, *options, **named)


for _axes, _prefix in itertools.product((1, 2, 3), ("conv", "conv_transpose")):
    _func = getattr(torch, f"{_prefix}{_axes}d")
    LOWERED[_func] = functools.partial(_of_one_model, _func, _prefix != "conv")

_ALL_GROUPED = ("grouped",) * 3
_KERNELS: dict[str, Any] = {
    "matmul": (_products.convolve, _products.correlate),
    "sample_matmul": (_products.convolve_samples, _products.correlate_samples),
    "direct": (_direct.convolve, _direct.correlate),
}
"""What computes outputs and gradients of inputs, and the gradients of filters."""


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return (_opaque if torch.compiler.is_compiling() and x.device.type == "cpu" else _plain)(x, weight, bias, *options)


def _contiguous(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return _plain(x, weight, bias, *options).contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_sizes = None if bias is None else bias.shape


def _contiguous_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    mask = ctx.needs_input_grad[:3]
    grads = _convolution_backward(grad, *ctx.saved_tensors, ctx.bias_sizes, *ctx.options, mask)
    return *grads, *(None,) * len(ctx.options)


# Inductor converts images and filters to channels-last around convolutions that it knows, which makes grouped ones on a CPU
# slower: steps of DCGAN and PointNet by 30 % and more.
_opaque = Operator(
    "contiguous_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] output_padding, int groups) -> Tensor",
    *(_contiguous, _setup_context, _contiguous_backward, _contiguous),
)


def _case(num_models: int, x: Tensor, weight: Tensor, x_dim: int | None, weight_dim: int | None, *options: Any) -> Case:
    """The case of a call, after its lowerings have been timed if there is time for that."""
    case = make_case("convolution", num_models, (x, weight, *options), (x_dim, weight_dim, *(None,) * len(options)))
    unmeasured = _measured.unmeasured(case, (x, weight))
    if unmeasured is not None and _measure(case, x, weight, (x_dim, weight_dim)):
        _measured.closed.add(unmeasured)
    return case


def _measure(case: Case, x: Tensor, weight: Tensor, dims: Any) -> bool:
    """Time the lowerings of a convolution, and of the gradients that are needed, on some samples; whether that was all."""
    case, crop, geometry = _cropped(case)
    if any(case.shared) or crop is not None:
        return True
    one, impossible = convolution_of(case), _impossible(case, geometry)
    products = max(1, case.num_models * one.fewer_pixels * math.prod(one.weight))
    x = models_first(x, dims[0]).narrow(1, 0, min(one.x[0], max(4, 2**24 // products)))
    weight = models_first(weight, dims[1])

    @functools.cache
    def gradient() -> Tensor:
        # In memory as the forward pass, which is timed first, leaves it.
        measured = _measured.chosen(case)
        return _forward(x, weight, None, *geometry, [measured.lowering if measured else "grouped"])

    runs: dict[str, Callable[[str], Any]] = {case.op: lambda name: _forward(x, weight, None, *geometry, [name])}
    for op, needs in zip(CONVOLUTION_GRADS, ((True, False), (False, True)), strict=True):
        if torch.is_grad_enabled() and (x if needs[0] else weight).requires_grad:
            runs[op] = lambda name, needs=needs: _gradients(name, gradient(), x, weight, geometry, *needs)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(measure(case._replace(op=op), impossible, run) for op, run in runs.items())


def _cropped(case: Case) -> tuple[Case, list[int] | None, Geometry]:
    """The case of the filters that are left, see :func:`_products.crop`."""
    (x, weight), weight_is_shared = case.shapes, case.shared[1]
    assert x is not None and weight is not None
    axes = len(weight) - 2
    # A number for all space axes may be given as a list of one.
    per_axis: Any = ([*opt] * (axes // len(opt)) if isinstance(opt, tuple) else opt for opt in case.options)
    crop, geometry = (
        (None, Geometry(*per_axis)) if weight_is_shared else _products.crop(weight, Geometry(*per_axis), x[2:])
    )
    if crop is not None:
        taps = (size + crop[2 * (axes - 1 - i)] + crop[2 * (axes - 1 - i) + 1] for i, size in enumerate(weight[2:]))
        weight = (*weight[:2], *taps)
    options = tuple(tuple(option) if isinstance(option, list) else option for option in geometry)
    return case._replace(shapes=(x, weight), options=options), crop, geometry


@remembered
def _plan(case: Case) -> tuple[list[int] | None, Geometry, tuple[str, ...]]:
    """How a convolution runs: negative padding of the filters, the geometry of the cropped filters, and lowerings.

    These are of the forward pass and, if filters are per member, of the gradients of input and filters.
    """
    x_is_shared, weight_is_shared = case.shared
    case, crop, geometry = _cropped(case)
    forward = choose(case).lowering
    if weight_is_shared or (x_is_shared and forward == "wide"):
        return crop, geometry, (forward,)
    if forward == "wide":
        # Only a shared input can be read by one wide convolution.
        forward = "grouped"
    lowerings = forward, *(choose(case._replace(op=op)).lowering for op in CONVOLUTION_GRADS)
    impossible = _impossible(case, geometry)
    return crop, geometry, tuple("grouped" if name in impossible else name for name in lowerings)


def _impossible(case: Case, geometry: Geometry) -> set[str]:
    """The lowerings that a convolution cannot have."""
    weight = case.shapes[1]
    assert weight is not None
    is_linear = is_pointwise(weight[2:], geometry) and geometry.groups == 1
    # Otherwise filters fit at more positions of the larger image than there are pixels in the smaller one.
    is_exact = all(map(int.__lt__, geometry.output_padding, geometry.stride))
    possible = {
        "matmul": is_exact and len(weight) <= 4,
        "sample_matmul": is_linear,
        "direct": is_exact and _direct.is_possible(case, geometry),
    }
    return {name for name, is_possible in possible.items() if not is_possible}


def _wide(num_models: int, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    # [N,GI,S], [M,GO,I,K] -> [N,GI,S], [GMO,I,K] -> [N,GMO,S] -> [N,G,M,O,S] -> [N,M,GO,S]
    groups = geometry.groups
    # The filters of a transposed convolution are [GI,O,K], so members go next to O.
    weight = fold(weight, 0, 1, num_models) if geometry.transposed else _interleave(weight, groups)
    bias = None if bias is None else _interleave(bias, groups)
    y = split(_convolution(x, weight, bias, *geometry), 1, groups)
    return split(y, 2, num_models).transpose(1, 2).flatten(2, 3)


def _interleave(weight: Tensor, groups: int) -> Tensor:
    """``[M,GO,...] -> [GMO,...]``: the filters of all members side by side in each group."""
    return split(weight, 1, groups).transpose(0, 1).flatten(0, 2)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """``[M,N,GI,S], [M,GO,I,K], [M,GO] -> [M,N,GO,L]``."""
    geometry, (lowering, *_) = Geometry(*options[:-1]), options[-1]
    lowering = _differentiable(lowering)
    if lowering in _KERNELS:
        convolve, _ = _KERNELS[lowering]
        space = _products.transposed_space(x.shape[3:], weight.shape[3:], geometry) if geometry.transposed else None
        if lowering == "direct":
            return convolve(x, weight, geometry, space, bias)
        y = convolve(x, weight, geometry, space)
        return y if bias is None else y + align(bias, 0, y.dim() - 1, len(geometry.stride))
    if lowering == "loop":
        biases = [None] * x.shape[0] if bias is None else bias.unbind()
        members = zip(x.unbind(), weight.unbind(), biases, strict=True)
        return torch.stack([_convolution(*member, *geometry) for member in members])
    return _in_groups(x, 0, weight, bias, geometry).movedim(1, 0)


def _in_groups(x: Tensor, x_dim: int | None, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    # [M,N,GI,S], [M,GO,I,K] -> [N,MGI,S], [MGO,I,K] -> [N,MGO,S] -> [N,M,GO,S]
    num_models, bias = weight.shape[0], None if bias is None else bias.flatten()
    options = *geometry[:-1], geometry.groups * num_models
    return split(_convolution(fold(x, x_dim, 1, num_models), weight.flatten(0, 1), bias, *options), 1, num_models)


def _differentiable(lowering: str) -> str:
    """The kernel in C has no derivatives forward."""
    return "grouped" if lowering == "direct" and has_tangents() else lowering


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    geometry, (_, for_x, for_weight) = Geometry(*ctx.options[:-1]), ctx.options[-1]
    # Kernels that compute both gradients do so in one call.
    both = needs_x and needs_weight and for_x == for_weight
    dx, dweight, dbias = _gradients(for_x, grad, x, weight, geometry, needs_x, both)
    if needs_weight and not both:
        _, dweight, dbias = _gradients(for_weight, grad, x, weight, geometry, False, True)
    if needs_bias and dbias is None:
        dbias = grad.flatten(3).sum((1, 3))
    return dx, dweight, dbias if needs_bias else None, *(None,) * len(ctx.options)


def _gradients(
    lowering: str, grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, for_x: bool, for_weight: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input and filters from that of the output ``[M,N,GO,L]``, if they are needed.

    The third is the bias's, where the filters' comes with it.
    """
    lowering = _differentiable(lowering)
    if lowering in _KERNELS:
        convolve, correlate = _KERNELS[lowering]
        big, small = (x, grad) if geometry.transposed else (grad, x)
        dx = convolve(grad, weight, geometry, None if geometry.transposed else x.shape[3:]) if for_x else None
        dweight, of_big = correlate(big, small, weight, geometry) if for_weight else (None, None)
        return dx, dweight, None if geometry.transposed else of_big
    mask = [for_x, for_weight, False]
    if not any(mask):
        return None, None, None
    if lowering == "loop":
        members = zip(grad.unbind(), x.unbind(), weight.unbind(), strict=True)
        pairs = [_convolution_backward(*member, None, *geometry, mask)[:2] for member in members]
        of_x, of_weight = zip(*pairs, strict=True)
        return torch.stack(of_x) if for_x else None, torch.stack(of_weight) if for_weight else None, None
    # [M,N,C,S], [M,GO,I,K] -> [N,MC,S], [MGO,I,K] -> [N,MC,S], [MGO,I,K] -> [M,N,C,S], [M,GO,I,K]
    num_models = x.shape[0]
    images, options = (fold(one, 0, 1, num_models) for one in (grad, x)), (*geometry[:-1], geometry.groups * num_models)
    dx, dweight, _ = _convolution_backward(*images, weight.flatten(0, 1), None, *options, mask)
    dweight = dweight.unflatten(0, weight.shape[:2]) if for_weight else None
    return split(dx, 1, num_models).movedim(1, 0) if for_x else None, dweight, None


_stacked = Operator(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool transposed, "
    "int[] output_padding, int groups, str[] lowerings) -> Tensor",
    *(_forward, _setup_context, _backward),
)
