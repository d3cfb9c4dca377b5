"""The table of batching rules and its installation into PyTorch's dispatcher.

Public: :func:`register`, :func:`install`, :func:`uninstall`, :func:`is_installed`.

A rule stands at the ``FuncTorchBatched`` key: below autograd and above the backends, so one rule serves forward,
backward, forward-mode, eager execution and graph capture, on every device.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _is_vmap_fallback_enabled,  # pyright: ignore[reportAttributeAccessIssue]
    _set_vmap_fallback_enabled,  # pyright: ignore[reportAttributeAccessIssue]
    _unwrap_batched,
    peek_interpreter_stack,
)
from torch._decomp import decomposition_table
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import lazy_load_decompositions  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd import forward_ad

from hfta_func.rules import _choice
from hfta_func.rules._lowering import TABLE, Case, enter, member_shape

Dims = tuple[int | None, ...]
Result = tuple[Any, Any]

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchVmapMode
)

BATCHED = "FuncTorchBatched"
"""The key of batching rules: asked where an argument has a model axis."""
MODE = "FuncTorchVmapMode"
"""The key of operators that PyTorch checks for randomness under ``vmap``, before any batching rule is asked."""
FRONT = "FuncTorchDynamicLayerFrontMode"
"""The key of operators that PyTorch takes apart under every transform, before any batching rule is asked."""


class Call(NamedTuple):
    """What a rule is told about a call besides its arguments.

    Args:
        num_models: M.
        dims: The model axis of each positional argument, or None; of a list of tensors, a tuple of them.
        named_dims: The model axis of each keyword argument, or None.
        lowering: Which of its lowerings the table chose, unless the rule chooses.
    """

    num_models: int
    dims: Dims
    named_dims: dict[str, int | None]
    lowering: str


Rule = Callable[..., Result]
"""``rule(call, *args, **kwargs) -> (outputs, dims)``, on plain tensors; ``dims`` has one entry per output."""


class Entry(NamedTuple):
    """A rule, the dispatch key where it stands, and for :data:`FRONT` what other transforms than ``vmap`` get."""

    rule: Rule
    key: str
    otherwise: Callable[..., Any] | None
    chooses: bool


RULES: dict[str, Entry] = {}
"""Rules by operator name, ``"convolution"`` or ``"name.overload"``."""

COMPOSITES: list[str] = []
"""Operators that are taken apart into others."""

_lock = threading.RLock()
_library: torch.library.Library | None = None


def register(
    op: str,
    family: str,
    key: str = BATCHED,
    otherwise: Callable[..., Any] | None = None,
    chooses: bool = False,
) -> Callable[[Rule], Rule]:
    """Add a rule for ``aten::<op>`` to the table; it takes effect at the next :func:`install`.

    Args:
        op: The operator's name, ``"name"`` or ``"name.overload"``.
        family: What overrides may call it and its relatives.
        key: Where it stands. At any other key than :data:`BATCHED` it is also asked when nothing has a model axis.
        otherwise: For :data:`FRONT`, what the other transforms of ``torch.func`` call instead of the operator.
        chooses: Whether the rule asks the table itself, about more than the call says.
    """

    def add(rule: Rule) -> Rule:
        RULES[op] = Entry(rule, key, otherwise, chooses)
        enter(op, family, (rule.__doc__ or "").partition("\n")[0])
        return rule

    return add


def register_composite(*ops: str) -> None:
    """Have operators taken apart under ``vmap`` as PyTorch takes them apart without it."""
    COMPOSITES.extend(ops)


def is_installed() -> bool:
    """Whether the rules are in force."""
    return _library is not None


def install() -> None:
    """Put the rules in force for every ``vmap`` of this process. Happens by itself on first use; may be repeated."""
    global _library
    if _library is not None:
        return
    with _lock:
        if _library is not None:
            return
        # PyTorch registers its decompositions at the first vmap; before that they would displace the rules.
        lazy_load_decompositions()
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # The dispatcher warns that a kernel is replaced, which is what is meant.
                warnings.simplefilter("ignore")
                for op, entry in RULES.items():
                    library.impl(op, _kernel(op, *entry), entry.key, with_keyset=True, allow_override=True)
                for op in COMPOSITES:
                    library.impl(op, _operator(op).decompose, BATCHED, allow_override=True)
        except BaseException:
            library._destroy()
            raise
        _library = library


def install_for_compiler(overrides: str) -> bool:
    """Install, and keep graphs compiled with these rules apart from others on disk.

    PyTorch's cache of compiled graphs keys on the graph before batching rules run, on its version and on inductor's
    configuration; the fingerprint of the rules joins the latter, as one more entry of a table of versions.

    Args:
        overrides: :data:`_choice.state`. That it is passed has the compiler guard on it and compile anew when it changes.
    """
    install()
    config: Any = importlib.import_module("torch._inductor.config")
    # Assigned, not updated in place: the configuration notices only assignments.
    versions = config.unsafe_marked_cacheable_functions
    config.unsafe_marked_cacheable_functions = {**versions, "hfta_func.rules": fingerprint() + overrides}
    _set_up_until_compiled()
    return True


# The compiler runs a function with this mark while it traces and treats the result as a constant. It is set here by hand
# because torch.compiler.assume_constant_result imports all of the compiler.
install_for_compiler._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


class no_fallback:
    """Inside, an operator without a batching rule raises instead of running on PyTorch's slow path.

    The switch is one for the whole process, so the last to leave resets it.
    """

    _depth = 0
    _before = True

    def __enter__(self) -> None:
        with _lock:
            if no_fallback._depth == 0:
                no_fallback._before = _is_vmap_fallback_enabled()
                _set_vmap_fallback_enabled(False)
            no_fallback._depth += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            no_fallback._depth -= 1
            if no_fallback._depth == 0:
                _set_vmap_fallback_enabled(no_fallback._before)


_compiling = False


def _set_up_until_compiled() -> None:
    """Rules run after this function's caller was traced, when the compiler captures operators."""
    global _compiling
    if _compiling:
        return
    handler: Any = importlib.import_module("torch._dynamo.callback").callback_handler
    config: Any = importlib.import_module("torch._dynamo.config")
    allowed = config.allow_rnn
    guard = no_fallback()

    def end(*args: Any) -> None:
        global _compiling
        handler.remove_end_callback(end)
        _compiling = False
        config.allow_rnn = allowed
        guard.__exit__()

    _compiling = True
    # Recurrent layers are in graphs, because their rules take them apart.
    config.allow_rnn = True
    guard.__enter__()
    handler.register_end_callback(end)


@functools.cache
def fingerprint() -> str:
    """A hash of the rules and lowerings of this installation of the package."""
    digest = hashlib.sha256()
    for source in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def uninstall() -> None:
    """Restore PyTorch's own batching rules."""
    global _library
    with _lock:
        if _library is not None:
            _library._destroy()
            _library = None
            _hand_back()
        config: Any = sys.modules.get("torch._inductor.config")
        if config is not None:
            versions = dict(config.unsafe_marked_cacheable_functions)
            versions.pop("hfta_func.rules", None)
            config.unsafe_marked_cacheable_functions = versions


def _hand_back() -> None:
    """Give PyTorch's own Python kernels their places back.

    Under dispatch modes, and so under the compiler, a Python kernel is looked up in a table of those registered last,
    which outlives their libraries.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in map(_operator, RULES):
            if operator in decomposition_table:
                library.impl(operator, decomposition_table[operator], BATCHED, allow_override=True)
    library._destroy()


# In a compiled function these two run between graphs, as any code that changes the dispatcher must; graphs keep the rules
# that they were compiled with. Marked by hand, because torch.compiler.disable imports all of the compiler.
for _func in (install, uninstall):
    _func._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    _func._torchdynamo_disable_msg = "rules cannot change inside a graph"  # pyright: ignore[reportFunctionMemberAccess]


def _operator(op: str) -> Any:
    packet, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(op: str, rule: Rule, key: str, otherwise: Callable[..., Any] | None, chooses: bool) -> Callable[..., Any]:
    operator = _operator(op)
    only = TABLE[op][0].lowering

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter: Any = peek_interpreter_stack()
        if otherwise is not None and interpreter.key() != TransformType.Vmap:
            return otherwise(*args, **kwargs)
        level = interpreter.level()
        plain, dims = _unwrap(args, level)
        if kwargs:
            values, found = _unwrap(kwargs.values(), level)
            kwargs, named_dims = dict(zip(kwargs, values, strict=True)), dict(zip(kwargs, found, strict=True))
        else:
            named_dims = {}
        lower = retrieve_current_functorch_interpreter().lower if key == FRONT else _below
        with lower():
            if key != MODE and _are_shared(dims) and _are_shared(named_dims.values()):
                return operator(*plain, **kwargs)
            num_models = CVmapInterpreterPtr(interpreter).batchSize()
            lowering = only
            if not (chooses or _choice.is_simple(op)):
                lowering = _choice.lowering(_case(op, num_models, plain, dims, kwargs, named_dims))
            if lowering == "loop":
                outputs, out_dims = _loop(operator, num_models, plain, dims, kwargs, named_dims)
            else:
                outputs, out_dims = rule(Call(num_models, tuple(dims), named_dims, lowering), *plain, **kwargs)
        if isinstance(outputs, tuple):
            return tuple(_wrap(output, dim, level) for output, dim in zip(outputs, out_dims, strict=True))
        return _wrap(outputs, out_dims, level)

    return kernel


def _case(op: str, num_models: int, args: list[Any], dims: list[Any], kwargs: Any, named_dims: Any) -> Case:
    tensors, options = [], []
    for value, dim in zip((*args, *kwargs.values()), (*dims, *named_dims.values()), strict=True):
        if isinstance(value, Tensor):
            tensors.append((value, dim))
        elif isinstance(dim, tuple):
            tensors.extend(zip(value, dim, strict=True))
        else:
            options.append(tuple(value) if isinstance(value, list) else value)
    return Case(
        op,
        num_models,
        tensors[0][0].device.type,
        tensors[0][0].dtype,
        tuple(member_shape(x, dim) for x, dim in tensors),
        tuple(dim is None for _, dim in tensors),
        tuple(options),
        forward_ad._current_level >= 0,
        torch.compiler.is_compiling(),
    )


def _loop(operator: Any, num_models: int, args: list[Any], dims: list[Any], kwargs: Any, named_dims: Any) -> Result:
    """The lowering that every operator has: the members one after another."""
    # Taken apart once, because the gradient of M separate selections would be M arrays.
    parts = [_unbind(x, dim, num_models) for x, dim in zip(args, dims, strict=True)]
    named = {name: _unbind(x, named_dims[name], num_models) for name, x in kwargs.items()}
    outputs = [
        operator(*(part[i] for part in parts), **{name: part[i] for name, part in named.items()})
        for i in range(num_models)
    ]
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    columns = list(zip(*outputs, strict=True))
    stacks = tuple(torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns)
    return stacks, tuple(0 if isinstance(stack, Tensor) else None for stack in stacks)


def _unbind(value: Any, dim: Any, num_models: int) -> Any:
    """The value for each member."""
    if isinstance(dim, tuple):
        return list(zip(*(_unbind(x, d, num_models) for x, d in zip(value, dim, strict=True)), strict=True))
    return [value] * num_models if dim is None else value.unbind(dim)


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_BELOW)


def _unwrap(values: Iterable[Any], level: int) -> tuple[list[Any], list[Any]]:
    plain, dims = [], []
    for value in values:
        dim = None
        if isinstance(value, Tensor):
            value, dim = _unwrap_batched(value, level)
        # Most lists are of numbers, all of them then.
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], int) and _has_tensors(value):
            value, inner = _unwrap(value, level)
            dim = tuple(inner)
        plain.append(value)
        dims.append(dim)
    return plain, dims


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _are_shared(dims: Iterable[Any]) -> bool:
    for dim in dims:
        if dim is not None and (not isinstance(dim, tuple) or not _are_shared(dim)):
            return False
    return True


def _wrap(output: Any, dim: int | None, level: int) -> Any:
    return output if dim is None or not isinstance(output, Tensor) else _add_batch_dim(output, dim, level)
