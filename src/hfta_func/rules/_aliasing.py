"""Whether views of a member alias what they view, as those of one model do.

Members' results need not lie one after another in memory: a convolution of all members puts their axis between samples and
channels. A view that one member's tensor has is then a copy, and what is written into either never reaches the other. Such
copies are noted while a function runs. If one of the two is written, the function runs once more, and from then on, with
every new tensor laid out member by member.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor

from hfta_func._torch import counter, is_alias, writes
from hfta_func.rules._layout import front


class AliasFacts:
    """What calls of a function have found out for later ones."""

    def __init__(self, reads: bool = False):
        self.reads = reads
        """Whether it may read values, because its members run one by one."""
        self.front = False
        """Whether the model axis must come first in every new tensor."""
        self.tried = False
        """Whether one member alone has run as a member of an array."""


class _Copy(NamedTuple):
    """Counters of a tensor and of the copy of it that stands for a view, and how often both had been written then."""

    base: Tensor
    copy: Tensor
    versions: tuple[int, int]

    def is_written(self) -> bool:
        # Without numbers it has to be assumed.
        return -1 in self.versions or (writes(self.base), writes(self.copy)) != self.versions


class _Thread(threading.local):
    watch: watched | None = None


_thread = _Thread()


class watched:
    """A context that keeps an eye on copies that stand for views."""

    def __init__(self, known: AliasFacts):
        self.known = known
        self._copies: list[_Copy] = []

    def note(self, base: Tensor, view: Tensor) -> Tensor:
        """``view``, on which an eye is kept if it is a copy."""
        if not self.known.front and not is_alias(base, view):
            # Not the tensors: they would stay in memory until the function returns.
            self._copies.append(_Copy(counter(base), counter(view), (writes(base), writes(view))))
        return view

    def is_torn(self) -> bool:
        """Whether something was written into a copy or into what it copies."""
        return any(copy.is_written() for copy in self._copies)

    def __enter__(self) -> watched:
        self._outer, _thread.watch = _thread.watch, self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.watch = self._outer
        if self._outer is not None and not self.is_torn():
            # An outer function may go on with what this one returns.
            self._outer._copies.extend(self._copies)


def current() -> watched | None:
    """The innermost context of this thread."""
    return _thread.watch


def in_front(outputs: Any, dims: Any) -> tuple[Any, Any]:
    """Results with the model axis in front, in memory too."""
    if isinstance(dims, tuple):
        pairs = [in_front(output, dim) for output, dim in zip(outputs, dims, strict=True)]
        return tuple(output for output, _ in pairs), tuple(dim for _, dim in pairs)
    # A gradient that nobody asked for is None, whatever axis it would have.
    return (outputs, dims) if dims is None or outputs is None else (front(outputs, dims).contiguous(), 0)
