"""Whether views of a member alias what they view, as those of one model do.

The results of all members need not be contiguous per member: a convolution of an array puts the model axis between samples
and channels. An operator that returns a view for one model then returns a copy for the array, and a write into the copy does
not reach the original, or the other way round. Such copies are noted while a function runs. If one of the two is written, the
function runs again, now and in later calls, with every new tensor laid out member by member.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from hfta_func._torch import counter, is_alias, writes
from hfta_func.calls.made import MadeCalls
from hfta_func.rules._layout import models_first


class AliasFacts:
    """What calls of a function have learned for later calls."""

    def __init__(self) -> None:
        self.models_first = False
        """Whether the model axis must come first in every new tensor."""
        self.made = MadeCalls()
        """Whether each member gets its own of tensors that the function makes."""


class _Thread(threading.local):
    innermost: watched | None = None


_thread = _Thread()


class watched:
    """A context that notes copies that stand for views, and whether they are written."""

    def __init__(self, known: AliasFacts):
        self.known = known
        # Tensors and copies that stand for views of them, and how often both had been written when the copies were made.
        self._copies: list[tuple[Tensor, Tensor, tuple[int, int]]] = []

    def note(self, base: Tensor, view: Tensor) -> Tensor:
        """``view``, noted if it is a copy."""
        if not self.known.models_first and not is_alias(base, view):
            # Their counters, because the tensors themselves would stay in memory until the function returns.
            self._copies.append((counter(base), counter(view), (writes(base), writes(view))))
        return view

    def is_written(self) -> bool:
        """Whether something was written into a copy or into what it copies; inference mode counts no writes."""
        return any(-1 in before or (writes(base), writes(copy)) != before for base, copy, before in self._copies)

    def __enter__(self) -> watched:
        self._outer, _thread.innermost = _thread.innermost, self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.innermost = self._outer
        if self._outer is not None and not self.is_written():
            # An outer function may write what this one returns.
            self._outer._copies.extend(self._copies)


def current() -> watched | None:
    """The innermost context of this thread."""
    return _thread.innermost


def with_models_first(outputs: Any, dims: Any) -> tuple[Any, Any]:
    """Results whose model axis comes first, in memory too."""
    if isinstance(dims, tuple):
        pairs = [with_models_first(output, dim) for output, dim in zip(outputs, dims, strict=True)]
        return tuple(output for output, _ in pairs), tuple(dim for _, dim in pairs)
    # A gradient that is not needed is None, although it has an axis.
    return (outputs, dims) if dims is None or outputs is None else (models_first(outputs, dims).contiguous(), 0)
