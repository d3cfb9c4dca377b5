"""Checks that users run: members train as alone, and extensions keep their contracts.

Each ``assert_...`` of an extension is a suite of laws; it raises an AssertionError that names the first law that is broken,
the input it is broken by, and both values.
"""

from hfta_func.testing._callback import assert_callback as assert_callback
from hfta_func.testing._optimizer import assert_optimizer as assert_optimizer
from hfta_func.testing._rule import assert_rule as assert_rule
from hfta_func.testing._scheduler import assert_scheduler as assert_scheduler
from hfta_func.testing._solo import assert_matches_solo as assert_matches_solo
