"""Every function of torch.nn.functional, on every sample of PyTorch's own table, over members that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import hfta_func as hfta
from oracle import M, assert_array_is_loop, for_every, stack

PREFIX = "nn.functional."


def _name(op: OpInfo) -> str:
    return f"{op.name.removeprefix(PREFIX)} {op.variant_test_name}".strip()


ROWS = [
    pytest.param(op, dtype, id=f"{_name(op)}-{str(dtype).removeprefix('torch.')}")
    for op in op_db
    if op.name.startswith(PREFIX)
    for dtype in (torch.float64, torch.float32)
    if dtype in op.dtypes
]

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
LOOSER = {
    # Scores in the thousands go through an exponential.
    "multi_head_attention_forward": 10,
}

CLASS_WEIGHTS = {"weight"}
RUNNING = {"running_mean", "running_var"}
CONSTANTS: dict[str, set[Any]] = {
    "batch_norm": {1, 2},
    "binary_cross_entropy": CLASS_WEIGHTS,
    "binary_cross_entropy_with_logits": CLASS_WEIGHTS | {"pos_weight"},
    "cross_entropy": CLASS_WEIGHTS,
    "fractional_max_pool2d": {"_random_samples"},
    "instance_norm": RUNNING,
    "linear_cross_entropy": CLASS_WEIGHTS,
    "multi_margin_loss": CLASS_WEIGHTS,
    "nll_loss": CLASS_WEIGHTS,
    "soft_margin_loss": {1},
}
"""Arguments, by place or name, that PyTorch does not differentiate."""

# What PyTorch says about some samples, to a member alone as well.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*linear_cross_entropy. ``options`` ignored",
        "Using padding='same' with even kernel lengths",
        "`nn.functional.upsample_.*` is deprecated",
        "dropout2d. Received a 3D input",
        "reduction. 'mean' divides the total loss by both the batch size and the support size",
    )
]

FORMS = ("all", "first", "rest")
"""Which tensors of a sample are per member; members share the others, such as data or frozen weights."""


def _batch_norm_updates(form: str, x: Any, mean: Any, *rest: Any, training: bool = False, **options: Any) -> bool:
    return form == "first" and training and mean is not None


def _instance_norm_updates(form: str, x: Any, running_mean: Any = None, **options: Any) -> bool:
    return form == "first" and options.get("use_input_stats", True) and running_mean is not None


EXPECTED_ERRORS: dict[str, tuple[Callable[..., bool], str]] = {
    "batch_norm": (
        _batch_norm_updates,
        "would update running statistics that all members share; pass the stacked buffers",
    ),
    "instance_norm": (_instance_norm_updates, "would update running statistics that all members share"),
}
"""What cannot exist per member: which samples, told by form and arguments, and the error that each of them raises."""

ONE_DRAW = {"max_unpool1d grad", "max_unpool2d grad", "max_unpool3d grad"}
"""Rows whose samples differ in number or shape from draw to draw: members are one draw, scaled."""


def _samples(op: OpInfo, dtype: torch.dtype) -> Iterator[tuple[str, tuple[str, list[Any]]]]:
    """The arguments of each sample, ``((input, *args), kwargs)``, drawn once for every member, in every form."""
    draws = []
    for member in range(M):
        torch.manual_seed(0 if _name(op) in ONE_DRAW else member)
        # Not op.sample_inputs, which sets a seed of its own.
        drawn = op.sample_inputs_func(op, "cpu", dtype, requires_grad=False)
        draws.append([((sample.input, *sample.args), sample.kwargs) for sample in drawn])
    for index, members in enumerate(zip(*draws, strict=True)):
        count = sum(isinstance(x, Tensor) for x in optree.tree_leaves(members[0]))
        for form in FORMS if count > 1 else FORMS[:1]:
            yield f"sample {index} {_shapes(members[0])} with {form} per member", (form, list(members))


def _shapes(sample: Any) -> Any:
    return optree.tree_map(lambda x: list(x.shape) if isinstance(x, Tensor) else x, sample)


def _require_gradients(op: OpInfo, sample: Any) -> None:
    constants = CONSTANTS.get(op.name.removeprefix(PREFIX), ())
    paths, leaves, _ = optree.tree_flatten_with_path(sample)
    for path, x in zip(paths, leaves, strict=True):
        if isinstance(x, Tensor) and x.is_floating_point() and path[-1] not in constants:
            x.requires_grad_()


def _check(op: OpInfo, dtype: torch.dtype, form: str, sample: list[Any]) -> None:
    args, options = sample[0]
    # PyTorch has no gradient of a sparse embedding scaled by frequency.
    if dtype == torch.float64 and not (options.get("sparse") and options.get("scale_grad_by_freq")):
        _require_gradients(op, (args, options))
    tolerance = TOLERANCES[dtype] * LOOSER.get(op.name.removeprefix(PREFIX), 1)
    tensors, rebuild = stack(sample)
    in_dims = [0 if form == "all" or (form == "first") == (place == 0) else None for place in range(len(tensors))]
    inputs = [
        _distinct(x) if dim == 0 else x.detach()[0].requires_grad_(x.requires_grad)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]

    def array(key: Tensor, *tensors: Tensor) -> Any:
        args, kwargs = rebuild(tensors)
        with hfta.calls.routed(key):
            return op.op(*args, **kwargs)

    def alone(member: int, *tensors: Tensor) -> Any:
        args, kwargs = rebuild(tensors)
        return op.op(*args, **kwargs)

    refused, match = EXPECTED_ERRORS.get(op.name.removeprefix(PREFIX), (None, ""))
    if refused is not None and refused(form, *args, **options):
        with pytest.raises(hfta.errors.TraceError, match=match):
            assert_array_is_loop(array, alone, inputs, tolerance, in_dims)
    else:
        assert_array_is_loop(array, alone, inputs, tolerance, in_dims)


def _distinct(x: Tensor) -> Tensor:
    """Members that the table gave the same values, scaled."""
    if not x.is_floating_point() or not torch.equal(x, x[:1].expand_as(x)):
        return x
    factors = torch.tensor([1.0, 1.125, 1.25], dtype=x.dtype).reshape(M, *(1,) * (x.dim() - 1))
    return (x.detach() * factors).requires_grad_(x.requires_grad)


@pytest.mark.exhaustive(ids="-float32|^multi_head|^max_unpool|^max_pool3d|^linear_cross_entropy.chunked")
@pytest.mark.sampled(every=24)
@pytest.mark.parametrize(("op", "dtype"), ROWS)
def test_functional(op: OpInfo, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # The table has functions that draw do so from the same seed at every call.
    monkeypatch.setattr(
        common_methods_invocations, "wrapper_set_seed", lambda func, *args, **named: func(*args, **named)
    )
    for_every(_samples(op, dtype), lambda sample: _check(op, dtype, *sample))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("run", [lambda apply: apply, lambda apply: torch.compile(apply, backend="eager")])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_name_that_the_model_does_not_know(run):
    apply = hfta.functional(torch.nn.Linear(2, 2))
    with pytest.raises(Exception, match="no parameter or buffer 'wieght'"):
        run(apply)({"wieght": torch.zeros(2, 2)}, {}, torch.zeros(2))
