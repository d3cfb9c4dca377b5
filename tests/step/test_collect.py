"""Iterations of a step that collects its batches: their failures, metrics and carries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hfta_func as hfta

SEEDS = [3, 4, 5]


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
        with pytest.raises(hfta.LossError, match="collect reports 'loss', which the step reports too; give it another"):
            call(state)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda carry: {"y": carry["x"]}, r"result has carry\['y'\] but its argument does not; return"),
        (lambda carry: {"x": carry["x"].double()}, r"carry\['x'\] is torch.float32\[3\] but torch.float64\[3\] after"),
        (lambda carry: {"x": torch.zeros(3, 7)}, r"carry\['x'\] is torch.float32\[3\] but torch.float32\[3, 7\] after"),
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
        with pytest.raises(hfta.TraceError, match=message):
            call(state)
