"""Arrays that train, in this process or in workers; an array that raises is halved, so that members fail alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import hfta_func as hfta
from hfta_func.tune.groups import Group
from hfta_func.workers.executor import Executor


class Job(NamedTuple):
    """An array that trains, and its result so far."""

    group: Group
    numbers: tuple[int, ...]  # of its members
    starts: Mapping[int, int]  # the epochs that they start from
    epochs: int  # to train
    timeout: float | None  # seconds after which it ends with the epoch
    calls: dict[int, tuple[int, ...]]  # by number, those that train the array or its halves, and the members of each
    results: list[tuple[tuple[int, ...], Any]]  # members and what they have become: a Segment, or the error of one
    interrupted: bool = False


class Jobs:
    """All arrays that train, by one executor."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.under_way: list[Job] = []

    @property
    def free(self) -> int:
        """The number of free workers."""
        return self.executor.count - sum(len(job.calls) for job in self.under_way)

    @property
    def members(self) -> set[int]:
        """The members that train."""
        return {number for job in self.under_way for number in job.numbers}

    def start(
        self, group: Group, numbers: tuple[int, ...], starts: Mapping[int, int], epochs: int, timeout: float | None
    ) -> None:
        """Have an array trained, for some seconds at most."""
        job = Job(group, numbers, starts, epochs, timeout, {}, [])
        self._call(job, numbers)
        self.under_way.append(job)

    def _call(self, job: Job, numbers: Sequence[int]) -> None:
        arguments = job.group.arguments(numbers, job.starts, job.epochs, job.timeout)
        job.calls[self.executor.submit(job.group.trainer, **arguments)] = tuple(numbers)

    def wait(self) -> Job:
        """Wait until any array has trained."""
        while True:
            call, answer = self.executor.wait()
            job = next(job for job in self.under_way if call in job.calls)
            numbers = job.calls.pop(call)
            if isinstance(answer, Exception) and len(numbers) > 1:
                self._halve(job, numbers, answer)
            else:
                job.results.append((numbers, answer))
            if getattr(answer, "interrupted", False):
                # Ctrl-C ends both halves of an array.
                self.stop()
                return job._replace(results=[], interrupted=True)
            if not job.calls:
                self.under_way = [other for other in self.under_way if other is not job]
                return job

    def _halve(self, job: Job, numbers: tuple[int, ...], error: Exception) -> None:
        half = -(-len(numbers) // 2)
        if hfta.run.is_out_of_memory(error):
            text = f"an array of {len(numbers)} members ran out of memory; arrays of {half} are trained instead"
            warnings.warn(text, stacklevel=2)
            job.group.limit = half
        error.__traceback__ = None
        for part in (numbers[:half], numbers[half:]):
            self._call(job, part)

    def stop(self) -> None:
        """Forget the arrays that train."""
        self.under_way.clear()
        self.executor.forget()
