"""What every test runs under: no slow vmap fallback, one fixed seed, few threads."""

import pytest
import torch

# An operator that reaches the slow fallback of vmap raises an error instead.
torch._C._functorch._set_vmap_fallback_enabled(False)
torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
