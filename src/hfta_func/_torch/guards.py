"""The checks that a compiled graph makes before every call, by the names that the compiler gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_CODE = re.compile(
    r"(G\['__import_(torch|hfta_func)(_dot_\w+)?'\]|__import__\('torch'\))(?!\w)|G\['__builtins_dict___\d+'\]"
)
"""Guards on definitions of PyTorch, this package and Python."""
_DEFINITIONS = frozenset(
    ("CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "DUPLICATE_INPUT")
)
"""The types of guards that a function, a class or a module is the same object."""
_CONSTANTS = re.compile(r"_pytree|hfta_func.*\.(_?[A-Z][A-Z0-9_]*\b|__(kw)?defaults__)")
"""Guards on values that are never assigned again: PyTorch's registry of trees, this package's constants and defaults."""
_COPIES = re.compile(r"call\b.*\b(_first\[0\]\.(_modules|places)|_shapes|_holders|_trainable)(?!\w)")
"""Guards on a step's copy of the model, and on facts about it."""


def may_change(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's checks before every call of a graph are needed.

    There are thousands, which take a third of the time of a small step. Definitions of PyTorch and this package, and a step's
    copy of a model, never change; settings, users' code, states and batches do.
    """
    return [
        not (
            _COPIES.match(guard.name)
            or (_CODE.match(guard.name) and (guard.guard_type in _DEFINITIONS or _CONSTANTS.search(guard.name)))
        )
        for guard in guards
    ]
