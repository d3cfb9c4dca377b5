"""Rules that are registered from outside this package."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import pickle
from collections.abc import Callable, Mapping

import cloudpickle

from hfta_func._torch import operator
from hfta_func.rules import _registry
from hfta_func.rules._install import put
from hfta_func.rules._lowering import FAMILIES, TABLE
from hfta_func.rules._registry import OUTSIDE, RULES, Rule


def register(op: str, family: str | None = None) -> Callable[[Rule], Rule]:
    """Add a batching rule for a custom operator, or for one of PyTorch's that has none.

    The rule is ``rule(call, *args, **kwargs) -> (outputs, dims)``: it gets the operator's arguments as plain tensors, and
    ``call.dims`` says where each has its model axis (None: members share it). It returns the outputs of all members, and the
    model axis, or None, of each. It handles every mix of batched and shared arguments.
    :func:`hfta_func.testing.assert_rule` tests that it computes what a loop over the members does.

    Args:
        op: The operator's name, ``"namespace::name"`` or ``"namespace::name.overload"``.
        family: The name that :func:`override` can use for it and its relatives; the operator's name by default.

    Raises:
        ValueError: if there is no such operator, or the package has a rule for it.

    Example:
        >>> @torch.library.custom_op("doc::scaled", mutates_args=())
        ... def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ...     return x * factor
        >>> @hfta.rules.register("doc::scaled")
        ... def rule(call, x, factor):
        ...     x, factor = (hfta.rules.expand(*one, call.num_models) for one in zip((x, factor), call.dims))
        ...     return x * factor.reshape(-1, *[1] * (x.dim() - 1)), 0
        >>> hfta.vmap(scaled)(torch.ones(2, 3), torch.tensor([1.0, 2.0]))
        tensor([[1., 1., 1.],
                [2., 2., 2.]])
    """
    name = op.removeprefix("aten::")
    try:
        operator(name)
    except (ImportError, RuntimeError):
        raise ValueError(f"there is no operator '{op}'; define it with torch.library before its rule") from None
    if name in RULES and name not in OUTSIDE:
        raise ValueError(f"{op} has a rule in this package; choose among its lowerings with hfta_func.rules.override")

    def add(rule: Rule) -> Rule:
        # If the operator has run without a rule, the table has a row for its loop.
        TABLE.pop(name, None)
        OUTSIDE[name] = _digest(rule)
        _registry.register(name, family or name.rpartition("::")[2].partition(".")[0])(rule)
        put(name)
        return rule

    return add


def outside_rules() -> dict[str, tuple[str, str, bytes]]:
    """The rules from outside this package, to be sent to another process: digest, family and pickled code, by operator."""
    return {
        op: (digest, FAMILIES[op], cloudpickle.dumps(RULES[op].rule)) for op, digest in OUTSIDE.items() if op in RULES
    }


def adopt(rules: Mapping[str, tuple[str, str, bytes]]) -> None:
    """Register the rules of another process, as :func:`outside_rules` sends them.

    The digest of a rule whose operator does not exist in this process is kept, too: graphs are marked by all digests.
    """
    for op, (digest, family, code) in rules.items():
        if OUTSIDE.get(op) == digest:
            continue
        # A module that defines the operator registers its rule itself when it is imported; without it there is no operator.
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            rule = pickle.loads(code)
            register(op, family)(rule)
        OUTSIDE[op] = digest


def _digest(rule: Rule) -> str:
    """A digest of the file of a rule, or of its code if it has no file."""
    code = rule.__code__
    path = pathlib.Path(code.co_filename)
    source = path.read_bytes() if path.is_file() else code.co_code + repr(code.co_consts).encode()
    return hashlib.sha256(source).hexdigest()
