"""One step of an array: training and evaluation."""

from hfta_func._types import Shared as Shared
from hfta_func.step.allocator import keep_memory as keep_memory
from hfta_func.step.commit import Failure as Failure
from hfta_func.step.evaluate import EvalStep as EvalStep
from hfta_func.step.indexed import by_index as by_index
from hfta_func.step.joint import JointStep as JointStep
from hfta_func.step.options import LossScale as LossScale
from hfta_func.step.prediction import Prediction as Prediction
from hfta_func.step.state import Carried as Carried
from hfta_func.step.state import TrainState as TrainState
from hfta_func.step.state import average as average
from hfta_func.step.state import mixing as mixing
from hfta_func.step.state import restart as restart
from hfta_func.step.state import stacked as stacked
from hfta_func.step.train import TrainStep as TrainStep
