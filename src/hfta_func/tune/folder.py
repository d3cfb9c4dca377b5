"""The folder of a study, which is complete at every moment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hfta_func as hfta
from hfta_func._types import require
from hfta_func.files import atomic
from hfta_func.files.storage import damaged_if_it_raises
from hfta_func.tune.groups import Block, Member, tuples

_INDEX, _JOURNAL = "members.json", "study.journal"
_STATE = re.compile("members-[0-9a-f]{32}[.]safetensors")


class _Journal:
    """The file of a ``JournalFileBackend`` of Optuna's, for a single writer, without its lock, which a kill would leave."""

    def __init__(self, path: str):
        self._path, self._lines = path, list[bytes]()
        if os.path.exists(path):
            with open(path, "r+b") as file:
                self._lines = file.readlines()
                if self._lines and not self._lines[-1].endswith(b"\n"):
                    # The part of a line that a kill has left.
                    file.truncate(file.tell() - len(self._lines.pop()))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        with damaged_if_it_raises(self._path):
            yield from map(json.loads, self._lines[log_number_from:])

    def append_logs(self, logs: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs]
        with open(self._path, "ab") as file:
            file.writelines(lines)
        self._lines += lines


class StudyFolder:
    """Writes members when they change: first new states, then the index that names them; then it removes old states.

    A folder is restored into a population of the same non-fusible names.
    """

    def __init__(self, folder: Any):
        self._folder = os.fspath(folder)
        self._files: set[str] = set()

    def storage(self) -> Any:
        """A storage of Optuna's in the folder, for its trials."""
        return require("optuna", "tune").storages.JournalStorage(_Journal(self._path(_JOURNAL)))

    @contextlib.contextmanager
    def held(self) -> Iterator[StudyFolder]:
        """The folder, held against other processes meanwhile."""
        os.makedirs(self._folder, exist_ok=True)
        with atomic.holding(self._path(_INDEX)):
            yield self

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def save(self, population: Any, **more: Any) -> None:
        """Write what has changed of a population, and ``more``, which is JSON data."""
        groups = []
        for group in population.groups:
            for block in group.blocks:
                if block.file not in self._files:
                    hfta.save(block.state, self._path(block.file))
            blocks = [{"file": block.file, "members": block.numbers} for block in group.blocks]
            groups.append({"limit": group.limit, "blocks": blocks})
        members = [dataclasses.asdict(member) for member in population.members]
        index = {"about": {"nonfusible": population.nonfusible}, "members": members, "last": population.last}
        if os.path.exists(self._path(_JOURNAL)):
            # The trials of these members must be there after the machine fails, too.
            with open(self._path(_JOURNAL), "ab") as journal:
                os.fsync(journal.fileno())
        with atomic.replacing(self._path(_INDEX)) as file:
            file.write(json.dumps({**index, "groups": groups, **more}).encode())
        self._remove_old_states(groups)

    def restore(self, population: Any) -> dict[str, Any] | None:
        """Read the members into an empty population; returns the index, or None if the folder has none."""
        if not os.path.exists(self._path(_INDEX)):
            return None
        with open(self._path(_INDEX), "rb") as file, damaged_if_it_raises(file.name):
            index = json.loads(file.read())
        population.last = tuple(index["last"])
        for saved in index["members"]:
            # JSON has no tuples.
            changed: dict[str, Any] = {"config": {name: tuples(value) for name, value in saved["config"].items()}}
            changed["parents"] = [*tuples(saved["parents"])]
            population.members.append(Member(**saved | changed))
        for saved in index["groups"]:
            for block in saved["blocks"]:
                members = [population.members[number] for number in block["members"]]
                group = population.group_of(members[0])
                made = group.checked(members, group.built(members))
                state = hfta.load(self._path(block["file"]), made.state)
                # Another name, of an index that somebody has edited, is read and not written.
                file = [block["file"]] if _STATE.fullmatch(block["file"]) else []
                group.blocks.append(Block(made.numbers, state, *file))
                group.limit = saved["limit"]
        self._remove_old_states(index["groups"])
        return index

    def _remove_old_states(self, groups: Any) -> None:
        """Remove states that the index does not name, such as those of a save that was broken off."""
        self._files = {block["file"] for group in groups for block in group["blocks"]}
        for name in os.listdir(self._folder):
            if _STATE.fullmatch(name) and name not in self._files:
                os.remove(self._path(name))
