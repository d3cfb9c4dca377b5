"""Gradients of whole training runs, by hyperparameters: ``torch.func.grad`` through steps, against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from cases import FUNCTIONS

LR = [0.01, 0.02]
OPTIMIZERS = {
    # Lion's updates are signs of averages, which jump, so that differences are no gradients; Muon takes matrices only.
    **{name: case.ours(lr=LR) for name, case in FUNCTIONS.items() if name not in ("lion", "muon")},
    "sgd, everything": hfta.sgd(lr=LR, momentum=[0.9, 0.8], nesterov=True, weight_decay=[0.1, 0.2]),
    "adam, amsgrad": hfta.adam(lr=LR, amsgrad=True, weight_decay=[0.1, 0.2]),
    "rmsprop, everything": hfta.rmsprop(lr=LR, centered=True, momentum=[0.9, 0.8]),
    "chain": hfta.chain(hfta.clip_grad_norm(0.1), hfta.adam(lr=LR), hfta.ema([0.9, 0.8])),
    "accumulate": hfta.accumulate(hfta.adam(lr=LR), every=[1, 2]),
}


def loss_fn(model: nn.Module, batch: Tensor, hparams: dict[str, Tensor]) -> Tensor:
    return hparams["scale"] * model(batch).square().mean()


def after_three_steps(optimizer: hfta.GradientTransformation, **options: Any) -> Any:
    torch.manual_seed(0)
    models = [nn.Linear(3, 3).double() for _ in LR]
    step = hfta.make_train_step(models[0], loss_fn, optimizer, **options)
    state = step.init(*hfta.stack_params(models), seeds=[0, 1], hparams={"scale": [1.0, 2.0]})
    batch = torch.randn(2, 4, 3, dtype=torch.float64)

    def run(lr: Tensor, scale: Tensor) -> Tensor:
        found, metrics = hfta.with_hyperparams(state, lr=lr, scale=scale), {}
        for _ in range(3):
            found, metrics = step(found, batch)
        return found.params["weight"].square().sum() + metrics["loss"].sum()

    return run


def gradient_by_differences(run: Any, *values: Tensor, width: float = 1e-6) -> list[Tensor]:
    found = []
    for position, value in enumerate(values):
        slopes = []
        for member in range(len(value)):
            ends = []
            for sign in (1, -1):
                moved = [other.clone() for other in values]
                moved[position][member] += sign * width
                ends.append(run(*moved))
            slopes.append((ends[0] - ends[1]) / (2 * width))
        found.append(torch.stack(slopes))
    return found


VALUES = torch.tensor(LR, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
CASES = [("adam", {"chunk_size": 1}), ("adam", {"checkpoint": True}), *((name, {}) for name in OPTIMIZERS)]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_gradients_by_hyperparameters(name: str, options: dict[str, Any]) -> None:
    run = after_three_steps(OPTIMIZERS[name], **options)
    found = torch.func.grad(run, argnums=(0, 1))(*VALUES)
    torch.testing.assert_close(list(found), gradient_by_differences(run, *VALUES), rtol=1e-6, atol=1e-8)
    assert all(bool((grad != 0).all()) for grad in found)


def test_second_derivatives() -> None:
    run = after_three_steps(OPTIMIZERS["sgd"])
    found = torch.func.grad(lambda lr: torch.func.grad(run)(lr, VALUES[1]).sum())(VALUES[0])
    (expected,) = gradient_by_differences(lambda lr: torch.func.grad(run)(lr, VALUES[1]).sum(), VALUES[0])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.exhaustive
def test_compiled_around_the_gradient() -> None:
    run = after_three_steps(OPTIMIZERS["sgd, everything"])
    expected = torch.func.grad(run, argnums=(0, 1))(*VALUES)
    torch._dynamo.reset()
    found = torch.compile(torch.func.grad(run, argnums=(0, 1)), backend="aot_eager", fullgraph=True)(*VALUES)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_states_outside_a_gradient_hold_no_graph() -> None:
    models = [nn.Linear(3, 3) for _ in LR]
    step = hfta.make_train_step(models[0], lambda model, batch: model(batch).sum(), hfta.sgd(lr=LR))
    state = step.init(*hfta.stack_params(models), seeds=[0, 1])
    state = state._replace(params={path: param.requires_grad_() for path, param in state.params.items()})
    state, metrics = step(state, torch.randn(2, 4, 3))
    assert not any(leaf.requires_grad for leaf in (*state.params.values(), *metrics.values()))
