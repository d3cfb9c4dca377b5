"""Mutation testing: changes the source in small ways, and reports the changes that no test notices.

``make mutants`` draws a sample of mutants and writes those that survive to ``out/mutants.txt``; ``make mutants
SAMPLE=all`` runs every one. A worker imports torch once and forks for each mutant: the child imports the package with one
module's source replaced and runs the quick tests of that module, so that a mutant costs a second or two.

Survivors that no test can kill, because they compute the same, stand with their reason in ``mutants.md`` beside this file.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hfta_func"
FOLDERS = ("step", "optim", "random.py", "files")

# The tests of a file, the likeliest to notice first; these words leave out those that take long.
_STEP = ["test_step.py", "test_failures.py", "test_amp.py", "test_stack.py", "test_errors.py"]
_OPTIM = ["test_knobs.py", "test_optim.py", "test_schedules.py", "test_errors.py"]
TESTS = {
    "step": _STEP,
    "optim": _OPTIM,
    "random.py": ["test_random.py", "test_data.py"],
    "files": ["test_atomic.py", "test_storage.py", "test_durable.py"],
    "step/options.py": ["test_evaluate.py", "test_step.py", "test_amp.py"],
    "step/evaluate.py": ["test_evaluate.py", "test_errors.py"],
    "step/batch.py": ["test_evaluate.py", "test_errors.py", "test_plan.py"],
    "step/train.py": [*_STEP, "test_allocator.py"],
    "step/chunks.py": ["test_step.py", "test_evaluate.py"],
    "step/allocator.py": ["test_allocator.py"],
    "step/commit.py": ["test_step.py", "test_failures.py"],
}
SLOW = (
    "compile or inductor or True or aot_eager or disk_that_is_full or broken_off or every_bit or distribution or killed "
    "or commutes or saved_and or streams_are or permutations or byte or fake or transformer or cnn or separate or pieces "
    "or join_and_leave or largest or predicted or fits or budget or memory or chunks_where or damaged_files or random_op"
)


class Mutant(NamedTuple):
    """One change of one file; ``number`` counts the changes of that file in order."""

    file: str
    number: int
    line: int
    what: str
    text: str
    source: str

    @property
    def name(self) -> str:
        """What stays when lines move: file, change, and the line itself."""
        return f"{self.file} | {self.what} | {self.text}"


_COMPARE = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd},
}


def changes(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[tuple[str, str, Any]]:
    """Ways to change one node: what it is, the field, and the field's new value; field ``""`` replaces the node."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            other = _COMPARE[type(op)]
            ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
            yield f"{type(op).__name__} -> {other.__name__}", "ops", ops
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _ARITHMETIC:
        other = _ARITHMETIC[type(node.op)]
        yield f"{type(node.op).__name__} -> {other.__name__}", "op", other()
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", "op", other()
    if isinstance(node, ast.UnaryOp):
        yield f"{type(node.op).__name__} dropped", "", node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value!r} -> {value!r}", "value", value
    if isinstance(node, (ast.If, ast.IfExp)):
        for value in (True, False):
            yield f"if {value}", "test", ast.Constant(value)
    if isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):
                yield f"keyword {keyword.arg} dropped", "keywords", node.keywords[:place] + node.keywords[place + 1 :]
        shown = {ast.unparse(arg) for arg in node.args[-2:]}
        # Axes that are transposed have no order.
        symmetric = isinstance(node.func, ast.Attribute) and node.func.attr == "transpose"
        if len(shown) > 1 and not symmetric and not any(isinstance(arg, ast.Starred) for arg in node.args[-2:]):
            yield "last arguments swapped", "args", [*node.args[:-2], node.args[-1], node.args[-2]]
    if isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield)):
        yield "statement dropped", "", ast.Pass()
    if isinstance(node, (ast.AugAssign, ast.Raise)):
        yield "statement dropped", "", ast.Pass()
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
        yield "statement dropped", "", ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None and function is not None:
        names = [arg.arg for arg in function.args.args if arg.arg != "self"]
        shown = ast.unparse(node.value)
        for name in names[:1] if names[:1] != [shown] else names[1:2]:
            yield f"return {name}", "value", ast.Name(name, ast.Load())


def _skipped(node: ast.AST) -> bool:
    """Annotations apart, what holds no behaviour that tests could be asked for: words, and what only type checkers read."""
    if isinstance(node, (ast.JoinedStr, ast.Assert)):
        return True
    # Lengths are equal by construction; where they are not, strict= only raises earlier.
    if isinstance(node, ast.ImportFrom | ast.Import) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return True
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _walk(node: ast.AST, function: ast.FunctionDef | None = None) -> Iterator[tuple[ast.AST, str, int, Any, Any]]:
    """Every node that may be changed, with its parent, where it stands there, and the function around it."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not _skipped(child):
                yield node, field, place, child, function
                yield from _walk(child, child if isinstance(child, ast.FunctionDef) else function)


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file of the package."""
    text = (SOURCE / file).read_text()
    tree, lines = ast.parse(text), text.splitlines()
    found: list[Mutant] = []
    alike: collections.Counter[tuple[int, str]] = collections.Counter()
    for parent, field, place, node, function in list(_walk(tree)):
        for what, changed, value in changes(node, function):
            old = getattr(parent, field) if not changed else getattr(node, changed)
            if changed:
                setattr(node, changed, value)
            elif isinstance(old, list):
                setattr(parent, field, [*old[:place], ast.copy_location(value, node), *old[place + 1 :]])
            else:
                setattr(parent, field, value)
            alike[node.lineno, what] += 1
            # The same change may fit a line more than once.
            what += "" if alike[node.lineno, what] == 1 else f" ({alike[node.lineno, what]})"
            line, source = node.lineno, ast.unparse(ast.fix_missing_locations(tree))
            found.append(Mutant(file, len(found), line, what, lines[line - 1].strip().replace("|", "¦"), source))
            setattr(*((node, changed, old) if changed else (parent, field, old)))
    return found


def quick_tests(file: str) -> list[str]:
    """The files of tests to run, most specific entry of the table first."""
    names = TESTS.get(file) or TESTS[file.partition("/")[0]]
    return [str(file) for name in names for file in (ROOT / "tests").rglob(name)]


def _run(is_changed: bool, tests: list[str], options: list[str], log: str) -> int:
    """In a process of its own: the exit status of the tests, which end with the first that fails of a changed package."""
    import pytest

    with open(log, "w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    common = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "--show-capture=no", "--no-header"]
    return int(pytest.main([*common, f"--rootdir={ROOT}", *options, *(["-x"] if is_changed else []), *tests]))


def _forked(
    file: str, source: str | None, tests: list[str], options: list[str], limit: float
) -> tuple[int, float, str]:
    """Exit status (-1 is out of time), seconds, and the last lines of what the tests printed, with a file replaced."""
    log, start = ROOT / "out" / f"mutant-{os.getpid()}.log", time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(SOURCE, pathlib.Path(place, SOURCE.name), ignore=shutil.ignore_patterns("__pycache__"))
        if source is not None:
            pathlib.Path(place, SOURCE.name, file).write_text(source)
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.setsid()
                # For this process, and for those that the tests start.
                sys.path.insert(0, place)
                os.environ["PYTHONPATH"] = place
                status = _run(source is not None, tests, options, str(log))
            finally:
                os._exit(status)
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() - start > limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return -1, time.monotonic() - start, ""
            time.sleep(0.02)
    lines = log.read_text(errors="replace").splitlines()
    return os.waitstatus_to_exitcode(done[1]), time.monotonic() - start, "\n".join(lines[-60:])


def _worker(tasks: Any, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    # What all tests need, and nothing of the package.
    for name in ("torch", "optree", "safetensors.torch", "pytest", "tqdm.auto", "torch.profiler", "numpy"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for key, *task in iter(tasks.get, None):
        results.put((key, *_forked(*task)))


Task = tuple[Any, str, "str | None", list[str], list[str], float]
"""A name, and the arguments of :func:`_forked`."""


def _all(jobs: int, work: Sequence[Task]) -> Iterator[tuple[Any, int, float, str]]:
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    workers = [context.Process(target=_worker, args=(tasks, results), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for task in [*work, *[None] * jobs]:
        tasks.put(task)
    for _ in work:
        yield results.get()


def _failed(log: str) -> list[str]:
    return [line.removeprefix("FAILED ").partition(" - ")[0] for line in log.splitlines() if line.startswith("FAILED ")]


def plant(jobs: int, names: list[str]) -> int:
    """Plant bugs one at a time, and count those that their test does not notice."""
    from planted import PLANTED

    work: list[Task] = []
    for bug in PLANTED:
        if names and not any(name in bug.what for name in names):
            continue
        source = (SOURCE / bug.file).read_text()
        if source.count(bug.old) != 1:
            raise SystemExit(f"{bug.what}: {bug.old!r} stands {source.count(bug.old)} times in {bug.file}, not once")
        file, _, name = bug.test.partition("::")
        (path,) = (ROOT / "tests").rglob(file)
        test = f"{path}::{name}"
        work.append(((bug.what, bug.test), bug.file, source.replace(bug.old, bug.new), [test], [], 300.0))
    missed = 0
    for (what, test), status, seconds, log in _all(jobs, work):
        missed += not _failed(log)
        found = "noticed" if _failed(log) else f"MISSED (status {status})"
        print(f"{found} in {seconds:.1f} s: {what} | {test}", flush=True)
    print(f"{len(work)} bugs planted, {missed} missed")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", default="200", help="mutants to draw, or all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--planted", action="store_true", help="plant the bugs of planted.py instead")
    parser.add_argument("--names", nargs="*", default=[], help="mutants whose name holds one of these")
    chosen = parser.parse_args()
    (ROOT / "out").mkdir(exist_ok=True)
    if chosen.planted:
        raise SystemExit(plant(chosen.jobs, chosen.names))
    files = [
        str(path.relative_to(SOURCE))
        for folder in FOLDERS
        for path in ([SOURCE / folder] if folder.endswith(".py") else sorted((SOURCE / folder).glob("*.py")))
        if str(path.relative_to(SOURCE)).startswith(chosen.only)
    ]
    every = [mutant for file in files for mutant in mutants(file)]
    if chosen.names:
        sample = [mutant for mutant in every if any(name in mutant.name for name in chosen.names)]
    else:
        size = len(every) if chosen.sample == "all" else min(int(chosen.sample), len(every))
        sample = sorted(random.Random(chosen.seed).sample(every, size))
    print(f"{len(sample)} of {len(every)} mutants in {len(files)} files")
    known = explained()
    outcomes = dict.fromkeys((mutant.name for mutant in sample), "killed")
    left = [mutant for mutant in sample if mutant.name not in known]
    outcomes.update({mutant.name: "explained" for mutant in sample if mutant.name in known})
    left = run_tests(left, chosen.jobs)
    outcomes.update({mutant.name: "survived" for mutant in left})
    counts = collections.Counter(outcomes[mutant.name] for mutant in sample)
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    report = [f"{len(sample)} of {len(every)} mutants, seed {chosen.seed}: {shown}", ""]
    report += sorted({f"{mutant.name} | line {mutant.line}" for mutant in left})
    (ROOT / "out" / "mutants.txt").write_text("\n".join(report) + "\n")
    print("\n".join(report))
    raise SystemExit(counts["survived"] > 0.05 * len(sample))


def run_tests(sample: list[Mutant], jobs: int) -> list[Mutant]:
    """The mutants that the chosen tests do not notice; out of time is noticed."""
    chosen = ["-k", f"not ({SLOW})"]
    limits: dict[tuple[str, ...], float] = {}
    red: dict[tuple[str, ...], list[str]] = {}
    groups = {tuple(quick_tests(mutant.file)): mutant.file for mutant in sample}
    baselines: list[Task] = [(tests, file, None, list(tests), chosen, 1800.0) for tests, file in groups.items()]
    for tests, status, seconds, log in _all(jobs, baselines):
        red[tests] = _failed(log)
        if status not in (0, 1) or (status == 1) != bool(red[tests]):
            raise SystemExit(f"the tests of {groups[tests]} cannot be run:\n{log}")
        limits[tests] = 20 + 8 * seconds
        print(f"{seconds:.1f} s: {' '.join(pathlib.Path(test).name for test in tests)}", flush=True)
        if red[tests]:
            print("left out, because they fail without any change:", *red[tests], sep="\n  ", flush=True)
    work: list[Task] = []
    for number, mutant in enumerate(sample):
        tests = tuple(quick_tests(mutant.file))
        options = [*chosen, *(f"--deselect={name}" for name in red[tests])]
        work.append((number, mutant.file, mutant.source, list(tests), options, limits[tests]))
    survived = []
    for count, (number, status, seconds, log) in enumerate(_all(jobs, work), start=1):
        kind = "SURVIVED" if status == 0 else "out of time" if status == -1 else "killed"
        if status == 0:
            survived.append(sample[number])
        why = next(iter(_failed(log)), f"status {status}") if kind == "killed" else ""
        print(f"[{count}/{len(work)}] {kind} in {seconds:.1f} s: {sample[number].name} {why}", flush=True)
    return survived


def explained() -> set[str]:
    """Names of mutants that compute the same as the source, from the table in ``mutants.md``."""
    rows = [line.split(" | ") for line in pathlib.Path(__file__).with_name("mutants.md").read_text().splitlines()]
    return {" | ".join(cell.strip("|` ") for cell in row[:3]) for row in rows if row[0].startswith("| `")}


if __name__ == "__main__":
    main()
