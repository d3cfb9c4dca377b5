"""What is released: its metadata, and what it says where a package is missing."""

import ast
import importlib
import pkgutil
import re
import runpy
import sys
from pathlib import Path

import pytest

import hfta_func as hfta
from hfta_func import _torch
from planted import PLANTED

ROOT = Path(__file__).parents[1]


@pytest.fixture
def without(monkeypatch):
    """Make a package look as if it was not installed."""

    def without(package):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return without


@pytest.mark.parametrize(
    ("script", "package", "extra"),
    [
        *(("examples/digits.py", package, "examples") for package in ("hfta_func", "numpy", "pandas", "scipy")),
        *(("examples/convergence.py", package, "examples") for package in ("matplotlib", "pandas")),
        ("notebooks/run.py", "nbformat", "notebooks"),
        ("benchmarks/report.py", "matplotlib", "plot"),
        ("benchmarks/reach.py", "matplotlib", "plot"),
    ],
)
def test_a_script_ends_with_one_line_where_a_package_is_missing(script, package, extra, without, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    without(package)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script))
    assert re.fullmatch(rf"{package}[.\w]* is not installed; pip install 'hfta_func\[{extra}\]'", str(end.value))


def test_data_of_the_examples_need_numpy(without, monkeypatch):
    module = importlib.import_module("examples.common.data")
    without("numpy")
    with pytest.raises(SystemExit, match=r"the examples need numpy, .*; pip install 'hfta_func\[examples\]'"):
        importlib.reload(module)


@pytest.mark.parametrize(("mode", "package", "cure"), [("JAX", "jax", "hfta_func[peers]"), ("HFTA", "hfta", "git+")])
def test_a_benchmark_of_a_missing_package_names_the_cure(mode, package, cure, without, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    modes = importlib.import_module("benchmarks.modes")
    monkeypatch.delitem(sys.modules, f"benchmarks.{package}_peer", raising=False)
    without(package)
    with pytest.raises(ModuleNotFoundError) as missing:
        modes.MODES[mode](None)
    assert str(missing.value).startswith(f"{package}") and " is not installed; pip install " in str(missing.value)
    assert cure in str(missing.value)


def text(path):
    return (ROOT / path).read_text()


def test_the_version_is_written_once():
    assert text("src/hfta_func/__init__.py").count(f'"{hfta.__version__}"') == 1
    for path in ("pyproject.toml", "CITATION.cff", "Makefile", "README.md"):
        assert hfta.__version__ not in text(path), path


def test_ci_tests_the_wheel_on_the_oldest_the_usual_and_the_newest_pytorch():
    versions = re.findall(r'torch: "([\d.]*)"', text(".github/workflows/ci.yml"))
    usual = re.search(r"(?m)^torch==(\d+\.\d+)", text("constraints.txt")).group(1)
    tested = {version.rpartition(".")[0] or usual for version in versions}
    assert {usual, *(".".join(map(str, release)) for release in (_torch.OLDEST, _torch.NEWEST))} <= tested


def test_hosted_ci_runs_the_stages_of_ci_run():
    (stages,) = re.findall(r"^for stage in (.*); do$", text(".ci/run"), re.M)
    workflow = text(".github/workflows/ci.yml")
    (matrix,) = re.findall(r"target: \[(.*)\]", workflow)
    hosted = {*matrix.split(", "), *re.findall(r"run: make ([\w-]+)", workflow)}
    assert set(stages.split()) <= hosted
    for stage in hosted:
        assert re.search(rf"^{stage}:", text("Makefile"), re.M), stage


def test_every_version_of_python_that_ci_tests_is_declared():
    (versions,) = re.findall(r"python: \[(.*)\]", text(".github/workflows/ci.yml"))
    declared = re.findall(r"Python :: (3\.\d+)", text("pyproject.toml"))
    assert re.findall(r"[\d.]+", versions) == declared
    assert f'requires-python = ">={declared[0]}"' in text("pyproject.toml")


def test_every_planted_bug_has_its_place_in_the_source():
    for bug in PLANTED:
        assert text(f"src/hfta_func/{bug.file}").count(bug.old) == 1, bug.what
        file, _, name = bug.test.partition("::")
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {name.partition('[')[0]}(" in path.read_text(), bug.test


@pytest.fixture
def problems():
    return runpy.run_path(str(ROOT / ".ci" / "version.py"))["problems"]


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_what_examples_and_benchmarks_use_of_the_package_is_there(folder):
    """Many of them are run by longer tests only."""
    for file in Path(folder).rglob("*.py"):
        imported = {}
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {one.asname or one.name: one.name for one in node.names if one.name == "hfta_func"}
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("hfta_func"):
                imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for first, _, rest in (chain.partition(".") for chain in chains):
            if first in imported and rest.replace(".", "").isidentifier():
                pkgutil.resolve_name(f"{imported[first]}.{rest}")


def test_only_a_version_that_is_described_is_published(problems):
    source, changelog = '__version__ = "1.2.3"\n', "## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n"
    assert problems("v1.2.3", source, changelog) == []
    (wrong,) = problems("v1.2.4", source, changelog)
    assert wrong.startswith("the tag is v1.2.4, but the package's version is 1.2.3: tag it v1.2.3")
    (missing,) = problems("v1.2.3", source, "## [Unreleased]\n")
    assert "CHANGELOG.md has no section '## [1.2.3] - YYYY-MM-DD'" in missing


def test_what_is_released_has_its_version_in_the_changelog(problems):
    version = re.search(r'__version__ = "(.+)"', text("src/hfta_func/__init__.py"))[1]
    assert problems(f"v{version}", text("src/hfta_func/__init__.py"), text("CHANGELOG.md")) == []
