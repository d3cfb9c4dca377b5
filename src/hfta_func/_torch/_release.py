"""The releases of PyTorch that are supported, checked before any private name is looked up or replaced."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hfta_func.errors import VersionWarning

OLDEST, NEWEST = (2, 9), (2, 15)
"""The oldest and the newest release of PyTorch that the tests have run on."""


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def tested() -> str:
    """The releases that the tests have run on, in words."""
    return f"PyTorch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def cure() -> str:
    """What to do about a release that does not work."""
    supported = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    return f"pip install '{supported}', or a later release of hfta_func"


def check_version(version: str) -> None:
    """Refuse a PyTorch ``version`` that is too old, and warn of one that is newer than the tested ones.

    Raises:
        ImportError: if it is too old.
    """
    if _release(version) < OLDEST:
        raise ImportError(f"hfta_func does not support PyTorch {version}; {cure()}")
    if _release(version) > NEWEST:
        warnings.warn(
            f"hfta_func is tested with {tested()}, and this is PyTorch {version}: keep verify=True, by which members are "
            f"compared with ordinary PyTorch",
            VersionWarning,
            stacklevel=2,
        )


def private(module: str, name: str) -> Any:
    """A private name of PyTorch, such as ``private("torch", "Tensor._version")``.

    Raises:
        ImportError: if this release does not have it.
    """
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        message = f"hfta_func needs {module}.{name}, which PyTorch {torch.__version__} does not have; {cure()}"
    raise ImportError(message)


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """A block in which an attribute has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


check_version(torch.__version__)
