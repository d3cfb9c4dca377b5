"""Losses of M members as one loss over M times the batch.

Each kernel runs without a reduction on the rows of all members; sums and means per member are taken afterwards. Dimension
letters: M models, N batch, C classes, S space, D features; T time and K labels of ``ctc_loss``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hfta_func import _torch
from hfta_func._kernels import programs
from hfta_func._torch import has_tangents
from hfta_func.calls.recompute import WRITTEN, recalls
from hfta_func.errors import StateError
from hfta_func.rules._layout import align, each, expand, fold, models_first, split
from hfta_func.rules._loop import one_by_one
from hfta_func.rules._lowering import member_shape
from hfta_func.rules._operator import Program, runs_programs
from hfta_func.rules._registry import Call, Result, filled, register_each, register_looped

aten: Any = torch.ops.aten
_NONE, _MEAN = 0, 1
_cross_entropy = _torch.operator("cross_entropy_loss")
_MANY = 1024
"""With so many classes, a loss is much of a step."""


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], outputs: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.mark_non_differentiable(outputs[1])
    # A step that saves less is called back once. What autograd saves has two holders until this operator's call back is over.
    ctx.logits, kept = (None, [logits]) if recalls() is None else (logits, [])
    ctx.written = _torch.writes(logits)
    ctx.save_for_backward(target, outputs[1], *kept)


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """That of the logits, in their memory if the step saves less and nothing else reads them any more."""
    target, stats, *kept = ctx.saved_tensors
    logits = kept[0] if kept else ctx.logits
    if not kept and _torch.writes(logits) != ctx.written:
        raise StateError(WRITTEN)
    if torch.is_grad_enabled() or has_tangents():
        # In operators of PyTorch, which have derivatives.
        scores, total = logits.log_softmax(-1), grad.new_ones(())
        hit = aten.nll_loss_backward.default(grad, scores, target, None, _NONE, ctx.ignore_index, total)
        return aten._log_softmax_backward_data.default(hit, scores, -1, logits.dtype), None, None
    is_last = not kept and recalls() is None
    if is_last:
        logits = logits.detach()
        del ctx.logits
    into = logits if is_last and _torch.is_sole_holder(logits) else torch.empty_like(logits)
    return _gradient_of_logits(grad, logits, target, stats, ctx.ignore_index, into), None, None


# Whoever needs the derivative of a gradient does not call it.
_of_rows = Program(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    *(programs.cross_entropy, _keep, _gradient),
    fake=lambda x, *_: (x.new_empty(x.shape[:-1]), x.new_empty((*x.shape[:-1], 2))),
)
_gradient_of_logits = Program(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats, int ignore_index, Tensor(a!) into)"
    " -> Tensor(a!)",
    *(programs.cross_entropy_backward, lambda *_: None, lambda *_: None),
    fake=lambda *args: args[-1],
)


@register_each("loss", "cross_entropy_loss", "nll_loss_nd")
def loss_of_classes(
    operator: Any, call: Call, input: Tensor, target: Tensor, weight: Tensor | None = None, *options: Any
) -> Result:
    """Cross entropy ``[M,N,C,S]`` with classes ``[M,N,S]`` or probabilities ``[M,N,C,S]``, to ``[M]`` or ``[M,N,S]``.

    The negative log likelihood knows classes alone, and no smoothing.
    """
    # PyTorch's own operator makes one log_softmax and one nll_loss, so that autocast treats them as in a solo run.
    input_dim, target_dim, weight_dim = call.first_dims(3)
    reduction, ignore_index, *smoothing = filled(options, _MEAN, -100)
    has_probabilities = member_shape(input, input_dim) == member_shape(target, target_dim)
    if weight_dim is not None and (has_probabilities or any(smoothing)):
        args = input, target, weight, reduction, ignore_index, *smoothing
        return one_by_one(operator, call.num_models, args, call.first_dims(len(args)), {}, {})
    rows, target = _Rows(call, input), expand(target, target_dim, call.num_models)
    given = weight if weight_dim is None else None, _NONE, ignore_index, *smoothing
    if has_probabilities:
        return _reduce(rows.split(operator(rows.input, rows.of(target), *given)), reduction), 0
    counted, x = target != ignore_index, rows.members
    is_plain = operator is _cross_entropy and weight is None and not any(smoothing)
    is_table = is_plain and rows.input.dim() == 2 and x.numel() > 0 and target.dtype == torch.int64
    many = is_plain and x.shape[rows.axis] >= _MANY and x.dtype in (torch.float32, torch.float64)
    if many and x.device.type == "cpu" and torch.compiler.is_compiling():
        losses = _of_many_classes(rows, target, counted, ignore_index)
    elif is_table and runs_programs(rows.input, programs.losses):
        losses = rows.split(_of_rows(rows.input.contiguous(), rows.of(target), ignore_index)[0])
    else:
        losses = rows.split(operator(rows.input, rows.of(target), *given))
    weights = counted if weight is None else _weights(weight, weight_dim, target, counted)
    return _weighted(losses if weight_dim is None else losses * weights, weights, reduction), 0


def _of_many_classes(rows: _Rows, target: Tensor, counted: Tensor, ignore_index: int) -> Tensor:
    """The losses ``[M,N,S]`` as a compiler for CPUs takes the least time for them.

    It would compute the gradient of PyTorch's operator by adding up a table of zeros and ones, as large as the logits. A loop
    over members and then samples also finds the values of a member, such as a bias, without a division for every row.
    """
    shifted = rows.members - rows.members.detach().amax(rows.axis, keepdim=True)
    lost = rows.split(aten.nll_loss_nd.default(rows.of(shifted), rows.of(target), None, _NONE, ignore_index))
    return lost + torch.where(counted, shifted.logsumexp(rows.axis), 0)


# What a gradient inside ``vmap`` calls, for rows or for images.
@register_each("loss", "nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(operator: Any, call: Call, grad: Tensor, input: Tensor, *args: Any) -> Result:
    """Gradient of the log likelihoods ``[M,N,C,S]``."""
    target, weight, reduction, ignore_index, total_weight = args
    dims = call.dims
    rows = _Rows(call._replace(dims=dims[1:]), input)
    tensors, tensor_dims = (grad, target, total_weight), (dims[0], dims[2], dims[6])
    grad, target, total_weight = each(expand, tensors, tensor_dims, call.num_models)
    grad = grad / total_weight if reduction == _MEAN else grad
    grad = align(grad, 0, target.dim() - 1).expand(target.shape)
    if weight is not None:
        grad = grad * _weights(weight, dims[3], target, target != ignore_index)
    # Without a reduction the kernel does not read the total weight.
    grad = operator(rows.of(grad), rows.input, rows.of(target), None, _NONE, ignore_index, total_weight[0])
    return rows.split(grad), 0


register_looped("loss", "multi_margin_loss", "multi_margin_loss_backward", "soft_margin_loss_backward")
register_looped("loss", *(f"multilabel_margin_loss{suffix}" for suffix in ("", "_forward", "_backward")))


@register_each(
    "loss",
    *("binary_cross_entropy_with_logits", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss"),
    *("margin_ranking_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
)
def loss(operator: Any, call: Call, *args: Any, **options: Any) -> Result:
    """Losses of tensors that broadcast against each other, with any number of leading axes.

    They are of all entries or rows, by PyTorch's own operator, so that autocast treats it as in a solo run.
    """
    names = _arguments(operator)
    position = names.index("reduction")
    reduction = args[position] if len(args) > position else _MEAN
    pairs = zip(args[:position], call.dims, strict=False)
    rank = max(x.dim() - (dim is not None) for x, dim in pairs if isinstance(x, Tensor))
    aligned = each(align, args[:position], call.dims, rank)
    # As views of one shape, because some of the gradients do not broadcast.
    shape = torch.broadcast_shapes(*(x.shape for x in aligned if isinstance(x, Tensor)))
    aligned = [x.expand(shape) if isinstance(x, Tensor) else x for x in aligned]
    options.update(zip(names[position + 1 :], args[position + 1 :], strict=False))
    return _reduce(operator(*aligned, reduction=_NONE, **options), reduction), 0


@functools.cache
def _arguments(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


# PyTorch's decomposable operator, so that PyTorch chooses between its kernel and cuDNN's.
@register_each("loss", "ctc_loss.IntList", "ctc_loss.Tensor")
def ctc_loss(
    operator: Any, call: Call, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
) -> Result:
    """Losses ``[M,T,N,C] -> [M]`` or ``[M,N]`` with lengths ``[M,N]``, or lists that all members share."""
    blank, reduction, zero_infinity = filled(rest, 0, _MEAN, False)
    single = log_probs.dim() - (call.dims[0] is not None) == 2
    log_probs = log_probs.unsqueeze(-2) if single else log_probs
    # [T,N,C], [N,K] or concatenated [K], and lengths [N], all with MN for N
    num_models, dims = call.num_models, call.dims
    lengths: Any = [
        # The length of a single sample may have no axis.
        expand(x, dim, num_models).flatten() if isinstance(x, Tensor) else [*x] * num_models
        for x, dim in zip((input_lengths, target_lengths), dims[2:4], strict=True)
    ]
    folded = fold(log_probs, dims[0], 1, num_models), fold(targets, dims[1], 0, num_models)
    losses = split(operator(*folded, *lengths, blank, _NONE, zero_infinity), 0, num_models)
    if reduction == _MEAN:
        # Each loss is divided by the length of its target before the mean is taken.
        lengths = torch.as_tensor(lengths[1], device=losses.device).reshape(losses.shape)
        losses = losses / lengths.clamp(min=1)
    return _reduce(losses.squeeze(1) if single else losses, reduction), 0


# What a gradient inside ``vmap`` decomposes the loss into.
register_looped("loss", "_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward", "_ctc_loss_backward.Tensor")


class _Rows:
    """The samples of all members as one batch, in the order of the input's memory.

    ``[M,N,C,S] -> [MN,C,S]`` or ``[N,M,C,S] -> [NM,C,S]``, both without a copy; single samples ``[M,C]`` are already a batch.
    A shared input is repeated.
    """

    def __init__(self, call: Call, input: Tensor):
        self.num_models, dim = call.num_models, call.dims[0]
        self.members = expand(input, dim, call.num_models)
        self.has_batch = self.members.dim() > 2
        self.axis = 2 if self.has_batch else 1  # of the classes
        self.is_inner = self.has_batch and dim == 1
        self.input = self.of(self.members)

    def of(self, x: Tensor) -> Tensor:
        """``[M,N,...] -> [MN,...]``."""
        return (x.transpose(0, 1) if self.is_inner else x).flatten(0, 1) if self.has_batch else x

    def split(self, x: Tensor) -> Tensor:
        """``[MN,...] -> [M,N,...]``."""
        if not self.has_batch:
            return x
        sizes = self.num_models, x.shape[0] // self.num_models
        return x.unflatten(0, sizes[::-1]).transpose(0, 1) if self.is_inner else x.unflatten(0, sizes)


def _weights(weight: Tensor, dim: int | None, target: Tensor, counted: Tensor) -> Tensor:
    """The class weight of each target ``[M,N,S]``; zero for targets that are not counted."""
    # Ignored targets may be outside of the table.
    index = torch.where(counted, target, 0)
    if dim is None:
        weights = weight.index_select(0, index.flatten()).reshape(target.shape)
    else:
        weights = models_first(weight, dim).gather(1, _flat(index)).reshape(target.shape)
    return torch.where(counted, weights, 0)


def _flat(x: Tensor) -> Tensor:
    """``[M,...] -> [M,K]``, also for one number per member."""
    return x.unsqueeze(-1).flatten(1)


def _weighted(losses: Tensor, weights: Tensor, reduction: int) -> Tensor:
    """``[M,...] -> [M]``, or unchanged; a mean is over the sum of the weights."""
    if reduction == _MEAN:
        return _flat(losses).sum(1) / _flat(weights).sum(1, dtype=losses.dtype)
    return _reduce(losses, reduction)


def _reduce(losses: Tensor, reduction: int) -> Tensor:
    """``[M,...] -> [M]``, or unchanged."""
    if reduction == _NONE:
        return losses
    return _flat(losses).mean(1) if reduction == _MEAN else _flat(losses).sum(1)
