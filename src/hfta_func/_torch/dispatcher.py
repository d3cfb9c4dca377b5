"""The dispatcher: kernels, operators and their tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch._release import private, replaced
from hfta_func._torch.levels import TransformType, current_interpreter, inside_vmap

# The decompositions that PyTorch registers at the first vmap, and the table that they come from.
load_decompositions = private("torch._functorch.vmap", "lazy_load_decompositions")
decompositions = private("torch._decomp", "decomposition_table")
# Whether a profiler is recording.
is_profiled = private("torch._C._autograd", "_profiler_enabled")
# A context in which no TorchFunctionMode sees what is called.
out_of_sight = private("torch._C", "DisableTorchFunction")
# The TorchFunctionModes in force, outermost first.
function_modes = private("torch.overrides", "_get_current_function_mode_stack")
# Calls operators below autograd.
below_autograd = private("torch._C", "_AutoDispatchBelowAutograd")
# Autograd functions inside one level of a transform, as operators of C++ are.
SingleLevelFunction = private("torch.autograd.function", "_SingleLevelFunction")
single_level_functions = private("torch._functorch.utils", "enable_single_level_autograd_function")
# How transforms apply autograd functions, and what starts the innermost one.
_in_transforms = private("torch._functorch.autograd_function", "custom_function_call")
_start_transform = private("torch._functorch.pyfunctorch", "dispatch_functorch")

_keys = private("torch._C", "DispatchKeySet")
_key = private("torch._C", "DispatchKey")
_excluded = private("torch._C", "_ExcludeDispatchKeyGuard")
_is_excluded = private("torch._C", "_dispatch_tls_is_dispatch_key_excluded")
_is_included = private("torch._C", "_dispatch_tls_is_dispatch_key_included")
_registrations = private("torch._C", "_dispatch_get_registrations_for_dispatch_key")
_all_operators = private("torch._C", "_dispatch_get_all_op_names")
# Whether autocast is on for any device.
is_autocasting = private("torch._C", "_is_any_autocast_enabled")
_schema = private("torch._C", "_get_schema")
_parse_key = private("torch._C", "_parse_dispatch_key")
# The dispatch keys of autocast, by name.
AUTOCAST = {name: _parse_key(name) for name in ("AutocastCPU", "AutocastCUDA", "AutocastXLA")}
_BATCHING = _keys(_key.FuncTorchBatched) | _keys(_key.FuncTorchVmapMode)


def below_batching() -> Any:
    """A context in which operators run below the keys of batching rules."""
    return _excluded(_BATCHING)


def is_below_autograd() -> bool:
    """Whether operators run below the keys of autograd, to which those of a transform's kernels return."""
    return _is_excluded(_key.AutogradCPU) and not _is_included(_key.FuncTorchDynamicLayerBackMode)


def without_views() -> Any:
    """A context in which autograd treats no result as a view: it refuses writes into a view that a function returns."""
    return _excluded(_keys(_key.ADInplaceOrView))


def taken_apart(operator: Any, forward: Callable[..., Any]) -> None:
    """Replace an operator by the operators that ``forward`` calls, when graphs are captured below autograd."""
    operator.py_impl(_key.CompositeImplicitAutograd)(forward)


def autocast_operators() -> dict[str, list[str]]:
    """For every operator that autocast casts the arguments of, the dispatch keys at which it does."""
    listed: dict[str, list[str]] = {}
    for kind in AUTOCAST:
        for name in _registrations(kind):
            listed.setdefault(name.removeprefix("aten::"), []).append(kind)
    return listed


def has_kernel(operator: Any, key: str) -> bool:
    """Whether a kernel has been registered for an operator at a dispatch key."""
    return operator.has_kernel_for_dispatch_key(_parse_key(key))


def after(key: str, operator: Any) -> Callable[..., Any]:
    """``kernel(keyset, *args, **kwargs)``, which goes on with the dispatch keys that come after one."""
    rest = private("torch._C", "_dispatch_keyset_full_after")(_parse_key(key))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keyset & rest, *args, **kwargs)

    return kernel


def operators_without(key: str) -> set[str]:
    """The names of all operators that have no kernel at a dispatch key, nor at its alias for decompositions."""
    return set(_all_operators()).difference(_registrations(key), _registrations(f"{key}Decomposition"))


def out_of_place(name: str) -> str | None:
    """The out-of-place operator of an in-place operator, if there is one with the same arguments."""
    packet, _, overload = name.partition(".")
    if packet[-1] != "_":
        return None
    # Overloads of one name may differ: pow_.Scalar is pow.Tensor_Scalar.
    namespace, _, base = packet[:-1].partition("::")
    others = getattr(getattr(torch.ops, namespace), base, None)
    wanted = _arguments(packet, overload)
    for sibling in others.overloads() if others else ():
        if _arguments(packet[:-1], sibling) == wanted:
            return f"{packet[:-1]}.{sibling}".removesuffix(".default")
    return None


@functools.cache
def with_generator(operator: Any) -> Any:
    """The overload of a random operator that takes a generator; None of other operators."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return None
    packet = operator._schema.name
    wanted = {**dict(_arguments(packet, operator._overloadname)), "generator": "Optional[Generator]"}
    others = operator.overloadpacket
    return next((getattr(others, one) for one in others.overloads() if dict(_arguments(packet, one)) == wanted), None)


def _arguments(packet: str, overload: str) -> list[tuple[str, str]]:
    schema = _schema(packet, overload.replace("default", ""))
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


def num_libraries() -> tuple[int, ...]:
    """Numbers of definitions, libraries and modules: one has grown if operators have been added."""
    return len(torch.library._defs), len(torch.ops.loaded_libraries), len(sys.modules)


def implement(library: torch.library.Library, op: str, key: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel that gets the keyset, and that later registrations may replace."""
    assert library.m is not None
    library.m.impl(op, key, kernel, True)


@functools.cache
def written_by(operator: Any) -> tuple[frozenset[int | str], tuple[int | str | None, ...]]:
    """The arguments that an operator writes, by position or name, and for each result the written argument that it is."""
    schema = operator._schema
    if not schema.is_mutable:
        return frozenset(), ()
    arguments = {arg.name if arg.kwarg_only else i: arg.alias_info for i, arg in enumerate(schema.arguments)}
    written = {key: alias for key, alias in arguments.items() if alias is not None and alias.is_write}
    owners = {name: key for key, alias in written.items() for name in alias.before_set}
    results = (next(iter(x.alias_info.before_set), "") if x.alias_info else "" for x in schema.returns)
    return frozenset(written), tuple(owners.get(name) for name in results)


def why_not_looped(operator: Any) -> str | None:
    """The reason, in PyTorch's words, why an operator cannot run member by member; None if it can."""
    schema = operator._schema
    if schema.returns and not any("Tensor" in str(x.type) for x in schema.returns):
        return f"Batching rule not implemented for {operator.name()}, which returns no tensor"
    if not schema.is_mutable and any(x.alias_info for x in schema.returns):
        return f"Batching rule not implemented for {operator.name()}, which returns a view"
    return None


def operator(name: str) -> Any:
    """An operator by its name, which names the library unless that is ``aten``.

    Raises:
        ImportError: if this release does not have it.
    """
    namespace, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return private("torch", f"ops.{namespace or 'aten'}.{packet}.{overload or 'default'}")


def destroy(library: torch.library.Library) -> None:
    """Take back everything that a library has registered."""
    library._destroy()


def has_tangents() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def writes(tensor: Tensor) -> int:
    """Number of in-place writes into a tensor; -1 if it was made in inference mode, which does not count them."""
    tensor = inside_vmap(tensor)
    return -1 if tensor.is_inference() else tensor._version


# Whether two tensors have the same storage.
is_alias = private("torch._C", "_is_alias_of")


def precision_of(node: Any) -> float:
    """The coarsest precision of what a node of autograd's graph has computed."""
    return max([0.0, *(torch.finfo(x.dtype).eps for x in node._input_metadata if x.dtype.is_floating_point)])


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a tensor of another class, such as a quantised one; a plain tensor itself."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [part for name in flatten()[0] for part in parts(getattr(tensor, name))]


def has_native_lstm(dtype: torch.dtype) -> bool:
    """Whether PyTorch has a kernel for all steps of an LSTM on this processor for inputs of a dtype."""
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in names or private("torch", f"ops.mkldnn.{names[dtype]}")()


@contextlib.contextmanager
def leaving_out_validation(is_left_out: Callable[[], bool]) -> Iterator[None]:
    """A context in which distributions have no checks where ``is_left_out()`` holds."""
    kind: Any = torch.distributions.Distribution
    init, check = kind.__init__, kind._validate_sample

    def __init__(self: Any, batch_shape: Any = (), event_shape: Any = (), validate_args: bool | None = None) -> None:
        init(self, torch.Size(batch_shape), torch.Size(event_shape), False if is_left_out() else validate_args)

    def _validate_sample(self: Any, value: Tensor) -> None:
        if not is_left_out():
            check(self, value)

    with replaced(kind, "__init__", __init__), replaced(kind, "_validate_sample", _validate_sample):
        yield


def apply_replaced(apply: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A context with ``apply(original, function, *args)`` in place of ``function.apply(*args)`` of autograd functions."""
    method = torch.autograd.Function.__dict__["apply"]
    replacing = _code_replaced if isinstance(method, classmethod) else _method_replaced
    return replacing(torch.autograd.Function, method, apply)


def _code_replaced(__class__: Any, method: Any, apply: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """With other code and not another method, because models keep methods: ``relu = ReLU.apply``."""

    # Code fits a method only if it closes over the same variables, here ``__class__``.
    def replacement(cls: Any, /, *args: Any, _apply: Any, _original: Any, **kwargs: Any) -> Any:
        assert issubclass(cls, __class__)
        return _apply(_original, cls, *args, **kwargs)

    return code_replaced(method.__func__, replacement, _apply=apply)


@contextlib.contextmanager
def code_replaced(func: Any, replacement: Any, **keywords: Any) -> Iterator[None]:
    """A block in which a function runs other code, because others hold it.

    Beside ``keywords`` the code gets ``_original``, a function as this was.
    """
    code = func.__code__
    original = types.FunctionType(code, func.__globals__, func.__name__, None, func.__closure__)
    func.__kwdefaults__ = {"_original": original, **keywords}
    func.__code__ = replacement.__code__.replace(co_filename=code.co_filename)
    yield
    func.__code__, func.__kwdefaults__ = code, None


def _method_replaced(kind: Any, method: Any, apply: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """With another method, for PyTorch 2.14 and later, where it is C++; methods that models have kept stay as they are."""

    def original(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, function)(*args, **kwargs)

    def replacement(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        return apply(original, cls, *args, **kwargs)

    # The compiler knows methods of autograd functions by name.
    replacement.__name__ = "apply"
    return replaced(kind, "apply", classmethod(replacement))


def apply_in_transforms(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Apply an autograd function that has ``setup_context`` under transforms; PyTorch would leave the function modes."""
    return _start_transform(_in_transforms, (function, *args), kwargs)


def is_derivative_of_operator() -> bool:
    """Whether a kernel of an operator is running that differentiates at the innermost level of transforms."""
    kind = current_interpreter().key()
    return kind != TransformType.Vmap and _is_excluded(_key.FuncTorchDynamicLayerFrontMode)


def apply_at_level(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Apply an autograd function to the tensors of one level, as operators of C++ are."""
    inherited: Any = super(torch.autograd.Function, function)
    with single_level_functions():
        return inherited.apply(*args, **kwargs)


def before_autocast(call: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """A context in which ``call()`` runs whenever autocast is turned on."""
    enter = torch.autocast.__enter__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if self._enabled:
            call()
        return enter(self)

    return replaced(torch.autocast, "__enter__", entered)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The generators that a draw on a device uses if none is passed."""
    generators = [torch.default_generator]
    return [*generators, torch.cuda.default_generators[device.index]] if device.type == "cuda" else generators
