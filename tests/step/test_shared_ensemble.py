"""An ensemble over what its members share: one copy, the loop's numbers, and one gradient that is the sum of theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.errors import StackError
from member_runs import mse
from test_ensemble import SEEDS, M, X, assert_same

SHARED = {"trunk.weight", "trunk.bias"}
BASE = {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias", "mask.offset"}
BASE |= {f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


class Mask(nn.Module):
    """A module with a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Net(nn.Module):
    """A frozen base with running statistics, a trained trunk, and a head with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.mask = Mask()
        self.trunk = nn.Linear(5, 6)
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        self.double()
        self.base(3 * torch.randn(20, 4).double() + 1)
        self.base.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(self.mask(self.base(x)))))


def models() -> list[Any]:
    torch.manual_seed(1)
    found = [Net() for _ in range(M)]
    for model in found[1:]:
        model.base, model.mask, model.trunk = found[0].base, found[0].mask, found[0].trunk
    return found


def ensemble(given: list[Any] | None = None) -> hfta.Ensemble:
    given = models() if given is None else given
    return hfta.Ensemble.from_modules(given, seeds=SEEDS, share_frozen=True, shared_params=["trunk"])


def loss(outputs: Tensor) -> Tensor:
    return (outputs - torch.arange(len(outputs))[:, None, None]).square().mean((1, 2)).sum()


@pytest.mark.parametrize("shared", [False, True])
def test_one_copy_and_the_gradients_of_the_loop(shared: bool) -> None:
    given = models()
    options = {"share_frozen": True, "shared_params": ["trunk"] if shared else []}
    whole = hfta.Ensemble.from_modules(given, **options).eval()
    members = [model.eval() for model in models()]
    if not shared:
        for member in members[1:]:
            member.trunk = copy.deepcopy(member.trunk)
    outputs, expected = whole(X, batch_dims=0), torch.stack([m(x) for m, x in zip(members, X, strict=True)])
    assert_same(outputs, expected)
    assert_same(whole(X[0]), torch.stack([m(X[0]) for m in members]))
    loss(outputs).backward()
    loss(expected).backward()
    alone = [dict(member.named_parameters()) for member in members]
    for path, parameter in whole.array.named_parameters():
        one = shared and path in SHARED
        if path in BASE:
            assert parameter.grad is None and not parameter.requires_grad and parameter.shape == alone[0][path].shape
            assert parameter.data_ptr() == given[0].get_parameter(path).data_ptr(), "the base is not copied"
        else:
            assert_same(parameter.grad, alone[0][path].grad if one else torch.stack([own[path].grad for own in alone]))
    assert whole.stacked().params.keys().isdisjoint(BASE) and whole.shared().keys() == (SHARED if shared else set())
    held = {path.removeprefix("array.") for path in whole.state_dict()}
    assert held - {"keys", "calls"} == given[0].state_dict().keys()


def test_trained_by_torch_it_is_the_array_that_steps_train() -> None:
    given = models()
    before = copy.deepcopy(given[0].state_dict())
    whole = ensemble(given)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    sgd, sharing = hfta.sgd(lr=0.05, momentum=0.9), {"share_frozen": True, "shared_params": ["trunk"]}
    step = hfta.make_train_step(given[0], mse, sgd, **sharing)
    state = step.init(*hfta.stack_params(given, **sharing), seeds=SEEDS)
    torch.manual_seed(5)
    for number in range(20):
        x, y = torch.randn(M, 8, 4).double(), torch.randn(M, 8, 2).double()
        state, _ = step(state, (x, y))
        # The base stays in eval mode, whatever mode the ensemble is set to.
        whole.eval().train(number != 3)
        whole.train()
        optimizer.zero_grad()
        (whole(x, batch_dims=0) - y).square().mean((1, 2)).sum().backward()
        optimizer.step()
    assert_same(dict(whole.stacked().params), state.params)
    assert_same(dict(whole.stacked().buffers), state.buffers)
    assert_same(whole.shared(), state.shared.params)
    after = given[0].state_dict()
    assert all(torch.equal(after[path], value) for path, value in before.items()), "the models are not written"
    # Out of a training state, and what both predict.
    again = hfta.Ensemble(
        given[0], state.params, state.buffers, seeds=SEEDS, share_frozen=True, shared=state.shared.params
    )
    x = X.reshape(15, 4)
    expected = whole.predict(x).outputs
    assert_same(again.predict(x).outputs, expected)
    assert_same(hfta.predict(given[0], state, x, share_frozen=True).outputs, expected)


def test_members_and_parts_of_it() -> None:
    whole = ensemble()
    whole.train()(X[0])
    members = whole.members()
    assert all(member.trunk.weight is members[0].trunk.weight for member in members)
    assert members[0].trunk.weight.data_ptr() != whole.shared()["trunk.weight"].data_ptr()
    assert all(member.base[0].weight is members[0].base[0].weight for member in members)
    assert members[0].base[0].weight.data_ptr() == whole.array.base.get_parameter("0.weight").data_ptr()
    assert members[0].training and not members[0].base[1].training
    outputs = whole.eval()(X, batch_dims=0)
    assert_same(torch.stack([member.eval()(x) for member, x in zip(members, X, strict=True)]), outputs)
    assert_same(ensemble(members).eval()(X, batch_dims=0), outputs)
    few = whole.take([2, 0])
    assert few.num_models == 2 and few.calls.tolist() == [1, 1]
    assert_same(few(X[[2, 0]], batch_dims=0), outputs[[2, 0]])
    few.shared()["trunk.weight"].data.zero_()
    assert whole.shared()["trunk.weight"].any()
    few.stacked().params["head.2.weight"].data.zero_()
    assert whole.stacked().params["head.2.weight"].any()


@pytest.mark.exhaustive
def test_compiled_and_exported() -> None:
    torch._dynamo.reset()
    whole, twin = ensemble(), ensemble()
    graphs = []
    compiled = torch.compile(whole, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for mode in (True, False, True):
        assert_same(compiled.train(mode)(X, batch_dims=0), twin.train(mode)(X, batch_dims=0))
    assert len(graphs) == 2
    assert_same(whole.state_dict(), twin.state_dict())
    whole.eval()
    program = torch.export.export(whole, (X[0],), dynamic_shapes={"args": ({0: torch.export.Dim("n", min=2)},)})
    inputs = torch.randn(7, 4).double()
    assert_same(program.module()(inputs), whole(inputs))
    held = program.state_dict
    assert held["array.trunk.weight"].shape == (6, 5) and held["array.base.0.weight"].shape == (5, 4)


def test_bad_input_is_refused_with_a_cure() -> None:
    given = models()
    given[0].base.train()
    with pytest.raises(hfta.errors.StateError, match=r"writes 'base.1.* in eval mode, or leave out share_frozen"):
        ensemble(given)(X[0])
    given = models()
    stacked = hfta.stack_params(given, share_frozen=True, shared_params=["trunk"])
    with pytest.raises(StackError, match="pass the model that the array was stacked from, and the same share_frozen"):
        hfta.Ensemble(given[0], *stacked, share_frozen=True)
    with pytest.raises(StackError, match="is in the array but members share it"):
        hfta.Ensemble(given[0], *hfta.stack_params(given), share_frozen=True)
    given[1].trunk = nn.Linear(5, 6).double()
    with pytest.raises(StackError, match=r"model 1: .* entries of the shared 'trunk.weight' are not those of model 0"):
        ensemble(given)
