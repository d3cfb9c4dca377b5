"""Calls of functions with a number of the member's own, which is a tensor where a member alone has a Python number.

PyTorch's functions take Python numbers only; those of :mod:`hfta_func.calls.exact` have the same mathematics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func.calls.draws import spellings
from hfta_func.calls.exact import EXACT
from hfta_func.calls.routing import HANDLERS, routed

_STAND_IN = 0.5


class numbered(routed):
    """:class:`routed` for calls in which modules hold tensors for numbers, see :mod:`hfta_func.models.numbers`."""

    def __init__(self, key: Tensor | None, site: int = 0):
        super().__init__(key, site)
        self._rate: Tensor | None = None

    def again(self, key: Tensor | None, site: int) -> routed:
        """See :class:`routed`."""
        return numbered(key, site)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace one call of a torch function, if a number of it is a tensor."""
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        # Those that draw from PyTorch's generator need a number.
        if func in _RATES and self.key is not None:
            name, place = _RATES[func]
            rate = kwargs[name] if name in kwargs else args[place] if len(args) > place else None
            if self._rate is not None and isinstance(rate, float) and rate == _STAND_IN:
                args, kwargs = _with(args, kwargs, name, place, self._rate)
            elif isinstance(rate, Tensor) and func in _CHECKED:
                args, kwargs = _with(args, kwargs, name, place, _STAND_IN)
                self._rate = rate
                result = super().__torch_function__(func, types, args, kwargs)
                self._rate = None
                return result
        # Python numbers have no precision: they take that of the tensors they meet. Noise depends on every bit of a rate.
        if func not in HANDLERS and (kind := _narrowest(given)) is not None:
            args = tuple([_narrowed(value, kind) for value in args])
            kwargs = {name: _narrowed(value, kind) for name, value in kwargs.items()}
        if func is F.scaled_dot_product_attention and isinstance(scale := kwargs.get("scale"), Tensor):
            args, kwargs = _with(args, kwargs, "query", 0, (kwargs["query"] if "query" in kwargs else args[0]) * scale)
            kwargs["scale"] = 1.0
        if func in _EXACT:
            replacement, numbers = _EXACT[func]
            for name, place in numbers:
                if isinstance(kwargs[name] if name in kwargs else args[place] if len(args) > place else None, Tensor):
                    return replacement(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _narrowest(given: tuple[Any, ...]) -> torch.dtype | None:
    """The precision of what a function was given, if it is less than that of numbers."""
    for value in given:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            return value.dtype
    return None


def _narrowed(value: Any, kind: torch.dtype) -> Any:
    is_number = isinstance(value, Tensor) and value.dtype == torch.float64 and value.dim() == 0
    return value.to(kind) if is_number else value


def _with(args: Any, kwargs: Any, name: str, place: int, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value for one of them."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    return (*args[:place], value, *args[place + 1 :]), dict(kwargs)


def called_with(error: BaseException) -> list[Any]:
    """What was given to the functions of PyTorch that the error came through."""
    found, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is numbered.__torch_function__.__code__:
            found += trace.tb_frame.f_locals["given"]
        trace = trace.tb_next
    return found


_CHECKED = {
    getattr(F, name) for name in "alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout".split()
} | {F.multi_head_attention_forward}
"""Functions that compare their rate with numbers: they get one that stands in for it, and what they call the rate."""

_DROPOUTS = "dropout feature_dropout alpha_dropout feature_alpha_dropout".split()

_RATES: dict[Any, tuple[str, int]] = {
    **{func: ("p", 1) for name in _DROPOUTS for own in (name, f"{name}_") for func, _ in spellings(own)},
    **{func: ("p", 1) for func in _CHECKED},
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
}
"""Name and place of the rate, by function."""


_OPTIONS = ("size_average", "reduce", "running_mean", "running_var", "normalized_shape")


def _numbers(replacement: Callable[..., Tensor]) -> tuple[tuple[str, int], ...]:
    """Name and place of what may be a tensor."""
    given = enumerate(inspect.signature(replacement).parameters.values())
    return tuple((own.name, place) for place, own in given if own.annotation == "Any" and own.name not in _OPTIONS)


_EXACT = {
    func: (replacement, _numbers(replacement)) for name, replacement in EXACT.items() for func, _ in spellings(name)
}
_EXACT |= {func: _EXACT[torch.clamp] for func in (torch.clip, Tensor.clip)} | {Tensor.clip_: _EXACT[Tensor.clamp_]}
"""Replacement by function, and its numbers."""
