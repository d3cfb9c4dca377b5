"""Normalisation beyond the contract of rules: dynamic shapes, autocast, forward mode, layouts, odd batches, averages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import hfta_func as hfta
from hfta_func._tree import tree_map

M = 3


class _Weighted(nn.Module):
    """Nothing but a weight to normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2) * self.weight


class Norm(NamedTuple):
    """A module, and the shape of one sample."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


NORMS = {
    "layer_norm": Norm(lambda: nn.LayerNorm(4), (3, 4)),
    "rms_norm": Norm(lambda: nn.RMSNorm(4), (3, 4)),
    "group_norm": Norm(lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "batch_norm": Norm(lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "batch_norm in evaluation": Norm(lambda: nn.BatchNorm2d(4).eval(), (4, 3, 2)),
    "batch_norm, cumulative": Norm(lambda: nn.BatchNorm2d(4, momentum=None), (4, 3, 2)),
    "instance_norm": Norm(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (4, 3, 2)),
    "instance_norm in evaluation": Norm(
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(), (4, 3, 2)
    ),
    "local_response_norm": Norm(lambda: nn.LocalResponseNorm(2, alpha=0.5), (4, 3, 2)),
    "weight_norm": Norm(lambda: weight_norm(_Weighted()), (3, 4)),
    "weight_norm of columns": Norm(lambda: weight_norm(_Weighted(), dim=1), (3, 4)),
}
EVERY = pytest.mark.parametrize("norm", [pytest.param(norm, id=name) for name, norm in NORMS.items()])
IMAGES = [pytest.param(norm, id=name) for name, norm in NORMS.items() if len(norm.shape) == 3]


def _modules(norm: Norm, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Members that differ in everything, the number of batches that they have seen included."""
    modules = [norm.make().to(dtype) for _ in range(M)]
    with torch.no_grad():
        for i, module in enumerate(modules):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + 0.5)
                else:
                    tensor.fill_(5 * i)
    return modules


def _inputs(norm: Norm, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(M, count, *norm.shape, dtype=torch.float64) * 2 + 1).to(dtype)


def _objective(output: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, math.prod(output.shape[1:]), dtype=torch.float64).reshape(output.shape[1:])
    return (output.double().square() * weights).sum()


def _loss(module: nn.Module) -> Callable[..., Any]:
    apply = hfta.functional(module)

    def loss(params: Any, x: Tensor, buffers: Any) -> tuple[Tensor, Any]:
        output, buffers = apply(params, buffers, x)
        return _objective(output), (output, buffers)

    return loss


def _inside(module: nn.Module) -> Callable[..., Any]:
    """Gradients, outputs and buffers of all members, the gradient inside ``vmap``."""
    return hfta.vmap(torch.func.grad(_loss(module), (0, 1), has_aux=True))


def _outside(module: nn.Module) -> Callable[..., Any]:
    """The same with the gradient outside ``vmap``."""
    loss = _loss(module)

    def total(params: Any, x: Tensor, buffers: Any) -> tuple[Tensor, Any]:
        losses, aux = hfta.vmap(loss)(params, x, buffers)
        return losses.sum(), aux

    return torch.func.grad(total, (0, 1), has_aux=True)


WAYS = pytest.mark.parametrize("way", [_inside, _outside], ids=["gradient inside", "gradient outside"])


def _alone(modules: list[nn.Module], x: Tensor) -> Any:
    """What ordinary modules give, one after another; they are left as they are."""
    rows = []
    for module, one in zip(modules, x, strict=True):
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        one = one.detach().requires_grad_()
        output = module(one)
        wanted = [*module.parameters(), one]
        *grads, grad_x = torch.autograd.grad(_objective(output), wanted, materialize_grads=True, allow_unused=True)
        names = [name for name, _ in module.named_parameters()]
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        rows.append(((dict(zip(names, grads, strict=True)), grad_x), (output.detach(), buffers)))
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
    return _stack(rows)


def _stack(rows: list[Any]) -> Any:
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    if isinstance(rows[0], dict):
        return {name: _stack([row[name] for row in rows]) for name in rows[0]}
    return tuple(_stack(list(column)) for column in zip(*rows, strict=True))


def _close(got: Any, expected: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.exhaustive
@EVERY
def test_a_compiled_array_takes_batches_of_any_size(norm: Norm) -> None:
    modules = _modules(norm)
    params, buffers = hfta.stack_params(modules)
    torch._dynamo.reset()
    compiled = torch.compile(_outside(modules[0]), fullgraph=True, backend="aot_eager")
    x = _inputs(norm, 4)
    torch._dynamo.mark_dynamic(x, 1)
    _close(compiled(params, x, buffers), _alone(modules, x))
    with torch.compiler.set_stance("fail_on_recompile"):
        x = _inputs(norm, 7)
        _close(compiled(params, x, buffers), _alone(modules, x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@EVERY
def test_autocast(norm: Norm, dtype: torch.dtype) -> None:
    modules = _modules(norm, torch.float32)
    params, buffers = hfta.stack_params(modules)
    x = _inputs(norm, 4, dtype)
    with torch.autocast("cpu", dtype):
        expected = _alone(modules, x)
        _close(_outside(modules[0])(params, x, buffers), expected, 0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@EVERY
def test_autocast_under_compile(norm: Norm) -> None:
    modules = _modules(norm, torch.float32)
    params, buffers = hfta.stack_params(modules)
    torch._dynamo.reset()
    compiled = torch.compile(_outside(modules[0]), fullgraph=True, backend="aot_eager")
    x = _inputs(norm, 4, torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.autocast("cpu", torch.bfloat16):
        _close(compiled(params, x, buffers), _alone(modules, x), 0.05)


@WAYS
@pytest.mark.parametrize("norm", IMAGES)
def test_channels_last(norm: Norm, way: Callable[..., Any]) -> None:
    modules = _modules(norm)
    params, buffers = hfta.stack_params(modules)
    x = _inputs(norm, 4)
    last = x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (M, 4))
    _close(way(modules[0])(params, last, buffers), _alone(modules, x))


@pytest.mark.parametrize("count", [0, 1])
@WAYS
@EVERY
def test_odd_batches(norm: Norm, way: Callable[..., Any], count: int) -> None:
    modules = _modules(norm)
    params, buffers = hfta.stack_params(modules)
    x = _inputs(norm, count)
    try:
        expected = _alone(modules, x)
    except (IndexError, RuntimeError, ValueError) as error:
        pytest.skip(f"a model alone fails as well: {error}")
    torch.testing.assert_close(way(modules[0])(params, x, buffers), expected, rtol=1e-11, atol=1e-11, equal_nan=True)


@WAYS
@EVERY
def test_an_array_of_one(norm: Norm, way: Callable[..., Any]) -> None:
    modules = _modules(norm)[:1]
    x = _inputs(norm, 4)[:1]
    params, buffers = hfta.stack_params(modules)
    _close(way(modules[0])(params, x, buffers), _alone(modules, x))


@EVERY
def test_shared_inputs_and_shared_weights(norm: Norm) -> None:
    modules, x = _modules(norm), _inputs(norm, 4)
    params, buffers = hfta.stack_params(modules)
    if not params:
        pytest.skip("has no weights")
    apply = hfta.functional(modules[0])
    shared = hfta.vmap(apply, in_dims=(0, 0, None))(params, buffers, x[0])
    _close(shared, _alone(modules, x[:1].expand(M, *x.shape[1:]))[1])
    first = {name: param[0] for name, param in params.items()}
    first_buffers = {name: buffer[:1].expand_as(buffer).clone() for name, buffer in buffers.items()}
    _close(hfta.vmap(apply, in_dims=(None, 0, 0))(first, first_buffers, x), _alone([modules[0]] * M, x)[1])


@EVERY
def test_array_of_arrays(norm: Norm) -> None:
    arrays = [(_modules(norm), _inputs(norm, 4)) for _ in range(2)]
    stacked = _stack([(dict(params), dict(buffers)) for params, buffers in (hfta.stack_params(a) for a, _ in arrays)])
    nested = torch.func.grad(_loss(arrays[0][0][0]), (0, 1), has_aux=True)
    got = hfta.vmap(hfta.vmap(nested))(stacked[0], torch.stack([x for _, x in arrays]), stacked[1])
    _close(got, _stack([_alone(modules, x) for modules, x in arrays]))


@pytest.mark.parametrize(
    "norm",
    [
        # PyTorch has no forward mode for weight norm.
        pytest.param(norm, id=name)
        for name, norm in NORMS.items()
        if not name.startswith("weight_norm")
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_forward_mode(norm: Norm, inside: bool) -> None:
    modules, x = _modules(norm), _inputs(norm, 4)
    params, buffers = hfta.stack_params(modules)
    apply = hfta.functional(modules[0])
    tangents = {name: torch.randn_like(param) for name, param in params.items()}, torch.randn_like(x)

    def push(func: Any, buffers: Any, primals: Any, tangents: Any) -> Any:
        return torch.func.jvp(lambda params, x: func(params, buffers, x)[0], primals, tangents)

    if inside:
        got = hfta.vmap(lambda *args: push(apply, *args))(buffers, (params, x), tangents)
    else:
        got = push(hfta.vmap(apply), buffers, (params, x), tangents)
    members = [tree_map(lambda leaf, i=i: leaf[i], (buffers, (params, x), tangents)) for i in range(M)]
    _close(got, _stack([push(apply, *member) for member in members]))


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [nn.BatchNorm1d, nn.LazyBatchNorm1d, nn.SyncBatchNorm],
)
def test_cumulative_average_over_many_batches(make: Any, compiled: bool) -> None:
    modules = [make(*(() if make is nn.LazyBatchNorm1d else (4,)), momentum=None).double() for _ in range(M)]
    for i, module in enumerate(modules):
        for _ in range(i + 1):
            module(torch.randn(5, 4, dtype=torch.float64))
    params, buffers = hfta.stack_params(modules)
    apply = hfta.vmap(hfta.functional(modules[0]))
    if compiled:
        torch._dynamo.reset()
        apply = torch.compile(apply, fullgraph=True, backend="aot_eager")
    evaluate = hfta.vmap(hfta.functional(modules[0].eval()))
    modules[0].train()
    for _ in range(4):
        x = torch.randn(M, 5, 4, dtype=torch.float64)
        output, buffers = apply(params, buffers, x)
        _close(output, torch.stack([module(one) for module, one in zip(modules, x, strict=True)]))
    _close(buffers, dict(hfta.stack_params(modules).buffers))
    output, unchanged = evaluate(params, buffers, x)
    _close(output, torch.stack([module.eval()(one) for module, one in zip(modules, x, strict=True)]))
    _close(unchanged, buffers, 0)


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("first", [0, 1])
def test_cumulative_average_in_a_step(first: int) -> None:
    modules = [nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=None)).double() for _ in range(M)]
    for i, module in enumerate(modules):
        for _ in range(i * first):
            module(torch.randn(5, 2, dtype=torch.float64))
    loss_fn = lambda model, x: model(x).pow(3).mean()  # noqa: E731
    step: Any = hfta.make_train_step(modules[0], loss_fn, hfta.sgd(lr=[0.1, 0.2, 0.3]))
    state = step.init(*hfta.stack_params(modules), seeds=range(M))
    optimizers = [torch.optim.SGD(m.parameters(), lr) for m, lr in zip(modules, (0.1, 0.2, 0.3), strict=True)]
    for _ in range(4):
        x = torch.randn(M, 5, 2, dtype=torch.float64)
        state, _ = step(state, x)
        for module, optimizer, one in zip(modules, optimizers, x, strict=True):
            optimizer.zero_grad()
            loss_fn(module, one).backward()
            optimizer.step()
    params, buffers = hfta.stack_params(modules)
    _close((state.params, state.buffers), (dict(params), dict(buffers)))
