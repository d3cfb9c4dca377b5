"""The folder of a study, which is complete at every moment."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any

import hfta_func as hfta
from hfta_func.files import atomic
from hfta_func.files.storage import damaged_if_it_raises
from hfta_func.tune.groups import Block

_INDEX = "members.json"
_STATE = re.compile("members-[0-9a-f]{32}[.]safetensors")


class StudyFolder:
    """Writes members when they change: first new states, then the index that names them; then it removes old states.

    A folder is restored only if it was written with the same JSON data ``about``.
    """

    def __init__(self, folder: Any, about: Mapping[str, Any]):
        self._folder = os.fspath(folder)
        self._about = json.loads(json.dumps(about))
        self._files: dict[int, tuple[Block, str]] = {}

    def __enter__(self) -> StudyFolder:
        os.makedirs(self._folder, exist_ok=True)
        self._lock = atomic.holding(self._path(_INDEX))
        self._lock.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def save(self, population: Any, **more: Any) -> None:
        """Write what has changed of a population, and ``more``, which is JSON data."""
        before, self._files = self._files, {}
        groups = []
        for group in population.groups:
            blocks = []
            for block in group.blocks:
                _, name = before.get(id(block)) or (block, f"members-{uuid.uuid4().hex}.safetensors")
                if id(block) not in before:
                    hfta.save(block.state, self._path(name))
                self._files[id(block)] = block, name
                blocks.append({"file": name, "members": block.numbers})
            groups.append({"limit": group.limit, "blocks": blocks})
        members = [dataclasses.asdict(member) for member in population.members]
        index = {"about": self._about, "members": members, "last": population.last, "groups": groups, **more}
        atomic.write(self._path(_INDEX), json.dumps(index).encode())
        self._remove_old_states()

    def restore(self, population: Any) -> dict[str, Any] | None:
        """Read the members into an empty population; returns the index, or None if the folder has none."""
        if not os.path.exists(self._path(_INDEX)):
            return None
        with open(self._path(_INDEX), "rb") as file, damaged_if_it_raises(file.name):
            index = json.loads(file.read())
        for name, now in self._about.items():
            if index["about"].get(name) != now:
                raise ValueError(
                    f"{self._folder} holds a study whose {name} is {index['about'].get(name)}, not {now}; pass another "
                    f"folder, or the same arguments"
                )
        population.restore(index["members"], index["last"])
        for saved in index["groups"]:
            for block in saved["blocks"]:
                path = self._path(block["file"])
                configs = {number: population.members[number].config for number in block["members"]}
                group = population.group_of(population.members[block["members"][0]])
                group.make_like(configs, lambda like, path=path: hfta.load(path, like))
                self._files[id(group.blocks[-1])] = group.blocks[-1], block["file"]
                group.limit = saved["limit"]
        self._remove_old_states()
        return index

    def _remove_old_states(self) -> None:
        """Remove states that the index does not name, such as those of a save that was broken off."""
        names = {name for _, name in self._files.values()}
        for name in os.listdir(self._folder):
            if _STATE.fullmatch(name) and name not in names:
                os.remove(self._path(name))
