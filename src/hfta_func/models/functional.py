"""A module as a pure function of its parameters, buffers and key."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import BatchNorm, forget_flat_weights, own_tensors
from hfta_func._types import Params
from hfta_func.calls.body import Body
from hfta_func.calls.routing import routed
from hfta_func.models.remat import rematerialise
from hfta_func.models.structure import check_materialised, check_no_backward_hooks


def functional(model: nn.Module) -> Callable[..., tuple[Any, Params]]:
    """The model's forward pass as a pure function.

    Args:
        model: A module, for code, settings and train mode; it is copied, without its parameters' storage.

    Returns:
        ``apply(params, buffers, *args, key=None, **kwargs) -> (output, new_buffers)`` for ONE member's parameters.
        It does not write its arguments: running statistics come back in ``new_buffers``. All random calls of the model
        draw from ``key``; without a key they draw from PyTorch's generator.

    Raises:
        StackError: if a lazy module has not been run yet.
        RandomnessError: from ``apply`` with a key, if the model calls a random operator that cannot draw from a key.

    Example:
        >>> params, buffers = stack_params([torch.nn.BatchNorm1d(2) for _ in range(3)])
        >>> apply = functional(torch.nn.BatchNorm1d(2))
        >>> output, new_buffers = vmap(apply)(params, buffers, torch.randn(3, 8, 2))
        >>> output.shape, new_buffers["num_batches_tracked"], buffers["num_batches_tracked"]
        (torch.Size([3, 8, 2]), tensor([1, 1, 1]), tensor([0, 0, 0]))
    """
    return bind(model, lambda model, *args, **kwargs: model(*args, **kwargs))


def bind(
    model: nn.Module,
    func: Callable[..., Any],
    checkpoint: bool | Sequence[str] = False,
    training: bool | None = None,
    renorms: bool = False,
) -> Callable[..., tuple[Any, Params]]:
    """``func(model, *args, **kwargs)`` as a pure function ``(params, buffers, *args, key=None, **kwargs)``.

    ``func`` gets an ordinary module that holds the given tensors, to call, take apart or read as it likes. ``checkpoint``
    names submodules to rematerialise in the backward pass, see :func:`make_train_step`. ``training`` sets train or eval
    mode; None keeps the model's own. Look-up tables with ``max_norm`` shorten rows of the given parameters if ``renorms``
    holds, else of copies.
    """
    inner = skeleton(model)
    inner = inner if training is None else inner.train(training)

    shared = {id(tensor): tensor for tensor in (*inner.parameters(), *inner.buffers())}

    def make() -> Body:
        body = Body(copy.deepcopy(inner, dict(shared)), func)
        rematerialise(body.model, checkpoint)
        return body

    # A call puts its tensors into a module, so calls at the same time, of other threads, need modules of their own.
    first, idle = make(), []
    holders, rewritten = _holders(inner), () if renorms else tables_with_max_norm(inner)

    def apply(params: Params, buffers: Params, *args: Any, key: Tensor | None = None, **kwargs: Any) -> Any:
        # Modules update running statistics in place, so they get copies, and the call leaves the new ones in `tensors`.
        given = {**params, **{path: tensor.clone() for path, tensor in buffers.items()}}
        given |= {path: params[path].clone() for path in rewritten if path in params}
        tensors = {f"model.{name}": tensor for path, tensor in given.items() for name in holders.get(path, (path,))}
        body = first if torch.compiler.is_compiling() else idle.pop() if idle else make()
        try:
            with routed(key):
                output = torch.func.functional_call(body, tensors, args, kwargs, tie_weights=False)
        finally:
            # The backward pass runs rematerialised modules again.
            if not (checkpoint or torch.compiler.is_compiling()):
                idle.append(body)
        return output, {path: tensors[f"model.{path}"] for path in buffers}

    return apply


def tables_with_max_norm(model: nn.Module) -> tuple[str, ...]:
    """The paths of look-up tables that shorten rows in place before they read them."""
    tables = {id(module.weight) for module in model.modules() if getattr(module, "max_norm", None) is not None}
    return tuple(path for path, parameter in model.named_parameters() if id(parameter) in tables)


def _holders(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All paths of each parameter or buffer, one for each module that holds it, by the first of them."""
    # ``functional_call(tie_weights=True)`` would list a module with two paths twice, and fail to restore its tensors.
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, tensor in own_tensors(module).items():
            if tensor is not None:
                found.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    return {names[0]: tuple(names) for names in found.values()}


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have shapes but no storage."""
    check_materialised(model)
    check_no_backward_hooks(model)
    memo: dict[int, Any] = {}
    for own in model.parameters():
        memo[id(own)] = nn.Parameter(torch.empty_like(own, device="meta"), requires_grad=own.requires_grad)
    for own in model.buffers():
        memo[id(own)] = torch.empty_like(own, device="meta")
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if isinstance(module, BatchNorm) and module.momentum is None and module.num_batches_tracked is not None:
            if type(module).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward):
                module.momentum = 1.0
                module.forward = types.MethodType(_cumulative_average, module)
        if isinstance(module, nn.RNNBase):
            forget_flat_weights(module)
        if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            module.forward = types.MethodType(_without_looking_at_masks, module)
    return copied


def _cumulative_average(module: BatchNorm, input: Tensor) -> Tensor:
    """The forward of batch normalisation with ``momentum=None``, which averages its statistics over all batches.

    PyTorch reads the number of batches as one Python number, but members may have seen different numbers. With a momentum
    of 1 its forward leaves the batch's statistics in the buffers, and the average is computed from tensors.
    """
    count, mean, var = module.num_batches_tracked, module.running_mean, module.running_var
    if not module.training or not module.track_running_stats or count is None or mean is None or var is None:
        return type(module).forward(module, input)
    # The backward pass needs the forward pass's inputs unchanged.
    module.running_mean, module.running_var = mean.clone(), var.clone()
    output = type(module).forward(module, input)
    mean += (module.running_mean - mean) / count
    var += (module.running_var - var) / count
    module.running_mean, module.running_var = mean, var
    return output


def _without_looking_at_masks(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a transformer stack without the hint that its mask is causal, unless the caller gives it.

    PyTorch would read the mask's values for this hint, which only affects speed.
    """
    name, position = ("is_causal", 3) if isinstance(module, nn.TransformerEncoder) else ("tgt_is_causal", 6)
    if len(args) <= position:
        kwargs[name] = bool(kwargs.get(name))
    return type(module).forward(module, *args, **kwargs)
