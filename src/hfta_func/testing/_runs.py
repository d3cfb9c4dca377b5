"""What runs show: members of an array; the laws of callbacks and executors, and of schedulers in simulated studies."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import pathlib
import random
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfta_func._tree import leaves, num_models, paths, take, tree_map
from hfta_func.errors import WorkerError
from hfta_func.models.stack import init_params
from hfta_func.optim import adam
from hfta_func.run.data import ArrayLoader
from hfta_func.run.fit import fit
from hfta_func.run.history import Callback, History
from hfta_func.step.batch import take_batch
from hfta_func.step.evaluate import make_eval_step
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep, make_train_step
from hfta_func.testing._laws import assert_close, difference, law
from hfta_func.workers.pool import Executor

SEEDS = [5, 3, 8, 9]


def assert_matches_solo(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[Any],
    *,
    members: Sequence[int] | None = None,
    rtol: float = 1e-10,
    run: Callable[[TrainState, Any], tuple[TrainState, Any]] | None = None,
) -> TrainState:
    """Train an array, then train each member alone from the same state on the same batches, and compare the final states.

    First the oracle compares a step with each member in ordinary PyTorch, without this package's rules.

    Args:
        step: The step. It also trains each member as an array of one, for which a compiled step compiles once more.
        state: The initial state. It is not written, even if the step was made with ``donate=True``.
        batches: The batches of the array; a member alone is trained on its part of them.
        members: The members to compare; all by default.
        rtol: Largest difference allowed, relative to the largest magnitude in each leaf. 1e-10 suits float64; float32
            needs about 1e-3 after tens of steps, because kernels round differently and training amplifies it.
        run: Trains the array, for example ``torch.compile(step)``; ``step`` by default.

    Returns:
        The state of the array after all batches.

    Raises:
        AssertionError: if a leaf differs by more; it names the member, the leaf and the difference.
        VerifyError: if a member computes something else in ordinary PyTorch.

    Example:
        >>> models = [torch.nn.Linear(4, 1).double() for _ in range(3)]
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> step = make_train_step(models[0], loss_fn, sgd(lr=[0.1, 0.2, 0.3]))
        >>> state = step.init(*stack_params(models), seeds=[0, 1, 2])
        >>> state = assert_matches_solo(step, state, [torch.randn(3, 8, 4).double() for _ in range(5)])
    """
    # A wrapped step, such as one that waits for a device, has no batch_dims of its own.
    batches, dims = list(batches), getattr(inspect.unwrap(step), "batch_dims", 0)
    after = tree_map(torch.clone, state)
    chosen = range(num_models(state)) if members is None else members
    if isinstance(plain := inspect.unwrap(step), TrainStep) and batches:
        gradients = plain._gradients
        gradients.verify(gradients.tensors(state), gradients.with_carry(state, batches[0]), {}, chosen)
    for batch in batches:
        after, _ = (run or step)(after, batch)
    for member in chosen:
        solo = take(state, [member])
        for batch in batches:
            solo, _ = step(solo, take_batch(dims, batch, slice(member, member + 1)))
        for path, leaf, alone in zip(paths(solo, "state"), leaves(take(after, [member])), leaves(solo), strict=True):
            error = difference(leaf, alone)
            differs = f"differs from the solo run by {error:.3g} of its magnitude, more than {rtol:g}"
            assert error <= rtol, f"model {member}: {path} {differs}"
    return after


def assert_callback(make: Callable[[], Callback], *, epochs: int = 4) -> None:
    """Check that a callback keeps its laws, in a short run of four small models whose only metric is ``"loss"``.

    The laws: it takes ``(state, history)``; it returns None or the next state; it writes neither of them; and a run resumed
    from a file, with a new callback, gives the same bits as a run without a break.

    Args:
        make: Makes the callback. If the callback writes files, give it another folder each time.
        epochs: Number of epochs.

    Raises:
        AssertionError: if a law is broken; it names the law, the epoch, and what was written.

    Example:
        >>> from hfta_func.testing import assert_callback
        >>> assert_callback(lambda: early_stopping("loss", patience=1))
    """
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = _run(epochs, _checked(make()))
        for upto in (epochs // 2, epochs):
            state, _ = _run(upto, _checked(make()), resume=pathlib.Path(folder, "run.safetensors"))
        with law("a run that goes on gets the same bits", f"broken off after epoch {epochs // 2}"):
            assert_close(state, whole, "state", 0.0)


def _checked(callback: Callback) -> Callback:
    def checked(state: Any, history: History) -> Any:
        about = f"epoch {len(history)}"
        before = tree_map(torch.clone, state), copy.deepcopy(history.state_dict())
        with law("it takes (state, history)", about):
            result = callback(state, history)
        with law("it returns None or the next state", about):
            assert result is None or type(result) is type(state), f"it returns {result!r}"
        with law("it writes neither state nor history", about):
            assert_close(state, before[0], "state", 0.0)
            assert_close(history.state_dict()["epochs"], before[1]["epochs"], "history.epochs", 0.0)
        return result

    return checked


def assert_executor(executor: Executor, *, restarts: bool = False) -> None:
    """Check that an executor keeps its laws, with calls of functions and with short runs of four small models.

    The laws: every call is answered once, under its number, with the result of the function or the error that it raised;
    dropped calls are not answered; and a run with the executor gives the same results as a run without, also if it is resumed
    from a file.

    Args:
        executor: The executor, without pending calls.
        restarts: Whether the executor replaces a worker process that dies. If so, a worker is made to die: its call must be
            answered with a :class:`WorkerError`, and later calls must be answered.

    Raises:
        AssertionError: if a law is broken; it names the law and the input.

    Example:
        >>> from hfta_func.testing import assert_executor
        >>> with WorkerPool(1) as pool:
        ...     assert_executor(pool)
    """
    divide = _Divide()
    with law("calls are answered by number"):
        calls = [executor.submit(divide, a=6, b=b) for b in (2, 3, 0)]
        assert len({*calls}) == 3, f"three calls have the numbers {calls}"
        answers = dict(executor.wait() for _ in calls)
        assert answers.keys() == {*calls}, f"calls {calls} were answered as {[*answers]}"
        values, error = [answers[call] for call in calls[:2]], answers[calls[2]]
        assert values == [3.0, 2.0], f"6 / 2 and 6 / 3 are answered with {values}"
        assert isinstance(error, ZeroDivisionError), f"6 / 0 is answered with {error!r}; answer with the error"
        executor.forget(divide)
    with law("dropped calls are not answered"):
        executor.submit(dict, seed=1)
        executor.forget()
        _check_answer(executor, seed=2)
    if restarts:
        with law("a worker that dies is replaced"):
            _check_death(executor)
    with tempfile.TemporaryDirectory() as folder:
        resumed = {"executor": executor, "save_every": 2, "resume": pathlib.Path(folder, "run")}
        with law("a run is the same"):
            _assert_same_run(_run(3, restore_best="mse", executor=executor), _run(3, restore_best="mse"))
        with law("a run goes on from its file"):
            _run(1, **resumed)
            _assert_same_run(_run(3, **resumed), _run(3))


class _Divide:
    """A function that is an object, so that the executor must tell functions apart by identity."""

    def __call__(self, a: int, b: int) -> float:
        return a / b


def _die() -> None:
    os._exit(7)


def _check_answer(executor: Executor, **arguments: Any) -> None:
    call = executor.submit(dict, **arguments)
    number, answer = executor.wait()
    text = f"call {call} with {arguments} is answered as call {number} with {answer}"
    assert (number, answer) == (call, arguments), text
    executor.forget()


def _check_death(executor: Executor) -> None:
    before, call = executor.deaths, executor.submit(_die)
    number, answer = executor.wait()
    assert number == call, f"call {call} is answered as call {number}"
    assert isinstance(answer, WorkerError), f"the call whose worker dies is answered with {answer!r}, not a WorkerError"
    assert executor.deaths > before, f"deaths is {executor.deaths}, as before"
    _check_answer(executor, seed=3)


def _factory() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)).double()


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _run(epochs: int, *callbacks: Callback, **options: Any) -> Any:
    draws = torch.Generator().manual_seed(1)
    rows = tuple(torch.randn(12, size, generator=draws, dtype=torch.float64) for size in (4, 2))
    loader, measure = ArrayLoader(rows, 5, seeds=SEEDS), make_eval_step(_factory(), mse)
    step = make_train_step(_factory(), mse, adam(lr=0.05))
    state = step.init(*init_params(_factory, SEEDS), seeds=SEEDS)
    options = {"evaluate": lambda state: measure(state, rows), "progress": False, **options}
    return fit(step, state, loader, epochs=epochs, callbacks=callbacks, **options)


def _assert_same_run(got: Any, expected: Any) -> None:
    assert_close(got.state, expected.state, "state", 1e-10)
    one, two = ({name: run.history[name].T for name in run.history.epochs[0]} for run in (got, expected))
    assert_close(one, two, "history", 1e-10)
    for name in ("seeds", "members", "since"):
        assert_close(getattr(got.history, name), getattr(expected.history, name), f"history.{name}", 0.0)


_SPACE = {"lr": types.SimpleNamespace(low=1e-4, high=1.0, log=True, step=None)}


def assert_scheduler(make: Callable[[], Any], *, trials: int = 9, epochs: int = 9) -> None:
    """Check that a scheduler keeps its laws, in simulated studies with several orders of arrival and with failing trials.

    The laws: cohorts have ascending rungs, none above ``epochs``, and the requested number of trials in all; a new scheduler
    gives the same verdicts for the same cohort, and ``decide`` does not write the cohort; verdicts are valid, and only for
    trials that have reached a rung; if no trial fails, some trial reaches its last rung; and two schedulers made alike have
    the same ``repr``, by which a resumed study recognises its scheduler.

    Args:
        make: Makes the scheduler.
        trials: Number of trials of the studies.
        epochs: Number of epochs.

    Raises:
        AssertionError: if a law is broken; it names the law, the trial and the cohort.

    Example:
        >>> from hfta_func import tune
        >>> from hfta_func.testing import assert_scheduler
        >>> assert_scheduler(lambda: tune.halving(eta=3))
    """
    with law("repr names the scheduler"):
        first, second = [repr(one) for one in (make(), make())]
        assert first == second, f"two that are made alike are {first} and {second}; make it a frozen dataclass"
    with law("cohorts"):
        cohorts = make().cohorts(trials, epochs)
        total = sum(cohort.trials for cohort in cohorts)
        assert total == trials, f"they have {total} trials, not {trials}"
        for cohort in cohorts:
            rungs = list(cohort.rungs)
            ok = rungs and rungs == sorted({*rungs}) and 1 <= rungs[0] and rungs[-1] <= epochs
            assert ok, f"the rungs are {rungs}; let them ascend from at least 1 to at most {epochs}"
    for cohort, failing, order in itertools.product(cohorts, (set(), {0}, {1, 2}), range(3)):
        _simulate(make, cohort, failing, random.Random(f"{order}"))


def _simulate(make: Callable[[], Any], cohort: Any, failing: set[int], draws: random.Random) -> None:
    """A simulated study of one cohort, in which few trials train at a time."""
    numbers, rungs = range(cohort.trials), cohort.rungs
    values: dict[int, list[float]] = {trial: [] for trial in numbers}
    params = {trial: {"lr": 10.0 ** -(1 + trial % 4)} for trial in numbers}
    ended, verdicts = set[int](), {}
    for _ in range(2 * cohort.trials * len(rungs) + 2):
        waiting = [t for t in numbers if t not in ended and len(values[t]) < len(rungs)]
        ready = [t for t in waiting if not values[t] or verdicts.get(t, "stop") != "stop"]
        if not ready:
            break
        for trial in draws.sample(ready, min(3, len(ready))):
            if trial in failing and values[trial]:
                ended.add(trial)
            else:
                params[trial] |= getattr(verdicts.get(trial), "changes", {})
                values[trial].append(-float(trial * 7 % len(numbers)) + len(values[trial]))
        about = {"ended": frozenset(ended), "params": {t: dict(p) for t, p in params.items()}, "space": dict(_SPACE)}
        now = cohort._replace(values={trial: tuple(reports) for trial, reports in values.items()}, **about)
        verdicts = _decided(make, now)
        ended |= {trial for trial, verdict in verdicts.items() if verdict == "stop" and len(values[trial]) < len(rungs)}
    with law("some trial reaches its last rung"):
        reached = [len(reports) for reports in values.values()]
        assert failing or len(rungs) in reached, f"of rungs {rungs} the trials have reached {reached}"


def _decided(make: Callable[[], Any], cohort: Any) -> Mapping[int, Any]:
    before = repr(cohort)
    with law("verdicts are valid", f"values {dict(cohort.values)}"):
        verdicts = make().decide(cohort)
        cohort.check(verdicts, make().copies)
    with law("the same cohort gets the same verdicts", f"values {dict(cohort.values)}"):
        again = make().decide(cohort)
        assert again == verdicts, f"asked again, decide says {again}, not {verdicts}"
        assert repr(cohort) == before, "decide writes the cohort"
    return verdicts
