"""Workers that are the ranks of a program that torchrun has started."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hfta_func.errors import WorkerError
from hfta_func.workers.pool import Pool
from hfta_func.workers.process import Died, FunctionServer, Worker, dumps, loads, one_line_error, settings

T = TypeVar("T")


class _OtherRank(Worker):
    """A worker that is another rank."""

    def __init__(self, rank: int):
        self.name, self._rank, self._is_gone = f"rank {rank}", rank, False
        # The numbers of functions that it has.
        self._known: frozenset[int] = frozenset()

    def start(self) -> None:
        if self._is_gone:
            text = f"{self.name} has gone, and torchrun starts all ranks anew or none"
            raise WorkerError(f"{text}; the same command goes on from the files of resume=")
        self._asked(dumps(settings()))

    def call(self, *message: Any) -> bytes:
        number, live, function, arguments = message
        known, self._known = self._known, self._known & live | {number}
        return self._asked((number, live, b"" if number in known else function, arguments))

    def _asked(self, message: Any) -> Any:
        try:
            dist.send_object_list([message], self._rank)
            return _received(self._rank)
        except RuntimeError as error:
            self._is_gone = True
            raise Died(one_line_error(error)) from error

    def close(self) -> None:
        # It reads this after the call that it is making.
        if not self._is_gone:
            with contextlib.suppress(RuntimeError):
                dist.send_object_list([None], self._rank)


class _ThisRank(Worker):
    """The worker that is this rank."""

    name = "rank 0"

    def start(self) -> None:
        self._server = FunctionServer(settings())

    def call(self, *message: Any) -> bytes:
        return self._server.call(*message)


def torchrun(main: Callable[[Pool], T], *, timeout: float = 7 * 24 * 3600.0) -> T | None:
    """Run a program on rank 0 whose arrays train in all ranks that ``torchrun`` has started.

    Rank 0 calls ``main(executor)``, which calls :func:`hfta_func.fit` or ``tune.run`` with this executor; rank 0 is one of
    the workers, and the other ranks work until ``main`` returns. If a rank dies, the call in ``main`` raises a
    :class:`WorkerError`; the files of ``resume=`` have what was trained before, and the same command goes on from them.

    Args:
        main: The program of rank 0.
        timeout: Seconds after which a rank without an answer is given up; a segment must not take longer.

    Returns:
        The result of ``main``, None in all other ranks.

    Raises:
        RuntimeError: if the program was not started by ``torchrun``.
        WorkerError: if a rank has gone.

    Example:
        .. code-block:: python

            # torchrun --nproc-per-node 2 study.py
            def main(executor):
                study = tune.run(build, space, metric="accuracy", trials=64, epochs=9, executor=executor, resume="study")
                print(study.best)

            cluster.torchrun(main)
    """
    if not dist.is_torchelastic_launched() and not dist.is_initialized():
        raise RuntimeError("the program was not started by torchrun; use torchrun --nproc-per-node 2 program.py")
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
            stack.callback(dist.destroy_process_group)
        if dist.get_rank() != 0:
            return _serve()
        return main(stack.enter_context(Pool([_ThisRank(), *map(_OtherRank, range(1, dist.get_world_size()))])))


def _serve() -> None:
    """Make the calls of rank 0."""
    server = FunctionServer(loads(_received(0)))
    dist.send_object_list([None], 0)
    while (call := _received(0)) is not None:
        dist.send_object_list([server.call(*call)], 0)


def _received(rank: int) -> Any:
    received: list[Any] = [None]
    dist.recv_object_list(received, rank)
    return received[0]
