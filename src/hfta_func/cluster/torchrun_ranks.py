"""Workers that are the ranks of one program, which torchrun has started."""

from __future__ import annotations

import datetime
import logging
import pickle
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hfta_func import WorkerError
from hfta_func.workers.pool import Pool
from hfta_func.workers.process import Died, FunctionServer, check_versions, versions
from hfta_func.workers.settings import settings
from hfta_func.workers.wire import TensorBytes, one_line_error

T = TypeVar("T")
_log = logging.getLogger("hfta_func.workers")


class _Peer:
    """A :class:`~hfta_func.workers.pool.Worker` that is another rank."""

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
            found = pickle.loads(_receive(self._rank))
        except RuntimeError as error:
            raise WorkerError(f"{self.name} cannot be reached ({one_line_error(error)})") from error
        check_versions(self.name, found)

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        try:
            _send(pickle.dumps((number, live, function, arguments)), self._rank)
            return pickle.loads(_receive(self._rank))
        except RuntimeError as error:
            self._is_gone = True
            raise Died(one_line_error(error)) from error

    def kill(self) -> None:
        pass

    def close(self) -> None:
        # What it is doing comes to its end before it reads this.
        if not self._is_gone:
            try:
                _send(b"", self._rank)
            except RuntimeError as error:
                _log.warning("%s has gone (%s)", self.name, one_line_error(error))


class _Self:
    """The rank that asks, which trains as well."""

    name = "rank 0"

    def start(self) -> None:
        self._server = FunctionServer(settings())

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        answer = self._server.call(number, live, function, arguments)
        return self._server.has(number), answer

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


def torchrun(main: Callable[[Pool], T], *, timeout: float = 7 * 24 * 3600.0) -> T | None:
    """Run a program on rank 0 whose arrays train in all ranks that ``torchrun`` has started.

    Rank 0 calls ``main(executor)``, which calls :func:`hfta_func.fit` or ``tune.run`` with this executor, and takes its share
    of the work; the others work until it returns. If a rank dies, the call in ``main`` raises a :class:`WorkerError`; what it
    has trained before is in the files of ``resume=``, from which the same command goes on.

    Args:
        main: The program of rank 0.
        timeout: Seconds after which a rank that says nothing is given up; a segment must not take longer.

    Returns:
        What ``main`` returns, None in all other ranks.

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
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        if dist.get_rank() != 0:
            _serve()
            return None
        with Pool([_Self(), *map(_Peer, range(1, dist.get_world_size()))]) as pool:
            return main(pool)
    finally:
        if own:
            dist.destroy_process_group()


def _serve() -> None:
    """Work for rank 0."""
    found = FunctionServer(pickle.loads(_receive(0)))
    _send(pickle.dumps(versions()), 0)
    while order := _receive(0):
        number, *rest = pickle.loads(order)
        answer = found.call(number, *rest)
        _send(pickle.dumps((found.has(number), answer)), 0)


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
