"""Steps that train eagerly from the first call on, and go over to a compiled graph once another process has made it."""

from __future__ import annotations

import contextlib
import functools
import queue
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._torch import original, stand_for
from hfta_func._tree import leaves, tree_map
from hfta_func.errors import CompileWarning, WorkerError
from hfta_func.rules import _choice
from hfta_func.rules._measured import lending
from hfta_func.rules._registry import OUTSIDE
from hfta_func.run import kept
from hfta_func.step.batch import is_plain
from hfta_func.step.joint import JointStep
from hfta_func.step.replay import kind_of, reached_by, why_not_now
from hfta_func.step.train import TrainStep
from hfta_func.verify import Reached
from hfta_func.workers.pool import Pool
from hfta_func.workers.process import Process, cores, one_line_error

_COMPILING, _COMPILING_A_LEAF = 10.0, 1.1
"""Seconds that compiling takes beside training, and seconds for every parameter: an estimate, to know beforehand whether it
can pay. Measured with small models of ten kinds on two cores."""
_WORTH = 1.5
"""How many times as long as compiling training is expected to go on. Where the number of steps is not known, it is expected
to take as long again as it has taken."""
_FIRST = 3
"""The duration of a step is known after so many steps; the first one takes longer."""
_TRIAL = 10
"""Number of compiled steps that are compared with as many eager ones."""
_CLOSE = {"rtol": 0.02, "atol": 1e-4}
"""How near losses of a new graph must be to those of the step: near enough to tell errors from rounding."""


def compile(step: Callable[..., Any], *, steps: int | None = None) -> BackgroundStep:
    """A step that runs eagerly from the first call while another process compiles it, and compiled once the graph is ready.

    Compiling begins when the steps that remain, or those already made, are enough for it to pay. A process of low priority
    compiles the step, for batches of one shape at a time, into a folder where later runs find it. Where training keeps all
    processors busy, it has equal priority, and training gives up one of its threads meanwhile. Steps on a GPU, of several
    networks or with an optimizer of your own are compiled in this process, which waits. Results are the same to rounding,
    noise included. A graph that turns out slower than the eager step is not used. Batches of a shape that is not compiled
    yet run eagerly.

    Args:
        step: A training or evaluation step, ``step(state, batch)``. It is sent to the other process by
            ``cloudpickle``, functions of a notebook included.
        steps: How often it will be called in all, if that is known.

    Returns:
        A :class:`BackgroundStep`, which is called like the step.

    Warns:
        CompileWarning: once, with the reason, if the step cannot be compiled. It goes on eagerly.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> step = make_train_step(models[0], lambda model, x: model(x).square().mean(), sgd(lr=0.1))
        >>> quick = compile(step, steps=2)
        >>> state = step.init(*stack_params(models), seeds=[0, 1, 2])
        >>> state, metrics = quick(state, torch.ones(3, 8, 4))
        >>> quick.is_compiled
        False
    """
    return BackgroundStep(step, steps)


def replayed(step: Callable[..., Any], steps: int | None = None) -> Callable[..., Any]:
    """The step, replayed where it can be; see :meth:`TrainStep.replayed`."""
    return step.replayed(steps) if isinstance(step, (TrainStep, JointStep)) else step


class BackgroundStep:
    """``step(state, batch)``, eager at first and compiled later; made by :func:`compile`."""

    def __init__(self, step: Callable[..., Any], steps: int | None):
        self._step, self._steps, self._eager = step, steps, replayed(step, steps)
        stand_for(self, step)
        self.shapes: dict[Any, StepGraph] = {}
        self._latest: StepGraph | None = None
        self._calls = 0
        self._reached: Reached | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_step"], name)

    def __reduce__(self) -> Any:
        return BackgroundStep, (self._step, self._steps)

    def __repr__(self) -> str:
        return f"BackgroundStep({self.status})"

    @property
    def is_compiled(self) -> bool:
        """Whether calls with the latest shapes run a compiled graph."""
        return self._latest is not None and self._latest.run is not None

    @property
    def status(self) -> str:
        """How the latest call ran: ``"compiled"``, or as :attr:`TrainStep.status` and whether another process compiles."""
        if self._latest is None or self._latest.run is None:
            is_compiling = self._latest is not None and self._latest.worker is not None
            return getattr(self._eager, "status", "eager") + ("; another process compiles it" if is_compiling else "")
        return "compiled: kept from an earlier run" if self._latest.was_kept else "compiled"

    def __call__(self, state: Any, batch: Any = None, *, iterations: int | None = None) -> Any:
        """Call the step, eager or compiled; ``step.loop`` is given a number of ``iterations`` in place of a batch."""
        self._calls += 1
        if not is_plain(batch):
            # A graph has tensors in containers of Python as its inputs.
            self._latest = None
            return self._eager(state, batch)
        batch = batch if iterations is None else iterations
        if not self.shapes and kept.can_be_kept(self._step, state):
            self._reached = reached_by(self._step)
        # PyTorch's compiler follows Python values that change; a kept graph rests on them.
        if self._reached is not None and not self._reached.holds():
            self._reached = None
        digest = None if self._reached is None else self._reached.digest
        # A graph depends on the kinds of tensors, and on integers.
        parts: Any = (getattr(state, "step", None) if digest is None else state), batch
        inputs, layout = optree.tree_flatten(parts)
        kinds = [kind_of(one) if isinstance(one, Tensor) else one for one in inputs if isinstance(one, (Tensor, int))]
        key = digest, layout, _choice.state, *OUTSIDE.values(), torch.get_default_dtype(), *kinds
        graph = self.shapes.get(key)
        if graph is None:
            name = None if digest is None else kept.name_of(self._step, digest, (state, batch))
            tensors = self._reached.tensors if self._reached is not None else ()
            graph = self.shapes[key] = StepGraph(self._step, self._eager, name, tensors)
        self._latest = graph
        left = None if self._steps is None else self._steps - self._calls + 1
        return graph(state, batch, left)


class StepGraph:
    """What becomes of a step for batches of one shape; one that can be kept has a name."""

    def __init__(self, step: Any, eager: Any = None, name: str | None = None, tensors: Sequence[Tensor] = ()):
        self._step, self._call_eagerly = step, eager or step
        self._name, self._tensors = name, tensors
        self.run: Callable[..., Any] | None = None
        """The compiled graph, once calls run it."""
        offer = None if name is None else kept.load(name, tensors)
        self._offers = [] if offer is None else [offer]
        self.was_kept, self._ended = offer is not None, False
        self._close: Callable[[], object] = lambda: None
        self.worker: Pool | None = None
        """The process that compiles, as long as it does."""
        self.spent, self.eager = 0.0, list[float]()
        self._compiled: list[float] = []

    def __call__(self, state: Any, batch: Any, left: int | None) -> Any:
        """The step's result; ``left`` is how many calls will follow, if that is known."""
        if self.run is not None:
            return self._call_compiled(self.run, state, batch)
        if offers := self._offers or ([] if self._ended else self.ask(state, batch, left)):
            return self._take_up(offers, state, batch)
        lends = self.worker is not None and self._crowded(state) and torch.get_num_threads() > 1
        start = time.perf_counter()
        with lending(1) if lends else contextlib.nullcontext():
            result = self._call_eagerly(state, batch)
        took = time.perf_counter() - start
        self.spent += took
        if not lends:
            self.eager = [*self.eager[1 - _TRIAL :], took]
        return result

    def ask(self, state: Any, batch: Any, left: int | None) -> list[Callable[..., Any]]:
        """Graphs to try in turn, once there are any; begins to compile where that pays."""
        if self.worker is not None:
            try:
                answer = self.worker.wait(0)[1]
            except queue.Empty:
                return []
            except WorkerError as error:
                answer = error
            self._close()
            self.worker = None
            if isinstance(answer, WorkerError):
                self._end(str(answer))
                return []
            made = kept.load(str(self._name), self._tensors)
            # What cannot be recorded, or kept, is traced.
            return self._traced(state, batch) if made is None else [made]
        estimate = _COMPILING + _COMPILING_A_LEAF * len(leaves(getattr(state, "params", state)))
        expected = self.spent if left is None else left * statistics.median(self.eager or [0.0])
        if len(self.eager) < _FIRST or expected < _WORTH * estimate:
            return []
        if self._name is not None:
            with contextlib.suppress(Exception):
                process = Process(0, cores(), low_priority=not self._crowded(state), quiet=True)
                pool = Pool([process], share=True, tries=1)
                self._close = weakref.finalize(self, pool.close)
                given = self._step, (state, batch), self._name, torch.get_num_threads()
                pool.submit(functools.partial(kept.make_elsewhere, *given))
                self.worker = pool
                return []
            self._close()
        return self._traced(state, batch)

    def _traced(self, state: Any, batch: Any) -> list[Callable[..., Any]]:
        """The step as PyTorch compiles it in this process, by options to try in turn."""
        kinds = {leaf.device.type for leaf in leaves((state, batch)) if isinstance(leaf, Tensor)} - {"cpu"}
        return [kept.graph(self._step, one) for one in kept.options(self._step, state, next(iter(kinds), "cpu"))]

    def _end(self, why: str | None) -> None:
        self._ended, self.run = True, None
        if why is not None:
            warnings.warn(f"the step is not compiled and goes on eagerly: {why}", CompileWarning, stacklevel=5)

    def _crowded(self, state: Any) -> bool:
        """Whether training has no processor to spare."""
        on_cpu = all(leaf.device.type == "cpu" for leaf in leaves(getattr(state, "params", state))[:1])
        return on_cpu and len(cores()) <= torch.get_num_threads()

    def _take_up(self, offers: Sequence[Callable[..., Any]], state: Any, batch: Any) -> Any:
        """Use the first graph that runs from now on, if it has the losses of the step in this call."""
        self._offers, why = [], ""
        for run in offers:
            try:
                self.run = run
                return self._compared(run, state, batch)
            except Exception as error:
                why = one_line_error(error)
            finally:
                if self._ended and self._name is not None:
                    kept.drop(self._name)
        self._end(why)
        return self._call_eagerly(state, batch)

    def _compared(self, run: Callable[..., Any], state: Any, batch: Any) -> Any:
        """What the step returns; a graph that has other losses is not used."""
        # A copy, because a step with donate=True writes the state.
        other, result = run(tree_map(torch.clone, state), batch), self._call_eagerly(state, batch)
        metrics, expected = (one[1] if isinstance(one, tuple) else {"loss": one} for one in (other, result))
        names = [name for name in expected if name == "loss" or name.endswith(".loss")]
        pairs = [*zip(*(leaves([one[name] for name in names]) for one in (metrics, expected)), strict=True)]
        if not all(torch.allclose(a.double(), b.double(), **_CLOSE, equal_nan=True) for a, b in pairs):
            self._end("its graph has other losses")
        return result

    def _call_compiled(self, run: Callable[..., Any], state: Any, batch: Any) -> Any:
        if self._name is not None and why_not_now(self._step, state, batch) is not None:
            return self._call_eagerly(state, batch)
        oracle = getattr(original(self._step), "oracle", None)
        if oracle is not None and oracle.is_next():
            # The eager call is compared with members alone, and the graph with that.
            return self._compared(run, state, batch)
        if oracle is not None:
            oracle.calls += 1
        start = time.perf_counter()
        with torch.compiler.set_stance("eager_on_recompile") if self._name is None else contextlib.nullcontext():
            result = run(state, batch)
        if len(self._compiled) < _TRIAL and self.eager:
            self._compiled.append(time.perf_counter() - start)
            if len(self._compiled) == _TRIAL and statistics.median(self._compiled) > statistics.median(self.eager):
                self._end(None)
        return result
