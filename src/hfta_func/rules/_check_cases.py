"""Small calls in which every rule takes part, see :mod:`hfta_func.rules._check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func.rules._lowering import LOWERINGS


class Integers(NamedTuple):
    """An input of integers from ``low`` to ``high - 1``."""

    high: int
    shape: tuple[int, ...]
    low: int = 0


class Case(NamedTuple):
    """A function of one member's inputs; inputs other than :class:`Integers` are shapes of floating-point tensors."""

    name: str
    func: Callable[..., Any]
    inputs: tuple[Any, ...]
    shares: bool = True  # whether members can share its inputs
    inside: bool = True  # whether PyTorch can take its gradient inside vmap
    single: bool = False  # whether it computes in single precision
    lowerings: Mapping[str, str] = {}  # forced ones


def _case(func: Callable[..., Any], *inputs: Any, name: str = "", **options: Any) -> Case:
    return Case(name or func.__name__, func, inputs, **options)


def _convolutions() -> list[Case]:
    """Every lowering of a convolution."""
    shapes = (2, 2, 5, 5), (3, 2, 3, 3), (3,)
    plain: dict[str, Callable[..., Tensor]] = {
        "conv2d": lambda *a: F.conv2d(*a, padding=1),
        "conv_transpose2d": lambda x, w, b: F.conv_transpose2d(x, w.transpose(0, 1), b, stride=2),
    }
    return [
        *(Case(name, func, shapes) for name, func in plain.items()),
        *(
            Case(name, func, shapes, lowerings={"convolution" if lowering == "wide" else "conv": lowering})
            for name, func in plain.items()
            for lowering in LOWERINGS["convolution"]
        ),
        Case("conv2d", F.conv2d, ((2, 3, 4, 4), (5, 3, 1, 1)), lowerings={"conv": "sample_matmul"}),
        Case("conv1d", lambda *a: F.conv1d(*a, groups=2), ((2, 4, 7), (6, 2, 3), (6,))),
        Case("conv3d", F.conv3d, ((2, 2, 3, 3, 3), (3, 2, 2, 2, 2))),
    ]


def _batch_norm(norm: Callable[..., Tensor], training: bool) -> Callable[..., Any]:
    def func(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        # Running statistics are per member where x is.
        mean, var = mean.detach() + 0 * x.detach().sum(), var.detach().square() + 1 + 0 * x.detach().sum()
        return norm(x, mean, var, weight, bias, training, 0.3), mean, var

    return func


def _legit(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool, momentum: float
) -> Tensor:
    if training:
        return aten._native_batch_norm_legit(x, weight, bias, mean, var, True, momentum, 1e-3)[0]
    return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, 1e-3)[0]


def _recurrent(kind: str, states: int, *sizes: Tensor) -> Callable[..., Any]:
    def func(x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        hx, params = (args[0] if states == 1 else args[:states]), args[states:]
        options = (True, 1, 0.0, True, False, *(() if sizes else (False,)))
        return getattr(torch, kind)(x, *sizes, hx, params, *options)

    return func


def _recurrents() -> list[Case]:
    cases = []
    for kind, gates, states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):
        weights = (gates * 3, 4), (gates * 3, 3), (gates * 3,), (gates * 3,)
        packed = _recurrent(kind, states, torch.tensor([2, 1]))
        cases += [
            _case(_recurrent(kind, states), (3, 2, 4), *[(1, 2, 3)] * states, *weights, name=kind),
            _case(packed, (3, 4), *[(1, 2, 3)] * states, *weights, name=f"{kind} of packed sequences"),
        ]
        cell = getattr(torch, f"{kind}_cell")
        func = (lambda x, h, c, *a: torch.lstm_cell(x, (h, c), *a)) if kind == "lstm" else cell
        cases.append(_case(func, (2, 4), *[(2, 3)] * states, *weights, name=f"{kind}_cell"))
    return cases


def _sequences(x: Tensor) -> Tensor:
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1]))
    return torch.nn.utils.rnn.pad_packed_sequence(packed._replace(data=packed.data.sin()))[0]


def _bag(mode: str, **options: Any) -> Callable[..., Tensor]:
    return lambda table, i, *w: F.embedding_bag(
        i, table, torch.tensor([0, 2]), mode=mode, per_sample_weights=w[0] if w else None, **options
    )


def _normalisations() -> list[Case]:
    affine = (2, 4, 3), (4,), (4,), (4,), (4,)
    return [
        *(_case(_batch_norm(F.batch_norm, mode), *affine, name="batch_norm") for mode in (True, False)),
        _case(lambda x: F.batch_norm(x, None, None, training=True), (4, 3), name="batch_norm"),
        *(_case(_batch_norm(F.instance_norm, mode), *affine, name="instance_norm") for mode in (True, False)),
        _case(lambda x, *a: F.layer_norm(x, (5,), *a), (2, 5), (5,), (5,), name="layer_norm"),
        _case(lambda x, w: F.rms_norm(x, (5,), w), (2, 5), (5,), name="rms_norm"),
        _case(lambda x, *a: F.group_norm(x, 2, *a), (2, 4, 3), (4,), (4,), name="group_norm"),
        _case(torch.ops.aten._weight_norm.default, (4, 3), (4, 1), name="_weight_norm"),
        _case(lambda *a: aten._weight_norm_interface(*a)[0], (4, 3), (4, 1), name="_weight_norm_interface"),
        _case(lambda x, w: aten._fused_rms_norm(x, [5], w, 1e-3)[0], (2, 5), (5,), name="_fused_rms_norm"),
        _case(
            lambda *a: aten.native_group_norm(*a, 2, 4, 3, 2, 1e-3)[0], (2, 4, 3), (4,), (4,), name="native_group_norm"
        ),
        _case(_batch_norm(_legit, True), *affine, name="_native_batch_norm_legit"),
        _case(_batch_norm(_legit, False), *affine, name="_native_batch_norm_legit_no_training"),
        _case(lambda *a: aten._native_batch_norm_legit.no_stats(*a, True, 0.3, 1e-3)[0], *affine[:3], name="no_stats"),
    ]


def _pools() -> list[Case]:
    cases = []
    for axes, shape in ((2, (2, 3, 6, 6)), (3, (2, 4, 4, 4))):
        for kind in ("max", "avg", "adaptive_max", "adaptive_avg"):
            pool = getattr(F, f"{kind}_pool{axes}d")
            cases.append(_case(lambda x, pool=pool: pool(x, 2), shape, name=pool.__name__))
        largest, unpool = getattr(F, f"max_pool{axes}d"), getattr(F, f"max_unpool{axes}d")
        fractional, samples = getattr(F, f"fractional_max_pool{axes}d"), ((2, 3, 2) if axes == 2 else (1, 2, 3))
        cases += [
            _case(lambda x, p=largest, u=unpool: u(*p(x, 2, return_indices=True), 2), shape, name=unpool.__name__),
            _case(
                lambda x, s, f=fractional: f(x, 2, 2, _random_samples=s.detach().sigmoid()),
                *(shape, samples),
                name=f"fractional_max_pool{axes}d",
            ),
        ]
    return cases


def _losses() -> list[Case]:
    of_pairs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        **{loss.__name__: loss for loss in (F.kl_div, F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss)},
        "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, torch.ones(4, 3)),
        "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4)),
        "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.detach().sign()),
        "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, y.detach().sign()),
        "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y.detach().square()),
        "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, x.sin()),
    }
    classes, letters, ctc = Integers(3, (4,)), Integers(4, (2, 2), 1), cast(Any, F.ctc_loss)
    return [
        *(Case(name, func, ((4, 3), (4, 3))) for name, func in of_pairs.items()),
        _case(F.cross_entropy, (4, 3), classes),
        _case(lambda x, y: F.nll_loss(x, y, reduction="none"), (4, 3), classes, name="nll_loss"),
        _case(F.nll_loss, (2, 3, 2, 2), Integers(3, (2, 2, 2))),
        _case(F.multi_margin_loss, (4, 3), classes),
        _case(F.multilabel_margin_loss, (4, 3), Integers(3, (4, 3))),
        Case("ctc_loss", lambda x, y: ctc(x.log_softmax(-1), y, [5, 4], [2, 1]), ((5, 2, 4), letters), inside=False),
        Case(
            "ctc_loss",
            lambda x, y, lengths: ctc(x.log_softmax(-1), y, lengths, torch.tensor([2, 1])),
            ((5, 2, 4), letters, Integers(6, (2,), 4)),
        ),
    ]


aten: Any = torch.ops.aten
_QKV = (2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4)

CASES = [
    _case(F.prelu, (2, 3, 4), (3,), name="prelu"),
    _case(F.scaled_dot_product_attention, *_QKV),
    _case(F.scaled_dot_product_attention, *_QKV, (5, 6)),
    *_convolutions(),
    _case(torch.cdist, (4, 3), (5, 3)),
    _case(F.pdist, (5, 3)),
    _case(lambda w, i: F.embedding(i, w), (5, 3), Integers(5, (4,)), name="embedding"),
    _case(lambda w, i: F.embedding(i, w.clone(), max_norm=1.0), (5, 3), Integers(5, (4,)), name="embedding_renorm_"),
    *(_case(_bag(mode), (5, 3), Integers(5, (4,)), name="embedding_bag") for mode in ("sum", "mean", "max")),
    _case(lambda w, i: torch.embedding_bag(w, i, torch.tensor([0, 2]))[0], (5, 3), Integers(5, (4,)), name="embedding_bag"),
    _case(_bag("sum", padding_idx=1), (5, 3), Integers(5, (4,)), (4,), name="embedding_bag"),
    _case(lambda x, y: torch.select_scatter(x, y, 0, 1), (4, 3), (3,), name="select_scatter"),
    _case(lambda x, m, v: x.masked_fill(m > 0, v), (4, 3), (3,), (), name="masked_fill"),
    _case(lambda x, v: x.index_fill(-1, torch.tensor([2, 0]), v), (4, 3), (), name="index_fill"),
    _case(lambda x, m, v: x.index_put((m > 0,), v.detach()), (4, 3), (4,), (), name="index_put"),
    _case(lambda x, m, v: x.clone().index_put_((m > 0,), v.detach()), (4, 3), (4,), (), name="index_put_", shares=False),
    _case(lambda x, v: torch.linalg.pinv(x, atol=v.detach().abs() / 100), (4, 3), (), name="linalg_pinv"),
    _case(F.linear, (2, 4), (3, 4), (3,), name="linear"),
    _case(torch.mm, (4, 3), (3, 5)),
    _case(torch.addmm, (5,), (4, 3), (3, 5)),
    _case(
        lambda x, w: aten._grouped_mm(x.float(), w.float(), torch.tensor([2, 6], dtype=torch.int32)).double(),
        *((6, 4), (2, 4, 8)), name="grouped_mm", single=True,
    ),
    _case(F.bilinear, (4, 3), (4, 5), (2, 3, 5), (2,), name="bilinear"),
    *_losses(),
    *_normalisations(),
    _case(_sequences, (3, 2, 4), name="pack_padded_sequence", inside=False),
    *_pools(),
    *_recurrents(),
    _case(lambda x: (x.amax(0), x.amin(-1)), (3, 4), name="amax and amin"),
    *(
        Case("nearest-exact", lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), ((1, 2, *(3,) * axes),))
        for axes in (1, 2, 3)
    ),
    _case(lambda x: (x.view(-1), x.reshape(2, 6), x.flatten(), x.contiguous()), (4, 3), name="view"),
    _case(lambda x: torch.quantile(x, 0.3, 0), (5, 3), name="quantile"),
]  # fmt: skip
