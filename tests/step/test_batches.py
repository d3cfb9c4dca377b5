"""Batches in containers whose classes compute something from their parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import hfta_func as hfta
from comparisons import assert_trees_close

pytestmark = [
    pytest.mark.usefixtures("one_thread", "double"),
    pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning"),
]

M = 3


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.layer = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x):
        outputs, _ = self.recurrent(x)
        assert isinstance(outputs, PackedSequence)
        return self.layer(pad_packed_sequence(outputs, batch_first=True)[0])


def of_sequences(model, batch):
    return model(batch["x"] if isinstance(batch, dict) else batch).square().mean()


packed = pack_padded_sequence(torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([5, 3, 2]), batch_first=True)


class Rows(list):
    """A list that says how many it has, as lists of images in packages do."""


class Named(dict):
    """A dict whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


def of_rows(model, batch):
    assert isinstance(batch, Rows)
    return model(batch[0]).square().mean() + model(batch[1]).mean()


def of_named(model, batch):
    assert isinstance(batch, Named)
    return model(batch.x).square().mean() * batch.batch_size.mean()


def of_sparse(model, batch):
    assert batch.layout == torch.sparse_coo
    return (torch.sparse.mm(batch, model.weight.t()) + model.bias).square().mean()


three = torch.arange(M * 5 * 4, dtype=torch.float64).reshape(M, 5, 4).sin().relu()
CASES = {
    "a list of a class of its own": (lambda: nn.Linear(4, 1), of_rows, Rows([three, three + 1]), 0),
    "a dict whose keys are attributes": (lambda: nn.Linear(4, 1), of_named, Named(x=three, batch_size=three[:, 0]), 0),
    "sparse rows": (lambda: nn.Linear(4, 1), of_sparse, three.to_sparse(), 0),
    "a packed sequence": (Sequences, of_sequences, packed, None),
    "a packed sequence in a dict": (Sequences, of_sequences, {"x": packed}, None),
}


def own_part(batch, i):
    return Named({k: x[i] for k, x in batch.items()}) if isinstance(batch, Named) else Rows(x[i] for x in batch)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_members_are_those_alone(name, chunk_size):
    make, loss, batch, dims = CASES[name]
    stacked = hfta.init_params(make, [1, 2, 3])
    models = hfta.unstack_params(make(), *stacked)
    step = hfta.make_train_step(make(), loss, hfta.sgd(lr=[0.1, 0.2, 0.3]), batch_dims=dims, chunk_size=chunk_size)
    measured = hfta.make_eval_step(make(), loss, batch_dims=dims)(stacked, batch)
    state, metrics = step(step.init(*stacked, seeds=[1, 2, 3]), batch)
    plain = isinstance(batch, torch.Tensor)
    parts = [batch if dims is None else batch[i] if plain else own_part(batch, i) for i in range(M)]
    losses = [loss(model, part) for model, part in zip(models, parts, strict=True)]
    for i, (model, value) in enumerate(zip(models, losses, strict=True)):
        grads = torch.autograd.grad(value, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.1 * (i + 1) * grad
    expected = torch.stack([value.detach() for value in losses])
    assert_trees_close(
        {"trained": metrics["loss"], "measured": measured["loss" if "loss" in measured else loss.__name__]},
        {"trained": expected, "measured": expected},
        1e-10,
    )
    assert_trees_close(state.params, hfta.stack_params(models).params, 1e-10, "params")


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_parts_of_members(count, replay):
    rows = [torch.ones(2, 4), torch.ones(3, 4), torch.ones(1, 4)][:count]
    for tensor in (torch.nested.nested_tensor(rows), torch.nested.nested_tensor(rows, layout=torch.jagged)):
        step = hfta.make_train_step(nn.Linear(4, 1), of_sequences, hfta.sgd(lr=0.1), replay=replay)
        state = step.init(*hfta.init_params(lambda: nn.Linear(4, 1), range(count)), seeds=range(count))
        with pytest.raises(hfta.errors.BatchError, match=r"batch\['x'\] is nested but the array has .* or share one"):
            step(state, {"x": tensor})


def test_one_member_has_sparse_rows_too():
    stacked = hfta.init_params(lambda: nn.Linear(4, 1), [1])
    for chunk_size in (None, 1):
        step = hfta.make_train_step(nn.Linear(4, 1), of_sparse, hfta.sgd(lr=0.1), chunk_size=chunk_size)
        _, metrics = step(step.init(*stacked, seeds=[1]), three[:1].to_sparse())
        torch.testing.assert_close(
            metrics["loss"],
            (three[:1] @ stacked.params["weight"].mT + stacked.params["bias"]).square().mean().reshape(1),
        )
