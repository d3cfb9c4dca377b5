"""A member with values that a function refuses, such as a singular matrix, is reported; the others train on unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg, nn

import hfta_func as hfta

M, BAD, SIZE = 3, 1, 3
NAN, INF = float("nan"), float("inf")


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64))


class Case(NamedTuple):
    name: str
    loss: Callable[[Tensor], Tensor]
    bad: tuple[float, ...] = (NAN, INF)  # what the bad member is filled with
    compiles: bool = True


def spd(x: Tensor) -> Tensor:
    return x @ x.mT


def sym(x: Tensor) -> Tensor:
    return x + x.mT


def corners(x: Tensor) -> Tensor:
    """Places in an image, ``[1, 3, 1, 2]``."""
    return x[None, :, None, :2].tanh()


ONES = torch.ones(SIZE, dtype=torch.float64)
CASES = [
    Case("linalg.cholesky", lambda x: linalg.cholesky(spd(x)).sum(), (NAN, INF, 0.0)),
    Case("linalg.inv", lambda x: linalg.inv(x).sum(), (NAN, 0.0, 2.0)),
    Case("torch.inverse", lambda x: torch.inverse(x).sum(), (0.0,)),
    Case("linalg.solve", lambda x: linalg.solve(x, ONES).sum(), (NAN, 0.0)),
    Case("linalg.solve of matrices", lambda x: linalg.solve(x, ONES.diag(), left=False).sum(), (0.0,)),
    Case("linalg.slogdet", lambda x: linalg.slogdet(x).logabsdet, (NAN, 0.0), compiles=False),
    Case("linalg.svd", lambda x: linalg.svd(x)[1].sum()),
    Case("linalg.eigh", lambda x: linalg.eigh(sym(x)).eigenvectors.abs().sum(), (NAN, INF, 0.0)),
    Case("linalg.eigvalsh", lambda x: linalg.eigvalsh(sym(x))[0]),
    Case("linalg.eig", lambda x: linalg.eig(x)[0].abs().sum()),
    Case("linalg.pinv", lambda x: linalg.pinv(x).sum()),
    Case("linalg.matrix_rank", lambda x: x.sum() * linalg.matrix_rank(x)),
    Case("linalg.cond", lambda x: linalg.cond(x)),
    Case("linalg.qr", lambda x: linalg.qr(x).R.sum(), (NAN, 0.0)),
    Case("F.binary_cross_entropy",
         lambda x: F.binary_cross_entropy(x.abs() / 4, torch.full_like(x, 0.3)), (NAN, INF, 5.0)),
    Case("F.binary_cross_entropy of targets",
         lambda x: F.binary_cross_entropy((x.detach() * 0 + 0.5).nan_to_num(0.5), x.abs() / 4), (NAN, 5.0)),
    Case("F.grid_sample",
         lambda x: F.grid_sample(x[None, None], corners(x), padding_mode="border", align_corners=False).sum(), (NAN,)),
]  # fmt: skip
PLACES = {"array": {}, "one by one": {"chunk_size": 1}, "compiled": {}}
Run = Callable[[Tensor], tuple[hfta.step.TrainState, dict[str, Tensor]]]


def stepping(loss: Callable[[Tensor], Tensor], place: str, **options: Any) -> Run:
    """One step from given weights."""
    step: Any = hfta.make_train_step(
        Weights(), lambda model, batch: loss(model.weight), hfta.sgd(lr=0.1), **PLACES[place], **options
    )
    run = step
    if place == "compiled":
        torch._dynamo.reset()
        run = torch.compile(step, backend="aot_eager", fullgraph=True)
    return lambda weights: run(step.init({"weight": weights}, {}, seeds=range(len(weights))), None)


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=9)
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning", "ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_member_ends_no_other(case: Case, place: str) -> None:
    if place == "compiled" and not case.compiles:
        pytest.skip("the compiler does not know this operator, or its gradient solves for all members at once")
    torch.manual_seed(3)
    weights = torch.randn(M, SIZE, SIZE, dtype=torch.float64)
    run, run_alone = stepping(case.loss, place), stepping(case.loss, "array")
    expected, good = run(weights)
    assert good["failure"].tolist() == [0] * M
    for value in case.bad:
        spoiled = weights.clone()
        spoiled[BAD] = value
        if not torch.isfinite(torch.tensor(value)):
            # One bad entry of many is enough.
            spoiled[BAD] = weights[BAD]
            spoiled[BAD, 0, 1] = value
        state, metrics = run(spoiled)
        assert [code > 0 for code in metrics["failure"].tolist()] == [member == BAD for member in range(M)], value
        assert torch.equal(state.params["weight"][BAD].nan_to_num(), spoiled[BAD].nan_to_num())
        for member in {*range(M)} - {BAD}:
            assert torch.equal(state.params["weight"][member], expected.params["weight"][member]), (value, member)
            assert torch.equal(metrics["loss"][member], good["loss"][member])
            # And what a member alone would be.
            alone, _ = run_alone(weights[member : member + 1])
            torch.testing.assert_close(state.params["weight"][member], alone.params["weight"][0])
        _, alone = run_alone(spoiled[BAD : BAD + 1])
        assert alone["failure"].tolist() == [metrics["failure"][BAD].item()]


@pytest.mark.parametrize("num_models", [1, M])
def test_what_becomes_of_a_bad_member_is_the_step_s_choice(num_models: int) -> None:
    weights = torch.zeros(num_models, SIZE, SIZE, dtype=torch.float64)
    weights[1:] = torch.eye(SIZE)
    (loss,) = (case.loss for case in CASES if case.name == "linalg.inv")
    state, _ = stepping(loss, "array", nonfinite="freeze")(weights)
    assert state.active.tolist() == [False] + [True] * (num_models - 1)
    with pytest.raises(hfta.errors.NonFiniteError, match="model 0: the loss is not finite"):
        stepping(loss, "array", nonfinite="raise")(weights)


def test_a_bad_matrix_in_a_batch_of_a_member_makes_the_member_bad() -> None:
    for call, bad in ((linalg.inv, 0.0), (linalg.cholesky, -1.0), (linalg.svdvals, NAN)):
        weights = torch.eye(SIZE).double().expand(M, SIZE, SIZE).clone()
        weights[BAD, 0, 0] = bad
        values = hfta.vmap(lambda x, call=call: call(torch.stack([x, torch.eye(SIZE).double()])))(weights)
        assert values.isnan().flatten(1).all(1).tolist() == [member == BAD for member in range(M)]


def test_the_norm_of_a_result_compiles() -> None:
    for call in (lambda x: (x * 2).norm(dim=0), lambda x: (x * 2).norm("nuc"), lambda x: x.norm()):
        torch._dynamo.reset()
        x = torch.randn(M, SIZE, SIZE)
        compiled = torch.compile(hfta.vmap(call), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), torch.stack([call(row) for row in x]))
