"""Members that average with others between epochs: groups, weights, grids, gossip, and members that are away."""

from __future__ import annotations

import itertools
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.step import mixing
from worker_arrays import assert_same

M = 6


def mix(values: Tensor, callback: Any, rounds: int = 1, active: Tensor | None = None) -> Tensor:
    """What a callback makes of parameters ``[M, D]`` in some rounds."""
    count = len(values)
    model = nn.Linear(values.shape[1], 1, bias=False, dtype=values.dtype)
    step = hfta.make_train_step(model, lambda model, batch: model(batch).mean(), hfta.sgd(0.1))
    state = step.init({"weight": values[:, None]}, seeds=range(count))
    state = state if active is None else state._replace(active=active)
    history = hfta.run.History(state.keys)
    for _ in range(rounds):
        history.epochs.append({})
        state = callback(state, history) or state
    return state.params["weight"][:, 0]


def distance(values: Tensor) -> float:
    """The mean-square distance to the average."""
    return float((values - values.mean(0)).square().sum(1).mean())


def test_groups_average_with_weights_and_who_is_away_keeps_its_own():
    values = torch.randn(M, 3).double()
    groups, weights = [0, 7, 0, -1, 7, -1], [1.0, 2.0, 3.0, 4.0, 0.0, 6.0]
    found = mix(values, hfta.callbacks.averaging(groups, weights=weights))
    expected = values.clone()
    expected[[0, 2]] = (values[0] + 3 * values[2]) / 4
    expected[[1, 4]] = values[1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    # An inactive member is away, by groups and by a matrix.
    active = torch.tensor([True, True, False, True, True, True])
    found = mix(values, hfta.callbacks.averaging(groups), active=active)
    assert torch.equal(found[[0, 2, 3, 5]], values[[0, 2, 3, 5]]) and not torch.equal(found[1], values[1])
    matrix = torch.rand(M, M).double() + 0.1
    found = mix(values, hfta.callbacks.averaging(weights=matrix), active=active)
    own = matrix[:, active] / matrix[:, active].sum(1, keepdim=True)
    torch.testing.assert_close(found[active], (own @ values[active])[active], rtol=1e-12, atol=1e-14)
    assert torch.equal(found[2], values[2])
    # A group without any weight keeps what it has; all members are one group by default.
    assert torch.equal(mix(values, hfta.callbacks.averaging([0, 0, 1, 2, 3, 4], weights=[0, 0, 1, 1, 1, 1])), values)
    torch.testing.assert_close(
        mix(values, hfta.callbacks.averaging()), values.mean(0).expand(M, 3), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("sizes", [(16, 16), (4, 4, 4, 4), (2, 3, 5), (7,)])
def test_a_grid_has_the_average_of_all_after_as_many_rounds_as_dimensions(sizes: tuple[int, ...]):
    values = torch.randn(math.prod(sizes), 3).double()
    groups = mixing.grid(*sizes)
    callback = hfta.callbacks.averaging(groups)
    before = mix(values, callback, rounds=len(sizes) - 1)
    after = mix(values, callback, rounds=len(sizes))
    torch.testing.assert_close(after, values.mean(0).expand_as(after), rtol=0, atol=1e-13)
    assert len(sizes) == 1 or distance(before) > 1e-3
    for turn in range(2 * len(sizes)):
        assert groups(turn).bincount().tolist() == [sizes[turn % len(sizes)]] * (
            len(values) // sizes[turn % len(sizes)]
        )
    # Who has met in one round does not meet in the next.
    same = [(groups(turn)[:, None] == groups(turn)).fill_diagonal_(False) for turn in range(len(sizes))]
    assert len(sizes) == 1 or not any((one & other).any() for one, other in itertools.pairwise(same))


def factor(count: int, groups: int) -> float:
    """What is left of the mean-square distance of M peers, in expectation, after a round of groups drawn at random.

    The average of n of M values, drawn without replacement, has variance S / n * (M - n) / (M - 1), where S is the mean
    square; the sum over groups, n / M of it each, is S (groups - 1) / (M - 1), whatever their sizes. Who is away is a group
    by itself.
    """
    return (groups - 1) / (count - 1)


@pytest.mark.parametrize("count", [32, 128])
def test_random_groups_approach_the_average_as_fast_as_the_formula_says(count: int):
    peers, rounds, found = 256, 3, []
    # Columns are draws of their own, but share groups; seeds do not.
    for seed in range(30):
        values = torch.randn(peers, 8, generator=torch.Generator().manual_seed(seed)).double()
        after = mix(values, hfta.callbacks.averaging(mixing.at_random(peers, count, seed)), rounds)
        torch.testing.assert_close(after.mean(0), values.mean(0), rtol=0, atol=1e-13)
        found.append(distance(after) / distance(values))
    measured, error = torch.tensor(found).mean(), torch.tensor(found).std() / math.sqrt(len(found))
    expected = factor(peers, count) ** rounds
    assert abs(measured - expected) < 4 * error and error < 0.1 * expected
    assert factor(peers, count) <= (count - 1) / peers + count / peers**2
    assert {tuple(mixing.at_random(peers, count)(0).bincount().unique().tolist())} == {(peers // count,)}


def test_peers_that_drop_out_slow_the_average_down_as_the_formula_says():
    peers, rate, found, expected = 256, 0.2, [], []
    for seed in range(60):
        values = torch.randn(peers, 8, generator=torch.Generator().manual_seed(seed)).double()
        groups = mixing.dropouts(mixing.at_random(peers, 16, seed), rate, seed)
        after = mix(values, hfta.callbacks.averaging(groups))
        torch.testing.assert_close(after.mean(0), values.mean(0), rtol=0, atol=1e-13)
        away = groups(0) < 0
        assert torch.equal(after[away], values[away]) and 0.1 < away.double().mean() < 0.3
        found.append(distance(after) / distance(values))
        expected.append(factor(peers, len(groups(0)[~away].unique()) + int(away.sum())))
    found, expected = torch.tensor(found), torch.tensor(expected)
    gap = found - expected
    assert abs(gap.mean()) < 4 * gap.std() / math.sqrt(len(gap)) and gap.std() < 0.2 * expected.mean()
    assert torch.equal(mixing.dropouts([0] * 9, 1.0)(3), torch.full((9,), -1))
    assert torch.equal(mixing.dropouts([0] * 9, 0.0)(3), torch.zeros(9, dtype=torch.int64))
    assert not torch.equal(groups(0), groups(1))


def run(**options: Any) -> hfta.run.Result:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)).double()
    step = hfta.make_train_step(make_model(), loss_fn, hfta.sgd(0.05, momentum=0.9))
    state = step.init(*hfta.init_params(make_model, range(M)), seeds=range(M))
    loader = hfta.ArrayLoader((inputs, inputs.sum(1, keepdim=True)), 5, seeds=range(M))
    return hfta.fit(step, state, loader, progress=False, **options)


def test_fit_averages_every_so_many_epochs_and_a_resumed_run_goes_on(tmp_path: pathlib.Path):
    rounds: list[int] = []

    def groups(turn: int) -> Tensor:
        rounds.append(turn)
        return mixing.dropouts(mixing.grid(2, 3), 0.2)(turn)

    callbacks = [hfta.callbacks.averaging(groups, weights=lambda turn: torch.arange(1.0, M + 1), every=2)]
    whole = run(epochs=6, callbacks=callbacks)
    assert rounds == [0, 1, 2]
    for epochs in (1, 4, 6):
        found = run(epochs=epochs, callbacks=callbacks, resume=tmp_path / "run")
    assert rounds == [0, 1, 2] * 2
    assert_same(found, whole)
    # Momentum, and what is counted, stay each member's own.
    last, alone = run(epochs=2, callbacks=[hfta.callbacks.averaging(every=2)]), run(epochs=2)
    params = last.state.params["0.weight"]
    torch.testing.assert_close(params, params[:1].expand_as(params), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(params[0], alone.state.params["0.weight"].mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(last.state.opt_state, alone.state.opt_state, rtol=0, atol=0)
    assert last.state.buffers["2.num_batches_tracked"].tolist() == [12] * M


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits_are_averaged_in_float32(dtype: torch.dtype):
    values = torch.rand(M, 5).to(dtype)
    found = hfta.step.average({"scale": values})["scale"]
    expected = sum(value.float() for value in values) / M
    torch.testing.assert_close(found.float(), expected.to(dtype).float().expand(M, 5), rtol=0.13, atol=0)
    assert found.dtype == dtype


def test_bad_input():
    values = torch.randn(M, 2)
    for callback, match in (
        (hfta.callbacks.averaging([0.5] * M), r"groups is torch.float32 \[6\]; give one integer per model"),
        (hfta.callbacks.averaging(weights=[1.0] * 5), r"weights is \[5\] for 6 models in groups"),
        (hfta.callbacks.averaging(weights=[[1.0] * 5] * 5), r"weights is \[5, 5\] for 6 models"),
        (
            hfta.callbacks.averaging([0] * M, weights=torch.eye(M)),
            r"weights is \[6, 6\], who averages with whom; leave out groups",
        ),
        (hfta.callbacks.averaging(weights=[-1.0] * M), "weights must be finite, not negative"),
        (hfta.callbacks.averaging(weights=torch.zeros(M, M)), "weights must be finite, not negative, and more than 0"),
    ):
        with pytest.raises(hfta.errors.HyperparameterError, match=match):
            mix(values, callback)
    with pytest.raises(hfta.errors.HyperparameterError, match=r"rate is 1.5; it is a probability"):
        mixing.dropouts([0], 1.5)
