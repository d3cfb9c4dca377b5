"""Registers the rules with PyTorch's dispatcher."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func.calls.body import warn
from hfta_func.errors import LoopWarning
from hfta_func.rules import _autocast, _choice, _functions
from hfta_func.rules._layout import models_first
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._lowering import LOWERINGS, TABLE, enter, make_case
from hfta_func.rules._measured import fingerprint
from hfta_func.rules._registry import BATCHED, DECOMPOSED, FRONT, MODE, OUTSIDE, RULES, Call, Entry

_lock = threading.RLock()
# The libraries that register the rules and the loops of operators without one, by namespace.
_libraries: dict[str, torch.library.Library] = {}
# How PyTorch differs, besides its rules, while they are installed.
_changes = contextlib.ExitStack()
# The names of operators without a rule.
_unruled: set[str] = set()
# :func:`_torch.num_libraries` when operators without a rule were last looked for; empty while no rules are installed.
_counts: tuple[int, ...] = ()


def is_installed() -> bool:
    """Whether the rules are installed."""
    return bool(_counts)


# In a compiled function, install and uninstall run between graphs, which keep the rules that they were compiled with.
_between_graphs = _torch.untraced("rules cannot change inside a graph")


@_between_graphs
def install() -> None:
    """Install the rules for every ``vmap`` of this process. First use does so by itself; repeated calls do nothing."""
    global _counts
    if _counts == _torch.num_libraries():
        return
    with _lock:
        if not _counts:
            _install_rules()
        # Operators without a rule run as a loop, other libraries' operators included.
        counts = _torch.num_libraries()
        for name in _torch.operators_without(BATCHED):
            _unruled.add(name)
            _torch.implement(*_library_of(name), BATCHED, functools.partial(_looped, name))
        _counts = counts


def _install_rules() -> None:
    # PyTorch registers its decompositions at the first vmap, where they would replace rules installed before.
    _torch.load_decompositions()
    for op, entry in RULES.items():
        _replace(op, _kernel(op, entry), entry.key, with_keyset=True)
    for op in DECOMPOSED:
        _replace(op, _torch.operator(op).decompose, BATCHED)
    early = {op: _kernel(op, entry) for op, entry in RULES.items() if entry.key != BATCHED}
    # Distributions check values, which differ between members; operators of functions would compile these.
    for change in (
        _torch.leaving_out_validation(_functions.inside_array),
        _torch.run_operators_eagerly(_functions.inside_array),
        _functions.applied(),
        _autocast.casting(_replace, early),
    ):
        _changes.enter_context(change)


def put(op: str) -> None:
    """Register a rule that was added later, if rules are installed."""
    with _lock:
        if _counts:
            _unruled.discard(op if "::" in op else f"aten::{op}")
            _replace(op, _kernel(op, RULES[op]), BATCHED, with_keyset=True)


def _replace(op: str, kernel: Callable[..., Any], key: str, with_keyset: bool = False) -> None:
    with warnings.catch_warnings():
        # The dispatcher warns that a kernel is replaced, which is intended.
        warnings.simplefilter("ignore")
        library, name = _library_of(op)
        library.impl(name, kernel, key, with_keyset=with_keyset, allow_override=True)


def _library_of(op: str) -> tuple[torch.library.Library, str]:
    """The library of an operator's namespace, and its name there."""
    namespace, _, name = op.rpartition("::")
    namespace = namespace or "aten"
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace], name


def _withdraw() -> None:
    """Take back everything that has been registered."""
    for library in _libraries.values():
        _torch.destroy(library)
    _libraries.clear()
    _unruled.clear()
    _loop.cache_clear()
    # Under dispatch modes, and so under the compiler, Python kernels come from a table of the last ones registered, which
    # outlives their libraries. So PyTorch's are registered again.
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in map(_torch.operator, RULES):
            if operator in _torch.decompositions:
                library.impl(operator, _torch.decompositions[operator], BATCHED, allow_override=True)
    _torch.destroy(library)


def _looped(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator without a rule, which enters the table at its first call."""
    return _loop(name)(*args, **kwargs)


@functools.cache
def _loop(name: str) -> Callable[..., Any]:
    op, sibling = name.removeprefix("aten::"), _torch.out_of_place(name)
    if sibling is not None and sibling not in _unruled:
        return functools.partial(_copied, _torch.operator(sibling))
    refusal = _torch.why_not_looped(_torch.operator(op))
    if refusal is not None:
        raise RuntimeError(refusal)
    enter(op, "rest", "no batching rule: one member after another", "loop")
    warn(
        f"{name} has no batching rule and runs one member after another; register a rule with hfta_func.rules.register, "
        f"or silence this with warnings.filterwarnings('ignore', category=hfta_func.errors.LoopWarning)",
        LoopWarning,
    )
    return _kernel(op, Entry(None))


def _copied(sibling: Any, keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call an in-place operator by its out-of-place sibling, which has a rule."""
    # On a copy, because gradients may need the values that are overwritten.
    result = sibling(x.clone(), *args, **kwargs)
    if not torch.can_cast(result.dtype, x.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {x.dtype}")
    return x.copy_(result)


@_torch.constant_to_compiler
def install_for_compiler(overrides: str) -> bool:
    """Install, and keep graphs compiled with these rules apart from others in the cache on disk.

    PyTorch's cache looks up a graph as it is before batching rules run, so graphs carry a fingerprint of the rules.

    Args:
        overrides: :data:`_choice.state`, passed so that the compiler guards on it and recompiles when it changes.
    """
    install()
    _torch.mark_graphs(fingerprint() + "".join(OUTSIDE[op] for op in sorted(OUTSIDE)) + overrides)
    _set_up_until_compiled()
    # It is traced into otherwise, and then not found in the table of functions that are replaced.
    torch.compiler.allow_in_graph(Tensor.norm)
    return True


_compiling = threading.Event()


def _set_up_until_compiled() -> None:
    """Apply settings until compilation ends: rules run after tracing, when the compiler captures operators."""
    if _compiling.is_set():
        return
    _compiling.set()
    settings = contextlib.ExitStack()
    settings.callback(_compiling.clear)
    settings.enter_context(_functions.traced())
    settings.enter_context(_torch.trace_history())
    # Recurrent layers belong in graphs, because their rules decompose them.
    settings.enter_context(_torch.allow_recurrent_layers())
    settings.enter_context(_torch.trust_processor())
    _torch.until_compiled(settings.close)


@_between_graphs
def uninstall() -> None:
    """Restore PyTorch's own batching rules."""
    global _counts
    with _lock:
        if _counts:
            _changes.close()
            _withdraw()
            _counts = ()
        _torch.mark_graphs(None)


def _kernel(op: str, entry: Entry) -> Callable[..., Any]:
    rule, key, otherwise = entry
    operator = _torch.operator(op)
    replaced = torch.library.get_kernel(operator, key)
    only, written = TABLE[op][0].lowering, _torch.written_by(operator)[0]
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    makes_new = not any(result.alias_info for result in operator._schema.returns)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter = _torch.peek_interpreter()
        if interpreter is None:
            raise RuntimeError(f"a tensor of {op} may have escaped from vmap")
        if otherwise is not None and interpreter.key() != _torch.TransformType.Vmap:
            return otherwise(*args, **kwargs)
        level, count, arguments = interpreter.level(), len(args), (*args, *kwargs.values())
        values, axes = _unwrap(arguments, level)
        plain, dims = values[:count], axes[:count]
        named = dict(zip(kwargs, values[count:], strict=True)) if kwargs else kwargs
        named_dims = dict(zip(kwargs, axes[count:], strict=True)) if kwargs else {}
        lower = _torch.current_interpreter().lower if key == FRONT else _torch.below_batching
        with lower():
            if key != MODE and _are_shared(axes):
                return operator(*plain, **named)
            vmap = _torch.VmapInterpreter(interpreter)
            num_models = vmap.batchSize()
            lowering = only
            if not (op in LOWERINGS or _choice.is_simple(op)):
                lowering = _choice.lowering(make_case(op, num_models, values, axes))
            if rule is None or lowering == "loop":
                if rule is None and is_random and vmap.randomness() != _torch.RandomnessType.Different:
                    raise RuntimeError(f"vmap: called random operation while in randomness error mode: {op}")
                result = one_by_one(operator, num_models, plain, dims, named, named_dims)
            else:
                result = rule(Call(num_models, tuple(dims), named_dims, lowering), *plain, **named)
        if result is NotImplemented:
            return replaced.call_boxed(keyset, *args, **kwargs)
        # An argument that was written in place is returned itself.
        given = dict(zip(map(id, values), arguments, strict=True)) if rule is None and written else {}
        return _wrap(*result, level, given, makes_new and torch.compiler.is_exporting())

    return kernel


def _unwrap(values: Iterable[Any], level: int) -> tuple[list[Any], list[Any]]:
    plain, dims = [], []
    for value in values:
        dim = None
        if isinstance(value, Tensor):
            value, dim = _torch.unwrap_batched(value, level)
        elif isinstance(value, (list, tuple)) and value and any(isinstance(x, Tensor) for x in value):
            value, inner = _unwrap(value, level)
            dim = tuple(inner)
        plain.append(value)
        dims.append(dim)
    return plain, dims


def _are_shared(dims: Iterable[Any]) -> bool:
    for dim in dims:
        if dim is not None and (not isinstance(dim, tuple) or not _are_shared(dim)):
            return False
    return True


def _wrap(output: Any, dim: Any, level: int, given: dict[int, Any], exporting: bool) -> Any:
    if isinstance(output, (tuple, list)):
        return tuple(_wrap(one, axis, level, given, exporting) for one, axis in zip(output, dim, strict=True))
    # A gradient that is not needed is None, although it has an axis.
    if not isinstance(output, Tensor):
        return output
    if id(output) in given:
        return given[id(output)]
    if exporting and dim is not None:
        # PyTorch cannot export moving the model axis of results to the front, so it comes first in memory, too.
        output, dim = models_first(output, dim).contiguous(), 0
    return output if dim is None else _torch.add_batch_dim(output, dim, level)
