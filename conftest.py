"""What the examples in docstrings take for granted: torch, and the public names of the package."""

import pytest
import torch

import hfta_func as hfta


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace.update({name: getattr(hfta, name) for name in hfta.__all__}, torch=torch, hfta=hfta)
