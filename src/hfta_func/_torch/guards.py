"""The checks that a compiled graph makes before every call, by the names that the compiler gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_CODE = re.compile(
    r"(G\['__import_(torch|hfta_func)(_dot_\w+)?'\]|__import__\('torch'\))(?!\w)|G\['__builtins_dict___\d+'\]"
)
"""Where the compiler finds what PyTorch, this package and Python have defined."""
_DEFINITIONS = frozenset(
    ("CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "DUPLICATE_INPUT")
)
"""The checks that a function, a class or a module is still the same one."""
_CONSTANTS = re.compile(r"_pytree|hfta_func.*\.(_?[A-Z][A-Z0-9_]*\b|__(kw)?defaults__)")
"""What nobody assigns anew: how PyTorch takes trees apart, and this package's constants and defaults of parameters."""
_COPIES = re.compile(r"call\b.*\b(_first\[0\]\.(_modules|places)|_shapes|_holders|_trainable)(?!\w)")
"""Where a step keeps its own copy of the model, and what it knows of it."""


def may_change(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's checks before every call of a graph are needed.

    There are thousands, which take a third of the time of a small step. Nobody changes what PyTorch and this package define,
    or a step's own copy of a model; settings, users' code, states and batches do change.
    """
    return [
        not (
            _COPIES.match(guard.name)
            or (_CODE.match(guard.name) and (guard.guard_type in _DEFINITIONS or _CONSTANTS.search(guard.name)))
        )
        for guard in guards
    ]
