"""Copies of a model without its parameters' storage, which calls fill with other tensors."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import forget_flat_weights, is_compiled, run_uncompiled
from hfta_func.calls.copies import copied_module
from hfta_func.models.padded_calls import pass_over_blocks
from hfta_func.models.scalar_attributes import numbers_of_python
from hfta_func.models.sharing import base_of, shared_of
from hfta_func.models.structure import check_module, check_no_hooks_of_parameters, computed


def outline(model: nn.Module, share_frozen: bool = False, shared_params: Sequence[str] = ()) -> nn.Module:
    """A copy of the model whose parameters and buffers have no storage, except shared ones."""
    check_module(model)
    memo: dict[int, Any] = {id(x): nn.Parameter(_without_storage(x), x.requires_grad) for x in model.parameters()}
    memo |= {id(leaf): _without_storage(leaf) for leaf in model.buffers()}
    shared = base_of(model, share_frozen) | shared_of(model, shared_params)
    memo |= {id(leaf): leaf for leaf in shared.values()}
    made = {path: computed(module) for path, module in model.named_modules()}
    memo |= {id(tensor): torch.empty(0) for tensors in made.values() for tensor in tensors.values()}
    copied = copied_module(model, memo)
    for path, names in made.items():
        for name in names:
            delattr(copied.get_submodule(path), name)
    return copied


def _without_storage(tensor: Tensor) -> Tensor:
    # Not empty_like, which quantised tensors may not support on the meta device.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def skeleton(model: nn.Module) -> nn.Module:
    """An outline of the model that can be called with other tensors."""
    copied = outline(model)
    check_no_hooks_of_parameters(model)
    numbers_of_python(copied)
    for path, module in copied.named_modules():
        pass_over_blocks(module, copied.get_submodule(path.rpartition(".")[0]))
        if is_compiled(module):
            # An array is compiled as a whole.
            run_uncompiled(module)
        if isinstance(module, nn.RNNBase):
            forget_flat_weights(module)
        if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            module.forward = types.MethodType(_without_looking_at_masks, module)
    return copied


def _without_looking_at_masks(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a transformer stack without the hint that its mask is causal, unless the caller gives it.

    PyTorch would read the mask's values for this hint, which only affects speed.
    """
    name, position = ("is_causal", 3) if isinstance(module, nn.TransformerEncoder) else ("tgt_is_causal", 6)
    if len(args) <= position:
        kwargs[name] = bool(kwargs.get(name))
    return with_zeros(module, *args, **kwargs)


def with_zeros(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a transformer stack by the general path, with the zeros of the encoder's fast path.

    That takes rows without what is padded at their end, and fills in zeros behind the last layer. It looks at values of the
    mask, and is not taken where calls are replaced or noise is routed.
    """
    result = type(module).forward(module, *args, **kwargs)
    padded = _left_out(module, *args, **kwargs) if type(module).forward is nn.TransformerEncoder.forward else None
    if padded is None:
        return result
    zeros = torch.zeros_like(result)
    return torch.where(padded.unsqueeze(-1), zeros if module.norm is None else module.norm(zeros), result)


def _left_out(
    module: Any, src: Tensor, mask: Any = None, src_key_padding_mask: Tensor | None = None, is_causal: Any = None
) -> Tensor | None:
    """True where an encoder's fast path leaves out a position; None where its conditions, but that on values, do not hold."""
    first, padding = module.layers[0], src_key_padding_mask
    if padding is None or mask is not None or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return None
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (src, *first.parameters()))
    if needs_grad or not (module.use_nested_tensor and torch.backends.mha.get_fastpath_enabled()):
        return None
    padded = padding if padding.dtype == torch.bool else padding != 0
    return padded & (padded[:, :-1] <= padded[:, 1:]).all()
