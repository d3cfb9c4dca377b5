"""The command line: ``hfta-func tune``, ``status``, ``plan``, ``explain``, ``profile``, ``cache`` and ``doctor``."""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import hfta_func as hfta
from hfta_func._kernels import native
from hfta_func._types import require, text_table
from hfta_func.errors import CheckpointError
from hfta_func.run import kept
from hfta_func.tune import schedulers
from hfta_func.tune.callbacks import tensorboard
from hfta_func.tune.folder import StudyFolder
from hfta_func.tune.population import Population
from hfta_func.tune.run import run
from hfta_func.tune.sampling import STATES, SamplerSession
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

    def command(name: str, func: Any, text: str, file: str = "") -> Callable[..., Any]:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=func)
        if file:
            made.add_argument("file", help=file)
        return made.add_argument

    of_study = "Python file with build, space, metric and, if need be, further arguments of tune.run"
    text = "Search the space of a file; the same command goes on with what is missing."
    add = command("tune", _tune, text, of_study)
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
    command("status", _status, "Show the trials of a study, from its folder.")(
        "folder", help="the folder, <file>.study"
    )
    add = command("plan", _plan, "Measure how many models of a file's study fit into an array.", of_study)
    add("--limit", type=int, default=64, help="the largest number of models considered (default: 64)")
    add("--sizes", type=int, nargs="+", default=[1, 4, 16], help="numbers of models to measure (default: 1 4 16)")
    models: Any = dict(type=int, default=4, help="number of members of the array (default: 4)")
    text = "Show how each operator of a file's step runs, and why."
    command("explain", lambda args: hfta.rules.explain(*_array(args, args.models)), text, of_study)(
        "--models", **models
    )
    text = "Show where the time of a file's step goes."
    add = command("profile", lambda args: hfta.profile(*_array(args, args.models), trace=args.trace), text, of_study)
    add("--models", **models)
    add("--trace", help="also write a trace for Perfetto, a file .json or .json.gz")
    command("cache", _cache, "Show the compiled graphs that are kept on disk.")("--clear", action="store_true")
    command("doctor", _doctor, "Show versions, devices, compiler and rules.")
    return parser


def _plan(args: argparse.Namespace) -> hfta.run.Plan:
    return hfta.plan(*_array(args, args.sizes[0]), limit=args.limit, sizes=args.sizes)


def _models(text: str) -> Any:
    return text if text == "auto" else int(text)


def _module(path: str) -> dict[str, Any]:
    """The names that a Python file defines."""
    file = pathlib.Path(path)
    spec = importlib.util.spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"there is no file {path} of Python; pass one that defines build, space and metric")
    module = importlib.util.module_from_spec(spec)
    # As for a script, files beside it can be imported, and so can the file itself.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    for name in ("build", "space"):
        if name not in vars(module):
            raise ValueError(f"{path} does not define {name}; it needs build and space, as tune.run takes them")
    return vars(module)


def _tune(args: argparse.Namespace) -> str:
    module = _module(args.file)
    known = set(inspect.signature(run).parameters) - {"build", "space", "progress", "callbacks", "resume", "executor"}
    options = {name: module[name] for name in known if name in module}
    options |= {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
    if args.scheduler is not None:
        options["scheduler"] = getattr(schedulers, args.scheduler.replace("-", "_"))()
    for name in ("metric", "trials", "epochs"):
        if name not in options:
            raise ValueError(f"{args.file} does not define {name}; define it there")
    if "storage" in options:
        options.setdefault("name", pathlib.Path(args.file).stem)
    folder = args.folder or f"{pathlib.Path(args.file).with_suffix('')}.study"
    callbacks: list[Any] = [lambda study: study.write(folder), _Counts().show]
    if args.tensorboard:
        callbacks.append(tensorboard(os.path.join(folder, "tensorboard")))
    study = run(module["build"], module["space"], resume=folder, progress=False, callbacks=callbacks, **options)
    study.write(folder)
    if study.interrupted:
        print(_summary(study))
        print(f"interrupted; the same command goes on from {folder}", file=sys.stderr)
        raise KeyboardInterrupt
    return _summary(study)


def _status(args: argparse.Namespace) -> str:
    folder = StudyFolder(args.folder)
    if not os.path.exists(folder.journal):
        raise ValueError(f"{args.folder} holds no study; pass the folder of tune.run(resume=...), or <file>.study")
    optuna, names = require("optuna", "tune"), {state: status for status, state in STATES.items()}
    # The study's own backend mends the file, which only the process that writes it may do.
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(folder.journal))
    trials = optuna.load_study(study_name="study", storage=storage).get_trials(deepcopy=False)
    counts = collections.Counter(names.get(trial.state.name, "waiting") for trial in trials)
    try:
        with folder.held():
            state = "not running; the same call goes on from its folder"
    except CheckpointError:
        state = f"running, last change {time.time() - os.path.getmtime(folder.journal):.0f} s ago"
    failed = [trial for trial in trials if trial.state.name == "FAIL"]
    lines = [f"{state}: {', '.join(f'{count} {name}' for name, count in counts.items())}"]
    return "\n".join(lines + [f"  trial {each.number} failed: {each.user_attrs.get('error')}" for each in failed[-3:]])


class _Counts:
    """Shows how many trials have which status, a line per change."""

    last = ""

    def show(self, study: Study) -> None:
        text = ", ".join(f"{count} {status}" for status, count in study.counts.items() if count)
        if text != self.last:
            print(text, file=sys.stderr, flush=True)
        self.last = text


def _best(study: Study) -> list[str]:
    """The best trials, one a line; trials that have reached more rungs come first."""
    ranked = [trial for trial in study.trials if trial.values and trial.status != "failed"]
    ranked.sort(key=lambda trial: (-len(trial.values), -study.score(trial.values[-1][0])))
    rows = []
    for trial in ranked[:_ROWS]:
        epoch = max(study.population.members[member].epoch for member in trial.members)
        values = (f"{name} {value:.5g}" for name, value in zip(study.metrics, trial.values[-1], strict=True))
        rows.append(("", str(trial.number), trial.status, f"epoch {epoch}", *values, _shown(trial.params)))
    return text_table(rows, "<>>>" + "<" * (len(study.metrics) + 1)).splitlines()


def _shown(params: Mapping[str, Any]) -> str:
    rounded = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in params.items()}
    return " ".join(f"{name}={value}" for name, value in rounded.items())


def _summary(study: Study) -> str:
    seconds = sum(member.seconds for member in study.population.members)
    lines = [f"{len(study.trials)} trials, {seconds:.1f} s of training", *_best(study)]
    failed = [trial for trial in study.trials if trial.status == "failed"]
    if failed:
        lines.append(f"{len(failed)} failed, the first with {failed[0].error}")
    return "\n".join(lines)


def _array(args: argparse.Namespace, count: int) -> tuple[Any, Any, Any]:
    """Step, state and batch of an array of trials of a file, all with the first trial's non-fusible values."""
    if count < 1:
        raise ValueError(f"an array of {count} models has none; pass at least 1")
    module = _module(args.file)
    nonfusible = tuple(module.get("nonfusible", ()))
    session = SamplerSession(module["space"], ["maximize"], None, module.get("seed", 0))
    first, *rows = [session.ask()[1] for _ in range(count)]
    # In a space with conditions, trials of another kind have other names.
    rows = [{**(row if row.keys() == first.keys() else first), **_only(first, nonfusible)} for row in (first, *rows)]
    (group,) = Population(module["build"], nonfusible, count, module.get("seed", 0), rows).groups
    return group.array.step, group.gather(range(count)), next(iter(group.array.loader))


def _only(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}


def _cache(args: argparse.Namespace) -> str:
    graphs = kept.kept()
    for name, _, _ in graphs if args.clear else ():
        kept.drop(name)
    table = text_table([(name, f"{size / 2**20:.1f} MiB", time.ctime(used)) for name, size, used in graphs], "<><")
    sums = f"{len(graphs)} graphs{' removed' * args.clear}, at most {kept.MOST_BYTES >> 20:,} MiB in {kept.folder()}"
    return f"{table}\n{sums}"


def _doctor(args: argparse.Namespace) -> str:
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in gpus]
    hfta.rules.install()
    x = torch.ones(2, 3)
    (choice,) = hfta.rules.explain(hfta.vmap(torch.nn.functional.linear), x[:, None], x[:, None])
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    versions = {
        name: importlib.util.find_spec(name) for name in ("torch", "optree", "safetensors", "optuna", "torch_xla")
    }
    rows = [
        ("hfta_func", hfta.__version__),
        ("Python", platform.python_version()),
        *((name, importlib.metadata.version(name) if spec else "not installed") for name, spec in versions.items()),
        ("processor", f"{torch.backends.cpu.get_cpu_capability()}, {threads}"),
        ("devices", ", ".join(devices) or "none besides the processor"),
        (
            "kernels in C",
            f"by {native.compiler() or 'no compiler; install cc, gcc or clang'}, kept in {native.folder()}",
        ),
        ("rules", f"installed; linear of two models runs as {choice.lowering}"),
    ]
    return text_table(rows, "<<")


if __name__ == "__main__":
    sys.exit(main())
