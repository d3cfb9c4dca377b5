"""Train many same-shaped PyTorch models as one array.

The way of the data: ``stack_params`` -> ``make_train_step`` -> ``step`` -> ``unstack_params``.
"""

from hfta_func import optim, random, rules, schedules
from hfta_func._errors import (
    BatchError,
    HFTAError,
    HyperparameterError,
    LossError,
    RandomnessError,
    StackError,
    StateError,
    TraceError,
)
from hfta_func._routing import routed
from hfta_func._tree import concat, num_models, take
from hfta_func._types import PerModel, Schedule
from hfta_func.allocator import keep_memory
from hfta_func.data import ArrayLoader
from hfta_func.fit import History, Result, fit
from hfta_func.functional import functional
from hfta_func.optim import (
    GradientTransformation,
    accumulate,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_grad_norm,
    clip_grad_value,
    ema,
    lamb,
    lion,
    muon,
    nadam,
    partition,
    radam,
    rmsprop,
    sgd,
    with_hyperparams,
)
from hfta_func.stack import Stacked, init_params, stack_params, unstack_params
from hfta_func.train import EvalStep, TrainState, TrainStep, make_eval_step, make_train_step
from hfta_func.transforms import vmap

__version__ = "0.1.0"

__all__ = [
    "ArrayLoader",
    "BatchError",
    "EvalStep",
    "GradientTransformation",
    "HFTAError",
    "History",
    "HyperparameterError",
    "LossError",
    "PerModel",
    "RandomnessError",
    "Result",
    "Schedule",
    "StackError",
    "Stacked",
    "StateError",
    "TraceError",
    "TrainState",
    "TrainStep",
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
    "concat",
    "ema",
    "fit",
    "functional",
    "init_params",
    "keep_memory",
    "lamb",
    "lion",
    "make_eval_step",
    "make_train_step",
    "muon",
    "nadam",
    "num_models",
    "optim",
    "partition",
    "radam",
    "random",
    "rmsprop",
    "routed",
    "rules",
    "schedules",
    "sgd",
    "stack_params",
    "take",
    "unstack_params",
    "vmap",
    "with_hyperparams",
]
