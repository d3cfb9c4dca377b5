"""Models whose settings are functions that refer to the model, and other structures that models are made of."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from ways import WAYS, assert_as_alone

pytestmark = pytest.mark.usefixtures("one_thread", "double")


class Model(nn.Module):
    """A layer, and what ``build`` adds to it."""

    def __init__(self, build: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(4, 4)
        self.call: Any = None
        build(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x) if self.call is not None else self.layer(x)


def by_attribute(model):
    model.call = lambda x: model.layer(x).tanh()


def by_hook(model):
    model.outputs = {}
    model.layer.register_forward_hook(lambda module, args, output: model.outputs.__setitem__("layer", output))
    model.call = lambda x: model.layer(x) + model.outputs["layer"]


def by_replaced_forward(model):
    before = model.layer.forward
    model.layer.forward = lambda x: before(x).tanh()


def traced(model):
    model.layer = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def compiled(model):
    model.layer = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")


@torch.jit.script
def scripted_function(x):
    return x * 2 + 1


def scripted(model):
    model.call = lambda x: scripted_function(model.layer(x))


def generators(model):
    model.generators = [torch.Generator(), random.Random(3), np.random.RandomState(3), np.random.default_rng(3)]


def sparse_constants(model):
    model.coo, model.csr = torch.eye(5).to_sparse(), (2 * torch.eye(5)).to_sparse_csr()
    model.call = lambda x: torch.sparse.mm(model.coo, model.layer(x)) + model.csr @ model.layer(x)


def constants(model):
    # A compiler learns only on its way that the first is a number, and begins again.
    model.number, model.row, model.scale = torch.tensor(0.5), torch.arange(4.0), 1 / np.sqrt(3)
    model.call = lambda x: model.scale * model.layer(x) * model.number + model.row / model.scale


BUILDS = [
    by_attribute, by_hook, by_replaced_forward, traced,
    compiled, scripted, generators, sparse_constants, constants,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning", "ignore:Sparse CS", "ignore:.*torch.jit.script")
@pytest.mark.exhaustive(ids="-compiled$")
@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_as_alone(build, count, way):
    if build in (compiled, scripted, sparse_constants) and way == "compiled":
        pytest.skip("a compiled step refuses it: Dynamo does not trace such parts inside of another graph")
    assert_as_alone(lambda: Model(build), torch.randn(3, 5, 4), way, count)


def differs(name: str, value: Any) -> Callable[[Any], None]:
    """A ``build`` that sets an attribute."""
    return lambda model: setattr(model, name, value)


def slope(negative: float) -> Callable[[Tensor], Tensor]:
    """An activation with a number in its closure."""
    return lambda x: F.leaky_relu(x, negative)


@dataclasses.dataclass
class Settings:
    """Compares as a tuple of tensors, which has no truth value."""

    scale: Any = dataclasses.field(default_factory=lambda: torch.ones(4))
    noted: Any = dataclasses.field(default_factory=random.random, compare=False)


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (traced, differs("layer", torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)).double())), "layer"),
        *(
            (differs("act", first), differs("act", second), f"act{where}")
            for first, second, where in [
                (F.relu, F.gelu, ""),
                (slope(0.1), slope(0.2), ".negative"),
                (Settings(torch.ones(4)), Settings(torch.zeros(4)), ".scale"),
                (np.zeros(2), np.zeros(3), ""),
                (np.zeros(2), np.array([0.0, 1.0]), ""),
                ([functools.partial(max, 1), functools.partial(max, 2)], [functools.partial(max, 1)] * 2, r"\[1\]"),
                ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, r"\['a'\]"),
                (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), ".a"),
            ]
        ),
    ],
)
def test_structures_that_differ_are_refused(first, second, names):
    hfta.stack_params([Model(first), Model(first)])
    with pytest.raises(hfta.errors.StackError, match=f"model 1: '{names}"):
        hfta.stack_params([Model(first), Model(second)])


def noting_hook(model):
    noted = {}
    model.layer.register_forward_hook(lambda module, args, output: noted.update(layer=output.detach()))
    model(torch.randn(2, 4))


@pytest.mark.parametrize("way", ["together", "evaluated"])
def test_hooks_whose_tensors_are_the_members_own(way):
    assert_as_alone(lambda: Model(noting_hook), torch.randn(3, 5, 4), way)


def test_what_cannot_be_stacked_is_refused():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(hfta.errors.StackError, match="'0' is a ScriptModule"):
        hfta.stack_params([model, model])


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, False, True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, self.mask], F.tanh(self.layer(x[:, ~self.mask]))], 1)


def test_a_mask_selects_entries_if_it_is_shared():
    with pytest.warns(hfta.errors.LoopWarning, match="share_frozen=True"):
        assert_as_alone(Coupling, torch.randn(3, 5, 4), "together")
    x = torch.randn(5, 4)
    layers = [Coupling() for _ in range(3)]
    ensemble = hfta.Ensemble.from_modules(layers, share_frozen=True)
    torch.testing.assert_close(ensemble(x), torch.stack([layer(x) for layer in layers]))


def penalised_list(model):
    model.penalised = [model.layer.weight, model.layer.bias]
    model.call = lambda x: model.layer(x) + x @ model.penalised[0] + model.penalised[1]


def mixed_containers(model):
    model.held = {"a": (model.layer.bias, [model.layer.weight], 2)}
    model.call = lambda x: x @ model.held["a"][1][0] + model.held["a"][0] * model.held["a"][2]


def buffer_list(model):
    model.register_buffer("scale", torch.randn(4))
    model.scales = [model.scale]
    model.call = lambda x: model.layer(x) * model.scales[0]


def through_an_optimizer(model):
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.call = lambda x: model.layer(x) + x @ model.optimizer.param_groups[0]["params"][0]


def closure(model):
    weight = model.layer.weight
    model.call = lambda x: model.layer(x) + x @ weight


def partial(model):
    model.call = functools.partial(F.linear, weight=model.layer.weight, bias=model.layer.bias)


def held_functions(model):
    model.first = types.SimpleNamespace(call=lambda x: model.layer(x))
    model.second = functools.partial(lambda scale, x: model.layer(x) * scale, 2.0), lambda x: x @ model.layer.weight
    model.call = lambda x: model.first.call(x) + model.second[0](x) + model.second[1](x)


REFERRING = [penalised_list, mixed_containers, buffer_list, through_an_optimizer, closure, partial, held_functions]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
@pytest.mark.parametrize("build", REFERRING)
def test_what_refers_to_parameters_and_modules(build, way, count):
    assert_as_alone(lambda: Model(build), torch.randn(3, 5, 4), way, count)
