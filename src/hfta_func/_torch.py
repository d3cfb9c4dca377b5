"""Every private name of PyTorch that this package uses, and no other file touches any.

Each name exists in PyTorch 2.9 to 2.13. To support a later release, check this file against it and run the tests, then
raise ``NEWEST`` here and the requirement in ``pyproject.toml``.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

OLDEST, NEWEST = (2, 9), (2, 13)
"""The oldest and the newest release of PyTorch that the tests run on."""

F = TypeVar("F", bound=Callable[..., Any])


def check_version(version: str) -> None:
    """Raise an ImportError unless PyTorch ``version`` is supported."""
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        supported = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
        raise ImportError(
            f"hfta_func does not support PyTorch {version}; pip install '{supported}', or a later release of hfta_func"
        )


# Before any private name is looked up, so that a release without one of them is refused by this message.
check_version(torch.__version__)

_functorch: Any = importlib.import_module("torch._C._functorch")
_pyfunctorch: Any = importlib.import_module("torch._functorch.pyfunctorch")
_vmap: Any = importlib.import_module("torch._functorch.vmap")

# Trees in Python, which the compiler can trace; optree's C++ it cannot.
pytree: Any = importlib.import_module("torch.utils._pytree")

# --- Levels of torch.func's transforms.

# Enters a level of vmap: ``with vmap_level(num_models, randomness) as level``.
vmap_level = _vmap.vmap_increment_nesting
# A plain tensor as one that a level of vmap maps over, and back.
add_batch_dim = _functorch._add_batch_dim
remove_batch_dim = _functorch._remove_batch_dim
# The plain tensor and its model axis at a level, None where the level does not map over it.
unwrap_batched = _functorch._unwrap_batched
# Leaves a level of vmap for a flat list of tensors, enters it again around a function, and wraps what came out.
unwrap_leaves = _vmap.unwrap_batched
restore_vmap = _vmap.restore_vmap
wrap_leaves = _vmap.wrap_batched
# What is below the wrapper of the outermost level, and whether there is one.
get_unwrapped = _functorch.get_unwrapped
is_batched = _functorch.is_batchedtensor
is_wrapped = _functorch.is_functorch_wrapped_tensor
# The transform that runs innermost: None outside of all, an object of C++, and one of Python that can be left for a while.
peek_interpreter = _functorch.peek_interpreter_stack
interpreters = _functorch.get_interpreter_stack
current_interpreter = _pyfunctorch.retrieve_current_functorch_interpreter
VmapInterpreter = _functorch.CVmapInterpreterPtr
TransformType = _functorch.TransformType
RandomnessType = _functorch.RandomnessType
# Runs code outside of all transforms.
outside_transforms = _pyfunctorch.temporarily_clear_interpreter_stack


def constant_to_compiler(func: F) -> F:
    """Have the compiler run ``func`` while it traces and treat the result as a constant.

    As ``torch.compiler.assume_constant_result``, which would import all of the compiler.
    """
    func._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return func


@constant_to_compiler
def inside_transform() -> bool:
    """Whether a transform of torch.func is running around this call."""
    return peek_interpreter() is not None


def can_look(flags: Tensor) -> bool:
    """Whether reading values costs less than computing around them: on a CPU, outside compilation and transforms."""
    return not torch.compiler.is_compiling() and flags.device.type == "cpu" and not inside_transform()


# --- The dispatcher.

# The decompositions that PyTorch registers at the first vmap, and the table that they come from.
load_decompositions = _vmap.lazy_load_decompositions
decompositions: Any = importlib.import_module("torch._decomp").decomposition_table
# Whether operators without a batching rule run one member after another, one switch for the whole process.
is_fallback_enabled = _functorch._is_vmap_fallback_enabled
set_fallback_enabled = _functorch._set_vmap_fallback_enabled
# Number of TorchDispatchModes in force; above zero the compiler may be tracing, with tensors that are fakes.
num_dispatch_modes = torch._C._len_torch_dispatch_stack
# The TorchFunctionModes in force, outermost first.
function_modes: Any = importlib.import_module("torch.overrides")._get_current_function_mode_stack
# Calls operators below autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd
# Autograd functions inside one level of a transform, as operators of C++ are.
SingleLevelFunction: Any = importlib.import_module("torch.autograd.function")._SingleLevelFunction
single_level_functions: Any = importlib.import_module("torch._functorch.utils").enable_single_level_autograd_function

_BATCHING = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchVmapMode
)


def below_batching() -> Any:
    """A context in which operators run below the keys of batching rules."""
    return torch._C._ExcludeDispatchKeyGuard(_BATCHING)


def taken_apart(operator: Any, forward: Callable[..., Any]) -> None:
    """Have graph capture replace an operator by what ``forward`` is made of, below autograd."""
    operator.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(forward)


def operators_without(key: str) -> set[str]:
    """The names of all operators that have no kernel at a dispatch key, nor at its alias for decompositions."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    return set(torch._C._dispatch_get_all_op_names()).difference(registered(key), registered(f"{key}Decomposition"))


def out_of_place(name: str) -> str | None:
    """The operator that computes what an operator in place writes, if there is one with the same arguments."""
    packet, dot, overload = name.partition(".")
    sibling = f"{packet[:-1]}{dot}{overload}"
    if packet[-1] != "_" or not torch._C._dispatch_has_kernel(sibling):
        return None
    own, others = (
        [argument.name for argument in torch._C._get_schema(one, overload).arguments] for one in (packet, packet[:-1])
    )
    return sibling if own == others else None


def num_libraries() -> tuple[int, ...]:
    """Numbers of which one has grown if operators may have been added: of definitions, of libraries and of modules."""
    return len(torch.library._defs), len(torch.ops.loaded_libraries), len(sys.modules)


def implement(library: torch.library.Library, op: str, key: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel that gets the keyset, in a way that later kernels of anyone may replace it."""
    assert library.m is not None
    library.m.impl(op, key, kernel, True)


@functools.cache
def written_by(operator: Any) -> tuple[frozenset[int | str], tuple[int | str | None, ...]]:
    """The arguments that an operator writes, by position and by name, and for each of its results the one that it is."""
    schema = operator._schema
    if not schema.is_mutable:
        return frozenset(), ()
    places = {arg.name if arg.kwarg_only else i: arg.alias_info for i, arg in enumerate(schema.arguments)}
    written = {key: alias for key, alias in places.items() if alias is not None and alias.is_write}
    owners = {name: key for key, alias in written.items() for name in alias.before_set}
    results = (next(iter(x.alias_info.before_set), "") if x.alias_info else "" for x in schema.returns)
    return frozenset(written), tuple(owners.get(name) for name in results)


def why_not_looped(operator: Any) -> str | None:
    """Why an operator cannot run member by member, if it cannot: PyTorch's own words."""
    schema = operator._schema
    if schema.returns and not any("Tensor" in str(x.type) for x in schema.returns):
        return f"Batching rule not implemented for {operator.name()}, which returns no tensor"
    if not schema.is_mutable and any(x.alias_info for x in schema.returns):
        return f"Batching rule not implemented for {operator.name()}, which returns a view"
    return None


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def destroy(library: torch.library.Library) -> None:
    """Take back everything that a library has registered."""
    library._destroy()


def has_tangents() -> bool:
    """Whether derivatives forward are being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def writes(tensor: Tensor) -> int:
    """How often a tensor has been written in place."""
    while is_batched(tensor):
        tensor = get_unwrapped(tensor)
    return tensor._version


# --- The compiler. Its modules are imported only once it is used, because that takes seconds.


def untraced(reason: str) -> Callable[[F], F]:
    """Have ``func`` run between graphs, as ``torch.compiler.disable`` does, which would import all of the compiler."""

    def mark(func: Any) -> Any:
        func._torchdynamo_disable = True
        func._torchdynamo_disable_msg = reason
        return func

    return mark


def original(func: Callable[..., Any]) -> Callable[..., Any]:
    """What a compiled function was made of; any other function is its own."""
    func = getattr(func, "_torchdynamo_orig_callable", func)
    # An object with a ``__call__``, such as a step, is compiled inside a function of the compiler's.
    held = getattr(func, "__wrapped__", func)
    return func if isinstance(held, types.FunctionType) else held


def tell_compiler_of_overrides(functions: Iterable[Any]) -> None:
    """Have the compiler ask TorchFunctionModes about functions that its own list leaves out, such as ``randn_like``."""
    variables: Any = importlib.import_module("torch._dynamo.variables.torch")
    variables.get_overridable_functions().update(functions)


def until_compiled(end: Callable[[], None]) -> None:
    """Call ``end`` once, when the compilation that is going on has ended."""
    handler: Any = importlib.import_module("torch._dynamo.callback").callback_handler

    def once(*args: Any) -> None:
        handler.remove_end_callback(once)
        end()

    handler.register_end_callback(once)


def allow_recurrent_layers(allowed: bool) -> bool:
    """Whether the compiler takes recurrent layers into graphs; returns what was so before."""
    config: Any = importlib.import_module("torch._dynamo.config")
    before, config.allow_rnn = config.allow_rnn, allowed
    return before


def mark_graphs(name: str, version: str | None) -> None:
    """Keep compiled graphs on disk apart by a ``version``; None takes the mark away.

    PyTorch's cache of compiled graphs keys on inductor's configuration, among others, of which a table of versions is part.
    """
    if version is None and "torch._inductor.config" not in sys.modules:
        return
    config: Any = importlib.import_module("torch._inductor.config")
    versions = {key: value for key, value in config.unsafe_marked_cacheable_functions.items() if key != name}
    # Assigned, not updated in place: the configuration notices only assignments.
    config.unsafe_marked_cacheable_functions = versions if version is None else {**versions, name: version}


def dotted_path(expression: str) -> str:
    """``getattr(root.features, '0')``, as the compiler spells paths of modules, as ``root.features.0``."""
    while (plain := re.sub(r"getattr\(([^()]*), '([^']*)'\)", r"\1.\2", expression)) != expression:
        expression = plain
    return re.sub(r"(\._modules)?\['?([^]']*)'?\]", r".\2", expression)


# --- Modules.

# What all batch normalisations derive from.
BatchNorm = _BatchNorm
# Calls a module with other parameters and buffers than its own.
reparametrized: Any = importlib.import_module("torch.nn.utils.stateless")._reparametrize_module
# What every module keeps for itself.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook"}


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Parameters and buffers that a module itself holds, by name; None where it has registered a name only."""
    return {**module._parameters, **module._buffers}


def has_hooks(tensor: Tensor) -> bool:
    """Whether the backward pass calls somebody with the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def forget_flat_weights(module: nn.RNNBase) -> None:
    """Have a recurrent layer make the list of its weights anew in every call.

    PyTorch keeps it, packs the weights together for cuDNN where they are no member's own, and would so hand tensors that
    exist only inside ``vmap`` to whoever calls next.
    """
    # Bound, so that a copy of the module has methods of its own.
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
