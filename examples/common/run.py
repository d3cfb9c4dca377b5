"""From a command line to a table, a picture and a last line with the quality of every member."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.common.errors import BadInput, Interrupted, is_out_of_memory
from examples.common.flags import Array, Flags, option, parse
from examples.common.task import BESIDE, Metrics, Outcome, Task, find_device, numbers, save

Train = Callable[[Any, Path | None], Outcome]


def run_task(
    name: str, argv: Sequence[str] | None, flags: type[Flags], make: Callable[[Any], Task], about: str | None
) -> int:
    """An example that is a :class:`Task`; returns the exit status."""

    def train(way: str) -> Train:
        # Without --hfta the package is not imported.
        return lambda flags, keep: importlib.import_module(f"examples.common.{way}").train(make(flags), flags, keep)

    return run(name, argv, flags, train("fused"), train("solo"), about)


def run(name: str, argv: Sequence[str] | None, flags: type[Flags], array: Train, solo: Train, about: str | None) -> int:
    """Train what the command line asks for, as arrays or one member after another; returns the exit status.

    Args:
        name: What files are named after.
        argv: The command line, or None for that of the process.
        flags: The flags that the example takes.
        array: Trains an array.
        solo: Trains one member by itself.
        about: The text of ``--help``.
    """
    try:
        arrays = parse(flags, argv, about)
        _check(arrays[0].flags)
        return _run(name, arrays, array, solo)
    except (BadInput, ImportError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def _check(shared: Flags) -> None:
    """Raise errors now that would otherwise come only after training."""
    find_device(shared.device)
    if shared.resume and shared.save is None:
        raise BadInput("--resume needs --save DIR, the folder that holds the run")
    for package in ("hfta_func", "matplotlib", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"the picture needs {package}, which is not installed; pip install 'hfta_func[examples]'")


def _run(name: str, arrays: list[Array], array: Train, solo: Train) -> int:
    shared, before = arrays[0].flags, arrays[0].flags.apart()
    if not shared.hfta:
        arrays = [Array([number], flags.member(i)) for members, flags in arrays for i, number in enumerate(members)]
    last: dict[int, Metrics] = {}
    rows: list[dict[str, Any]] = []
    try:
        for members, flags in arrays:
            if flags.compile and flags.apart() != before:
                # The compiler keeps only a limited number of versions of one function.
                torch.compiler.reset()
            before = flags.apart()
            try:
                outcome = _train(name, array if flags.hfta else solo, members, flags)
            except Interrupted as error:
                rows += _rows(error.history, {}, members, flags)
                raise
            rows += _rows(outcome.history, outcome.last, members, flags)
            last |= {number: {k: v[i] for k, v in outcome.last.items()} for i, number in enumerate(members)}
            if flags.save is not None:
                for kind, models in outcome.models.items():
                    for member, model in zip(members, models, strict=True):
                        save(model.state_dict(), flags.save / f"{name}-{kind}-{member}.pt")
        table = _write(rows, shared.out / f"{name}.csv")
        picture = _draw(rows, shared.out / f"{name}.png")
    except KeyboardInterrupt:
        kept = f"; the epochs that are finished: {_write(rows, shared.out / f'{name}.csv')}" if rows else ""
        print(f"{name}: interrupted{kept}{'; --resume goes on' if shared.save else ''}", file=sys.stderr)
        return 130
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
        keep = flags.save / f"{name}-{'array' if flags.hfta else 'solo'}-{_ranges(members)}.run"
        if not flags.resume:
            keep.unlink(missing_ok=True)
        _check_resumed(flags, keep)
    try:
        return train(flags, keep)
    except (RuntimeError, ValueError, MemoryError) as error:
        if "Expected more than 1 value per channel" in str(error):
            raise BadInput(
                f"--batch-size {flags.batch_size}{'' if flags.limit is None else f' --limit {flags.limit}'}: batch "
                f"normalisation cannot train on one value per channel; have 2 samples in a batch at least"
            ) from None
        if not is_out_of_memory(error):
            raise
        raise BadInput(
            f"out of memory with M = {len(members)} models at once and batches of {flags.batch_size}; "
            f"hfta.plan(step, state, batch) finds how many fit"
        ) from None


def _ranges(members: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2+5``, to keep file names short."""
    runs: list[list[int]] = []
    for member in members:
        if runs and member == runs[-1][1] + 1:
            runs[-1][1] = member
        else:
            runs.append([member, member])
    return "+".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _check_resumed(flags: Flags, keep: Path) -> None:
    """Refuse to resume a run that was started with other flags, which are in a file beside it."""
    beside, given = keep.with_suffix(".json"), json.dumps(flags.lasting())
    if not keep.exists():
        beside.write_text(given)
        return
    try:
        begun = dict(json.loads(beside.read_text()))
    except (OSError, ValueError, TypeError):
        raise BadInput(
            f"{beside}, which tells the flags of {keep}, is missing or damaged; remove both to begin anew"
        ) from None
    for name, value in json.loads(given).items():
        if value != begun.get(name):
            now, then = (" ".join(map(str, v)) if isinstance(v, list) else v for v in (value, begun.get(name)))
            raise BadInput(
                f"{option(name)} is {now}, but {keep} was begun with {then}; give that again, or remove the file to "
                f"begin anew"
            )


def _rows(history: list[Metrics], last: Metrics, members: list[int], flags: Flags) -> list[dict[str, Any]]:
    """One row per epoch and member; a member's last row includes its last test metrics."""
    rows = []
    for position, member in enumerate(members):
        hyperparams = {name: values[position] for name, values in flags.per_model().items()}
        head = {
            "member": member,
            "seed": hyperparams.pop("seeds"),
            "how": "array" if flags.hfta else "solo",
            "models": len(members),
        }
        head |= {**flags.apart(), **hyperparams}
        epochs = [
            {name: float(values[position]) for name, values in metrics.items() if values.dim() == 1}
            for metrics in history
        ]
        if epochs:
            epochs[-1] |= {name: float(values[position]) for name, values in last.items()}
        rows += [{**head, "epoch": number, **metrics} for number, metrics in enumerate(epochs, 1)]
    return rows


def _write(rows: list[dict[str, Any]], path: Path) -> Path:
    rows.sort(key=lambda row: (row["member"], row["epoch"]))
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
