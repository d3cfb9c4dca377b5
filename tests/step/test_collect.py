"""Iterations of a step that collects its batches: their failures, metrics and carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hfta_func as hfta

SEEDS, PAIR = [3, 4, 5], [5, 6]


def iterating(plan, **options):
    """An array of three whose iteration from step 4 on is as planned: at a 1 gradients fail, at a 2 losses."""
    model = nn.Linear(1, 1)

    def collect(state):
        return state.carry, (plan * (state.step == 4)).unsqueeze(-1), {"seen": state.step + 0.0}

    def loss_fn(model, x):
        return (model.weight - model.weight.detach() + 1 - x).sqrt().sum()

    step = hfta.make_train_step(model, loss_fn, hfta.sgd(lr=0.1), collect=collect, **options)
    return step, step.init(*hfta.stack_params([model] * 3), seeds=SEEDS)


@pytest.mark.parametrize("nonfinite", ["skip", "freeze"])
def test_a_failure_is_the_first_one_of_an_iteration(nonfinite):
    step, state = iterating(torch.tensor([[0.0, 0, 0], [0, 2, 0], [0, 1, 1], [0, 0, 0]]), nonfinite=nonfinite)
    result = hfta.fit(step, state, [None] * 2, epochs=1, progress=False)
    assert [(one.member, one.step, one.cause) for one in result.history.failures] == [
        (1, 5, "loss"),
        (2, 6, "gradient"),
    ]
    assert sorted(result.history.epochs[0]) == ["finite", "loss", "seen"]
    assert result.history["finite"].tolist() == [[1.0, 0.5, 0.5]]
    state, _ = step(state)
    state, metrics = step(state)
    assert metrics["failure"].tolist() == [0, 1, 2] and metrics["failed_step"].tolist() == [4, 5, 6]


@pytest.mark.exhaustive
def test_a_failure_is_the_first_one_of_an_iteration_in_a_graph():
    for donate in (False, True):
        step, state = iterating(torch.tensor([[0.0, 0, 0], [0, 2, 0], [0, 1, 1], [0, 0, 0]]), donate=donate)
        call = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
        for _ in range(2):
            state, metrics = call(state, None)
        assert metrics["failure"].tolist() == [0, 1, 2] and metrics["failed_step"].tolist() == [4, 5, 6]


def test_what_collect_reports_hides_nothing():
    model = nn.Linear(1, 1)
    step = hfta.make_train_step(
        model,
        lambda model, x: model(x).sum(),
        hfta.sgd(lr=0.1),
        collect=lambda state: (state.carry, torch.ones(2, 3, 1), {"loss": state.step}),
    )
    state = step.init(*hfta.stack_params([model] * 3), seeds=SEEDS)
    for call in (step, step.loop):
        with pytest.raises(
            hfta.errors.LossError, match="collect reports 'loss', which the step reports too; give it another"
        ):
            call(state)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda carry: {"y": carry["x"]}, r"what collect returns has carry\['y'\] but the state does not; give"),
        (
            lambda carry: {"x": carry["x"].double()},
            r"carry\['x'\] is torch.float32\[3\] in the state but torch.float64\[3\] in",
        ),
        (
            lambda carry: {"x": torch.zeros(3, 7)},
            r"carry\['x'\] is torch.float32\[3\] in the state but torch.float32\[3, 7\] in",
        ),
    ],
)
def test_what_collect_carries_keeps_its_structure(change, message):
    model = nn.Linear(1, 1)
    step = hfta.make_train_step(
        model,
        lambda model, x: model(x).sum(),
        hfta.sgd(lr=0.1),
        collect=lambda state: (change(state.carry), torch.ones(2, 3, 1)),
    )
    state = step.init(*hfta.stack_params([model] * 3), seeds=SEEDS, carry={"x": torch.zeros(3)})
    for call in (step, step.loop):
        with pytest.raises(hfta.errors.TraceError, match=message):
            call(state)


def collecting(change: Any = lambda state: None, result: Any = None) -> Any:
    """A step that collects what members carry, after a change of the state."""

    def collect(state):
        change(state)
        return (state.carry, state.carry["x"][None]) if result is None else result(state)

    step = hfta.make_train_step(
        nn.Linear(4, 1), lambda model, x: model(x).square().mean(), hfta.sgd(lr=0.1), collect=collect
    )
    params = hfta.init_params(lambda: nn.Linear(4, 1), PAIR)
    return step, step.init(*params, seeds=PAIR, carry={"x": torch.ones(2, 6, 4), "seen": (torch.zeros(2),)})


@pytest.mark.parametrize(
    "result, error, message",
    [
        (lambda state: (state.carry, torch.ones(1, 2, 6, 4), {"failed_step": torch.ones(2)}), hfta.errors.LossError,
         "collect reports 'failed_step', which the step reports too"),
        (lambda state: ({**state.carry, "x": state.step}, torch.ones(1, 2, 6, 4)), hfta.errors.TraceError,
         r"carry\['x'\] is torch.float32\[2, 6, 4\] in the state but torch.int64\[2\] in what collect"),
        (lambda state: ((), torch.ones(1, 2, 6, 4)), hfta.errors.TraceError,
         r"the state has carry\['seen'\]\[0\] but what collect"),
    ],
)  # fmt: skip
def test_a_collect_that_returns_something_else(result, error, message):
    step, state = collecting(result=result)
    for call in (step, step.loop):
        with pytest.raises(error, match=message):
            call(state)
    for wrong in (0, 2.0):
        with pytest.raises(ValueError, match=f"iterations is {wrong}; give an integer of at least 1"):
            step.loop(state, wrong)
