"""``hfta.calls.scan`` is a loop in Python, and one loop in a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

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


def loop(body, carry, xs, key=None):
    ys = []
    for index in range(len(xs)):
        carry, y = body(carry, xs[index], *([] if key is None else [hfta.random.fold_in(key, index)]))
        ys.append(y)
    return carry, optree.tree_map(lambda *parts: torch.stack(parts), *ys)


def assert_same(found, expected):
    for a, b in zip(*map(optree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_it_is_the_loop():
    body, start, xs, key = rollout(3)
    found, expected = hfta.calls.scan(body, start, xs, key=key), loop(body, start, xs, key)
    assert all(map(torch.equal, *map(optree.tree_leaves, (found, expected))))
    # Members are those of an array of one.
    alone = hfta.calls.scan(lambda c, x: (c * 2, None), start["place"][1:2], length=2)
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
    run = torch.compile(lambda *args: hfta.calls.scan(body, *args[:2], key=args[2]), fullgraph=True, backend=backend)
    assert_same(run(start, xs, key), loop(body, start, xs, key))
    calls = [node.target for node in graphs[0].graph.nodes if "scan" in str(node.target) and node.op != "get_attr"]
    assert calls == [torch.ops.higher_order.scan]
    lowered = torch.compile(lambda *args: hfta.calls.scan(body, *args[:2], key=args[2]), fullgraph=True, dynamic=False)
    assert_same(lowered(start, xs, key), loop(body, start, xs, key))


def test_its_gradient():
    xs, start = torch.randn(4, 3).double(), torch.randn(3).double()

    def total(start, run):
        carry, ys = run(lambda c, x: ((c * x).sin(), c * c), start, xs)
        return carry.sum() + ys.sum()

    expected = torch.func.grad(lambda s: total(s, loop))(start)
    assert torch.equal(torch.func.grad(lambda s: total(s, hfta.calls.scan))(start), expected)
    start.requires_grad_()
    total(start, hfta.calls.scan).backward()
    assert torch.equal(start.grad, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_the_gradient_beside_integers_in_a_graph(backend):
    """Of any bits, such as keys have; some are floating-point numbers that a processor would change when it computes."""
    bits = torch.tensor([0x7FF0000000000001, -1, -(2**63), 3, 2**62 + 1])
    weight, xs = torch.randn(2, 2, dtype=torch.float64, requires_grad=True), torch.randn(5, 2).double()
    start = {"x": torch.zeros(2).double(), "keys": bits, "short": torch.tensor(7, dtype=torch.int16), "odd": bits > 0}

    def body(carry, given):
        x, number = given
        after = {**carry, "x": torch.tanh(carry["x"] @ weight + x), "keys": carry["keys"].roll(1), "odd": ~carry["odd"]}
        return after, (carry["keys"] ^ number, carry["odd"], after["x"])

    def run(xs, bits):
        return hfta.calls.scan(body, start, (xs, bits))

    expected, found = run(xs, bits), torch.compile(run, fullgraph=True, dynamic=False, backend=backend)(xs, bits)
    assert_same(found, expected)
    grads = [torch.autograd.grad(carry["x"].sum() + ys[2].square().sum(), weight)[0] for carry, ys in (expected, found)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        first = torch.rand(2)
        x, ys = hfta.calls.scan(lambda c, _: (self.layer(c) + torch.rand(2), torch.rand(1)), x + first, length=3)
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


class Pair(NamedTuple):
    first: Any
    second: Any


def test_none_and_tuples_with_names_in_all_that_is_carried_given_and_returned():
    start, xs = {"a": Pair(torch.tensor(1.0), None), "b": ()}, Pair(None, torch.arange(3.0))

    def run(start, xs):
        first, y = hfta.calls.scan(
            lambda c, x: ({**c, "a": Pair(c["a"].first + x.second, None)}, Pair(x, (None, {}))), start, xs
        )
        second, _ = hfta.calls.scan(lambda c, _: (c, None), None, length=2)
        return first, y, second, hfta.calls.scan(lambda c, _: (c, None), xs, length=1)

    expected = {"a": Pair(torch.tensor(4.0), None), "b": ()}, Pair(xs, (None, {})), None, (xs, None)
    for call in (run, torch.compile(run, fullgraph=True, backend="eager")):
        found = call(start, xs)
        assert optree.tree_structure(found) == optree.tree_structure(expected)
        assert all(map(torch.equal, *map(optree.tree_leaves, (found, expected))))


def test_keys_of_dicts_have_no_order():
    start = {"b": torch.tensor(1.0), "a": (torch.tensor(2.0), {"d": torch.tensor(3.0), "c": torch.tensor(4.0)})}

    def body(carry, x):
        first, both = carry["a"]
        after = {"a": (first - x, {"c": both["c"] * 2, "d": both["d"] + x}), "b": carry["b"] + x}
        return after, {"y": both["c"], "x": x}

    def run(start, xs):
        return hfta.calls.scan(body, start, xs)

    (carry, ys), xs = run(start, torch.arange(3.0)), torch.arange(3.0)
    found, others = torch.compile(run, fullgraph=True, backend="eager")(start, xs)
    assert found == carry == {"b": 4, "a": (-1, {"d": 6, "c": 32})}
    assert ys.keys() == others.keys() and all(torch.equal(ys[name], others[name]) for name in ys)


ONE, TWO = torch.tensor(1.0), {"a": (torch.ones(2),)}
REFUSED = {
    "no length": (lambda c, x: (c, x), ONE, None, {}, r"ValueError: the loop has the lengths \[\]; give tensors"),
    "lengths": (lambda c, x: (c, x), ONE, Pair(torch.ones(3), torch.ones(3, 2)), {"length": 4},
                r"ValueError: the loop has the lengths \[3, 3, 4\]; give"),
    "shape": (lambda c, x: ({"a": (c["a"][0][:1],)}, x), TWO, torch.ones(3), {},
              r"TraceError: carry\['a'\]\[0\] is torch.float32\[2\] in the first iteration but torch.float32\[1\]"),
    "structure": (lambda c, x: ({**c, "b": x}, x), TWO, torch.ones(3), {},
                  r"TraceError: a later one has carry\['b'\] but the first iteration does not"),
    "a carried number": (lambda c, x: (c, x), {"a": 3.0}, torch.ones(3), {}, r"TraceError: carry\['a'\] is a float; give"),
    "a returned number": (lambda c, x: (c, {"a": 3.0}), ONE, torch.ones(3), {}, r"TraceError: y\['a'\] is a float; give"),
    "a later y": (lambda c, x: (c, c.new_ones(int(x))), ONE, torch.tensor([2, 3]), {},
                  r"TraceError: y is torch.float32\[2\] in the first .* but torch.float32\[3\] in a later"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name):
    body, carry, xs, options, message = REFUSED[name]
    error, text = message.split(": ", 1)
    with pytest.raises({"ValueError": ValueError, "TraceError": hfta.errors.TraceError}[error], match=text):
        hfta.calls.scan(body, carry, xs, **options)
