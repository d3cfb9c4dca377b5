"""A few updates of every optimizer against PyTorch's own, without a model: the quick check of each update rule."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from cases import OPTIMIZERS, OptimizerCase, ours, theirs
from hfta_func.optim import update_

M, STEPS = 3, 6
CASES = [pytest.param(case, id=case.name) for case in OPTIMIZERS]


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _params() -> dict[str, Tensor]:
    return {"matrix": torch.randn(M, 4, 3), "vector": torch.randn(M, 5), "scalar": torch.randn(M)}


def _grads(params: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{path: torch.randn_like(param) for path, param in params.items()} for _ in range(STEPS)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("maximize", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_torch(case: OptimizerCase, maximize: int) -> None:
    case = case._replace(options={**case.options, "maximize": bool(maximize)})
    optimizer, params = ours(case), _params()
    solo = [[nn.Parameter(param[i].clone()) for param in params.values()] for i in range(M)]
    others = [theirs(case, i, parameters) for i, parameters in enumerate(solo)]
    state = optimizer.init(params)
    for number, grads in enumerate(_grads(params)):
        held = optree.tree_map(torch.clone, (grads, state, params))
        updates, after = optimizer.update(grads, state, params)
        assert all(map(torch.equal, optree.tree_leaves((grads, state, params)), optree.tree_leaves(held)))
        state, params = after, hfta.apply_updates(params, updates)
        for i, parameters in enumerate(solo):
            for parameter, grad in zip(parameters, grads.values(), strict=True):
                parameter.grad = grad[i].clone()
            others[i].step()
        for param, column in zip(params.values(), zip(*solo, strict=True), strict=True):
            expected = torch.stack([x.detach() for x in column])
            torch.testing.assert_close(
                param, expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=number: f"step {n}: {m}"
            )


def _torch_updates(case: OptimizerCase, params: dict[str, Tensor], all_grads: list[dict[str, Tensor]]) -> list[Tensor]:
    solo = [[nn.Parameter(param[i].clone()) for param in params.values()] for i in range(M)]
    others = [theirs(case, i, parameters) for i, parameters in enumerate(solo)]
    for grads in all_grads:
        for i, parameters in enumerate(solo):
            for parameter, grad in zip(parameters, grads.values(), strict=True):
                parameter.grad = grad[i].clone()
            others[i].step()
    return [torch.stack([x.detach() for x in column]) for column in zip(*solo, strict=True)]


def _muon_by_hand(param: Tensor, grads: list[Tensor], lr: float, decay: float, momentum: float, eps: float) -> Tensor:
    """Jordan et al., 2024, line by line, for one matrix."""
    a, b, c = 3.4445, -4.775, 2.0315
    buffer = torch.zeros_like(param)
    for grad in grads:
        buffer = momentum * buffer + (1 - momentum) * grad
        x = (1 - momentum) * grad + momentum * buffer
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / max(float(x.norm()), eps)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x
        param = param - lr * (max(1.0, param.shape[0] / param.shape[1]) ** 0.5 * x + decay * param)
    return param


@pytest.mark.parametrize("shape", [(6, 4), (3, 5)])
def test_orthogonal_updates(shape: tuple[int, int]) -> None:
    lr, decay, momentum = [0.1, 0.2, 0.3], [0.0, 0.1, 0.5], [0.9, 0.5, 0.0]
    # Of the last member, the norm is below the least to divide by.
    size, eps = torch.tensor([1.0, 1e3, 1e-4]).reshape(-1, 1, 1), 1e-2
    optimizer = hfta.muon(lr, decay, momentum, eps=eps, ns_dtype=torch.float64)
    params = {"w": torch.randn(M, *shape)}
    grads = [size * torch.randn(M, *shape) for _ in range(3)]
    expected = torch.stack(
        [
            _muon_by_hand(params["w"][i], [grad[i] for grad in grads], lr[i], decay[i], momentum[i], eps)
            for i in range(M)
        ]
    )
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update({"w": grad}, state, params)
        params = hfta.apply_updates(params, updates)
    torch.testing.assert_close(params["w"], expected, rtol=1e-11, atol=1e-11)


def test_clipped_gradients_are_those_of_torch() -> None:
    limits = [0.5, 3.0, 1e6]
    clip, params = hfta.clip_grad_norm(limits), _params()
    state = clip.init(params)
    for number, grads in enumerate(_grads(params), start=1):
        clipped, state = clip.update(grads, state, params)
        for i, limit in enumerate(limits):
            own = [nn.Parameter(torch.zeros_like(grad[i])) for grad in grads.values()]
            for parameter, grad in zip(own, grads.values(), strict=True):
                parameter.grad = grad[i].clone()
            nn.utils.clip_grad_norm_(own, limit)
            for parameter, grad in zip(own, clipped.values(), strict=True):
                torch.testing.assert_close(grad[i], parameter.grad, rtol=1e-12, atol=0)
        assert state.step.tolist() == [number] * M


def test_averages_follow_a_schedule_of_their_own() -> None:
    decay = hfta.schedules.step_lr([0.5, 0.8, 0.9], step_size=2, gamma=0.5)
    optimizer = hfta.chain(hfta.sgd(lr=0.1), hfta.ema(decay))
    params = {"w": torch.randn(M, 3)}
    state, average = optimizer.init(params), None
    for number, grads in enumerate(_grads(params)):
        updates, state = optimizer.update(grads, state, params)
        params = hfta.apply_updates(params, updates)
        weight = (torch.tensor([0.5, 0.8, 0.9]) * 0.5 ** (number // 2)).reshape(-1, 1)
        average = params["w"] if average is None else weight * average + (1 - weight) * params["w"]
        torch.testing.assert_close(state[-1].average["w"], average, rtol=1e-12, atol=1e-12)
        assert state[-1].step.tolist() == [number + 1] * M


def test_dampening_without_momentum_is_ignored() -> None:
    case = next(case for case in OPTIMIZERS if case.name == "sgd")._replace(options={"dampening": 0.5})
    optimizer, params = ours(case), _params()
    all_grads, state = _grads(params)[:3], optimizer.init(params)
    expected = _torch_updates(case, params, all_grads)
    for grads in all_grads:
        updates, state = optimizer.update(grads, state, params)
        params = hfta.apply_updates(params, updates)
    torch.testing.assert_close([*params.values()], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [None, [True, False, True]])
def test_an_optimizer_that_only_makes_new_tensors_updates_in_place(keep: list[bool] | None) -> None:
    inner = hfta.sgd(lr=[0.1, 0.2, 0.3], momentum=0.9)
    optimizer, params = hfta.GradientTransformation(inner.init, inner.update), _params()
    mask, state = None if keep is None else torch.tensor(keep), inner.init(params)
    ours_, theirs_ = (optree.tree_map(torch.clone, (params, state)) for _ in range(2))
    for grads in _grads(params):
        update_(optimizer, optree.tree_map(torch.clone, grads), ours_[1], ours_[0], mask)
        update_(inner, grads, theirs_[1], theirs_[0], mask)
        for a, b in zip(optree.tree_leaves(ours_), optree.tree_leaves(theirs_), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(not torch.equal(ours_[0][path][0], param[0]) for path, param in params.items())
