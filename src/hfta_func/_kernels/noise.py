"""Words of noise by one kernel each; PyTorch's operators would take a dozen passes over memory.

The arithmetic is that of :mod:`hfta_func.random`, so the bits are the same. Each kernel is an operator with a batching rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native
from hfta_func._kernels.operators import define_operator, members_in_front, with_backward
from hfta_func._torch import has_tangents, inside_vmap, num_dispatch_modes, num_recorders

_HEAD = """
#define GOLDEN 0x9E3779B97F4A7C15u
#define MIX2 0x94D049BB133111EBu
static inline uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * MIX2;
    return z ^ (z >> 31);
}
"""
_EACH = "for (int64_t i = low; i < high; i++)"
_KEYS = "const uint64_t *start, const uint64_t *stride"
# To a C compiler a store to a char may change any variable, so the loop reads local ones.
_DRAWN = """{{
                    const uint64_t first = start[model], step = stride[model];
                    {declared} *restrict into = out + model * sizes[0];
                    for (int64_t i = low; i < high; i++)
                        into[i] = {value};
                }}"""
_WORD = "mix(first + step * (uint64_t)(i + 1))"
_WORDS = native.shared_out(_HEAD, f"{_KEYS}, uint64_t *out", _DRAWN.format(declared="uint64_t", value=_WORD))
_BELOW = native.shared_out(
    _HEAD,
    f"{_KEYS}, char *out, const int64_t *limit",
    _DRAWN.format(declared="const int64_t most = limit[model]; char", value=f"(int64_t){_WORD} >> 11 < most"),
)
_DROPPED = native.shared_out(
    "typedef KIND number;" + _HEAD,
    f"{_KEYS}, const int64_t *limit, const number *scale, const int64_t *width, const int64_t *row, const number *x, "
    "number *out",
    """{
                    const uint64_t first = start[model], step = stride[model];
                    number *restrict into = out + model * sizes[0];
                    const number *from = x + model * sizes[0], by = scale[model];
                    const int64_t most = limit[model], length = *row;
                    for (int64_t i = low, end; i < high; i = end) {
                        // Of rows of its own length, the word of an element.
                        const int64_t before = i / length, at = before * (width[model] - length) + 1;
                        end = (before + 1) * length < high ? (before + 1) * length : high;
                        for (int64_t j = i; j < end; j++)
                            into[j] = from[j] * (number)((int64_t)mix(first + step * (uint64_t)(j + at)) >> 11 < most) * by;
                    }
                }""",
)
_MIXED = native.shared_out(_HEAD, "const uint64_t *z, uint64_t *out", f"{_EACH} out[i] = mix(z[i])")
_STREAMS = native.shared_out(
    _HEAD,
    "const uint64_t *key, uint64_t *starts, uint64_t *strides, const int64_t *first",
    f"""{_EACH} {{
                        const int64_t at = model * sizes[0] + i;
                        starts[at] = mix(mix(mix(key[model] + GOLDEN) ^ (uint64_t)(*first + i) * MIX2) + GOLDEN);
                        strides[at] = mix(starts[at] + GOLDEN) | 1;
                    }}""",
)

_QUANTILES = native.shared_out(
    "",
    "const int64_t *words, const int64_t *start, const int64_t *slope, double *out",
    f"""{_EACH} {{
                        const int64_t draw = words[i] >> 40;
                        const uint64_t tail = 0xFFFFFF - ((draw ^ (draw >> 63)) << 1);
                        const int octave = 63 - __builtin_clzll(tail);
                        const int64_t place = (tail << (23 - octave)) & 0x7FFFFF, segment = (octave << 8) + (place >> 15);
                        const int64_t magnitude = (start[segment] << 15) + slope[segment] * (place & 0x7FFF);
                        out[i] = (draw < 0 ? -magnitude : magnitude) * 0x1p-41;
                    }}""",
)


def is_fast(key: Tensor) -> bool:
    """Whether to call the kernels: eagerly, on a CPU. A compiler makes one kernel of the arithmetic by itself."""
    observed = torch.compiler.is_compiling() or num_dispatch_modes() > num_recorders()
    return not observed and key.device.type == "cpu" and _defined()


_FEW = 1 << 16
"""Up to this many elements of all members, several operators are as fast as one whose gradient is a call of Python."""


def dropped(
    start: Tensor, stride: Tensor, padding: Any, x: Tensor, p: float | Tensor, scale: Any, redraws: bool
) -> tuple[Any, ...] | None:
    """A function and its arguments for an ``x`` kept with probability ``p`` times a scale, without a mask for the gradient.

    None where several operators do it, or are faster and ``redraws`` does not forbid that they keep masks.
    """
    is_each = isinstance(scale, Tensor)
    is_plain = type(x) is Tensor and x.layout is torch.strided and x.device.type == "cpu" and x.dtype in native.TYPES
    if not is_plain or start.dim() or not is_fast(start) or has_tangents():
        return None
    # In a replay, gradients call no Python. Rates have no gradient here.
    is_faster = redraws or num_recorders() > 0 or inside_vmap(x).numel() > _FEW
    if not is_faster or (is_each and (scale.dim() or inside_vmap(scale).requires_grad)):
        return None
    row = (None, x.numel()) if padding is None else padding.row(x.shape)
    if row is None:
        return None
    limit: Any = limit_of(p)
    limit, scale = (limit, scale) if is_each else (torch.tensor(limit), torch.tensor(scale, dtype=x.dtype))
    return drop, x, start, stride, limit, scale, *row


def drop(*args: Any) -> Tensor:
    """The operator ``drop``, see :func:`_drop`."""
    return torch.ops.hfta_func.drop(*args)


def limit_of(p: float | Tensor) -> Any:
    """What the 53 highest bits of a word, as a signed number, are below with probability ``p``."""
    # -2^52 stands for 0 and 2^52 for 1, which no word reaches.
    if isinstance(p, Tensor):
        return (p.double() * 2.0**53).round().to(torch.int64) - (1 << 52)
    return round(p * 2.0**53) - (1 << 52)


@functools.cache
def _defined() -> bool:
    """Define the operators; False if the kernels cannot be compiled.

    ``mix`` is the mixer of every word. ``words`` are those of streams, and ``words_below`` says whether their 53 highest
    bits, as a signed number, are below the stream's limit. ``quantiles`` are the normal numbers of words, see
    :func:`hfta_func.random.normal`. ``streams`` are those of a key folded with ``first``, ``first + 1`` and so on.
    """
    programs: list[Any] = [native.program(source) for source in (_MIXED, _WORDS, _BELOW, _STREAMS, _QUANTILES)]
    if None in programs or native.program(_DROPPED.replace("KIND", "float")) is None:
        return False
    mixed, words, below, streams, quantiles = programs

    def map_words(dtype: torch.dtype, run: Any, words: Tensor, *tables: Tensor) -> Tensor:
        out = torch.empty(words.shape, dtype=dtype)
        # Tables that transforms have expanded begin where they did.
        run([words.numel()], 1, [words.contiguous(), *tables, out])
        return out

    def mapped(dtype: torch.dtype, words: Tensor, *tables: Tensor) -> Tensor:
        return words.new_empty(words.shape, dtype=dtype)

    def draw(dtype: Any, run: Any, start: Tensor, stride: Tensor, shape: Sequence[int], *limit: Tensor) -> Tensor:
        out = torch.empty((*start.shape, *shape), dtype=dtype)
        if out.numel():
            limits = (one.expand(start.shape).contiguous() for one in limit)
            run([math.prod(shape)], start.numel(), [start.contiguous(), stride.contiguous(), out, *limits])
        return out

    def draw_streams(key: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        starts, strides = torch.empty((2, *key.shape, count), dtype=torch.int64)
        streams([count], key.numel(), [key.contiguous(), starts, strides, torch.tensor(first)])
        return starts, strides

    def drawn(dtype: torch.dtype, start: Tensor, stride: Tensor, shape: Sequence[int], *limit: Tensor) -> Tensor:
        return start.new_empty((*start.shape, *shape), dtype=dtype)

    def streams_like(key: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        return key.new_empty((*key.shape, count)), key.new_empty((*key.shape, count))

    keys = "Tensor start, Tensor stride, SymInt[] shape"
    for schema, dtype, run, compute, fake in (
        ("mix(Tensor z)", torch.int64, mixed, map_words, mapped),
        ("quantiles(Tensor words, Tensor start, Tensor slope)", torch.float64, quantiles, map_words, mapped),
        (f"words({keys})", torch.int64, words, draw, drawn),
        (f"words_below({keys}, Tensor limit)", torch.bool, below, draw, drawn),
    ):
        _define(f"{schema} -> Tensor", functools.partial(compute, dtype, run), functools.partial(fake, dtype))
    _define(
        "drop(Tensor x, Tensor start, Tensor stride, Tensor limit, Tensor scale, Tensor? width, SymInt row) -> Tensor",
        *(_drop, lambda x, *_: torch.empty_like(x)),
        Autograd=with_backward("drop", drop, _keep_streams, _drop_again),
    )
    _define("streams(Tensor key, int first, int count) -> (Tensor, Tensor)", draw_streams, streams_like)
    return True


def _drop(
    x: Tensor, start: Tensor, stride: Tensor, limit: Tensor, scale: Tensor, width: Tensor | None, row: int
) -> Tensor:
    """``x`` where the word of its element is below a limit, times a scale, and zeros.

    ``width`` is how many elements of each ``row`` a member has, None for all; words are counted without those that it lacks.
    """
    run, out = native.program(_DROPPED.replace("KIND", native.TYPES[x.dtype])), torch.empty(x.shape, dtype=x.dtype)
    if out.numel():
        length = torch.tensor(row)
        given = [stride, limit, scale.to(x.dtype), length if width is None else width]
        given = [start.contiguous(), *(one.expand(start.shape).contiguous() for one in given), length, x.contiguous()]
        assert run is not None
        run([out.numel() // start.numel()], start.numel(), [*given, out])
    # As products are, the result is laid out like its factor.
    return out if x.is_contiguous() else torch.empty_like(x).copy_(out)


def _keep_streams(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, *keys, ctx.row = inputs
    ctx.save_for_backward(*keys)


def _drop_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hfta_func.drop(grad, *ctx.saved_tensors, ctx.row), *(None,) * 6


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], **others: Callable[..., Any]) -> None:
    batched = members_in_front(lambda *args: operator(*args))
    operator = define_operator(schema, {"CPU": kernel, "FuncTorchBatched": batched, **others}, fake=fake)
