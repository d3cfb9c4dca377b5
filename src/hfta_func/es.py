"""Evolution strategies: populations that learn from numbers alone, without gradients.

A run is one model, the *base*. In each generation its population is the base with Gaussian noise, in antithetic pairs; the
base then moves along the noise, weighted by how well its members did. Noise is drawn by key from seed and step, so a
population needs no memory between evaluation and update. R runs are an array of R members as everywhere, with own seed,
learning rate and ``sigma``.

Import it by name: ``from hfta_func import es``.

References:
    Salimans et al., "Evolution strategies as a scalable alternative to reinforcement learning", 2017, arXiv 1703.03864.
    Sarkar et al., "Evolution strategies at the hyperscale", 2025, arXiv 2511.16652 (EGGROLL: noise of low rank).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfta_func import random
from hfta_func._tree import per_model, tree_map
from hfta_func._types import Params, PerModel, Tree, check_counts
from hfta_func.errors import BatchError, HyperparameterError
from hfta_func.models.sizes import joined
from hfta_func.models.skeleton import outline
from hfta_func.optim._base import GradientTransformation, Range, check
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep, make_train_step

# Folded into the members' keys, as all numbers of this package negative.
NOISE = -(2**62) - 2**56
_BLOCK, _PAIRS = 1 << 16, 256
"""Numbers that are drawn together, which stay in the cache, and pairs whose noise is in memory together for an update."""


def make_strategy(
    model: nn.Module,
    optimizer: GradientTransformation,
    *,
    population: int = 64,
    sigma: PerModel = 0.1,
    rank: int | None = None,
    evaluate: Callable[[TrainState], Tensor] | None = None,
    **options: Any,
) -> Strategy:
    """An evolution strategy for a model, whose parameters that require grad are perturbed; nothing needs a derivative.

    Half of the N members are ``base + sigma E_i``, the others ``base - sigma E_i``. A generation moves the base by what
    ``optimizer`` makes of the gradient ``-(1 / (N sigma)) sum_i u_i E_i``, with ranks ``u_i`` from -0.5 for the smallest
    fitness to 0.5 for the largest. Equal members have the mean of their ranks, so a population of equals stays where it is.
    A member whose fitness is NaN is ranked last. Where no member's is finite, the run fails, as for a loss that is NaN.

    Args:
        model: Any module of the architecture.
        optimizer: For example ``adam(lr=1e-2)``; schedules, weight decay and one value per run work as everywhere.
        population: Number of members of a run, N, which is even.
        sigma: Standard deviation of the noise, one number or one per run. In a state it is ``hparams["sigma"]``.
        rank: Draw noise of a matrix ``[m, n]`` as ``A B^T / sqrt(rank)``, of matrices ``[m, rank]`` and ``[n, rank]``, where
            these have fewer numbers than the matrix. Every number of other parameters, such as biases, has noise of its own.
            Kernels of convolutions are matrices ``[m, -1]``. In a ``nn.Linear`` that holds its weight alone, ``A B^T`` is
            never formed: members share the base's weight and add two thin products. Elsewhere it is formed.
        evaluate: ``evaluate(members) -> fitness [R * N]``, larger is better, for ``fit(strategy.step, state, [None] * n)``
            and studies. Members are what :meth:`Strategy.ask` returns. Not needed with :meth:`Strategy.tell`.
        options: Further arguments of :func:`make_train_step`, such as ``nonfinite`` or ``donate``.

    Raises:
        HyperparameterError: if the population is odd or ``sigma`` is not positive.
        ValueError: if ``population`` or ``rank`` is no count.

    Example:
        >>> from hfta_func import adam, es, make_eval_step, stack_params
        >>> model, x = torch.nn.Linear(2, 1), torch.randn(32, 2)
        >>> def rounded(model, x):
        ...     return -(model(x)[:, 0].round() - x.sum(1)).abs().mean()
        >>> strategy = es.make_strategy(model, adam(lr=0.1), population=16)
        >>> evaluate = make_eval_step(strategy.model, rounded)
        >>> state = strategy.init(*stack_params([model]), seeds=[0])
        >>> for _ in range(40):
        ...     fitness = evaluate(strategy.ask(state), x)["rounded"]
        ...     state, metrics = strategy.tell(state, fitness)
        >>> bool(metrics["fitness"] > -0.5)
        True
    """
    return Strategy(model, optimizer, population, sigma, rank, evaluate, options)


class Strategy:
    """An evolution strategy, made by :func:`make_strategy`.

    Attributes:
        model: What members of :meth:`ask` are parameters of, for :func:`make_eval_step`, :func:`functional` or
            ``rl.make_policy``: the given model, or with ``rank`` a copy that has the factors of each layer's noise, too.
        step: A :class:`TrainStep`; with ``evaluate``, ``step(state)`` is a generation, and :func:`fit` trains by it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: GradientTransformation,
        population: int,
        sigma: PerModel,
        rank: int | None,
        evaluate: Callable[[TrainState], Tensor] | None,
        options: dict[str, Any],
    ):
        check_counts(population=population, rank=1 if rank is None else rank)
        check("sigma", sigma, Range.POSITIVE)
        if population % 2:
            raise HyperparameterError(f"population is {population}; give an even number, as members come in pairs")
        self._made_from = model, optimizer, population, sigma, rank, evaluate, options
        self.population, self.sigma = population, sigma
        collect = None if evaluate is None else functools.partial(_generation, self, evaluate)
        self.step: TrainStep = make_train_step(model, _along, optimizer, collect=collect, **options)
        shapes = {path: param.shape for path, param in model.named_parameters() if path in self.step.trainable}
        # By path, the shapes of what is drawn: one tensor, or the two factors of a matrix.
        self._drawn = {path: _factors(shape, rank) or [shape] for path, shape in shapes.items()}
        self.model, self._layers = model, dict[str, tuple[str, str]]()
        if rank is not None:
            self.model = outline(model, self.step.options.share_frozen)
            self._factor()

    def __reduce__(self) -> Any:
        return Strategy, self._made_from

    def _factor(self) -> None:
        """Let linear layers add the products of factors, unless another module holds their weight, too."""
        held = [id(param) for _, param in self.model.named_parameters(remove_duplicate=False)]
        for path, layer in self.model.named_modules():
            weight = joined(path, "weight")
            if type(layer) is nn.Linear and len(self._drawn.get(weight, ())) == 2 and held.count(id(layer.weight)) == 1:
                self._layers[weight] = joined(path, "left"), joined(path, "right")
                for name, shape in zip(("left", "right"), self._drawn[weight], strict=True):
                    layer.register_parameter(name, nn.Parameter(layer.weight.new_zeros(shape)))
                layer.__class__ = _Factored

    def init(self, params: Params, buffers: Params | None = None, *, seeds: Any, **more: Any) -> TrainState:
        """The state before the first generation, see :meth:`TrainStep.init`: an array with a member for each run."""
        hparams = {"sigma": self.sigma, **more.pop("hparams", {})}
        return self.step.init(params, buffers, seeds=seeds, hparams=hparams, **more)

    @torch.no_grad()
    def ask(self, state: TrainState, pairs: slice = slice(None)) -> TrainState:
        """The population of a generation as an array of R * N members, run by run, the two members of a pair side by side.

        Args:
            state: The state of R runs.
            pairs: Some of the N / 2 pairs only, for a population that does not fit into memory at once. A member is the same
                whatever others are asked for.

        Returns:
            A state of these members without an optimizer. The members of a run have one key, so that each meets the same
            noise, such as the same episodes: ``rl.start(environment, random.fold_in(members.keys, members.step), num_envs)``.
        """
        chosen = torch.arange(self.population // 2, device=state.keys.device)[pairs]
        apart = state._replace(opt_state=(), loss_scale=(), carry=())
        # A run alone is seen by its members, not copied.
        members = tree_map(lambda leaf: _flat(leaf.unsqueeze(1).expand(-1, 2 * len(chosen), *leaf.shape[1:])), apart)
        for path, noise in self._noise(state, chosen):
            sigma = per_model(state.hparams["sigma"], noise[0])
            if path in self._layers:
                left, right = self._layers[path]
                factor = sigma / math.sqrt(noise[0].shape[-1]) * noise[0]
                members.params[left] = _flat(_flat(torch.stack([factor, -factor], 2)))
                members.params[right] = _flat(noise[1].repeat_interleave(2, 1))
            else:
                base = state.params[path].unsqueeze(1)
                whole = noise[0] if len(noise) == 1 else noise[0] @ noise[1] / math.sqrt(noise[0].shape[-1])
                offset = (sigma * whole).reshape(len(base), len(chosen), *base.shape[2:])
                members.params[path] = _flat(_flat(torch.stack([base + offset, base - offset], 2)))
        return members

    def tell(self, state: TrainState, fitness: Sequence[float] | Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """The state after a generation, and what :class:`TrainStep` reports ``[R]``, with the mean ``fitness`` of members
        that are finite and the ``best``; ``loss`` is the negative mean.

        Args:
            state: The state that :meth:`ask` was given.
            fitness: One number for each member ``[R * N]``, larger is better, in the order of :meth:`ask`.

        Raises:
            BatchError: if there is not one number for each member.
        """
        return self.step(state, self._told(state, fitness))

    @torch.no_grad()
    def _told(self, state: TrainState, fitness: Any) -> Tree:
        """The batch of a step: fitness ``[R]``, and gradients ``[R, ...]`` by path."""
        given = torch.as_tensor(fitness, device=state.keys.device).detach().double()
        runs, count = len(state.keys), self.population
        if given.shape != (runs * count,):
            raise BatchError(f"fitness is {[*given.shape]}, but must be [{runs * count}], a number for each member")
        values, sigma = given.reshape(runs, count), state.hparams["sigma"]
        mean = torch.where(values.isfinite(), values, torch.nan).nanmean(1)
        shares = ranks(values).unflatten(1, (-1, 2))
        weight = (shares[..., 1] - shares[..., 0]) / (count * per_model(sigma, values))
        slopes: Params = {path: torch.zeros_like(param) for path, param in state.params.items() if path in self._drawn}
        # Not all pairs at once, which would be half a population in memory.
        for pairs in torch.arange(count // 2, device=given.device).split(_PAIRS):
            for path, noise in self._noise(state, pairs):
                by = weight[:, pairs].to(noise[0].dtype)
                if len(noise) == 2:
                    by = by / math.sqrt(noise[0].shape[-1])
                    slope = torch.einsum("rp,rpmk,rpkn->rmn", by, *noise)
                else:
                    slope = torch.einsum("rp,rpd->rd", by, noise[0].flatten(2))
                slopes[path] += slope.reshape(slopes[path].shape)
        best = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(1)
        return {"fitness": mean.to(sigma.dtype), "best": best.to(sigma.dtype), "slope": slopes}

    def _noise(self, state: TrainState, pairs: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
        """Each path with what is drawn for its pairs, ``[R, pairs, ...]``."""
        keys = random.fold_in(random.fold_in(random.fold_in(state.keys, NOISE), state.step).unsqueeze(1), pairs)
        numbers = iter(range(2 * len(self._drawn)))
        for path, shapes in self._drawn.items():
            kind = state.params[path].dtype
            yield path, [_normal(random.fold_in(keys, next(numbers)), shape, kind) for shape in shapes]


def ranks(fitness: Tensor) -> Tensor:
    """Centred ranks ``[R, N]`` of fitness, from -0.5 to 0.5; equal members have the mean of their ranks, and NaN is last.

    Args:
        fitness: ``[R, N]``, larger is better.

    Example:
        >>> ranks(torch.tensor([[3.0, 9.0, 3.0, float("nan"), 5.0]]))
        tensor([[-0.1250,  0.5000, -0.1250, -0.5000,  0.2500]])
    """
    values = fitness.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).contiguous()
    order = values.sort(1).values
    # Of members that are equal, the first and the last place; places are twice the rank.
    places = torch.searchsorted(order, values) + torch.searchsorted(order, values, right=True) - 1
    return places.to(fitness.dtype) / (2 * (fitness.shape[1] - 1)) - 0.5


class _Factored(nn.Linear):
    """A linear layer whose weight is a base and ``left @ right``, which no call forms."""

    left: Tensor
    right: Tensor
    # What reads it outside of a call, such as a transformer's fast path, gets the sum.
    weight: Any = property(lambda self: nn.Module.__getattr__(self, "weight") + self.left @ self.right)

    def forward(self, input: Tensor) -> Tensor:
        base: Any = nn.Module.__getattr__(self, "weight")
        return F.linear(input, base, self.bias) + F.linear(F.linear(input, self.right), self.left)


def _along(model: nn.Module, batch: Any, hparams: Params) -> tuple[Tensor, Params]:
    """A loss whose value is the negative fitness and whose gradient is that of the batch."""
    params = dict(model.named_parameters())
    along = torch.stack([(params[path] * slope).sum() for path, slope in batch["slope"].items()]).sum()
    return along - along.detach() - batch["fitness"], {name: batch[name] for name in ("fitness", "best")}


def _generation(strategy: Strategy, evaluate: Callable[[TrainState], Tensor], state: TrainState) -> tuple[Tree, Tree]:
    batch = strategy._told(state, evaluate(strategy.ask(state)))
    return state.carry, tree_map(lambda leaf: leaf.unsqueeze(0), batch)


def _factors(shape: Sequence[int], rank: int | None) -> list[tuple[int, int]]:
    """The shapes of a matrix's factors; none if they would not be smaller."""
    if rank is None or len(shape) < 2:
        return []
    m, n = shape[0], math.prod(shape[1:])
    return [(m, rank), (rank, n)] if rank * (m + n) < m * n else []


def _flat(leaf: Tensor) -> Tensor:
    return leaf.flatten(0, 1)


def _normal(keys: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal draws ``[R, pairs, *shape]``."""
    count = max(1, _BLOCK // max(1, len(keys) * math.prod(shape)))
    return torch.cat([random.normal(part, shape, dtype=dtype) for part in keys.split(count, 1)], 1)
