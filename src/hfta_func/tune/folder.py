"""Members in a folder, which is whole at every moment."""

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
from hfta_func.tune.groups import Block

_INDEX = "members.json"
_STATE = re.compile("members-[0-9a-f]{32}[.]safetensors")


class Keeping:
    """Writes members, as often as they change: first new states, then the index that names them; then old states go."""

    def __init__(self, folder: Any, about: Mapping[str, Any]):
        self._folder = os.fspath(folder)
        self._about = json.loads(json.dumps(about))
        self._files: dict[int, tuple[Block, str]] = {}

    def __enter__(self) -> Keeping:
        os.makedirs(self._folder, exist_ok=True)
        self._held = atomic.holding(self._path(_INDEX))
        self._held.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def keep(self, population: Any, **more: Any) -> None:
        """Write what has changed of a population, and ``more`` that JSON can hold."""
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
            groups.append({"fixed": list(group.fixed.values()), "limit": group.limit, "blocks": blocks})
        index = {
            "about": self._about,
            "members": [dataclasses.asdict(member) for member in population.members],
            "last": population.last,
            "groups": groups,
            **more,
        }
        with atomic.replacing(self._path(_INDEX)) as file:
            file.write(json.dumps(index).encode())
        self._remove_all_but({name for _, name in self._files.values()})

    def restore(self, population: Any) -> dict[str, Any] | None:
        """Read what was written to an empty population; returns the rest of the index, or None if there is nothing.

        Raises:
            ValueError: if the folder holds what was asked for in other words.
        """
        if not os.path.exists(self._path(_INDEX)):
            return None
        with open(self._path(_INDEX), "rb") as file:
            index = json.loads(file.read())
        for name, now in self._about.items():
            if index["about"].get(name) != now:
                raise ValueError(
                    f"{self._folder} holds a study whose {name} is {index['about'].get(name)}, not {now}; pass another "
                    f"folder, or the same arguments"
                )
        population.restore(index["members"], index["last"])
        for held in index["groups"]:
            group = population.group(population.key_of(held["fixed"]))
            for block in held["blocks"]:
                numbers = tuple(block["members"])
                path = self._path(block["file"])
                configs = {number: population.members[number].config for number in numbers}
                group.make_like(configs, lambda like, path=path: hfta.load(path, like))
                self._files[id(group.blocks[-1])] = group.blocks[-1], block["file"]
            group.limit = held["limit"]
        self._remove_all_but({name for _, name in self._files.values()})
        return index

    def _remove_all_but(self, kept: set[str]) -> None:
        """Remove states that are not needed any more, and those that were written when the study was broken off."""
        for name in os.listdir(self._folder):
            if _STATE.fullmatch(name) and name not in kept:
                os.remove(self._path(name))
