"""The building blocks of optimizers, for optimizers outside of this package.

An optimizer is a state (a NamedTuple that begins with :data:`FIELDS`), the ranges of its hyperparameters
(:func:`restrict`), the hyperparameters themselves (:class:`Hyperparams`), and a rule for one parameter, which
:func:`leafwise` applies to all parameters. :func:`hfta_func.testing.assert_optimizer` tests the result.
"""

from hfta_func._types import recorded as recorded
from hfta_func.optim._base import Hyperparams as Hyperparams
from hfta_func.optim._base import Range as Range
from hfta_func.optim._base import restrict as restrict
from hfta_func.optim._leafwise import FIELDS as FIELDS
from hfta_func.optim._leafwise import decay_mean as decay_mean
from hfta_func.optim._leafwise import decay_square as decay_square
from hfta_func.optim._leafwise import leafwise as leafwise
