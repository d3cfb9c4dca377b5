"""Batches in containers whose classes compute something from their parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import hfta_func as hfta
from comparisons import assert_trees_close

pytestmark = pytest.mark.usefixtures("one_thread", "double")

TensorDict = pytest.importorskip("tensordict").TensorDict

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


def of_tensors(model, batch):
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size([5])
    inner = batch["inner"]
    return (model(batch["x"]).squeeze(-1) - inner["y"]).square().mean()


def tensors(*sizes):
    inner = TensorDict({"y": torch.randn(*sizes)}, sizes)
    return TensorDict({"x": torch.randn(*sizes, 4), "inner": inner}, sizes)


packed = pack_padded_sequence(torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([5, 3, 2]), batch_first=True)
CASES = {
    "a packed sequence": (Sequences, of_sequences, packed, None),
    "a packed sequence in a dict": (Sequences, of_sequences, {"x": packed}, None),
    "a TensorDict": (lambda: nn.Linear(4, 1), of_tensors, tensors(M, 5), 0),
    "a TensorDict that all members share": (lambda: nn.Linear(4, 1), of_tensors, tensors(5), None),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_members_are_those_alone(name, chunk_size):
    make, loss, batch, dims = CASES[name]
    batch = batch.double() if isinstance(batch, TensorDict) else batch
    stacked = hfta.init_params(make, [1, 2, 3])
    models = hfta.unstack_params(make(), *stacked)
    step = hfta.make_train_step(make(), loss, hfta.sgd(lr=[0.1, 0.2, 0.3]), batch_dims=dims, chunk_size=chunk_size)
    measured = hfta.make_eval_step(make(), loss, batch_dims=dims)(stacked, batch)
    state, metrics = step(step.init(*stacked, seeds=[1, 2, 3]), batch)
    losses = [loss(model, batch if dims is None else batch[i]) for i, model in enumerate(models)]
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
