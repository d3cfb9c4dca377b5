"""What the documentation of ``torch.func.vmap`` promises, of ``hfta.vmap`` and of PyTorch's own with the rules installed.

PyTorch without the rules is the reference, of results and of refusals.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Row(NamedTuple):
    """Calls ``vmap``; where PyTorch refuses, the pattern is found in its message and in ours."""

    name: str
    call: Callable[[Any], Any]
    refused: str = ""


X, Y, W = torch.arange(24.0).reshape(2, 3, 4).sin(), torch.arange(24.0).reshape(2, 3, 4).cos(), torch.eye(4) + 0.5


def _mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x @ y.mT, x.sum(0)


def _three(vmap: Any) -> Any:
    return vmap(vmap(vmap(torch.mul, (0, None)), (1, 0), 1), (0, 0))


def _matrix(x: Tensor) -> Tensor:
    return torch.tanh(x @ W)


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[0].mul_(2)
    return y


IN_DIMS = [
    Row("a number", lambda vmap: vmap(_mixed)(X, Y)),
    Row("another axis", lambda vmap: vmap(torch.mul, 1)(X, Y)),
    Row("one for each", lambda vmap: vmap(torch.matmul, (2, 0))(X, X.movedim(2, 0).mT)),
    Row("a shared tensor", lambda vmap: vmap(torch.matmul, (0, None))(X, W)),
    Row("a list", lambda vmap: vmap(lambda xs: xs[0] * xs[1], in_dims=([0, 1],))([X, Y.movedim(0, 1)])),
    Row("a dict", lambda vmap: vmap(lambda d: d["a"] @ d["b"], in_dims=({"a": 0, "b": None},))({"a": X, "b": W})),
    Row("tuples", lambda vmap: vmap(lambda p, z: p[0] * p[1][0] + z, ((0, (1,)), None))((X, (Y.movedim(0, 1),)), 1.0)),
    Row("a NamedTuple", lambda vmap: vmap(lambda p: p.first - p.second, (Pair(0, None),))(Pair(X, W[:3]))),
    Row("keywords have it in front", lambda vmap: vmap(lambda x, y: x * y, (1,))(X.movedim(0, 1), y=Y)),
    Row("what encloses it is shared", lambda vmap: vmap(lambda x: x @ W)(X)),
    Row("all shared", lambda vmap: vmap(torch.sin, None)(X), "expected `in_dims` to be|at least one Tensor"),
    Row("an axis that there is not", lambda vmap: vmap(torch.sin, 3)(X), "in_dim"),
    Row("another structure", lambda vmap: vmap(lambda xs: xs[0], ([0, 0],))([X]), "in_dims"),
    Row("an empty axis", lambda vmap: vmap(torch.sin)(torch.ones(0, 3))),
]  # fmt: skip

OUT_DIMS = [
    Row("another axis", lambda vmap: vmap(torch.mul, 0, 1)(X, Y)),
    Row("one for each", lambda vmap: vmap(_mixed, 0, (2, -1))(X, Y)),
    Row("one for all", lambda vmap: vmap(_mixed, 0, 1)(X, Y)),
    Row("of a shared output, in front", lambda vmap: vmap(lambda x: (x, W))(X)),
    Row("an output that is an input", lambda vmap: vmap(lambda x, y: x, (1, 0), -1)(X.movedim(0, 1), Y)),
    Row("an axis that there is not", lambda vmap: vmap(torch.sin, 0, 3)(X), "Dimension out of range"),
    Row("another structure", lambda vmap: vmap(torch.sin, 0, (0, 0))(X), "out_dims"),
    Row("an output that is no tensor", lambda vmap: vmap(lambda x: 1)(X), "must "),
]

LEVELS = [
    Row("two with other axes", lambda vmap: vmap(vmap(torch.dot, (1, 0)), (0, 0), 1)(X.mT, Y)),
    Row("the inner one alone", lambda vmap: vmap(lambda x: vmap(lambda row: row * x.sum())(W))(X)),
    Row("the outer one of what encloses it", lambda vmap: vmap(lambda x: vmap(lambda y: x @ y)(Y.mT))(X)),
    Row("shared inside", lambda vmap: vmap(vmap(torch.mul, (0, None)), (0, 0))(X, Y)),
    Row("three", lambda vmap: _three(vmap)(torch.stack([X, Y]), Y)),
    Row("a gradient inside", lambda vmap: vmap(torch.func.grad(lambda x: _matrix(x).sum()))(X)),
    Row("a gradient outside", lambda vmap: torch.func.grad(lambda x: vmap(_matrix)(x).sum())(X)),
    Row("a gradient between", lambda vmap: vmap(torch.func.grad(lambda x: vmap(_matrix)(x).sum()))(X)),
    Row("a Jacobian", lambda vmap: vmap(torch.func.jacrev(_matrix))(X)),
    Row("tangents", lambda vmap: vmap(lambda x, t: torch.func.jvp(_matrix, (x,), (t,)))(X, Y)),
    Row("writes into what is new", lambda vmap: vmap(vmap(_in_place))(torch.stack([X, Y]))),
]

CHUNKS = [
    *(Row(f"of {size}", lambda vmap, size=size: vmap(_mixed, chunk_size=size)(X, Y)) for size in (1, 2, 5)),
    Row("of other axes", lambda vmap: vmap(torch.mul, 1, 1, chunk_size=2)(X, Y)),
    Row("of levels", lambda vmap: vmap(vmap(torch.dot, chunk_size=2), chunk_size=1)(X, Y)),
    Row("of none", lambda vmap: vmap(torch.sin, chunk_size=0)(X), "chunk_size should be None or greater than 0"),
]


def _noisy(draw: Callable[[Tensor], Tensor], randomness: str, **options: Any) -> Callable[[Any], Any]:
    def call(vmap: Any) -> Any:
        torch.manual_seed(0)
        return vmap(lambda x: x + draw(x), randomness=randomness, **options)(X)

    return call


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "randn": lambda x: torch.randn(3, 4),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randperm": lambda x: torch.randperm(4).float(),
    "dropout": torch.nn.functional.dropout,
    "normal_": lambda x: x.clone().normal_(),
}
RANDOMNESS = [
    *(Row(f"{name} same", _noisy(draw, "same")) for name, draw in DRAWS.items() if name not in ("bernoulli",)),
    *(Row(f"{name} different", _noisy(draw, "different")) for name, draw in DRAWS.items()),
    *(Row(f"{name} error", _noisy(draw, "error"), "random operation|generator") for name, draw in DRAWS.items()),
    Row("in chunks", _noisy(torch.randn_like, "different", chunk_size=1)),
    Row("an unknown word", _noisy(torch.randn_like, "sometimes"), "randomness"),
]

FAMILIES = {"in_dims": IN_DIMS, "out_dims": OUT_DIMS, "levels": LEVELS, "chunks": CHUNKS, "randomness": RANDOMNESS}
ROWS = [pytest.param(row, id=f"{family}: {row.name}") for family, rows in FAMILIES.items() for row in rows]


def _result(call: Callable[[Any], Any], vmap: Any) -> Any:
    try:
        return call(vmap)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        return error


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("row", ROWS)
def test_as_pytorch(row: Row) -> None:
    hfta.rules.uninstall()
    expected = _result(row.call, torch.func.vmap)
    hfta.rules.install()
    for vmap in (torch.func.vmap, hfta.vmap):
        got = _result(row.call, vmap)
        if isinstance(expected, Exception):
            assert isinstance(got, type(expected)), repr(got)
            # tensordict, once imported, replaces vmap's checks by its own, whose lines break elsewhere.
            texts = [" ".join(str(error).split()) for error in (expected, got)]
            assert all(re.search(row.refused, text) for text in texts), repr(texts)
        else:
            assert not row.refused, "PyTorch accepts it"
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_a_vmap_of_ones_own_reads_what_all_members_agree_on(make, inside):
    models = [make(4, momentum=None) for _ in range(3)]
    (params, buffers), x = hfta.stack_params(models), torch.randn(3, 5, 4)
    function = hfta.functional(models[0])

    def loss(params, buffers, x):
        y, buffers = function(params, buffers, x)
        return y.sum(), buffers

    for _ in range(2):
        _, buffers = hfta.vmap(torch.func.grad(loss, has_aux=True) if inside else loss)(params, buffers, x)
        for model, row in zip(models, x, strict=True):
            model(row)
    torch.testing.assert_close(buffers["running_mean"], torch.stack([model.running_mean for model in models]))
