"""A budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeUp(Exception):
    """The budget is spent: what is under way is left for the next one."""


class Clock:
    """Counts down from ``budget`` seconds, by ``now``."""

    def __init__(self, budget: float, now: Callable[[], float] = time.monotonic):
        self.budget, self._now = budget, now
        self._end = now() + budget

    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self._end - self._now()

    def check(self, seconds: float = 0.0) -> None:
        """Go on only if so many seconds are left.

        Raises:
            TimeUp: if not.
        """
        if self.left() <= seconds:
            raise TimeUp

    def until(self, share: float) -> Clock:
        """A clock that ends when this share of the whole budget is spent."""
        clock = Clock(0.0, self._now)
        clock.budget, clock._end = self.budget, self._end - self.budget * (1 - share)
        return clock
