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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    add("--eta", type=float, default=3, help="number of trials for each that goes on (default: 3)")
    add("--sampler", choices=SAMPLERS, help="Optuna's sampler")
    add("--batch", type=int, help="trials asked for at a time")
    add("--workers", type=_models, help="processes that train an array each, or auto")
    add("--max-models", type=_models, help="the largest array, or auto")
    add("--seeds", type=int, help="number of members of every trial")
    add("--seed", type=int, help="the first seed")
    add("--retry", type=int, help="how often a failed trial is tried again")
    add("--timeout", type=float, help="seconds after which the study ends")
    add("--storage", help="Optuna's storage, such as sqlite:///study.db")
    add("--name", help="name of the study in the storage (default: the file's name)")
    add("--folder", help="the study's folder (default: <file>.study)")
    add("--tensorboard", action="store_true", help="write a run per trial to the folder's tensorboard, for TensorBoard")
    add = command("status", lambda args: shown(read(args.folder)), "Show what a running study does, from its folder.")
    add("folder", help="the folder, <file>.study for studies of this command line")
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
    command("doctor", _doctor, "Show versions, devices, compiler, rules, cache and allocator.")
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
    for name in ("metric", "trials", "epochs"):
        if name not in options:
            flag = "" if name == "metric" else f", or pass --{name}"
            raise ValueError(f"{args.file} does not define {name}; define it there{flag}")
    if "storage" in options:
        options.setdefault("name", pathlib.Path(args.file).stem)
    folder = args.folder or f"{pathlib.Path(args.file).with_suffix('')}.study"
    callbacks: list[Any] = [lambda study: study.write(folder), _Counts().show]
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
    logger = logging.getLogger("hfta_func")
    before = logger.level
    with contextlib.closing(logging.FileHandler(os.path.join(folder, "study.log"), delay=True)) as handler:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)


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
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), f"torchinductor_{_user()}")
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in gpus]
    cuda = f"CUDA, {os.environ.get('PYTORCH_CUDA_ALLOC_CONF') or 'no settings'}"
    folder = str(native.folder())
    kernels = native.compiler() and f"{native.compiler()}, kept in {folder} ({_writable(folder)})"
    libc = "the system's" if "LD_PRELOAD" not in os.environ else f"LD_PRELOAD={os.environ['LD_PRELOAD']}"
    hfta.rules.install()
    x = torch.ones(2, 3)
    (choice,) = hfta.rules.explain(hfta.vmap(torch.nn.functional.linear), x[:, None], x[:, None])
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    rows = [
        *(("hfta_func", hfta.__version__), ("Python", platform.python_version())),
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
    with contextlib.suppress(KeyError, OSError):
        return importlib.import_module("getpass").getuser()
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
