"""One model in every way in which an array runs it, against the loop over members alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hfta_func as hfta
from comparisons import assert_trees_close

WAYS = ("together", "one by one", "in pairs", "compiled", "evaluated", "ensemble", "mapped")


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
    models, alone = [_seeded(make, seed) for seed in range(count)], [_seeded(make, seed) for seed in range(count)]
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
    step: Any = hfta.make_train_step(
        models[0], loss_fn, hfta.sgd(lr=[0.1 + 0.1 * i for i in range(count)]), batch_dims=dims, **options
    )
    state = step.init(*hfta.stack_params(models, share_frozen=options.get("share_frozen", False)), seeds=range(count))
    if way == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        state, metrics = step(state, batch)
        losses = torch.stack(
            [
                _solo_step(model, row, 0.1 + 0.1 * i, loss_fn)
                for i, (model, row) in enumerate(zip(alone, rows, strict=True))
            ]
        )
        assert_trees_close({"loss": metrics["loss"]}, {"loss": losses}, tolerance)
    own = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in alone]
    # Numbers in which members differ are beside the buffers, and what they share is not in the state.
    found = {path: leaf for path, leaf in {**state.params, **state.buffers}.items() if path in own[0]}
    assert options.get("share_frozen") or found.keys() >= dict(alone[0].named_parameters()).keys()
    wanted = {path: torch.stack([one[path] for one in own]).detach() for path in found}
    assert_trees_close(found, wanted, tolerance, "state")


def _copied(batch: Any) -> Any:
    return optree.tree_map(torch.clone, batch)


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of what a model returns."""
    return model(batch).abs().square().mean()


def _solo_step(model: nn.Module, batch: Any, lr: float, loss_fn: Callable[..., Tensor]) -> Tensor:
    value = loss_fn(model, _copied(batch))
    model.zero_grad()
    value.backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= lr * param.grad
    return value.detach()


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
    loss_fn: Callable[..., Tensor],
    members: list[nn.Module],
    seeds: Any,
    xs: Tensor,
    compiled: bool = False,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """The state after a step for each of ``xs [T, M, ...]``, and what the last one reports."""
    step: Any = hfta.make_train_step(members[0], loss_fn, hfta.sgd(lr=0.02, momentum=0.5), **options)
    state = step.init(*hfta.stack_params(members), seeds=seeds)
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
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
