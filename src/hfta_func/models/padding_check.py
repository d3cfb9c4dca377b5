"""Finds out by calls what a padded model does for each true size; that it does the same is for the oracle to find out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import first_member, outside_transforms, pytree, unwritten
from hfta_func._types import Params
from hfta_func.calls.padding import Event, Padded, Recorder, Sizes
from hfta_func.calls.routing import routed
from hfta_func.errors import StackError
from hfta_func.models.padding import Padding, Size
from hfta_func.models.sizes import SIZE


class Events:
    """The events of a padded model's calls, by the shapes of inputs.

    Args:
        padding: What the model knows of its sizes.
        numbers: The paths of the numbers that calls take as buffers.
        func: What calls a model.
        call: ``call(params, buffers, inputs, key, recorder)`` calls the padded one.
    """

    def __init__(self, padding: Padding, numbers: Sequence[str], func: Callable[..., Any], call: Callable[..., Any]):
        self.padding, self._numbers, self._func, self._call = padding, numbers, func, call
        self._known: dict[Any, list[Sizes]] = {}
        # Those of the latest call, while a compiler traces, which knows no values.
        self.latest: list[Sizes] = []

    def __call__(
        self, model: nn.Module, params: Params, buffers: Params, inputs: tuple[Any, Any], key: Tensor | None
    ) -> Padded:
        """What computes the results of a member of the size that its buffers tell, for inputs of these shapes.

        Raises:
            StackError: if a true size does not call the same functions.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        known = self._known.get((shapes, str(spec), key is None))
        if known is None:
            with outside_transforms(), torch.random.fork_rng([]):
                parts = [
                    {path: first_member(leaf).detach() for path, leaf in tree.items()} for tree in (params, buffers)
                ]
                given = [first_member(leaf).detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                noise = torch.zeros_like(parts[1][SIZE]) if key is None else first_member(key)
                inputs, whole = pytree.tree_unflatten(given, spec), Recorder()
                self._call(*parts, pytree.tree_map(_copied, inputs), noise, whole)
                alone = [self._alone(model, size, inputs, noise) for size in self.padding.sizes]
                known = _joined(self.padding, whole.events, alone)
            # Without a key nothing draws from one.
            known = [event for event in known if key is not None or event.name not in ("site", "draw")]
            self._known[shapes, str(spec), key is None] = known
        self.latest = known
        return Padded(buffers[SIZE], known)

    def _alone(self, model: nn.Module, size: Size, inputs: tuple[Any, Any], key: Tensor) -> list[Event]:
        """The events of a model of a true size, in the modes of the padded one."""
        alone, recorder = copy.deepcopy(size.model), Recorder()
        for path, inner in size.modules.items():
            alone.get_submodule(inner).training = model.get_submodule(path).training
        for owner, _, name in (number.rpartition(".") for number in self._numbers):
            if owner in size.modules:
                # At a rate of 0 nothing is drawn, but members' rates differ.
                module = alone.get_submodule(size.modules[owner])
                setattr(module, name, getattr(module, name) or 0.5)
        args, kwargs = pytree.tree_map(_copied, inputs)
        mode = routed(key)
        mode.padding = recorder
        with mode, torch.no_grad():
            self._func(alone, *args, **kwargs)
        return recorder.events


def _joined(padding: Padding, whole: list[Event], alone: list[list[Event]]) -> list[Sizes]:
    """The events of all sizes in one, those of the padded model."""
    sizes: list[list[tuple[int, ...] | None]] = [[] for _ in whole]
    for events, size in zip(alone, padding.sizes, strict=True):
        lacks = [f"{path}." for path in padding.optional if path not in size.modules]
        has = [not any(f"{event.path}.".startswith(path) for path in lacks) for event in whole]
        expected = [event for event, is_there in zip(whole, has, strict=True) if is_there]
        names = [(event.name, len(event.sizes)) for event in events]
        if names != [(event.name, len(event.sizes)) for event in expected]:
            other = next((e for e, n in zip(expected, names, strict=False) if (e.name, len(e.sizes)) != n), None)
            where = f"'{other.path}'" if other is not None and other.path else "the model"
            raise StackError(
                f"{where} does not call the same functions in a model of every size, so it cannot be padded; give all "
                f"models one size there, or stack each size as an array of its own"
            )
        rest = iter(events)
        for column, is_there in zip(sizes, has, strict=True):
            column.append(next(rest).sizes if is_there else None)
    joined = []
    for event, column in zip(whole, sizes, strict=True):
        absent = unwritten(torch.tensor([each is None for each in column]))
        filled = [event.sizes if each is None else each for each in column]
        axes = {
            axis: unwritten(torch.tensor([each[axis] for each in filled]))
            for axis, length in enumerate(event.sizes)
            if any(each[axis] != length for each in filled)
        }
        joined.append(Sizes(event.name, axes, absent if bool(absent.any()) else None, event.sizes))
    return joined


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
