"""Finds out by calls what a padded model does for each true size; that it does the same is for the oracle to find out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import outside_transforms, pytree, unwritten
from hfta_func._types import Params
from hfta_func.calls.padding import Event, Padded, Recorder, Sizes, Traced
from hfta_func.errors import HFTAError, StackError
from hfta_func.models.attributes import first_member
from hfta_func.models.padding import Padding
from hfta_func.models.scalar_attributes import numbers_of
from hfta_func.models.sizes import SIZE


class Events:
    """The events of a padded model's calls, by the shapes of inputs.

    ``run.alone(size, numbers)`` is the same function of a model of a true size, and ``run.watched(watch, *given)`` calls
    one after ``watch(model)``, see :class:`hfta_func.models.functional.Bound`.

    Args:
        padding: What the model knows of its sizes.
        numbers: The paths of the numbers that calls take as buffers.
    """

    def __init__(self, padding: Padding, numbers: Sequence[str]):
        self.padding, self._numbers = padding, numbers
        self._known: dict[Any, list[Sizes]] = {}
        self._latest: list[Sizes] | None = None

    def latest(self, size: Tensor) -> Padded:
        """What computes the results of a member of a size, while a compiler traces, which knows no values."""
        if self._latest is None:
            raise StackError(
                "call this function of a padded model once before it is compiled, so that its sizes are known"
            )
        return Traced(size, self._latest)

    def __call__(self, run: Any, buffers: Params, args: Any, kwargs: Any, key: Tensor | None) -> Padded:
        """What computes the results of a member of the size that its buffers tell, for inputs of these shapes.

        Raises:
            StackError: if a true size does not call the same functions.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        known = self._known.get((shapes, str(spec), key is None))
        if known is None:
            with outside_transforms(), torch.random.fork_rng([]):
                given = [first_member(leaf).detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                device = buffers[SIZE].device
                noise = torch.zeros((), dtype=torch.int64, device=device) if key is None else first_member(key)
                known = self._learn(run, pytree.tree_unflatten(given, spec), noise)
            # Without a key nothing draws from one.
            known = [event for event in known if key is not None or event.name not in ("site", "draw")]
            self._known[shapes, str(spec), key is None] = known
        self._latest = known
        return Padded(buffers[SIZE], known)

    def _learn(self, run: Any, inputs: tuple[Any, Any], key: Tensor) -> list[Sizes]:
        recorded: list[list[Event]] = []
        alone = [run.alone(size, [*self._numbers_of(number)]) for number, size in enumerate(self.padding.sizes)]
        for number, call in [(0, run), *enumerate(alone)]:
            recorder = Recorder()
            model = self.padding.sizes[number].model
            values = {path: leaf.detach() for path, leaf in (*model.named_parameters(), *model.named_buffers())}
            trees = self._trees(number, values, call is run, key)
            try:
                call.watched(functools.partial(_tracked, recorder), *trees, inputs, key, recorder)
            except RuntimeError as error:
                if call is not run or isinstance(error, HFTAError):
                    raise
                raise StackError(
                    f"{repr(recorder.path) if recorder.path else 'the model'} cannot be padded, because it does not run in "
                    f"the largest sizes of all models ({error}); give all models one size there"
                ) from error
            recorded.append(recorder.events)
        return _joined(self.padding, recorded[0], recorded[1:])

    def _trees(self, number: int, values: Params, is_padded: bool, key: Tensor) -> tuple[Params, Params]:
        """Parameters and buffers of a size for its own model, or for the padded one."""
        size, numbers = self.padding.sizes[number], self._numbers_of(number)
        names = dict(size.model.named_parameters())
        trees = [{path: leaf for path, leaf in values.items() if (path in names) is kind} for kind in (True, False)]
        if is_padded:
            whole = self.padding.enlarged(number, values)
            trained = {path for path, (alone, _) in size.leaves.items() if alone in names} | self.padding.params
            trees = [
                {path: leaf for path, leaf in whole.items() if (path in trained) is kind} for kind in (True, False)
            ]
            numbers = dict.fromkeys(self._numbers, 0.5) | {
                path: numbers[alone] for path, alone in self._numbers_alone(number)
            }
        as_tensors = {
            path: torch.tensor(value, dtype=torch.float64, device=key.device) for path, value in numbers.items()
        }
        return {path: leaf.detach().clone() for path, leaf in trees[0].items()}, trees[1] | as_tensors

    def _numbers_alone(self, number: int) -> Iterator[tuple[str, str]]:
        """The paths of numbers in the padded model and in that of a true size."""
        for path in self._numbers:
            owner, _, name = path.rpartition(".")
            if owner in self.padding.sizes[number].modules:
                yield path, f"{self.padding.sizes[number].modules[owner]}.{name}".lstrip(".")

    def _numbers_of(self, number: int) -> dict[str, float]:
        known = numbers_of(self.padding.sizes[number].model)
        return {alone: getattr(*known[alone]) for _, alone in self._numbers_alone(number)}


def _joined(padding: Padding, whole: list[Event], alone: list[list[Event]]) -> list[Sizes]:
    """The events of all sizes in one, those of the padded model."""
    sizes: list[list[tuple[int, ...] | None]] = [[] for _ in whole]
    for number, (events, size) in enumerate(zip(alone, padding.sizes, strict=True)):
        lacks = [f"{path}." for path in padding.optional if path not in size.modules]
        has = [not any(f"{event.path}.".startswith(path) for path in lacks) for event in whole]
        expected = [event for event, is_there in zip(whole, has, strict=True) if is_there]
        names = [(event.name, len(event.sizes)) for event in events]
        if names != [(event.name, len(event.sizes)) for event in expected]:
            other = next((e for e, n in zip(expected, names, strict=False) if (e.name, len(e.sizes)) != n), None)
            where = f"'{other.path}'" if other is not None and other.path else "the model"
            raise StackError(
                f"{where} does not call the same functions in a model of every size ({_shown(padding, number)}), so it "
                f"cannot be padded; give all models one size there, or stack each size as an array of its own"
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


def _tracked(recorder: Recorder, model: nn.Module) -> None:
    """Make a recorder know the path of the module whose code runs."""
    paths: list[str] = []

    def leave(*_: Any) -> None:
        recorder.path = paths.pop()

    for path, module in model.named_modules():

        def enter(*_: Any, path: str = path) -> None:
            paths.append(recorder.path)
            recorder.path = path

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def _shown(padding: Padding, number: int) -> str:
    leaves = dict(padding.sizes[number].model.named_parameters())
    return ", ".join(f"'{path}' {[*leaf.shape]}" for path, leaf in [*leaves.items()][:2])
