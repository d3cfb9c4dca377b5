"""The glossary of CONTRIBUTING: names in the source use its words, and none of those that it replaces."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
GLOSSARY = ROOT.joinpath("CONTRIBUTING.md").read_text().split("## Words")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in GLOSSARY.splitlines() if line.startswith("| ")
][2:]
INSTEAD = {word: row[0] for row in ROWS for word in re.findall(r"\w+", row[2])}
INSTEAD |= dict.fromkeys(re.findall(r"`(\w+)`", GLOSSARY.rsplit("A variable", 1)[1]), "what it holds")
FILES = sorted(ROOT.joinpath("src").rglob("*.py"))


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file gives to something, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def parts(name: str) -> set[str]:
    """The words of a name, whether it is written with capitals or underscores."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_a_word_has_one_meaning() -> None:
    words = [word for row in ROWS for word in row[0].split(", ")]
    assert len(words) == len({*words}) >= 20
    assert not {*words} & INSTEAD.keys()


def test_names_are_words_of_the_glossary() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}, line {line}: {name}; say {INSTEAD[word]}, not {word}"
        for path in FILES
        for line, name in names(ast.parse(path.read_text()))
        for word in sorted(parts(name) & INSTEAD.keys())
    ]
    assert not wrong, "\n".join(wrong)
