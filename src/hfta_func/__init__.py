"""Train many same-shaped PyTorch models as one array.

Data flow: ``stack_params`` -> ``make_train_step`` -> ``step`` -> ``unstack_params``.
"""

from hfta_func import callbacks as callbacks
from hfta_func import optim as optim
from hfta_func import plot as plot
from hfta_func import random as random
from hfta_func import rules as rules
from hfta_func import schedules as schedules
from hfta_func import testing as testing
from hfta_func._tree import concat as concat
from hfta_func._tree import num_models as num_models
from hfta_func._tree import take as take
from hfta_func._types import BatchError as BatchError
from hfta_func._types import CheckpointError as CheckpointError
from hfta_func._types import CompileWarning as CompileWarning
from hfta_func._types import HFTAError as HFTAError
from hfta_func._types import HyperparameterError as HyperparameterError
from hfta_func._types import LoopWarning as LoopWarning
from hfta_func._types import LossError as LossError
from hfta_func._types import NonFiniteError as NonFiniteError
from hfta_func._types import PerModel as PerModel
from hfta_func._types import RandomnessError as RandomnessError
from hfta_func._types import Schedule as Schedule
from hfta_func._types import Shared as Shared
from hfta_func._types import StackError as StackError
from hfta_func._types import StateError as StateError
from hfta_func._types import TraceError as TraceError
from hfta_func._types import VersionWarning as VersionWarning
from hfta_func._types import WorkerError as WorkerError
from hfta_func.callbacks import averaging as averaging
from hfta_func.callbacks import early_stopping as early_stopping
from hfta_func.callbacks import keep_best as keep_best
from hfta_func.callbacks import keep_checkpoints as keep_checkpoints
from hfta_func.callbacks import tensorboard as tensorboard
from hfta_func.calls.routing import routed as routed
from hfta_func.files.checkpoint import export_model as export_model
from hfta_func.files.checkpoint import import_models as import_models
from hfta_func.files.checkpoint import load as load
from hfta_func.files.checkpoint import read_metadata as read_metadata
from hfta_func.files.checkpoint import save as save
from hfta_func.models.adapters import Adapters as Adapters
from hfta_func.models.adapters import stack_adapters as stack_adapters
from hfta_func.models.functional import functional as functional
from hfta_func.models.stack import Stacked as Stacked
from hfta_func.models.stack import init_params as init_params
from hfta_func.models.stack import stack_params as stack_params
from hfta_func.models.stack import unstack_params as unstack_params
from hfta_func.optim import *  # noqa: F403 - every optimizer, and what wraps or precedes them
from hfta_func.rules.vmap import vmap as vmap
from hfta_func.run.background import BackgroundStep as BackgroundStep
from hfta_func.run.background import compile as compile
from hfta_func.run.compare import Comparison as Comparison
from hfta_func.run.compare import Difference as Difference
from hfta_func.run.compare import compare as compare
from hfta_func.run.data import ArrayLoader as ArrayLoader
from hfta_func.run.fit import Result as Result
from hfta_func.run.fit import fit as fit
from hfta_func.run.history import FailedStep as FailedStep
from hfta_func.run.history import History as History
from hfta_func.run.memory import is_out_of_memory as is_out_of_memory
from hfta_func.run.plan import Plan as Plan
from hfta_func.run.plan import max_models as max_models
from hfta_func.run.plan import plan as plan
from hfta_func.step import mixing as mixing
from hfta_func.step.allocator import keep_memory as keep_memory
from hfta_func.step.amp import LossScale as LossScale
from hfta_func.step.average import average as average
from hfta_func.step.ensemble import Ensemble as Ensemble
from hfta_func.step.evaluate import EvalStep as EvalStep
from hfta_func.step.evaluate import make_eval_step as make_eval_step
from hfta_func.step.exchange import from_torch as from_torch
from hfta_func.step.exchange import to_torch as to_torch
from hfta_func.step.failures import Failure as Failure
from hfta_func.step.joint import JointStep as JointStep
from hfta_func.step.joint import joint as joint
from hfta_func.step.prediction import Prediction as Prediction
from hfta_func.step.prediction import predict as predict
from hfta_func.step.state import TrainState as TrainState
from hfta_func.step.state import stacked as stacked
from hfta_func.step.train import TrainStep as TrainStep
from hfta_func.step.train import make_train_step as make_train_step
from hfta_func.workers.executor import Executor as Executor
from hfta_func.workers.local import WorkerPool as WorkerPool

__version__ = "0.1.0"
