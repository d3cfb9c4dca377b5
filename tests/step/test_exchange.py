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
    for _ in range(steps):
        drawn = {path: [torch.randn(leaf.shape[1:], generator=g) for g in generators] for path, leaf in params.items()}
        updates, state = optimizer.update({path: torch.stack(row) for path, row in drawn.items()}, state, params)
        params = hfta.apply_updates(params, updates)
    return state, params


def _copies(generators: list[torch.Generator]) -> list[torch.Generator]:
    return [torch.Generator().set_state(generator.get_state()) for generator in generators]


def _generators(seed: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(M)]


def _assert_same(models: list[Any], others: list[Any], tolerance: float = 1e-12) -> None:
    for model, other in zip(models, others, strict=True):
        for (path, param), expected in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                param, expected, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}"
            )


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
    copies = _copies(generators)
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


def _onecycle(optimizer: Any, i: int, **options: Any) -> Any:
    return lr_scheduler.OneCycleLR(
        *(optimizer, [0.1, 0.02, 0.3][i]),
        total_steps=40,
        pct_start=[0.3, 0.5, 0.1][i],
        base_momentum=0.2 + i / 10,
        **options,
    )


class HalvesDecay(lr_scheduler.LRScheduler):
    """One of a user's own, which changes another number."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        return [group["lr"] * 1.01 for group in self.optimizer.param_groups]


def _linear(optimizer: Any, i: int) -> Any:
    return lr_scheduler.LinearLR(optimizer, 0.1 + i / 10, total_iters=4 + i)


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "StepLR": lambda o, i: lr_scheduler.StepLR(o, 2 + i, 0.5 + i / 10),
    "MultiStepLR": lambda o, i: lr_scheduler.MultiStepLR(o, [2, 4 + i, 4 + i], 0.5 + i / 10),
    "ConstantLR": lambda o, i: lr_scheduler.ConstantLR(o, 0.2 + i / 10, total_iters=3 + i),
    "LinearLR": _linear,
    "ExponentialLR": lambda o, i: lr_scheduler.ExponentialLR(o, 0.9 + i / 20),
    "PolynomialLR": lambda o, i: lr_scheduler.PolynomialLR(o, 6 + i, 1.0 + i),
    "CosineAnnealingLR": lambda o, i: lr_scheduler.CosineAnnealingLR(o, 4 + i, 0.01 * i),
    "CosineAnnealingWarmRestarts": lambda o, i: lr_scheduler.CosineAnnealingWarmRestarts(o, 2 + i, 2),
    "OneCycleLR": _onecycle,
    "OneCycleLR, three phases": lambda o, i: _onecycle(o, i, three_phase=True, anneal_strategy="linear"),
    "CyclicLR": lambda o, i: lr_scheduler.CyclicLR(o, 0.0, 0.1 + i / 10, 2 + i, mode="triangular2", max_momentum=0.8),
    "CyclicLR, scaled": lambda o, i: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.9 ** (x + i)),
    "LambdaLR": lambda o, i: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, epoch / (3 + i))),
    "LambdaLR of groups": lambda o, i: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n + i)]),
    "MultiplicativeLR": lambda o, i: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8 + i / 10),
    "SequentialLR": lambda o, i: lr_scheduler.SequentialLR(
        o, [_linear(o, i), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[4 + i]
    ),
    "ChainedScheduler": lambda o, i: lr_scheduler.ChainedScheduler(
        [_linear(o, i), lr_scheduler.ExponentialLR(o, 0.9 + i / 20), lr_scheduler.CosineAnnealingLR(o, 9, 0.01)]
    ),
    "SWALR": lambda o, i: torch.optim.swa_utils.SWALR(o, swa_lr=0.01 + i / 100, anneal_epochs=4),
    "of a user": lambda o, i: HalvesDecay(o),
}
KINDS = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adam": (torch.optim.AdamW, {"betas": (0.8, 0.99)})}


@pytest.mark.parametrize(("kind", "before", "every"), [("sgd", 0, 1), ("sgd", 3, 2), ("adam", 2, 1)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_an_array_and_back(name: str, kind: str, before: int, every: int) -> None:
    """From their start and midway, once per batch and per epoch; the second group has a number that is a tensor."""
    make, options = KINDS[kind]
    models, generators = _models({"first": (3, 2), "second": (4,)}), _generators(2)
    optimizers = [
        make(
            [{"params": [m.first], "lr": 0.1 + i}, {"params": [m.second], "lr": torch.tensor(0.02)}],
            **options,
            weight_decay=0.01,
        )
        for i, m in enumerate(models)
    ]
    schedulers = [SCHEDULERS[name](optimizer, i) for i, optimizer in enumerate(optimizers)]

    def epochs(models: Any, optimizers: Any, schedulers: Any, generators: Any, count: int) -> None:
        for member in zip(models, optimizers, schedulers, generators, strict=True):
            model, optimizer, scheduler, generator = member
            for _ in range(count):
                _train(model, optimizer, every, generator)
                scheduler.step()

    epochs(models, optimizers, schedulers, generators, before)
    kept = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    optimizer = pickle.loads(pickle.dumps(hfta.from_torch(optimizers, schedulers, models=models, steps=9, every=every)))
    # Nothing that was passed in has changed.
    assert str(kept) == str([each.state_dict() for each in optimizers])
    originals = [copy.deepcopy(each) for each in zip(models, optimizers, schedulers, strict=True)]
    params, buffers = hfta.stack_params(models)
    copies = _copies(generators)
    epochs(models, optimizers, schedulers, generators, 7)
    state, params = _train_array(optimizer, optimizer.init(params), params, 7 * every, copies)
    back = hfta.unstack_params(models[0], params, buffers)
    _assert_same(back, models)
    returned, followers = hfta.to_torch(optimizer, state, back, [scheduler for *_, scheduler in originals])
    for follower, scheduler, other in zip(followers, schedulers, returned, strict=True):
        assert type(follower) is type(scheduler) and follower.optimizer is other
    epochs(models, optimizers, schedulers, generators, 4)
    epochs(back, returned, followers, copies, 4)
    _assert_same(back, models)
