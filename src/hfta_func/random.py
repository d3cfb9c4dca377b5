"""Keys and counter-based noise.

A key is one ``int64``; keys ``[...]`` draw ``[..., *shape]``, so one key per member gives independent streams, and a
member draws the same numbers alone as in an array of any size. All draws are integer arithmetic followed by one exact
conversion, so they are bit-identical on every device, eager or compiled.

References:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (counter-based generators).
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64, its mixer).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._kernels import noise
from hfta_func._torch import constant_to_compiler, num_dispatch_modes, outside_transforms, thread_generator
from hfta_func.errors import HyperparameterError

# SplitMix64's constants as signed integers, because torch's uint64 lacks most operators.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64

_kernels: Any = torch.ops.hfta_func
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Significand bits; a dtype represents multiples of ``2**-digits`` in [0, 1) exactly."""


_lock = threading.RLock()
# Another thread may hold it while a process is forked, or the thread itself, which then leaves it in both processes.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.RLock()))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A block, one at a time, that may seed generators: PyTorch's is this thread's own, Python's and NumPy's are not."""
    with _lock, thread_generator():
        yield


def keys(seeds: Sequence[int] | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """Make keys ``int64[M]`` from seeds, one per member; equal seeds give equal noise.

    Args:
        seeds: One 64-bit integer per member.
        device: Where the keys go.

    Raises:
        HyperparameterError: if a seed is not an integer that fits in 64 signed bits.

    Example:
        >>> keys([7, 8, 7])
        tensor([7, 8, 7])
    """
    if isinstance(seeds, Tensor):
        if seeds.is_floating_point():
            raise HyperparameterError(f"seeds are {seeds.dtype}; seeds must be integers")
        return seeds.to(device=device, dtype=torch.int64)
    for member, seed in enumerate(seeds := list(seeds)):
        if not isinstance(seed, Integral) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
            raise HyperparameterError(f"model {member}: seed {seed!r} is not a 64-bit integer; pass one int per model")
    return torch.tensor(seeds, dtype=torch.int64, device=device)


# Not `>>`, which XLA computes as a division that rounds towards zero.
_signed_shift = torch.bitwise_right_shift


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return _signed_shift(z, by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which every input bit affects every output bit."""
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _hash(z: Tensor) -> Tensor:
    """The mixer for keys, stored because a chain of mixers written out would grow eightfold with every link."""
    if noise.is_fast(z):
        return _kernels.mix(z)
    mixed = _mix(z)
    # Inductor stores a strided view, instead of repeating its expression wherever it is read.
    return mixed.as_strided(mixed.shape, mixed.stride()) if torch.compiler.is_compiling() else mixed


def fold_in(key: Tensor, data: Tensor | int) -> Tensor:
    """A new key from a key and an integer; distinct pairs give independent streams.

    Args:
        key: Keys ``[...]``.
        data: For example a step, a call site or an epoch; a tensor broadcasts against the keys.

    Example:
        >>> bool(fold_in(keys([1]), 2) == fold_in(keys([2]), 1))
        False
    """
    if isinstance(data, int):
        product = (data * _MIX2 + 2**63) % 2**64 - 2**63
    else:
        # Without the xor, inductor turns a range times a number into an index expression, which must not overflow.
        product = (data ^ 0 if torch.compiler.is_compiling() else data) * _MIX2
    return _hash(_hash(key + _GOLDEN) ^ product)


class Stream(NamedTuple):
    """Start and stride of the counters of keys ``[...]``; every draw takes it in place of keys.

    ``padding`` has ``draw(name, shape)``, which returns the positions in a draw that units have, None for those in order.
    """

    start: Tensor
    stride: Tensor
    padding: Any = None


def stream(key: Tensor) -> Stream:
    """Start and odd stride of each key, both hashes of it: with one stride for all, streams would be shifted copies."""
    start = _hash(key + _GOLDEN)
    # A stride that is data keeps inductor from folding it into an index expression, which its C++ backend computes
    # wrongly on overflow.
    return Stream(start, _hash(start + _GOLDEN) | 1)


def streams(key: Tensor, first: int, count: int) -> list[Stream]:
    """The streams of a key ``[...]`` folded with ``first``, ``first + 1`` and so on, made together."""
    if noise.is_fast(key):
        starts, strides = _kernels.streams(key, first, count)
    else:
        starts, strides, _ = stream(fold_in(key.unsqueeze(-1), torch.arange(first, first + count, device=key.device)))
    return [*map(Stream, starts.unbind(-1), strides.unbind(-1))]


def bits(key: Tensor | Stream, shape: Sequence[int]) -> Tensor:
    """Uniform bits ``int64[..., *shape]`` for keys ``[...]``: word ``i`` is the mixer of ``start + i * stride``.

    Args:
        key: Keys ``[...]``.
        shape: What one key draws.

    Example:
        >>> bits(keys([1, 2]), (3,)).shape
        torch.Size([2, 3])
    """
    start, stride, padding = stream(key) if isinstance(key, Tensor) else key
    position = None if padding is None else padding.draw("draw", shape)
    if noise.is_fast(start):
        return _at(_kernels.words(start, stride, shape), position)
    if position is not None:
        return _mix(start + stride * (position + 1))
    expand = (*start.shape, *(1,) * len(shape))
    index = torch.arange(1, math.prod(shape) + 1, device=start.device).reshape(shape)
    return _mix(start.reshape(expand) + stride.reshape(expand) * index)


def _at(drawn: Tensor, position: Tensor | None) -> Tensor:
    return drawn if position is None else drawn.flatten().gather(0, position.flatten()).reshape(position.shape)


def uniform(key: Tensor | Stream, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform draws ``[..., *shape]`` on [0, 1), on a grid of 2^-24 for float32.

    Args:
        key: Keys ``[...]``.
        shape: What one key draws.
        dtype: Floating-point dtype; every multiple of its grid is equally likely.

    Example:
        >>> alone, array = uniform(keys([3]), (2,)), uniform(keys([1, 2, 3]), (2,))
        >>> torch.equal(alone[0], array[2])
        True
    """
    digits = _DIGITS[dtype]
    return _shift(bits(key, shape), 64 - digits).to(dtype) * 2.0**-digits


def bernoulli(key: Tensor | Stream, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """True with probability ``p`` (rounded to a multiple of 2^-53): ``bool[..., *shape]`` for keys ``[...]``.

    Args:
        key: Keys ``[...]``.
        p: A number, or a tensor that broadcasts against ``[..., *shape]``.
        shape: What one key draws.

    Example:
        >>> bernoulli(keys([1, 2]), 1.0, (2,))
        tensor([[True, True], [True, True]])
    """
    limit = noise.limit_of(p)
    start, stride, padding = key = stream(key) if isinstance(key, Tensor) else key
    if noise.is_fast(start) and not (isinstance(p, Tensor) and (p.dim() or start.dim())):
        position = None if padding is None else padding.draw("draw", shape)
        below = _kernels.words_below(start, stride, shape, limit if isinstance(p, Tensor) else torch.tensor(limit))
        return _at(below, position)
    return _signed_shift(bits(key, shape), 11) < limit


def randint(key: Tensor | Stream, low: int, high: int, shape: Sequence[int]) -> Tensor:
    """Integers ``int64[..., *shape]`` in ``[low, high)``, with a bias below ``(high - low) / 2^63``.

    Args:
        key: Keys ``[...]``.
        low: The smallest integer.
        high: One more than the largest.
        shape: What one key draws.

    Raises:
        ValueError: if there is no integer in between.

    Example:
        >>> randint(keys([1, 2]), 7, 8, (2,))
        tensor([[7, 7], [7, 7]])
    """
    if high <= low:
        raise ValueError(f"randint draws from low={low} up to high={high}, excluded; high must be larger than low")
    return _shift(bits(key, shape), 1) % (high - low) + low


def categorical(key: Tensor | Stream, weights: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Classes ``int64[..., *shape]`` drawn in proportion to weights, by the inverse of their distribution function.

    The weights are rounded to multiples of the largest one times ``C * 2^-52``, so that sums are exact in any order.

    Args:
        key: Keys ``[...]``.
        weights: Not negative, ``[..., C]``; all axes but the last broadcast against ``[..., *shape]``. Others than finite
            positive ones count as zero, and without a positive one the last class is drawn.
        shape: What one key draws.

    Example:
        >>> categorical(keys([1, 2]), torch.tensor([0.0, 3.0, 0.0]), (2,))
        tensor([[1, 1], [1, 1]])
    """
    num_classes, share = weights.shape[-1], weights / weights.amax(-1, keepdim=True)
    share = torch.where(share > 0, share.double(), 0) * ((1 << 52) // num_classes)
    edges = share.to(torch.int64).cumsum(-1)
    drawn = (uniform(key, shape, dtype=torch.float64).unsqueeze(-1) * edges[..., -1:]).to(torch.int64)
    return (edges <= drawn).sum(-1).clamp(max=num_classes - 1)


def permutation(key: Tensor | Stream, n: int) -> Tensor:
    """A random order ``int64[..., n]`` of ``0`` to ``n - 1`` per key.

    Args:
        key: Keys ``[...]``.
        n: Number of elements.

    Example:
        >>> permutation(keys([1, 2]), 4).sort().values
        tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    """
    return bits(key, (n,)).argsort(dim=-1, stable=True)


def normal(key: Tensor | Stream, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal draws ``[..., *shape]``: quantiles of 24-bit uniforms, at most 5.42 in magnitude.

    The quantile function is interpolated linearly in 6400 segments, 256 for each power of two of the tail probability
    (error below 1e-6), in fixed-point integers: unlike logarithm and cosine, these give the same bits on every device.

    Args:
        key: Keys ``[...]``.
        shape: What one key draws.
        dtype: Floating-point dtype of the result.

    Example:
        >>> normal(keys([1, 2]), (3,)).shape
        torch.Size([2, 3])
    """
    words = bits(key, shape)
    if noise.is_fast(words):
        return _kernels.quantiles(words, *_NORMAL[torch.device("cpu")]).to(dtype)
    draws = _signed_shift(words, 40)
    # The tail probability in units of 2^-25: an odd number, so far enough from a power of two that a rounding error of
    # the logarithm cannot change the octave.
    tail = ((1 << 24) - 1) - ((draws ^ _signed_shift(draws, 63)) << 1)
    octave = torch.floor(torch.log2(tail.to(torch.float64))).to(torch.int64)
    position = (tail << (23 - octave)) & ((1 << 23) - 1)
    segment, within = (octave << _STEPS) + _signed_shift(position, _WITHIN), position & ((1 << _WITHIN) - 1)
    # index_select, because under vmap indexing with a tensor without axes reads its value.
    _keep_normal_tables(draws.device)
    tables = _NORMAL.get(draws.device) or [table.to(draws.device) for table in _NORMAL[torch.device("cpu")]]
    start, slope = (table.index_select(0, segment.flatten()).reshape(segment.shape) for table in tables)
    magnitude = (start << _WITHIN) + slope * within
    signed = torch.where(draws < 0, -magnitude, magnitude)
    return (signed.to(torch.float64) * 2.0 ** -(_FRACTION + _WITHIN)).to(dtype)


_STEPS = 8  # 2^8 segments per octave
_WITHIN = 23 - _STEPS  # bits of a position within a segment
_FRACTION = 26  # fractional bits of the tabulated quantiles


def _quantiles() -> tuple[Tensor, Tensor]:
    octave = torch.arange(25, device="cpu").repeat_interleave(1 << _STEPS)
    step = torch.arange(1 << _STEPS, device="cpu").repeat(25)
    edges = torch.ldexp(1 + step.double() * 2.0**-_STEPS, octave - 25)
    quantiles = (-torch.special.ndtri(edges) * 2.0**_FRACTION).round().to(torch.int64)
    # The last octave is used only up to p = 1/2, where the quantile is zero.
    return quantiles[:-1], quantiles.diff()


_NORMAL = {torch.device("cpu"): _quantiles()}
"""Start and slope of every segment, by device."""


# The compiler calls it while it traces, so that graphs use the tables on the device.
@constant_to_compiler
def _keep_normal_tables(device: torch.device) -> bool:
    """Copy the tables to a device once: a copy at every draw would block the host and prevent CUDA graphs."""
    # Under a dispatch mode tensors may be fake or belong to a trace.
    if device not in _NORMAL and not num_dispatch_modes():
        # Inside a transform the copies would become its tensors.
        with outside_transforms(), torch.inference_mode(False):
            start, slope = _NORMAL[torch.device("cpu")]
            _NORMAL[device] = start.to(device), slope.to(device)
    return True
