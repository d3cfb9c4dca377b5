"""Training runs: data, the loop, its history, and the number of models to train at once."""

from hfta_func.run.background import BackgroundStep as BackgroundStep
from hfta_func.run.compare import Comparison as Comparison
from hfta_func.run.compare import Difference as Difference
from hfta_func.run.fit import Result as Result
from hfta_func.run.history import FailedStep as FailedStep
from hfta_func.run.history import History as History
from hfta_func.run.memory import is_out_of_memory as is_out_of_memory
from hfta_func.run.plan import Plan as Plan
from hfta_func.run.plan import max_models as max_models
from hfta_func.run.profile import Profile as Profile
