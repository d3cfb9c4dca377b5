"""One model in every way in which an array runs it, against the loop over members alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hfta_func as hfta
from comparisons import assert_trees_close

WAYS = ("together", "one by one", "in pairs", "compiled", "evaluated", "ensemble", "mapped")


class Calls(nn.Module):
    """A module, and what is computed with it."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, batch: Any) -> Any:
        return self.call(self.module, batch)


def assert_as_alone(
    make: Callable[[], nn.Module],
    batch: Any,
    way: str,
    count: int = 3,
    shared: bool = False,
    tolerance: float = 1e-10,
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> None:
    """Losses, new parameters and buffers of two steps, or outputs, of ``count`` members in one of the ``WAYS``.

    Without ``loss_fn``, the loss is the mean square of what the model returns. ``batch`` is a tensor ``[M, ...]`` or a
    tree of them, or one for all if ``shared``; ``options`` are those of :func:`hfta_func.make_train_step`. Seeds are the
    numbers of the members, so that ``torch.initial_seed()`` tells ``make`` which one it makes.
    """
    loss_fn = loss_fn or loss
    models, alone = seeded(make, range(count)), seeded(make, range(count))
    dims, batch = (None, batch) if shared else (0, optree.tree_map(lambda leaf: leaf[:count], batch))
    rows = [batch if shared else optree.tree_map(operator.itemgetter(i), batch) for i in range(count)]
    if way in ("evaluated", "ensemble", "mapped"):
        with torch.no_grad():
            expected = torch.stack(
                [loss_fn(model.eval(), _copied(row)) for model, row in zip(alone, rows, strict=True)]
            )
        found = _outputs(models, batch, dims, way, loss_fn)
        assert_trees_close({"outputs": found}, {"outputs": expected}, tolerance)
        return
    options |= {"one by one": {"chunk_size": 1}, "in pairs": {"chunk_size": 2}}.get(way, {})
    optimizer = hfta.sgd(lr=[0.1 + 0.1 * i for i in range(count)])
    step, state = start(models, loss_fn, optimizer, compiled=way == "compiled", batch_dims=dims, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * i) for i, model in enumerate(alone)]
    for _ in range(2):
        state, metrics = step(state, batch)
        losses = [
            train_solo(model, loss_fn, optimizer, [_copied(row)])[0]
            for model, optimizer, row in zip(alone, optimizers, rows, strict=True)
        ]
        assert_trees_close({"loss": metrics["loss"]}, {"loss": torch.stack(losses)}, tolerance)
    own = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in alone]
    # Numbers in which members differ are beside the buffers, and what they share is not in the state.
    found = {path: leaf for path, leaf in {**state.params, **state.buffers}.items() if path in own[0]}
    assert options.get("share_frozen") or found.keys() >= dict(alone[0].named_parameters()).keys()
    wanted = {path: torch.stack([one[path] for one in own]).detach() for path in found}
    assert_trees_close(found, wanted, tolerance, "state")


def _copied(batch: Any) -> Any:
    return optree.tree_map(torch.clone, batch)


def seeded(make: Callable[..., Any], seeds: Any, *columns: Any) -> list[Any]:
    """A model from each seed, made of its entries of ``columns``."""
    models = []
    for seed, *args in zip(seeds, *columns, strict=True):
        torch.manual_seed(seed)
        models.append(make(*args))
    return models


def start(
    models: list[Any],
    loss_fn: Any,
    optimizer: Any,
    seeds: Any = None,
    hparams: Any = None,
    compiled: bool = False,
    **options: Any,
) -> tuple[Any, hfta.step.TrainState]:
    """A step for these models, and the first state of their array; seeds are the numbers of the members."""
    step: Any = hfta.make_train_step(models[0], loss_fn, optimizer, **options)
    stacked = hfta.stack_params(models, share_frozen=options.get("share_frozen", False))
    state = step.init(*stacked, seeds=range(len(models)) if seeds is None else seeds, hparams=hparams)
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    return step, state


def train_solo(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Iterable[Any]) -> list[Tensor]:
    """The losses of one model that PyTorch trains alone."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss_fn(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of what a model returns."""
    return model(batch).abs().square().mean()


def _outputs(models: list[nn.Module], batch: Any, dims: Any, way: str, loss_fn: Callable[..., Tensor]) -> Tensor:
    stacked = hfta.stack_params(models)
    if way == "evaluated":
        return hfta.make_eval_step(models[0], loss_fn, batch_dims=dims)(stacked, batch)[loss_fn.__name__]
    if way == "ensemble":
        ensemble = hfta.Ensemble.from_modules(models).eval()
        with torch.no_grad():
            outputs = ensemble(batch, batch_dims=dims)
        return torch.stack([output.abs().square().mean() for output in outputs])
    apply = hfta.functional(models[0].eval())
    run = hfta.vmap(lambda params, buffers, x: apply(params, buffers, x)[0], (0, 0, dims))
    return torch.stack([output.abs().square().mean() for output in run(*stacked, batch)])


class InFloat64(TorchFunctionMode):
    """What models compute in float32 they compute in float64, so that rounding hides no mistake."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = {name: self.widened(value) for name, value in (kwargs or {}).items()}
        if func in (torch.zeros, torch.ones, torch.empty):
            wide.setdefault("dtype", torch.float64)
        return func(*map(self.widened, args), **wide)

    @staticmethod
    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


def train_array(
    loss_fn: Callable[..., Tensor], members: list[nn.Module], seeds: Any, xs: Tensor, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """The state after a step for each of ``xs [T, M, ...]``, and what the last one reports."""
    step, state = start(members, loss_fn, hfta.sgd(lr=0.02, momentum=0.5), seeds, **options)
    for x in xs:
        state, metrics = step(state, x)
    return state, metrics


def assert_as_arrays_of_one(
    loss_fn: Callable[..., Tensor], members: list[nn.Module], seeds: Any, xs: Tensor, tolerance: float, **options: Any
) -> None:
    """Members with numbers of their own are what they are without others, where those are numbers of Python."""
    state, metrics = train_array(loss_fn, members, seeds, xs, **options)
    assert state.hparams
    found = {**state.params, **state.buffers, "loss": metrics["loss"]}
    for i, member in enumerate(members):
        alone, reported = train_array(loss_fn, [member], seeds[i : i + 1], xs[:, i : i + 1])
        assert not alone.hparams
        expected = {**alone.params, **alone.buffers, "loss": reported["loss"]}
        assert_trees_close({path: found[path][i : i + 1] for path in expected}, expected, tolerance, f"model {i}")
