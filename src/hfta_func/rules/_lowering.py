"""The table of lowerings: rows for each operator; the first row that matches a call decides.

The rows for the CPU come from ``python -m benchmarks lowerings`` on two cores, those for CUDA from the same with ``--device
cuda --samples 8`` on an H100, with PyTorch 2.11 and cuDNN's own choice of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._kernels import recurrent
from hfta_func._kernels.convolution import block, program
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


class Convolution(NamedTuple):
    """The convolution of one member: the shapes of input and filters, and the options in PyTorch's order."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def pixels(self) -> int:
        """The pixels of one image of the input."""
        return math.prod(self.x[2:])

    @property
    def pixels_out(self) -> int:
        """The pixels of one image of the output, if it is padded as usual and not transposed."""
        return math.prod(-(-size // step) for size, step in zip(self.x[2:], self.stride, strict=True))

    @property
    def fewer_pixels(self) -> int:
        """The pixels on the side with fewer: the output, or the input if it is transposed."""
        return self.pixels if self.transposed else self.pixels_out

    @property
    def is_pointwise(self) -> bool:
        """Whether it has 1x1 filters, one group, and no padding."""
        return math.prod(self.weight[2:]) == 1 and self.groups == 1 and not any(self.padding)

    @property
    def is_one_pixel(self) -> bool:
        """Whether it computes one pixel per image, or if transposed reads one: a linear layer."""
        if self.transposed:
            return all(size == 1 for size in self.x[2:]) and not any(self.padding)
        axes = zip(self.x[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True)
        return all(size + 2 * pad - step * (taps - 1) - 1 < jump for size, taps, jump, pad, step in axes)

    def holds(self, entries: int) -> bool:
        """Whether the filters have at least so many entries."""
        return math.prod(self.weight) >= entries

    def is_uneven(self, pixels: int) -> bool:
        """Whether at most 4 channels become 32 or more, or the other way round, on so many pixels of all images."""
        few, many = sorted(self.weight[:2])
        return few <= 4 and many >= 32 and self.groups == 1 and self.x[0] * self.pixels >= pixels

    def shrinks(self) -> bool:
        """Whether it makes at most 16 pixels of more, or at most 4 with at least 1 MB of filters."""
        few = (self.pixels_out <= 2**4 and max(self.stride) > 1) or (self.pixels_out <= 4 and self.holds(2**18))
        return few and not self.transposed and self.groups == 1

    def fills_blocks(self, size: int) -> bool:
        """Whether the channels of a group fill blocks of this size, at a stride of 1."""
        ins, outs = self.weight[1], self.weight[0] // self.groups
        return ins % size == outs % size == 0 and max(self.stride) == 1 and not self.transposed


class Row(NamedTuple):
    """A row of the table: where ``when`` holds use ``lowering``, for the given ``reason``."""

    when: Callable[[Case], bool]
    lowering: str
    reason: str


def always(case: Case) -> bool:
    """True for every call."""
    return True


def convolution_of(case: Case) -> Convolution:
    """The convolution of one member in a case."""
    return Convolution(*case.shapes[:2], *case.options[-6:])  # pyright: ignore


def _on(device: str, condition: Callable[[Convolution], bool]) -> Callable[[Case], bool]:
    """A condition on the convolution of one member on a device."""
    return lambda case: case.device == device and condition(convolution_of(case))


def _is_direct(case: Case) -> bool:
    """What PyTorch's kernels in groups are slow at, unless filters exceed the cache."""
    if case.device != "cpu" or case.tangents or torch.compiler.is_exporting():
        return False
    one = convolution_of(case)
    is_slow = not one.fills_blocks(block()) or _POINTWISE.when(case)
    # The gradient of filters adds up in a buffer of as many vectors.
    most = 2**17 if case.op.endswith("weight_grad") else 2**18
    return is_slow and not one.holds(most) and program(case.dtype) is not None


_DIRECT = Row(_is_direct, "direct", "no channels that fill blocks of PyTorch's kernels: a kernel in C")
_GROUPED = Row(always, "grouped", "one group per member")
_POINTWISE = Row(
    # At most 32 KB of filters.
    _on("cpu", lambda one: not one.holds(2**13 + 1) and one.is_pointwise and one.pixels >= 2**7),
    *("sample_matmul", "small 1x1 filters: images keep their memory layout"),
)


def _is_few_points(one: Convolution) -> bool:
    is_small = not one.holds(2**12 + 1) and one.x[0] * one.pixels * max(one.weight[:2]) <= 2**17
    return is_small and one.is_pointwise and one.pixels >= 2**5


_FEW_POINTS = _POINTWISE._replace(when=_on("cpu", _is_few_points))
_ONE_PIXEL = Row(_on("cpu", lambda one: one.is_one_pixel), "matmul", "one pixel per image: a linear layer")
_ONE_PIXEL_OF_A_BATCH = _ONE_PIXEL._replace(when=_on("cpu", lambda one: one.x[0] >= 8 and one.is_one_pixel))
_FEW_PIXELS = Row(
    # At least 1 MB of filters.
    _on("cpu", lambda one: one.x[0] * one.fewer_pixels <= 2**6 and one.holds(2**18)),
    *("matmul", "few pixels: a short product writes the large filters once"),
)


def _is_large_filter(case: Case) -> bool:
    # A loop takes long to compile, and then gains nothing.
    if case.device != "cpu" or case.num_models == 1 or case.compiling:
        return False
    one = convolution_of(case)
    return one.holds(2**19) or (one.holds(2**17) and not one.fills_blocks(block()))


_LARGE = Row(_is_large_filter, "loop", "filters per member that in a loop stay in the cache")
_SMALL = (_FEW_POINTS, _DIRECT, _LARGE, _POINTWISE, _GROUPED)

# cuDNN has fast kernels for a few convolutions in groups only; the others take up to 30 times as long.
_CUDA_ONE_PIXEL = _ONE_PIXEL._replace(when=_on("cuda", lambda one: one.is_one_pixel and one.holds(2**13)))
_CUDA_SHRINKS = Row(_on("cuda", Convolution.shrinks), "matmul", "few pixels: one batched product")
_CUDA_POINTWISE = Row(
    _on("cuda", lambda one: one.is_pointwise and one.pixels_out >= 2**6),
    *("sample_matmul", "1x1 filters: one batched product"),
)
_CUDA_LARGE = "loop", "4 MB of filters per member, for which groups have slow kernels"
_CUDA_UNEVEN = "loop", "few channels to many, which kernels for groups do not fill"


def _is_fused_lstm(case: Case) -> bool:
    """An LSTM with a fused kernel, unless its steps are so short that several members in one product take less time."""
    _, h, c, _, weight, *_ = case.shapes
    if case.device != "cpu" or case.dtype is torch.float64 or h is None or h != c or case.shared[4]:
        return False
    if case.compiling:
        # A loop takes long to compile; it pays if the cache does not hold the weights of all members.
        return case.num_models * math.prod(weight or ()) > 2**16
    return recurrent.program(case.dtype) is None and math.prod(h[-2:]) >= min(2**8, 4 * case.num_models**2)


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
        _CUDA_POINTWISE._replace(when=_on("cuda", lambda one: one.is_pointwise and len(one.x) == 3)),
        # A transposed convolution runs by the kernel that computes the gradient of an ordinary one.
        Row(_on("cuda", lambda one: one.transposed and one.holds(2**20)), *_CUDA_LARGE),
        Row(_on("cuda", lambda one: one.transposed and one.is_uneven(2**16)), *_CUDA_UNEVEN),
        *(_LOOP_ON_XLA, _ONE_PIXEL_OF_A_BATCH, *_SMALL),
    ),
    "convolution_input_grad": (
        Row(lambda case: _CUDA_ONE_PIXEL.when(case) and not convolution_of(case).transposed, *_CUDA_ONE_PIXEL[1:]),
        *(_CUDA_SHRINKS, _CUDA_POINTWISE),
        Row(_on("cuda", lambda one: not one.transposed and one.holds(2**20)), *_CUDA_LARGE),
        Row(_on("cuda", lambda one: not one.transposed and one.is_uneven(2**16)), *_CUDA_UNEVEN),
        *(_LOOP_ON_XLA, _ONE_PIXEL_OF_A_BATCH, *_SMALL),
    ),
    "convolution_weight_grad": (
        *(_CUDA_ONE_PIXEL, _CUDA_SHRINKS, _CUDA_POINTWISE),
        Row(_on("cuda", lambda one: one.is_uneven(2**17)), *_CUDA_UNEVEN),
        *(_LOOP_ON_XLA, _ONE_PIXEL, _FEW_PIXELS, *_SMALL),
    ),
    "lstm.input": (
        Row(lambda case: case.tangents, "batched", "forward mode: PyTorch's fused kernel has no derivative"),
        Row(_is_fused_lstm, "loop", "a fused kernel per member"),
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
    ("grouped", "matmul", "sample_matmul", "direct"),
)
LOWERINGS["convolution"] += ("wide",)
"""Lowerings that overrides can force besides ``"loop"``, by operator, for those that are timed where they run;
one that is missing has those of its rows."""


def candidates(case: Case) -> list[str]:
    """The lowerings that may be faster for a convolution than the table's choice: those of its rows, and the loop."""
    # Members that share nothing; an unfolded image pays for few pixels only.
    one = convolution_of(case)
    others = {"folded", "wide", *(("matmul",) if one.x[0] * one.fewer_pixels > 2**9 else ())}
    return [name for name in (*(row.lowering for row in TABLE[case.op]), "loop") if name not in others]


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
