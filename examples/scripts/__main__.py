"""How many lines of each script a move to arrays wrote anew, and how many went: ``python -m examples.scripts``.

A line that only moved to another depth is neither.
"""

from __future__ import annotations

import difflib
import pathlib

FOLDER = pathlib.Path(__file__).parent


def changes(kind: str) -> tuple[int, int]:
    """The lines written and those gone of one script."""
    before, after = (
        [line.strip() for line in (FOLDER / kind / f"{name}.py").read_text().splitlines() if line.strip()]
        for name in ("before", "after")
    )
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    apart = [code for code in codes if code[0] != "equal"]
    return sum(end - start for *_, start, end in apart), sum(end - start for _, start, end, *_ in apart)


if __name__ == "__main__":
    print("script            written  gone")
    for path in sorted(FOLDER.glob("*/before.py")):
        written, gone = changes(path.parent.name)
        print(f"{path.parent.name:16}  {written:7}  {gone:4}")
