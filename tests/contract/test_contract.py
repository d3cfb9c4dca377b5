"""The invariants of an array, on whole trajectories of three workloads with members that differ in everything."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hfta_func as hfta
from cases import OPTIMIZERS, WORKLOADS, OptimizerCase, batches, loss_fn, models, ours, theirs
from comparisons import identical
from hfta_func.testing import assert_matches_solo
from schedule_cases import LR, SCHEDULES
from ways import start, train_solo

M, STEPS = 3, 50
SEEDS = [11, 7, 1002]


def _array(
    name: str,
    case: OptimizerCase = OPTIMIZERS[-2],
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[list[nn.Module], hfta.step.TrainStep, hfta.step.TrainState]:
    members = models(name, M, dropout, dtype)
    return members, *start(members, loss_fn, ours(case), SEEDS, **options)


def _largest_difference(a: Any, b: Any) -> float:
    """Over all leaves, relative to the largest magnitude of the leaf; NaN, which no bound allows, if any leaf has one."""
    pairs = list(zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))
    assert all(torch.equal(x, y) for x, y in pairs if not y.is_floating_point())
    floating = [(x.double(), y.double()) for x, y in pairs if y.is_floating_point()]
    # Python's max() would skip a NaN.
    return float(torch.stack([(x - y).abs().max() / y.abs().max().clamp(min=1e-30) for x, y in floating]).max())


@pytest.mark.sampled(every=16)
@pytest.mark.exhaustive(ids="cnn|transformer", unless="^adamw-|^muon")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OPTIMIZERS])
def test_members_are_the_runs_of_torch(name: str, case: OptimizerCase) -> None:
    members, step, state = _array(name, case)
    optimizers = [theirs(case, i, member.parameters()) for i, member in enumerate(members)]
    for batch in batches(M, STEPS):
        state, metrics = step(state, batch)
        for i, (member, optimizer) in enumerate(zip(members, optimizers, strict=True)):
            (loss,) = train_solo(member, loss_fn, optimizer, [(batch[0][i], batch[1][i])])
            torch.testing.assert_close(metrics["loss"][i], loss, rtol=1e-9, atol=0)
    for mine, theirs_ in zip(hfta.unstack_params(members[0], state.params, state.buffers), members, strict=True):
        assert _largest_difference(mine.state_dict(), theirs_.state_dict()) <= 1e-10


# SequentialLR itself calls scheduler.step(epoch), which torch deprecates.
@pytest.mark.sampled(every=14)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OPTIMIZERS])
def test_every_optimizer_follows_every_schedule(case: OptimizerCase, schedule: str) -> None:
    rates, make = SCHEDULES[schedule]
    knobs = {name: values for name, values in case.knobs.items() if name != "lr"}
    optimizer = ours(case._replace(ours=lambda **own: case.ours(lr=rates, **own), knobs=knobs))
    params = {"matrix": torch.randn(M, 4, 3), "vector": torch.randn(M, 5)}
    solo = [[nn.Parameter(param[i].clone()) for param in params.values()] for i in range(M)]
    others = [theirs(case._replace(knobs={**knobs, "lr": LR}), i, parameters) for i, parameters in enumerate(solo)]
    schedulers = [make(i, other) for i, other in enumerate(others)]
    state = optimizer.init(params)
    for _ in range(8):
        grads = {path: torch.randn_like(param) for path, param in params.items()}
        updates, state = optimizer.update(grads, state, params)
        params = hfta.apply_updates(params, updates)
        for i, parameters in enumerate(solo):
            for parameter, grad in zip(parameters, grads.values(), strict=True):
                parameter.grad = grad[i]
            others[i].step()
            schedulers[i].step()
    for param, column in zip(params.values(), zip(*solo, strict=True), strict=True):
        torch.testing.assert_close(param, torch.stack([x.detach() for x in column]), rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(every=5)
@pytest.mark.exhaustive(unless="^(sgd|lion)-mlp|^(adamw|muon)-")
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in OPTIMIZERS if "amsgrad" not in case.options]
)
def test_members_with_dropout_are_arrays_of_one(name: str, case: OptimizerCase) -> None:
    _, step, state = _array(name, case, dropout=0.3)
    after = assert_matches_solo(step, state, batches(M, STEPS), rtol=1e-10)
    assert not identical(after.params, state.params)
    assert after.step.tolist() == [STEPS] * M


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", WORKLOADS)
def test_float32_members_are_arrays_of_one(name: str) -> None:
    # SGD, because Adam scales up the rounding noise of small gradients.
    _, step, state = _array(name, OPTIMIZERS[1], dropout=0.3, dtype=torch.float32)
    assert_matches_solo(step, state, batches(M, 10, dtype=torch.float32), rtol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WORKLOADS)
def test_compiled_once_and_equal(name: str) -> None:
    torch._dynamo.reset()
    _, step, state = _array(name, dropout=0.3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    assert_matches_solo(step, state, batches(M, 4), run=compiled, rtol=1e-9)
    changed = hfta.with_hyperparams(state, lr=[0.02, 0.01, 0.005], weight_decay=0.3)
    assert_matches_solo(step, changed, batches(M, 2), members=[1], run=compiled, rtol=1e-9)
    assert counter.frame_count == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [None, True])
def test_masks_of_transformers_are_not_looked_at(given: bool | None) -> None:
    torch._dynamo.reset()
    members = [nn.Transformer(8, 2, 1, 1, 8, 0.0, batch_first=True).double() for _ in range(M)]
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    options = {"src_mask": mask, "src_is_causal": given, "tgt_mask": mask, "tgt_is_causal": given}

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x, x, **options).square().mean()

    step, state = start(members, loss, hfta.sgd(lr=0.1))
    batch = torch.randn(M, 3, 4, 8, dtype=torch.float64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for run in (step, compiled):
        for i, member in enumerate(members):
            torch.testing.assert_close(run(state, batch)[1]["loss"][i], loss(member, batch[i]), rtol=1e-10, atol=0)


@pytest.mark.exhaustive
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    members, step, state = _array("cnn", dropout=0.3)
    compiled = torch.compile(step, fullgraph=True)
    assert_matches_solo(step, state, batches(M, 10), run=compiled, rtol=1e-10)
    (batch,) = batches(M, 1)
    batch[0][1] = float("nan")
    after, metrics = compiled(state, batch)
    assert metrics["finite"].tolist() == [True, False, True]
    assert identical(hfta.take(after.params, [1]), hfta.take(state.params, [1]))
    assert len(hfta.unstack_params(members[0], after.params, after.buffers)) == M


def test_an_array_of_arrays() -> None:
    _, step, state = _array("mlp", dropout=0.3)
    other = hfta.with_hyperparams(state._replace(keys=state.keys + 1), lr=[0.001, 0.002, 0.003])
    first, second = batches(M, 2)
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), state, other)
    both = optree.tree_map(lambda *leaves: torch.stack(leaves), first, second)
    nested, _ = hfta.vmap(step)(stacked, both)
    for i, (before, batch) in enumerate(((state, first), (other, second))):
        alone, _ = step(before, batch)
        assert _largest_difference(optree.tree_map(lambda leaf, i=i: leaf[i], nested), alone) <= 1e-10


@pytest.mark.exhaustive
def test_tables_with_max_norm_are_the_runs_of_torch() -> None:
    # Such a table rescales its rows in place, before it reads them.
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 4, max_norm=0.8), nn.Flatten(), nn.Linear(12, 2)).double()

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens).square().mean()

    members = [make() for _ in range(M)]
    step, state = start(members, loss_fn, hfta.sgd(lr=[0.1, 0.2, 0.3]), SEEDS)
    optimizers = [
        torch.optim.SGD(member.parameters(), lr=lr) for member, lr in zip(members, (0.1, 0.2, 0.3), strict=True)
    ]
    for _ in range(5):
        tokens, before = torch.randint(7, (M, 5, 3)), {path: param.clone() for path, param in state.params.items()}
        after, _ = step(state, tokens)
        assert identical(state.params, before)
        compiled, _ = torch.compile(step, fullgraph=True, backend="aot_eager")(state, tokens)
        assert _largest_difference(compiled.params, after.params) <= 1e-12
        state = after
        for member, optimizer, own in zip(members, optimizers, tokens, strict=True):
            train_solo(member, loss_fn, optimizer, [own])
    for mine, theirs_ in zip(hfta.unstack_params(members[0], *state[:2]), members, strict=True):
        assert _largest_difference(mine.state_dict(), theirs_.state_dict()) <= 1e-10
    # Evaluation rescales rows of a copy.
    before = state.params["0.weight"].clone()
    rows = hfta.make_eval_step(members[0], lambda model, i: {"rows": model(i)})(state, tokens[0])["rows"]
    torch.testing.assert_close(rows, torch.stack([member(tokens[0]) for member in members]).detach())
    assert torch.equal(state.params["0.weight"], before)
