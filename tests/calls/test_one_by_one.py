"""Programs that ``vmap`` cannot run: the members run one after another, with one warning, and compute what they do alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from ways import Calls, assert_as_alone, loss, start


def layers(use: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """An LSTM, two layers and a function of them."""
    lstm = nn.LSTM(4, 4, batch_first=True)
    return Calls(nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4), "lstm": lstm}), use)


def gathered(model: Any, x: Tensor) -> Tensor:
    """Sends each token to one of two experts, as mixtures of experts do."""
    out, choice = torch.zeros_like(x), model.first(x)[:, 0] > 0
    for expert, mask in ((model.first, choice), (model.last, ~choice)):
        (rows,) = torch.where(mask)
        out = out.index_add(0, rows, expert(x[rows]))
    return out


def masked(model: Any, x: Tensor) -> Tensor:
    return model.last(x[model.first(x)[:, 0] > -9]).sum(0)


def packed(model: Any, x: Tensor) -> Tensor:
    """Sequences whose lengths the model computes."""
    lengths = (model.first(x)[0] > 0).sum().clamp(1, 5).reshape(1)
    rows = nn.utils.rnn.pack_padded_sequence(x[None], lengths.cpu(), batch_first=True)
    return model.lstm(rows)[1][0]


def read(model: Any, x: Tensor) -> Tensor:
    return model.last(x) * model.first(x).sum().item()


def listed(model: Any, x: Tensor) -> Tensor:
    return model.last(x)[[row for row, value in enumerate(model.first(x)[:, 0].tolist()) if value > -9]]


def in_numpy(model: Any, x: Tensor) -> Tensor:
    return model.last(x) * torch.from_numpy(model.first(x).detach().numpy())


def counted(model: Any, x: Tensor) -> Tensor:
    return model.last(x) * F.one_hot((model.first(x) > 0).sum(1)).sum()


def compared(model: Any, x: Tensor) -> Tensor:
    """Comparisons of values, of which none, some or all members have equal ones."""
    y = model.last(x)
    if torch.equal(y, y[:1]) or torch.equal(x, x.abs()) or torch.allclose(x, x + 1e-9 * y.detach()):
        y = y * 2
    return y * (2 if 0 in (x.abs() < 0).long() else 3)


@pytest.mark.parametrize("way", ["together", "in pairs", "evaluated", "ensemble"])
@pytest.mark.parametrize("use", [compared, gathered, masked, packed, read, listed, in_numpy, counted])
def test_members_run_one_after_another(use: Callable[[Any, Tensor], Tensor], way: str) -> None:
    with pytest.warns(hfta.errors.LoopWarning, match="members run one after another, because they cannot run as one"):
        assert_as_alone(lambda: layers(use).double(), torch.randn(3, 5, 4).double(), way)


def test_it_warns_once() -> None:
    step, state = start([layers(read) for _ in range(3)], loss, hfta.sgd(lr=0.1))
    x = torch.randn(3, 5, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            state, _ = step(state, x)
    assert [warning.category for warning in caught] == [hfta.errors.LoopWarning]


def test_noise_is_that_of_members_as_one() -> None:
    losses = []
    for reads in (True, False):

        def use(model: Any, x: Tensor, reads: bool = reads) -> Tensor:
            y = F.dropout(model.first(x))
            return y * torch.rand(4) + (0 * y.sum().item() if reads else 0)

        torch.manual_seed(0)
        step, state = start([layers(use) for _ in range(3)], loss, hfta.sgd(lr=0.1), seeds=[4, 5, 6])
        x = torch.randn(3, 5, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hfta.errors.LoopWarning)
            losses.append(step(state, x)[1]["loss"])
    torch.testing.assert_close(*losses)


def test_what_one_member_refuses_is_said_in_its_words() -> None:
    models = [layers(lambda model, x: model.first(x[:, :3])) for _ in range(3)]
    step, state = start(models, loss, hfta.sgd(lr=0.1))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(5x3 and 4x4\)"):
        step(state, torch.randn(3, 5, 4))


def test_a_value_that_all_members_agree_on_can_be_read() -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        lengths = (model.first(x) > -99).sum(1)
        return model.last(x)[:, : int(lengths.max()) - 1] * float(lengths[0]) * lengths.min().item()

    assert_as_alone(lambda: layers(use).double(), torch.randn(3, 5, 4).double(), "together")
