"""What every test runs under: no slow vmap fallback, one fixed seed, few threads, Ctrl-C as Python has it."""

import os
import signal

import pytest
import torch

# An operator that reaches the slow fallback of vmap raises an error instead.
torch._C._functorch._set_vmap_fallback_enabled(False)
# Several processes share the processors.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# Shells start what runs in the background with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """Threads do not pay at this size, and cost much where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
