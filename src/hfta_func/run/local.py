"""Workers that are processes of this machine."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Literal

import torch

from hfta_func.run.pool import Died, Pool
from hfta_func.run.processes import Process, cores
from hfta_func.run.settings import settings


class _Local:
    """A :class:`Worker` in a process of this machine."""

    def __init__(self, number: int, processors: Sequence[int], on_gpu: bool, settings: bytes):
        self.name = f"worker {number}"
        self._how = number, processors, on_gpu, "hfta_func.run.bench"
        self._settings = settings
        self._closed = False
        self.process: Process | None = None

    def start(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = Process(*self._how)
        self.process.send(self._settings)
        if self._closed:
            self.process.kill()

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        assert self.process is not None
        self.process.send(pickle.dumps((number, live, function, arguments)))
        answer = self.process.receive()
        if answer is None:
            raise Died(f"with status {self.process.status()}")
        return answer

    def kill(self) -> None:
        self._closed = True
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


class WorkerPool(Pool):
    """Worker processes on this machine, for several calls of :func:`fit` and ``tune.run``.

    Args:
        workers: How many, each with an equal share of the processors, or with a GPU where there are some; ``"auto"`` is one
            for every processor, or GPU.

    Raises:
        ValueError: if there are more workers than processors.

    Example:
        >>> with WorkerPool(1) as pool:
        ...     call = pool.submit(dict, seed=7)
        ...     number, answer = pool.wait()
        >>> number == call, answer
        (True, {'seed': 7})
    """

    def __init__(self, workers: int | Literal["auto"] = "auto"):
        processors, gpus = cores(), torch.cuda.device_count()
        most = len(processors)
        count = (gpus or most) if workers == "auto" else workers
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"workers is {workers!r}; it must be at least 1, or 'auto'")
        if count > most:
            raise ValueError(
                f"workers is {count}, more than the {most} processors that this process may use; pass at most {most}, or "
                f"'auto'"
            )
        edges = [most * number // count for number in range(count + 1)]
        own = pickle.dumps(settings())
        super().__init__(
            [
                _Local(number, processors[low:high], gpus > 0, own)
                for number, (low, high) in enumerate(itertools.pairwise(edges))
            ],
            share=True,
        )
