"""The sums of an epoch while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func.run.history import FailedStep, History, Metrics, widened
from hfta_func.step.failures import Failure


class Running:
    """Sums of the step's metrics over the current epoch, on the array's device, which is never waited for."""

    def __init__(self):
        self.batches = 0
        self.sums: Metrics = {}
        self.failed: Metrics = {}

    def add(self, metrics: Metrics, active: Tensor, step: Tensor) -> None:
        """Add the metrics of one batch, of which ``active`` members took part and have now seen ``step`` batches."""
        self.batches += 1
        for name, value in metrics.items():
            if name == "failure":
                self._fail({"cause": torch.where(active, value, 0), "step": step - 1})
            else:
                self._sum(name, value if value.is_floating_point() else value.float())

    def part(self, low: int, high: int) -> dict[str, Any]:
        """The sums so far of the members ``low`` to ``high - 1``, as a ``state_dict`` in the host's memory."""
        return self._mapped(lambda value: value[low:high].cpu())

    def join(self, parts: Sequence[dict[str, Any]], device: torch.device) -> None:
        """Take over the sums of all parts: the ``state_dict`` of each, after training over the same batches."""
        self.batches = parts[0]["batches"]
        self.sums, self.failed = (
            {name: torch.cat([part[kind][name] for part in parts]).to(device) for name in parts[0][kind]}
            for kind in ("sums", "failed")
        )

    def add_members(self, few: Running, kept: Tensor, num_models: int) -> None:
        """Add the sums of the members ``kept`` out of ``num_models``; the others had no batch."""
        self.batches += few.batches
        for name, value in few.sums.items():
            self._sum(name, widened(value, kept, len(kept), num_models))
        if few.failed:
            empty = {name: value.new_zeros(num_models) for name, value in few.failed.items()}
            self._fail({name: empty[name].index_copy(0, kept, value) for name, value in few.failed.items()})

    def _sum(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _fail(self, failed: Metrics) -> None:
        """Record failures of members that had none before."""
        if self.failed:
            first = self.failed["cause"] == 0
            failed = {key: torch.where(first, failed[key], self.failed[key]) for key in failed}
        self.failed = failed

    def close(self, history: History, further: Metrics) -> Metrics:
        """Record the means and the ``further`` metrics as the next epoch of the history, and return them."""
        means = {name: value / self.batches for name, value in self.sums.items()}
        if not isinstance(further, dict) or not all(isinstance(value, Tensor) for value in further.values()):
            raise ValueError(f"evaluate returned {further!r}; return a dict of tensors, one number per model each")
        hidden = means.keys() & further.keys()
        if hidden:
            raise ValueError(f"evaluate returned '{min(hidden)}', which the step reports too; give it another name")
        metrics = {name: value.detach().cpu() for name, value in (means | further).items()}
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
        return self._mapped(lambda value: value)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        sums, failed = (
            {name: function(value) for name, value in metrics.items()} for metrics in (self.sums, self.failed)
        )
        return {"batches": self.batches, "sums": sums, "failed": failed}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore the sums of :meth:`state_dict`."""
        self.batches = state_dict["batches"]
        self.sums, self.failed = (
            {name: value.to(device) for name, value in state_dict[part].items()} for part in ("sums", "failed")
        )
