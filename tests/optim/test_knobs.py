"""Hyperparameters: the defaults of every optimizer, and where the range of each ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hfta_func as hfta
from cases import FUNCTIONS
from hfta_func import schedules


def _defaults(func: Any) -> dict[str, Any]:
    parameters = inspect.signature(func).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_those_of_torch_or_of_the_paper(name: str) -> None:
    mine, theirs = _defaults(getattr(hfta, name)), _defaults(FUNCTIONS[name].theirs)
    assert mine.pop("maximize") is False
    assert mine == {knob: theirs[knob] for knob in mine}


TINY = 1e-300
POSITIVE = ([TINY, 1e-3, 0.5, 1.0, 1e6], [0.0, -TINY])
NOT_NEGATIVE = ([0.0, TINY, 0.5, 1e6], [-TINY, -1.0])
BELOW_ONE = ([0.0, 0.5, 1 - 2**-53], [-TINY, 1.0, 2.0])
UP_TO_ONE = ([TINY, 0.5, 1.0], [0.0, 1.0 + 2**-50, 2.0])
FROM_ONE = ([1.0, 1.5, 1e6], [1 - 2**-53, 0.0, -1.0])

RANGES: dict[str, tuple[Callable[[Any], Any], tuple[list[float], list[float]]]] = {
    "lr": (lambda value: hfta.sgd(lr=value), NOT_NEGATIVE),
    "momentum": (lambda value: hfta.sgd(lr=0.1, momentum=value), NOT_NEGATIVE),
    "weight_decay": (lambda value: hfta.adam(weight_decay=value), NOT_NEGATIVE),
    "beta1": (lambda value: hfta.adam(betas=(value, 0.9)), BELOW_ONE),
    "beta2": (lambda value: hfta.adam(betas=(0.9, value)), BELOW_ONE),
    "eps": (lambda value: hfta.adam(eps=value), NOT_NEGATIVE),
    "rho": (lambda value: hfta.adadelta(rho=value), BELOW_ONE),
    "alpha": (lambda value: hfta.rmsprop(alpha=value), BELOW_ONE),
    "momentum_decay": (lambda value: hfta.nadam(momentum_decay=value), NOT_NEGATIVE),
    "lr_decay": (lambda value: hfta.adagrad(lr_decay=value), NOT_NEGATIVE),
    "etaminus": (lambda value: hfta.rprop(etas=(value, 1.2)), UP_TO_ONE),
    "etaplus": (lambda value: hfta.rprop(etas=(0.5, value)), FROM_ONE),
    "beta2_decay": (lambda value: hfta.adafactor(beta2_decay=value), ([0.0, -TINY, -0.8], [TINY, 0.5])),
    "eps1": (lambda value: hfta.adafactor(eps=(value, 1e-3)), NOT_NEGATIVE),
    "eps2": (lambda value: hfta.adafactor(eps=(None, value)), NOT_NEGATIVE),
    "d": (lambda value: hfta.adafactor(d=value), FROM_ONE),
    "initial_accumulator_value": (lambda value: hfta.adagrad(initial_accumulator_value=value), NOT_NEGATIVE),
    "init_scale": (lambda value: hfta.step.LossScale(value), POSITIVE),
    "growth_factor": (lambda value: hfta.step.LossScale(growth_factor=value), FROM_ONE),
    "backoff_factor": (lambda value: hfta.step.LossScale(backoff_factor=value), UP_TO_ONE),
    "growth_interval": (lambda value: hfta.step.LossScale(growth_interval=value), FROM_ONE),
    "max_norm": (hfta.clip_grad_norm, POSITIVE),
    "clip_value": (hfta.clip_grad_value, POSITIVE),
    "every": (lambda value: hfta.accumulate(hfta.sgd(), every=value), FROM_ONE),
    "decay": (hfta.ema, BELOW_ONE),
    "step_size": (lambda value: hfta.sgd(schedules.step_lr(0.1, value)), POSITIVE),
    "T_max": (lambda value: hfta.sgd(schedules.cosine(0.1, value)), POSITIVE),
    "T_0": (lambda value: hfta.sgd(schedules.cosine_restarts(0.1, value)), POSITIVE),
    "T_mult": (lambda value: hfta.sgd(schedules.cosine_restarts(0.1, 3, value)), FROM_ONE),
    "total_iters": (lambda value: hfta.sgd(schedules.linear(0.1, value)), POSITIVE),
    "total_steps": (lambda value: hfta.sgd(schedules.one_cycle(0.1, value)), POSITIVE),
    "div_factor": (lambda value: hfta.sgd(schedules.one_cycle(0.1, 9, div_factor=value)), POSITIVE),
    "final_div_factor": (lambda value: hfta.sgd(schedules.one_cycle(0.1, 9, final_div_factor=value)), POSITIVE),
    "pct_start": (lambda value: hfta.sgd(schedules.one_cycle(0.1, 9, pct_start=value)), BELOW_ONE),
    "steps": (lambda value: hfta.sgd(schedules.warmup(0.1, value)), POSITIVE),
}


@pytest.mark.parametrize("name", RANGES)
def test_where_ranges_end(name: str) -> None:
    make, (accepted, refused) = RANGES[name]
    for value in accepted:
        make(value)
        make([value, accepted[0]])
        make(torch.tensor([value], dtype=torch.float64))
    for value in [*refused, float("nan"), float("inf"), -float("inf")]:
        with pytest.raises(hfta.errors.HyperparameterError, match=name) as one:
            make(value)
        assert "model" not in str(one.value)
        with pytest.raises(hfta.errors.HyperparameterError, match=f"model 1: .*{name}"):
            make([accepted[0], value])
    # A table of numbers is outside of every range.
    with pytest.raises(hfta.errors.HyperparameterError, match=name):
        make([[accepted[0]], [accepted[0]]])


def test_texts_are_short() -> None:
    """Of optimizers and schedules, what was called."""
    adam = hfta.adamw(lr=[0.1, 0.2, 0.3])
    whole = hfta.chain(hfta.clip_grad_norm(1.0), adam)
    assert repr(whole) == "chain(clip_grad_norm(1.0), adamw(lr=[0.1, 0.2, 0.3]))"
    assert repr(hfta.sgd(schedules.cosine([0.1] * 99, T_max=10))) == (
        "sgd(cosine([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, ...], T_max=10))"
    )
    assert repr(hfta.sgd(lr=torch.ones(3))) == "sgd(lr=tensor([1., 1., 1.]))"
