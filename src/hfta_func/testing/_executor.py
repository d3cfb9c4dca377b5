"""The laws of an executor."""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfta_func._tree import concat, take
from hfta_func.errors import NonFiniteError, WorkerError
from hfta_func.models.stack import init_params
from hfta_func.optim import adam
from hfta_func.run.data import ArrayLoader
from hfta_func.run.fit import fit
from hfta_func.run.history import Callback, History
from hfta_func.step.evaluate import make_eval_step
from hfta_func.step.train import make_train_step
from hfta_func.testing._laws import assert_close, law
from hfta_func.workers.executor import Executor

SEEDS = [5, 3, 8, 9]


def assert_executor(executor: Executor, *, restarts: bool = False) -> None:
    """Check that an executor keeps its laws, with calls of functions and with short runs of four small models.

    The laws: every call is answered once, under its number, with the result of the function or the error that it raised;
    dropped calls are not answered; a run with the executor gives the same results as a run without, also if it is resumed
    from a file, if members come, go or become inactive, or if the loader is a list of batches; an error names the member by
    its index in the whole array; and ``close``, if there is such a method, may be called twice.

    Args:
        executor: The executor, without pending calls. If it has a method ``close``, it is closed at the end.
        restarts: Whether the executor replaces a worker process that dies. If so, a worker is made to die: its call must be
            answered with a :class:`WorkerError`, and later calls must be answered.

    Raises:
        AssertionError: if a law is broken; it names the law and the input.

    Example:
        >>> from hfta_func.testing import assert_executor
        >>> with WorkerPool(1) as pool:
        ...     assert_executor(pool)
    """
    with law("attributes"):
        assert executor.count >= 1, f"count is {executor.count}; it is the number of calls that run at the same time"
        assert executor.deaths >= 0, f"deaths is {executor.deaths}"
    divide = _Divide()
    for about in ("at first", "after it was forgotten"):
        with law("calls are answered by number"):
            calls = [executor.submit(divide, a=6, b=b) for b in (2, 3, 0)]
            assert len({*calls}) == 3, f"three calls have the numbers {calls}"
            answers = dict(executor.wait() for _ in calls)
            assert answers.keys() == {*calls}, f"calls {calls} were answered as {[*answers]}"
            values, error = [answers[call] for call in calls[:2]], answers[calls[2]]
            assert values == [3.0, 2.0], f"6 / 2 and 6 / 3 are answered with {values}, {about}"
            same = isinstance(error, ZeroDivisionError) and str(error) == "division by zero"
            assert same, f"6 / 0 is answered with {error!r}, {about}; answer with the error that the function raised"
            executor.forget(divide)
    with law("dropped calls are not answered"):
        executor.submit(dict, seed=1)
        executor.forget()
        call = executor.submit(dict, seed=2)
        number, answer = executor.wait()
        text = f"call {call} with seed=2 is answered as call {number} with {answer}"
        assert (number, answer) == (call, {"seed": 2}), text
        executor.forget()
    if restarts:
        with law("a worker that dies is named and replaced"):
            _check_death(executor)
    with tempfile.TemporaryDirectory() as folder:
        _check_runs(executor, pathlib.Path(folder))
    if (close := getattr(executor, "close", None)) is not None:
        with law("closing twice is closing once"):
            close()
            close()


class _Divide:
    """A function that is an object, so that the executor must tell functions apart by identity."""

    def __call__(self, a: int, b: int) -> float:
        return a / b


def _die() -> None:
    time.sleep(0.3)
    os._exit(7)


def _check_death(executor: Executor) -> None:
    before, call = executor.deaths, executor.submit(_die)
    number, answer = executor.wait()
    assert number == call, f"call {call} is answered as call {number}"
    assert isinstance(answer, WorkerError), f"the call whose worker dies is answered with {answer!r}, not a WorkerError"
    assert executor.deaths > before, f"deaths is {executor.deaths}, as before"
    call = executor.submit(dict, seed=3)
    answered = executor.wait()
    assert answered == (call, {"seed": 3}), f"after that, call {call} is answered with {answered}"
    executor.forget()


def _check_runs(executor: Executor, folder: pathlib.Path) -> None:
    with law("a run is the same"):
        _assert_same_run(_run(3, restore_best="mse", executor=executor), _run(3, restore_best="mse"))
    with law("a run is the same", "batches of a list, with a file"):
        options = {"batches": True, "save_every": 2, "resume": folder / "batches"}
        _assert_same_run(_run(3, executor=executor, **options), _run(3, batches=True))
    with law("a run goes on from its file"):
        options = {"executor": executor, "save_every": 2, "resume": folder / "run"}
        _run(1, **options)
        _assert_same_run(_run(3, **options), _run(3))
    with law("members come and go"):
        _assert_same_run(_run(5, _change_members, executor=executor), _run(5, _change_members))
    with law("inactive members are left out"):
        _assert_same_run(_run(5, _stop_some, compact=True, executor=executor), _run(5, _stop_some, compact=True))
    with law("an error names the member of the whole array"):
        text = "no error"
        try:
            _run(3, _spoil_the_last, nonfinite="raise", compact=True, executor=executor)
        except NonFiniteError as error:
            text = str(error)
        assert text.startswith("model 3: "), f"a weight of model 3 is NaN, but the error is '{text}'"


def _factory() -> nn.Module:
    layers = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _start(seeds: list[int], nonfinite: Any = "skip") -> Any:
    step = make_train_step(_factory(), mse, adam(lr=0.05), nonfinite=nonfinite)
    return step, step.init(*init_params(_factory, seeds), seeds=seeds)


def _run(epochs: int, *callbacks: Callback, batches: bool = False, nonfinite: str = "skip", **options: Any) -> Any:
    draws = torch.Generator().manual_seed(1)
    rows = tuple(torch.randn(12, size, generator=draws, dtype=torch.float64) for size in (4, 2))
    loader, measure = ArrayLoader(rows, 5, seeds=SEEDS), make_eval_step(_factory(), mse)
    step, state = _start(SEEDS, nonfinite)
    options = {"evaluate": lambda state: measure(state, rows), "progress": False, **options}
    return fit(step, state, [*loader] if batches else loader, epochs=epochs, callbacks=callbacks, **options)


def _change_members(state: Any, history: History) -> Any:
    if len(history) == 1:
        return take(concat([state, _start([77])[1]]), [3, 4, 0, 2, 1])
    return take(state, [1]) if len(history) == 3 else None


def _stop_some(state: Any, history: History) -> Any:
    active = state.active.clone()
    active[{1: [0, 2], 3: [3]}.get(len(history), [])] = False
    return state._replace(active=active)


def _spoil_the_last(state: Any, history: History) -> Any:
    state.params["0.weight"][3] = torch.nan
    return state._replace(active=torch.tensor([False, True, False, True]))


def _assert_same_run(got: Any, expected: Any) -> None:
    assert_close(got.state, expected.state, "state", 1e-10)
    names = [*got.history.epochs[0]], [*expected.history.epochs[0]]
    assert names[0] == names[1], f"history has the metrics {names[0]}, not {names[1]}"
    for name in names[0]:
        # NaN marks epochs in which a member has not trained.
        column, other = got.history[name], expected.history[name]
        same = torch.equal(column.isnan(), other.isnan())
        assert same, f"members of history['{name}'] have not trained in the same epochs"
        assert_close(column.nan_to_num().T, other.nan_to_num().T, f"history['{name}']", 1e-10)
    for name in ("seeds", "members", "since"):
        assert_close(getattr(got.history, name), getattr(expected.history, name), f"history.{name}", 0.0)
    assert got.history.failures == expected.history.failures, f"failures are {got.history.failures}"
