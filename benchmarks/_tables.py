"""What tables and pictures of the sweeps share: which rows count, how they are written, and what is said about them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from benchmarks import _code
from benchmarks.modes import IN_FIT, MANY, MODES, ONE_THREAD, PER_CORE, PROCESSES, REPLAYED, SERIAL, WORKERS
from benchmarks.sweep import UNLIKE
from hfta_func.plot import COLORS

TIMES, DAGGER, WIDTH = "\N{MULTIPLICATION SIGN}", "\N{DAGGER}", 128
ALL_OLDER = " The code may have changed since."
SOME_OLDER = f" Rows with {DAGGER} were measured with code that may have changed since."
ARRAY = [mode for mode in MODES if mode.startswith("array")]
EAGER, COMPILED = ["array", "array auto", IN_FIT, WORKERS[0]], ["array compiled", REPLAYED[1], MANY, WORKERS[1]]
"""The ways to train an array of which tables show the best."""
STOCK = [mode for mode in MODES if mode.startswith("stock")]
LOOPS = [ONE_THREAD, "serial foreach", "serial, default optimizer", "serial, default allocator"]
PEERS = ["serial compiled", REPLAYED[0], PROCESSES, PER_CORE, "HFTA", "JAX"]
"""Modes that were measured at few sizes."""
NAMES = {
    SERIAL: "the loop",
    ONE_THREAD: "the loop on one thread",
    "serial foreach": "the loop, `foreach`",
    "serial, default optimizer": "the loop, default optimizer",
    "serial, default allocator": "the loop, default allocator",
    "serial compiled": "the loop, compiled",
    REPLAYED[0]: "the loop, CUDA graphs",
    PROCESSES: "processes",
    PER_CORE: "processes",
    "stock vmap": "stock `vmap`",
    "stock vmap compiled": "stock `vmap`, compiled",
    "JAX": "JAX",
    "HFTA": "HFTA",
}
"""The alternatives to an array, as tables name them."""
BASES = {
    "fused": "the loop uses fused optimizer kernels, and `foreach` for Adadelta",
    None: "the loop updates one parameter after another, the default of PyTorch on a CPU",
}
STYLES = {
    SERIAL: ("0.3", "-"),
    "array": (COLORS[0], "-"),
    "array compiled": (COLORS[0], "--"),
    REPLAYED[1]: ("navy", "--"),
    "array auto": (COLORS[0], "-."),
    IN_FIT: ("teal", "-"),
    MANY: ("black", ":"),
    WORKERS[0]: ("black", "-"),
    WORKERS[1]: ("black", "--"),
    "stock vmap": (COLORS[1], "-"),
    "stock vmap compiled": (COLORS[1], "--"),
    PROCESSES: (COLORS[2], "-"),
    PER_CORE: (COLORS[2], "--"),
    "serial compiled": (COLORS[3], "--"),
    REPLAYED[0]: (COLORS[3], ":"),
    ONE_THREAD: (COLORS[4], "--"),
    "serial, default allocator": (COLORS[4], "-"),
    "dense": ("0.6", "-"),
    "JAX": (COLORS[5], "-"),
    "HFTA": ("saddlebrown", "-"),
}


def ratio(rows: dict[str, Any], modes: Collection[str]) -> float | None:
    """The best of these modes that was measured and agreed with the loop."""
    return max((rows[mode]["ratio"] for mode in modes if counts(mode, rows.get(mode, {}))), default=None)


def counts(mode: str, row: dict[str, Any]) -> bool:
    """Whether a row was measured and agreed with the loop."""
    return "ratio" in row and (mode in (SERIAL, *UNLIKE) or "alike" in row)


def shown(sizes: dict[str, Any]) -> list[str]:
    """The largest M of a workload, and all at which a kind of :data:`PEERS` was measured that no larger array was held to.

    Where as many kinds were measured as at any larger M, they may stand otherwise, so it is shown as well.
    """
    kinds = {
        count: {NAMES[mode] for mode in PEERS if counts(mode, part["rows"].get(mode, {}))}
        for count, part in sizes.items()
    }
    found, known = [], set[str]()
    for count in sorted(sizes, key=int, reverse=True):
        if not found or (kinds[count] and kinds[count] >= known) or kinds[count] - known:
            found.append(count)
            known |= kinds[count]
    return found


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of the columns that have something in them."""
    shown = [i for i in range(len(head)) if any(line[i] for line in lines)]
    # Numbers are aligned to the right, where the documentation keeps them on one line.
    under = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line[i] for i in shown) + " |" for line in (head, under, *lines))


def times(value: float | None) -> str:
    """A ratio."""
    return "" if value is None else f"{value:.1f}{TIMES}" if value >= 1.95 else f"{value:.2f}{TIMES}"


def measured(parts: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """All rows of some workloads at some M, by mode."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for mode, row in part["rows"].items():
            if counts(mode, row):
                rows.setdefault(mode, []).append(row)
    return rows


def is_older(part: dict[str, Any]) -> bool:
    """Whether any row of a workload at some M was measured with other code than there is now."""
    return any(_code.is_older(mode, row) for mode, rows in measured([part]).items() for row in rows)


def unmarked(page: str) -> str:
    """A page without layout and without what says which rows are older than the code, as the next change of code adds it."""
    text = " ".join(page.split())
    for remark in (ALL_OLDER, SOME_OLDER, f" {DAGGER}"):
        text = text.replace(remark, "")
    return text


def mark(part: dict[str, Any], parts: Sequence[dict[str, Any]]) -> str:
    """The mark of a workload whose rows are older than the code, if other workloads' rows are not."""
    return f" {DAGGER}" if is_older(part) and not all(map(is_older, parts)) else ""


def about(parts: Sequence[dict[str, Any]], machine: str = "") -> str:
    """How figures were measured: rounds and seconds, day, commit and loop, and whether the code has changed since."""
    rows = [row for own in measured(parts).values() for row in own]
    enough = [row["measured"] for row in rows if "measured" in row]
    seconds = f" and {min(enough):.1f} s or more" if len(enough) == len(rows) else ""
    days = _range(sorted({row["machine"]["date"] for row in rows}))
    commits = commits_of(rows)
    if any("commit" not in row for row in rows):
        commits.append("a commit that was not recorded")
    each = f"each ratio is the median of {_range(sorted({row['rounds'] for row in rows}))} rounds{seconds}"
    loops = "; ".join(dict.fromkeys(BASES[part.get("loop")] for part in parts))
    text = f"{machine}{each if machine else each.capitalize()}, measured on {days} at {', '.join(commits)}; {loops}."
    older = [is_older(part) for part in parts]
    if all(older):
        text += ALL_OLDER
    elif any(older):
        text += SOME_OLDER
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def where(stamps: Sequence[dict[str, Any]]) -> str:
    """The machines, days and commits that figures were measured on."""
    machines = [f"{one['cpu']}, {one['cores']} cores, PyTorch {one['torch'].split('+')[0]}" for one in stamps]
    named = f"{'; '.join(dict.fromkeys(machines))}, {_range(sorted({one['date'] for one in stamps}))}"
    commits = commits_of(stamps)
    if commits and not all("commit" in one for one in stamps):
        commits.append("and a commit not recorded")
    return f"{named}, at {', '.join(commits)}." if commits else f"{named}."


def commits_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The commits of rows that name one, and whether the code was changed then."""
    return sorted({row["commit"][:8] + (" with changes" if row["dirty"] else "") for row in rows if "commit" in row})


def _range(values: Sequence[Any]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"
