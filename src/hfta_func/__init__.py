"""Train many same-shaped PyTorch models as one array.

The way of the data: ``stack_params`` -> ``make_train_step`` -> ``step`` -> ``unstack_params``.
"""

from hfta_func import callbacks, optim, random, rules, schedules
from hfta_func._errors import (
    BatchError,
    CheckpointError,
    HFTAError,
    HyperparameterError,
    LossError,
    NonFiniteError,
    RandomnessError,
    StackError,
    StateError,
    TraceError,
)
from hfta_func._routing import routed
from hfta_func._tree import concat, num_models, take
from hfta_func._types import PerModel, Schedule
from hfta_func.allocator import keep_memory
from hfta_func.amp import LossScale
from hfta_func.callbacks import early_stopping, keep_best, keep_checkpoints, tensorboard
from hfta_func.checkpoint import export_model, import_models, load, read_metadata, save
from hfta_func.data import ArrayLoader
from hfta_func.evaluate import EvalStep, make_eval_step
from hfta_func.failures import Failure
from hfta_func.fit import Result, fit
from hfta_func.functional import functional
from hfta_func.history import FailedStep, History
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
    update_,
    with_hyperparams,
)
from hfta_func.plan import Plan, max_models, plan
from hfta_func.stack import Stacked, init_params, stack_params, unstack_params
from hfta_func.train import TrainState, TrainStep, make_train_step
from hfta_func.transforms import vmap

__version__ = "0.1.0"

__all__ = [
    "ArrayLoader",
    "BatchError",
    "CheckpointError",
    "EvalStep",
    "FailedStep",
    "Failure",
    "GradientTransformation",
    "HFTAError",
    "History",
    "HyperparameterError",
    "LossError",
    "LossScale",
    "NonFiniteError",
    "PerModel",
    "Plan",
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
    "callbacks",
    "chain",
    "clip_grad_norm",
    "clip_grad_value",
    "concat",
    "early_stopping",
    "ema",
    "export_model",
    "fit",
    "functional",
    "import_models",
    "init_params",
    "keep_best",
    "keep_checkpoints",
    "keep_memory",
    "lamb",
    "lion",
    "load",
    "make_eval_step",
    "make_train_step",
    "max_models",
    "muon",
    "nadam",
    "num_models",
    "optim",
    "partition",
    "plan",
    "radam",
    "random",
    "read_metadata",
    "rmsprop",
    "routed",
    "rules",
    "save",
    "schedules",
    "sgd",
    "stack_params",
    "take",
    "tensorboard",
    "unstack_params",
    "update_",
    "vmap",
    "with_hyperparams",
]
