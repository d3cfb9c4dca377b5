"""Whether views of a member alias what they view, as those of one model do.

The results of all members need not be contiguous per member: a convolution of an array puts the model axis between samples
and channels. An operator that returns a view for one model then returns a copy for the array, and a write into the copy does
not reach the original, or the other way round. Such copies are noted while a function runs. If one of the two is written, the
function runs again, now and in later calls, with every new tensor laid out member by member.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor

from hfta_func._torch import counter, is_alias, writes
from hfta_func.calls.made import MadeCalls
from hfta_func.rules._layout import models_first

COPIED = "copied"
"""Among what calls have been told of the memory of tensors: a view of members that is a copy."""


class AliasFacts:
    """What calls of a function have learned for later calls."""

    def __init__(self, reads: bool = False):
        self.reads = reads
        """Whether the function may read values, because its members run one by one."""
        self.models_first = False
        """Whether the model axis must come first in every new tensor."""
        self.tried = self.mapped = False
        """Whether the function has run, and whether it has run under ``vmap``."""
        self.refused: Exception | None = None
        """The error of a view that a member alone does not have."""
        self.asks = False
        """Whether the function asks how tensors lie in memory, for which a graph lays them out member by member."""
        self.laid_out = False
        """Whether what the function is told of the memory of tensors has been compared with what a member alone is told."""
        self.made = MadeCalls()
        """The calls that make tensors into which members write their values."""


class _Copy(NamedTuple):
    """The write counters of a tensor and of a copy that stands for a view of it, and their values when the copy was made."""

    base: Tensor
    copy: Tensor
    versions: tuple[int, int]

    def is_written(self) -> bool:
        # Inference mode counts no writes, so a write is assumed.
        return -1 in self.versions or (writes(self.base), writes(self.copy)) != self.versions


class _Thread(threading.local):
    innermost: watched | None = None


_thread = _Thread()


class watched:
    """A context that notes copies that stand for views, and whether they are written."""

    def __init__(self, known: AliasFacts):
        self.known = known
        self._copies: list[_Copy] = []

    def note(self, base: Tensor, view: Tensor) -> Tensor:
        """``view``, noted if it is a copy."""
        if not self.known.models_first and not is_alias(base, view):
            # Their counters, because the tensors themselves would stay in memory until the function returns.
            self._copies.append(_Copy(counter(base), counter(view), (writes(base), writes(view))))
        return view

    def is_written(self) -> bool:
        """Whether something was written into a copy or into what it copies."""
        return any(copy.is_written() for copy in self._copies)

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
