"""Operators of this package over stacked tensors, for lowerings whose gradient autograd would compute inefficiently.

PyTorch's dispatcher knows such an operator, so gradients, jvp, outer ``vmap``s and the compiler handle it like PyTorch's own:
autograd uses the backward pass written for it, and everything else sees the tensor operations of its forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels.operators import DEFINITIONS, define_operator
from hfta_func._torch import (
    SingleLevelFunction,
    below_autograd,
    has_tangents,
    single_level_functions,
    without_views,
)
from hfta_func.rules._registry import fingerprint


@dataclasses.dataclass(eq=False)
class Operator:
    """An operator ``hfta_func::<name>`` with a backward pass that is written for it.

    Both passes consist of tensor operations that have derivatives, too.
    """

    schema: str  # its signature in PyTorch's notation, positional arguments only
    forward: Callable[..., Any]
    setup_context: Callable[..., None]  # (ctx, inputs, output): saves what the backward pass needs
    backward: Callable[..., Any]  # (ctx, *grads): one gradient or None per argument
    # Computes outputs of the right shapes and strides. With it graphs hold the operator as a whole; without it they hold the
    # operations of its forward pass.
    fake: Callable[..., Any] | None = None
    # What an outer vmap runs, if the gradient of the forward pass alone would be wrong.
    batched: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        DEFINITIONS.append((f"{self.schema.partition('(')[0]}_", lambda: self._op))

    def __call__(self, *args: Any) -> Any:
        """Call the operator."""
        # An exported program runs without this package.
        return (self.forward if torch.compiler.is_exporting() else self._op)(*args)

    @functools.cached_property
    def _op(self) -> Any:
        title, _, signature = self.schema.partition("(")
        forward = self.forward

        def below(*args: Any) -> Any:
            # The function disables gradients for its body, but an outer gradient transform still needs them below.
            with below_autograd(), without_views(), torch.enable_grad():
                return op(*args)

        methods = {"forward": below, "setup_context": self.setup_context, "backward": self.backward}
        function: Any = type(title, (SingleLevelFunction,), {key: staticmethod(one) for key, one in methods.items()})

        def autograd(*args: Any) -> Any:
            if has_tangents():
                # Forward mode differentiates the operations inside.
                return forward(*args)
            if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
                # As in every compiled graph, whose gradients are written out: calls are twice as fast without the function.
                with below_autograd():
                    return op(*args)
            with single_level_functions():
                return function.apply(*args)

        kernels = {
            "CompositeExplicitAutograd": forward,
            "Autograd": autograd,
            "FuncTorchBatched": self.batched or forward,
        }
        if self.fake is None:
            # XLA tracks views above its kernels, so it must see the operations inside.
            kernels["Functionalize"] = forward
        # The fingerprint tells versions of this package in one process apart; copies of one version share the operator.
        schema = f"{title}_{fingerprint()[:8]}({signature}"
        decomposition = forward if self.fake is None else None
        op = define_operator(schema, kernels, fake=self.fake, decomposition=decomposition)
        return op
