"""Networks that L-BFGS trains to the end, as an array beside the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from ways import seeded, start

M = 3
LR = [1e-2, 3e-2, 2e-3]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def residual(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of ``u'' = -u``, ``u(0) = 0`` and ``u(1) = sin(1)``, at points inside and at both ends."""
    points = batch[0].detach().requires_grad_()
    solution = model(points)
    slope = torch.autograd.grad(solution.sum(), points, create_graph=True)[0]
    curvature = torch.autograd.grad(slope.sum(), points, create_graph=True)[0]
    inside = (curvature + solution).square().mean()
    return inside + (model(batch[1]) - batch[1].sin()).square().sum(), {"inside": inside}


POINTS = torch.linspace(0, 1, 12).double()[:, None], torch.tensor([[0.0], [1.0]]).double()


@pytest.mark.parametrize("members", [True, False])
def test_a_physics_informed_network_ends_with_lbfgs(members: bool) -> None:
    batch = tuple(each.expand(M, *each.shape) for each in POINTS) if members else POINTS
    dims: Any = 0 if members else None
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "max_iter": 10, "history_size": 20}
    alone, losses = seeded(network, range(M)), []
    step, state = start(seeded(network, range(M)), residual, hfta.adam(lr=LR), batch_dims=dims)
    state, _ = hfta.fit(step, state, [batch], epochs=20, progress=False)
    step = hfta.make_train_step(network(), residual, hfta.lbfgs(**options), batch_dims=dims)
    state = step.init(state.params, state.buffers, seeds=range(M))
    state, history = hfta.fit(step, state, [batch], epochs=4, progress=False)
    for model, lr in zip(alone, LR, strict=True):
        adam, search = torch.optim.Adam(model.parameters(), lr=lr), torch.optim.LBFGS(model.parameters(), **options)

        def closure(optimizer: Any, model: nn.Module = model) -> Tensor:
            optimizer.zero_grad()
            loss = residual(model, POINTS)[0]
            loss.backward()
            return loss

        for _ in range(20):
            closure(adam)
            adam.step()
        losses.append([search.step(lambda search=search, closure=closure: closure(search)).item() for _ in range(4)])
    torch.testing.assert_close(history["loss"], torch.tensor(losses, dtype=torch.float64).T, rtol=1e-10, atol=1e-10)
    for one, other in zip(alone, hfta.unstack_params(network(), *hfta.step.stacked(state)), strict=True):
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-8, atol=1e-8)
    # It has gone where Adam alone does not.
    assert (history["loss"][-1] < 0.2 * history["loss"][0]).all() and (history["inside"] < history["loss"]).all()


def test_a_run_of_lbfgs_is_interrupted_and_goes_on(tmp_path: Any) -> None:
    models, optimizer = seeded(network, range(M)), hfta.lbfgs(line_search_fn="strong_wolfe")
    step, state = start(models, residual, optimizer, batch_dims=None)
    expected, _ = hfta.fit(step, state, [POINTS], epochs=3, progress=False)
    for epochs in (1, 3):
        after, _ = hfta.fit(step, state, [POINTS], epochs=epochs, resume=tmp_path / "run.safetensors", progress=False)
    torch.testing.assert_close(after.params, expected.params, rtol=1e-9, atol=1e-9)
    assert after.opt_state.func_evals.tolist() == expected.opt_state.func_evals.tolist()
