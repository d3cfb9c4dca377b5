"""What holds for arrays of any size, whatever fails in them and however they change, over random cases."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hfta_func as hfta
from cases import OPTIMIZERS, ours
from comparisons import identical

cases = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# Matrix products may sum in another order where a matrix does not start at a multiple of 64 bytes, so here all do.
N, FEATURES = 8, 8
MAKERS = {
    **{case.name: functools.partial(ours, case) for case in OPTIMIZERS if case.name not in ("lamb",)},
    "clipped": lambda members: hfta.chain(hfta.clip_grad_norm(0.5), hfta.adamw(lr=1e-2)),
    "averaged": lambda members: hfta.chain(hfta.sgd(lr=0.1), hfta.ema(0.9)),
    "accumulated": lambda members: hfta.accumulate(hfta.adam(lr=1e-2), every=2),
    "scheduled": lambda members: hfta.sgd(
        lr=hfta.schedules.cosine([0.1 * (member + 1) for member in members], T_max=9), momentum=0.9
    ),
}


def _model() -> nn.Module:
    # Activations whose kernels give one value the same bits wherever it stands in a tensor.
    body = nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(body, nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)).double()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).sum(-1) - batch[1]).square().mean()


def _start(num_models: int, optimizer: str, **options: Any) -> tuple[hfta.step.TrainStep, hfta.step.TrainState]:
    step = hfta.make_train_step(
        _model(), _loss, MAKERS[optimizer]([member % 3 for member in range(num_models)]), **options
    )
    seeds = [100 + member for member in range(num_models)]
    return step, step.init(*hfta.init_params(_model, seeds), seeds=seeds)


def _batch(number: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """What the members with these seeds see at one step."""
    rows = []
    for seed in seeds.tolist():
        generator = torch.Generator().manual_seed(1000 * seed + number)
        rows.append((torch.randn(N, FEATURES, generator=generator), torch.randn(N, generator=generator)))
    inputs, targets = (torch.stack(column).double() for column in zip(*rows, strict=True))
    return inputs, targets


@pytest.mark.exhaustive
@cases
@given(st.data())
def test_a_failure_changes_no_other_member(data: st.DataObject) -> None:
    num_models = data.draw(st.integers(2, 6), "M")
    optimizer = data.draw(st.sampled_from(sorted(MAKERS)), "optimizer")
    options = {
        "nonfinite": data.draw(st.sampled_from(["skip", "freeze"])),
        "donate": data.draw(st.booleans(), "donate"),
        "chunk_size": data.draw(st.sampled_from([None, 2])),
    }
    steps = data.draw(st.integers(1, 6), "steps")
    events = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, steps - 1),
                st.integers(0, num_models - 1),
                st.sampled_from([float("nan"), float("inf"), 1e200]),
            ),
            min_size=1,
            max_size=4,
        ),
        "what fails, when, and how",
    )
    step, start = _start(num_models, optimizer, **options)
    healthy, sick = optree.tree_map(torch.clone, start), optree.tree_map(torch.clone, start)
    for number in range(steps):
        inputs, targets = _batch(number, start.keys)
        healthy, _ = step(healthy, (inputs, targets))
        inputs = inputs.clone()
        for when, member, value in events:
            if when == number:
                inputs[member] = value
        before = optree.tree_map(torch.clone, sick)
        sick, metrics = step(sick, (inputs, targets))
        for member in range(num_models):
            if metrics["failure"][member] != hfta.step.Failure.NONE or not before.active[member]:
                # It stays where it was.
                for kept, old in zip(sick[:3], before[:3], strict=True):
                    assert identical(hfta.take(kept, [member]), hfta.take(old, [member]))
    untouched = [member for member in range(num_models) if member not in {event[1] for event in events}]
    if untouched:
        assert identical(hfta.take(sick, untouched), hfta.take(healthy, untouched))
    assert all(leaf.isfinite().all() for leaf in sick.params.values())


@cases
@given(st.data())
def test_members_go_on_as_if_nothing_had_changed(data: st.DataObject) -> None:
    # An array of one runs plainly, by other kernels.
    num_models = data.draw(st.integers(2, 5), "M")
    optimizer = data.draw(st.sampled_from(sorted(MAKERS)), "optimizer")
    step, start = _start(num_models, optimizer, donate=data.draw(st.booleans(), "donate"))
    # What every member is without any change.
    expected, state = [start], optree.tree_map(torch.clone, start)
    for number in range(6):
        state, _ = step(state, _batch(number, state.keys))
        expected.append(optree.tree_map(torch.clone, state))
    array, members = optree.tree_map(torch.clone, start), list(range(num_models))
    for number in range(6):
        change = data.draw(st.sampled_from(["none", "drop", "permute", "clone", "split"]), "change")
        if change == "drop" and len(members) > 2:
            kept = data.draw(st.lists(st.integers(0, len(members) - 1), min_size=2, unique=True))
        elif change == "permute":
            kept = data.draw(st.permutations(range(len(members))))
        elif change == "clone" and len(members) < 8:
            kept = [*range(len(members)), data.draw(st.integers(0, len(members) - 1))]
        else:
            kept = list(range(len(members)))
        members = [members[i] for i in kept]
        array = hfta.take(array, kept)
        if change == "split" and len(members) > 3:
            cut = data.draw(st.integers(2, len(members) - 2))
            parts = [hfta.take(array, slice(0, cut)), hfta.take(array, slice(cut, None))]
            array = hfta.concat([step(part, _batch(number, part.keys))[0] for part in parts])
        else:
            array, _ = step(array, _batch(number, array.keys))
        assert identical(array, hfta.take(expected[number + 1], members))


@pytest.mark.exhaustive
def test_widening_to_a_size_seen_before_compiles_nothing() -> None:
    torch._dynamo.reset()
    step, state = _start(4, "adam")
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(step, fullgraph=True, backend=counter, dynamic=False)
    for number, kept in enumerate(([0, 1, 2, 3], [3, 1], [0, 1, 1, 0], [2, 0], [1, 0, 0, 1])):
        state = hfta.take(state, kept)
        state, _ = run(state, _batch(number, state.keys))
    assert counter.frame_count == 2


def test_clones_with_other_hyperparameters_go_their_own_ways() -> None:
    step, state = _start(3, "adam")
    state, _ = step(state, _batch(0, state.keys))
    clones = hfta.with_hyperparams(hfta.take(state, [1, 1]), lr=[1e-3, 1e-1])
    array = hfta.concat([state, clones._replace(keys=torch.tensor([501, 502]))])
    array, _ = step(array, _batch(1, torch.tensor([100, 101, 102, 101, 101])))
    alone, _ = step(state, _batch(1, state.keys))
    assert identical(hfta.take(array, [0, 1, 2]), alone)
    assert not identical(hfta.take(array.params, [3]), hfta.take(array.params, [4]))
