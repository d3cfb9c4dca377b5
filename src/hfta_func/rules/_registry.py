"""The table of batching rules.

A rule is registered at the ``FuncTorchBatched`` key: below autograd and above the backends, so that one rule serves forward
and backward passes, forward mode, eager execution and graph capture, on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hfta_func._torch import operator
from hfta_func.errors import TraceError
from hfta_func.rules._lowering import enter

Dims = tuple[Any, ...]
"""The model axis of each argument, an int or None; of a list of tensors, a tuple of them."""
Result = tuple[Any, Any]

BATCHED = "FuncTorchBatched"
"""The key of batching rules: called if an argument has a model axis."""
MODE = "FuncTorchVmapMode"
"""The key of operators whose randomness PyTorch checks under ``vmap``, before any batching rule is called."""
FRONT = "FuncTorchDynamicLayerFrontMode"
"""The key of operators that PyTorch decomposes under every transform, before any batching rule is called."""


class Call(NamedTuple):
    """What a batching rule gets about a call besides its arguments.

    Args:
        num_models: The number of members M.
        dims: The model axis of each positional argument, None if members share it; of a list of tensors, a tuple of these.
        named_dims: The same of the keyword arguments, by name.
        lowering: What the table of lowerings chose, unless the rule chooses itself.
    """

    num_models: int
    dims: Dims
    named_dims: dict[str, int | None]
    lowering: str

    def first_dims(self, count: int) -> Dims:
        """The first ``count`` of ``dims``; PyTorch leaves out trailing arguments that have their default value."""
        return (*self.dims, *(None,) * count)[:count]

    def require_shared(self, position: int, what: str) -> None:
        """Raise a TraceError unless members share an argument, ``what`` of packed sequences."""
        if self.dims[position] is not None:
            raise TraceError(
                f"each member has its own {what} of packed sequences, which decide its shape, but the members run as "
                f"one and need equal shapes; pack with lengths that all members share, or pad and mask"
            )


Rule = Callable[..., Result]
"""``rule(call, *args, **kwargs) -> (outputs, dims)``, on plain tensors; ``dims`` has one entry per output. ``NotImplemented``
leaves a call to PyTorch's own rule."""


class Entry(NamedTuple):
    """A rule and the options that it was registered with, see :func:`register`."""

    rule: Rule | None  # None runs one member after another
    key: str = BATCHED
    otherwise: Callable[..., Any] | None = None


def filled(given: Sequence[Any], *defaults: Any) -> tuple[Any, ...]:
    """The last arguments of a call, with their default values where PyTorch has left these out."""
    return (*given, *defaults[len(given) :])


RULES: dict[str, Entry] = {}
"""Rules by operator name, ``"convolution"`` or ``"name.overload"``."""

OUTSIDE: dict[str, str] = {}
"""A digest of the code of each rule from outside this package, by operator."""

DECOMPOSED = (
    *("_weight_norm", "bilinear", "chain_matmul", "column_stack", "diagflat", "fill_diagonal_"),
    *("isclose", "istft", "nanquantile", "nanquantile.scalar", "narrow.Tensor"),
    *("native_channel_shuffle", "tensor_split.tensor_indices_or_sections", "fft_ihfft2", "fft_ihfftn", "moveaxis.int"),
    *("norm_except_dim", "quantile", "quantile.scalar", "stft", "stft.center", "vander"),
)
"""Operators that PyTorch implements with others, which have rules, and decomposes outside of ``vmap`` only."""


def register(
    op: str, family: str, key: str = BATCHED, otherwise: Callable[..., Any] | None = None
) -> Callable[[Rule], Rule]:
    """Add a rule for ``aten::<op>`` to the table; it takes effect at the next :func:`install`.

    Args:
        op: The operator's name, ``"name"`` or ``"name.overload"``.
        family: The name that overrides can use for it and its relatives.
        key: The dispatch key. At a key other than :data:`BATCHED` the rule is also called if nothing has a model axis.
        otherwise: For :data:`FRONT`, what the other transforms of ``torch.func`` call instead of the operator.
    """

    def add(rule: Rule) -> Rule:
        RULES[op] = Entry(rule, key, otherwise)
        enter(op, family, "the only lowering of its rule")
        return rule

    return add


def register_looped(family: str, *ops: str) -> None:
    """Run rare operators for one member after another without a warning: of few numbers, or in gradients inside ``vmap``."""
    for op in ops:
        RULES[op] = Entry(None)
        enter(op, family, "rare: one member after another", "loop")


def register_each(family: str, *ops: str) -> Callable[[Rule], Rule]:
    """Add a rule for several operators, ``rule(operator, call, *args, **kwargs)``, which is told the one that is called."""

    def add(rule: Rule) -> Rule:
        for op in ops:
            register(op, family)(functools.partial(rule, operator(op)))
        return rule

    return add
