"""Workers that are actors of Ray, and arrays as trials of Ray Tune."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

import hfta_func as hfta
from hfta_func._types import require
from hfta_func.errors import WorkerError
from hfta_func.workers.pool import Pool
from hfta_func.workers.process import Died, FunctionServer, Worker, dumps, one_line_error, settings

_STARTS = 5
"""Number of attempts to start an actor."""
_ONCE = {"max_restarts": 0, "max_task_retries": 0}
"""Options with which Ray itself repeats nothing, because the pool does."""


class Actor(FunctionServer):
    """What runs in a worker: an actor of Ray, which computes with this number of threads."""

    def __init__(self, settings: Mapping[str, Any], threads: int):
        torch.set_num_threads(threads)
        super().__init__(settings)

    def about(self) -> tuple[int, str]:
        """Its process id and node."""
        return os.getpid(), os.uname().nodename


class _Remote(Worker):
    """A worker that is an actor; if it dies, another one starts on any node with room."""

    def __init__(self, number: int, options: Mapping[str, Any], refs: dict[int, Any], arguments: tuple[Any, ...]):
        self.name, self.pid, self._closed = f"worker {number}", 0, False
        # ``refs`` are functions in the object store, where each is put once for all actors.
        self._number, self._options, self._refs, self._arguments = number, options, refs, arguments
        self._actor: Any = None

    def start(self) -> None:
        ray = require("ray", "cluster")
        for trial in range(_STARTS):
            if self._actor is not None:
                # It may live on out of reach, and would occupy what the next one needs.
                ray.kill(self._actor)
            self._actor = ray.remote(Actor).options(**self._options).remote(*self._arguments)
            if self._closed:
                self.kill()
            try:
                self.pid, node = ray.get(self._actor.about.remote())
                self.name = f"worker {self._number} on {node}"
                return
            except Exception as error:
                if self._closed:
                    return
                # Its node may have gone while it started.
                if "No module named" in str(error) or trial == _STARTS - 1:
                    cure = "install hfta_func on all nodes, or pass a runtime_env to ray.init that has what it imports"
                    raise WorkerError(f"{self.name} cannot be started ({_line(error)}); {cure}") from error

    def call(self, *message: Any) -> bytes:
        (number, live, function, arguments), ray = message, require("ray", "cluster")
        try:
            for other in {*self._refs} - live:
                self._refs.pop(other, None)
            function = self._refs[number] = self._refs.get(number) or ray.put(function)
            return ray.get(self._actor.call.remote(number, live, function, arguments))
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
            # Only this call fails: a smaller one may have room.
            cure = "free some there, start Ray with a larger object_store_memory, or train smaller arrays"
            text = "there is no room in Ray's object store, nor on the disk that it spills to"
            return dumps(WorkerError(f"{self.name}: {text}; {cure}"))
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            raise Died(_line(error)) from error

    def kill(self) -> None:
        self._closed = True
        if self._actor is not None and (ray := require("ray", "cluster")).is_initialized():
            ray.kill(self._actor)

    def close(self) -> None:
        self._actor = None


def _line(error: BaseException) -> str:
    """The last line of Ray's error that names a cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "No module named" in line or "Error" in line]
    return (named or lines or [type(error).__name__])[-1][:300]


class RayPool(Pool):
    """Workers that are actors; made by :func:`ray`."""


def ray(
    workers: int | Literal["auto"] = "auto",
    *,
    cpus: float = 1,
    gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    timeout: float = 600.0,
) -> RayPool:
    """An executor whose workers are actors of a Ray cluster, for :func:`hfta_func.fit` and ``tune.run``.

    States and functions go through Ray's object store. An actor that dies, alone or with its node, is started anew on any
    node with room, and its segment is trained again from the state at its start. While there is no room, the other actors go
    on; nodes that come later get the actors that wait.

    Args:
        workers: Number of actors, at most; ``"auto"`` is as many as the cluster has room for now.
        cpus: Processors, and threads, of each.
        gpus: GPUs of each; by default 1 if the cluster has any.
        resources: Further resources of each by name, which decide the nodes it can be placed on.
        address: Address of the cluster, if ``ray.init`` has not been called. By default the one that ``RAY_ADDRESS`` names,
            or else a new one on this machine alone, which listens on the loopback and has no dashboard.
        timeout: Seconds after which a worker must have started.

    Raises:
        ImportError: if Ray is not installed.
        WorkerError: if the cluster cannot be reached, has no room at all or none in time, or its workers lack this package.
        ValueError: if ``workers`` is no number of workers.
    """
    module = require("ray", "cluster")
    if workers != "auto" and workers < 1:
        raise ValueError(f"workers is {workers}; pass at least 1, or 'auto'")
    _connect(module, address)
    available = module.cluster_resources()
    gpus = float(available.get("GPU", 0) > 0) if gpus is None else gpus
    required = {"CPU": cpus, "GPU": gpus, **(resources or {})}
    rooms = [int(available.get(name, 0) / amount) for name, amount in required.items() if amount]
    count = min(rooms, default=1) if workers == "auto" else workers
    if count < 1:
        raise WorkerError(f"the cluster has {_named(available)}, which is no room for a worker of {_named(required)}")
    options = {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(resources or {}), "scheduling_strategy": "SPREAD"}
    refs, arguments = {}, (settings(), max(1, int(cpus)))
    with contextlib.ExitStack() as until_ready:
        workers_of = [_Remote(number, options | _ONCE, refs, arguments) for number in range(count)]
        pool = until_ready.enter_context(RayPool(workers_of))
        if not pool.ready(timeout):
            free = f"{_named(available)} of the cluster, {_named(module.available_resources())} are free"
            raise WorkerError(f"no worker that needs {_named(required)} has started in {timeout:g} s; {free}")
        until_ready.pop_all()
    return pool


def lone(resources: Mapping[str, float]) -> RayPool:
    """One actor on any node with the resources, which may come later."""
    _connect(require("ray", "cluster"), None)
    return RayPool([_Remote(0, {"num_cpus": 1, "resources": dict(resources), **_ONCE}, {}, (settings(), 1))])


def _connect(module: Any, address: str | None) -> None:
    """Join a cluster, unless that was done before."""
    address = address or os.environ.get("RAY_ADDRESS")
    if module.is_initialized():
        return
    try:
        if address is None:
            # Without an address, Ray would join any cluster that runs on this machine.
            with _on_this_machine():
                module.init(address="local", include_dashboard=False, logging_level="ERROR")
            return
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        module.init(address=address, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster {address}" if address else "a Ray instance on this machine"
        cure = f"check that it runs, with Ray {module.__version__} and the same version of Python as here"
        raise WorkerError(f"{where} cannot be used ({one_line_error(error)}); {cure}") from error


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Ray's processes, which listen on all interfaces on Linux, listen on the loopback alone, as they do elsewhere."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    name, before = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    variable = {name: os.environ[name]} if name in os.environ else {}
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        os.environ.update(variable)


def _named(amounts: Mapping[str, float]) -> str:
    named = {name: amount for name, amount in amounts.items() if amount and name.isidentifier() and "_" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items()) or "nothing"


_FILE = "array.safetensors"


def trainable(build: Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], Any]) -> type:
    """A ``ray.tune.Trainable`` whose trials are arrays, for a ``ray.tune.Tuner``.

    A list in a trial's config has one value per member, all lists of one length; all members share the other values. Every
    step trains an epoch and reports, for each metric with a value per member, its mean under the metric's name,
    ``<name>_min``, ``<name>_max``, and the members' values as the list ``<name>_members``. Checkpoints hold the state, and a
    trial that is paused, perturbed or restored goes on with its next epoch of the data.

    Args:
        build: ``build(fixed, members)`` returns a ``tune.Array``, as for ``hfta_func.tune.run``; ``members`` are the lists.

    Raises:
        ImportError: if Ray Tune is not installed.

    Example:
        .. code-block:: python

            space = {"width": ray.tune.choice([64, 128]), "lr": [1e-3, 3e-3, 1e-2], "seed": [0, 0, 0]}
            tuner = ray.tune.Tuner(cluster.trainable(build), param_space=space, tune_config=...)
    """
    try:
        base: Any = importlib.import_module("ray.tune").Trainable
    except ImportError as error:
        raise ImportError("this needs Ray Tune, which is not installed; pip install 'ray[tune]'") from error

    class Trainable(base):
        """Trains an array, an epoch per step."""

        def setup(self, config: dict[str, Any]) -> None:
            members = {name: value for name, value in config.items() if isinstance(value, list)}
            sizes = {name: len(value) for name, value in members.items()}
            if not sizes or len({*sizes.values()}) > 1 or 0 in sizes.values():
                cure = "give each name that members differ in a list of one value per member"
                raise ValueError(f"the config has lists of lengths {sizes}; {cure}")
            self._array = build({name: value for name, value in config.items() if name not in members}, members)
            self._state = self._array.state
            self._done = 0

        def step(self) -> dict[str, Any]:
            array = self._array
            if isinstance(array.loader, hfta.ArrayLoader):
                # The trial's next epoch, whatever the loader has dealt before.
                array.loader.load_state_dict({"epoch": self._done, "batches": 0})
            self._state, history = hfta.fit(
                *(array.step, self._state, array.loader), epochs=1, evaluate=array.evaluate, progress=False
            )
            self._done += 1
            report: dict[str, Any] = {}
            for name, values in (history.epochs[-1] if history.epochs else {}).items():
                if values.dim() == 1:
                    report[name] = float(values.double().mean())
                    report[f"{name}_min"], report[f"{name}_max"] = float(values.min()), float(values.max())
                    report[f"{name}_members"] = values.tolist()
            return report

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            hfta.save(self._state, os.path.join(checkpoint_dir, _FILE), metadata={"epochs": self._done})

        def load_checkpoint(self, checkpoint: Any) -> None:
            path = os.path.join(checkpoint, _FILE)
            self._state = hfta.load(path, like=self._array.state)
            self._done = hfta.files.read_metadata(path)["metadata"]["epochs"]

    Trainable.__name__ = Trainable.__qualname__ = getattr(build, "__name__", "array")
    return Trainable
