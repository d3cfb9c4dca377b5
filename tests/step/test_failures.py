"""Members that fail, and steps that write the state they are given."""

from __future__ import annotations

import itertools
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import hfta_func as hfta
from cases import WORKLOADS, batches, loss_fn, models
from comparisons import identical
from hfta_func._kernels.native import compiler
from hfta_func.step import Failure, commit

M = 3
SEEDS = [11, 7, 1002]


def _array(name: str = "cnn", **options: Any) -> tuple[hfta.step.TrainStep, hfta.step.TrainState]:
    members = models(name, M, 0.3)
    step = hfta.make_train_step(members[0], options.pop("loss", loss_fn), hfta.adamw(lr=[1e-3, 1e-2, 3e-3]), **options)
    return step, step.init(*hfta.stack_params(members), seeds=SEEDS)


def _rooted(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Its gradient is infinite where the batch is 0, its value is not."""
    return (model(batch[0]) * batch[0].abs().amax()).abs().sum().sqrt()


def _poisoned(data: list[Any], number: int, member: int, value: float) -> list[Any]:
    spoilt = [(inputs.clone(), targets) for inputs, targets in data]
    spoilt[number][0][member] = value
    return spoilt


@pytest.mark.sampled(every=3)
@pytest.mark.exhaustive(ids="-True$")
@pytest.mark.parametrize(
    ("name", "nonfinite", "donate", "compiled"),
    [
        *itertools.product(WORKLOADS, ("skip", "freeze"), (False, True), (False,)),
        *(("mlp", "skip", False, True), ("cnn", "freeze", True, True), ("transformer", "skip", True, True)),
    ],
)
def test_failures_stay_where_they_happen(name: str, nonfinite: str, donate: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    step, start = _array(name, nonfinite=nonfinite, donate=donate)
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    data = batches(M, 5)
    states, failures = [], []
    for own in (data, _poisoned(data, 2, 1, float("nan"))):
        state = optree.tree_map(torch.clone, start)
        for number, batch in enumerate(own):
            before = hfta.take(state, [1])
            state, metrics = run(state, batch)
            if own is not data and number == 2:
                after = hfta.take(state, [1])
                assert identical(after[:3], before[:3])
                failures = metrics["failure"].tolist()
                assert metrics["finite"].tolist() == [True, False, True]
        states.append(state)
    healthy, sick = states
    # Eagerly, members are updated by other operators when one of them fails; all of them give the same bits.
    assert identical(hfta.take(sick, [0, 2]), hfta.take(healthy, [0, 2]))
    assert failures == [Failure.NONE, Failure.LOSS, Failure.NONE]
    assert sick.active.tolist() == [True, nonfinite == "skip", True]
    assert sick.step.tolist() == [5, 5 if nonfinite == "skip" else 3, 5]


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_cause(compiled: bool) -> None:
    torch._dynamo.reset()
    step, state = _array("mlp", loss=_rooted)
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    (batch,) = _poisoned(batches(M, 1), 0, 1, 0.0)
    (batch,) = _poisoned([batch], 0, 2, float("inf"))
    _, metrics = run(state, batch)
    assert metrics["failure"].tolist() == [Failure.NONE, Failure.GRADIENT, Failure.LOSS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("leaves", [3, 30])
def test_causes_in_a_transform(leaves: int) -> None:
    torch._dynamo.reset()
    losses, grads = torch.zeros(2, 3), [torch.randn(2, 3, 4) for _ in range(leaves)]
    grads[-1][1, 2, 3] = float("inf")
    expected = [[0, 0, 0], [0, 0, Failure.GRADIENT]]
    each = torch.compile(lambda *args: torch.func.vmap(commit.diagnose)(*args), fullgraph=True, backend="aot_eager")
    assert each(losses, grads).tolist() == torch.func.vmap(commit.diagnose)(losses, grads).tolist() == expected


def test_an_exported_check_has_no_operator_of_ours() -> None:
    class Check(torch.nn.Module):
        def forward(self, losses: Tensor, grads: list[Tensor]) -> Tensor:
            return commit.diagnose(losses, grads)

    program = torch.export.export(Check(), (torch.zeros(3), [torch.randn(3, 4) for _ in range(30)]))
    assert not [node for node in program.graph.nodes if "hfta" in str(node.target)]


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(ids="inductor")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_raising(backend: str | None) -> None:
    torch._dynamo.reset()
    step, state = _array("mlp", nonfinite="raise")
    run = step if backend is None else torch.compile(step, fullgraph=True, backend=backend)
    first, second = batches(M, 2)
    state, metrics = run(state, first)
    assert metrics["finite"].all()
    held = optree.tree_map(torch.clone, state)
    (spoilt,) = _poisoned([second], 0, 1, float("nan"))
    words = "model 1: the loss is not finite at step 1; lower its learning rate"
    with pytest.raises(hfta.errors.NonFiniteError, match=words):
        run(state, spoilt)
    assert identical(state, held)
    # Members that have stopped may fail.
    run(state._replace(active=torch.tensor([True, False, True])), spoilt)


@pytest.mark.exhaustive(ids="inductor|aot_eager")
@pytest.mark.soak(ids="transformer-(inductor|aot_eager)")
@pytest.mark.parametrize(("name", "backend"), [*itertools.product(WORKLOADS, (None, "aot_eager")), ("mlp", "inductor")])
def test_donated_states_are_written(name: str, backend: str | None) -> None:
    torch._dynamo.reset()
    plain, start = _array(name)
    donating, _ = _array(name, donate=True)
    run = donating if backend is None else torch.compile(donating, fullgraph=True, backend=backend)
    state, given = start, optree.tree_map(torch.clone, start)
    addresses = [leaf.data_ptr() for leaf in optree.tree_leaves(given)]
    held = given
    for batch in batches(M, 4):
        state, metrics = plain(state, batch)
        held, donated = run(held, batch)
        torch.testing.assert_close(donated["loss"], metrics["loss"], rtol=1e-9, atol=0)
    torch.testing.assert_close(held, state, rtol=1e-9, atol=1e-12)
    assert [leaf.data_ptr() for leaf in optree.tree_leaves(held)] == addresses
    assert identical(given, held)


def test_donated_tables_with_max_norm() -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(7, 4, max_norm=0.8), torch.nn.Flatten(), torch.nn.Linear(12, 2))

    def loss(model: Any, tokens: Tensor) -> Tensor:
        return model(tokens).square().mean()

    members = [make().double() for _ in range(M)]
    steps = [hfta.make_train_step(members[0], loss, hfta.sgd(lr=0.1), donate=donate) for donate in (False, True)]
    states = [step.init(*hfta.stack_params(members), seeds=SEEDS) for step in steps]
    for _ in range(3):
        tokens = torch.randint(7, (M, 5, 3))
        states = [step(state, tokens)[0] for step, state in zip(steps, states, strict=True)]
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_value_of_every_gradient_is_looked_at(
    value: float, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(commit.nonfinite, "program", lambda dtype: None)
    elif compiler() is None:
        pytest.skip("needs a C compiler")
    sizes = 3, 5, 7
    gradients = [
        torch.randn(sizes, dtype=dtype),
        # Members in rows of memory, each transposed; members between each other; every other column.
        *(torch.randn(3, 7, 5, dtype=dtype).mT, torch.randn(5, 3, 7, dtype=dtype).transpose(0, 1)),
        *(torch.randn(3, 5, 14, dtype=dtype)[..., ::2], torch.randn(1, 5, 7, dtype=dtype).expand(sizes).clone()),
    ]
    losses = torch.randn(3, dtype=dtype)
    assert commit.diagnose(losses, gradients).tolist() == [0, 0, 0]
    large = torch.full((3, 9), torch.finfo(dtype).max, dtype=dtype)
    assert commit.diagnose(losses, [large]).tolist() == [0, 0, 0]
    for gradient, member, place in itertools.product(gradients, range(3), range(35)):
        at = member, place // 7, place % 7
        before = gradient[at].clone()
        gradient[at] = value
        assert commit.diagnose(losses, gradients).tolist() == [2 * (i == member) for i in range(3)]
        gradient[at] = before
    losses[1] = value
    gradients[0][1] = value
    gradients[0][2, 0, 0] = value
    assert commit.diagnose(losses, gradients).tolist() == [0, 1, 2]
