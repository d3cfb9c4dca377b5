"""The process that measures updates and lowerings; a fault of the device ends it, and no row but the one under way."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import Namespace
from typing import Any

import torch

import hfta_func as hfta
from benchmarks import lowerings, optim
from benchmarks._child import serve


class Desk:
    """What it answers."""

    def __init__(self, device: str, quick: bool):
        self._args = Namespace(device=device, quick=quick, compile=False, verbose=False)

    def update(self, title: str) -> dict[str, Any]:
        """An optimizer's update in every way."""
        with torch.device(self._args.device):
            return optim.one(title, self._args)

    def lowering(self, name: str) -> dict[str, Any]:
        """Every lowering of an operator."""
        return lowerings.one(lowerings.rows()[name], self._args)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    hfta.step.keep_memory()
    serve(Desk(*json.loads(sys.argv[1])))
