"""What the examples in docstrings take for granted: torch, and the public names of the package."""

import pytest
import torch

import hfta_func as hfta

# It configures Sphinx and has no examples.
collect_ignore = ["docs/conf.py"]


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    public = {name: value for name, value in vars(hfta).items() if not name.startswith("_")}
    doctest_namespace.update(public, torch=torch, hfta=hfta)
