"""Modules: their tensors, hooks and flat weights."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn, optim

from hfta_func._torch._release import private

T = TypeVar("T")

# What a module asks about each parameter when it changes dtype or device: whether to assign to its ``data``.
takes_data = private("torch", "_has_compatible_shallow_copy_type")
# What a transformer asks about its mask in evaluation: whether it can be replaced by nested tensors.
is_nestable = private("torch", "_nested_tensor_from_mask_left_aligned")
# Calls a module with other parameters and buffers.
reparametrized: Any = private("torch.nn.utils.stateless", "_reparametrize_module")
_inject_class: Any = private("torch.nn.utils.parametrize", "_inject_new_class")
_inject_property: Any = private("torch.nn.utils.parametrize", "_inject_property")
# A context whose name a profiler records, with less time than ``torch.profiler.record_function`` takes.
marker: Any = private("torch._C._profiler", "_RecordFunctionFast")
# Attributes of every module, and further ones of recurrent layers.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_flat_weights", "_flat_weight_refs"}


def tensors_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Parameters and buffers that a module itself holds, by name; None for a name that is registered without a tensor."""
    return {**module._parameters, **module._buffers}


def parametrized(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    """A parametrized module of a class with these attributes."""
    module: Any = kind.__new__(kind)
    vars(module).update(attributes)
    _inject_class(module)
    for name in vars(module)["_modules"]["parametrizations"]:
        _inject_property(module, name)
    return module


Places = dict[str, tuple[dict[str, Any], str]]
"""For each path, the dictionary that holds its tensor, and the key there."""


def places_of(module: nn.Module) -> Places:
    """The dictionaries in which a module and its children hold parameters and buffers, for every path of each tensor."""
    return {
        f"{path}.{name}" if path else name: (held, name)
        for path, child in module.named_modules(remove_duplicate=False)
        for held in (child._parameters, child._buffers)
        for name in held
    }


def call_with(places: Places, tensors: dict[str, Tensor], func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``func(*args, **kwargs)`` while modules hold these tensors; ``tensors`` then has those that ``func`` has assigned.

    As ``torch.func.functional_call``, whose checks of every tensor take longer than some operators.
    """
    before = [(*places[path], places[path][0].get(places[path][1])) for path in tensors]
    try:
        for (held, name, _), tensor in zip(before, tensors.values(), strict=True):
            held[name] = tensor
        return func(*args, **kwargs)
    finally:
        for path, (held, name, tensor) in zip(tensors, before, strict=True):
            tensors[path] = held.get(name, tensors[path])
            held[name] = tensor


_WeightNorm: Any = private("torch.nn.utils.weight_norm", "WeightNorm")
_SpectralNorm: Any = private("torch.nn.utils.spectral_norm", "SpectralNorm")
_Pruning: Any = private("torch.nn.utils.prune", "BasePruningMethod")


def weight_hooks(module: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The attributes that PyTorch's hooks compute before each call, and functions that compute them and change no buffer."""
    computed: dict[str, Callable[[], Tensor]] = {}
    hook: Any
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _Pruning):
            computed[hook._tensor_name] = functools.partial(hook.apply_mask, module)
        elif isinstance(hook, _WeightNorm):
            computed[hook.name] = functools.partial(hook.compute_weight, module)
        elif isinstance(hook, _SpectralNorm):
            computed[hook.name] = functools.partial(hook.compute_weight, module, do_power_iteration=False)
    return computed


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has wrapped this around a module."""
    return "_orig_mod" in module._modules


class _Uncompiled(nn.Module):
    """Calls the module inside as it is, and has its attributes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._modules["_orig_mod"](*args, **kwargs)  # pyright: ignore[reportOptionalCall]

    def __getattr__(self, name: str) -> Any:
        inner = self._modules["_orig_mod"]
        return inner if name == "_orig_mod" else getattr(inner, name)


def run_uncompiled(module: Any) -> None:
    """Make such a module, and its copies, call the one inside as it is."""
    vars(module).pop("forward", None)
    module.__class__ = _Uncompiled


def has_hooks(tensor: Tensor) -> bool:
    """Whether the backward pass calls a hook with the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


_KINDS = "forward", "forward_pre", "backward", "backward_pre"
_hooks_of_modules = [private("torch.nn.modules.module", f"_global_{kind}_hooks") for kind in _KINDS]


def has_global_hooks() -> bool:
    """Whether there are hooks on all modules."""
    return any(_hooks_of_modules)


def has_step_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether a hook runs before or after each step of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def forget_flat_weights(module: nn.RNNBase) -> None:
    """Make a recurrent layer build the list of its weights in every call.

    PyTorch keeps the list and packs the weights together for cuDNN. Later calls would then get tensors that exist only inside
    ``vmap``.
    """
    # Bound, so that a copy of the module gets methods that are bound to the copy.
    module._update_flat_weights = types.MethodType(_nothing, module)
    module.forward = types.MethodType(_with_flat_weights, module)


def _nothing(module: nn.RNNBase) -> None:
    pass


def _with_flat_weights(module: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
    before = module._flat_weights
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
    output = type(module).forward(module, *args, **kwargs)
    module._flat_weights = before
    return output
