"""Train many same-shaped PyTorch models as one array.

Data flow: ``stack_params`` -> ``make_train_step`` -> ``step`` -> ``unstack_params``.
"""

from hfta_func import callbacks as callbacks
from hfta_func import calls as calls
from hfta_func import errors as errors
from hfta_func import files as files
from hfta_func import integrations as integrations
from hfta_func import models as models
from hfta_func import optim as optim
from hfta_func import plot as plot
from hfta_func import random as random
from hfta_func import rules as rules
from hfta_func import run as run
from hfta_func import schedules as schedules
from hfta_func import step as step
from hfta_func import testing as testing
from hfta_func import workers as workers
from hfta_func._tree import concat as concat
from hfta_func._tree import num_models as num_models
from hfta_func._tree import take as take
from hfta_func.errors import HFTAError as HFTAError
from hfta_func.files.checkpoint import export_model as export_model
from hfta_func.files.checkpoint import load as load
from hfta_func.files.checkpoint import save as save
from hfta_func.models.functional import functional as functional
from hfta_func.models.padding import padded as padded
from hfta_func.models.stack import init_params as init_params
from hfta_func.models.stack import stack_params as stack_params
from hfta_func.models.stack import unstack_params as unstack_params
from hfta_func.optim import *  # noqa: F403 - every optimizer, and what wraps or precedes them
from hfta_func.rules.vmap import vmap as vmap
from hfta_func.run.background import compile as compile
from hfta_func.run.compare import compare as compare
from hfta_func.run.data import ArrayLoader as ArrayLoader
from hfta_func.run.dataset import DatasetLoader as DatasetLoader
from hfta_func.run.experiment import Experiment as Experiment
from hfta_func.run.experiment import grid as grid
from hfta_func.run.fit import fit as fit
from hfta_func.run.plan import plan as plan
from hfta_func.run.profile import profile as profile
from hfta_func.step.ensemble import Ensemble as Ensemble
from hfta_func.step.evaluate import make_eval_step as make_eval_step
from hfta_func.step.exchange import from_torch as from_torch
from hfta_func.step.exchange import to_torch as to_torch
from hfta_func.step.joint import joint as joint
from hfta_func.step.prediction import predict as predict
from hfta_func.step.train import make_train_step as make_train_step

__version__ = "0.1.0"
