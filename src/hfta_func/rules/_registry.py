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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _unwrap_batched
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import lazy_load_decompositions  # pyright: ignore[reportPrivateImportUsage]

Dims = tuple[int | None, ...]
Result = tuple[Any, Any]

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


class Call(NamedTuple):
    """What a rule is told about a call besides its arguments: M, and the model axis of each argument (or None)."""

    num_models: int
    dims: Dims
    named_dims: dict[str, int | None]


Rule = Callable[..., Result]
"""``rule(call, *args, **kwargs) -> (outputs, dims)``, on plain tensors; ``dims`` has one entry per output."""

RULES: dict[str, Rule] = {}
"""Rules by operator name, ``"convolution"`` or ``"name.overload"``."""

_lock = threading.RLock()
_library: torch.library.Library | None = None


def register(op: str) -> Callable[[Rule], Rule]:
    """Add a rule for ``aten::<op>`` to the table; it takes effect at the next :func:`install`."""

    def add(rule: Rule) -> Rule:
        RULES[op] = rule
        return rule

    return add


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
                for op, rule in RULES.items():
                    library.impl(op, _kernel(op, rule), "FuncTorchBatched", with_keyset=True, allow_override=True)
        except BaseException:
            library._destroy()
            raise
        _library = library


def install_for_compiler() -> bool:
    """Install, and keep graphs compiled with these rules apart from others on disk.

    PyTorch's cache of compiled graphs keys on the graph before batching rules run, on its version and on inductor's
    configuration; the fingerprint of the rules joins the latter, as one more entry of a table of versions.
    """
    install()
    config: Any = importlib.import_module("torch._inductor.config")
    # Assigned, not updated in place: the configuration notices only assignments.
    versions = config.unsafe_marked_cacheable_functions
    config.unsafe_marked_cacheable_functions = {**versions, "hfta_func.rules": fingerprint()}
    return True


# The compiler runs a function with this mark while it traces and treats the result as a constant. It is set here by hand
# because torch.compiler.assume_constant_result imports all of the compiler.
install_for_compiler._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


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
        config: Any = sys.modules.get("torch._inductor.config")
        if config is not None:
            versions = dict(config.unsafe_marked_cacheable_functions)
            versions.pop("hfta_func.rules", None)
            config.unsafe_marked_cacheable_functions = versions


def _kernel(op: str, rule: Rule) -> Callable[..., Any]:
    packet, _, overload = op.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        plain, dims = _unwrap(args, level)
        if kwargs:
            values, found = _unwrap(kwargs.values(), level)
            kwargs, named_dims = dict(zip(kwargs, values, strict=True)), dict(zip(kwargs, found, strict=True))
        else:
            named_dims = {}
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            if all(dim is None for dim in (*dims, *named_dims.values())):
                return operator(*plain, **kwargs)
            outputs, out_dims = rule(Call(interpreter.batch_size(), tuple(dims), named_dims), *plain, **kwargs)
        if isinstance(outputs, tuple):
            return tuple(_wrap(output, dim, level) for output, dim in zip(outputs, out_dims, strict=True))
        return _wrap(outputs, out_dims, level)

    return kernel


def _unwrap(values: Iterable[Any], level: int) -> tuple[list[Any], list[int | None]]:
    pairs = [_unwrap_batched(value, level) if isinstance(value, Tensor) else (value, None) for value in values]
    return [value for value, _ in pairs], [dim for _, dim in pairs]


def _wrap(output: Any, dim: int | None, level: int) -> Any:
    return output if dim is None or not isinstance(output, Tensor) else _add_batch_dim(output, dim, level)
