"""The names on each page of ``docs/reference`` as a table, for readers of the files; as a script, it writes them."""

import importlib
import inspect
import pathlib
import re

from cases import FUNCTIONS

REFERENCE = pathlib.Path(__file__).parents[2] / "docs" / "reference"
BEGIN, END = "<!-- names, made by python tests/helpers/reference_names.py -->", "<!-- end -->"


def names_of(text):
    """Full names of what a page describes, in its order."""
    pattern = r"^\.\. (auto(?:function|class|exception|data|module)|py:data):: ([\w.]+)$|<!-- every optimizer -->"
    for found in re.finditer(pattern, text, re.MULTILINE):
        if found[1] is None:
            yield from (f"hfta_func.{name}" for name in sorted(FUNCTIONS))
        elif found[1] != "automodule":
            yield found[2]
        else:
            module = importlib.import_module(found[2])
            members = vars(module).items()
            yield from (
                f"{found[2]}.{name}"
                for name, value in members
                if getattr(value, "__module__", "") == found[2] and not name.startswith("_") and value.__doc__
            )


def summary(name):
    """The first line of a docstring as Markdown."""
    module, member = name.rsplit(".", 1)
    value = getattr(importlib.import_module(module), member)
    own = inspect.isroutine(value) or inspect.isclass(value)
    line = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ") if own else "a type"
    line = re.sub(r":\w+:`~?(?:[^`<]* <)?([^`>]*)>?`", r"`\1`", line).replace("``", "`")
    return re.sub(r"`hfta_func\.", "`", line).replace("|", r"\|")


def table(text):
    """The rows of a page."""
    shown = {name: name.removeprefix("hfta_func.").removeprefix("step.") for name in names_of(text)}
    rows = [f"| `{shown[name]}` | {summary(name)} |" for name in shown]
    return "\n".join([BEGIN, "", "| name | what it is |", "| --- | --- |", *rows, "", END])


def written(text):
    """A page with its table, below the first paragraph of text."""
    if BEGIN in text:
        head, rest = text.split(BEGIN, 1)
        return head + table(text) + rest.split(END, 1)[1]
    at = min(text.index(mark) for mark in ("```{eval-rst}", "\n## ", "<!-- every") if mark in text)
    return text[:at].rstrip() + "\n\n" + table(text) + "\n\n" + text[at:].lstrip("\n")


def overview(index):
    """The index with all names on one table: where each page describes it, and what it is."""
    rows = {}
    for path in sorted(REFERENCE.glob("*.md")):
        for name in names_of(path.read_text()):
            short = name.removeprefix("hfta_func.")
            room = short.rpartition(".")[0] or "hfta_func"
            rows[room != "hfta_func", room, short] = f"| [`{short}`]({path.name}) | {summary(name)} |"
    listed = [rows[key] for key in sorted(rows, key=str)]
    head, rest = index.split(BEGIN, 1)
    return (
        "\n".join([head + BEGIN, "", "| name | what it is |", "| --- | --- |", *listed, "", END])
        + rest.split(END, 1)[1]
    )


if __name__ == "__main__":
    for path in REFERENCE.glob("*.md"):
        text = path.read_text()
        path.write_text(overview(text) if path.stem == "index" else written(text))
