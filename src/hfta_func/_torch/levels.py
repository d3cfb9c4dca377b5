"""Levels of torch.func's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from hfta_func._torch._release import private

F = TypeVar("F", bound=Callable[..., Any])

_FUNCTORCH, _PYFUNCTORCH, _VMAP = "torch._C._functorch", "torch._functorch.pyfunctorch", "torch._functorch.vmap"

# Trees in Python, which the compiler can trace; optree's C++ it cannot.
pytree = private("torch.utils", "_pytree")
broadcast_prefix = private("torch.utils", "_pytree._broadcast_to_and_flatten")

# Enters a level of vmap: ``with vmap_level(num_models, randomness) as level``.
vmap_level = private(_VMAP, "vmap_increment_nesting")
# A plain tensor as one that a level of vmap maps over, and back.
add_batch_dim = private(_FUNCTORCH, "_add_batch_dim")
# The same for tracing by the compiler, and the removal of a tensor's wrapper at a level of derivatives.
traced_add_batch_dim = private(_VMAP, "_add_batch_dim")
unwrap_for_grad = private("torch._functorch.autograd_function", "_unwrap_for_grad")
remove_batch_dim = private(_FUNCTORCH, "_remove_batch_dim")
# The plain tensor and its model axis at a level, None where the level does not map over it.
unwrap_batched = private(_FUNCTORCH, "_unwrap_batched")
# Unwrap a tree at a level of vmap, enter that level again around a function, and wrap results at the level.
unwrap_leaves = private(_VMAP, "unwrap_batched")
restore_vmap = private(_VMAP, "restore_vmap")
wrap_leaves = private(_VMAP, "wrap_batched")
# The tensor inside the outermost wrapper, and predicates for wrappers: of vmap, and of any transform.
get_unwrapped = private(_FUNCTORCH, "get_unwrapped")
is_batched = private(_FUNCTORCH, "is_batchedtensor")
is_wrapped = private(_FUNCTORCH, "is_functorch_wrapped_tensor")
# Of a backward pass for many gradients at once, ``is_grads_batched``, which has a vmap of its own.
is_of_many = private(_FUNCTORCH, "is_legacy_batchedtensor")
# The number of a tensor's outermost level.
level_of = private(_FUNCTORCH, "maybe_get_level")
# The model axis at the outermost level, below 0 where there is none.
batch_dim = private(_FUNCTORCH, "maybe_get_bdim")
# The transform that runs innermost: None outside of all, an object of C++, and one of Python that can be left for a while.
peek_interpreter = private(_FUNCTORCH, "peek_interpreter_stack")
interpreters = private(_FUNCTORCH, "get_interpreter_stack")
# Number of TorchDispatchModes in force; above zero the compiler may be tracing, with tensors that are fakes.
num_dispatch_modes = private("torch._C", "_len_torch_dispatch_stack")
current_interpreter = private(_PYFUNCTORCH, "retrieve_current_functorch_interpreter")
VmapInterpreter = private(_FUNCTORCH, "CVmapInterpreterPtr")
TransformType = private(_FUNCTORCH, "TransformType")
RandomnessType = private(_FUNCTORCH, "RandomnessType")
# The number of tensors, and of Python objects for it, that hold a storage.
_holders = private("torch._C", "_storage_Use_Count")
# Runs code outside of all transforms.
outside_transforms = private(_PYFUNCTORCH, "temporarily_clear_interpreter_stack")


def constant_to_compiler(func: F) -> F:
    """Make the compiler run ``func`` while it traces and treat the result as a constant.

    As ``torch.compiler.assume_constant_result``, which would import the whole compiler.
    """
    func._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return func


@constant_to_compiler
def inside_transform() -> bool:
    """Whether a transform of torch.func is running around this call."""
    return peek_interpreter() is not None


@constant_to_compiler
def depth() -> int:
    """Number of transforms around this call."""
    interpreter = peek_interpreter()
    return 0 if interpreter is None else interpreter.level()


@constant_to_compiler
def levels_above(depth: int) -> tuple[tuple[int, int, str, tuple[int, ...]], ...]:
    """The levels of ``vmap`` inside the given one, outermost first.

    Each is a number, a number of members, a randomness, and the levels of derivatives inside it, innermost first.
    """
    levels, inside = [], []
    for interpreter in reversed(interpreters() or ()):
        if interpreter.level() <= depth:
            break
        if interpreter.key() != TransformType.Vmap:
            inside.append(interpreter.level())
            continue
        vmap = VmapInterpreter(interpreter)
        levels.append((interpreter.level(), vmap.batchSize(), vmap.randomness().name.lower(), tuple(inside)))
    return tuple(reversed(levels))


def inside_vmap(tensor: Tensor) -> Tensor:
    """The tensor inside all levels of ``vmap``, which has the history of the members'."""
    while is_batched(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


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


def models_first(x: Tensor, model_dim: int | None) -> Tensor:
    """Move the model axis to the front; a shared tensor, or one that has it there already, costs no autograd node."""
    return x.movedim(model_dim, 0) if model_dim else x


def expand(x: Tensor, model_dim: int | None, num_models: int) -> Tensor:
    """``[M, ...]``; a shared tensor is repeated as a view."""
    return x.expand(num_models, *x.shape) if model_dim is None else models_first(x, model_dim)


def can_look(flags: Tensor) -> bool:
    """Whether reading values costs less than computing around them: on a CPU, outside compilation and transforms."""
    return not torch.compiler.is_compiling() and flags.device.type == "cpu" and not inside_transform()


def is_captured(tensor: Tensor) -> bool:
    """Whether operators on a tensor are being captured for a graph, so that it has no values."""
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
    return num_dispatch_modes() > 0 and type(tensor) not in (Tensor, torch.nn.Parameter)


def known_values(flags: Tensor) -> list[Any] | None:
    """The values of all members at one level, if reading them costs nothing: on a CPU, while nothing is captured."""
    if torch.compiler.is_compiling() or is_captured(flags):
        return None
    flags = get_unwrapped(flags) if is_batched(flags) else flags
    return None if is_wrapped(flags) or flags.device.type != "cpu" else flags.flatten().tolist()


def storage_number(tensor: Tensor) -> int:
    """The same number for tensors that share memory, unique while one of them exists."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def is_sole_holder(tensor: Tensor) -> bool:
    """Whether no other tensor has the memory of this one, which may then be written."""
    return tensor.is_contiguous() and _holders(tensor.untyped_storage()._cdata) == 2
