"""What every test runs under: no slow vmap fallback, one fixed seed, few threads, Ctrl-C as Python has it."""

import collections
import gc
import os
import re
import signal

import pytest
import torch

# A program that needs a package of its own.
collect_ignore = ["data/rliable_scores.py"]

# An operator that reaches the slow fallback of vmap raises an error instead.
torch._C._functorch._set_vmap_fallback_enabled(False)
# Bits are compared, so lowerings are the table's; tests of measured ones turn this on.
os.environ["HFTA_FUNC_MEASURE"] = "0"
# Several processes share the processors.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# Shells start what runs in the background with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart():
    """What a module draws when it is imported is the same in every run, too."""
    torch.manual_seed(0)


def covers(mark, item):
    """Whether a marker applies to this case of a test; ours do where the id matches ``ids`` and not ``unless``."""
    if mark.name not in ("exhaustive", "soak"):
        return True
    case = item.callspec.id if hasattr(item, "callspec") else ""
    ids, unless = mark.kwargs.get("ids", ""), mark.kwargs.get("unless")
    return bool(re.search(ids, case)) and not (unless and re.search(unless, case))


def pytest_collection_finish():
    """The thousands of tests are never garbage: looking through them would cost seconds in every process."""
    gc.freeze()


EVERY = 32
"""Of a table of exhaustive cases `make test-more` runs one in so many; the others are soak."""


def pytest_collection_modifyitems(items):
    """Take markers from the cases that they do not cover, and choose from tables of alike cases."""
    quick, exhaustive = collections.Counter(), collections.defaultdict(list)
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if covers(mark, item)]
        name = item.nodeid.partition("[")[0]
        # The longest are exhaustive, too.
        if item.get_closest_marker("soak") and not item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.exhaustive)
        if not item.get_closest_marker("exhaustive") and (sampled := item.get_closest_marker("sampled")):
            if quick[name] % sampled.kwargs["every"]:
                item.add_marker(pytest.mark.exhaustive)
            quick[name] += 1
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("soak"):
            exhaustive[name].append(item)
    for table in exhaustive.values():
        for i, item in enumerate(table):
            if i % EVERY:
                item.add_marker(pytest.mark.soak)


@pytest.fixture
def small_heap():
    """Collecting garbage is quick, also in a process in which a compiler has left millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_ctrl_c():
    """Ray Tune leaves a handler of its own behind, which would take the next test's Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_thread():
    """Threads do not pay at this size, and cost much where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def set_threads():
    """Sets how many threads PyTorch has, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def double():
    """torch.optim keeps some of its numbers in the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
