"""Which code a number was measured with, and whether that code is still the same.

A row of results names its commit, for people, and holds a digest of what its step ran through, for the check, which works
without git. Comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import ROOT, machine

PACKAGE = ROOT / "src" / "hfta_func"
UPDATE = ("optim/_adam", "optim/_elementwise", "schedules")
"""The files where an update of the workloads begins; it runs through them and all that they import."""
STEP = ("step/train", "models/stack", "rules/__init__", *UPDATE)
"""Those where a step begins."""
COMPILED = ("_torch/ahead", "run/kept")
"""What only a compiled one does: how its graph is made, and what every call checks."""
MEASURED = ("src", "examples", "benchmarks", ":!benchmarks/results")
"""What a commit has to have as it is, to be the one that was measured."""


def commit(folder: Path = ROOT, paths: Sequence[str] = MEASURED) -> dict[str, Any]:
    """The last commit that changed some files, and whether they differ from it; nothing without git or a checkout."""
    try:
        found = [
            subprocess.run(["git", "-C", folder, *order], capture_output=True, text=True, check=True).stdout.strip()
            for order in (["log", "-1", "--format=%H", "--", *paths], ["status", "--porcelain", "--", *paths])
        ]
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": found[0], "dirty": bool(found[1])}


def stamp() -> dict[str, Any]:
    """What a number depends on besides the code, and which code that was."""
    return {**machine(), **commit()}


def files(mode: str) -> list[Path]:
    """What a step of a mode runs through; none of plain PyTorch."""
    if mode in ("JAX", "HFTA"):
        return [ROOT / "benchmarks" / f"{mode.lower()}_peer.py"]
    roots = STEP if mode.startswith("array") else UPDATE if mode.startswith("stock") else ()
    apart = [PACKAGE / f"{name}.py" for name in COMPILED]
    found = imported(roots)
    is_compiled = mode.startswith("array") and mode.endswith(("compiled", "replayed"))
    return [*(path for path in found if path not in apart), *(apart if is_compiled else ())]


@functools.cache
def imported(roots: tuple[str, ...]) -> list[Path]:
    """Files of the package and all that they import, but for the ``__init__`` of folders, which import everything."""
    found, left = set[Path](), [PACKAGE / f"{name}.py" for name in roots]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hfta_func"):
                    folder = PACKAGE.joinpath(*node.module.split(".")[1:])  # pyright: ignore
                    near = [folder / "__init__.py"] if folder.parent == PACKAGE and folder.name == "_torch" else []
                    names = [folder.with_suffix(".py"), *near, *(folder / f"{alias.name}.py" for alias in node.names)]
                    left += [name for name in names if name.is_file()]
    return sorted(found)


@functools.cache
def code_of(*roots: str) -> str:
    """The digest of these files of the package and of all that they import."""
    return digest([path.read_text() for path in imported(roots)])


@functools.cache
def code(mode: str) -> str | None:
    """The digest of what a step of a mode runs through, the same under every version of Python."""
    found = [path for path in files(mode) if path.exists()]
    return digest([path.read_text() for path in found]) if found else None


def digest(sources: Sequence[str]) -> str:
    """Of programs, without their comments, docstrings and layout."""
    text = "\n".join(plain(ast.parse(source)) for source in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(node: Any) -> str:
    """A program as text; what a version of Python adds to the tree is empty where the program does not use it."""
    if isinstance(node, list):
        return f"[{','.join(plain(item) for item in node if not _documents(item))}]"
    if isinstance(node, ast.JoinedStr):
        # Some versions have an empty text at the end.
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name == "value" or value not in (None, [])]
    return f"{type(node).__name__}({','.join(f'{name}={plain(value)}' for name, value in fields if name != 'kind')})"


def _documents(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_older(mode: str, row: dict[str, Any]) -> bool:
    """Whether a row was measured with other code than there is now, or does not know."""
    return code(mode) != row.get("code")
