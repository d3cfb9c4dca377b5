"""Pack what a machine without a network needs to be measured: wheels, HFTA's checkout, and a script that runs everything.

``python -m benchmarks carry --hfta-source DIR`` fills the folder ``.carry``, which git ignores. Copy the working tree with it
to the machine, run ``bash .carry/run.sh SECONDS DIR`` there, bring ``DIR/gpu.jsonl`` back, and
``python -m benchmarks gpu --add FILE``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("optree", "expecttest")
"""What machines with PyTorch usually lack."""
GLIBC = (28, 27, 24, 17, 31, 34, 35)
"""Versions of glibc, 2.x, that wheels are built for; the downloader wants each by name."""
SCRIPT = """#!/usr/bin/env bash
# Measures this machine's GPU: bash {folder}/run.sh SECONDS DIR. The clock runs while packages are installed, too.
set -euo pipefail
begin=$SECONDS
cd "$(dirname "${{BASH_SOURCE[0]}}")/.."
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/carried {folder}/wheels/*.whl
export PYTHONPATH="/tmp/carried:$PWD/src${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONUNBUFFERED=1
exec python3 -m benchmarks gpu --budget "$(($1 - (SECONDS - begin)))" --out "$2" --commit {commit}{options} "${{@:3}}"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the folder, and say how large everything is that travels."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks carry", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help=f"{' '.join(PACKAGES)} by default")
    parser.add_argument("--hfta-source", type=Path, metavar="DIR", help="a checkout of the original HFTA")
    parser.add_argument("--limit", type=float, default=64.0, metavar="MIB", help="what may travel; 64 by default")
    parser.add_argument("--out", default=".carry", metavar="DIR", help="a folder in the checkout that git ignores")
    args = parser.parse_args(argv)
    folder = ROOT / args.out
    if args.hfta_source and not (args.hfta_source / "hfta" / "ops").is_dir():
        parser.error(f"--hfta-source: {args.hfta_source} has no folder hfta/ops")
    if _git("status", "--porcelain", "--", "src", "tests", "examples", "benchmarks"):
        parser.error("there are changes that are not committed; rows name a commit, so commit them first")
    if subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", folder / "run.sh"]).returncode:
        parser.error(f"--out: git does not ignore {args.out}")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    for package in args.packages:
        download(package, args.python, folder / "wheels")
    if args.hfta_source:
        python_only = lambda at, names: [n for n in names if Path(at, n).is_file() and not n.endswith(".py")]  # noqa: E731
        shutil.copytree(args.hfta_source / "hfta", folder / "hfta-source" / "hfta", ignore=python_only)
    (folder / "run.sh").write_text(script(args.out, _git("rev-parse", "HEAD"), bool(args.hfta_source)))
    tree = {path: path.stat().st_size for path in map(ROOT.joinpath, _files()) if path.is_file()}
    own = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    size = sum(tree.values()) + sum(own.values())
    print(f"{args.out}: {len(own)} files; with the working tree {size / 2**20:.1f} of {args.limit:g} MiB")
    if size > args.limit * 2**20:
        largest = sorted(tree | own, key=(tree | own).__getitem__)[-3:]
        names = ", ".join(f"{path.relative_to(ROOT)}" for path in reversed(largest))
        raise SystemExit(f"more than may travel; the largest files are {names}")
    return 0


def script(folder: str, commit: str, has_hfta: bool) -> str:
    """What runs on the machine."""
    options = f" --hfta-source {folder}/hfta-source" if has_hfta else ""
    return SCRIPT.format(folder=folder, commit=commit, options=options)


def download(package: str, python: str, to: Path) -> None:
    """The wheel of a package in the version of ``constraints.txt``, for that Python on a machine with an x86-64 processor.

    Raises:
        SystemExit: if there is none.
    """
    version = re.search(rf"(?mi)^{re.escape(package)}==(\S+)", (ROOT / "constraints.txt").read_text())
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    wanted = f"{package}=={version[1]}" if version else package
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(to)]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no wheel of {wanted} for Python {python}: {done.stderr.strip().splitlines()[-1]}")


def _files() -> list[str]:
    return _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()


def _git(*order: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *order], capture_output=True, text=True, check=True).stdout.strip()
