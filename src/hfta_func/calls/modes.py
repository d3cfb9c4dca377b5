"""A mode that sees through what users put in the place of PyTorch's functions.

After ``old = F.relu; F.relu = lambda x: 2 * old(x)``, ``old`` calls a mode with what has its name by then, the lambda, which
the lambda has already called. What the mode needs is ``old``.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.body import is_users_file
from hfta_func.errors import TraceError


class Mode(TorchFunctionMode):
    """A ``TorchFunctionMode`` whose subclasses write :meth:`call`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call PyTorch's function."""
        if type(func) not in _KINDS and not torch.compiler.is_compiling():
            func = _original(func)
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace one call of a torch function."""
        return func(*args, **kwargs)


_KINDS = frozenset(map(type, (torch.add, Tensor.add, Tensor.__init__, Tensor.T.__get__)))  # pyright: ignore
"""The types of functions in C, which stand where PyTorch has put them."""


def _original(func: Any) -> Any:
    """PyTorch's function in whose place there is ``func``."""
    file = func.__code__.co_filename if isinstance(func, types.FunctionType) else _file_of(type(func))
    if not is_users_file(file):
        return func
    frame = sys._getframe(2)
    if frame.f_code is torch.overrides.handle_torch_function.__code__ and frame.f_back is not None:
        # A function in Python passes what has its name.
        frame = frame.f_back
        original = func if frame.f_code is getattr(func, "__code__", None) else _function(frame)
    else:
        name = next((name for name, value in vars(Tensor).items() if value is func), "")
        original = getattr(Tensor.__base__, name, func)
    if original is not func and rehearsing.get():
        raise TraceError(
            f"{getattr(original, '__name__', original)} of PyTorch has been replaced by a function in {file}, which a "
            f"compiler would call twice; call that function by another name, or leave the step uncompiled"
        )
    return original


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


_functions: dict[types.CodeType, Any] = {}


def _function(frame: types.FrameType) -> Any:
    """The function of PyTorch that a frame runs."""
    if frame.f_code not in _functions:
        functions = (one for one in gc.get_referrers(frame.f_code) if isinstance(one, types.FunctionType))
        # This package has functions of the same code, in other globals.
        _functions[frame.f_code] = next(one for one in functions if one.__globals__ is frame.f_globals)
    return _functions[frame.f_code]
