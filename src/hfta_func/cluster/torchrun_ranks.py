"""Workers that are the ranks of a program that torchrun has started."""

from __future__ import annotations

import datetime
import logging
import pickle
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hfta_func.errors import WorkerError
from hfta_func.workers.pool import Pool, Worker
from hfta_func.workers.process import Died, FunctionServer, check_versions, settings, versions
from hfta_func.workers.wire import TensorBytes, one_line_error

T = TypeVar("T")
_log = logging.getLogger("hfta_func.workers")


class _OtherRank(Worker):
    """A worker that is another rank."""

    def __init__(self, rank: int):
        self.name = f"rank {rank}"
        self._rank = rank
        self._is_gone = False

    def start(self) -> None:
        if self._is_gone:
            raise WorkerError(
                f"{self.name} has gone, and torchrun starts all ranks anew or none; what was trained before is in the files "
                f"of resume=, from which the same command goes on"
            )
        try:
            _send(pickle.dumps(settings()), self._rank)
            other = pickle.loads(_receive(self._rank))
        except RuntimeError as error:
            raise WorkerError(f"{self.name} cannot be reached ({one_line_error(error)})") from error
        check_versions(self.name, other)

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        try:
            _send(pickle.dumps((number, live, function, arguments)), self._rank)
            return pickle.loads(_receive(self._rank))
        except RuntimeError as error:
            self._is_gone = True
            raise Died(one_line_error(error)) from error

    def close(self) -> None:
        # It reads this after the call that it is making.
        if not self._is_gone:
            try:
                _send(b"", self._rank)
            except RuntimeError as error:
                _log.warning("%s has gone (%s)", self.name, one_line_error(error))


class _ThisRank(Worker):
    """The worker that is this rank."""

    name = "rank 0"

    def start(self) -> None:
        self._server = FunctionServer(settings())

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        return self._server.call(number, live, function, arguments)


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
        WorkerError: if a rank has gone, or has another version of this package.

    Example:
        .. code-block:: python

            # torchrun --nproc-per-node 2 study.py
            def main(executor):
                study = tune.run(build, space, metric="accuracy", trials=64, epochs=9, executor=executor, resume="study")
                print(study.best)

            cluster.torchrun(main)
    """
    if not dist.is_torchelastic_launched() and not dist.is_initialized():
        raise RuntimeError(
            "the program was not started by torchrun; start it with torchrun --nproc-per-node 2 program.py"
        )
    starts = not dist.is_initialized()
    if starts:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        if dist.get_rank() != 0:
            _serve()
            return None
        with Pool([_ThisRank(), *map(_OtherRank, range(1, dist.get_world_size()))]) as pool:
            return main(pool)
    finally:
        if starts:
            dist.destroy_process_group()


def _serve() -> None:
    """Make the calls of rank 0."""
    server = FunctionServer(pickle.loads(_receive(0)))
    _send(pickle.dumps(versions()), 0)
    while message := _receive(0):
        _send(pickle.dumps(server.call(*pickle.loads(message))), 0)


def _send(message: bytes, rank: int) -> None:
    dist.send(torch.tensor([len(message)]), rank)
    if message:
        dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), rank)


def _receive(rank: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    message = torch.empty(int(size), dtype=torch.uint8)
    if len(message):
        dist.recv(message, rank)
    return TensorBytes.of(message).data
