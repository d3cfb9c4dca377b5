"""The budget of code lines a room: a change that needs more takes it from elsewhere, and says so in CONTRIBUTING."""

import ast
import pathlib
import re

import pytest

import hfta_func as hfta

SOURCE = pathlib.Path(hfta.__file__).parent
CONTRIBUTING = pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md"

LARGEST = {"files": 177, "lines": 32_742, "code lines": 19_863}

pytestmark = pytest.mark.skipif(not CONTRIBUTING.exists(), reason="needs a checkout")


def code_lines(source):
    """Lines that are neither blank, nor comment, nor part of a docstring."""
    lines = source.splitlines()
    other = {at for at, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            other |= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines) - len(other)


def budgets():
    """The rows of the table in CONTRIBUTING: rooms, and how many code lines they may have."""
    text = CONTRIBUTING.read_text()
    table = text[text.index("| rooms | code lines, at most |") :].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \|$", table, re.MULTILINE)
    return {tuple(re.findall(r"`(\w+)`", rooms)): int(most.replace(",", "")) for rooms, most in rows}


def test_rooms_keep_to_their_budgets():
    counts = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        counts[room] = counts.get(room, 0) + code_lines(path.read_text())
    table = budgets()
    assert sorted(room for rooms in table for room in rooms) == sorted(counts)
    over = {rooms: (sum(map(counts.get, rooms)), most) for rooms, most in table.items()}
    assert not {rooms: pair for rooms, pair in over.items() if pair[0] > pair[1]}


def test_the_house_is_small():
    files = [*SOURCE.rglob("*.py")]
    assert len(files) <= LARGEST["files"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= LARGEST["lines"]
    assert sum(budgets().values()) <= LARGEST["code lines"]


def test_what_counts():
    assert code_lines('"""Text\n\nof two."""\n\n# Why.\nx = 1\ndef f():\n    """Text."""\n    return """a\nb"""\n') == 4
