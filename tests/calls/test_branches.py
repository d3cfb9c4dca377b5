"""Models that branch on values: members run as one while they agree, and in groups where they do not."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from ways import assert_as_alone, loss, start

pytestmark = pytest.mark.usefixtures("one_thread")

M = 5


class Branching(nn.Module):
    def __init__(self, branch: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.inner, self.outer, self.branch = nn.Linear(4, 4, bias=False), nn.Linear(4, 1), branch
        self.relu, self.norm, self.dropout = nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        # What is written in place before members part must not be written twice.
        y = self.norm(self.inner(self.relu(x)))
        return self.outer(self.dropout(self.branch(x, y)))


def by_if(x: Tensor, y: Tensor) -> Tensor:
    if x.sum() > 19:
        return y * 2
    return y.tanh()


def by_while(x: Tensor, y: Tensor) -> Tensor:
    while y.square().sum() < 130 + 10 * x.sum():
        y = y * 1.25
    return y


def by_words(x: Tensor, y: Tensor) -> Tensor:
    total = x.sum()
    return y if not (total > 20 or (total < 18 and total > 16)) else -y


def by_numbers(x: Tensor, y: Tensor) -> Tensor:
    return y * (1 if x.sum() - x.sum() else 3) if (x[0, 0] > 0.5).logical_not() else y


def by_every_row(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([row if own.sum() > 1.5 else -row for own, row in zip(x, y, strict=True)])


BRANCHES = [by_if, by_while, by_words, by_numbers, by_every_row]


def array(branch: Callable[..., Tensor], **options: Any) -> tuple[list[Branching], Any, Any]:
    members = [Branching(branch).double() for _ in range(M)]
    return members, *start(members, loss, hfta.sgd(lr=[0.01, 0.02, 0.03, 0.04, 0.05]), **options)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(
    ("way", "options"),
    [("together", {}), ("in pairs", {}), ("together", {"checkpoint": ["inner"]}), ("evaluated", {})],
    ids=str,
)
@pytest.mark.parametrize("branch", BRANCHES)
def test_member_i_takes_its_own_side(branch: Callable[..., Tensor], way: str, options: dict[str, Any]) -> None:
    batch = torch.randn(M, 12, 4, dtype=torch.float64)
    batch[::2, 0, 0] = 1
    before = batch.clone()
    with pytest.warns(
        hfta.errors.LoopWarning, match="branches on the value of a tensor, and members with different values run"
    ):
        assert_as_alone(lambda: Branching(branch).double(), batch, way, M, **options)
    assert torch.equal(batch, before)


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_members_that_agree_stay_together(value: float) -> None:
    calls = []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return by_if(x, y)

    members, step, state = array(counted)
    batch = torch.full((M, 12, 4), value, dtype=torch.float64)
    batch += torch.randn_like(batch) * 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, metrics = step(state, batch)
    assert len(calls) == 1
    for i, member in enumerate(members):
        torch.testing.assert_close(metrics["loss"][i], loss(member, batch[i].clone()), rtol=1e-10, atol=0)


def test_members_part_into_as_few_groups_as_neighbours_allow() -> None:
    sizes = []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        side = bool(x.sum() > 0)
        sizes.append(side)
        return y * 2 if side else y

    _, step, state = array(counted, verify=False)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    with pytest.warns(hfta.errors.LoopWarning):
        step(state, signs[:, None, None] * torch.rand(M, 12, 4, dtype=torch.float64))
    assert sizes == [True, False, True]


def test_an_assertion_that_fails_for_one_member_is_the_users_own_error() -> None:
    def asserts(x: Tensor, y: Tensor) -> Tensor:
        assert x.max() < 100, "too large"
        return y

    _, step, state = array(asserts)
    batch = torch.rand(M, 12, 4, dtype=torch.float64)
    step(state, batch)
    batch[3, 0, 0] = 1000
    with pytest.warns(hfta.errors.LoopWarning), pytest.raises(AssertionError, match="too large"):
        step(state, batch)


def test_more_than_one_number_has_no_truth() -> None:
    _, step, state = array(lambda x, y: y if x > 0 else -y)
    batch = torch.rand(M, 12, 4, dtype=torch.float64)
    for index in ([0], range(M)):
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
            step(hfta.take(state, index), batch[list(index)])


def test_the_warning_names_the_line() -> None:
    _, step, state = array(by_if)
    line = inspect.getsourcelines(by_if)[1] + 1
    where = f"the model (Branching), by_if ({__file__}:{line}) branches on"
    with pytest.warns(hfta.errors.LoopWarning, match=re.escape(where)):
        step(state, torch.randn(M, 12, 4, dtype=torch.float64) / 10 + torch.arange(M)[:, None, None] / 8)


def test_vmap_alone_refuses_members_that_disagree() -> None:
    run = hfta.vmap(hfta.functional(nn.Sequential(Branching(by_if))))
    stacked = hfta.stack_params([nn.Sequential(Branching(by_if)) for _ in range(M)])
    batch = torch.rand(M, 12, 4) * torch.arange(M)[:, None, None]
    with pytest.raises(hfta.errors.TraceError, match=r"by_if \(.*\), branches on the value of a tensor"):
        run(*stacked, batch)


@pytest.mark.parametrize("count", [1, 3])
def test_a_branch_below_a_vmap_of_the_model_is_refused_in_chunks(count: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return torch.vmap(lambda x, y: y if x.sum() > 0 else -y)(x, model(x)).square().mean()

    step, state = start([nn.Linear(4, 4) for _ in range(count)], loss, hfta.sgd(lr=0.1), chunk_size=1)
    with pytest.raises(hfta.errors.TraceError, match=r"below a vmap of the model's own; use torch\.where"):
        step(state, torch.linspace(-9, 9, 20).reshape(5, 4).expand(count, 5, 4))
