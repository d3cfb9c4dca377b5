"""Replacements for random operators, with noise from the key of the calling member, and for numbers that are tensors.

A handler is ``handler(keys, func, *args, **kwargs)`` with the arguments of the function ``func`` that it replaces. Logarithms
and tangents are taken in float64, so that devices, which round them differently, agree on nearly all values in float32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func import random
from hfta_func._kernels import noise
from hfta_func.calls.autodiff import requires_grad_
from hfta_func.errors import RandomnessError

_Keys = Any
"""The mode, :class:`hfta_func.calls.routed`."""


def is_zero(rate: Any) -> bool:
    """Whether nothing is dropped in any member; the rates in a tensor may be 0 for some."""
    return not isinstance(rate, Tensor) and rate == 0


def checked(rate: Any) -> Any:
    """The rate; a rate in a tensor becomes NaN if PyTorch would refuse it."""
    return torch.where((rate >= 0) & (rate <= 1), rate, math.nan) if isinstance(rate, Tensor) else rate


def inverse(keep: Any) -> Any:
    """``1 / keep``, or 0 where nothing is kept."""
    if isinstance(keep, Tensor):
        return torch.where(keep == 0, torch.zeros_like(keep), 1 / keep)
    return 1 / keep if keep else 0.0


def leaky_relu(input: Tensor, negative_slope: Any = 0.01, inplace: bool = False) -> Tensor:
    """``F.leaky_relu``."""
    # On a copy, because the gradient needs the values that are overwritten.
    x = input.clone() if inplace else input
    result = torch.where(x > 0, x, x * negative_slope)
    return input.copy_(result) if inplace else result


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A normalized tensor times its weight plus its bias."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


NUMBERED: dict[Any, Callable[..., Tensor]] = {F.leaky_relu: leaky_relu}
"""Replacements by function, for calls with a number that is a tensor. With others, members run one after another."""


def precision(met: list[Tensor]) -> torch.dtype:
    """The precision that a Python number has beside these tensors."""
    for value in met:
        if value.is_floating_point() or value.is_complex():
            return value.dtype.to_real() if value.is_complex() else value.dtype
    return torch.get_default_dtype()


def _dropout(keys: _Keys, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _scale(keys, input, input.shape, *args, **kwargs)


def _channel_dropout(keys: _Keys, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of one sample without a batch, :class:`nn.Dropout1d` and :class:`nn.Dropout3d` drop channels, too."""
    rank = {F.dropout1d: 3, F.dropout3d: 5}.get(func, 0)
    shape = [1, *input.shape] if input.dim() == rank - 1 else input.shape
    return _scale(keys, input.view(shape), _channelwise(shape), *args, **kwargs).view(input.shape)


def _scale(keys: _Keys, x: Tensor, shape: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Inverted dropout: keep with probability ``1 - p`` and divide by it (Srivastava et al., JMLR 2014)."""
    if not training or is_zero(_rate(p)):
        return x
    stream: random.Stream = keys.next_key(p)
    scale = inverse(1 - checked(p))
    if isinstance(scale, Tensor):
        scale = scale.to(x.dtype)
    given: Any = noise.dropped(*stream, x, 1 - p, scale, keys.redraws) if x.shape == shape else None
    if given is None:
        given = _multiply, x, random.bernoulli(stream, 1 - p, shape), scale
    dropped = keys.dropped(*given)
    return x.copy_(dropped) if inplace else dropped


def _rate(p: Any) -> Any:
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p


def _multiply(input: Tensor, keep: Tensor, scale: Any) -> Tensor:
    return input * keep * scale


def _channelwise(shape: Any) -> list[int]:
    return [*shape[:2], *(1,) * (len(shape) - 2)]


def _alpha_dropout(
    keys: _Keys, func: Any, input: Tensor, p: Any = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Dropout that preserves mean and variance of SELU activations (Klambauer et al., NeurIPS 2017, appendix)."""
    if not training or is_zero(_rate(p)):
        return input
    saturation = 1.7580993408473766
    shape = _channelwise(input.shape) if func in (F.feature_alpha_dropout, torch.feature_alpha_dropout) else input.shape
    keep = random.bernoulli(keys.next_key(p), 1 - p, shape).to(input.dtype)
    if isinstance(p, Tensor):
        scale = inverse(((saturation**2 * p + 1) * (1 - checked(p))).sqrt())
    else:
        scale = 1 / math.sqrt((saturation**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    dropped = input * keep * scale + (keep - 1 + p) * (saturation * scale)
    return input.copy_(dropped) if inplace else dropped


def _attention(
    keys: _Keys, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: Any = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if isinstance(scale, Tensor):
        query, scale = query * scale.to(query.dtype), 1.0
    if is_zero(dropout_p):
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    if attn_mask is not None:
        # As in torch, a query whose keys are all masked gets zeros.
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return _scale(keys, weights, weights.shape, dropout_p) @ value


def _rrelu(
    keys: _Keys, func: Any, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    if not training:
        slope = (lower + upper) / 2
        return leaky_relu(input, slope, inplace) if isinstance(slope, Tensor) else F.leaky_relu(input, slope, inplace)
    slope = random.uniform(keys.next_key(), input.shape, dtype=input.dtype) * (upper - lower) + lower
    # On a copy, because the gradient needs the values that are overwritten.
    given = input.clone() if inplace else input
    result = torch.where(given < 0, given * slope, given)
    return input.copy_(result) if inplace else result


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def like(keys: _Keys, func: Any, input: Tensor, *bounds: int, dtype: Any = None, **options: Any) -> Tensor:
        # These options do not change the values.
        for name in ("device", "memory_format"):
            options.pop(name, None)
        return draw(keys, func, *bounds, input.shape, dtype=dtype or input.dtype, device=input.device, **options)

    return like


def _factory(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A handler for ``torch.<name>(*size, dtype=, device=)``."""

    def factory(keys: _Keys, func: Any, *size: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
        shape = rest.pop("size", size[0] if size and isinstance(size[0], (list, tuple)) else size)
        dtype = dtype or torch.get_default_dtype()
        _check_real(func, dtype)
        return _made(draw(keys.next_key(), tuple(map(_size, shape)), dtype=dtype), device, **rest)

    return factory


def _size(size: Any) -> Any:
    """A length as an int, also from numpy; symbolic sizes of a compiler stay as they are."""
    return size if isinstance(size, (int, torch.SymInt)) else operator.index(size)


def _made(
    drawn: Tensor, device: Any = None, layout: Any = None, pin_memory: bool = False, requires_grad: bool = False
) -> Tensor:
    """A drawn tensor with the options of a new one; others, such as ``out``, are a TypeError."""
    drawn = drawn.to(device)
    return requires_grad_(drawn) if requires_grad else drawn


def _randint(keys: _Keys, func: Any, *args: Any, dtype: Any = None, **rest: Any) -> Tensor:
    size = rest.pop("size", None)
    if size is None:
        size, args = args[-1], args[:-1]
    low, high = (0, *args, *(rest.pop(name) for name in ("low", "high") if name in rest))[-2:]
    drawn = random.randint(keys.next_key(), low, high, tuple(map(_size, size))).to(dtype or torch.int64)
    return _made(drawn, **rest)


def _randperm(keys: _Keys, func: Any, n: int, *, dtype: Any = None, **rest: Any) -> Tensor:
    return _made(random.permutation(keys.next_key(), n).to(dtype or torch.int64), **rest)


def _bernoulli(keys: _Keys, func: Any, input: Tensor, p: Any = None) -> Tensor:
    return _draw_bernoulli(keys.next_key(), input, input if p is None else p)


def _normal(keys: _Keys, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **rest: Any) -> Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = size if size is not None else torch.broadcast_shapes(*(value.shape for value in tensors))
    dtype = rest.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return random.normal(keys.next_key(), tuple(shape), dtype=dtype) * std + mean


def _fill(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A handler for the in-place ``Tensor.<name>_(...)``, whose values are ``draw(stream, input, ...)``."""

    def fill(keys: _Keys, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if draw is not _draw_bernoulli:
            _check_real(func, input.dtype)
        return input.copy_(draw(keys.next_key(), input, *args, **kwargs))

    return fill


def _draw_uniform(key: random.Stream, input: Tensor, from_: float = 0.0, to: float = 1.0, **bounds: float) -> Tensor:
    low = bounds.get("from", from_)
    return random.uniform(key, input.shape, dtype=input.dtype) * (to - low) + low


def _draw_normal(key: random.Stream, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return random.normal(key, input.shape, dtype=input.dtype) * std + mean


def _draw_bernoulli(key: random.Stream, input: Tensor, p: Any = 0.5) -> Tensor:
    return random.bernoulli(key, p, input.shape).to(input.dtype)


def _draw_exponential(key: random.Stream, input: Tensor, lambd: float = 1.0) -> Tensor:
    # Shifted by half a grid step, so that the logarithm is finite.
    uniform = random.uniform(key, input.shape).double() + 2.0**-25
    return (-uniform.log() / lambd).to(input.dtype)


def _multinomial(keys: _Keys, func: Any, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    weights, rows = input.detach(), input.shape[:-1]
    if replacement or num_samples == 1:
        return random.categorical(keys.next_key(), weights.unsqueeze(-2), (*rows, num_samples))
    # The order of arrival at these rates is that of draws one after another (Efraimidis and Spirakis, IPL 2006).
    # Shifted by half a grid step, uniform draws are never 0.
    arrivals = -torch.log(random.uniform(keys.next_key(), weights.shape, dtype=torch.float64) + 2.0**-54)
    return (weights / arrivals).topk(num_samples, -1).indices


def _recurrent(keys: _Keys, func: Any, *args: Any) -> Any:
    """Runs the layers one by one if there is dropout between them."""
    # Packed sequences come with their batch sizes, before the states and parameters.
    x, *sizes = args[: 2 if isinstance(args[3], (list, tuple)) else 1]
    hx, params, has_biases, num_layers, dropout, train, bidirectional, *rest = args[1 + len(sizes) :]
    if not train or is_zero(dropout) or num_layers <= 1:
        return func(*(0.0 if value is dropout and isinstance(dropout, Tensor) else value for value in args))
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    directions, size, finals = 1 + bidirectional, len(params) // num_layers, []
    for layer in range(num_layers):
        if layer:
            x = _scale(keys, x, x.shape, dropout)
        first = [state[layer * directions : (layer + 1) * directions] for state in states]
        weights = params[layer * size : (layer + 1) * size]
        options = has_biases, 1, 0.0, train, bidirectional, *rest
        x, *last = func(x, *sizes, first[0] if states is not hx else first, weights, *options)
        finals.append(last)
    # Not torch.cat, whose batching rule would fix the sizes of a graph with dynamic shapes.
    return x, *(torch.stack(column).flatten(0, 1) for column in zip(*finals, strict=True))


def without_generator(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler, which refuses a generator: members would share it."""

    def handle(keys: _Keys, func: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None:
            raise RandomnessError(
                f"{NAMES.get(func, func)} got a generator, which all members would share; leave it out, and the call draws "
                f"from the member's own key"
            )
        return handler(keys, func, *args, **kwargs)

    return handle


def _check_real(func: Any, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise RandomnessError(
            f"{NAMES.get(func, func)} draws real numbers, not {dtype}; draw integers with torch.randint, and complex "
            f"numbers in two parts, torch.complex(real, imag)"
        )


def spellings(name: str) -> Iterator[tuple[Any, str]]:
    """The functions with one operator's name, each with its full name."""
    for owner, prefix in ((torch, "torch"), (F, "torch.nn.functional"), (torch.Tensor, "torch.Tensor")):
        if hasattr(owner, name):
            yield getattr(owner, name), f"{prefix}.{name}"


_NEW = {"rand": _factory(random.uniform), "randn": _factory(random.normal), "randint": _randint}

ROUTED: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _channel_dropout),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _alpha_dropout),
    **{"scaled_dot_product_attention": _attention, "rrelu": _rrelu},
    **_NEW,
    **{f"{name}_like": _like(draw) for name, draw in _NEW.items()},
    **{"randperm": _randperm, "bernoulli": _bernoulli, "normal": _normal, "multinomial": _multinomial},
    **{"uniform_": _fill(_draw_uniform), "normal_": _fill(_draw_normal)},
    **{"bernoulli_": _fill(_draw_bernoulli), "exponential_": _fill(_draw_exponential)},
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}
"""Handlers of operators that draw from the member's key."""

NAMES = {func: spelled for name in ROUTED for func, spelled in spellings(name)}
