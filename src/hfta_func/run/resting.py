"""Training of the members that have a batch and take part; the others rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import put, take
from hfta_func.errors import HFTAError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.parts import renumbered
from hfta_func.run.running import Running
from hfta_func.run.trainer import END, SegmentEnd, SegmentHooks, Trainer
from hfta_func.step.state import TrainState

_FEW = 0.75
"""The share of members at or below which those left are packed: every new number of members is compiled anew."""


def resting(trainer: Trainer, loader: Any, compact: bool) -> Trainer:
    """A trainer by which members rest, where they may; with ``compact`` as a smaller array."""
    return Resting(trainer, loader, compact) if compact or _rests(loader) else trainer


def _rests(loader: Any) -> bool:
    return isinstance(loader, ArrayLoader) and loader.rests


class Resting(Trainer):
    """A :class:`Trainer` by which members rest from the last batch of their own to the end of the epoch.

    They stay as they are meanwhile, as inactive members do. With ``compact``, those that neither rest nor are inactive are
    trained as a smaller array, and put back afterwards.
    """

    def __init__(self, trainer: Trainer, loader: Any, compact: bool):
        self._trainer, self._loader, self._compact = trainer, loader, compact
        # Who was active when the epoch began.
        self._active: Tensor | None = None

    @property
    def status(self) -> str:
        """See :class:`Trainer`."""
        return self._trainer.status

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._trainer.close()

    def follow(self, loader: Any) -> None:
        """See :class:`Trainer`."""
        self._trainer.kept, self._loader = None, loader
        self._trainer.follow(loader)

    def segment(self, state: TrainState, running: Running, until: int, hooks: SegmentHooks) -> SegmentEnd:
        """See :class:`Trainer`."""
        while True:
            if self._active is None:
                # A copy, because a step with donate=True writes the state.
                self._active = state.active.clone()
            present, count = self._ahead(self._active)
            if count:
                state, ended = self._piece(state, running, min(until, running.batches + count), hooks, present)
            else:
                self._loader.load_state_dict({"epoch": self._loader.state_dict()["epoch"] + 1, "batches": 0})
                self._trainer.follow(self._loader)
                ended = True
            if ended:
                self._active = None
            if ended or hooks.stopped() or running.batches == until:
                return state, ended

    def _ahead(self, active: Tensor) -> tuple[Tensor, int]:
        """Who has the next batch, and after how many batches one of those that are trained rests; 0 if these all do."""
        if not _rests(self._loader):
            return torch.ones_like(active), END
        # A loader may have begun the first epoch elsewhere than at its first batch.
        done, longest = self._loader.state_dict()["batches"], len(self._loader)
        lengths = torch.tensor(self._loader.lengths, device=active.device)
        present = lengths > done
        edge = min(lengths[present & (active | (not self._compact))].tolist(), default=done)
        return present, END if longest in (done, edge) else edge - done

    def _piece(
        self, state: TrainState, running: Running, until: int, hooks: SegmentHooks, present: Tensor
    ) -> SegmentEnd:
        """Train those that are ``present``, up to a batch before which nobody comes or goes."""
        kept = self._choose(self._active & present) if self._compact and self._active is not None else None
        if kept is not self._trainer.kept:
            self._trainer.kept = kept
            if running.batches > 0 and isinstance(self._loader, ArrayLoader):
                self._loader.load_state_dict(self._loader.state_dict())
                self._trainer.follow(self._loader)
        if kept is None and bool(present.all()):
            return self._trainer.segment(state, running, until, hooks)
        members = torch.arange(len(present), device=present.device) if kept is None else kept
        given = state._replace(active=state.active & present)
        few_running = running.take(members)
        try:
            few, ended = self._trainer.segment(given if kept is None else take(given, kept), few_running, until, hooks)
        except HFTAError as error:
            renumbered(error, members.tolist())
            raise
        running.put(few_running, members, present)
        after = few if kept is None else put(state, kept, few)
        return after._replace(active=torch.where(present, after.active, state.active)), ended

    def _choose(self, wanted: Tensor) -> Tensor | None:
        """The members to train; None for all."""
        chosen = wanted.nonzero().flatten()
        kept = self._trainer.kept
        if not len(chosen) or (
            kept is not None and len(chosen) > _FEW * len(kept) and bool(torch.isin(chosen, kept).all())
        ):
            return kept
        return chosen if len(chosen) <= _FEW * len(wanted) else None
