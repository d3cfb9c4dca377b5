"""Parts of an array: how members are divided among workers, and the worker's side of training one part."""

from __future__ import annotations

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
from hfta_func.workers.wire import Folder, loads


def renumbered(error: BaseException, members: Sequence[int]) -> BaseException:
    """The error of a part, whose members have these numbers in the whole array, as one of the whole."""
    if isinstance(error, HFTAError) and error.args:
        text = re.sub(r"\bmodel (\d+)\b", lambda match: f"model {members[int(match[1])]}", str(error.args[0]))
        error.args = (text, *error.args[1:])
    return error


class SharedPart(NamedTuple):
    """Members ``low`` to ``high - 1`` of a state whose leaves lie in shared memory."""

    source: Any  # references to the leaves of the whole array, to go on from
    target: Any  # references to where its leaves are written afterwards
    low: int
    high: int
    version: int  # what source holds: a worker that has made this version of the part itself does not read it


class StateBuffers:
    """Two copies of a state in shared memory: workers read one and write the other, so that a call can be repeated."""

    def __init__(self, state: TrainState):
        self._layout, self._latest, self._version = _layout(state), state, 0
        self._folder = Folder()
        self._source, self._target = (tree_map(lambda leaf: self._folder.write(leaf.cpu()), state) for _ in range(2))

    def close(self) -> None:
        """Remove the files."""
        self._folder.close()

    def fits(self, state: TrainState) -> bool:
        """Whether the buffers have room for just this state."""
        return self._layout == _layout(state)

    def put(self, state: TrainState) -> None:
        """Have workers go on from a state, which is written unless it is the one that they have made."""
        if state is not self._latest:
            write(_opened(self._source), tree_map(lambda leaf: leaf.cpu(), state))
            self._version += 1

    def part(self, low: int, high: int) -> SharedPart:
        """The members ``low`` to ``high - 1``, to be trained."""
        return SharedPart(self._source, self._target, low, high, self._version)

    def turn(self) -> None:
        """Go on from what workers have written."""
        self._source, self._target, self._version = self._target, self._source, self._version + 1

    def get(self, like: TrainState) -> TrainState:
        """The state that workers have made, on the devices of another one."""
        self._latest = tree_map(lambda leaf, old: leaf.clone().to(old.device), _opened(self._source), like)
        return self._latest


def _opened(refs: Any) -> Any:
    return tree_map(lambda ref: ref.tensor(), refs)


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
        # The part that was trained last: its members and version, its state, and what trains it on in its epoch.
        self._held: tuple[tuple[int, int, int], TrainState, LocalTrainer | None] | None = None

    def __call__(
        self,
        state: TrainState | SharedPart,
        sums: dict[str, Any],
        positions: slice | Tensor,
        position: Any,
        batches: bytes | None,
        until: int,
    ) -> dict[str, Any]:
        """Train some steps of an epoch: up to batch ``until``, or the end of the epoch.

        The loader goes on from ``position`` with the members at ``positions``; without a loader, there are ``batches``.
        Returns the state unless it is shared, whether the epoch has ended, the ``sums`` now, and the loader's position.
        """
        if self._kind == "cpu":
            # The state comes ready made, and where it was made the allocator is set up.
            keep_memory_once()
        running, trainer, held, self._held = Running(), None, self._held, None
        running.load_state_dict(sums, torch.device(self._kind))
        if not isinstance(state, SharedPart):
            trained = tree_map(lambda leaf: leaf.to(self._kind), state)
        elif held is not None and held[0] == (state.low, state.high, state.version):
            _, trained, trainer = held
        else:
            whole = _opened(state.source)
            trained = tree_map(lambda leaf: leaf[state.low : state.high].clone().to(self._kind), whole)
        if trainer is None or self._loader is None or trainer.loader.state_dict() != position:
            loader: Any = None if batches is None else loads(batches)
            if self._loader is not None:
                loader = self._loader.take(positions)
                loader.load_state_dict(position)
            trainer = LocalTrainer(self._step, loader, loader)
        trained, ended = trainer.segment(trained, running, until, SegmentHooks())
        answer = {"ended": ended, "running": tree_map(cpu, running.state_dict()), "position": None}
        if isinstance(trainer.loader, ArrayLoader):
            answer["position"] = trainer.loader.state_dict()
        if not isinstance(state, SharedPart):
            return answer | {"state": tree_map(cpu, trained)}
        write(tree_map(lambda leaf: leaf[state.low : state.high], _opened(state.target)), tree_map(cpu, trained))
        self._held = (state.low, state.high, state.version + 1), trained, None if ended else trainer
        return answer


def cpu(value: Any) -> Any:
    """A tensor in the host's memory; anything else as it is."""
    return value.cpu() if isinstance(value, Tensor) else value
