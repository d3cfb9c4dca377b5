"""Functional optimizers over stacked parameters, one value per member for every scalar.

Public: :func:`sgd`, :func:`adam`, :func:`adamw`, :func:`chain`, :func:`clip_grad_norm`,
:class:`GradientTransformation`, :func:`apply_updates`, :func:`with_hyperparams`.
"""

from hfta_func.optim._base import GradientTransformation, apply_updates, with_hyperparams
from hfta_func.optim.adam import AdamState, adam, adamw
from hfta_func.optim.sgd import SGDState, sgd
from hfta_func.optim.transforms import ClipState, chain, clip_grad_norm

__all__ = [
    "AdamState",
    "ClipState",
    "GradientTransformation",
    "SGDState",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_grad_norm",
    "sgd",
    "with_hyperparams",
]
