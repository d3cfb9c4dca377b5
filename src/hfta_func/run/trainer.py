"""What trains an array, a segment at a time: the contract, this process, and a smaller array of those that are active."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hfta_func._torch import is_compilable, original
from hfta_func._tree import put, take
from hfta_func.errors import HFTAError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.evaluation import Running
from hfta_func.run.history import Metrics
from hfta_func.step.batch import take_batch
from hfta_func.step.indexed import IndexedStep
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep

Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
END = sys.maxsize
"""The batch at which a segment to the end of the epoch stops."""


@dataclasses.dataclass(eq=False)
class Members:
    """Members that train: their state, what yields their batches, the sums of the epoch's metrics, and what is called once
    there is a batch, before its step.
    """

    state: TrainState
    loader: Any
    running: Running = dataclasses.field(default_factory=Running)
    begin: Callable[[], object] = bool


Tick = Callable[[], bool]
"""Is called after each step; tells whether to stop."""


class Trainer(Protocol):
    """What trains an array for :func:`fit`, segment by segment."""

    @property
    def status(self) -> str:
        """What trains, how, and why."""
        ...

    def segment(self, run: Members, until: int, tick: Tick) -> bool:
        """Train on the next batches, up to the end of the epoch or batch ``until``; returns whether the epoch has ended."""
        ...

    def close(self) -> None:
        """Train no more, and give back what was taken to train."""


class LocalTrainer(Trainer):
    """A :class:`Trainer` in this process.

    From the last batch of its own, a member rests to the end of the epoch and stays as it is, as inactive members do.
    """

    def __init__(self, step: Step):
        self.step, self.note = step, ""
        self._left: Iterator[Any] | None = None
        self._loader = self._position = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return getattr(self.step, "status", "eager: not a training step") + self.note

    def segment(self, run: Members, until: int, tick: Tick) -> bool:
        """See :class:`Trainer`."""
        dealt = run.loader if isinstance(run.loader, ArrayLoader) else None
        is_left = run.loader is self._loader and (dealt is None or dealt.state_dict() == self._position)
        if self._left is None or not is_left:
            self._left = iter(run.loader) if dealt is None else dealt.iterate(resting=True)
        self._loader, state = run.loader, run.state
        is_indexed = isinstance(original(self.step), IndexedStep)
        may_overwrite = isinstance(self.step, TrainStep) and not self.step.options.donate
        for batch in self._left:
            run.begin()
            present = None if dealt is None else dealt.present()
            before = state.active
            # A copy, because a step with donate=True writes the state.
            active = before.clone() if present is None else before & present
            # What a step of this segment has made, nobody else holds.
            how = {"owned": True} if may_overwrite and state is not run.state else {}
            given = state if present is None else state._replace(active=active.clone())
            state, metrics = self.step(given, batch, **how)
            if present is not None:
                state = state._replace(active=torch.where(present, state.active, before))
            present = metrics["rows"] > 0 if is_indexed else present
            run.running.add(metrics, active, state.step, present)
            if state.keys.device.type == "xla":
                # XLA only records operations; without this, an epoch would become one program.
                importlib.import_module("torch_xla").sync()
            if tick() or run.running.batches == until:
                run.state, self._position = state, None if dealt is None else dealt.state_dict()
                return False
        run.state, self._left = state, None
        return True


_FEW = 0.75
"""The share of members at or below which those left are packed: every new number of members is compiled anew."""


class Compact:
    """What has a :class:`Trainer` train members that are active, and do not rest, as a smaller array.

    Those of a step that is compiled, or ``compiles`` later, are filled up with others to one of a few sizes.
    """

    def __init__(self, trainer: Trainer, step: Step, compiles: bool):
        self._trainer, self._dims = trainer, getattr(original(step), "batch_dims", 0)
        self._compiles = compiles or (is_compilable(step) and original(step) is not step)
        # The loader of all, the members that train, None for all, and their loader.
        self._loader, self._kept, self._few = None, None, None

    def segment(self, run: Members, until: int, tick: Tick) -> bool:
        """See :class:`Trainer`."""
        rests = isinstance(run.loader, ArrayLoader) and len({*run.loader.lengths}) > 1
        while True:
            wanted, some = run.state.active, until
            if rests:
                # Up to a batch before which nobody comes or goes.
                place, lengths = run.loader.state_dict(), torch.tensor(run.loader.lengths, device=wanted.device)
                wanted = wanted & (lengths > place["batches"])
                if not bool(wanted.any()):
                    run.loader.load_state_dict({"epoch": place["epoch"] + 1, "batches": 0})
                    return True
                some = min(until, run.running.batches + int(lengths[wanted].min()) - place["batches"])
            if rests or run.running.batches == 0 or run.loader is not self._loader:
                self._choose(run, wanted)
            ended = self._piece(run, some, tick)
            # Fewer batches than asked for: it was stopped.
            if ended or run.running.batches != some or some == until:
                return ended

    def _piece(self, run: Members, until: int, tick: Tick) -> bool:
        kept, count = self._kept, len(run.state.keys)
        if kept is None:
            return self._trainer.segment(run, until, tick)
        few = Members(take(run.state, kept), self._few, run.running.part(kept), run.begin)
        is_dealt = isinstance(run.loader, ArrayLoader)
        if is_dealt:
            few.loader.load_state_dict(run.loader.state_dict())
        try:
            ended = self._trainer.segment(few, until, tick)
        except HFTAError as error:
            renumbered(error, kept.tolist())
            raise
        # What fills up the array reports nothing.
        trained = torch.isin(kept, self._chosen).nonzero().flatten()
        run.running.put(few.running.part(trained), kept[trained], count)
        run.state = put(run.state, kept, few.state)
        if is_dealt:
            run.loader.load_state_dict(few.loader.state_dict())
        return ended

    def _choose(self, run: Members, wanted: Tensor) -> None:
        chosen, kept = wanted.nonzero().flatten(), self._kept if run.loader is self._loader else None
        if kept is None or len(chosen) <= _FEW * len(kept) or not bool(torch.isin(chosen, kept).all()):
            kept = self._filled(chosen, wanted) if len(chosen) <= _FEW * len(wanted) else None
        if kept is not None and (kept is not self._kept or run.loader is not self._loader):
            self._few = _Taken(run.loader, self._dims, kept)
            if isinstance(run.loader, ArrayLoader):
                self._few = run.loader.follow(kept.tolist(), run.state.keys[kept], ())
        self._loader, self._kept, self._chosen = run.loader, kept, chosen

    def _filled(self, chosen: Tensor, wanted: Tensor) -> Tensor | None:
        """The chosen members, and in a graph others up to the size of the array halved some times; None if these are all."""
        if not self._compiles:
            return chosen
        size = len(wanted)
        while len(chosen) <= (half := -(-size // 2)) < size:
            size = half
        others = (~wanted).nonzero().flatten()[: size - len(chosen)]
        return torch.cat([chosen, others]).sort().values if size < len(wanted) else None


class _Taken:
    """The batches of some members."""

    def __init__(self, loader: Any, dims: Any, members: Tensor):
        self._loader, self._dims, self._members = loader, dims, members

    def __iter__(self) -> Iterator[Any]:
        return (take_batch(self._dims, batch, self._members) for batch in self._loader)


def renumbered(error: BaseException, members: Sequence[int]) -> BaseException:
    """The error of a part, whose members have these numbers in the whole array, as one of the whole."""
    if isinstance(error, HFTAError) and error.args:
        text = re.sub(r"\bmodel (\d+)\b", lambda match: f"model {members[int(match[1])]}", str(error.args[0]))
        error.args = (text, *error.args[1:])
    return error
