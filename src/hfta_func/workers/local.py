"""Pools of worker processes of this machine."""

from __future__ import annotations

import itertools
from typing import Literal

import torch

from hfta_func.workers.pool import Pool
from hfta_func.workers.process import Process, cores


def shares(size: int, count: int) -> list[tuple[int, int]]:
    """The first of ``size`` things in each of ``count`` parts, and the one after its last."""
    return [*itertools.pairwise(size * number // count for number in range(count + 1))]


def processes(count: int, on_gpu: bool) -> list[Process]:
    """Worker processes with an equal share of the processors, or a GPU, each."""
    processors = cores()
    spans = enumerate(shares(len(processors), count))
    return [Process(number, processors[low:high] or processors, on_gpu) for number, (low, high) in spans]


class WorkerPool(Pool):
    """Worker processes on this machine, for several calls of :func:`fit` and ``tune.run``.

    Args:
        workers: Number of processes, each with an equal share of the processors, or with a GPU where there are some;
            ``"auto"`` is one for every processor, or GPU.

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
        most, gpus = len(cores()), torch.cuda.device_count()
        count = (gpus or most) if workers == "auto" else workers
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"workers is {workers!r}; it must be at least 1, or 'auto'")
        if count > most:
            raise ValueError(
                f"workers is {count}, more than the {most} processors that this process may use; pass at most {most}, "
                f"or 'auto'"
            )
        super().__init__(processes(count, gpus > 0), share=True)
