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


@pytest.mark.parametrize("keep", [None, [True, False, True]])
@pytest.mark.parametrize("case", CASES)
def test_updates_in_place_are_the_same(case: OptimizerCase, keep: list[bool] | None) -> None:
    optimizer, params = ours(case), _params()
    state = optimizer.init(params)
    mine = optree.tree_map(torch.clone, (params, state))
    mask = None if keep is None else torch.tensor(keep)
    addresses = [leaf.data_ptr() for leaf in optree.tree_leaves(mine)]
    for grads in _grads(params):
        updates, new = optimizer.update(grads, state, params)
        new = hfta.apply_updates(params, updates), new
        if mask is not None:
            new = optree.tree_map(
                lambda a, b: torch.where(mask.reshape(-1, *(1,) * (a.dim() - 1)), a, b), new, (params, state)
            )
        params, state = new
        update_(optimizer, grads, mine[1], mine[0], mask)
        for a, b in zip(optree.tree_leaves(mine), optree.tree_leaves(new), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert [leaf.data_ptr() for leaf in optree.tree_leaves(mine)] == addresses
