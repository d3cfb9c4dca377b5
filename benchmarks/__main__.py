"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

OWN = (
    *("sweep", "predict", "report", "reach", "background", "tune", "batches", "ensembles", "adapters", "executors"),
    *("compiling", "memory", "gpu", "carry", "sizes", "profiles", "signals", "rl", "generated", "readme", "families"),
    *("lbfgs", "jobs", "curve", "all", "es", "recurrent"),
)
MEASURED = ("ops", "optim", "lowerings")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether array and serial loop agreed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in OWN:
        # They have command lines of their own.
        return importlib.import_module(f"benchmarks.{'everything' if argv[0] == 'all' else argv[0]}").main(argv[1:])
    # What needs nothing but Python has been done.
    import torch

    from benchmarks._code import stamp

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Ratios measured side by side. Also: {', '.join(OWN)}, which have a --help of their own.",
    )
    parser.add_argument("what", choices=MEASURED)
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave compiled rows out")
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    parser.add_argument("--device", default="cpu", help="of the operators: cpu or cuda")
    parser.add_argument("--filter", default="", help="only operators or workloads whose name holds this")
    parser.add_argument("--samples", type=int, default=1, help="of lowerings: times as many samples, of convolutions")
    parser.add_argument("--verbose", action="store_true", help="print each operator as it is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    if args.threads:
        torch.set_num_threads(args.threads)
    about = stamp()
    print("{cpu}, {cores} cores, torch {torch}, {threads} threads, {date}".format(**about), flush=True)
    module = importlib.import_module(f"benchmarks.{args.what}")
    found = module.measure(args)
    print(f"\n{module.show(found)}", flush=True)
    if args.json:
        settings = {"quick": args.quick, "compile": args.compile}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "settings": settings, args.what: found}, indent=2) + "\n")
    return 0 if all(result.get("agrees", True) for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
