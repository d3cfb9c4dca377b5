"""Tensors that a model makes in a call and then writes members' values into.

``out = torch.zeros(6, 8)`` makes one tensor for all members, into which ``out[:, :4] = self.layer(x)`` cannot write a value
per member. So the function runs again, and the call that made the tensor gives each member its own, from then on. A call is
known by its function and its line in the user's code, which are the same for eager code and for a compiler.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._torch import constant_to_compiler
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.body import is_users_file
from hfta_func.calls.modes import Mode
from hfta_func.errors import TraceError

Line = tuple[str, int] | None


class MadeCalls:
    """The calls of a function that make a tensor for each member, because members' values are written into it."""

    def __init__(self) -> None:
        self._funcs: dict[Any, bool] = {}
        self._lines: set[Line] = set()
        self.mode: _Seeking | None = None

    def within(self, func: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
        """``func``, for a ``vmap`` with these ``in_dims``, in which the calls make a tensor for each member."""

        def member(*args: Any, **kwargs: Any) -> Any:
            batched = _batched_argument(args, kwargs, in_dims) if self._is_needed() else None
            if batched is None:
                return func(*args, **kwargs)
            with (_Seeking if self.is_seeking() else _Making)(self, batched):
                return func(*args, **kwargs)

        return member

    def again(self, args: Any) -> contextlib.AbstractContextManager[Any]:
        """A block in which a part of the function runs once more, in the backward pass."""
        batched = _batched_argument(args, {}, None) if self._funcs else None
        return contextlib.nullcontext() if batched is None else _Making(self, batched)

    def find(self, run: Callable[[], Any]) -> Any:
        """``run()``, repeated with one more such call until it writes no member's value into a tensor for all members."""
        written: list[tuple[Any, Line]] = []
        token = _seeking.set((self, written))
        try:
            while True:
                # It counts also if the model has caught what said so.
                try:
                    result = run()
                    if not written:
                        return result
                except (_Written, Exception):
                    if not written:
                        raise
                func, line = written.pop()
                written.clear()
                if func in self._funcs and line in self._lines:
                    raise TraceError(f"the model {REFUSAL}")
                self._funcs[func] = True
                self._lines.add(line)
        finally:
            self.mode = None
            _seeking.reset(token)

    def make(self, func: Any) -> bool:
        """Whether a call of ``func`` from the line that is running is one of them."""
        return func in self._funcs and self._is_running()

    @constant_to_compiler
    def _is_needed(self) -> bool:
        return bool(self._funcs) or self.is_seeking()

    @constant_to_compiler
    def is_seeking(self) -> bool:
        """Whether :meth:`find` runs the function."""
        return (seeking := _seeking.get()) is not None and seeking[0] is self

    @constant_to_compiler
    def _is_running(self) -> bool:
        return _line() in self._lines


_seeking: contextvars.ContextVar[tuple[MadeCalls, list[tuple[Any, Line]]] | None]
_seeking = contextvars.ContextVar("seeking", default=None)
"""Whose calls are sought, and those whose tensors would have been written."""


class _Written(BaseException):
    """A member's value is about to be written into a tensor for all members; a model's ``except`` must not stop it."""


class _Making(Mode):
    """Gives each member its own result of the known calls."""

    def __init__(self, made: MadeCalls, batched: Tensor):
        super().__init__()
        self._made = made
        self._true = batched.new_ones((), dtype=torch.bool)
        self._level = 0 if torch.compiler.is_compiling() else _torch.depth()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        result = func(*args, **kwargs)
        return _torch.pytree.tree_map(self._for_each, result) if self._made.make(func) and self._is_within() else result

    def _is_within(self) -> bool:
        """Whether the members run as one, and not one alone, as where the model is examined."""
        return torch.compiler.is_compiling() or _torch.depth() >= self._level

    def _for_each(self, result: Any) -> Any:
        return torch.where(self._true, result, result) if isinstance(result, Tensor) else result


class made_for_each(Mode):
    """Gives each member its own of every new tensor, in a pass of an autograd function whose rule PyTorch generates.

    The pass may run out of sight of the mode that seeks what is written. Indices, which cost less if all members share
    them, stay as they are.
    """

    def __init__(self, tensors: Any):
        super().__init__()
        batched = next((x for x in _tensors(tensors) if _has_level(x, None)), None)
        self._true = None if batched is None else batched.new_ones((), dtype=torch.bool)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        result = func(*args, **kwargs)
        if self._true is None or not isinstance(result, Tensor) or result.dtype == torch.long:
            return result
        name = getattr(func, "__name__", "")
        is_new = name == "clone" or name.endswith("_like") or name.startswith("new_") or not _tensors((args, kwargs))
        return torch.where(self._true, result, result) if is_new else result


class _Seeking(_Making):
    """Raises :class:`_Written` where a member's value is about to be written into a tensor for all members."""

    def __init__(self, made: MadeCalls, batched: Tensor):
        super().__init__(made, batched)
        made.mode = self
        # The call that made each storage; the tensor keeps its number from being given to another one.
        self._calls: dict[int, tuple[Any, Line, Tensor]] = {}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        given = _tensors((args, kwargs))
        for target in targets(func, args, kwargs):
            if not self._is_batched(target) and any(self._is_batched(tensor) for tensor in given):
                self.find(target, TraceError(f"the model {REFUSAL}"))
        result = super().call(func, args, kwargs)
        # This package copies modules with their constants, which a model must not write.
        known = {
            _number(tensor) for tensor in (given if func is not Tensor.__deepcopy__ else _tensors((given, result)))
        }
        for tensor in _tensors(result):
            if not self._is_batched(tensor) and (number := _number(tensor)) not in known:
                self._calls.setdefault(number, (func, _line(), tensor))
        return result

    def find(self, target: Tensor, unknown: Exception) -> None:
        """Raise the :class:`_Written` of the call that has made a tensor for all members, or ``unknown``."""
        if (number := _number(target)) not in self._calls:
            raise unknown
        if (seeking := _seeking.get()) is not None:
            seeking[1].append(self._calls[number][:2])
        raise _Written

    def _is_batched(self, tensor: Tensor) -> bool:
        """Whether members have different values of a tensor."""
        return _has_level(tensor, self._level)


def _has_level(tensor: Tensor, level: int | None) -> bool:
    """Whether a tensor is mapped over at a level of ``vmap``, or at any."""
    while _torch.is_wrapped(tensor):
        if _torch.is_batched(tensor) and level in (None, _torch.level_of(tensor)):
            return True
        tensor = _torch.get_unwrapped(tensor)
    return False


REFUSAL = (
    "writes a member's value in place into a tensor that all members share; if the model makes it, make it by a function "
    "such as torch.zeros and write x.real.copy_(value), not x.real = value; otherwise write into a copy, x = x.clone(), or "
    "make it a buffer, of which each member has its own"
)


def refuse_write(target: Tensor, error: Exception) -> NoReturn:
    """Raise an error because a member's value is written, out of sight of modes, into a tensor for all members."""
    if (seeking := _seeking.get()) is not None and seeking[0].mode is not None:
        seeking[0].mode.find(target, error)
    raise error


def _batched_argument(args: Any, kwargs: Any, in_dims: Any) -> Tensor | None:
    """An argument with the model axis inside ``vmap``; None if one member runs without it."""
    if torch.compiler.is_compiling():
        return _mapped_leaf(args, in_dims)
    level = _torch.depth()
    return next((x for x in _tensors((args, kwargs)) if _torch.is_batched(x) and _torch.level_of(x) == level), None)


def _mapped_leaf(tree: Any, dims: Any) -> Tensor | None:
    """The first tensor whose entry of ``dims``, one int or a tree of them, is not None."""
    if dims is None or isinstance(tree, Tensor):
        return None if dims is None else tree
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (tuple, list)) else ()
    for name, child in children:
        leaf = _mapped_leaf(child, dims if isinstance(dims, int) else dims[name])
        if leaf is not None:
            return leaf
    return None


def targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes, by the names of PyTorch's functions."""
    yield from _tensors(kwargs.get("out"))
    # An operator is called by its name and that of its overload, as is add_.Tensor.
    name = getattr(func, "__name__", "").partition(".")[0]
    if name.startswith(("__i", "__setitem__")) or (name.endswith("_") and not name.endswith("__")):
        yield from _tensors(args[:1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _number(tensor: Tensor) -> int:
    """The number of a tensor's storage."""
    while _torch.is_wrapped(tensor):
        tensor = _torch.get_unwrapped(tensor)
    return _torch.storage_number(tensor)


def _line() -> Line:
    """The innermost line of the user's code that is running, or that the compiler traces."""
    if not rehearsing.get() and (traced := _torch.traced_lines()):
        return next((line for line in traced if is_users_file(line[0])), None)
    frame = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno)
