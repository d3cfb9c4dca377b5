"""A GPU measured within a budget of seconds: tests, then whole steps, updates, lowerings, memory and how idle the card is.

Every row is written as soon as it is known. What has a row already, in the committed results or in ``--out``, is not measured
again unless the code has changed since; so the next budget goes on where the last one ended. What was never measured comes
first. Each stage has a share of the budget, and what a stage leaves goes to the next ones.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.clock import Clock

NEEDED = ("torch", "optree", "safetensors", "tqdm", "cloudpickle", "numpy", "pytest", "xdist", "expecttest", "sklearn")
"""What has to be there, as packages are imported."""
SHARES = {"tests": 0.3, "cells": 0.75, "updates": 0.83, "lowerings": 0.88, "busy": 0.93, "rl": 0.97, "largest": 1.0}
"""Stages, the most wanted first, and the share of the budget after which the next one begins."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the budget holds, print it, and say whether nothing failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="when to stop; 540 by default")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("out/gpu"), help="where rows are written, out/gpu by default"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu rehearses the command")
    parser.add_argument("--stages", nargs="+", choices=[*SHARES], default=[*SHARES], help="all by default")
    parser.add_argument("--hfta-source", type=Path, metavar="DIR", help="a checkout of the original HFTA, as a peer")
    parser.add_argument("--commit", metavar="SHA", help="the commit that rows name where there is no git")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--plan", action="store_true", help="measure nothing; estimate what fits into the budget")
    parser.add_argument("--add", type=Path, metavar="FILE", help="measure nothing; add FILE to the committed results")
    args = parser.parse_args(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"not installed here: {', '.join(missing)}; python -m benchmarks carry packs what a machine lacks")
    if args.hfta_source and not (args.hfta_source / "hfta" / "ops").is_dir():
        parser.error(f"--hfta-source: {args.hfta_source} has no folder hfta/ops")
    if args.budget <= 0:
        parser.error(f"--budget: {args.budget:g} s are no time")
    if args.device == "cuda" and not (args.plan or args.add) and (reason := why_no_cuda()):
        parser.error(f"--device cuda: {reason}")
    # It imports what may be missing.
    stages = importlib.import_module("benchmarks.gpu.stages")
    if args.add:
        return stages.add(args.add)
    return stages.plan(args) if args.plan else stages.run(args, Clock(args.budget - (time.monotonic() - began)))


def why_no_cuda() -> str | None:
    """Why PyTorch cannot use a GPU here, such as a driver that is too old; None if it can."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if not torch.backends.cuda.is_built():
        return f"PyTorch {torch.__version__} was built without CUDA"
    words = [str(warning.message).splitlines()[0] for warning in said]
    return words[0] if words else "PyTorch finds no CUDA device"
