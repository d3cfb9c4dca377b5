"""The table of lowerings: rows for each operator; the first row that matches a call decides.

The rows for the CPU come from ``python -m benchmarks lowerings`` on two cores, those for CUDA from the same with ``--device
cuda --samples 8`` on an H100, with PyTorch 2.11 and cuDNN's own choice of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._torch import has_tangents


class Case(NamedTuple):
    """One call of an operator on M members, as the table sees it."""

    op: str
    num_models: int
    device: str  # type of the device, such as "cpu"
    dtype: torch.dtype | None  # of the first tensor
    shapes: tuple[tuple[int, ...] | None, ...]  # of each tensor argument for one member; None for a missing tensor
    shared: tuple[bool, ...]  # whether all members share each tensor argument
    options: tuple[Any, ...]  # the arguments that are not tensors, in order
    tangents: bool  # whether forward-mode derivatives are taken
    compiling: bool  # whether the call is captured in a graph


def make_case(op: str, num_models: int, values: Iterable[Any], dims: Iterable[Any]) -> Case:
    """The case of a call, from its arguments and their model axes."""
    tensors, options = [], []
    for value, dim in zip(values, dims, strict=True):
        if isinstance(value, Tensor):
            tensors.append((value, dim))
        elif isinstance(dim, tuple):
            tensors.extend(zip(value, dim, strict=True))
        else:
            options.append(tuple(value) if isinstance(value, list) else value)
    first, shapes = tensors[0][0], tuple(member_shape(x, dim) for x, dim in tensors)
    shared, modes = tuple(dim is None for _, dim in tensors), (has_tangents(), torch.compiler.is_compiling())
    return Case(op, num_models, first.device.type, first.dtype, shapes, shared, tuple(options), *modes)


class Row(NamedTuple):
    """A row of the table: where ``when`` holds use ``lowering``, for the given ``reason``."""

    when: Callable[[Case], bool]
    lowering: str
    reason: str


def always(case: Case) -> bool:
    """True for every call."""
    return True


def _on(device: str, *conditions: Callable[..., bool]) -> Callable[[Case], bool]:
    """Conditions on the convolution of one member on a device: its input, filters and geometry, the last six options."""

    def when(case: Case) -> bool:
        one = case.shapes[0], case.shapes[1], case.options[-6:]
        return case.device == device and all(condition(*one) for condition in conditions)

    return when


def _pixels(x: Sequence[int], stride: Sequence[int]) -> int:
    """Of an image after a convolution that pads it as usual."""
    return math.prod(-(-size // step) for size, step in zip(x[2:], stride, strict=True))


def _is_one_pixel(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    """Whether a convolution computes one pixel per image, or a transposed one reads one: a linear layer."""
    stride, padding, dilation, transposed, *_ = options
    if transposed:
        return all(size == 1 for size in x[2:]) and not any(padding)
    return all(
        size + 2 * pad - step * (taps - 1) - 1 < jump
        for size, taps, jump, pad, step in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    )


def _is_few_pixels_of_large_filters(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    """At most 64 pixels in all output images, input images if transposed, and at least 1 MB of filters."""
    stride, *_, transposed, _, _ = options
    pixels = math.prod(x[2:]) if transposed else _pixels(x, stride)
    return x[0] * pixels <= 2**6 and math.prod(weight) >= 2**18


def _has_few_channels_on_large_images(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    few = min(weight[0], weight[1]) <= 4 and options[-1] == 1
    return few and len(x) > 3 and x[0] * math.prod(x[2:]) >= 2**14


def _has_few_channels_in(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    few = x[1] <= 4 and not options[3]
    return few and len(x) > 3 and math.prod(weight[2:]) >= 9 and x[0] * math.prod(x[2:]) >= 2**11


def _is_small_and_pointwise(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    """1x1 filters of at most 16 KB, on at least 128 pixels."""
    return math.prod(weight) <= 2**12 and _is_pointwise(x, weight, options) and math.prod(x[2:]) >= 2**7


def _is_pointwise(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    _, padding, _, _, _, groups = options
    return math.prod(weight[2:]) == 1 and groups == 1 and not any(padding)


def _are_sequences(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    return len(x) == 3


def _has_many_pixels(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    return _pixels(x, options[0]) >= 2**6


def _is_transposed(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    return options[3]


def _is_plain(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    return not options[3]


def _shrinks_to_few_pixels(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
    """At most 16 pixels of an image that had more, or at most 4 and at least 1 MB of filters."""
    stride, *_, transposed, _, groups = options
    pixels = _pixels(x, stride)
    few = (pixels <= 2**4 and max(stride) > 1) or (pixels <= 4 and math.prod(weight) >= 2**18)
    return few and not transposed and groups == 1


def _holds(entries: int) -> Callable[..., bool]:
    """Whether a filter bank has at least so many entries."""
    return lambda x, weight, options: math.prod(weight) >= entries


def _is_uneven(pixels: int) -> Callable[..., bool]:
    """Whether at most 4 channels become 32 or more, or the other way round, on so many pixels of all images."""

    def condition(x: Sequence[int], weight: Sequence[int], options: Sequence[Any]) -> bool:
        few, many = sorted(weight[:2])
        return few <= 4 and many >= 32 and options[-1] == 1 and x[0] * math.prod(x[2:]) >= pixels

    return condition


def _is_small(case: Case) -> bool:
    """At most 33 million products of two numbers in all members."""
    if case.device != "cpu" or case.dtype not in (torch.float32, torch.float64):
        return False
    x, weight, (stride, *_, transposed, _, groups) = case.shapes[0], case.shapes[1], case.options[-6:]
    assert x is not None and weight is not None
    pixels = math.prod(x[2:]) if transposed else _pixels(x, stride)
    return groups == 1 and case.num_models * x[0] * pixels * math.prod(weight) <= 2**25


_GROUPED = Row(always, "grouped", "one group per member")
_POINTWISE = Row(
    _on("cpu", _is_small_and_pointwise), "sample_matmul", "small 1x1 filters: images keep their memory layout"
)
_ONE_PIXEL = Row(_on("cpu", _is_one_pixel), "matmul", "one pixel per image: a linear layer")
_ONE_PIXEL_OF_A_BATCH = _ONE_PIXEL._replace(
    when=_on("cpu", lambda x, weight, options: x[0] >= 8 and _is_one_pixel(x, weight, options))
)
_FEW_PIXELS = Row(
    _on("cpu", _is_few_pixels_of_large_filters), "matmul", "few pixels: a short product writes the large filters once"
)
_has_large_filters = _on("cpu", _holds(2**17))
# A loop takes long to compile, and then gains nothing.
_LARGE = Row(
    lambda case: case.num_models > 1 and not case.compiling and _has_large_filters(case),
    "loop",
    "512 KB of filters per member: in a loop they stay in the cache",
)
_FEW = Row(_on("cpu", _has_few_channels_on_large_images), "loop", "few channels, which grouped kernels do not fill")
_FEW_IN = Row(_on("cpu", _has_few_channels_in), "channels_last", "few input channels: pixels are contiguous")
# A kernel converts what it reads and writes to a layout of its own, which takes longer than so few products.
# An exported program keeps its convolutions, which other runtimes know.
_WINDOWS = Row(
    lambda case: case.compiling and not torch.compiler.is_exporting() and _is_small(case),
    "windows",
    "small, in a graph: one batched product",
)
_SMALL = (_POINTWISE, _WINDOWS, _FEW, _FEW_IN, _GROUPED)

# cuDNN has fast kernels for a few convolutions in groups only; the others take up to 30 times as long.
_CUDA_ONE_PIXEL = Row(_on("cuda", _is_one_pixel, _holds(2**13)), "matmul", "one pixel per image: a linear layer")
_CUDA_SHRINKS = Row(_on("cuda", _shrinks_to_few_pixels), "matmul", "few pixels: one batched product")
_CUDA_POINTWISE = Row(_on("cuda", _is_pointwise, _has_many_pixels), "sample_matmul", "1x1 filters: one batched product")
_CUDA_LARGE = "loop", "4 MB of filters per member, for which groups have slow kernels"
_CUDA_UNEVEN = "loop", "few channels to many, which kernels for groups do not fill"


def _is_fused_lstm_beyond_cache(case: Case) -> bool:
    """An LSTM with a fused kernel, if a step of all members reads more recurrent weights than the cache holds."""
    _, h, c, _, recurrent, *_ = case.shapes
    is_fused = case.device == "cpu" and case.dtype is not torch.float64 and h == c
    return is_fused and case.num_models * math.prod(recurrent or ()) * 4 > 2**18


def _is_large(case: Case) -> bool:
    # A compiler fuses scale and shift by itself, and takes long to compile a loop over members.
    return not case.compiling and case.device == "cpu" and case.num_models * math.prod(case.shapes[0] or ()) >= 2**19


_BATCHED = Row(always, "batched", "one batched product a time step")
_LOOP_ON_XLA = Row(
    lambda case: case.device == "xla",
    "loop",
    "XLA computes groups as one dense convolution, in which NaN times zero crosses members",
)

TABLE: dict[str, tuple[Row, ...]] = {
    "convolution": (
        Row(lambda case: case.shared[1], "folded", "shared filters: members join the batch"),
        Row(lambda case: case.shared[0], "wide", "one shared input: all members' filters in one convolution"),
        _CUDA_ONE_PIXEL,
        _CUDA_POINTWISE._replace(when=_on("cuda", _is_pointwise, _are_sequences)),
        # A transposed convolution runs by the kernel that computes the gradient of an ordinary one.
        Row(_on("cuda", _is_transposed, _holds(2**20)), *_CUDA_LARGE),
        Row(_on("cuda", _is_transposed, _is_uneven(2**16)), *_CUDA_UNEVEN),
        *(_LOOP_ON_XLA, _ONE_PIXEL_OF_A_BATCH, _LARGE, *_SMALL),
    ),
    "convolution_input_grad": (
        _CUDA_ONE_PIXEL._replace(when=_on("cuda", _is_plain, _is_one_pixel, _holds(2**13))),
        *(_CUDA_SHRINKS, _CUDA_POINTWISE),
        Row(_on("cuda", _is_plain, _holds(2**20)), *_CUDA_LARGE),
        Row(_on("cuda", _is_plain, _is_uneven(2**16)), *_CUDA_UNEVEN),
        *(_LOOP_ON_XLA, _ONE_PIXEL_OF_A_BATCH, _LARGE, _POINTWISE, _WINDOWS),
        *(_FEW._replace(when=lambda case: _FEW.when(case) and not case.options[-3]), _FEW_IN, _GROUPED),
    ),
    "convolution_weight_grad": (
        *(_CUDA_ONE_PIXEL, _CUDA_SHRINKS, _CUDA_POINTWISE),
        Row(_on("cuda", _is_uneven(2**17)), *_CUDA_UNEVEN),
        *(_LOOP_ON_XLA, _ONE_PIXEL, _FEW_PIXELS, _LARGE, *_SMALL),
    ),
    **dict.fromkeys(
        ("multi_margin_loss", "multilabel_margin_loss"),
        (
            Row(lambda case: case.shapes[0] == (), "loop", "a number, which has no rows to fold"),
            Row(always, "folded", "members join the rows"),
        ),
    ),
    "layer_norm": (
        Row(lambda case: all(case.shared[1:]), "folded", "shared scale and shift: all members' rows in one kernel"),
        Row(_is_large, "loop", "2 MB or more: a kernel per member scales and shifts in one pass"),
        Row(always, "folded", "all members' rows at once, then scale and shift"),
    ),
    "linalg_pinv.atol_rtol_tensor": (
        Row(lambda case: case.device == "xla", "loop", "XLA mixes up the tolerances of several matrices"),
        Row(always, "folded", "a batch of matrices"),
    ),
    "lstm.input": (
        Row(lambda case: case.tangents, "batched", "forward mode: PyTorch's fused kernel has no derivative"),
        Row(_is_fused_lstm_beyond_cache, "loop", "a fused kernel per member, whose weights stay in the cache"),
        _BATCHED,
    ),
    **dict.fromkeys(
        ("lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"),
        (_BATCHED,),
    ),
}
"""The rows of each operator with a rule, in order; the last always matches. Operators with several lowerings are listed here;
an operator with a single one is added when its rule is registered."""

LOWERINGS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("convolution", "convolution_input_grad", "convolution_weight_grad"),
    ("grouped", "channels_last", "matmul", "sample_matmul", "windows"),
)
LOWERINGS["convolution"] += ("wide",)
"""The lowerings that overrides can force besides ``"loop"``; an operator that is missing has those of its rows."""

UNLOOPED = frozenset({"_pack_padded_sequence", "_pad_packed_sequence"})
"""Operators without a loop: they return lengths that members share, while a loop would give each member its own."""

FAMILIES: dict[str, str] = {"convolution_input_grad": "conv", "convolution_weight_grad": "conv"}
"""The family of each operator with a rule."""


def enter(op: str, family: str, reason: str, lowering: str = "folded") -> None:
    """Add an operator to a family, and to the table if it is missing there."""
    FAMILIES[op] = family
    TABLE.setdefault(op, (Row(always, lowering, reason),))


def known_lowerings(name: str) -> set[str]:
    """The lowerings of an operator, a family or ``"all"`` operators; none for an unknown name."""
    lowerings = set()
    for op, rows in TABLE.items():
        if name in titles(op):
            lowerings |= set(LOWERINGS.get(op, ())) | {row.lowering for row in rows}
    return lowerings | {"loop"} if lowerings and name not in UNLOOPED else lowerings


def titles(op: str) -> tuple[str, ...]:
    """The names that overrides can use for an operator, from the narrowest to the widest."""
    return op, op.partition(".")[0], FAMILIES[op], "all"


def member_shape(x: Any, dim: int | None) -> tuple[int, ...] | None:
    """The shape of an argument for one member; None if it is not a tensor."""
    if not isinstance(x, Tensor):
        return None
    shape = tuple(x.shape)
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]
