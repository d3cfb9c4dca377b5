"""What one model alone computes otherwise than members that run as one, and the first call finds out.

PyTorch refuses tensors of two dtypes in a product, or a value of several entries where one alone needs a number, but its
batching rules compute from other functions. And a class attribute or a global holds the parameters that a model has started
with, which alone are those that train.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from hfta_func._torch import batch_dim, get_unwrapped, is_wrapped, outside_transforms, pytree
from hfta_func.calls.body import running_body
from hfta_func.calls.draws import spellings
from hfta_func.calls.made import targets
from hfta_func.errors import TraceError

_OF_ONE_DTYPE = (
    "addbmm addmm addmv baddbmm matmul mm bmm mv dot __matmul__ __rmatmul__ linear bilinear complex polar heaviside "
    "float_power batch_norm native_batch_norm instance_norm layer_norm group_norm conv_transpose1d conv_transpose2d "
    "conv_transpose3d nll_loss multi_margin_loss multilabel_margin_loss binary_cross_entropy_with_logits"
)
_OF_NUMBERS = "fill fill_ masked_fill masked_fill_ index_fill index_fill_"


def _named(names: str) -> frozenset[Any]:
    return frozenset(func for name in names.split() for func, _ in (*spellings(name), *spellings(f"{name}_")))


_NUMBERS = _named(_OF_NUMBERS)
_CHECKED = _named(_OF_ONE_DTYPE) | _NUMBERS


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists of them, which is faster than flattening a tree."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def as_alone(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``; raises an error where the first member alone has one, or a result of another dtype."""
    given = [*_tensors((*args, *kwargs.values()))]
    if _started and any(id(leaf) in _started for leaf in given):
        return _with_start(func, args, kwargs, given)
    if func not in _CHECKED:
        return func(*args, **kwargs)
    kinds = {leaf.dtype for leaf in given}
    if func in _NUMBERS:
        value = kwargs["value"] if "value" in kwargs else args[-1]
        if not isinstance(value, Tensor) or value.dim() == 0:
            return func(*args, **kwargs)
    elif len(kinds) == 1:
        return func(*args, **kwargs)
    if given[0].device.type == "xla":
        # Some of XLA's kernels for one sample end the process.
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


_started: dict[int, tuple[weakref.ref[Tensor], str, bool]] = {}
"""The parameters and buffers of models that have become members, each with its path and whether it is trained."""


_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""The modules with buffers of models that have become members, by their ids."""


def remember(model: nn.Module) -> None:
    """Note what a model holds before it becomes a member."""
    _modules.update({id(module): module for module in model.modules() if [*module.buffers(False)]})
    trained = {path: param for path, param in model.named_parameters() if param.requires_grad}
    for path, tensor in {**trained, **dict(model.named_buffers())}.items():
        if not tensor.is_meta:
            number = id(tensor)
            gone = weakref.ref(tensor, lambda _, number=number: _started.pop(number, None))
            _started[number] = gone, path, path in trained


@contextlib.contextmanager
def unreplaced() -> Iterator[None]:
    """A block that raises an error if it gives a module that a model has started with another tensor as its buffer."""
    thread, started = threading.get_ident(), {}

    def note(module: nn.Module, name: str, _: Tensor | None) -> None:
        # Other threads may train a model alone meanwhile.
        if threading.get_ident() == thread and _modules.get(id(module)) is module:
            started.setdefault((id(module), name), (module, getattr(module, name, None)))

    hook = register_module_buffer_registration_hook(note)
    try:
        yield
    finally:
        hook.remove()
    for (_, name), (module, tensor) in started.items():
        if getattr(module, name) is not tensor:
            raise TraceError(
                f"the model or the loss assigns '{name}' of a module ({type(module).__name__}) of a model itself, not of the "
                f"member that runs: a class attribute, a global or a variable holds it; assign that of the model that is "
                f"called, as for module in self.modules()"
            )


def _with_start(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
    """``func(*args, **kwargs)``; raises an error if it computes from a parameter of the start, or writes a buffer of it."""
    body = running_body()
    held = () if body is None else {id(held.get(name)) for held, name in body.places.values()}
    entries = [] if body is None else [_started.get(id(x)) for x in given if id(x) not in held]
    met = [entry for entry in entries if entry is not None and entry[0]() is not None]
    written = {id(tensor) for tensor in targets(func, args, kwargs)}
    paths = [path for start, path, _ in met if id(start()) in written]
    if not paths:
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        computes = any(isinstance(x, Tensor) for x in pytree.tree_leaves(result))
        if not computes or "_like" in name or name.startswith("new_"):
            return result
        paths = [path for _, path, is_trained in met if is_trained]
        if not paths:
            return result
    raise TraceError(
        f"the model or the loss uses '{paths[0]}' of a model itself, not of the member that runs: a class attribute, a "
        f"global or a variable holds it with the values of the start; take it from the model that is called "
        f"(self.{paths[0]}, model.{paths[0]}), or hold a copy, tensor.detach().clone(), if it shall stay as it is"
    )


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
