"""Models of packages that people use, unmodified: members of an array are what PyTorch trains and evaluates one by one.

torchvision, which timm needs, is published for CUDA only, and keeps transformers from loading beside PyTorch for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import rtdl_num_embeddings
import snntorch
import torch
import torch_geometric.nn as graphs
import torchdiffeq
import zuko
from snntorch import surrogate
from tabm import TabM
from torch import Tensor, nn

import hfta_func as hfta
from ways import Calls, InFloat64, assert_as_alone, loss

# Most of these packages write autograd functions without rules, and solvers with steps of their own.
pytestmark = [
    pytest.mark.usefixtures("one_thread", "double"),
    pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning"),
]
M, N = 3, 7
WAYS = ("together", "evaluated")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


EDGES = torch.randint(N, (M, 2, 12), generator=torch.Generator().manual_seed(2))


def on_graph(module: nn.Module, batch: dict[str, Tensor], *, weights: str | None = None, pool: Any = None) -> Tensor:
    outputs = module(batch["nodes"], batch.get("edges", EDGES[0]), *(() if weights is None else (batch[weights],)))
    return outputs if pool is None else pool(outputs, torch.tensor([0, 0, 0, 1, 1, 2, 2]))


GRAPHS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "attention": (lambda: graphs.GATConv(4, 3, heads=2, edge_dim=2), {"weights": "features"}),
    "convolution": (lambda: graphs.GCNConv(4, 5), {"weights": "weights"}),
    "edges": (lambda: graphs.EdgeConv(perceptron(8, 5)), {}),
    "isomorphism": (lambda: graphs.GINConv(perceptron(4, 5), train_eps=True), {}),
    "many layers": (lambda: graphs.GraphSAGE(4, 6, 2, 3, jk="lstm", norm="BatchNorm"), {}),
    "neighbours": (lambda: graphs.SAGEConv(4, 5, aggr="max"), {}),
    "polynomials": (lambda: graphs.ChebConv(4, 5, 3), {}),
    "principal": (
        lambda: graphs.PNAConv(4, 5, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([0, 2, 3, 2])),
        {},
    ),
    "transformer": (lambda: graphs.TransformerConv(4, 3, heads=2, beta=True, edge_dim=2), {"weights": "features"}),
    "pooled by maximum": (lambda: graphs.GraphConv(4, 5), {"pool": graphs.global_max_pool}),
    "pooled by sum": (lambda: graphs.GCN(4, 6, 2, 5, norm="GraphNorm"), {"pool": graphs.global_add_pool}),
}


def graph_model(name: str) -> nn.Module:
    make, options = GRAPHS[name]
    return Calls(make(), lambda module, batch: on_graph(module, batch, **options))


def graph_batch(**more: Tensor) -> dict[str, Tensor]:
    return {"nodes": randn(M, N, 4), "weights": randn(M, 12).square(), "features": randn(M, 12, 2), **more}


@pytest.mark.sampled(every=3)
@pytest.mark.exhaustive(unless="^(convolution|transformer)-")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str, way: str) -> None:
    # The first layer of its class in a process fills caches.
    graph_model(name)
    assert_as_alone(lambda: graph_model(name), graph_batch(), way)


@pytest.mark.parametrize("name", ["neighbours", "transformer", "convolution"])
def test_each_member_has_a_graph_of_its_own(name: str) -> None:
    # A convolution looks for self-loops, of which each graph may have another number: members run one after another.
    graph_model(name)
    assert_as_alone(lambda: graph_model(name), graph_batch(edges=EDGES), "together")


_SMALL: dict[str, Any] = {"transforms": 2, "hidden_features": (6,)}
FLOWS: dict[str, Callable[[], nn.Module]] = {
    "autoregressive": lambda: zuko.flows.MAF(3, 2, **_SMALL),
    "continuous": lambda: zuko.flows.CNF(3, 2, hidden_features=(6,)),
    "Gaussianisation": lambda: zuko.flows.GF(3, 2, **_SMALL),
    "neural": lambda: zuko.flows.NAF(3, 2, **_SMALL),
    "splines": lambda: zuko.flows.NSF(3, 2, **_SMALL),
    "sums of squares": lambda: zuko.flows.SOSPF(3, 2, **_SMALL),
}


def density(flow: nn.Module, batch: Tensor) -> Tensor:
    return 0.1 * flow(batch[:, :2]).log_prob(batch[:, 2:])


@pytest.mark.exhaustive(unless="^(autoregressive|sums of squares)-")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FLOWS)
def test_flows(name: str, way: str) -> None:
    assert_as_alone(lambda: Calls(FLOWS[name](), density), 0.5 * randn(M, N, 5), way)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", [zuko.flows.NICE, zuko.flows.RealNVP])
def test_flows_whose_layers_select_by_masks_share_them(kind: Any) -> None:
    """They read values of their buffers, which are their own or of a base."""

    def make() -> nn.Module:
        return Calls(kind(3, 2, **_SMALL), density)

    batch = randn(M, N, 5)
    for options in ({}, {"share_frozen": True}):
        assert_as_alone(make, batch, "together", **options)
    models = [make() for _ in range(M)]
    evaluate = hfta.make_eval_step(models[0], loss, batch_dims=0, share_frozen=True)
    values = evaluate(hfta.stack_params(models, share_frozen=True), batch)["loss"]
    for value, model, own in zip(values, models, batch, strict=True):
        torch.testing.assert_close(value, loss(model.eval(), own).detach(), rtol=1e-10, atol=1e-12)


class Spiking(nn.Module):
    def __init__(self, neuron: Callable[[], nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 2)])
        self.neuron, self.last = neuron(), snntorch.Leaky(beta=0.8, learn_beta=True, learn_threshold=True)

    def forward(self, x: Tensor) -> Tensor:
        state, last, outputs = self.neuron.reset_mem(), self.last.reset_mem(), []
        state = state if isinstance(state, tuple) else (state,)
        for step in range(4):
            spikes, *state = self.neuron(self.layers[0](x) * (step + 1) / 2, *state)
            _, last = self.last(self.layers[1](spikes), last)
            outputs.append(last)
        # What a call has computed.
        self.neuron.reset = self.last.reset = None
        return torch.stack(outputs)


NEURONS: dict[str, Callable[[], nn.Module]] = {
    "alpha": lambda: snntorch.Alpha(beta=0.7, alpha=0.9),
    "arctangent": lambda: snntorch.Leaky(beta=0.9, spike_grad=surrogate.atan()),
    "sigmoid": lambda: snntorch.Leaky(beta=0.9, spike_grad=surrogate.sigmoid(), learn_beta=True),
    "synaptic": lambda: snntorch.Synaptic(beta=0.9, alpha=0.7),
}


@pytest.mark.filterwarnings("ignore:the model writes its buffer")
@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(unless="^(arctangent|synaptic)-")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NEURONS)
def test_spikes(name: str, way: str) -> None:
    with InFloat64():
        assert_as_alone(lambda: Spiking(NEURONS[name]), 2 * randn(M, N, 4), way)


def tabular(**options: Any) -> nn.Module:
    sizes = {"n_num_features": 4, "cat_cardinalities": [3], "d_out": 2, "n_blocks": 2, "d_block": 8, "k": 4}
    model = TabM.make(**sizes, dropout=0.0, **options)
    return Calls(model, lambda model, x: model(x, x[:, :1].abs().long().clamp(max=2)))


TABLES: dict[str, Callable[[], nn.Module]] = {
    "mini": lambda: tabular(arch_type="tabm-mini"),
    "packed": lambda: tabular(arch_type="tabm-packed"),
    "periodic": lambda: tabular(num_embeddings=rtdl_num_embeddings.PeriodicEmbeddings(4, 4, lite=False)),
    "pieces": lambda: tabular(
        num_embeddings=rtdl_num_embeddings.PiecewiseLinearEmbeddings(
            rtdl_num_embeddings.compute_bins(randn(50, 4), n_bins=5), 4, activation=False, version="B"
        )
    ),
}


@pytest.mark.exhaustive(unless="^(mini|pieces)-")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, way: str) -> None:
    assert_as_alone(TABLES[name], randn(M, N, 4), way)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron(3, 3)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.layers(y) * (1 + t)


def solve(solver: Callable[..., Tensor], method: str, **options: Any) -> Callable[[], nn.Module]:
    times = torch.tensor([0, 0.4, 1], dtype=torch.float64)
    return lambda: Calls(Field(), lambda field, x: solver(field, x, times, method=method, **options))


SOLVERS: dict[str, Callable[[], nn.Module]] = {
    "adjoint of dopri5": solve(torchdiffeq.odeint_adjoint, "dopri5", rtol=1e-3, atol=1e-4),
    "adjoint of rk4": solve(torchdiffeq.odeint_adjoint, "rk4", options={"step_size": 0.25}),
    "dopri5": solve(torchdiffeq.odeint, "dopri5", rtol=1e-3, atol=1e-4),
    "explicit Adams": solve(torchdiffeq.odeint, "explicit_adams", options={"step_size": 0.25}),
    "rk4": solve(torchdiffeq.odeint, "rk4", options={"step_size": 0.25}),
}


@pytest.mark.exhaustive(unless="^(dopri5-evaluated|rk4-together)")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOLVERS)
def test_differential_equations(name: str, way: str) -> None:
    assert_as_alone(SOLVERS[name], randn(M, N, 3), way)


X = randn(8, 2)


class Exact(gpytorch.models.ExactGP):
    def __init__(self, kernel: type[Any], likelihood: Any):
        super().__init__(X, X.sum(1), likelihood)
        self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.ScaleKernel(kernel())

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class Marginal(nn.Module):
    """The negative marginal likelihood of targets in training; the mean of predictions otherwise."""

    def __init__(self, kernel: type[Any]):
        super().__init__()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.process = Exact(kernel, self.likelihood)
        self.objective = gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self.process)
        for param in self.process.parameters():
            nn.init.normal_(param, std=0.3)

    def forward(self, y: Tensor) -> Tensor:
        if self.training:
            return -self.objective(self.process(X), y)
        # Predictions are kept from call to call, for whatever parameters came first.
        self.process.prediction_strategy = None
        return self.process(X + y[:, None]).mean


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [gpytorch.kernels.RBFKernel, gpytorch.kernels.MaternKernel])
def test_gaussian_processes(kernel: type[Any], way: str) -> None:
    assert_as_alone(lambda: Marginal(kernel), randn(M, 8), way, tolerance=1e-9)
