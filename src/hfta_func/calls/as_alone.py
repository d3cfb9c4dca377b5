"""What PyTorch refuses for one model, or gives another dtype, where its batching rules compute from other functions.

Tensors of two dtypes in a product, or a value of several entries where one alone needs a number: the first call finds out
whether the first member alone would compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import batch_dim, get_unwrapped, is_wrapped, outside_transforms, pytree
from hfta_func._types import TraceError
from hfta_func.calls.draws import spellings

_OF_ONE_DTYPE = (
    "addbmm addmm addmv baddbmm matmul mm bmm mv dot __matmul__ __rmatmul__ linear bilinear complex polar heaviside "
    "float_power batch_norm native_batch_norm instance_norm layer_norm group_norm conv_transpose1d conv_transpose2d "
    "conv_transpose3d nll_loss multi_margin_loss multilabel_margin_loss binary_cross_entropy_with_logits"
)
_OF_NUMBERS = "fill fill_ masked_fill masked_fill_ index_fill index_fill_"


def _named(names: str) -> frozenset[Any]:
    return frozenset(func for name in names.split() for func, _ in (*spellings(name), *spellings(f"{name}_")))


_DTYPES, _NUMBERS = _named(_OF_ONE_DTYPE), _named(_OF_NUMBERS)


def as_alone(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``; raises an error where the first member alone has one, or a result of another dtype."""
    if func not in _DTYPES and func not in _NUMBERS:
        return func(*args, **kwargs)
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    kinds = {leaf.dtype for leaf in given}
    if func in _NUMBERS:
        value = kwargs.get("value", args[-1])
        if not isinstance(value, Tensor) or value.dim() == 0:
            return func(*args, **kwargs)
    elif len(kinds) == 1:
        return func(*args, **kwargs)
    with outside_transforms(), torch.no_grad():
        first = pytree.tree_map(
            lambda leaf: first_member(leaf).clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        alone = func(*first[0], **first[1])
    result = func(*args, **kwargs)
    if isinstance(alone, Tensor) and alone.dtype != result.dtype:
        names = " and ".join(sorted(str(kind) for kind in kinds))
        raise TraceError(
            f"the model calls {func.__name__} with tensors of {names}, whose result is {alone.dtype} for one model alone and "
            f"{result.dtype} for members that run as one; cast them to one dtype: x.to(y.dtype)"
        )
    return result


def first_member(tensor: Tensor) -> Tensor:
    """The plain tensor of the first member at every level of ``vmap`` that maps over a tensor."""
    dims = []
    while is_wrapped(tensor):
        dims.append(batch_dim(tensor))
        tensor = get_unwrapped(tensor)
    # The innermost wrapper counts the axes of the plain tensor.
    for dim in reversed(dims):
        tensor = tensor if dim < 0 else tensor.select(dim, 0)
    return tensor
