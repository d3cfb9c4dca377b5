"""What is released: its metadata, and what it says where a package is missing."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

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
