"""``hfta.scan`` is a loop in Python, and one loop in a graph."""

from __future__ import annotations

import optree
import pytest
import torch
from torch import nn

import hfta_func as hfta

LENGTH = 5


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 3)).double()


def rollout(count):
    """A body that calls a model with noise, and its start, for as many members."""
    params, buffers = hfta.init_params(make_model, range(count))
    model = hfta.functional(make_model())
    call = hfta.vmap(lambda params, buffers, x, key: model(params, buffers, x, key=key)[0])

    def body(carry, x, key):
        place = carry["place"] + call(params, buffers, carry["place"] + x, key)
        place = place + hfta.random.normal(hfta.random.fold_in(key, 1), (2, 3), dtype=torch.float64)
        return {"place": place, "seen": carry["seen"] + 1, "same": carry["same"]}, (place.sum(-1), carry["place"])

    zeros = torch.zeros(count, dtype=torch.int64)
    start = {"place": torch.randn(count, 2, 3).double(), "seen": zeros, "same": zeros}
    return body, start, torch.randn(LENGTH, count, 2, 3).double(), hfta.random.keys(range(count))


def loop(body, carry, xs, key):
    ys = []
    for index in range(len(xs)):
        carry, y = body(carry, xs[index], hfta.random.fold_in(key, index))
        ys.append(y)
    return carry, tuple(torch.stack(parts) for parts in zip(*ys, strict=True))


def assert_same(found, expected):
    for a, b in zip(*map(optree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_it_is_the_loop():
    body, start, xs, key = rollout(3)
    found, expected = hfta.scan(body, start, xs, key=key), loop(body, start, xs, key)
    assert all(map(torch.equal, *map(optree.tree_leaves, (found, expected))))
    # Members are those of an array of one.
    alone = hfta.scan(lambda c, x: (c * 2, None), start["place"][1:2], length=2)
    assert torch.equal(alone[0], start["place"][1:2] * 4) and alone[1] is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
def test_it_is_one_loop_in_a_graph(count):
    body, start, xs, key = rollout(count)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    # An axis of size one, whose stride is any number.
    start["place"] = start["place"].transpose(0, 1).contiguous().transpose(0, 1)
    run = torch.compile(lambda *args: hfta.scan(body, *args[:2], key=args[2]), fullgraph=True, backend=backend)
    assert_same(run(start, xs, key), loop(body, start, xs, key))
    calls = [node.target for node in graphs[0].graph.nodes if "scan" in str(node.target) and node.op != "get_attr"]
    assert calls == [torch.ops.higher_order.scan]
    lowered = torch.compile(lambda *args: hfta.scan(body, *args[:2], key=args[2]), fullgraph=True, dynamic=False)
    assert_same(lowered(start, xs, key), loop(body, start, xs, key))


def test_its_gradient():
    xs, start = torch.randn(4, 3).double(), torch.randn(3).double()

    def total(start, run):
        carry, ys = run(lambda c, x: ((c * x).sin(), c * c), start, xs)
        return carry.sum() + ys.sum()

    def by_hand(body, carry, xs):
        ys = []
        for x in xs:
            carry, y = body(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    expected = torch.func.grad(lambda s: total(s, by_hand))(start)
    assert torch.equal(torch.func.grad(lambda s: total(s, hfta.scan))(start), expected)
    start.requires_grad_()
    total(start, hfta.scan).backward()
    assert torch.equal(start.grad, expected)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        first = torch.rand(2)
        x, ys = hfta.scan(lambda c, _: (self.layer(c) + torch.rand(2), torch.rand(1)), x + first, length=3)
        return x.sum() + ys.sum() + torch.rand(()), ys


def test_a_model_that_calls_it_draws_other_numbers_in_each_iteration():
    params, buffers = hfta.init_params(Noisy, [0, 1])
    model = hfta.functional(Noisy())
    keys, x = hfta.random.keys([7, 8]), torch.ones(2, 2)
    (total, ys), _ = hfta.vmap(lambda *args: model(*args[:3], key=args[3]))(params, buffers, x, keys)
    assert len(set(ys.flatten().tolist())) == 6
    for i in range(2):
        (own, own_ys), _ = model({path: param[i] for path, param in params.items()}, {}, x[i], key=keys[i])
        assert torch.equal(own_ys, ys[i])
        torch.testing.assert_close(own, total[i])


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (lambda b: hfta.scan(b, torch.ones(2)), ValueError, "give one length"),
        (lambda b: hfta.scan(b, torch.ones(2), torch.ones(3), length=4), ValueError, r"\[3, 4\]"),
        (lambda b: hfta.scan(b, torch.ones(2), length=0), ValueError, r"\[0\]"),
        (lambda b: hfta.scan(lambda c, x: (c[:1], None), torch.ones(2), length=2), hfta.TraceError, r"\[2\] but .*\[1\]"),
        (lambda b: hfta.scan(lambda c, x: ({"a": c["a"] > 0}, None), {"a": torch.ones(2)}, length=2), hfta.TraceError,
         r"carry\['a'\] is torch.float32\[2\] but torch.bool\[2\]"),
        (lambda b: hfta.scan(lambda c, x: ({}, None), {"a": torch.ones(2)}, length=2), hfta.TraceError,
         "but an iteration's result does not"),
        (lambda b: hfta.scan(lambda c, x: (c, None), 3.0, length=2), hfta.TraceError, "is a float"),
    ],
)  # fmt: skip
def test_what_it_refuses(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong(lambda carry, x: (carry, None))
