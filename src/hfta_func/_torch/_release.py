"""The releases of PyTorch that are supported, checked before any private name is looked up."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 9), (2, 13)
"""The oldest and the newest release of PyTorch that the tests run on."""


def check_version(version: str) -> None:
    """Raise an ImportError unless PyTorch ``version`` is supported."""
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        supported = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
        raise ImportError(
            f"hfta_func does not support PyTorch {version}; pip install '{supported}', or a later release of hfta_func"
        )


# This file comes first, so that a release without one of the names is refused by this message.
check_version(torch.__version__)
