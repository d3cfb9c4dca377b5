"""Arrays as trials of Ray Tune, for scripts that use it already."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hfta_func as hfta

_FILE = "array.safetensors"


def trainable(build: Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], Any]) -> type:
    """A ``ray.tune.Trainable`` whose trials are arrays, for a ``ray.tune.Tuner``.

    A list in a trial's config has one value per member, all lists of one length; all members share the other values. Every
    step trains an epoch and reports, for each metric with a value per member, its mean under the metric's name,
    ``<name>_min``, ``<name>_max``, and the members' values as the list ``<name>_members``. Checkpoints hold the state, and a
    trial that is paused, perturbed or restored goes on with its next epoch of the data.

    Args:
        build: ``build(fixed, members)`` returns a ``tune.Array``, as for ``hfta_func.tune.run``; ``members`` are the lists.

    Raises:
        ImportError: if Ray Tune is not installed.

    Example:
        .. code-block:: python

            space = {"width": ray.tune.choice([64, 128]), "lr": [1e-3, 3e-3, 1e-2], "seed": [0, 0, 0]}
            tuner = ray.tune.Tuner(cluster.trainable(build), param_space=space, tune_config=...)
    """
    try:
        base: Any = importlib.import_module("ray.tune").Trainable
    except ImportError as error:
        raise ImportError("this needs Ray Tune, which is not installed; pip install 'ray[tune]'") from error

    class Trainable(base):
        """Trains an array, an epoch per step."""

        def setup(self, config: dict[str, Any]) -> None:
            members = {name: value for name, value in config.items() if isinstance(value, list)}
            sizes = {name: len(value) for name, value in members.items()}
            if not sizes or len({*sizes.values()}) > 1 or 0 in sizes.values():
                cure = "give each name that members differ in a list of one value per member"
                raise ValueError(f"the config has lists of lengths {sizes}; {cure}")
            self._array = build({name: value for name, value in config.items() if name not in members}, members)
            self._state = self._array.state
            self._done = 0

        def step(self) -> dict[str, Any]:
            array = self._array
            if isinstance(array.loader, hfta.ArrayLoader):
                # The trial's next epoch, whatever the loader has dealt before.
                array.loader.load_state_dict({"epoch": self._done, "batches": 0})
            self._state, history = hfta.fit(
                *(array.step, self._state, array.loader), epochs=1, evaluate=array.evaluate, progress=False
            )
            self._done += 1
            report: dict[str, Any] = {}
            for name, values in (history.epochs[-1] if history.epochs else {}).items():
                if values.dim() == 1:
                    report[name] = float(values.double().mean())
                    report[f"{name}_min"], report[f"{name}_max"] = float(values.min()), float(values.max())
                    report[f"{name}_members"] = values.tolist()
            return report

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            hfta.save(self._state, os.path.join(checkpoint_dir, _FILE), metadata={"epochs": self._done})

        def load_checkpoint(self, checkpoint: Any) -> None:
            path = os.path.join(checkpoint, _FILE)
            self._state = hfta.load(path, like=self._array.state)
            self._done = hfta.files.read_metadata(path)["metadata"]["epochs"]

    Trainable.__name__ = Trainable.__qualname__ = getattr(build, "__name__", "array")
    return Trainable
