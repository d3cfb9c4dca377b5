"""Checks for users: members train as they would alone, and extensions keep their contracts.

Each ``assert_...`` for an extension is a law-suite: it raises an AssertionError that names the first broken law, the input
that breaks it, and both values.
"""

from hfta_func.testing._optimizer import assert_optimizer as assert_optimizer
from hfta_func.testing._rule import assert_rule as assert_rule
from hfta_func.testing._runs import assert_callback as assert_callback
from hfta_func.testing._runs import assert_executor as assert_executor
from hfta_func.testing._runs import assert_matches_solo as assert_matches_solo
from hfta_func.testing._runs import assert_scheduler as assert_scheduler
