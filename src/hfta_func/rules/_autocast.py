"""Autocast before batching rules, as it comes before everything else for one model alone.

PyTorch's dispatcher reaches a batching rule before autocast's kernel. A rule that calls the same operator for all members is
cast there, but one that calls other operators is not, or too late: PyTorch's convolutions compare dtypes before they call
an operator that has a rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hfta_func import _torch
from hfta_func.rules._registry import FRONT, MODE

Kernel = Callable[..., Any]


def casting(replace: Callable[..., None], early: Mapping[str, Kernel]) -> contextlib.AbstractContextManager[None]:
    """A context with autocast before batching rules once it is used; until then, it would only slow calls down.

    ``early`` has, by operator, the kernels of rules that ``vmap`` meets before it knows which arguments have a model axis.
    """
    started = False

    def start() -> None:
        nonlocal started
        if not started:
            started = True
            for op, kinds in _torch.autocast_operators().items():
                replace(op, *_casting(op, kinds, early.get(op)), True)

    if _torch.is_autocasting():
        start()
    return _torch.before_autocast(start)


def _casting(op: str, kinds: list[str], rule: Kernel | None) -> tuple[Kernel, str]:
    """A kernel that casts its arguments and then calls the rule, or whatever comes next, and its dispatch key."""
    operator = _torch.operator(op)
    casts = [(key, torch.library.get_kernel(operator, key)) for key in map(_torch.AUTOCAST.__getitem__, kinds)]
    key = FRONT if _torch.has_kernel(operator, FRONT) else MODE
    if rule is None:
        rule = torch.library.get_kernel(operator, key).call_boxed if key == FRONT else _torch.after(MODE, operator)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for kind, cast in casts:
            # Autocast is on for a device of these tensors. Its kernel turns it off, and calls the operator again.
            if keyset.has(kind):
                return cast.call_boxed(keyset, *args, **kwargs)
        return rule(keyset, *args, **kwargs)

    return kernel, key
