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
from torch.utils.flop_counter import flop_registry

from hfta_func._kernels import operators
from hfta_func._torch import has_tangents, num_dispatch_modes, num_recorders
from hfta_func.rules._measured import fingerprint


def runs_programs(x: Tensor, program: Callable[[torch.dtype], Any]) -> bool:
    """Whether there is a program in C of :mod:`hfta_func._kernels` for a tensor, and this call may use it."""
    observed = torch.compiler.is_compiling() or num_dispatch_modes() > num_recorders() or has_tangents()
    return x.device.type == "cpu" and not observed and program(x.dtype) is not None


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
    # Tensors may have any number of leading axes, as in programs in C: an outer vmap puts its members there.
    leads: bool = False
    # The forward pass is a program in C alone, which an export meets only in what a tape has recorded.
    opaque: bool = False
    # Floating-point operations of a call, ``flops(*args, out_val=output)``, for PyTorch's counter.
    flops: Callable[..., int] | None = None

    def __post_init__(self) -> None:
        operators.DEFINITIONS.append((f"{self.schema.partition('(')[0]}_", lambda: self._op))

    def __call__(self, *args: Any) -> Any:
        """Call the operator."""
        if operators.is_plain(args):
            return self._directly(*args)
        # An exported program runs without this package.
        return (self.forward if torch.compiler.is_exporting() and not self.opaque else self._op)(*args)

    @functools.cached_property
    def _directly(self) -> Any:
        _ = self._op  # Code that a compiler keeps on disk calls operators that this process has defined.
        return operators.directly(self.schema.partition("(")[0], self.forward, self.setup_context, self.backward)

    @functools.cached_property
    def _op(self) -> Any:
        title, _, signature = self.schema.partition("(")
        forward = self.forward

        differentiated = operators.with_backward(title, lambda *args: op(*args), self.setup_context, self.backward)

        def autograd(*args: Any) -> Any:
            # Forward mode differentiates the operations inside.
            return (forward if has_tangents() else differentiated)(*args)

        kernels = {
            "CompositeExplicitAutograd": forward,
            "Autograd": autograd,
            "FuncTorchBatched": operators.members_in_front(self) if self.leads else forward,
        }
        if self.fake is None:
            # XLA tracks views above its kernels, so it must see the operations inside.
            kernels["Functionalize"] = forward
        # The fingerprint tells versions of this package in one process apart; copies of one version share the operator.
        schema = f"{title}_{fingerprint()[:8]}({signature}"
        decomposition = forward if self.fake is None else None
        op = operators.define_operator(schema, kernels, fake=self.fake, decomposition=decomposition)
        if self.flops is not None:
            flop_registry[op.overloadpacket] = self.flops
        return op


Program = functools.partial(Operator, leads=True)
"""An operator whose forward pass is a program in C, or may be one."""
