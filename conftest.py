"""What the examples in docstrings take for granted: torch, and the public names of the package and its rooms."""

import types

import pytest
import torch

import hfta_func as hfta

# It configures Sphinx and has no examples.
collect_ignore = ["docs/conf.py"]

LONG_PAGES = {"compile.md", "extend.md", "memory.md", "profile.md", "sizes.md", "studies.md"}
"""Pages whose examples take seconds; `make test-more` runs them."""


def pytest_collection_modifyitems(items):
    """Mark the long pages."""
    for item in items:
        if item.name in LONG_PAGES:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    rooms = hfta.callbacks, hfta.files, hfta.models, hfta.run, hfta.step, hfta.workers, hfta
    named = [item for room in rooms for item in vars(room).items() if not isinstance(item[1], types.ModuleType)]
    public = {name: value for name, value in named if not name.startswith("_")}
    modules = {name: getattr(hfta, name) for name in ("callbacks", "optim", "random", "rules", "schedules")}
    doctest_namespace.update(modules | public, torch=torch, hfta=hfta, mixing=hfta.step.mixing)
