"""Extensions in files outside of the package keep the laws; variants that break one are named with it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import warnings
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import hfta_func as hfta
import hfta_func.rules as rules
from cases import MATRIX_OPTIMIZERS, OPTIMIZERS, OptimizerCase
from hfta_func import tune
from hfta_func.optim.extend import Hyperparams, leafwise
from hfta_func.rules._registry import OUTSIDE
from hfta_func.testing import assert_callback, assert_executor, assert_optimizer, assert_rule, assert_scheduler
from strangers import callback, executor, optimizer, rule, scheduler
from strangers.optimizer import Slow, SlowState, slow

HYPERPARAMS = {"lr": [0.1, 0.2, 0.3], "alpha": [0.9, 0.5, 0.0], "mix": [1.0, 0.5, 2.0]}


def broken_optimizer(**parts: Any) -> Any:
    """The toy with another ``init`` or ``update``, as functions of its own and their arguments."""

    def make(**hyperparams: Any) -> hfta.GradientTransformation:
        own = slow(**hyperparams)
        changed = {name: functools.partial(part, getattr(own, name)) for name, part in parts.items()}
        return own._replace(renew=None, **changed)

    return make


def _writes(update: Any, grads: Any, state: Any, params: Any) -> Any:
    grads["vector"].mul_(2)
    return update(grads, state, params)


def _mixes(update: Any, grads: Any, state: Any, params: Any) -> Any:
    return update({path: grad + 0.1 * grad.mean(0) for path, grad in grads.items()}, state, params)


def _branches(update: Any, grads: Any, state: Any, params: Any) -> Any:
    if state.step[0].item() > 0:
        grads = {path: grad * 1.0 for path, grad in grads.items()}
    return update(grads, state, params)


def _closes_over(**hyperparams: Any) -> hfta.GradientTransformation:
    mix = torch.tensor(hyperparams["mix"], dtype=torch.float64)

    def prepare(at: dict[str, Tensor], count: Tensor) -> None:
        at["fixed"] = mix

    def rule(grad: Tensor, param: Tensor, k: dict[str, Any], average: Tensor) -> Tensor:
        return grad * k["fixed"]

    return leafwise(SlowState, Hyperparams(SlowState, **hyperparams), rule, prepare)


def _keeps_nothing(**hyperparams: Any) -> hfta.GradientTransformation:
    own = slow(**hyperparams)

    def renew(grads: Any, state: Any, params: Any, keep: Any, donate: bool, apply: bool) -> Any:
        updates, new = own.update(grads, state, params)
        return (hfta.apply_updates(params, updates) if apply else updates), new

    return own._replace(renew=renew)


def test_an_optimizer_from_outside_keeps_the_laws() -> None:
    assert_optimizer(slow, HYPERPARAMS, Slow)


@pytest.mark.parametrize(
    ("make", "reference", "message"),
    [
        (
            broken_optimizer(init=lambda init, params: dict(init(params)._asdict())),
            None,
            "law 'init': init returns a dict",
        ),
        (
            broken_optimizer(init=lambda init, params: init(params)._replace(step=torch.zeros(1))),
            None,
            r"law 'init': state.step has shape \[1\]; axis 0 is that of the 3 models",
        ),
        (broken_optimizer(update=_writes), None, r"law 'update': model 0: .*\['vector'\].* is .* not "),
        (_closes_over, None, r"law 'hyperparameters are read from the state': model 0: .*after with_hyperparams"),
        (broken_optimizer(update=_mixes), None, r"law 'member i is an array of one', i = 0: model 0: result"),
        (
            _keeps_nothing,
            None,
            r"law 'masked members keep their bits': .*\(params, state\) of model 1, which is masked",
        ),
        (broken_optimizer(update=_branches), None, r"law 'a hyperparameter that changes compiles nothing again'"),
        (
            slow,
            lambda params, lr, alpha, mix: Slow(params, lr, alpha, 2 * mix),
            r"law 'member i is its reference', i = 0: model 0",
        ),
    ],
)
def test_an_optimizer_that_breaks_a_law(make: Any, reference: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_optimizer(make, HYPERPARAMS, reference)


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OPTIMIZERS + MATRIX_OPTIMIZERS])
def test_optimizers_of_the_package_keep_the_laws(case: OptimizerCase) -> None:
    # It makes the first sums, and is no part of the state.
    given = {name: values for name, values in case.knobs.items() if name != "initial_accumulator_value"}
    assert_optimizer(
        functools.partial(case.ours, **case.options),
        given,
        functools.partial(case.theirs, **case.options),
        shapes=case.shapes,
        steps=5,
    )


def test_a_rule_from_outside_keeps_the_laws() -> None:
    assert_rule(rule.op, [torch.randn(3, 4, 2), torch.randn(3, 2), 0.5])


def test_a_rule_can_be_registered_before_and_after_installation() -> None:
    for change in (rules.uninstall, rules.install):
        change()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = hfta.vmap(rule.op, (0, None, None))(torch.ones(2, 4, 3), torch.ones(3), 1.0)
        assert torch.equal(found, torch.full((2, 4, 3), 2.0))
    with pytest.raises(ValueError, match=r"there is no operator 'strangers::unheard'; define it with torch\.library"):
        rules.register("strangers::unheard")
    with pytest.raises(ValueError, match="aten::mm has a rule in this package; choose among its lowerings"):
        rules.register("aten::mm")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        # Shared weights are added up once too often.
        (
            lambda call, x, weight, by: (x * rules.expand(weight, call.dims[1], call.num_models).unsqueeze(1) + by, 0),
            r"inputs \[1\] batched of \[0, 1\]|model axis",
        ),
        (
            lambda call, x, weight, by: (rules.expand(x, call.dims[0], call.num_models) * weight[:1] + by, 0),
            r"law 'outputs are the loop's', inputs \[0, 1\] batched of \[0, 1\]: model [12]: output",
        ),
        (
            lambda call, x, weight, by: rule.rule(call, x, weight.detach(), by),
            r"law 'gradients are the loop's', inputs \[0, 1\] batched of \[0, 1\]: .*gradient\[1\]",
        ),
    ],
)
def test_a_rule_that_breaks_a_law(wrong: Any, message: str) -> None:
    try:
        rules.register("strangers::shifted")(wrong)
        with pytest.raises(AssertionError, match=message):
            assert_rule(rule.op, [torch.randn(3, 4, 2), torch.randn(3, 2), 0.5])
    finally:
        rules.register("strangers::shifted")(rule.rule)


def test_an_operator_without_a_rule_breaks_the_law() -> None:
    torch.library.define("strangers::bare", "(Tensor x) -> Tensor")
    torch.library.impl("strangers::bare", "CompositeExplicitAutograd", lambda x: 2 * x)
    with pytest.raises(AssertionError, match=r"law 'outputs are the loop's'.*strangers::bare has no batching rule"):
        assert_rule(torch.ops.strangers.bare, [torch.randn(3, 2)])


class Unnamed(tune.Scheduler):
    __repr__ = object.__repr__


@dataclasses.dataclass(frozen=True)
class Clock(tune.Scheduler):
    def decide(self, cohort: tune.Cohort) -> Any:
        asked.append(1)
        return {trial: "go" if len(asked) % 2 else "stop" for trial, found in cohort.alive.items() if found}


asked: list[int] = []


def broken_scheduler(decide: Any, **attributes: Any) -> Any:
    """The toy with another verdict, a function of the cohort."""
    body = {"decide": lambda self, cohort: decide(cohort), **attributes}
    return dataclasses.dataclass(frozen=True)(type("Broken", (scheduler.Pull,), body))


def test_a_scheduler_from_outside_keeps_the_laws() -> None:
    assert_scheduler(scheduler.Pull)
    assert_scheduler(lambda: scheduler.Pull(every=2), trials=5)


@pytest.mark.parametrize(
    "make",
    [
        tune.Scheduler,
        tune.halving,
        tune.hyperband,
        tune.asynchronous_halving,
        functools.partial(tune.median_stopping, startup=2),
        tune.population_based,
    ],
)
def test_schedulers_of_the_package_keep_the_laws(make: Any) -> None:
    assert_scheduler(make)


def everyone(cohort: tune.Cohort, verdict: Any) -> dict[int, Any]:
    return {trial: verdict for trial, found in cohort.alive.items() if found}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unnamed, "law 'repr names the scheduler': two that are made alike are <.*make it a frozen dataclass"),
        (
            broken_scheduler(lambda c: {}, cohorts=lambda self, trials, epochs: [tune.Cohort(trials, (3, 2))]),
            r"law 'cohorts': the rungs are \[3, 2\]; let them ascend",
        ),
        (Clock, "law 'the same cohort gets the same verdicts', values .*: asked again, decide says"),
        (
            broken_scheduler(lambda c: {99: "go"}),
            "law 'verdicts are valid'.*decide says 'go' of trial 99; say 'go', 'stop' or",
        ),
        (
            broken_scheduler(lambda c: everyone(c, "stop")),
            r"law 'some trial reaches its last rung': .*have reached \[1, 1",
        ),
        (
            broken_scheduler(lambda c: everyone(c, tune.Copy(max(everyone(c, 0)), {})) if everyone(c, 0) else {}),
            r"law 'verdicts are valid'.*decide says Copy\(source=\d, changes=.*that copies none",
        ),
        (
            broken_scheduler(scheduler.Pull().decide, copies=False),
            "law 'verdicts are valid'.*if copies is True, tune.Copy",
        ),
    ],
)
def test_a_scheduler_that_breaks_a_law(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_scheduler(make)


def test_a_callback_from_outside_keeps_the_laws() -> None:
    assert_callback(lambda: callback.keep_up("loss"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: hfta.callbacks.early_stopping("loss", patience=1),
        lambda: hfta.callbacks.averaging(every=2),
        lambda: hfta.schedules.plateau("loss", patience=0),
    ],
)
def test_callbacks_of_the_package_keep_the_laws(make: Any) -> None:
    assert_callback(make)


def _counts() -> Any:
    seen: list[int] = []

    def callback(state: Any, history: Any) -> Any:
        seen.append(1)
        return state._replace(active=state.active & (len(seen) < 3))

    return callback


def _stops_all(state: Any, history: Any) -> None:
    state.active.zero_()


def _stores(state: Any, history: Any) -> None:
    history.epochs[-1]["loss"].zero_()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lambda state: None, r"law 'it takes \(state, history\)', epoch 1: TypeError"),
        (lambda: lambda state, history: True, "law 'it returns None or the next state', epoch 1: it returns True"),
        (
            lambda: _stops_all,
            r"law 'it writes neither state nor history', epoch 1: model 0: state.active\[0\] is False, not True",
        ),
        (lambda: _stores, r"law 'it writes neither state nor history', epoch 1: .*loss"),
        (_counts, r"law 'a run that goes on gets the same bits', broken off after epoch 2: model \d: state"),
    ],
)
def test_a_callback_that_breaks_a_law(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_callback(make)


@pytest.mark.exhaustive
def test_an_executor_from_outside_keeps_the_laws() -> None:
    assert_executor(executor.LastFirst())


class Swaps(executor.LastFirst):
    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        call, answer = super().wait(timeout)
        return call ^ 1, answer


class Keeps(executor.LastFirst):
    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        # The first call first, so that dropped ones come before others.
        self._calls = dict(reversed(self._calls.items()))
        return super().wait(timeout)

    def forget(self, function: Any = None) -> None:
        pass


class Rounds(executor.LastFirst):
    def wait(self, timeout: float | None = None) -> tuple[int, Any]:
        call, answer = super().wait(timeout)
        return call, optree.tree_map(_rounded, answer) if isinstance(answer, dict) else answer


def _rounded(leaf: Any) -> Any:
    is_double = isinstance(leaf, Tensor) and leaf.dtype == torch.float64
    return leaf.float().double() if is_double else leaf


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Swaps, r"law 'calls are answered by number': calls \[0, 1, 2\] were answered as \[3, 0, 1\]"),
        (
            Keeps,
            "law 'dropped calls are not answered': call .* with {'seed': 2} is answered as call .* with {'seed': 1}",
        ),
        (Rounds, r"law 'a run is the same': model \d: state\."),
    ],
)
def test_an_executor_that_breaks_a_law(kind: type[executor.LastFirst], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_executor(kind())


@pytest.mark.parametrize("module", [optimizer, rule, scheduler, callback, executor])
def test_strangers_use_public_names_only(module: Any) -> None:
    assert "._" not in "\n".join(line for line in inspect.getsource(module).splitlines() if "import" in line)
    assert copy.deepcopy(slow(lr=[0.1, 0.2])).init is not None


def test_rules_from_outside_are_those_of_worker_processes_too() -> None:
    """Graphs are marked by them, so without them what a worker compiles is not found."""
    # By value, so that the worker imports nothing for it.
    marks = functools.partial(eval, "dict(__import__('hfta_func.rules._registry', fromlist=['x']).OUTSIDE)")
    with hfta.workers.WorkerPool(1) as pool:
        call = pool.submit(marks)
        assert pool.wait(120) == (call, OUTSIDE) and "strangers::shifted" in OUTSIDE
