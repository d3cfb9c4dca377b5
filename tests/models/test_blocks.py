"""Blocks of a padded model run for the members that have them, wherever it is known which these are."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import hfta_func as hfta
from comparisons import assert_trees_close
from hfta_func._torch import inside_vmap
from hfta_func.step import replay
from ways import seeded

X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(6, 5)


class Block(nn.Module):
    def __init__(self, width, rate, max_norm):
        super().__init__()
        self.norm, self.inner, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(rate)
        self.table = nn.Embedding(3, width, max_norm=max_norm)

    def forward(self, x, scale=None):
        h = self.drop(self.inner(self.norm(x)).sigmoid()) + self.table(torch.tensor([0, 2])).sum()
        return x + h if scale is None else x + h * scale


class Counted(Block):
    """A block that notes for how many members it runs."""

    rows: ClassVar[list[int]] = []

    def forward(self, x):
        Counted.rows.append(inside_vmap(x).numel() // x.numel())
        return super().forward(x)


class Model(nn.Module):
    """Blocks that get what a mode says from the rest of the model."""

    def __init__(self, width, depth, mode):
        super().__init__()
        self.first, self.head, self.mode = nn.Linear(5, width), nn.Linear(width, 2), mode
        kind, rate = (Counted, 0.0) if mode in ("quiet", "from elsewhere") else (Block, 0.3)
        self.blocks = nn.ModuleList([kind(width, rate, 0.1 if mode == "max_norm" else None) for _ in range(depth)])
        self.scale, self.last = nn.Parameter(torch.ones(())), nn.Dropout(0.2)

    def forward(self, x):
        x, scale = self.first(x), self.scale
        for block in self.blocks:
            if self.mode == "argument":
                x = block(x, scale=scale)
            elif self.mode == "from elsewhere":
                block.drop.__class__ = type("Scaled", (nn.Dropout,), {"forward": lambda self, x: x * scale})
                x = block(x)
            else:
                x = block(x)
        return self.head(self.last(x))


def models_of(sizes, mode=None):
    return seeded(lambda size: Model(*size, mode).double(), range(len(sizes)), sizes)


def loss(model, batch):
    return (model(batch) ** 2).mean()


def prepared(models, model, seeds=None, **options):
    """A step, and its state."""
    step = hfta.make_train_step(model, loss, hfta.sgd(lr=0.1, momentum=0.9), batch_dims=None, **options)
    trees = hfta.stack_params(models, **({} if model is models[0] else {"pad": model}))
    return step, step.init(*trees, seeds=seeds or range(len(models)))


def trained(models, model, seeds=None):
    step, state = prepared(models, model, seeds)
    for number in range(2):
        state, _ = step(state, X * (number + 1))
    return hfta.unstack_params(model, *hfta.step.stacked(state))


def assert_alone(models, found):
    for i, one in enumerate(models):
        (alone,) = trained([one], one, [i])
        assert_trees_close({**found[i].state_dict()}, {**alone.state_dict()}, 1e-10, f"model {i}")


ORDERS = {
    "any order": [(4, 1), (6, 3), (4, 0), (3, 2)],
    "deepest first": [(6, 3), (4, 2), (5, 1)],
    "one has them": [(4, 0), (5, 2), (6, 0)],
    "none has them": [(4, 1), (5, 1)],
}


@pytest.mark.parametrize("mode", ["noise", "argument", "max_norm", "from elsewhere"])
@pytest.mark.parametrize("order", ORDERS)
def test_members_are_their_models_alone(order, mode):
    models = models_of(ORDERS[order], mode)
    assert_alone(models, trained(models, hfta.padded([*models, *models_of([(6, 3)], mode)])))


def test_blocks_run_for_the_members_that_have_them():
    models = models_of(ORDERS["any order"], "quiet")
    model = hfta.padded(models)
    step, (_, state) = hfta.make_eval_step(model, loss, batch_dims=None), prepared(models, model)
    for _ in range(2):
        Counted.rows.clear()
        losses = step(state, X)["loss"]
    assert sorted(Counted.rows) == [1, 2, 3]
    assert_trees_close({"loss": losses}, {"loss": torch.stack([loss(one.eval(), X) for one in models]).detach()}, 1e-10)


def test_blocks_that_use_what_all_members_have_run_for_all():
    models = models_of(ORDERS["any order"], "from elsewhere")
    model = hfta.padded(models)
    Counted.rows.clear()
    found = trained(models, model)
    assert Counted.rows[-3:] == [4, 4, 4]
    assert_alone(models, found)


def test_replays_are_for_members_of_the_same_sizes(monkeypatch):
    monkeypatch.setattr(replay, "_STEPS", 0)
    models = models_of(ORDERS["any order"], "noise")
    model = hfta.padded(models)
    step, state = prepared(models, model, replay=True)
    eager, other = prepared(models, model, replay=False)
    for _ in range(8):
        (state, _), (other, _) = step(state, X), eager(other, X)
    assert "replayed" in step.status, step.status
    assert_trees_close(state, other, 0.0)
    for order in ([3, 2, 1, 0], [1, 1, 0, 2], [0, 1, 2, 3]):
        (state, _), (other, _) = step(hfta.take(state, order), X), eager(hfta.take(other, order), X)
        assert_trees_close(state, other, 0.0)
