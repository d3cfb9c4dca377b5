"""Operators under the contract of rules, by family; one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RuleCase(NamedTuple):
    """A function of one member's tensors; ``make`` draws one member's inputs."""

    name: str
    func: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]


def _rows(*rows: Any) -> list[RuleCase]:
    return [RuleCase(*row) for row in rows]


def _randn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def _with_targets(make: Callable[[], tuple[Tensor, ...]], *size: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (*make(), torch.randint(classes, size))


def _integers(*size: int, high: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(high, size),)


def _signs(*size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(2, size, dtype=torch.float64) * 2 - 1,)


def _joined(*makes: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(x for make in makes for x in make())


def _batch_norm(training: bool, norm: Callable[..., Tensor] = F.batch_norm) -> Callable[..., Any]:
    def func(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # What x is mapped over decides whether running statistics are per member; adding it in makes them follow.
        mean, var = mean.detach() + 0 * x.detach().sum(), var.detach().square() + 1 + 0 * x.detach().sum()
        return norm(x, mean, var, weight, bias, training, 0.3, 1e-3), mean, var

    return func


def _attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


_QKV = ((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4))


def _recurrent(kind: str, states: int, *sizes: Tensor, bidirectional: bool = False, batch_first: bool = False) -> Any:
    """A layer of ``torch.<kind>`` as a function of its input, its states and its parameters."""

    def func(x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        hx = args[:states] if kind == "lstm" else args[0]
        params = args[states:]
        has_biases = any(param.dim() == 1 for param in params)
        options = (bidirectional,) if sizes else (bidirectional, batch_first)
        return getattr(torch, kind)(x, *sizes, hx, params, has_biases, 1, 0.0, True, *options)

    return func


def _packed(kind: str, states: int, **options: Any) -> Any:
    return _recurrent(kind, states, torch.tensor([3, 2, 1]), **options)


LINEAR = _rows(
    ("linear", F.linear, _randn((2, 4, 3), (5, 3), (5,))),
    ("linear without bias", F.linear, _randn((4, 3), (5, 3))),
    ("linear to a number", F.linear, _randn((2, 4, 3), (3,))),
    ("mm", torch.mm, _randn((4, 3), (3, 5))),
    ("addmm", lambda *a: torch.addmm(*a, beta=0.5, alpha=2.0), _randn((5,), (4, 3), (3, 5))),
    ("bilinear", F.bilinear, _randn((4, 3), (4, 5), (2, 3, 5), (2,))),
)

CONV = _rows(
    ("conv1d", lambda *a: F.conv1d(*a, stride=2, padding=1), _randn((2, 3, 9), (4, 3, 3), (4,))),
    ("conv2d", lambda *a: F.conv2d(*a, padding=1), _randn((2, 3, 5, 6), (4, 3, 3, 3), (4,))),
    ("conv2d grouped", lambda *a: F.conv2d(*a, dilation=2, groups=2), _randn((2, 4, 6, 6), (6, 2, 2, 2), (6,))),
    ("conv2d depthwise", lambda *a: F.conv2d(*a, groups=3), _randn((2, 3, 4, 4), (6, 1, 2, 2))),
    ("conv2d of one image", lambda *a: F.conv2d(*a, stride=2), _randn((3, 5, 5), (4, 3, 2, 2), (4,))),
    ("conv3d", F.conv3d, _randn((2, 2, 3, 4, 4), (3, 2, 2, 2, 2), (3,))),
    (
        "conv_transpose1d",
        lambda *a: F.conv_transpose1d(*a, stride=2, output_padding=1),
        _randn((2, 3, 5), (3, 4, 3), (4,)),
    ),
    (
        "conv2d with everything",
        lambda *a: F.conv2d(*a, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        _randn((2, 3, 6, 7), (4, 3, 3, 2), (4,)),
    ),
    (
        "conv_transpose2d with everything",
        lambda *a: F.conv_transpose2d(
            *a, stride=(3, 2), padding=(2, 1), output_padding=(1, 0), groups=2, dilation=(2, 3)
        ),
        _randn((2, 4, 4, 3), (4, 3, 3, 2), (6,)),
    ),
    (
        "conv_transpose2d grouped",
        lambda *a: F.conv_transpose2d(*a, stride=2, groups=2),
        _randn((2, 4, 4, 4), (4, 3, 2, 2), (6,)),
    ),
    (
        "conv_transpose2d padded by more than its stride",
        lambda *a: F.conv_transpose2d(*a, dilation=2, output_padding=1),
        _randn((2, 3, 4, 3), (3, 4, 3, 2), (4,)),
    ),
    ("conv2d of no images", lambda *a: F.conv2d(*a, padding=1), _randn((0, 3, 5, 6), (4, 3, 3, 3), (4,))),
)

NORM = _rows(
    ("batch_norm in training", _batch_norm(True), _randn((4, 3, 2, 2), (3,), (3,), (3,), (3,))),
    ("batch_norm in evaluation", _batch_norm(False), _randn((4, 3, 5), (3,), (3,), (3,), (3,))),
    ("batch_norm of a batch", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), _randn((4, 3, 2), (3,), (3,))),
    ("instance_norm", _batch_norm(True, F.instance_norm), _randn((2, 3, 4, 2), (3,), (3,), (3,), (3,))),
    ("instance_norm in evaluation", _batch_norm(False, F.instance_norm), _randn((2, 3, 5), (3,), (3,), (3,), (3,))),
    ("layer_norm", lambda x, *a: F.layer_norm(x, (5,), *a, 1e-3), _randn((2, 3, 5), (5,), (5,))),
    ("rms_norm", lambda x, w: F.rms_norm(x, (5,), w, 1e-3), _randn((2, 3, 5), (5,))),
    ("group_norm", lambda x, *a: F.group_norm(x, 2, *a, 1e-3), _randn((3, 4, 2, 3), (4,), (4,))),
    ("local_response_norm", lambda x: F.local_response_norm(x, 2), _randn((2, 4, 3))),
    ("weight_norm", torch._weight_norm, _randn((4, 3, 2), (4, 1, 1))),
)

POOLING = _rows(
    # Elements that are equally extreme share the gradient.
    ("amax with ties", lambda x: x.detach().round().add(x - x.detach()).amax((0, -1)), _randn((3, 4, 6))),
    ("amax with kept axes", lambda x: x.amax((-2,), keepdim=True), _randn((3, 4, 6))),
    ("max_pool2d", lambda x: F.max_pool2d(x * 1, 2, return_indices=True), _randn((2, 3, 4, 6))),
    ("max_pool2d after conv2d", lambda x, w: F.max_pool2d(F.conv2d(x, w), 2), _randn((2, 3, 5, 5), (4, 3, 2, 2))),
    ("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), _randn((2, 3, 7))),
    ("max_pool3d", lambda x: F.max_pool3d(x, 2, return_indices=True), _randn((2, 3, 4, 4, 4))),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), _randn((2, 3, 7))),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False), _randn((2, 3, 5, 6))),
    ("avg_pool2d after conv2d", lambda x, w: F.avg_pool2d(F.conv2d(x, w), 2), _randn((2, 3, 5, 5), (4, 3, 2, 2))),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), _randn((2, 3, 7))),
    (
        "adaptive_avg_pool2d after conv2d",
        lambda x, w: F.adaptive_avg_pool2d(F.conv2d(x, w), (3, 2)),
        _randn((2, 3, 6, 5), (4, 3, 2, 2)),
    ),
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x * 1, 3, return_indices=True), _randn((2, 3, 7, 5))),
    (
        "max_unpool2d",
        lambda x, y: F.max_unpool2d(y, F.max_pool2d(x, 2, return_indices=True)[1], 2),
        _randn((2, 3, 6, 4), (2, 3, 3, 2)),
    ),
    (
        "fractional_max_pool2d",
        lambda x, s: F.fractional_max_pool2d(x, 2, (3, 4), return_indices=True, _random_samples=s.detach().sigmoid()),
        _randn((2, 3, 7, 8), (2, 3, 2)),
    ),
    (
        "fractional_max_pool3d",
        lambda x, s: F.fractional_max_pool3d(x, 2, (3, 2, 3), _random_samples=s.detach().sigmoid()),
        _randn((2, 3, 7, 6, 6), (2, 3, 3)),
    ),
)

LOSS = _rows(
    ("cross_entropy", F.cross_entropy, _with_targets(_randn((6, 5)), 6, classes=5)),
    (
        "cross_entropy with label smoothing",
        lambda x, y: F.cross_entropy(x + 0 * y.sum(), y, ignore_index=1, label_smoothing=0.1),
        _with_targets(_randn((9, 5)), 9, classes=5),
    ),
    (
        "cross_entropy with class weights",
        lambda x, w, y: F.cross_entropy(x, y, w.detach().square()),
        _with_targets(_randn((6, 5), (5,)), 6, classes=5),
    ),
    ("cross_entropy of images", F.cross_entropy, _with_targets(_randn((2, 4, 3, 3)), 2, 3, 3, classes=4)),
    (
        "cross_entropy after conv2d",
        lambda x, w, y: F.cross_entropy(F.conv2d(x, w), y, ignore_index=0),
        _with_targets(_randn((2, 3, 4, 4), (4, 3, 2, 2)), 2, 3, 3, classes=4),
    ),
    (
        "cross_entropy with everything",
        lambda x, w, y: F.cross_entropy(x, y, w.detach().square(), ignore_index=2, label_smoothing=0.2),
        _with_targets(_randn((2, 4, 3), (4,)), 2, 3, classes=4),
    ),
    (
        "cross_entropy with probabilities",
        lambda x, y, w: F.cross_entropy(x, y.softmax(1), w.detach().square(), label_smoothing=0.1),
        _randn((2, 4, 3), (2, 4, 3), (4,)),
    ),
    (
        "multi_margin_loss",
        lambda x, w, y: F.multi_margin_loss(x, y, 2, 0.7, w.detach().square()),
        _with_targets(_randn((6, 4), (4,)), 6, classes=4),
    ),
    # No target ends with -1 here: compiled, PyTorch itself counts what comes after.
    ("multilabel_margin_loss", F.multilabel_margin_loss, _with_targets(_randn((6, 4)), 6, 4, classes=4)),
    ("soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.detach()), _joined(_randn((4, 3)), _signs(4, 3))),
    ("kl_div", lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), _randn((4, 3), (4, 3))),
    (
        "cosine_embedding_loss",
        lambda x, y, t: F.cosine_embedding_loss(x, y, t.detach(), 0.1),
        _joined(_randn((4, 3), (4, 3)), _signs(4)),
    ),
    ("mse_loss", F.mse_loss, _randn((4, 3), (4, 3))),
    ("binary_cross_entropy", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), _randn((4, 3), (4, 3))),
    (
        "binary_cross_entropy_with_logits",
        lambda x, y, w, p: F.binary_cross_entropy_with_logits(
            x, y.sigmoid(), w.detach(), pos_weight=p.detach().square()
        ),
        _randn((4, 3), (4, 3), (3,), (3,)),
    ),
    (
        "gaussian_nll_loss",
        lambda x, y, v: F.gaussian_nll_loss(x, y, v.square(), full=True, eps=0.3),
        _randn((4, 3), (4, 3), (4, 3)),
    ),
)

DISTANCE = _rows(
    ("cdist", torch.cdist, _randn((4, 3), (5, 3))),
    ("cdist of many rows", torch.cdist, _randn((2, 30, 3), (28, 3))),
    ("cdist of differences", lambda x, y: torch.cdist(x, y, 1.0), _randn((2, 4, 3), (2, 5, 3))),
    ("pdist", F.pdist, _randn((5, 3))),
)

ATTENTION = _rows(
    ("attention", _attention(), _randn(*_QKV)),
    ("attention, causal", _attention(is_causal=True), _randn(*_QKV)),
    ("attention with a mask", _attention(scale=0.3), _randn(*_QKV, (5, 6))),
    ("attention with a mask per sample", _attention(), _randn(*_QKV, (2, 1, 5, 6))),
    (
        "attention with a mask of booleans",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(5, 6, dtype=torch.bool).tril()),
        _randn(*_QKV),
    ),
    ("attention with grouped queries", _attention(enable_gqa=True), _randn((2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4))),
)


def _bag(make_offsets: Callable[[], tuple[Tensor, ...]] | None = None, **options: Any) -> tuple[Any, Any]:
    """``embedding_bag`` of seven entries, and its inputs."""

    def func(table: Tensor, indices: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        return F.embedding_bag(indices, table, offsets, per_sample_weights=weights[0] if weights else None, **options)

    return func, _joined(_randn((5, 3)), _integers(7, high=5), make_offsets or _offsets)


def _offsets() -> tuple[Tensor, ...]:
    return (torch.tensor([0, *sorted(torch.randint(7, (2,)).tolist())]),)


EMBEDDING = _rows(
    ("embedding", lambda w, i: F.embedding(i, w), _joined(_randn((5, 3)), _integers(2, 4, high=5))),
    (
        "embedding with padding",
        lambda w, i: F.embedding(i, w, padding_idx=-2),
        _joined(_randn((4, 3)), _integers(9, high=4)),
    ),
    (
        "embedding of bounded norm",
        lambda w, i: F.embedding(i, w.clone(), max_norm=1.0),
        _joined(_randn((5, 3)), _integers(3, high=5)),
    ),
    ("embedding_bag of rows", lambda w, i: F.embedding_bag(i, w), _joined(_randn((5, 3)), _integers(2, 4, high=5))),
    ("embedding_bag, sums", *_bag(mode="sum")),
    ("embedding_bag, maxima", *_bag(mode="max")),
    ("embedding_bag, weighted", *_bag(_joined(_offsets, _randn((7,))), mode="sum", padding_idx=2)),
)

RECURRENT = _rows(
    # The inputs are x, the states, and the parameters; what a row leaves out is zero or absent.
    ("lstm", _recurrent("lstm", 2), _randn((3, 2, 4), *((1, 2, 3),) * 2, *((12, n) for n in (4, 3)), *((12,),) * 2)),
    ("gru", _recurrent("gru", 1), _randn((3, 2, 4), (1, 2, 3), (9, 4), (9, 3), (9,), (9,))),
    ("rnn_tanh", _recurrent("rnn_tanh", 1), _randn((3, 2, 4), (1, 2, 3), (3, 4), (3, 3), (3,), (3,))),
    ("rnn_relu without biases", _recurrent("rnn_relu", 1), _randn((3, 2, 4), (1, 2, 3), (3, 4), (3, 3))),
    (
        "lstm in both directions",
        _recurrent("lstm", 2, bidirectional=True, batch_first=True),
        _randn((2, 3, 4), (2, 2, 3), (2, 2, 3), *((12, 4), (12, 3)) * 2),
    ),
    ("lstm, packed", _packed("lstm", 2), _randn((6, 4), (1, 3, 3), (1, 3, 3), (12, 4), (12, 3), (12,), (12,))),
    ("gru, packed", _packed("gru", 1), _randn((6, 4), (1, 3, 3), (9, 4), (9, 3), (9,), (9,))),
    (
        "rnn_tanh, packed, in both directions",
        _packed("rnn_tanh", 1, bidirectional=True),
        _randn((6, 4), (2, 3, 3), *((3, 4), (3, 3)) * 2),
    ),
    (
        "lstm_cell",
        lambda x, h, c, *params: torch.lstm_cell(x, (h, c), *params),
        _randn((2, 4), (2, 3), (2, 3), (12, 4), (12, 3), (12,), (12,)),
    ),
    ("gru_cell", torch.gru_cell, _randn((2, 4), (2, 3), (9, 4), (9, 3), (9,), (9,))),
    ("rnn_tanh_cell", torch.rnn_tanh_cell, _randn((2, 4), (2, 3), (3, 4), (3, 3), (3,), (3,))),
)

ACTIVATION = _rows(
    ("prelu", F.prelu, _randn((2, 3, 4), (3,))),
    ("prelu of one slope", F.prelu, _randn((4,), (1,))),
)

RESAMPLING = _rows(
    ("nearest-exact images", lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), _randn((2, 3, 4, 6)))
)


def _assign(x: Tensor, index: Any, values: Tensor) -> Tensor:
    x = x.clone()
    x[index] = values
    return x


SHAPE = _rows(
    ("view after conv2d", lambda x, w: F.conv2d(x, w).view(-1), _randn((2, 3, 4, 4), (5, 3, 2, 2))),
    ("view after linear", lambda x, w: F.linear(x, w).view(6, -1), _randn((6, 4, 3), (5, 3))),
    ("select_scatter", lambda x, y: torch.select_scatter(x, y, -1, 1), _randn((4, 3), (4,))),
    ("index_put by a mask", lambda x, m, v: x.index_put((m > 0,), v.detach()), _randn((4, 3), (4,), ())),
    ("index_put by a mask, rows", lambda x, m, v: x.index_put((m > 0,), v.detach()), _randn((4, 3), (4,), (3,))),
    ("index_put_ behind a slice", lambda x, i, v: _assign(x, (..., i.argsort()), v), _randn((3, 3), (3,), (3, 3))),
    (
        "index_put_ around a slice",
        lambda x, i, v: _assign(x, (i.argsort(), slice(None), i.argsort()), v),
        _randn((3, 3, 3), (3,), (3, 3)),
    ),
    ("masked_fill", lambda x, m, v: x.masked_fill(m > 0, v), _randn((4, 3), (3,), ())),
    ("index_fill", lambda x, v: x.index_fill(-1, torch.arange(2, -1, -2), v), _randn((4, 3), ())),
    ("pinv", lambda x, tol: torch.linalg.pinv(x, atol=tol.detach().abs() / 100), _randn((4, 3), ())),
)


def _along_rows(x: Tensor, index: Tensor, like: Tensor) -> Tensor:
    return (index.argsort() // 2)[:, None, None].expand_as(like)


def _reduced(reduce: str, include: bool) -> Callable[..., Tensor]:
    return lambda x, i, v: torch.scatter_reduce(x, 0, _along_rows(x, i, v), v, reduce, include_self=include)


# Rows of all members in one table, which pays above some thousand numbers.
ROWS = _rows(
    ("index_add", lambda x, i, v: x.index_add(0, i.argsort() // 2, v, alpha=0.5), _randn((30, 40), (50,), (50, 40))),
    (
        "index_add along columns",
        lambda x, i, v: x.index_add(-1, i.argsort() // 2, v),
        _randn((40, 30), (50,), (40, 50)),
    ),
    (
        "index_add_",
        lambda x, i, v: (x * 2 + v.mean()).clone().index_add_(0, i.argsort() // 2, v),
        _randn((30, 40), (50,), (50, 40)),
    ),
    ("index_select", lambda x, i: x.index_select(1, i.argsort() // 2), _randn((6, 30, 10), (50,))),
    ("index by numbers", lambda x, i: x[i.argsort() // 2 - 9], _randn((40, 5, 10), (50,))),
    (
        "scatter_add of rows",
        lambda x, i, v: x.scatter_add(0, _along_rows(x, i, v), v),
        _randn((30, 4, 10), (50,), (50, 4, 10)),
    ),
    *(
        (f"scatter_reduce {reduce}", _reduced(reduce, include), _randn((30, 4, 10), (50,), (50, 4, 10)))
        for reduce, include in (("mean", False), ("amax", False), ("amin", True), ("sum", True))
    ),
)

FAMILIES: dict[str, list[RuleCase]] = {
    **{"rows": ROWS, "activation": ACTIVATION, "resampling": RESAMPLING, "shape": SHAPE, "linear": LINEAR},
    **{"conv": CONV, "norm": NORM, "pooling": POOLING, "loss": LOSS, "distance": DISTANCE, "attention": ATTENTION},
    **{"embedding": EMBEDDING, "recurrent": RECURRENT},
}
RULE_CASES = [case for family in FAMILIES.values() for case in family]

BATCH_AXES: dict[str, tuple[int | None, ...]] = {
    "linear": (0, None, None),
    "conv1d": (0, None, None),
    "conv2d": (0, None, None),
    "conv3d": (0, None, None),
    "conv_transpose2d grouped": (0, None, None),
    "batch_norm in training": (0, None, None, None, None),
    "batch_norm in evaluation": (0, None, None, None, None),
    "instance_norm": (0, None, None, None, None),
    "layer_norm": (0, None, None),
    "rms_norm": (0, None),
    "group_norm": (0, None, None),
    "max_pool2d": (0,),
    "cross_entropy": (0, 0),
    "cross_entropy with label smoothing": (0, 0),
    "cross_entropy of images": (0, 0),
    "attention": (0, 0, 0),
    "attention with a mask": (0, 0, 0, None),
    "attention with a mask per sample": (0, 0, 0, 0),
}
"""For some rows, the axis of each of a member's inputs that is the batch, or None."""
