"""The tables that contract tests run over: optimizers and workloads. Operators stand in ``rule_cases``, schedules
in ``schedule_cases``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (4, 3), "vector": (5,), "number": ()}
"""Parameters of one member that optimizers are tested on."""


class OptimizerCase(NamedTuple):
    """Ours and torch's, from the same keyword arguments; ``knobs`` holds one value for each of three members.

    Where torch has none, ``theirs`` is a class that codes the paper's equations, with the defaults of its authors.
    """

    name: str
    ours: Callable[..., hfta.GradientTransformation]
    theirs: Callable[..., torch.optim.Optimizer]
    knobs: dict[str, list[Any]]
    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = SHAPES


_ADAM = {
    "lr": [3e-3, 1e-3, 5e-3],
    "betas": [(0.9, 0.999), (0.8, 0.99), (0.5, 0.9)],
    "eps": [1e-8, 1e-6, 1e-4],
    "weight_decay": [0.0, 1e-2, 0.1],
}


class Published(torch.optim.Optimizer):
    """An algorithm as its paper has it, line by line, in the parameters' own dtype."""

    def __init__(self, params: Any, lr: float, *knobs: Any, maximize: bool):
        super().__init__(params, {"lr": lr})
        self.knobs, self.maximize, self.t = knobs, maximize, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.t += 1
        for theta in self.param_groups[0]["params"]:
            grad = -theta.grad if self.maximize else theta.grad
            self.descend(theta, grad, self.param_groups[0]["lr"], self.state[theta])


class Lion(Published):
    """Algorithm 2 of Chen et al., NeurIPS 2023."""

    def __init__(self, params: Any, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, lr, *betas, weight_decay, maximize=maximize)

    def descend(self, theta: Tensor, g: Tensor, lr: float, state: dict[str, Any]) -> None:
        beta1, beta2, weight_decay = self.knobs
        m = state.setdefault("m", torch.zeros_like(theta))
        c = beta1 * m + (1 - beta1) * g
        theta -= lr * (torch.sign(c) + weight_decay * theta)
        state["m"] = beta2 * m + (1 - beta2) * g


class Lamb(Published):
    """Algorithm 2 of You et al., ICLR 2020, a layer being a parameter and its scaling the identity."""

    def __init__(self, params: Any, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, maximize=False):
        super().__init__(params, lr, *betas, eps, weight_decay, maximize=maximize)

    def descend(self, x: Tensor, g: Tensor, lr: float, state: dict[str, Any]) -> None:
        beta1, beta2, eps, weight_decay = self.knobs
        m, v = state.get("mv", (torch.zeros_like(x), torch.zeros_like(x)))
        m, v = state["mv"] = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1**self.t)) / ((v / (1 - beta2**self.t)).sqrt() + eps) + weight_decay * x
        ratio = float(x.norm() / u.norm()) if x.norm() > 0 and u.norm() > 0 else 1.0
        x -= lr * ratio * u


class Muon(Published):
    """Algorithm 2 of Jordan et al., 2024."""

    def __init__(
        self, params: Any, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, eps=1e-7, ns_steps=5,
        ns_coefficients=(3.4445, -4.775, 2.0315), adjust_lr_fn="original", ns_dtype=torch.bfloat16, maximize=False,
    ):  # fmt: skip
        super().__init__(params, lr, weight_decay, momentum, eps, ns_coefficients, ns_steps, maximize=maximize)
        assert nesterov and adjust_lr_fn == "original", "the algorithm as published"

    def descend(self, theta: Tensor, g: Tensor, lr: float, state: dict[str, Any]) -> None:
        weight_decay, mu, eps, (a, b, c), steps = self.knobs
        m = state["m"] = mu * state.get("m", torch.zeros_like(theta)) + (1 - mu) * g
        x = mu * m + (1 - mu) * g
        x = x / max(float(x.norm()), eps)
        wide = x if len(x) <= len(x.T) else x.T
        for _ in range(steps):
            gram = wide @ wide.T
            wide = a * wide + (b * gram + c * gram @ gram) @ wide
        o = wide if len(x) <= len(x.T) else wide.T
        theta -= lr * (max(1, len(x) / len(x.T)) ** 0.5 * o + weight_decay * theta)


_MOMENTUM = {"lr": [0.05, 0.02, 0.1], "momentum": [0.9, 0.0, 0.5], "weight_decay": [0.0, 1e-2, 1e-3]}
_NESTEROV = {**_MOMENTUM, "momentum": [0.9, 0.7, 0.5]}
_RATES = {"lr": [0.02, 0.01, 0.05], "eps": [1e-8, 1e-6, 1e-4], "weight_decay": [0.0, 1e-2, 0.1]}
_ADAGRAD = {**_RATES, "lr_decay": [0.0, 0.1, 0.5], "initial_accumulator_value": [0.0, 0.5, 1.0]}
_RMSPROP = {**_RATES, "lr": [2e-3, 1e-3, 5e-3], "alpha": [0.99, 0.9, 0.5]}
_CENTERED = {**_RMSPROP, "eps": [1e-5, 1e-4, 1e-3], "momentum": [0.9, 0.0, 0.5]}
_LION = {"lr": [1e-3, 3e-4, 2e-3], "betas": [(0.9, 0.99), (0.8, 0.9), (0.5, 0.7)], "weight_decay": [0.0, 1e-2, 0.1]}

_ASGD = {**_RATES, "lambd": [1e-4, 0.0, 0.1], "alpha": [0.75, 0.5, 1.0], "t0": [1e6, 1.0, 2.0]}
del _ASGD["eps"]
_RPROP = {
    "lr": [0.01, 0.03, 0.02],
    "etas": [(0.5, 1.2), (0.7, 1.5), (0.3, 1.1)],
    "step_sizes": [(1e-6, 50.0), (0.025, 0.04), (1e-3, 0.02)],
}
_ADAFACTOR = {
    "lr": [0.01, 0.2, 0.05],
    "beta2_decay": [-0.8, -0.5, -1.0],
    "eps": [(1e-15, 1e-3), (1e-3, 0.1), (0.2, 1e-2)],
    "d": [1.0, 1.5, 1.1],
    "weight_decay": [0.0, 1e-2, 0.1],
}

OPTIMIZERS = [
    OptimizerCase("sgd", hfta.sgd, torch.optim.SGD, {"lr": [0.1, 0.03, 0.2]}, {}),
    OptimizerCase("sgd with momentum", hfta.sgd, torch.optim.SGD, {**_MOMENTUM, "dampening": [0.1, 0.5, 0.0]}, {}),
    OptimizerCase("sgd with nesterov", hfta.sgd, torch.optim.SGD, _NESTEROV, {"nesterov": True}),
    OptimizerCase("adam", hfta.adam, torch.optim.Adam, _ADAM, {}),
    OptimizerCase("adam with amsgrad", hfta.adam, torch.optim.Adam, _ADAM, {"amsgrad": True}),
    OptimizerCase("nadam", hfta.nadam, torch.optim.NAdam, {**_ADAM, "momentum_decay": [4e-3, 1e-2, 0.1]}, {}),
    OptimizerCase("nadam, decoupled", hfta.nadam, torch.optim.NAdam, _ADAM, {"decoupled_weight_decay": True}),
    OptimizerCase("radam", hfta.radam, torch.optim.RAdam, _ADAM, {}),
    OptimizerCase("radam, decoupled", hfta.radam, torch.optim.RAdam, _ADAM, {"decoupled_weight_decay": True}),
    OptimizerCase("adamax", hfta.adamax, torch.optim.Adamax, _ADAM, {}),
    OptimizerCase("adadelta", hfta.adadelta, torch.optim.Adadelta, {**_RATES, "rho": [0.9, 0.8, 0.5]}, {}),
    OptimizerCase("adagrad", hfta.adagrad, torch.optim.Adagrad, _ADAGRAD, {}),
    OptimizerCase("rmsprop", hfta.rmsprop, torch.optim.RMSprop, _RMSPROP, {}),
    OptimizerCase("rmsprop, centered, with momentum", hfta.rmsprop, torch.optim.RMSprop, _CENTERED, {"centered": True}),
    OptimizerCase("asgd", hfta.asgd, torch.optim.ASGD, _ASGD, {}),
    OptimizerCase("rprop", hfta.rprop, torch.optim.Rprop, _RPROP, {}),
    OptimizerCase("adafactor", hfta.adafactor, torch.optim.Adafactor, _ADAFACTOR, {}),
    OptimizerCase("lion", hfta.lion, Lion, _LION, {}),
    OptimizerCase("lamb", hfta.lamb, Lamb, _ADAM, {}),
    OptimizerCase("adamw", hfta.adamw, torch.optim.AdamW, _ADAM, {}),
    OptimizerCase("adamw with amsgrad", hfta.adamw, torch.optim.AdamW, _ADAM, {"amsgrad": True}),
]

_MUON = {"lr": [0.01, 0.1, 0.02], "weight_decay": [0.1, 0.0, 0.5], "momentum": [0.95, 0.9, 0.5]}
_MATRICES = {"tall": (6, 4), "wide": (3, 5), "square": (4, 4)}
MATRIX_OPTIMIZERS = [
    # Some of the norms are below this eps, others above it.
    OptimizerCase("muon", hfta.muon, Muon, _MUON, {"eps": 3.0, "ns_dtype": torch.float64}, _MATRICES)
]
"""Optimizers that only take matrices, so that they cannot train a whole model."""

FUNCTIONS = {case.ours.__name__: case for case in reversed(OPTIMIZERS + MATRIX_OPTIMIZERS)}
"""The first row of each optimizer, by its public name."""


def ours(case: OptimizerCase, members: list[int] | None = None) -> hfta.GradientTransformation:
    """Our optimizer for the given members of three."""
    chosen = range(3) if members is None else members
    knobs: dict[str, Any] = {name: [values[member] for member in chosen] for name, values in case.knobs.items()}
    pairs = {name: tuple(zip(*values, strict=True)) for name, values in knobs.items() if isinstance(values[0], tuple)}
    knobs |= pairs
    return case.ours(**knobs, **case.options)


def theirs(case: OptimizerCase, member: int, parameters: Any) -> torch.optim.Optimizer:
    """Torch's optimizer for one member."""
    return case.theirs(parameters, **{name: values[member] for name, values in case.knobs.items()}, **case.options)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        first, second = (nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout)), (nn.Linear(16, 16), nn.GELU())
        self.layers = nn.Sequential(*first, *second, nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class CNN(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout2d(dropout), nn.Conv2d(4, 6, 2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x.unsqueeze(1)).flatten(1)))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
        # A bias of the keys has no gradient besides rounding, which optimizers that divide by its size blow up.
        layer.self_attn.in_proj_bias = None
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


WORKLOADS: dict[str, Callable[[float], nn.Module]] = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}
"""Models over inputs ``[N, 4, 3]`` and five classes; the argument is the dropout rate."""


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def batches(
    num_models: int, steps: int, rows: int = 6, dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Batches ``[M, N, ...]`` that differ between members and steps."""
    return [
        (torch.randn(num_models, rows, 4, 3, dtype=dtype), torch.randint(5, (num_models, rows))) for _ in range(steps)
    ]


def models(name: str, num_models: int, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    return [WORKLOADS[name](dropout).to(dtype) for _ in range(num_models)]
