"""Records steps: markers that exist only meanwhile, in turn with steps as they are."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import pathlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hfta_func import random
from hfta_func._kernels import noise
from hfta_func._torch import marker, original, replaced
from hfta_func._tree import leaves, tree_map
from hfta_func.calls.body import Body, path_in
from hfta_func.files.atomic import PathLike
from hfta_func.run.memory import profiler
from hfta_func.run.timeline import BODY, GRADIENTS, ITERATION, MARK, MODULE, STEP, Span, iterations_of
from hfta_func.step import replay, train
from hfta_func.step.check import Check
from hfta_func.step.chunks import now
from hfta_func.step.gradients import Gradients
from hfta_func.step.shared import Sharing

_WARM, _PATIENCE = 3, 30.0
"""Steps before the first recorded one, and seconds to wait for a step that may be replayed later."""
_ROUNDS, _SECONDS, _MOST = 5, 0.2, 50
"""Rounds of steps as they are and of recorded ones, and about how long and how many steps each of both lasts."""


def mark(name: str) -> Any:
    """A block that a profiler records under a name."""
    return marker(MARK + name)


def _marked(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mark(name):
            return func(*args, **kwargs)

    return call


@contextlib.contextmanager
def _marking_modules() -> Iterator[None]:
    paths: dict[nn.Module, str] = {}
    open_marks: list[Any] = []
    forward = Body.forward

    def run(body: Body, *args: Any, **kwargs: Any) -> Any:
        if body not in paths:
            paths.update({child: MODULE + path_in(body, child) for child in body.modules()})
        with mark(BODY):
            return forward(body, *args, **kwargs)

    def enter(module: nn.Module, _: Any) -> None:
        open_marks.append(mark(paths.get(module, f"{MODULE}{type(module).__name__}")))
        open_marks[-1].__enter__()

    def leave(*_: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    with hooks[0], hooks[1], replaced(Body, "forward", run):
        yield


@contextlib.contextmanager
def marking(kind: str) -> Iterator[None]:
    """A block in which steps mark their phases, and models their modules; compiled steps have none, replayed no modules."""
    places = [(random, name, "noise") for name in ("fold_in", "stream", "streams", "bits", "bernoulli")]
    places += [(noise, "drop", "noise")]
    places += [(train, "judge", "judge"), (Check, "__call__", "check"), (Sharing, "update", "update")]
    places += [(owner, "__call__", GRADIENTS) for owner in (Gradients, replay.Replay)]
    plain = train.commit

    def commit(state: Any, outputs: Any, verdict: Any, update: Any, *rest: Any) -> Any:
        return plain(state, outputs, verdict, _marked("update", update), *rest)

    with contextlib.ExitStack() as stack:
        for owner, name, phase in places if kind != "compiled" else ():
            stack.enter_context(replaced(owner, name, _marked(phase, getattr(owner, name))))
        if kind != "compiled":
            stack.enter_context(replaced(train, "commit", _marked("commit", commit)))
        if kind == "eager":
            stack.enter_context(_marking_modules())
        yield


def _kind_of(step: Any) -> str:
    """How a step runs: ``"eager"``, ``"replayed"`` or ``"compiled"``."""
    return getattr(step, "status", "eager" if original(step) is step else "compiled").partition(":")[0]


class Recording:
    """Steps of a loop, recorded by turns; the loop calls the step that :meth:`over` returns, and then :meth:`turn`."""

    def __init__(self, step: Any, steps: int | None = None, trace: PathLike | None = None):
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps is {steps!r}; it must be an integer, at least 1")
        if trace is not None:
            folder = os.path.dirname(os.path.abspath(trace))
            if not str(trace).endswith((".json", ".json.gz")) or not os.path.isdir(folder):
                raise ValueError(f"trace is {str(trace)!r}; pass a file .json or .json.gz in a folder that exists")
        self.step, self._steps, self._trace = step, steps, trace
        self.inputs: tuple[Any, Any] | None = None
        """State and batch of a step, which nothing writes."""
        self.kind = ""
        self.plain: list[float] = []
        """Seconds of the steps that were not recorded."""
        self.recorded: list[Any] = []
        """The profilers of all rounds."""
        self.is_done = self._marks = False
        self._begin, self._turns = time.perf_counter(), self._follow()

    def over(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as the loop is to call it."""
        options = getattr(original(step), "options", None)

        def call(state: Any, batch: Any) -> Any:
            if self.inputs is None:
                self.inputs = (tree_map(torch.clone, state) if getattr(options, "donate", False) else state), batch
            with mark(STEP) if self._marks else contextlib.nullcontext():
                return step(state, batch)

        call.__wrapped__ = original(step)  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def turn(self) -> None:
        """Go on after a step: begin to record, or end."""
        if self.inputs is not None:
            next(self._turns, None)

    def _follow(self) -> Generator[None, None, None]:
        """Goes on after every step."""
        assert self.inputs is not None
        device = leaves(self.inputs[0])[0].device
        calls, took, at = 1, 0.0, now(device)
        # Until the step runs as it will.
        while calls < _WARM or ("has not paid" in getattr(self.step, "status", "") and at - self._begin < _PATIENCE):
            last = now(device)
            yield
            at = now(device)
            calls, took = calls + 1, at - last
        number = max(2, min(_MOST, math.ceil(_SECONDS / max(took, 1e-6))))
        per_round = number if self._steps is None else math.ceil(self._steps / _ROUNDS)
        for _ in range(_ROUNDS):
            for _ in range(per_round):
                last = now(device)
                yield
                self.plain.append(now(device) - last)
            self.kind = _kind_of(self.step)
            # A record made now would hold the markers.
            with replaced(replay, "_STEPS", math.inf), marking(self.kind), profiler(device) as recorded:
                self.recorded.append(recorded)
                # One more, because the first one after the start is slow.
                for _ in range(per_round + 1):
                    with replaced(self, "_marks", True), mark(ITERATION):
                        yield
        self.is_done = True
        if self._trace is not None:
            path = str(self._trace).removesuffix(".gz")
            self.recorded[-1].export_chrome_trace(path)
            if path != str(self._trace):
                pathlib.Path(self._trace).write_bytes(gzip.compress(pathlib.Path(path).read_bytes()))
                os.remove(path)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self._turns.close()


def events_of(recorded: Any) -> list[Any]:
    """The events of a profiler that has ended."""
    return recorded.kineto_results.events()


def without_replay() -> Any:
    """A block in which no step is replayed."""
    return replaced(replay.Replay, "__call__", lambda replay, *inputs: replay._step.eagerly(*inputs))


def recorded_eagerly(step: Any, state: Any, batch: Any) -> Span:
    """The events of one step that is not replayed."""
    state, device = tree_map(torch.clone, state), leaves(state)[0].device
    with without_replay(), marking("eager"), profiler(device) as recorded, mark(ITERATION), mark(STEP):
        step(state, batch)
    (iteration,) = iterations_of(events_of(recorded))
    return iteration
