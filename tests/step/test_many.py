"""``step.many``: K steps in one call are K calls of the step."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta

K, SEEDS = 3, [5, 6]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    return loss, {"double": 2 * loss.detach()}


def start(**options: Any) -> tuple[hfta.step.TrainStep, hfta.step.TrainState]:
    step = hfta.make_train_step(make_model(), loss_fn, hfta.sgd(lr=[0.1, 0.01], momentum=0.9), **options)
    return step, step.init(*hfta.init_params(make_model, SEEDS), seeds=SEEDS)


def batches(dims: int | None = 0) -> dict[str, Tensor]:
    members = () if dims is None else (len(SEEDS),)
    return {"x": torch.randn(K, *members, 6, 4), "y": torch.randint(2, (K, *members, 6))}


def one_by_one(step: Any, state: Any, given: Any) -> tuple[Any, dict[str, Tensor]]:
    found = []
    for place in range(K):
        state, metrics = step(state, {name: leaf[place] for name, leaf in given.items()})
        found.append(metrics)
    return state, {name: torch.stack([metrics[name] for metrics in found]) for name in found[0]}


@pytest.mark.parametrize("dims", [0, None])
@pytest.mark.parametrize("donate", [False, True])
def test_results_are_those_of_as_many_calls(dims, donate):
    step, state = start(batch_dims=dims, donate=donate)
    _, own = start(batch_dims=dims, donate=donate)
    given = batches(dims)
    expected, found = one_by_one(step, own, given), step.many(state, given)
    assert found[1]["double"].shape == (K, len(SEEDS))
    assert all(map(torch.equal, *map(optree.tree_leaves, (found, expected))))


@pytest.mark.exhaustive
def test_in_one_graph():
    step, state = start()
    given = batches()
    found = torch.compile(step.many, fullgraph=True, backend="aot_eager")(state, given)
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b), found, one_by_one(step, state, given))


@pytest.mark.exhaustive(unless="False")
@pytest.mark.parametrize("donate", [False, True])
def test_in_a_graph_of_ones_own(donate):
    """It is compiled once, also where its first call is in the graph; parts of batches may be None."""
    step = hfta.make_train_step(nn.Linear(4, 1), lambda model, batch: model(batch["x"]).square().mean(), hfta.sgd(lr=0.1),
                                donate=donate)  # fmt: skip
    given, graphs = {"x": torch.randn(K, 2, 6, 4), "mask": None}, []

    def start():
        return step.init(*hfta.init_params(lambda: nn.Linear(4, 1), SEEDS), seeds=SEEDS)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def train(state, batches):
        return step.many(state, batches)

    found = start()
    for _ in range(3):
        found, _ = train(found, given)
    expected = start()
    for _ in range(3):
        expected, _ = step.many(expected, given)
    assert len(graphs) == 1
    torch.testing.assert_close(found.params["weight"], expected.params["weight"])


def test_it_can_be_sent_to_other_processes():
    step = hfta.make_train_step(nn.Linear(4, 2), loss_fn, hfta.sgd(lr=0.1))
    assert type(pickle.loads(pickle.dumps(step.many))) is type(step.many)


@pytest.mark.parametrize(
    "wrong", [{"x": torch.ones(0, 2, 6, 4)}, {"y": torch.zeros(2, 2, 6).long()}, {"y": torch.tensor(1)}]
)
def test_batches_of_unequal_number(wrong):
    step, state = start()
    with pytest.raises(hfta.errors.BatchError, match="stack as many in each"):
        step.many(state, batches() | wrong)


@dataclasses.dataclass
class Record:
    x: Tensor


CONTAINERS = {
    "dataclass": Record,
    "UserDict": lambda x: collections.UserDict(x=x),
    "defaultdict": lambda x: collections.defaultdict(list, x=x),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_batches_in_containers_that_a_step_takes(kind):
    make, seen = CONTAINERS[kind], set()

    def loss_fn(model, batch):
        seen.add(type(batch))
        return model(batch.x if kind == "dataclass" else batch["x"]).square().mean()

    step = hfta.make_train_step(nn.Linear(4, 1), loss_fn, hfta.sgd(lr=[0.1, 0.2]))
    state = step.init(*hfta.stack_params([nn.Linear(4, 1) for _ in range(2)]), seeds=[0, 1])
    batches = torch.randn(3, 2, 8, 4)
    expected = state
    for batch in batches:
        expected, _ = step(expected, make(batch))
    found, _ = step.many(state, make(batches))
    assert torch.equal(found.params["weight"], expected.params["weight"])
    assert seen == {type(make(batches))}
    if kind == "defaultdict":
        compiled, _ = torch.compile(step, backend="eager", fullgraph=True)(state, make(batches[0]))
        assert torch.equal(compiled.params["weight"], step(state, make(batches[0]))[0].params["weight"])
