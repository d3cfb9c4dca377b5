"""The releases of PyTorch that are supported, checked before any private name is looked up or replaced."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any
from unittest import mock

import torch

from hfta_func.errors import VersionWarning

OLDEST, NEWEST = (2, 9), (2, 15)
"""The oldest and the newest release of PyTorch that the tests have run on."""


def check_version(version: str) -> None:
    """Warn of a PyTorch ``version`` newer than the tested ones; one that is too old lacks a :func:`private` name."""
    if tuple(map(int, version.split(".")[:2])) > NEWEST:
        tested = f"hfta_func is tested with PyTorch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        how = "keep verify=True, by which members are compared with ordinary PyTorch"
        warnings.warn(f"{tested}, and this is PyTorch {version}: {how}", VersionWarning, stacklevel=2)


def private(module: str, name: str) -> Any:
    """A private name of PyTorch, such as ``private("torch", "Tensor._version")``.

    Raises:
        ImportError: if this release does not have it.
    """
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        supported = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
        why = f"hfta_func needs {module}.{name}, which PyTorch {torch.__version__} does not have"
    raise ImportError(f"{why}; pip install '{supported}', or a later release of hfta_func")


# ``replaced(holder, name, value)`` is a block in which an attribute has another value.
replaced: Any = mock.patch.object

check_version(torch.__version__)
