"""Metrics over many batches: their means, or sums, and who failed."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._tree import per_model, tree_map
from hfta_func._types import ROWS
from hfta_func.errors import BatchError
from hfta_func.run.history import FailedStep, History, Metrics
from hfta_func.step.commit import Failure


class Running:
    """Sums of metrics over batches, on the array's device, which is never waited for.

    Integers are summed as such, and other numbers in double precision: halves would come to a stop, and floats hold no large
    integers.
    """

    def __init__(self):
        self.batches = 0
        self.sums: Metrics = {}
        # The weight of the batches that had each, of each member if these differ.
        self.counts: dict[str, int | Tensor] = {}
        # The names of the means' types: that of the metric, float32 at least.
        self.dtypes: dict[str, str] = {}
        self.failed: Metrics = {}

    def add(self, metrics: Metrics, active: Tensor, step: Tensor, present: Tensor | None = None) -> None:
        """Add a step's metrics: ``active`` members have now made ``step`` steps, and those not ``present`` had no batch."""
        failure = metrics.get("failure")
        # A look at the values costs less, where nothing has to wait for them.
        if failure is not None and (not self.failed or failure.device.type != "cpu" or failure.any()):
            self._fail({"cause": torch.where(active, failure, 0), "step": metrics.get("failed_step", step - 1)})
        self.accumulate({k: v for k, v in metrics.items() if k not in ("failure", "failed_step")}, 1, present)

    def accumulate(
        self, metrics: Metrics, rows: int | Tensor, present: Tensor | None = None, summed: Collection[str] = ()
    ) -> None:
        """Add the metrics of a batch of ``rows``, or ``[M]`` of them, for members that are ``present``; some are sums."""
        self.batches += 1
        for name, value in metrics.items():
            weight: Any = 1 if name in summed else rows
            if name in self.sums and self.sums[name].shape != value.shape:
                shapes = f"{[*self.sums[name].shape]} in one batch and {[*value.shape]} in another"
                cure = "values of each row have no mean over batches: return their mean, or call hfta.predict for them"
                raise BatchError(f"metric '{name}' is {shapes}; {cure}")
            total = value
            if isinstance(weight, Tensor) or weight != 1:
                total = value.to(summed_in(value))
                total = total * (per_model(weight, total) if isinstance(weight, Tensor) else weight)
            if present is not None and value.shape[:1] == present.shape:
                mask = present.view(-1, *[1] * (value.dim() - 1))
                total, weight = torch.where(mask, total, 0), torch.where(present, weight, 0)
            self.sums[name] = self.sums[name] + total if name in self.sums else total.to(summed_in(value), copy=True)
            self.counts[name] = self.counts.get(name, 0) + weight
            self.dtypes[name] = _mean_in(value.dtype)

    def part(self, members: Tensor) -> Running:
        """The sums so far of some members."""
        few, sums = Running(), self.state_dict()
        vars(few).update(tree_map(lambda sum: sum[members] if isinstance(sum, Tensor) and sum.dim() else sum, sums))
        return few

    def join(self, parts: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Take over the sums of all parts: the ``state_dict`` of each, after training over the same batches."""
        whole = tree_map(lambda *sums: torch.cat(sums) if isinstance(sums[0], Tensor) else sums[0], *parts)
        self.load_state_dict(whole, device)

    def put(self, few: Running, members: Tensor, count: int) -> None:
        """Take over the sums of ``members``, out of ``count``, since these were taken by :meth:`part`."""
        self.batches, self.dtypes = few.batches, self.dtypes | few.dtypes

        def joined(value: Tensor, whole: Tensor | None) -> Tensor:
            whole = value.new_zeros(count, *value.shape[1:]) if whole is None else whole.to(value.dtype)
            return whole.index_copy(0, members, value)

        for name, value in few.sums.items():
            if value.shape[:1] != members.shape:
                self.sums[name], self.counts[name] = value, few.counts[name]
                continue
            self.sums[name] = joined(value, self.sums.get(name))
            number, before = (torch.as_tensor(each.counts.get(name, 0), device=members.device) for each in (few, self))
            self.counts[name] = joined(number.expand(len(members)), before.expand(count).clone())
        self.failed |= {name: joined(value, self.failed.get(name)) for name, value in few.failed.items()}

    def _fail(self, failed: Metrics) -> None:
        """Record failures of members that had none before."""
        if self.failed:
            first = self.failed["cause"] == 0
            failed = {key: torch.where(first, failed[key], self.failed[key]) for key in failed}
        self.failed = failed

    def means(self, summed: Collection[str] = ()) -> Metrics:
        """The mean of each metric, or the sum of those named, in its own type, float32 at least; sums of integers as such."""
        metrics = {name: value if name in summed else self._mean(name) for name, value in self.sums.items()}
        rows = {name: metrics.pop(name + ROWS) for name in [*metrics] if name + ROWS in metrics}
        return metrics | {name: metrics[name] / rows[name] for name in rows}

    def failures(self, history: History) -> list[FailedStep]:
        """The first failure of each member in the epoch that the history has recorded last."""
        if not self.failed:
            return []
        columns = history.members, history.seeds[history.members], self.failed["step"], self.failed["cause"]
        return [
            FailedStep(member, seed, len(history), step, Failure(cause).name.lower())
            for member, seed, step, cause in zip(*map(Tensor.tolist, columns), strict=True)
            if cause
        ]

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        parts = {"counts": self.counts, "sums": self.sums, "dtypes": self.dtypes, "failed": self.failed}
        return {"batches": self.batches, **{name: {**part} for name, part in parts.items()}}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore the sums of :meth:`state_dict`."""
        # Older files have no counts, and sums in the type of the means.
        state_dict = {"counts": dict.fromkeys(state_dict["sums"], state_dict["batches"]), "dtypes": {}, **state_dict}
        for name, value in state_dict.items():
            setattr(self, name, tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value))

    def _mean(self, name: str) -> Tensor:
        value = self.sums[name]
        value = value if value.is_floating_point() else value.to(_double(value))
        # By a tensor, also where all members have as many: GPUs multiply by the inverse of a number, to other bits.
        count = torch.as_tensor(self.counts[name], device=value.device)
        dtype = getattr(torch, self.dtypes.get(name, "float32"))
        return (value / count.view(*count.shape, *[1] * (value.dim() - count.dim()))).to(dtype)


def summed_in(value: Tensor) -> torch.dtype:
    """The type in which a metric is summed."""
    return _double(value) if value.is_floating_point() else torch.int64


def _double(value: Tensor) -> torch.dtype:
    return torch.float32 if value.device.type == "mps" else torch.float64


@functools.cache
def _mean_in(dtype: torch.dtype) -> str:
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32
    return str(wide).removeprefix("torch.")
