"""Replacements for random operators, with noise from the key of the calling member.

A handler is ``handler(keys, func, *args, **kwargs)`` with the arguments of the function ``func`` that it replaces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func import random
from hfta_func._kernels import noise
from hfta_func.calls import distributions
from hfta_func.calls.tensor_scalars import checked, inverse, is_zero, leaky_relu
from hfta_func.errors import RandomnessError


class _Keys(Protocol):
    key: Tensor | None
    redraws: bool

    def next_key(self, rate: Any = None) -> random.Stream: ...

    def dropped(self, func: Callable[..., Tensor], *args: Any) -> Tensor: ...


def _dropout(keys: _Keys, func: Any, input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _scale(keys, input, input.shape, p, training, inplace)


def _drop(shape: Callable[[Tensor], Any], inplace: bool) -> Callable[..., Tensor]:
    return lambda keys, func, input, p, train: _scale(keys, input, shape(input), p, train, inplace)


def _native_dropout(keys: _Keys, func: Any, input: Tensor, p: Any, train: bool | None) -> tuple[Tensor, Tensor]:
    if not train or is_zero(p):
        return input, torch.ones_like(input, dtype=torch.bool)
    keep = random.bernoulli(keys.next_key(p), 1 - p, input.shape)
    return input * keep * inverse(1 - checked(p)), keep


def _scale(keys: _Keys, input: Tensor, shape: Any, p: Any, training: bool, inplace: bool) -> Tensor:
    """Inverted dropout: keep with probability ``1 - p`` and divide by it (Srivastava et al., JMLR 2014)."""
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or is_zero(p):
        return input
    stream, scale = keys.next_key(p), inverse(1 - checked(p))
    if isinstance(scale, Tensor):
        scale = scale.to(input.dtype)
    given: Any = noise.dropped(*stream, input, 1 - p, scale, keys.redraws) if input.shape == shape else None
    if given is None:
        given = _multiply, input, random.bernoulli(stream, 1 - p, shape), scale
    dropped = keys.dropped(*given)
    return input.copy_(dropped) if inplace else dropped


def _multiply(input: Tensor, keep: Tensor, scale: Any) -> Tensor:
    return input * keep * scale


def _channelwise(input: Tensor) -> list[int]:
    return [*input.shape[:2], *(1,) * (input.dim() - 2)]


def _alpha(shape: Callable[[Tensor], Any], inplace: bool) -> Callable[..., Tensor]:
    """Dropout that preserves mean and variance of SELU activations (Klambauer et al., NeurIPS 2017, appendix)."""
    saturation = 1.7580993408473766

    def alpha_dropout(keys: _Keys, func: Any, input: Tensor, p: Any, train: bool) -> Tensor:
        if not train or is_zero(p):
            return input
        keep = random.bernoulli(keys.next_key(p), 1 - p, shape(input)).to(input.dtype)
        if isinstance(p, Tensor):
            scale = inverse(((saturation**2 * p + 1) * (1 - checked(p))).sqrt())
        else:
            scale = 1 / math.sqrt((saturation**2 * p + 1) * (1 - p)) if p < 1 else 0.0
        dropped = input * keep * scale + (keep - 1 + p) * (saturation * scale)
        return input.copy_(dropped) if inplace else dropped

    return alpha_dropout


def _attention(
    keys: _Keys,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
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
    return _scale(keys, weights, weights.shape, dropout_p, True, False) @ value


def _rrelu(
    keys: _Keys,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: Any = None,
) -> Tensor:
    if not training:
        slope = (lower + upper) / 2
        return leaky_relu(input, slope) if isinstance(slope, Tensor) else F.leaky_relu(input, slope)
    _no_generator(func, generator)
    slope = random.uniform(keys.next_key(), input.shape, dtype=input.dtype) * (upper - lower) + lower
    return torch.where(input < 0, input * slope, input)


def _rrelu_(keys: _Keys, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # On a copy, because the gradient needs the values that are overwritten.
    return input.copy_(_rrelu(keys, func, input.clone(), *args, **kwargs))


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def like(keys: _Keys, func: Any, input: Tensor, *bounds: int, dtype: Any = None, **options: Any) -> Tensor:
        # These options do not change the values.
        for name in ("layout", "device", "pin_memory", "memory_format", "requires_grad"):
            options.pop(name, None)
        return draw(keys, func, *bounds, input.shape, dtype=dtype or input.dtype, device=input.device, **options)

    return like


def _factory(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A handler for ``torch.<name>(*size, dtype=, device=)``."""

    def factory(
        keys: _Keys, func: Any, *size: Any, dtype: Any = None, device: Any = None, generator: Any = None, **rest: Any
    ) -> Tensor:
        _no_generator(func, generator)
        shape = rest.get("size", size[0] if size and isinstance(size[0], (list, tuple)) else size)
        dtype, sizes = dtype or torch.get_default_dtype(), tuple(map(_size, shape))
        _check_real(func, dtype, dtype.is_complex)
        if dtype.is_complex:
            # Real and imaginary part; a complex normal number has variance 1 in all.
            parts = draw(keys.next_key(), (*sizes, 2), dtype=dtype.to_real())
            drawn = torch.view_as_complex(parts * math.sqrt(0.5) if draw is random.normal else parts)
        else:
            drawn = draw(keys.next_key(), sizes, dtype=dtype)
        return _write_out(drawn.to(device), **rest)

    return factory


def _size(size: Any) -> Any:
    """A length as an int, also from numpy; symbolic sizes of a compiler stay as they are."""
    return size if isinstance(size, (int, torch.SymInt)) else operator.index(size)


def _write_out(drawn: Tensor, out: Tensor | None = None, **_: Any) -> Tensor:
    """The drawn values, written into ``out`` if it is given; the remaining options do not change values."""
    if out is None:
        return drawn
    return (out if out.shape == drawn.shape else out.resize_(drawn.shape)).copy_(drawn)


def _randint(keys: _Keys, func: Any, *args: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
    _no_generator(func, rest.get("generator"))
    size = rest.get("size")
    if size is None:
        size, args = args[-1], args[:-1]
    if "high" in rest:
        low, high = args[0] if args else rest.get("low", 0), rest["high"]
    else:
        low, high = (0, *args)[-2:]
    drawn = random.randint(keys.next_key(), low, high, tuple(map(_size, size))).to(device, dtype or torch.int64)
    return _write_out(drawn, **rest)


def _randperm(keys: _Keys, func: Any, n: int, *, generator: Any = None, dtype: Any = None, **rest: Any) -> Tensor:
    _no_generator(func, generator)
    return _write_out(random.permutation(keys.next_key(), n).to(dtype or torch.int64), **rest)


def _bernoulli(keys: _Keys, func: Any, input: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    _no_generator(func, generator)
    return distributions.bernoulli(keys.next_key(), input, input if p is None else p)


def _normal(
    keys: _Keys, func: Any, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, **rest: Any
) -> Tensor:
    _no_generator(func, generator)
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = size if size is not None else torch.broadcast_shapes(*(value.shape for value in tensors))
    dtype = rest.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return random.normal(keys.next_key(), tuple(shape), dtype=dtype) * std + mean


def _fill(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A handler for the in-place ``Tensor.<name>_(...)``."""

    def fill(keys: _Keys, func: Any, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        _no_generator(func, generator)
        if draw not in (distributions.bernoulli, distributions.geometric):
            _check_real(func, input.dtype)
        return input.copy_(draw(keys.next_key(), input, *args, **kwargs))

    return fill


def _multinomial(
    keys: _Keys,
    func: Any,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    **rest: Any,
) -> Tensor:
    _no_generator(func, generator)
    weights, rows = input.detach(), input.shape[:-1]
    if replacement or num_samples == 1:
        return _write_out(random.categorical(keys.next_key(), weights.unsqueeze(-2), (*rows, num_samples)), **rest)
    return _write_out(distributions.without_replacement(keys.next_key(), weights, num_samples), **rest)


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
            x = _scale(keys, x, x.shape, dropout, True, False)
        first = [state[layer * directions : (layer + 1) * directions] for state in states]
        weights = params[layer * size : (layer + 1) * size]
        options = has_biases, 1, 0.0, train, bidirectional, *rest
        x, *last = func(x, *sizes, first[0] if states is not hx else first, weights, *options)
        finals.append(last)
    # Not torch.cat, whose batching rule would fix the sizes of a graph with dynamic shapes.
    return x, *(torch.stack(column).flatten(0, 1) for column in zip(*finals, strict=True))


def _refused(cure: str) -> Callable[..., Any]:
    def refused(keys: _Keys, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise RandomnessError(
            f"{NAMES.get(func, func)} draws from PyTorch's global generator, so a member's noise would depend on the "
            f"other members; {cure}"
        )

    return refused


def _no_generator(func: Any, generator: Any) -> None:
    if generator is not None:
        raise RandomnessError(
            f"{NAMES.get(func, func)} got a generator, which all members would share; leave it out, and the call draws "
            f"from the member's own key"
        )


def _check_real(func: Any, dtype: torch.dtype, is_drawn: bool = False) -> None:
    if not (dtype.is_floating_point or is_drawn):
        cure = "complex ones with torch.randn" if dtype.is_complex else "integers with torch.randint"
        raise RandomnessError(f"{NAMES.get(func, func)} draws real numbers, not {dtype}; draw {cure}")


def spellings(name: str) -> Iterator[tuple[Any, str]]:
    """The functions with one operator's name, each with its full name."""
    for owner, prefix in ((torch, "torch"), (F, "torch.nn.functional"), (torch.Tensor, "torch.Tensor")):
        if hasattr(owner, name):
            yield getattr(owner, name), f"{prefix}.{name}"


ROUTED: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "dropout_": _drop(lambda input: input.shape, True),
    "native_dropout": _native_dropout,
    "feature_dropout": _drop(_channelwise, False),
    "feature_dropout_": _drop(_channelwise, True),
    "alpha_dropout": _alpha(lambda input: input.shape, False),
    "alpha_dropout_": _alpha(lambda input: input.shape, True),
    "feature_alpha_dropout": _alpha(_channelwise, False),
    "feature_alpha_dropout_": _alpha(_channelwise, True),
    "scaled_dot_product_attention": _attention,
    "rrelu": _rrelu,
    "rrelu_": _rrelu_,
    "rand": _factory(random.uniform),
    "randn": _factory(random.normal),
    "rand_like": _like(_factory(random.uniform)),
    "randn_like": _like(_factory(random.normal)),
    "randint": _randint,
    "randint_like": _like(_randint),
    "randperm": _randperm,
    "bernoulli": _bernoulli,
    "normal": _normal,
    "uniform_": _fill(distributions.uniform),
    "normal_": _fill(distributions.normal),
    "bernoulli_": _fill(distributions.bernoulli),
    "exponential_": _fill(distributions.exponential),
    "cauchy_": _fill(distributions.cauchy),
    "geometric_": _fill(distributions.geometric),
    "log_normal_": _fill(distributions.log_normal),
    "multinomial": _multinomial,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}
"""Handlers of operators that draw from the member's key."""

_OUTSIDE = "draw the values outside the model and pass them in the batch, as the collate_fn of a DatasetLoader does"

REFUSED: dict[str, Callable[..., Any]] = {
    "binomial": _refused("sum draws of torch.bernoulli"),
    "poisson": _refused(_OUTSIDE),
    "random_": _refused("draw with torch.randint"),
    "rrelu_with_noise": _refused("call torch.nn.functional.rrelu"),
    "_sample_dirichlet": _refused(_OUTSIDE),
    "_standard_gamma": _refused(_OUTSIDE),
}
"""Handlers of operators that cannot draw from a key: each raises a RandomnessError with its cure."""

NAMES = {func: spelled for name in (*ROUTED, *REFUSED) for func, spelled in spellings(name)}
