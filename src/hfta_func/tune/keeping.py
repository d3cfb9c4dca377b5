"""A study in a folder, which is whole at every moment."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import hfta_func as hfta
from hfta_func.files import atomic
from hfta_func.tune.groups import Block

if TYPE_CHECKING:
    from hfta_func.tune.study import Study

_INDEX = "study.json"
_STATE = re.compile("members-[0-9a-f]{32}[.]safetensors")


class Keeping:
    """Writes a study after every segment: first new states, then the index that names them; then old states go."""

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

    def keep(self, study: Study) -> None:
        """Write what has changed."""
        before, self._files = self._files, {}
        groups = []
        for group in study.population.groups:
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
            "events": study.asking.events,
            "trajectory": study.trajectory,
            "trials": [dataclasses.asdict(trial) for trial in study.trials],
            "members": [dataclasses.asdict(member) for member in study.population.members],
            "last": study.population.last,
            "groups": groups,
        }
        with atomic.replacing(self._path(_INDEX)) as file:
            file.write(json.dumps(index).encode())
        self._remove_all_but({name for _, name in self._files.values()})

    def restore(self, study: Study, replay: Callable[[], None]) -> None:
        """Read a study that was broken off, if there is one.

        Raises:
            ValueError: if the folder holds a study that was asked for in other words.
        """
        if not os.path.exists(self._path(_INDEX)):
            return
        with open(self._path(_INDEX), "rb") as file:
            index = json.loads(file.read())
        for name, now in self._about.items():
            if index["about"].get(name) != now:
                raise ValueError(
                    f"{self._folder} holds a study whose {name} is {index['about'].get(name)}, not {now}; pass another "
                    f"folder as resume, or the same arguments"
                )
        study.asking.replay(index["events"])
        study.restore(index["trials"], index["trajectory"])
        study.population.restore(index["members"], index["last"])
        for held in index["groups"]:
            group = study.population.group(tuple(held["fixed"]))
            for block in held["blocks"]:
                numbers = tuple(block["members"])
                path = self._path(block["file"])
                configs = {number: study.population.members[number].config for number in numbers}
                group.make_like(configs, lambda like, path=path: hfta.load(path, like))
                self._files[id(group.blocks[-1])] = group.blocks[-1], block["file"]
            group.limit = held["limit"]
        self._remove_all_but({name for _, name in self._files.values()})
        replay()

    def _remove_all_but(self, kept: set[str]) -> None:
        """Remove states that are not needed any more, and those that were written when the study was broken off."""
        for name in os.listdir(self._folder):
            if _STATE.fullmatch(name) and name not in kept:
                os.remove(self._path(name))
