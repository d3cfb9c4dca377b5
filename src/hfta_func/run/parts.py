"""Parts of an array: how members are divided among workers, and the worker's side of training one part."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from hfta_func._tree import leaves, tree_map, write
from hfta_func.errors import HFTAError
from hfta_func.run import background
from hfta_func.run.data import ArrayLoader
from hfta_func.run.running import Running
from hfta_func.run.trainer import LocalTrainer, SegmentHooks, Step
from hfta_func.step.allocator import keep_memory_once
from hfta_func.step.state import TrainState
from hfta_func.workers.wire import Folder, TensorRef, loads


def renumbered(error: BaseException, members: Sequence[int]) -> BaseException:
    """The error of a part, whose members have these numbers in the whole array, as one of the whole."""
    if isinstance(error, HFTAError) and error.args:
        text = re.sub(r"\bmodel (\d+)\b", lambda match: f"model {members[int(match[1])]}", str(error.args[0]))
        error.args = (text, *error.args[1:])
    return error


NEVER = 1 << 62
"""Sentinel: no stop requested."""


class SharedPart(NamedTuple):
    """Members ``low`` to ``high - 1`` of a state whose leaves lie in shared memory."""

    source: Any  # references to the leaves of the whole array, to go on from
    target: Any  # references to where its leaves after the segment are written
    low: int
    high: int
    version: int  # what source holds: a worker that has made this version of the part itself does not read it
    becomes: int  # the version after the segment


class StateBuffers:
    """Two copies of a state in shared memory: workers read one and write the other, so that a call can be repeated."""

    def __init__(self, state: TrainState):
        self._layout, self._latest = _layout(state), state
        self._folder = Folder()
        self._source, self._target = (tree_map(lambda leaf: self._folder.write(leaf.cpu()), state) for _ in range(2))
        self._numbers, self._controls = itertools.count(), {}
        self._now, self._next = next(self._numbers), next(self._numbers)

    def close(self) -> None:
        """Remove the files."""
        self._folder.close()

    def control(self, count: int) -> TensorRef:
        """Where that many parts count the steps of a segment, and read after which one all stop."""
        if count not in self._controls:
            self._controls[count] = self._folder.write(torch.zeros(count + 1, dtype=torch.int64))
        cells = self._controls[count].tensor()
        cells[:-1], cells[-1] = 0, NEVER
        return self._controls[count]

    def fits(self, state: TrainState) -> bool:
        """Whether the buffers have room for just this state."""
        return self._layout == _layout(state)

    def put(self, state: TrainState) -> None:
        """Have workers go on from a state, which is written unless it is the one that they have made."""
        if state is not self._latest:
            write(_opened(self._source), tree_map(lambda leaf: leaf.cpu(), state))
            self._now, self._latest = next(self._numbers), state

    def part(self, low: int, high: int) -> SharedPart:
        """The members ``low`` to ``high - 1``, to be trained."""
        return SharedPart(self._source, self._target, low, high, self._now, self._next)

    def further(self, low: int, high: int) -> SharedPart:
        """Members that have been trained, to be trained some more; :meth:`level` takes them over."""
        return SharedPart(self._target, self._source, low, high, self._next, next(self._numbers))

    def level(self, low: int, high: int) -> None:
        """Take over what was trained further."""
        tree_map(lambda a, b: a[low:high].copy_(b[low:high]), _opened(self._target), _opened(self._source))

    def get(self, like: TrainState) -> TrainState:
        """The state that workers have made, on the devices of another one."""
        self._source, self._target = self._target, self._source
        self._now, self._next = self._next, next(self._numbers)
        self._latest = tree_map(lambda leaf, old: leaf.clone().to(old.device), _opened(self._source), like)
        return self._latest


def _opened(refs: Any) -> Any:
    return tree_map(TensorRef.tensor, refs)


def _layout(state: TrainState) -> Any:
    structure = optree.tree_structure(state)  # pyright: ignore[reportArgumentType]
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves(state)]


class PartWorker:
    """Trains a part of the members on a type of device, a segment in each call: the function that is sent to workers.

    It holds the loader of all members if that is an :class:`ArrayLoader`; batches of other loaders are sent.
    """

    label = "the step or the loader"

    def __init__(self, step: Step, loader: ArrayLoader | None, kind: str, compile: bool):
        self._step = background.compile(step) if compile else background.replayed(step)
        self._loader, self._kind = loader, kind
        # The part that was trained last: its members, its version and its state.
        self._held: tuple[tuple[int, int, int], TrainState] | None = None

    def __call__(
        self,
        state: TrainState | SharedPart,
        sums: dict[str, Any],
        positions: slice | Tensor,
        position: Any,
        batches: bytes | None,
        skip: int,
        until: int,
        control: tuple[TensorRef, int] | None,
    ) -> dict[str, Any]:
        """Train one segment of an epoch: up to batch ``until``, or the end of the epoch.

        The loader goes on from ``position`` with the members at ``positions``; without a loader, the first ``skip`` of
        ``batches`` have been trained on. Returns the state unless it is shared, whether the epoch has ended, the ``sums``
        now, and the loader's position. ``control`` is shared memory, where the cell of the part's number counts its steps,
        and the last cell names the step after which it stops.
        """
        loader: Any = None if batches is None else loads(batches)[skip:]
        if self._loader is not None:
            loader = self._loader.take(positions)
            loader.load_state_dict(position)
        if self._kind == "cpu":
            # The state comes ready made, and where it was made the allocator is set up.
            keep_memory_once()
        running, hooks = Running(), SegmentHooks()
        if control is not None:
            cells, number = control[0].tensor(), control[1]
            # A call that is repeated begins anew.
            cells[number] = 0
            count = functools.partial(cells[number].add_, 1)
            hooks = SegmentHooks(tick=count, stopped=lambda: bool(cells[number] >= cells[-1]))
        running.load_state_dict(sums, torch.device(self._kind))
        trained = (
            self._read(state) if isinstance(state, SharedPart) else tree_map(lambda leaf: leaf.to(self._kind), state)
        )
        trained, ended = LocalTrainer(self._step, loader, ()).segment(trained, running, until, hooks)
        return {
            "state": self._written(trained, state) if isinstance(state, SharedPart) else tree_map(cpu, trained),
            "ended": ended,
            "running": tree_map(cpu, running.state_dict()),
            "position": None if self._loader is None else loader.state_dict(),
        }

    def _read(self, part: SharedPart) -> TrainState:
        held, self._held = self._held, None
        if held is not None and held[0] == (part.low, part.high, part.version):
            return held[1]
        return tree_map(lambda ref: ref.tensor()[part.low : part.high].clone().to(self._kind), part.source)

    def _written(self, state: TrainState, part: SharedPart) -> None:
        write(tree_map(lambda ref: ref.tensor()[part.low : part.high], part.target), tree_map(cpu, state))
        self._held = (part.low, part.high, part.becomes), state


def cpu(value: Any) -> Any:
    """A tensor in the host's memory; anything else as it is."""
    return value.cpu() if isinstance(value, Tensor) else value
