"""The command line: ``hfta-func tune`` and ``cache``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from hfta_func._types import text_table
from hfta_func.run import kept
from hfta_func.tune import schedulers
from hfta_func.tune.callbacks import tensorboard
from hfta_func.tune.run import run
from hfta_func.tune.study import Study

SCHEDULERS = "halving", "hyperband", "asynchronous-halving", "median-stopping", "population-based"
_ROWS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the status: 0, 1 after an error, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        print(args.command(args))
        return 0
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        print(f"hfta-func: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    text = "Train many models of the same architecture as one array."
    parser = argparse.ArgumentParser(prog="hfta-func", description=text)
    commands = parser.add_subparsers(required=True, metavar="command")
    text = "Search the space of a file; the same command goes on with what is missing."
    tune = commands.add_parser("tune", help=text, description=text)
    cache = commands.add_parser("cache", help="Show the compiled graphs that are kept on disk.")
    tune.set_defaults(command=_tune)
    cache.set_defaults(command=_cache)
    cache.add_argument("--clear", action="store_true")
    add = tune.add_argument
    add("file", help="Python file with build, space, metric and, if need be, further arguments of tune.run")
    add("--trials", type=int, help="number of configurations; 0 is the scheduler's default")
    add("--epochs", type=int, help="epochs of a trial that is not stopped")
    add("--scheduler", choices=SCHEDULERS, help="which trials go on")
    add("--workers", type=_models, help="processes that train an array each, or auto")
    add("--max-models", type=_models, help="the largest array, or auto")
    add("--seeds", type=int, help="number of members of every trial")
    add("--seed", type=int, help="the first seed")
    add("--timeout", type=float, help="seconds after which the study ends")
    add("--storage", help="Optuna's storage, such as sqlite:///study.db")
    add("--folder", help="the study's folder (default: <file>.study)")
    add("--tensorboard", action="store_true", help="write a run per trial to the folder's tensorboard, for TensorBoard")
    return parser


def _models(text: str) -> Any:
    return text if text == "auto" else int(text)


def _tune(args: argparse.Namespace) -> str:
    if not os.path.isfile(args.file):
        raise ValueError(f"there is no file {args.file}; pass a file of Python that defines build, space and metric")
    # As for a script, files beside it can be imported, and so can the file itself.
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.file)))
    name = pathlib.Path(args.file).stem
    module = vars(importlib.import_module(name))
    known = set(inspect.signature(run).parameters) - {"progress", "callbacks", "resume", "executor"}
    options = {name: module[name] for name in known if name in module}
    options |= {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
    if args.scheduler is not None:
        options["scheduler"] = getattr(schedulers, args.scheduler.replace("-", "_"))()
    if missing := [one for one in ("build", "space", "metric", "trials", "epochs") if one not in options]:
        raise ValueError(f"{args.file} does not define {missing[0]}; define it there, as tune.run takes it")
    if "storage" in options:
        options.setdefault("name", name)
    folder = args.folder or f"{pathlib.Path(args.file).with_suffix('')}.study"
    callbacks = [tensorboard(os.path.join(folder, "tensorboard"))] if args.tensorboard else []
    study = run(**options, resume=folder, callbacks=callbacks)
    if study.interrupted:
        print(_summary(study))
        print(f"interrupted; the same command goes on from {folder}", file=sys.stderr)
        raise KeyboardInterrupt
    return _summary(study)


def _summary(study: Study) -> str:
    """The best trials, those that have reached more rungs first, and the first one that failed."""
    ranked = [trial for trial in study.trials if trial.values and trial.status != "failed"]
    ranked.sort(key=lambda trial: (-len(trial.values), -study.score(trial.values[-1][0])))
    rows = [{name: value for name, value in study.rows()[one.number].items() if name != "seconds"} for one in ranked]
    shown = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    lines = [f"{len(study.trials)} trials"]
    lines += [text_table([[*rows[0]], *shown[:_ROWS]], ">" * len(rows[0]))] if rows else []
    failed = [trial for trial in study.trials if trial.status == "failed"]
    return "\n".join(lines + [f"{len(failed)} failed, the first with {trial.error}" for trial in failed[:1]])


def _cache(args: argparse.Namespace) -> str:
    graphs = kept.kept()
    for name, _, _ in graphs if args.clear else ():
        kept.drop(name)
    table = text_table([(name, f"{size / 2**20:.1f} MiB", time.ctime(used)) for name, size, used in graphs], "<><")
    sums = f"{len(graphs)} graphs{' removed' * args.clear}, at most {kept.MOST_BYTES >> 20:,} MiB in {kept.folder()}"
    return f"{table}\n{sums}"


if __name__ == "__main__":
    sys.exit(main())
