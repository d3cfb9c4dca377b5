"""Calls of functions with a number that differs between members: a tensor where one model alone has a Python number.

PyTorch's functions take Python numbers only; those of :mod:`hfta_func.calls.tensor_scalars` have the same mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func.calls.draws import spellings
from hfta_func.calls.routing import HANDLERS, routed
from hfta_func.calls.tensor_scalars import TENSOR_SCALAR_FUNCTIONS

_STAND_IN = 0.5


class numbered(routed):
    """:class:`routed` for calls in which modules hold tensors for numbers, see :mod:`hfta_func.models.scalar_attributes`."""

    def __init__(self, key: Tensor | None, site: int = 0, numbers: Sequence[Tensor] = ()):
        super().__init__(key, site)
        # The numbers given, and results computed from numbers alone. Other tensors without axes are the model's.
        self._numbers = list(numbers)
        self._rate: Tensor | None = None

    def again(self, key: Tensor | None, site: int, numbers: Sequence[Tensor] = ()) -> routed:
        """See :class:`routed`."""
        return numbered(key, site, [*self._numbers, *numbers])

    def is_number(self, value: Any) -> bool:
        """See :class:`routed`."""
        return isinstance(value, Tensor) and value.dim() == 0 and any(value is number for number in self._numbers)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace one call of a torch function, if a number of it is a tensor."""
        given = (*args, *kwargs.values())
        if func in _AUGMENTED and self.is_number(args[0]):
            # A Python number is immutable, so other variables that refer to it must keep their value.
            func = _AUGMENTED[func]
        tensors = [value for value in given if isinstance(value, Tensor)]
        others = [value for value in tensors if not self.is_number(value)]
        result = self._meeting(func, args, kwargs, others if len(others) < len(tensors) else [])
        if tensors and not others and isinstance(result, Tensor):
            self._numbers.append(result)
        return result

    def _meeting(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], met: list[Tensor]) -> Any:
        """Call a function whose arguments are numbers and the tensors ``met``."""
        if self.key is None and (func in _RATES or func in _RECURRENT):
            args, kwargs = self._without_unused(args, kwargs)
        # Without a key, the functions above draw from PyTorch's generator, which takes Python numbers only.
        elif func in _RATES:
            name, position = _RATES[func]
            rate = _argument(args, kwargs, name, position)
            if self._rate is not None and isinstance(rate, float) and rate == _STAND_IN:
                args, kwargs = _with(args, kwargs, name, position, self._rate)
            elif isinstance(rate, Tensor) and func in _CHECKED:
                args, kwargs = _with(args, kwargs, name, position, _STAND_IN)
                self._rate = rate
                result = super().call(func, args, kwargs)
                self._rate = None
                return result
        # Python numbers have no precision: they take that of the tensors they meet. Noise depends on every bit of a rate.
        if met and func not in HANDLERS:
            kind = _precision(met)
            args = tuple([value.to(kind) if self._is_real(value) else value for value in args])
            kwargs = {name: value.to(kind) if self._is_real(value) else value for name, value in kwargs.items()}
        if func is F.scaled_dot_product_attention and isinstance(scale := kwargs.get("scale"), Tensor):
            args, kwargs = _with(args, kwargs, "query", 0, _argument(args, kwargs, "query", 0) * scale)
            kwargs["scale"] = 1.0
        if func in _REPLACEMENTS:
            replacement, numbers = _REPLACEMENTS[func]
            if any(isinstance(_argument(args, kwargs, *number), Tensor) for number in numbers):
                return replacement(*args, **kwargs)
        return super().call(func, args, kwargs)

    def _without_unused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without rates outside of training, which PyTorch checks nevertheless."""
        is_off = kwargs.get("training", kwargs.get("train")) is False
        followed = zip(args, (*args[1:], None), strict=True)
        args = tuple(
            [_STAND_IN if self.is_number(value) and (is_off or flag is False) else value for value, flag in followed]
        )
        return args, {name: _STAND_IN if is_off and self.is_number(value) else value for name, value in kwargs.items()}

    def _is_real(self, value: Any) -> bool:
        return self.is_number(value) and value.dtype == torch.float64


def _precision(met: list[Tensor]) -> torch.dtype:
    """The precision that a Python number has beside these tensors."""
    for value in met:
        if value.is_floating_point() or value.is_complex():
            return _REAL.get(value.dtype, value.dtype)
    return torch.get_default_dtype()


_REAL = {kind: kind.to_real() for kind in (torch.complex32, torch.complex64, torch.complex128)}


def _argument(args: Any, kwargs: Any, name: str, position: int) -> Any:
    """The value of one argument of a call; None if it is left out."""
    return kwargs[name] if name in kwargs else args[position] if len(args) > position else None


def _with(args: Any, kwargs: Any, name: str, position: int, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value for one of them."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    return (*args[:position], value, *args[position + 1 :]), dict(kwargs)


def called_with(error: BaseException) -> list[Any]:
    """The arguments of the functions of PyTorch that raised the error or called one that did."""
    values, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is numbered.call.__code__:
            values += trace.tb_frame.f_locals["given"]
        trace = trace.tb_next
    return values


_OPERATORS = {
    **{name: name for name in ("add", "sub", "mul", "pow")},
    **{"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"},
}
_AUGMENTED: dict[Any, Any] = {
    func: getattr(Tensor, name)
    for operator, name in _OPERATORS.items()
    for func in (getattr(Tensor, f"__i{operator}__"), getattr(Tensor, f"{name}_"))
}
"""The out-of-place function of each augmented assignment and in-place operator."""

_CHECKED = {
    getattr(F, name) for name in "alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout".split()
} | {F.multi_head_attention_forward}
"""Functions that compare their rate with numbers: they get a stand-in, and the functions that they call get the rate."""

_DROPOUTS = "dropout feature_dropout alpha_dropout feature_alpha_dropout".split()

_RATES: dict[Any, tuple[str, int]] = {
    **{func: ("p", 1) for name in _DROPOUTS for spelled in (name, f"{name}_") for func, _ in spellings(spelled)},
    **{func: ("p", 1) for func in _CHECKED},
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
}
"""Name and position of the rate, by function."""

_RECURRENT = {func for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for func, _ in spellings(name)}
"""Functions with a dropout rate that is followed by the flag ``train``."""

_REPLACEMENTS = {
    func: replacement for name, replacement in TENSOR_SCALAR_FUNCTIONS.items() for func, _ in spellings(name)
}
_REPLACEMENTS |= {func: _REPLACEMENTS[torch.clamp] for func in (torch.clip, Tensor.clip)} | {
    Tensor.clip_: _REPLACEMENTS[Tensor.clamp_]
}
"""Replacements for functions, used if one of their numbers is a tensor."""
