"""Build the wheel and the sdist into ``dist``, and test the wheel in a fresh environment outside the checkout.

    make wheel
    make wheel TORCH=2.9.0

The environment has no file of the checkout. It holds the wheel and pytest at first, then the extras that the tests need.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist"]
TESTS = [
    "models/test_stack.py",
    "optim/test_schedules.py",
    *(f"run/test_{name}.py" for name in ("callbacks", "data", "fit")),
]
"""Files of tests that reach most of the public names in a minute; doctests reach the rest."""
EXTRAS = "adapters,lightning,plot,rl,sklearn,tensorboard,transformers,tune"
HELPERS = [
    "conftest.py",
    "typed_user.py",
    *(f"helpers/{name}.py" for name in ("cases", "comparisons", "oracle", "schedule_cases", "ways")),
]


def build(folder: Path) -> Path:
    """Make the sdist from the checkout and the wheel from the sdist; returns the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    # The versions of build tools are those of constraints.txt, too.
    constrained = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, env=constrained)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    name = wheel.name.partition("-py3")[0]
    with zipfile.ZipFile(wheel) as archive:
        check(archive.namelist(), ["hfta_func/py.typed", f"{name}.dist-info/licenses/LICENSE"], ["hfta_func", name])
    with tarfile.open(sdist) as archive:
        check(archive.getnames(), [f"{name}/src/hfta_func/py.typed", f"{name}/tests/conftest.py"], [name])
    return wheel


def check(files: list[str], needed: list[str], roots: list[str]) -> None:
    """Refuse an archive that lacks a file, or has one outside the folders that belong there."""
    for file in needed:
        if file not in files:
            raise SystemExit(f"the archive has no {file}")
    for file in files:
        if file.partition("/")[0].removesuffix(".dist-info") not in roots or "__pycache__" in file:
            raise SystemExit(f"the archive has {file}, which does not belong in it")


def test(wheel: Path, python: str, torch: str | None) -> None:
    """Install the wheel in an environment of its own and run its tests there."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as temporary:
        folder = Path(temporary)
        run(python, "-m", "venv", folder / "venv")
        own = folder / "venv" / "bin" / "python"
        constraints = (ROOT / "constraints.txt").read_text()
        if torch:
            constraints = re.sub(r"(?m)^torch==.*$", f"torch=={torch}", constraints)
        (folder / "constraints.txt").write_text(constraints)
        install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off"]
        install += ["-c", folder / "constraints.txt"]
        run(*install, wheel, *TOOLS)
        if (ROOT / ".git").exists():
            # As from the address of a repository.
            run(*install, "--no-deps", "--target", folder / "cloned", f"git+{ROOT.as_uri()}")
            if not (folder / "cloned" / "hfta_func" / "py.typed").exists():
                raise SystemExit("pip installs no package from the repository")

        # What is outside of `tests` beside it: the configuration of pytest, and the names that doctests take for granted.
        (folder / "tests").mkdir()
        for file in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / file, folder)
        for file in [*HELPERS, *TESTS]:
            (folder / "tests" / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "tests" / file, folder / "tests" / file)
        shutil.copy(ROOT / ".ci" / "test_installed.py", folder / "tests")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pytest = [own, "-m", "pytest", "-p", "no:cacheprovider"]
        run(*pytest, "tests/test_installed.py", cwd=folder, env=environment)
        (folder / "tests" / "test_installed.py").unlink()

        run(*install, f"hfta_func[{EXTRAS}] @ {wheel.as_uri()}")
        run(*pytest, "-n", "2", "tests", "--pyargs", "hfta_func", cwd=folder, env=environment)
        # What is read is the installed package: nothing else lies beside the script.
        (folder / "pyrightconfig.json").write_text('{"include": ["tests/typed_user.py"], "strict": ["**"]}')
        run(sys.executable, "-m", "pyright", "--pythonpath", own, cwd=folder, env=environment)


def run(*command: object, **options: object) -> None:
    """Run a program; ends this one if it fails."""
    words = [str(word) for word in command]
    print("+", *(word if "\n" not in word else "..." for word in words), flush=True)
    status = subprocess.run(words, **options).returncode  # type: ignore[call-overload]
    if status:
        raise SystemExit(status)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the fresh environment")
    parser.add_argument("--torch", help="version of PyTorch (default: that of constraints.txt)")
    options = parser.parse_args()
    test(build(ROOT / "dist"), options.python, options.torch)


if __name__ == "__main__":
    main()
