"""Members that average with others between epochs: groups, weights, and members that are away."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from worker_arrays import arrayed, assert_same, loader

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


def run(**options: Any) -> hfta.run.Result:
    """A run of an array of five."""
    return hfta.fit(*arrayed(), loader(), progress=False, **options)


def test_fit_averages_every_so_many_epochs_and_a_resumed_run_goes_on(tmp_path: pathlib.Path):
    rounds: list[int] = []

    def groups(turn: int) -> Tensor:
        rounds.append(turn)
        return torch.tensor([[0, 0, 1, 1, -1], [0, 1, -1, 0, 2]][turn % 2])

    callbacks = [hfta.callbacks.averaging(groups, weights=lambda turn: torch.arange(1.0, 6.0), every=2)]
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
    assert last.state.buffers["1.num_batches_tracked"].tolist() == [10] * 5


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
