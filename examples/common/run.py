"""From a command line to a table, a picture and a last line with the quality of every member."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.common.errors import BadInput, is_out_of_memory
from examples.common.flags import Array, Flags, parse
from examples.common.task import BESIDE, Metrics, Outcome, Task, find_device, numbers

Train = Callable[[Any, Path | None], Outcome]


def run_task(
    name: str, argv: Sequence[str] | None, flags: type[Flags], make: Callable[[Any], Task], about: str | None
) -> int:
    """An example that is a :class:`Task`; returns the exit status."""

    def train(way: str) -> Train:
        # Without --hfta nothing of the package is imported.
        return lambda flags, keep: importlib.import_module(f"examples.common.{way}").train(make(flags), flags, keep)

    return run(name, argv, flags, train("array"), train("solo"), about)


def run(name: str, argv: Sequence[str] | None, flags: type[Flags], array: Train, solo: Train, about: str | None) -> int:
    """Train what the command line asks for, as arrays or one member after another; returns the exit status.

    Args:
        name: What files are named after.
        argv: The command line, or None for the process's own.
        flags: The flags that the example takes.
        array: Trains an array.
        solo: Trains one member by itself.
        about: The text of ``--help``.
    """
    try:
        arrays = parse(flags, argv, about)
        shared = arrays[0].flags
        find_device(shared.device)
        if shared.resume and shared.save is None:
            raise BadInput("--resume needs --save DIR, the folder that holds the run")
        if not shared.hfta:
            arrays = [Array([number], flags.member(i)) for members, flags in arrays for i, number in enumerate(members)]
        last: dict[int, Metrics] = {}
        rows: list[dict[str, Any]] = []
        for members, own in arrays:
            outcome = _train(name, array if own.hfta else solo, members, own)
            rows += [row for place in range(len(members)) for row in _rows(outcome, members, own, place)]
            last |= {number: {k: v[i] for k, v in outcome.last.items()} for i, number in enumerate(members)}
        rows.sort(key=lambda row: (row["member"], row["epoch"]))
        table = _write(rows, shared.out / f"{name}.csv")
        picture = _draw(rows, shared.out / f"{name}.png")
    except (BadInput, ImportError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    print(f"Table: {table}\nPicture: {picture}")
    for metric in last[0]:
        print(f"Final {metric}: {numbers(last[member][metric] for member in sorted(last))}")
    return 0


def _train(name: str, train: Train, members: list[int], flags: Flags) -> Outcome:
    settings = ", ".join(f"{name} {' '.join(map(str, values))}" for name, values in flags.per_model().items())
    numbered = " ".join(map(str, members))
    print(f"{'Array of members' if flags.hfta else 'Plain PyTorch, member'} {numbered}: {settings}", flush=True)
    keep = None
    if flags.save is not None:
        flags.save.mkdir(parents=True, exist_ok=True)
        keep = flags.save / f"{name}-{'array' if flags.hfta else 'solo'}-{numbered.replace(' ', '-')}.run"
        if not flags.resume:
            keep.unlink(missing_ok=True)
    try:
        outcome = train(flags, keep)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise BadInput(
            f"out of memory with M = {len(members)} models at once and batches of {flags.batch_size}; "
            f"hfta.plan(step, state, batch) finds how many fit"
        ) from None
    if flags.save is not None:
        for kind, models in outcome.models.items():
            for member, model in zip(members, models, strict=True):
                torch.save(model.state_dict(), flags.save / f"{name}-{kind}-{member}.pt")
    return outcome


def _rows(outcome: Outcome, members: list[int], flags: Flags, place: int) -> list[dict[str, Any]]:
    """One row for each epoch of a member; of the last one with its test."""
    knobs = {name: values[place] for name, values in flags.per_model().items()}
    head = {
        "member": members[place],
        "seed": knobs.pop("seeds"),
        "how": "array" if flags.hfta else "solo",
        "models": len(members),
    }
    head |= {**flags.apart(), **knobs}
    epochs = [
        {name: float(values[place]) for name, values in metrics.items() if values.dim() == 1}
        for metrics in outcome.history
    ]
    epochs[-1] |= {name: float(values[place]) for name, values in outcome.last.items()}
    return [{**head, "epoch": number, **metrics} for number, metrics in enumerate(epochs, 1)]


def _write(rows: list[dict[str, Any]], path: Path) -> Path:
    columns = dict.fromkeys(column for row in rows for column in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, [*columns])
        table.writeheader()
        table.writerows(rows)
    return path


def _draw(rows: list[dict[str, Any]], path: Path) -> Path:
    """Curves of all metrics over epochs, a colour for each setting of the flags that differ."""
    pandas = importlib.import_module("pandas")
    bands = importlib.import_module("hfta_func.plot").bands
    figure = importlib.import_module("matplotlib.figure").Figure
    frame = pandas.DataFrame(rows)
    metrics = [*frame.columns[frame.columns.get_loc("epoch") + 1 :].difference(BESIDE, sort=False)]
    varied = [name for name in frame.columns[4 : frame.columns.get_loc("epoch")] if frame[name].nunique() > 1]
    by = ", ".join(varied) or None
    if len(varied) > 1:
        frame[by] = frame[varied].astype(str).agg(", ".join, axis=1)
    drawing = figure(figsize=(4.6 * len(metrics), 3.6), layout="constrained")
    for ax, metric in zip(drawing.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        bands(frame[frame[metric].notna()], metric, by=by, ax=ax)
    drawing.savefig(path, dpi=150)
    return path
