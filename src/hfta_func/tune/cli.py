"""The command line: ``hfta-func tune``, ``status``, ``plan``, ``explain``, ``profile``, ``cache`` and ``doctor``."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import hfta_func as hfta
from hfta_func._kernels import native
from hfta_func._types import text_table
from hfta_func.run import kept
from hfta_func.tune import schedulers
from hfta_func.tune.callbacks import tensorboard
from hfta_func.tune.population import Population
from hfta_func.tune.run import run
from hfta_func.tune.sampling import SamplerSession
from hfta_func.tune.status import read, shown
from hfta_func.tune.study import Study

SCHEDULERS = {
    "none": lambda eta: None,
    "halving": schedulers.halving,
    "hyperband": schedulers.hyperband,
    "asynchronous-halving": schedulers.asynchronous_halving,
    "median-stopping": lambda eta: schedulers.median_stopping(),
    "population-based": lambda eta: schedulers.population_based(),
}
SAMPLERS = {"random": "RandomSampler", "tpe": "TPESampler", "cmaes": "CmaEsSampler", "qmc": "QMCSampler"}
_ROWS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the status: 0, 1 after an error, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        print(args.command(args))
        return 0
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        # One word, such as a key, says nothing alone.
        print(f"hfta-func: {text if ' ' in text else f'{type(error).__name__}: {text}'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hfta-func", description="Train many models of the same architecture as one array."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, func: Any, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text, parents=parents)
        parser.set_defaults(command=func)
        return parser

    study = argparse.ArgumentParser(add_help=False)
    text = "Python file with build, space, metric and, if need be, further arguments of tune.run"
    study.add_argument("file", help=text)
    array = argparse.ArgumentParser(add_help=False, parents=[study])
    array.add_argument("--models", type=int, default=4, help="number of members of the array (default: 4)")
    text = "Search the space of a file; after an interruption, the same command goes on."
    tune = command("tune", _tune, text, study)
    tune.add_argument("--trials", type=int, help="number of configurations; 0 is the scheduler's default")
    tune.add_argument("--epochs", type=int, help="epochs of a trial that is not stopped")
    tune.add_argument("--scheduler", choices=SCHEDULERS, help="which trials go on")
    tune.add_argument("--eta", type=float, default=3, help="number of trials for each that goes on (default: 3)")
    tune.add_argument("--sampler", choices=SAMPLERS, help="Optuna's sampler")
    tune.add_argument("--batch", type=int, help="trials asked for at a time")
    tune.add_argument("--workers", type=_models, help="processes that train an array each, or auto")
    tune.add_argument("--max-models", type=_models, help="the largest array, or auto")
    tune.add_argument("--seeds", type=int, help="number of members of every trial")
    tune.add_argument("--seed", type=int, help="the first seed")
    tune.add_argument("--storage", help="Optuna's storage, such as sqlite:///study.db")
    tune.add_argument("--name", help="name of the study in the storage (default: the file's name)")
    tune.add_argument("--folder", help="the study's folder (default: <file>.study)")
    tune.add_argument(
        "--tensorboard", action="store_true", help="write a run per trial to the folder's tensorboard, for TensorBoard"
    )
    status = command(
        "status", lambda args: shown(read(args.folder)), "Show what a running study does, from its folder."
    )
    status.add_argument("folder", help="the folder, <file>.study for studies of this command line")

    def planned(args: argparse.Namespace) -> hfta.run.Plan:
        return hfta.plan(*_array(args, args.sizes[0]), limit=args.limit, sizes=args.sizes)

    plan = command("plan", planned, "Measure how many models of a file's study fit into an array.", study)
    plan.add_argument("--limit", type=int, default=64, help="the largest number of models considered (default: 64)")
    plan.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 4, 16], help="numbers of models to measure (default: 1 4 16)"
    )
    text = "Show how each operator of a file's step runs, and why."
    command("explain", lambda args: hfta.rules.explain(*_array(args, args.models)), text, array)
    text = "Show where the time of a file's step goes."
    profile = command("profile", lambda args: hfta.profile(*_array(args, args.models), trace=args.trace), text, array)
    profile.add_argument("--trace", help="also write a trace for Perfetto, a file .json or .json.gz")
    cache = command("cache", _cache, "Show the compiled graphs that are kept on disk.")
    cache.add_argument("--clear", action="store_true", help="remove them")
    command("doctor", _doctor, "Show versions, devices, compiler, rules, cache and allocator.")
    return parser


def _models(text: str) -> Any:
    return text if text == "auto" else int(text)


def _module(path: str) -> dict[str, Any]:
    """The names that a Python file defines."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {path}; pass a Python file that defines build, space and metric")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; pass one that defines build, space and metric")
    module = importlib.util.module_from_spec(spec)
    # As for a script, files beside it can be imported, and so can the file itself.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    names = vars(module)
    missing = [name for name in ("build", "space") if name not in names]
    if missing:
        raise ValueError(f"{path} does not define {missing[0]}; it needs build and space, as tune.run takes them")
    return names


def _tune(args: argparse.Namespace) -> str:
    module = _module(args.file)
    known = set(inspect.signature(run).parameters) - {"build", "space", "progress", "callbacks", "resume", "executor"}
    options = {name: module[name] for name in known if name in module}
    for name in module:
        if name not in known and (close := difflib.get_close_matches(name, known - set(module), 1, 0.8)):
            text = f"{args.file} defines {name}, which is not used; did you mean {close[0]}?"
            print(f"hfta-func: {text}", file=sys.stderr)
    options |= {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
    if args.scheduler is not None:
        options["scheduler"] = SCHEDULERS[args.scheduler](args.eta)
    if args.sampler is not None:
        optuna: Any = importlib.import_module("optuna")
        more = {"constant_liar": True} if args.sampler == "tpe" else {}
        options["sampler"] = getattr(optuna.samplers, SAMPLERS[args.sampler])(seed=options.get("seed", 0), **more)
    missing = [name for name in ("metric", "trials", "epochs") if name not in options]
    if missing:
        flag = "" if missing[0] == "metric" else f", or pass --{missing[0]}"
        raise ValueError(f"{args.file} does not define {missing[0]}; define it there{flag}")
    if "storage" in options:
        options.setdefault("name", pathlib.Path(args.file).stem)
    folder = args.folder or f"{pathlib.Path(args.file).with_suffix('')}.study"
    callbacks: list[Any] = [lambda study: study.write(folder), _Table(sys.stderr).show]
    if args.tensorboard:
        callbacks.append(tensorboard(os.path.join(folder, "tensorboard")))
    with _logged(folder):
        study = run(module["build"], module["space"], resume=folder, progress=False, callbacks=callbacks, **options)
    study.write(folder)
    if study.interrupted:
        print(_summary(study))
        print(f"interrupted; the same command goes on from {folder}", file=sys.stderr)
        raise KeyboardInterrupt
    return _summary(study)


@contextlib.contextmanager
def _logged(folder: str) -> Iterator[None]:
    """Log the events of members and workers to a file in the folder."""
    os.makedirs(folder, exist_ok=True)
    handler, logger = logging.FileHandler(os.path.join(folder, "study.log"), delay=True), logging.getLogger("hfta_func")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


class _Table:
    """Shows the best trials so far: on a terminal a table that is redrawn, elsewhere one line per change."""

    def __init__(self, stream: Any):
        self._stream, self._drawn, self._last = stream, 0, ""

    def show(self, study: Study) -> None:
        head = ", ".join(f"{count} {status}" for status, count in study.counts.items() if count)
        if not self._stream.isatty():
            if head != self._last:
                print(head, file=self._stream, flush=True)
            self._last = head
            return
        lines = [head, *_best(study)]
        width = shutil.get_terminal_size().columns
        text = "\n".join(line[: width - 1] for line in lines)
        print("\033[F\033[K" * self._drawn + text, file=self._stream, flush=True)
        self._drawn = len(lines)


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
    rows = [session.ask()[1] for _ in range(count)]
    like_first = [row for row in rows if row.keys() == rows[0].keys()]
    fixed = {name: rows[0][name] for name in nonfusible if name in rows[0]}
    rows = [like_first[index % len(like_first)] | fixed for index in range(count)]
    population = Population(module["build"], nonfusible, count, module.get("seed", 0), rows)
    (group,) = population.groups
    return group.array.step, group.gather(range(count)), next(iter(group.array.loader))


def _cache(args: argparse.Namespace) -> str:
    graphs = kept.kept()
    for name, _, _ in graphs if args.clear else ():
        kept.drop(name)
    table = text_table([(name, f"{size / 2**20:.1f} MiB", time.ctime(used)) for name, size, used in graphs], "<><")
    sums = f"{len(graphs)} graphs{' removed' * args.clear}, at most {kept.MOST_BYTES >> 20:,} MiB in {kept.folder()}"
    return f"{table}\n{sums}"


def _doctor(args: argparse.Namespace) -> str:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), f"torchinductor_{_user()}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in gpus]
    cuda = f"CUDA, {os.environ.get('PYTORCH_CUDA_ALLOC_CONF') or 'no settings'}"
    folder = str(native.folder())
    kernels = native.compiler() and f"{native.compiler()}, kept in {folder} ({_writable(folder)})"
    libc = "the system's" if "LD_PRELOAD" not in os.environ else f"LD_PRELOAD={os.environ['LD_PRELOAD']}"
    hfta.rules.install()
    x = torch.ones(2, 3)
    (choice,) = hfta.rules.explain(hfta.vmap(torch.nn.functional.linear), x[:, None], x[:, None])
    rows = [
        ("hfta_func", hfta.__version__),
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in ("torch", "optree", "safetensors", "optuna", "torch_xla")),
        ("processor", f"{torch.backends.cpu.get_cpu_capability()}, {threads}"),
        ("devices", ", ".join(devices) or "none besides the processor"),
        ("compiler", compiler or "none; torch.compile needs g++ or clang++ on a CPU"),
        ("compiled graphs", f"{cache} ({_writable(cache)})"),
        ("kernels in C", kernels or "none; they need cc, gcc or clang"),
        ("rules", f"installed; linear of two models runs as {choice.lowering}"),
        ("allocator", cuda if torch.cuda.is_available() else libc),
    ]
    return text_table(rows, "<<")


def _user() -> str:
    try:
        return importlib.import_module("getpass").getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _writable(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return "writable" if os.access(path, os.W_OK) else "not writable, so that nothing is kept"


if __name__ == "__main__":
    sys.exit(main())
