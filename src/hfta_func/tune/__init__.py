"""Studies: hyperparameter search whose trials train as arrays.

``run`` searches a space of Optuna's with trials that are members of arrays; ``population`` is the machinery under it, for
searches of your own. Needs Optuna: ``pip install 'hfta_func[tune]'``.
"""

from hfta_func.tune.array import Array as Array
from hfta_func.tune.cohorts import Cohort as Cohort
from hfta_func.tune.cohorts import Copy as Copy
from hfta_func.tune.cohorts import Scheduler as Scheduler
from hfta_func.tune.cohorts import Verdict as Verdict
from hfta_func.tune.groups import Member as Member
from hfta_func.tune.population import Population as Population
from hfta_func.tune.run import run as run
from hfta_func.tune.schedulers import asynchronous_halving as asynchronous_halving
from hfta_func.tune.schedulers import halving as halving
from hfta_func.tune.schedulers import hyperband as hyperband
from hfta_func.tune.schedulers import median_stopping as median_stopping
from hfta_func.tune.schedulers import population_based as population_based
from hfta_func.tune.study import Study as Study
from hfta_func.tune.study import Trial as Trial
from hfta_func.tune.study import tensorboard as tensorboard

population = Population
