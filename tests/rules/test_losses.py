"""Losses and look-up tables beyond the contract of rules: what only runs eagerly, autocast, memory, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hfta_func as hfta
from rule_cases import RuleCase
from rule_checks import check_against_loop
from ways import assert_as_alone

M = 3


def _ctc_inputs(joined: bool, lengths: bool) -> tuple[Tensor, ...]:
    """Log probabilities ``[T,N,C]``, targets, and lengths; targets in one row have the same total for every member."""
    ends = torch.tensor([2, 3, 1])[torch.randperm(3)] if lengths else torch.tensor([2, 3, 1])
    targets = torch.randint(1, 5, (6,) if joined else (3, 4))
    return torch.randn(8, 3, 5, dtype=torch.float64), targets, *((torch.randint(5, 9, (3,)), ends) if lengths else ())


def _ctc(**options: Any) -> Callable[..., Tensor]:
    def func(x: Tensor, targets: Tensor, *lengths: Any) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), targets, *(lengths or ([8, 5, 7], [2, 3, 1])), **options)

    return func


CTC = [
    RuleCase(f"{'joined ' * joined}{reduction}", _ctc(reduction=reduction), lambda j=joined: _ctc_inputs(j, True))
    for joined in (False, True)
    for reduction in ("mean", "sum", "none")
] + [
    RuleCase("lists", _ctc(), lambda: _ctc_inputs(False, False)),
    RuleCase("joined lists", _ctc(reduction="none"), lambda: _ctc_inputs(True, False)),
    RuleCase(
        "of one sample",
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, [7], [3], blank=4),
        lambda: (torch.randn(8, 5, dtype=torch.float64), torch.randint(4, (3,))),
    ),
    RuleCase(
        "too short",
        lambda x, y, n: F.ctc_loss(x.log_softmax(-1), y, n, torch.tensor([2, 3]), zero_infinity=True),
        lambda: (torch.randn(8, 2, 5).double(), torch.ones(2, 3).long(), torch.randint(2, 8, (2,))),
    ),
]


@pytest.mark.parametrize("case", CTC, ids=lambda case: case.name)
def test_ctc_loss_is_that_of_a_loop(case: RuleCase) -> None:
    for mask in itertools.product((True, False), repeat=len(case.make())):
        if any(mask):
            check_against_loop(case, mask)


def test_ctc_loss_with_the_gradient_inside_vmap() -> None:
    columns = [torch.stack(column) for column in zip(*(_ctc_inputs(True, True) for _ in range(M)), strict=True)]
    grad = torch.func.grad(_ctc())
    expected = torch.stack([grad(*member) for member in zip(*columns, strict=True)])
    torch.testing.assert_close(hfta.vmap(grad)(*columns), expected, rtol=1e-11, atol=1e-11)


class Watch(TorchDispatchMode):
    """Which operators write a new tensor of at least ``size`` entries."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.numel() >= self.size and not func.is_view:
            self.calls.append(func.name())
        return output


@pytest.mark.parametrize("transform", ["outside", "inside"])
def test_cross_entropy_writes_no_more_tensors_than_a_solo_run(transform: str) -> None:
    logits, classes = torch.randn(M, 16, 100, requires_grad=True), torch.randint(100, (M, 16))
    with Watch(logits[0].numel()) as solo:
        F.cross_entropy(logits.detach()[0].requires_grad_(), classes[0]).backward()
    with Watch(logits[0].numel()) as array:
        if transform == "outside":
            hfta.vmap(F.cross_entropy)(logits, classes).sum().backward()
        else:
            hfta.vmap(torch.func.grad(F.cross_entropy))(logits.detach(), classes)
    assert array.calls == solo.calls


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("classes", [1, 2, 10, 40, 300, 1500])
def test_cross_entropy_of_any_number_of_classes_is_that_of_a_loop(classes: int, dim: int) -> None:
    logits, target = torch.randn(M, 70, classes, dtype=torch.float64) * 9, torch.randint(classes, (M, 70))
    logits[0, 1, 1:], logits[1, 2], target[2, ::3] = -torch.inf, torch.nan, -100
    given = logits.movedim(0, dim).contiguous().requires_grad_()
    found = hfta.vmap(F.cross_entropy, in_dims=(dim, 0))(given, target)
    (gradient,) = torch.autograd.grad(found.sum(), given)
    expected = torch.stack([F.cross_entropy(*member) for member in zip(logits.requires_grad_(), target, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient.movedim(dim, 0), wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    target[1, 5] = classes
    with pytest.raises(IndexError, match=f"Target {classes} is out of bounds"):
        hfta.vmap(F.cross_entropy, in_dims=(dim, 0))(given, target)


MANY_CLASSES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "rows": ((6, 1500), (6,), {}),
    "one row": ((1500,), (), {}),
    "images": ((2, 1500, 3), (2, 3), {"reduction": "sum"}),
    "losses of all rows": ((6, 1500), (6,), {"reduction": "none"}),
    "weights": ((6, 1500), (6,), {"weight": torch.rand(1500, dtype=torch.float64)}),
    "weights of members": ((6, 1500), (6,), {"weight": torch.rand(M, 1500, dtype=torch.float64)}),
    "smoothed": ((6, 1500), (6,), {"label_smoothing": 0.1}),
}


@pytest.mark.sampled(every=15)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", MANY_CLASSES)
def test_compiled_cross_entropy_of_many_classes_is_that_of_a_loop(name: str, dim: int) -> None:
    torch.compiler.reset()
    shape, rows, options = MANY_CLASSES[name]
    logits, classes = torch.randn(M, *shape, dtype=torch.float64), torch.randint(4, (M, *rows))
    weight = options.get("weight")
    weights = [None] * M if weight is None else [*weight] if weight.dim() > 1 else [weight] * M

    def loss(logits: Tensor, classes: Tensor, weight: Tensor | None) -> Tensor:
        return F.cross_entropy(logits, classes, ignore_index=3, **{**options, "weight": weight})

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        in_dims = dim, 0, 0 if weight is not None and weight.dim() > 1 else None
        losses = hfta.vmap(loss, in_dims=in_dims)(logits.movedim(0, dim), classes, weight)
        return losses.sum(), losses

    grads, losses = torch.compile(torch.func.grad(run, has_aux=True), fullgraph=True, backend="aot_eager")(logits)
    for member, own in enumerate(zip(classes, weights, strict=True)):
        grad = torch.func.grad(lambda x, own=own: loss(x, *own).sum())(logits[member])
        same = {"rtol": 1e-11, "atol": 1e-13, "equal_nan": True}
        torch.testing.assert_close(grads[member], grad, **same)
        torch.testing.assert_close(losses[member], loss(logits[member], *own), **same)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense(kind: Any, count: int) -> None:
    assert_as_alone(lambda: kind(7, 4, sparse=True), torch.randint(7, (3, 5, 2)), "together", count, tolerance=1e-5)


def test_gaussian_nll_loss_takes_small_variances_for_eps() -> None:
    x, y = torch.randn(M, 4), torch.randn(M, 4)
    var = torch.tensor([1e-9, 0.0, 0.5, torch.inf]).expand(M, 4).clone().requires_grad_()
    expected = torch.stack([F.gaussian_nll_loss(*member, reduction="none") for member in zip(x, y, var, strict=True)])
    got = hfta.vmap(lambda *a: F.gaussian_nll_loss(*a, reduction="none"))(x, y, var)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss[:, :3].sum(), var)[0] for loss in (got, expected)))
