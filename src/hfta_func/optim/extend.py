"""What an optimizer is made of, for optimizers in files of one's own.

An optimizer is a state (a NamedTuple that begins with :data:`FIELDS`), the ranges of its hyperparameters
(:func:`restrict`), its hyperparameters (:class:`Knobs`), and a rule for one parameter, which :func:`leafwise` applies to all.
:func:`hfta_func.testing.assert_optimizer` tests the result.
"""

from hfta_func._types import recorded as recorded
from hfta_func.optim._base import Knobs as Knobs
from hfta_func.optim._base import Range as Range
from hfta_func.optim._base import restrict as restrict
from hfta_func.optim._leafwise import FIELDS as FIELDS
from hfta_func.optim._leafwise import decay_mean as decay_mean
from hfta_func.optim._leafwise import decay_square as decay_square
from hfta_func.optim._leafwise import leafwise as leafwise
