"""The table of batching rules.

A rule stands at the ``FuncTorchBatched`` key: below autograd and above the backends, so one rule serves forward,
backward, forward-mode, eager execution and graph capture, on every device.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from hfta_func.rules._lowering import enter

Dims = tuple[int | None, ...]
Result = tuple[Any, Any]

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

    def first_dims(self, count: int) -> Dims:
        """The first ``count`` of ``dims``; PyTorch leaves out trailing arguments that have their default value."""
        return (*self.dims, *(None,) * count)[:count]


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

DECOMPOSED: list[str] = []
"""Operators that are taken apart into others."""


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


def register_decomposed(*ops: str) -> None:
    """Have operators taken apart under ``vmap`` as PyTorch takes them apart without it."""
    DECOMPOSED.extend(ops)


@functools.cache
def fingerprint() -> str:
    """A hash of the rules and lowerings of this installation of the package."""
    digest = hashlib.sha256()
    for source in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
