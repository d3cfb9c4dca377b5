"""README's numbers: the output of its first example beside that of the loop, and ratios of committed results.

``python -m benchmarks readme`` runs the example and its loop in turns and writes what they print.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import RESULTS, ROOT
from benchmarks._tables import COMPILED, EAGER, NAMES, about, counts, mark, markdown, ratio, shown, times
from benchmarks.modes import IN_FIT, PER_CORE, PROCESSES, SERIAL
from benchmarks.workloads import WORKLOADS

README = ROOT / "README.md"
BEGIN = "<!-- speed: benchmarks report -->"
ALTERNATIVES = "<!-- alternatives: benchmarks report -->"
PICTURE = "<!-- curve: benchmarks report -->"
CURVE = """![Milliseconds of a training step for one member, over 1 to 1,024 models, log scales](docs/curve.png)

*Time of a step for one member; the dotted line is the least that products and memory traffic take on this machine.*"""
EXAMPLE = "<!-- example: benchmarks readme -->"
END = "<!-- end -->"
SIZES = {"small": "cpu-small", "published size": "cpu-paper"}
ROWS = {
    "mlp": "MLP",
    "lenet": "LeNet-5",
    "cifar": "CIFAR-10 tutorial",
    "narrow-resnet": "ResNet of width 12",
    "sensors": "1-D, 9 channels",
    "resnet": "ResNet-18",
    "transformer": "Transformer",
}
COLUMNS = {
    "stock `vmap`, compiled": ["stock vmap compiled"],
    "array in `fit`": [IN_FIT],
    "array, compiled": ["array compiled"],
}


def headline(results: dict[str, dict[str, Any]], models: str = "16") -> str:
    """The table of README: small workloads, the loop is 1."""
    found = {name: results[SIZES["small"]][name][models]["rows"] for name in ROWS}
    lines = [[title, *(times(ratio(found[name], mode)) for mode in COLUMNS.values())] for name, title in ROWS.items()]
    where = found["mlp"][SERIAL]["machine"]
    machine = f"{where['cores']} cores of an {where['cpu']}, PyTorch {where['torch'].split('+')[0]}"
    return f"{markdown([f'M = {models}, small', *COLUMNS], lines)}\n\nThe loop over the models is 1; {machine}."


def alternatives(results: dict[str, dict[str, Any]], models: str = "16") -> str:
    """README's lines on what else one could run, each with its ratio of the same sweep."""
    small = results[SIZES["small"]]

    def over(name: str, *modes: str) -> str:
        return times(ratio(small[name][models]["rows"], modes))

    lines = (
        f"a **loop**: an array of {models} MLPs is {over('mlp', IN_FIT)} as fast. Better if code differs.",
        f"**processes**: {over('mlp', PROCESSES, PER_CORE)}. Better for scripts left as they are.",
        f"stock **`vmap`**: {over('mlp', 'stock vmap')} uncompiled, without noise, buffers and optimizers per member. "
        f"Compiled DCGANs: {over('dcgan', 'stock vmap compiled')} to {over('dcgan', 'array compiled')}. "
        "Better for functions without a module.",
        f"**JAX**: {over('mlp', 'JAX')} on the MLP, {over('resnet', 'JAX')} on the ResNet. Better for models written in it, "
        f"and agents.",
    )
    return "\n".join(f"- {line[0].upper()}{line[1:]}" for line in lines)


def example(rounds: int) -> str:
    """What the example prints in the round of its median time, and the loop's median time, in turns."""
    found = [[_printed(name) for name in ("first", "first_loop")] for _ in range(rounds)]
    array, loop = (sorted(column, key=_seconds)[rounds // 2] for column in zip(*found, strict=True))
    return f"```text\n{array}\n```\n\nThe [ordinary loop](examples/jobs/first_loop.py) takes {_seconds(loop):.1f} s."


def _printed(name: str) -> str:
    command = [sys.executable, "-m", f"examples.jobs.{name}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _seconds(text: str) -> float:
    return float(re.findall(r"([\d.]+) s$", text.splitlines()[0])[0])


def replaced(page: str, section: str, begin: str) -> str:
    """The page with another section after this mark."""
    return re.sub(f"(?s){re.escape(begin)}.*?{re.escape(END)}", lambda _: f"{begin}\n\n{section}\n\n{END}", page)


def written(page: str, results: dict[str, dict[str, Any]], folder: Path = RESULTS) -> str:
    """README with the ratios of the results, and the picture of the curve once that was measured."""
    shown = CURVE if (folder / "curve-cpu.json").exists() else ""
    page = replaced(page, shown, PICTURE)
    return replaced(replaced(page, headline(results), BEGIN), alternatives(results), ALTERNATIVES)


def main(argv: Sequence[str] = ()) -> int:
    """Run the example and the loop, and write what they print into README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each runs")
    text = example(parser.parse_args(argv).rounds)
    README.write_text(replaced(README.read_text(), text, EXAMPLE))
    print(text)
    return 0


def speed(results: dict[str, dict[str, Any]], columns: dict[str, str] = SIZES, every: bool = False) -> str:
    """The table of the benchmarks page, arrays against the fastest alternative at the same M, and how it was measured.

    Args:
        results: The sweeps by name.
        columns: The name of the results of each size.
        every: Whether a workload also has rows for smaller M, if more or other alternatives were measured there.
    """
    found = {size: results[key] for size, key in columns.items() if key in results}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for size, own in found.items():
        for name in WORKLOADS:
            for count in shown(own[name])[: None if every else 1] if name in own else ():
                rows.setdefault((name, count), {})[size] = own[name][count]
    parts = [part for both in rows.values() for part in both.values()]
    lines = []
    for name, count in sorted(rows, key=lambda pair: ([*WORKLOADS].index(pair[0]), -int(pair[1]))):
        both = rows[name, count]
        marked = "".join({mark(part, parts) for part in both.values()})
        cells = [cell for size in found for cell in (_cells(both[size]["rows"]) if size in both else [""] * 3)]
        lines.append([WORKLOADS[name].title.removesuffix(" 64-64-64-10") + marked, count, *cells])
    head = [cell for size in found for cell in (f"{size}: eager", "compiled", "best other")]
    return f"{markdown(['workload', 'M', *head], lines)}\n\n{about(parts)}"


def _cells(rows: dict[str, Any]) -> list[str]:
    """The cells of the eager and the compiled array, and of the fastest alternative, including the loop itself."""
    others = [mode for mode in NAMES if counts(mode, rows.get(mode, {}))]
    best = max(others, key=lambda mode: rows[mode]["ratio"], default=None)
    ours = [times(ratio(rows, mode)) for mode in (EAGER, COMPILED)]
    return [*ours, f"{times(rows[best]['ratio'])} {NAMES[best]}" if best else ""]
