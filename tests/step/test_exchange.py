"""Optimizers and schedulers of ``torch.optim`` go on as an array and back, as in a loop over models that never leaves PyTorch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import hfta_func as hfta
from cases import MATRIX_OPTIMIZERS, OPTIMIZERS, OptimizerCase, theirs

M = 3
CASES = [case for case in OPTIMIZERS if getattr(torch.optim, case.theirs.__name__, None) is case.theirs]
CASES += [
    case._replace(name=f"{case.name}, maximized", options={**case.options, "maximize": True}) for case in CASES[:3]
]
CASES.append(
    MATRIX_OPTIMIZERS[0]._replace(
        theirs=torch.optim.Muon, options={"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}
    )
)


@pytest.fixture(autouse=True)
def double() -> Any:
    """torch.optim keeps some of its numbers in the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Tree(nn.Module):
    """Parameters of some shapes, of which one is tied and one has a path like the beginning of another's."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.again = next(self.parameters())


def _models(shapes: dict[str, tuple[int, ...]]) -> list[Tree]:
    return [Tree(shapes) for _ in range(M)]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, generator: torch.Generator) -> None:
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator) if param.requires_grad else None
        optimizer.step()


def _train_array(
    optimizer: hfta.GradientTransformation, state: Any, params: Any, steps: int, generators: list[torch.Generator]
) -> tuple[Any, Any]:
    trained = dict(params)
    for _ in range(steps):
        grads = {path: [torch.randn(param.shape[1:], generator=g) for g in generators] for path, param in trained.items()}
        stacked = {
            path: torch.stack([torch.randn(params[path].shape[1:], generator=g) for g in generators]) for path in ()
        }
        del stacked
        updates, state = optimizer.update({path: torch.stack(row) for path, row in grads.items()}, state, trained)
        trained = hfta.apply_updates(trained, updates)
    return state, trained


def _generators(seed: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(M)]


def _assert_same(models: list[Any], others: list[Any], tolerance: float = 1e-12) -> None:
    for model, other in zip(models, others, strict=True):
        for (path, param), expected in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_optimizers_go_on_as_an_array_and_back(case: OptimizerCase, before: int) -> None:
    models = _models(case.shapes)
    optimizers = [theirs(case, i, model.parameters()) for i, model in enumerate(models)]
    generators = _generators(1)
    # Members have made different numbers of updates.
    for i, member in enumerate(zip(models, optimizers, strict=True)):
        _train(*member, before and before + i, generators[i])
    optimizer = pickle.loads(pickle.dumps(hfta.from_torch(optimizers, models=models)))
    params, buffers = hfta.stack_params(models)
    state = optimizer.init(params)
    copies = [torch.Generator().manual_seed(0) for _ in generators]
    for generator, other in zip(copies, generators, strict=True):
        generator.set_state(other.get_state())
    for i, member in enumerate(zip(models, optimizers, strict=True)):
        _train(*member, 3, generators[i])
    state, params = _train_array(optimizer, state, params, 3, copies)
    back = hfta.unstack_params(models[0], params, buffers)
    # Products in bfloat16 add up in another order.
    tolerance = 2e-2 if case.ours is hfta.muon else 1e-12
    _assert_same(back, models, tolerance)
    returned, schedulers = hfta.to_torch(optimizer, state, back)
    assert schedulers == [] and {type(each) for each in returned} == {case.theirs}
    for i in range(M):
        given, got = ({**each.param_groups[0], "params": ()} for each in (optimizers[i], returned[i]))
        assert given == got
        _train(models[i], optimizers[i], 2, generators[i])
        _train(back[i], returned[i], 2, copies[i])
    _assert_same(back, models, tolerance)
