"""Functional optimizers over stacked parameters, one value per member for every scalar.

Public: the optimizers :func:`sgd`, :func:`adam`, :func:`adamw`, :func:`nadam`, :func:`radam`, :func:`adamax`,
:func:`adadelta`, :func:`adagrad`, :func:`rmsprop`, :func:`lion`, :func:`lamb`, :func:`muon`; their states;
:func:`chain`, :func:`clip_grad_norm`, :func:`clip_grad_value`, :func:`add_decayed_weights`, :func:`accumulate`, :func:`ema`,
:func:`partition`; :class:`GradientTransformation`, :func:`apply_updates`, :func:`update_`, :func:`with_hyperparams`.
"""

from hfta_func.optim._base import GradientTransformation, apply_updates, update_, with_hyperparams
from hfta_func.optim.adadelta import AdadeltaState, adadelta
from hfta_func.optim.adagrad import AdagradState, adagrad
from hfta_func.optim.adam import AdamState, adam, adamw
from hfta_func.optim.adamax import AdamaxState, adamax
from hfta_func.optim.lamb import LambState, lamb
from hfta_func.optim.lion import LionState, lion
from hfta_func.optim.muon import MuonState, muon
from hfta_func.optim.nadam import NAdamState, nadam
from hfta_func.optim.radam import RAdamState, radam
from hfta_func.optim.rmsprop import RMSpropState, rmsprop
from hfta_func.optim.sgd import SGDState, sgd
from hfta_func.optim.transforms import KnobState, add_decayed_weights, chain, clip_grad_norm, clip_grad_value
from hfta_func.optim.wrappers import AccumulateState, EmaState, PartitionState, accumulate, ema, partition

__all__ = [
    "AccumulateState",
    "AdadeltaState",
    "AdagradState",
    "AdamState",
    "AdamaxState",
    "EmaState",
    "GradientTransformation",
    "KnobState",
    "LambState",
    "LionState",
    "MuonState",
    "NAdamState",
    "PartitionState",
    "RAdamState",
    "RMSpropState",
    "SGDState",
    "accumulate",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_grad_norm",
    "clip_grad_value",
    "ema",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "partition",
    "radam",
    "rmsprop",
    "sgd",
    "update_",
    "with_hyperparams",
]
