"""PyTorch's operators of functions in models, FlexAttention, nested and sparse tensors, and what compiled steps refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import WAYS, assert_as_alone, loss

pytestmark = [
    pytest.mark.usefixtures("one_thread", "double"),
    pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning"),
    # PyTorch's own, of models alone.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


class Model(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, func: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.layer, self.out, self.func = nn.Linear(4, 4), nn.Linear(4, 2), func
        self.adjacency, self.jagged = torch.eye(6).to_sparse(), ragged()

    def forward(self, x: Tensor) -> Tensor:
        return self.func(self, x)


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.full((3, 4), 2.0)], layout=torch.jagged)


def of_cond(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    branches = (lambda y, z: (y.sin(), {"z": z + 1}), lambda y, z: (y.cos() * model.out.bias.sum(), {"z": -z}))
    y, other = torch.cond(y.sum() > 0, *branches, (y, x))
    return model.out(y + other["z"])


def rows() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(3, 6, 4)


# Alone, PyTorch compiles, which takes longer than the array.
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
def test_branches_are_those_alone(way: str, count: int) -> None:
    assert_as_alone(lambda: Model(of_cond), rows(), way, count)


def attends(*options: str) -> Callable[..., Tensor]:
    shared = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 6, 6, device="cpu")

    def func(model: Any, x: Tensor) -> Tensor:
        heads = model.layer(x).view(1, 6, 2, 2).transpose(1, 2)
        bias = model.out.bias
        mod = (lambda score, b, h, i, j: score + bias[h] * (i - j)) if "score" in options else None
        mask = shared if "shared mask" in options else None
        if "made mask" in options:
            mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < 2, 1, 1, 6, 6, device="cpu")
        return flex_attention(heads, heads * 2, heads, score_mod=mod, block_mask=mask)

    return func


ATTENTION = [("score",), ("shared mask",), ("score", "made mask"), ()]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["evaluated", "ensemble", "mapped"])
@pytest.mark.parametrize("options", ATTENTION, ids=" and ".join)
@pytest.mark.sampled(every=12)
def test_flex_attention(options: tuple[str, ...], way: str, count: int) -> None:
    assert_as_alone(lambda: Model(attends(*options)), rows(), way, count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ATTENTION, ids=" and ".join)
def test_flex_attention_in_one_program(options: tuple[str, ...]) -> None:
    models = [Model(attends(*options)) for _ in range(3)]
    evaluate = hfta.make_eval_step(models[0], loss, batch_dims=0)
    torch._dynamo.reset()
    found = torch.compile(evaluate, fullgraph=True, backend="aot_eager")(hfta.stack_params(models), rows())["loss"]
    with torch.no_grad():
        expected = torch.stack([loss(model, x) for model, x in zip(models, rows(), strict=True)])
    assert_trees_close({"loss": found}, {"loss": expected}, 1e-12)


def test_flex_attention_has_gradients_where_it_has_them_alone() -> None:
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        assert_as_alone(lambda: Model(attends()), rows(), "together")


def of_jagged_constant(model: Any, x: Tensor) -> Tensor:
    return model.out(model.layer(model.jagged)).values() * x.sum()


def of_jagged(model: Any, x: Tensor) -> Tensor:
    return model.out(model.layer(x).tanh()).values()


def made_jagged(model: Any, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(model.layer(x), torch.tensor([0, 2, 6])).tanh().values()


NESTED = {
    "a batch": (of_jagged, ragged, True),
    "a constant": (of_jagged_constant, rows, False),
    "made": (made_jagged, rows, False),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_need_members_one_by_one(name: str, count: int) -> None:
    func, batch, shared = NESTED[name]
    for way in ("together", "evaluated", "ensemble", "one by one"):
        assert_as_alone(lambda: Model(func), batch(), way, count, shared)


def of_sparse(model: Any, x: Tensor) -> Tensor:
    return model.out(torch.sparse.mm(model.adjacency, model.layer(x))) + (model.adjacency.to_dense() @ x)[:, :2]


REFUSED = {
    "sparse": (of_sparse, "torch.compile does not support sparse Tensors"),
    "jagged": (of_jagged_constant, "computes with a nested tensor"),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(every=4)
def test_what_one_program_cannot_hold_is_refused(name: str, count: int) -> None:
    func, message = REFUSED[name]
    evaluate = hfta.make_eval_step(Model(func), loss, batch_dims=0)
    stacked = hfta.stack_params([Model(func) for _ in range(count)])
    if name != "jagged":
        evaluate(stacked, rows()[:count])
    torch._dynamo.reset()
    with warnings.catch_warnings(), pytest.raises(Exception, match=message):
        warnings.simplefilter("ignore")
        torch.compile(evaluate, fullgraph=True, backend="aot_eager")(stacked, rows()[:count])
