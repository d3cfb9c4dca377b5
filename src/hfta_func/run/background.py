"""Steps that train eagerly from the first call on, and go over to a compiled graph once another process has made it."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._torch import compiled_from_cache, is_compiler_loaded, original, stand_for
from hfta_func._tree import leaves, tree_map
from hfta_func.errors import CompileWarning
from hfta_func.rules import _choice
from hfta_func.rules._registry import OUTSIDE
from hfta_func.run import kept
from hfta_func.run.compiler import Compiler, graph
from hfta_func.step.joint import JointStep
from hfta_func.step.records import kind_of, reached_by
from hfta_func.step.replay import why_not_now
from hfta_func.step.train import TrainStep
from hfta_func.verify import Reached
from hfta_func.workers.process import cores, threads
from hfta_func.workers.wire import one_line_error

_COMPILING, _COMPILING_A_LEAF = 10.0, 1.1
"""Seconds that compiling takes beside training, and seconds for every parameter: an estimate, to know beforehand whether it
can pay. Measured with small models of ten kinds on two cores."""
_BESIDE, _INSTEAD = (1.4, 0.5), (2.0, 3.0)
"""With a known number of steps, compiling begins if the remaining ones would take this many times as long; without one, once
training has taken this share of the estimate. Then the same where training keeps all processors busy: a process of low
priority does not advance there, so compiling takes one away from training."""
_PATIENCE = 7
"""Without a known number of steps, the graph is used once training has taken this many times what loading it costs."""
_FASTER = 1.4
"""Assumed speed-up by a graph. The compiler cannot measure it, because it shares the processors with training; the first
compiled steps show whether it is true."""
_IMPORTS = 2.5
"""Seconds to import the compiler."""
_FIRST, _SETTLED = 3, 0.03
"""The duration of a step is known after so many steps, or after this share of the time to compile; the first ones take
longer."""
_TRIAL = 10
"""Number of compiled steps that are compared with as many eager ones."""
MOST_CHANGES = 16
"""If the Python values that a step rests on change more often, its graphs are not kept."""
_CLOSE = {"rtol": 0.02, "atol": 1e-4}
"""How near losses of a new graph must be to those of the step: near enough to tell errors from rounding."""


def compile(step: Callable[..., Any], *, steps: int | None = None) -> BackgroundStep:
    """A step that runs eagerly from the first call while another process compiles it, and compiled once the graph is ready.

    Compiling begins when the steps that remain, or those already made, are enough for it to pay. A process of low priority
    compiles the step into PyTorch's cache on disk, for batches of one shape at a time. Where training keeps all processors
    busy, it begins later, with equal priority, and training gives up one of its threads meanwhile. When the graph is
    ready, it is read from the cache, unless reading takes long compared with the time already trained or still to train.
    Results are the same to rounding, noise included. A graph that turns out slower than the eager step is not used. Batches
    of a shape that is not compiled yet run eagerly.

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
    if isinstance(step, BackgroundStep):
        raise ValueError("the step is compiled in the background already; pass it as it is")
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
        self.changes = 0
        self._keeps: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_step"], name)

    def __reduce__(self) -> Any:
        return BackgroundStep, (self._step, self._steps)

    def __repr__(self) -> str:
        return f"BackgroundStep({self.status})"

    @property
    def is_compiled(self) -> bool:
        """Whether calls with the latest shapes run a compiled graph."""
        return self._latest is not None and self._latest.is_used

    @property
    def status(self) -> str:
        """How the latest call ran: ``"compiled"``, or as :attr:`TrainStep.status` and how far another process is."""
        if self._latest is None or not self._latest.is_used:
            waits = "" if self._latest is None else self._latest.progress
            return getattr(self._eager, "status", "eager") + waits
        return "compiled: kept from an earlier run" if self._latest.was_kept else "compiled"

    def __call__(self, state: Any, batch: Any = None, *, iterations: int | None = None) -> Any:
        """Call the step, eager or compiled; ``step.loop`` is given a number of ``iterations`` in place of a batch."""
        self._calls += 1
        batch = batch if iterations is None else iterations
        digest = self._digest(state)
        if digest is None:
            # A graph depends on the shapes of tensors, and on integers.
            known = [leaf for leaf in leaves((batch, getattr(state, "step", None))) if isinstance(leaf, (Tensor, int))]
            key = tuple([(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in known])
        else:
            inputs, layout = optree.tree_flatten((state, batch))  # pyright: ignore[reportArgumentType]
            key = digest, layout, _choice.state, *OUTSIDE.values(), torch.get_default_dtype(), *map(kind_of, inputs)
        graph = self.shapes.get(key)
        if graph is None:
            name = None
            if digest is not None and kept.can_be_kept(self._step, state):
                name = kept.name_of(self._step, digest, (state, batch))
            tensors = self._reached.tensors if self._reached is not None else ()
            graph = self.shapes[key] = StepGraph(self._step, self._eager, name, tensors)
        self._latest = graph
        left = None if self._steps is None else self._steps - self._calls + 1
        return graph(state, batch, left)

    def _digest(self, state: Any) -> str | None:
        """A digest of the Python values that the step rests on; None if its graphs are not kept."""
        if self._keeps is None:
            self._keeps = kept.can_be_kept(self._step, state)
        if self.changes > MOST_CHANGES or not self._keeps:
            return None
        if self._reached is None or not self._reached.holds():
            self._reached, self.changes = reached_by(self._step), self.changes + 1
        return self._reached.digest


def _seconds_to_compile(state: Any) -> float:
    return _COMPILING + _COMPILING_A_LEAF * len(leaves(getattr(state, "params", state)))


class StepGraph:
    """What becomes of a step for batches of one shape."""

    def __init__(
        self,
        step: Callable[..., Any],
        eager: Callable[..., Any] | None = None,
        name: str | None = None,
        tensors: Sequence[Tensor] = (),
    ):
        self._step, self._call_eagerly = step, eager or step
        self._name, self._tensors = name, tensors
        self._run: Callable[..., Any] | None = None
        self._offer = None if name is None else kept.load(name, tensors)
        self._is_kept, self.was_kept = False, self._offer is not None
        self._since = self._estimate = 0.0
        self.worker: Compiler | None = None
        self._ended = False
        self.spent = 0.0
        self.eager: list[float] = []
        self._compiled: list[float] = []

    @property
    def is_used(self) -> bool:
        """Whether calls run the compiled graph."""
        return self._run is not None

    @property
    def progress(self) -> str:
        """For how long another process has been compiling, and how long that is expected to take; empty if none does."""
        if self.worker is None or self._ended or self.worker.answer() is not None:
            return ""
        return f"; compiling for {time.monotonic() - self._since:.0f} s of about {self._estimate:.0f} s"

    def __call__(self, state: Any, batch: Any, left: int | None) -> Any:
        """The step's result; ``left`` is how many calls will follow, if that is known."""
        if self._run is not None:
            return self._call_compiled(state, batch)
        if self._offer is not None:
            return self._take_up(state, batch)
        lends = False
        if not self._ended:
            answer = self.ask(state, batch, left)
            if answer is not None and self.pays(answer, left):
                return self._go_over(answer, state, batch)
            lends = answer is None and self.worker is not None and self._crowded(state) and torch.get_num_threads() > 1
        start = time.perf_counter()
        with threads(torch.get_num_threads() - 1) if lends else contextlib.nullcontext():
            result = self._call_eagerly(state, batch)
        took = time.perf_counter() - start
        self.spent += took
        if not lends:
            self.eager = [*self.eager[1 - _TRIAL :], took]
        return result

    def ask(self, state: Any, batch: Any, left: int | None) -> Mapping[str, Any] | None:
        """What the other process says; None before it begins, and as long as it works."""
        if self.worker is None:
            if self.may_pay(state, left) and not Compiler.busy():
                self._since, self._estimate = time.monotonic(), _seconds_to_compile(state)
                self.worker = Compiler(self._step, state, batch, self._name, yields=not self._crowded(state))
            return None
        answer = self.worker.answer()
        if answer is not None and "error" in answer:
            self._end(answer["error"])
            return None
        return answer

    def _end(self, why: str | None) -> None:
        self._ended, self._run = True, None
        if why is not None:
            warnings.warn(f"the step is not compiled and goes on eagerly: {why}", CompileWarning, stacklevel=5)

    def may_pay(self, state: Any, left: int | None) -> bool:
        """Whether compiling is expected to pay over the calls that are left, or as many as there were."""
        return len(self.eager) >= _FIRST and self._repays(state, left, *(_INSTEAD if self._crowded(state) else _BESIDE))

    def _repays(self, state: Any, left: int | None, worth: float, after: float) -> bool:
        compiling = _seconds_to_compile(state)
        if left is None or self.spent < _SETTLED * compiling:
            return self.spent >= after * compiling
        return left * statistics.median(self.eager) >= worth * compiling

    def _crowded(self, state: Any) -> bool:
        """Whether training has no processor to spare."""
        on_cpu = all(leaf.device.type == "cpu" for leaf in leaves(getattr(state, "params", state))[:1])
        return on_cpu and len(cores()) <= torch.get_num_threads()

    def pays(self, answer: Mapping[str, Any], left: int | None) -> bool:
        """Whether going over to the compiled graph is expected to pay."""
        imports = 0.0 if is_compiler_loaded() or answer.get("kept") else _IMPORTS
        cost = answer["seconds"] + imports
        if left is None:
            return self.spent >= _PATIENCE * cost
        return left * statistics.median(self.eager) * (1 - 1 / _FASTER) >= cost

    def _go_over(self, answer: Mapping[str, Any], state: Any, batch: Any) -> Any:
        if self.worker is not None:
            self.worker.end()
        if answer.get("kept"):
            self._offer = kept.load(str(self._name), self._tensors)
            return self._take_up(state, batch)
        run = graph(self._step, answer["options"])
        try:
            with compiled_from_cache():
                result = run(state, batch)
        except Exception as error:
            # Whatever keeps the graph from being read, the eager step goes on; if that raises too, it is the user's to see.
            self._end(one_line_error(error))
            return self._step(state, batch)
        self._run = run
        return result

    def _take_up(self, state: Any, batch: Any) -> Any:
        """Go over to a kept graph, if there is one that has the losses of the step in this call."""
        run, self._offer = self._offer, None
        if run is None:
            self._end("its graph cannot be read")
            return self._call_eagerly(state, batch)
        result, is_same = self._compared(run, state, batch)
        if is_same:
            self._run, self._is_kept = run, True
        elif self._name is not None:
            kept.drop(self._name)
        return result

    def _compared(self, run: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, bool]:
        """What the step returns, and whether the graph has the same losses; a graph that has not is not used."""
        # A copy, because a step with donate=True writes the state.
        other, result = run(tree_map(torch.clone, state), batch), self._call_eagerly(state, batch)
        metrics, expected = (one[1] if isinstance(one, tuple) else {"loss": one} for one in (other, result))
        names = [name for name in expected if name == "loss" or name.endswith(".loss")]
        pairs = [*zip(*(leaves([one[name] for name in names]) for one in (metrics, expected)), strict=True)]
        is_same = all(torch.allclose(a.double(), b.double(), **_CLOSE, equal_nan=True) for a, b in pairs)
        if not is_same:
            self._end("its graph has other losses")
        return result, is_same

    def _call_compiled(self, state: Any, batch: Any) -> Any:
        assert self._run is not None
        if self._is_kept and why_not_now(self._step, state, batch) is not None:
            return self._call_eagerly(state, batch)
        oracle = getattr(original(self._step), "oracle", None)
        if oracle is not None and oracle.is_next():
            # The eager call is compared with members alone, and the graph with that.
            return self._compared(self._run, state, batch)[0]
        if oracle is not None:
            oracle.calls += 1
        start = time.perf_counter()
        with contextlib.nullcontext() if self._is_kept else torch.compiler.set_stance("eager_on_recompile"):
            result = self._run(state, batch)
        if len(self._compiled) < _TRIAL and self.eager:
            self._compiled.append(time.perf_counter() - start)
            if len(self._compiled) == _TRIAL and statistics.median(self._compiled) > statistics.median(self.eager):
                self._end(None)
        return result
