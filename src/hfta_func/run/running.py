"""Metrics of the epoch that is being trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import tree_map
from hfta_func._types import ROWS
from hfta_func.run.history import FailedStep, History, Metrics, widened
from hfta_func.step.failures import Failure


def summed_in(value: Tensor) -> torch.dtype:
    """The type in which a metric is summed: halves would come to a stop, and floats hold no large integers."""
    if not value.is_floating_point():
        return torch.int64
    return torch.float32 if value.device.type == "mps" else torch.float64


def mean_in(value: Tensor) -> torch.dtype:
    """The type of a metric's mean: its own, float32 at least."""
    return torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else torch.float32


class Running:
    """Sums of the step's metrics over the current epoch, on the array's device, which is never waited for.

    Integers are summed as such, and other numbers in double precision: in that of a half they would come to a stop.
    """

    def __init__(self):
        self.batches = 0
        self.sums: Metrics = {}
        # In how many batches each was, of each member if these differ: some batches may lack a metric, or be for others.
        self.counts: dict[str, int | Tensor] = {}
        # The names of the means' types: that of the metric, float32 at least.
        self.dtypes: dict[str, str] = {}
        self.failed: Metrics = {}

    def add(self, metrics: Metrics, active: Tensor, step: Tensor) -> None:
        """Add the metrics of one batch, of which ``active`` members took part and have now seen ``step`` batches."""
        self.batches += 1
        for name, value in metrics.items():
            if name == "failure":
                # A look at the values costs less, where nothing has to wait for them.
                if not self.failed or value.device.type != "cpu" or value.any():
                    self._fail({"cause": torch.where(active, value, 0), "step": metrics.get("failed_step", step - 1)})
            elif name != "failed_step":
                self.sums[name] = self.sums[name] + value if name in self.sums else value.to(summed_in(value))
                self.counts[name] = self.counts.get(name, 0) + 1
                self.dtypes[name] = str(mean_in(value)).removeprefix("torch.")

    def part(self, low: int, high: int) -> dict[str, Any]:
        """The sums so far of the members ``low`` to ``high - 1``, as a ``state_dict`` in the host's memory."""
        return tree_map(lambda sums: sums.cpu() if isinstance(sums, Tensor) else sums, self._of(slice(low, high)))

    def join(self, parts: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Take over the sums of all parts: the ``state_dict`` of each, after training over the same batches."""
        whole = tree_map(lambda *sums: torch.cat(sums) if isinstance(sums[0], Tensor) else sums[0], *parts)
        self.load_state_dict(whole, device)

    def take(self, members: Tensor) -> Running:
        """The sums so far of some members."""
        few = Running()
        few.load_state_dict(self._of(members), members.device)
        return few

    def _of(self, members: Tensor | slice) -> dict[str, Any]:
        return tree_map(
            lambda sums: sums[members] if isinstance(sums, Tensor) and sums.dim() else sums, self.state_dict()
        )

    def put(self, few: Running, members: Tensor, trained: Tensor) -> None:
        """Take over the sums of ``members``, of which those ``trained``, ``bool[M]``, had the batches since :meth:`take`."""
        self.batches, new = few.batches, trained[members]

        def joined(value: Tensor, whole: Tensor | None) -> Tensor:
            if value.shape[:1] != members.shape:
                return value
            whole = value.new_zeros(len(trained), *value.shape[1:]) if whole is None else whole.to(value.dtype)
            return whole.index_copy(0, members[new], value[new])

        for name, value in few.sums.items():
            counts = (torch.as_tensor(each.counts.get(name, 0), device=members.device) for each in (few, self))
            count, before = (each.expand(len(size)) for each, size in zip(counts, (members, trained), strict=True))
            self.sums[name] = joined(value, self.sums.get(name))
            self.counts[name] = joined(count, before) if value.shape[:1] == members.shape else few.counts[name]
        self.dtypes |= few.dtypes
        if few.failed:
            self.failed = {name: joined(value, self.failed.get(name)) for name, value in few.failed.items()}

    def _fail(self, failed: Metrics) -> None:
        """Record failures of members that had none before."""
        if self.failed:
            first = self.failed["cause"] == 0
            failed = {key: torch.where(first, failed[key], self.failed[key]) for key in failed}
        self.failed = failed

    def close(self, history: History, further: Metrics) -> Metrics:
        """Record the means and the ``further`` metrics as the next epoch of the history, and return them."""
        means = {name: self._mean(name) for name in self.sums}
        if not isinstance(further, dict) or not all(isinstance(value, Tensor) for value in further.values()):
            raise ValueError(f"evaluate returned {further!r}; return a dict of tensors, one number per model each")
        hidden = means.keys() & further.keys()
        if hidden:
            raise ValueError(f"evaluate returned '{min(hidden)}', which the step reports too; give it another name")
        metrics = {name: value.detach().cpu() for name, value in (means | further).items()}
        rows = {name: metrics.pop(name + ROWS) for name in [*metrics] if name + ROWS in metrics}
        metrics |= {name: metrics[name] / rows[name] for name in rows}
        members, width = history.members, len(history.seeds)
        history.epochs.append({name: widened(value, members, len(members), width) for name, value in metrics.items()})
        if self.failed:
            columns = (members, history.seeds[members], self.failed["step"], self.failed["cause"])
            history.failures += [
                FailedStep(member, seed, len(history), step, Failure(cause).name.lower())
                for member, seed, step, cause in zip(*map(Tensor.tolist, columns), strict=True)
                if cause
            ]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        parts = {"counts": self.counts, "sums": self.sums, "dtypes": self.dtypes, "failed": self.failed}
        return {"batches": self.batches, **{name: {**part} for name, part in parts.items()}}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore the sums of :meth:`state_dict`."""
        self.batches = state_dict["batches"]
        # Older files have no counts, and sums in the type of the means.
        counts = state_dict.get("counts", dict.fromkeys(state_dict["sums"], self.batches))
        self.dtypes = {**state_dict.get("dtypes", {})}
        self.counts = {name: n.to(device) if isinstance(n, Tensor) else n for name, n in counts.items()}
        self.sums, self.failed = (
            {name: value.to(device) for name, value in state_dict[part].items()} for part in ("sums", "failed")
        )

    def _mean(self, name: str) -> Tensor:
        value = self.sums[name]
        # By a tensor, also where all members have as many: GPUs multiply by the inverse of a number, to other bits.
        count = torch.as_tensor(self.counts[name], device=value.device)
        dtype = getattr(torch, self.dtypes.get(name, "float32"))
        value = (
            value
            if value.is_floating_point()
            else value.to(torch.float32 if value.device.type == "mps" else torch.float64)
        )
        return (value / count.view(*count.shape, *[1] * (value.dim() - count.dim()))).to(dtype)
