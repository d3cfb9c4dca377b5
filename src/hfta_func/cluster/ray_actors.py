"""Workers that are actors of Ray."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from hfta_func import WorkerError
from hfta_func.workers.pool import Pool
from hfta_func.workers.process import Died, FunctionServer, check_versions, versions
from hfta_func.workers.settings import settings
from hfta_func.workers.wire import dumps, one_line_error

_STARTS = 5
"""How often an actor is placed before it is given up."""


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("this needs Ray, which is not installed; pip install 'hfta_func[cluster]'") from error


class Actor:
    """The side of a worker.

    Args:
        settings: See :class:`FunctionServer`.
        threads: How many it computes with, 0 for all.
    """

    def __init__(self, settings: Mapping[str, Any], threads: int):
        if threads:
            torch.set_num_threads(threads)
        self._server = FunctionServer(settings)

    def about(self) -> dict[str, Any]:
        """What it is, and where."""
        return {"versions": versions(), "pid": os.getpid(), "node": os.uname().nodename}

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        """See :class:`~hfta_func.workers.pool.Worker`."""
        answer = self._server.call(number, live, function, arguments)
        return self._server.has(number), answer


class _Functions:
    """Functions in the object store, each put there once for all actors."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}
        self._lock = threading.Lock()

    def ref(self, number: int, live: frozenset[int], function: bytes) -> Any:
        with self._lock:
            self._refs = {key: ref for key, ref in self._refs.items() if key in live}
            if number not in self._refs:
                self._refs[number] = _ray().put(function)
            return self._refs[number]


class _Remote:
    """A :class:`~hfta_func.workers.pool.Worker` that is an actor; when it dies, another is placed wherever there is room."""

    def __init__(self, number: int, options: Mapping[str, Any], functions: _Functions, order: tuple[Any, ...]):
        self.name, self.pid = f"worker {number}", 0
        self._number, self._options, self._functions, self._order = number, options, functions, order
        self._actor: Any = None
        self._closed = False

    def start(self) -> None:
        ray = _ray()
        about: Any = None
        for trial in range(_STARTS):
            if self._actor is not None:
                # It may only have been out of reach, and would keep its place from the next one.
                ray.kill(self._actor)
            self._actor = ray.remote(Actor).options(**self._options).remote(*self._order)
            if self._closed:
                self.kill()
            try:
                about = ray.get(self._actor.about.remote())
                break
            except Exception as error:
                if self._closed:
                    return
                if "No module named" in str(error):
                    raise WorkerError(
                        f"{self.name} cannot import what it needs ({_line(error)}); install hfta_func on all nodes, or pass "
                        f"a runtime_env to ray.init that has it"
                    ) from error
                # Its node may have gone while it started.
                if trial == _STARTS - 1:
                    raise WorkerError(f"{self.name} cannot be started ({_line(error)})") from error
        check_versions(f"{self.name} on {about['node']}", about["versions"])
        self.name, self.pid = f"worker {self._number} on {about['node']}", about["pid"]

    def call(self, number: int, live: frozenset[int], function: bytes | None, arguments: bytes) -> tuple[bool, bytes]:
        ray = _ray()
        try:
            sent = None if function is None else self._functions.ref(number, live, function)
            return ray.get(self._actor.call.remote(number, live, sent, arguments))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            # The error of this call alone: a smaller one may have room.
            text = (
                f"{self.name}: there is no room in Ray's object store, nor on the disk that it spills to; free some there, "
                f"start Ray with a larger object_store_memory, or train smaller arrays"
            )
            return False, dumps(WorkerError(text))
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            raise Died(_line(error)) from error

    def kill(self) -> None:
        self._closed = True
        if self._actor is not None and _ray().is_initialized():
            _ray().kill(self._actor)

    def close(self) -> None:
        self._actor = None


def _line(error: BaseException) -> str:
    """What Ray says, in one line: its last one that names a cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "No module named" in line or "Error" in line]
    return (named or lines or [type(error).__name__])[-1][:300]


class RayPool(Pool):
    """Workers that are actors; made by :func:`ray`."""


class Kind(NamedTuple):
    """Workers of one kind of device, among others in one executor.

    Args:
        workers: How many actors.
        max_models: The largest array that each trains, such as :func:`hfta_func.max_models` finds on that device.
        cpus: Processors, and threads, of each.
        gpus: GPUs of each; by default 1 if the cluster has any.
        resources: Further resources of each by name, which decide the nodes it can be placed on.
    """

    workers: int
    max_models: int
    cpus: float = 1
    gpus: float | None = None
    resources: Mapping[str, float] | None = None


def ray(
    workers: int | Literal["auto"] | Sequence[Kind] = "auto",
    *,
    cpus: float = 1,
    gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    timeout: float = 600.0,
) -> RayPool:
    """An executor whose workers are actors of a Ray cluster, for :func:`hfta_func.fit` and ``tune.run``.

    States and functions go through Ray's object store. An actor that dies, alone or with its node, is placed anew wherever
    there is room, and its segment is trained again from the state at its start. While there is none, the others go on; nodes
    that come later get the actors that wait.

    Args:
        workers: How many actors, at most; ``"auto"`` is as many as the cluster has room for now. For unequal devices a list
            of :class:`Kind`: each kind gets arrays of its own largest size, and members in proportion to that.
        cpus: Processors, and threads, of each.
        gpus: GPUs of each; by default 1 if the cluster has any.
        resources: Further resources of each by name, which decide the nodes it can be placed on.
        address: Address of the cluster, if ``ray.init`` has not been called. By default the one that ``RAY_ADDRESS`` names,
            or else a new one on this machine alone, which listens on the loopback and has no dashboard.
        timeout: Seconds after which a worker, of each kind, must have started.

    Raises:
        ImportError: if Ray is not installed.
        WorkerError: if the cluster cannot be reached, is of another version, has no room at all or none in time, or its
            workers have no or another version of this package.
        ValueError: if ``workers`` is no number of workers, or a kind has no worker or room for no model.
    """
    module = _ray()
    kinds = _kinds(workers, Kind(0, 0, cpus, gpus, resources))
    if not module.is_initialized():
        _connect(module, address)
    there = module.cluster_resources()
    functions, remotes, asked = _Functions(), [], []
    for kind in kinds:
        gpus = float(there.get("GPU", 0) > 0) if kind.gpus is None else kind.gpus
        wanted = {"CPU": kind.cpus, "GPU": gpus, **(kind.resources or {})}
        room = [int(there.get(name, 0) / amount) for name, amount in wanted.items() if amount]
        count = kind.workers or min(room, default=1)
        if count < 1:
            raise WorkerError(
                f"the cluster has {_named(there)}, which is no room for a worker that needs {_named(wanted)}"
            )
        options = {
            **{"num_cpus": kind.cpus, "num_gpus": gpus, "resources": dict(kind.resources or {})},
            **{"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"},
        }
        order = settings(), max(1, int(kind.cpus))
        remotes += [_Remote(len(remotes) + number, options, functions, order) for number in range(count)]
        asked.append((kind.max_models, count, _named(wanted)))
    pool = RayPool(remotes, limits=[limit for limit, count, _ in asked for _ in range(count) if limit])
    try:
        if not pool.ready(timeout):
            free = _named(module.available_resources())
            raise WorkerError(
                f"no worker that needs {' or '.join(text for *_, text in asked)} has started in {timeout:g} s; of the "
                f"cluster's {_named(there)}, {free} is free: end what holds the rest, or pass a larger timeout"
            )
    except BaseException:
        pool.close()
        raise
    return pool


def _kinds(workers: Any, alike: Kind) -> list[Kind]:
    """The kinds of workers; for ``"auto"``, their number is 0."""
    if workers == "auto" or isinstance(workers, int):
        if workers != "auto" and workers < 1:
            raise ValueError(f"workers is {workers!r}; it must be at least 1, or 'auto'")
        return [alike._replace(workers=0 if workers == "auto" else workers)]
    if not isinstance(workers, (list, tuple)) or not workers or not all(isinstance(one, Kind) for one in workers):
        raise ValueError(f"workers is {workers!r}; pass a number, 'auto', or a list of cluster.Kind")
    for kind in workers:
        if kind.workers < 1 or kind.max_models < 1:
            raise ValueError(f"{kind} is no kind of workers; give it at least 1 worker, and 1 model to each")
    return [*workers]


def lone(resources: Mapping[str, float]) -> RayPool:
    """One actor on whatever node has some resources, which may come later."""
    module = _ray()
    if not module.is_initialized():
        _connect(module, None)
    options = {"num_cpus": 1, "resources": dict(resources), "max_restarts": 0, "max_task_retries": 0}
    return RayPool([_Remote(0, options, _Functions(), (settings(), 1))])


def _connect(module: Any, address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address is not None:
            host, _, port = address.rpartition("://")[2].rpartition(":")
            if port.isdigit():
                # Ray itself would ask for minutes whether it is there.
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            module.init(address=address, logging_level="ERROR")
        else:
            with _on_this_machine():
                # Without an address, Ray would join any cluster that runs on this machine.
                module.init(address="local", include_dashboard=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster {address}" if address else "a Ray instance on this machine"
        raise WorkerError(
            f"{where} cannot be used ({one_line_error(error)}); check that it runs, with Ray {module.__version__} and "
            f"the same version of Python as here"
        ) from error


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Ray's processes, which listen on all interfaces on Linux, listen on the loopback alone, as they do elsewhere."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    name, before = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    held = os.environ.get(name)
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if held is None:
            del os.environ[name]
        else:
            os.environ[name] = held


def _named(amounts: Mapping[str, float]) -> str:
    shown = [
        f"{amount:g} {name}" for name, amount in amounts.items() if amount and name.isidentifier() and "_" not in name
    ]
    return ", ".join(shown) or "nothing"
