"""What a run records of its members.

Public: :class:`History`, :class:`FailedStep`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hfta_func.step.failures import Failure
from hfta_func.step.state import TrainState

if TYPE_CHECKING:
    import pandas

Metrics = dict[str, Tensor]


class FailedStep(NamedTuple):
    """A member's first failure in an epoch.

    Args:
        member: Its number.
        seed: Its seed.
        epoch: Counted from 1.
        step: Batches the member had seen before; with the seed it gives the noise of the step.
        cause: The name of the :class:`Failure`: ``"loss"``, ``"gradient"`` or ``"overflow"``.
    """

    member: int
    seed: int
    epoch: int
    step: int
    cause: str


class History:
    """Metrics of every member after every epoch, and failures.

    Args:
        seeds: The members' seeds ``[M]``.

    Attributes:
        epochs: The metrics of each epoch by name, on the CPU.
        failures: Every member's first :class:`FailedStep` in each epoch, in order of epoch and member.
        interrupted: Whether Ctrl-C ended the last :func:`fit`.
    """

    def __init__(self, seeds: Tensor):
        self.seeds = seeds.cpu()
        self.epochs: list[Metrics] = []
        self.failures: list[FailedStep] = []
        self.interrupted = False

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, name: str) -> Tensor:
        """One metric over all epochs: ``[epochs, M]``."""
        for epoch, metrics in enumerate(self.epochs, start=1):
            if name not in metrics:
                raise KeyError(f"epoch {epoch} has no metric '{name}'; it has {', '.join(metrics)}")
        return torch.stack([metrics[name] for metrics in self.epochs])

    def frame(self, **columns: Sequence[Any] | Tensor) -> pandas.DataFrame:
        """A pandas frame with one row per member and epoch.

        Args:
            columns: Further columns by name, one value per member, such as ``lr=[...]``.

        Returns:
            Columns ``member``, ``seed``, those given, ``epoch``, and one per metric that is one number per member.
        """
        import pandas

        count = len(self.seeds)
        given = {
            name: values.tolist() if isinstance(values, Tensor) else list(values) for name, values in columns.items()
        }
        for name, values in given.items():
            if len(values) != count:
                raise ValueError(f"column {name} has {len(values)} values but the array has {count} models")
        frames = [
            pandas.DataFrame(
                {"member": range(count), "seed": self.seeds.tolist(), **given, "epoch": epoch}
                | {name: values.tolist() for name, values in metrics.items() if values.dim() == 1}
            )
            for epoch, metrics in enumerate(self.epochs, start=1)
        ]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def state_dict(self) -> dict[str, Any]:
        """Plain data and few tensors: epochs in a row that have the same metrics are stacked."""

        def kind(metrics: Metrics) -> list[Any]:
            return [(name, value.dtype, value.shape) for name, value in metrics.items()]

        blocks = [list(block) for _, block in itertools.groupby(self.epochs, kind)]
        return {
            "epochs": [
                [len(block), {name: torch.stack([metrics[name] for metrics in block]) for name in block[0]}]
                for block in blocks
            ],
            "failures": self.failures,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the place of the history that gave ``state_dict``."""
        self.epochs = [
            {name: values[number] for name, values in block.items()}
            for length, block in state_dict["epochs"]
            for number in range(length)
        ]
        self.failures = [FailedStep(*failure) for failure in state_dict["failures"]]


Callback = Callable[[TrainState, History], "TrainState | None"]
"""What :func:`fit` calls after every epoch; a state that it returns replaces the current one."""


class Running:
    """Sums of the step's metrics over the epoch in progress, on the array's device, which nothing here waits for."""

    def __init__(self):
        self.batches = 0
        self.sums: Metrics = {}
        self.failed: Metrics = {}

    def add(self, metrics: Metrics, active: Tensor, step: Tensor) -> None:
        """Count one batch.

        Args:
            metrics: What the step reported.
            active: Members that took part, ``bool[M]``.
            step: Batches that each member has seen now, ``int64[M]``.
        """
        self.batches += 1
        for name, value in metrics.items():
            if name == "failure":
                failed = {"cause": torch.where(active, value, 0), "step": step - 1}
                if self.failed:
                    first = self.failed["cause"] == 0
                    failed = {key: torch.where(first, failed[key], self.failed[key]) for key in failed}
                self.failed = failed
            else:
                value = value if value.is_floating_point() else value.float()
                self.sums[name] = self.sums[name] + value if name in self.sums else value

    def close(self, history: History, further: Metrics) -> Metrics:
        """Record the means and ``further`` metrics as the history's next epoch, which is returned."""
        means = {name: value / self.batches for name, value in self.sums.items()}
        metrics = {name: value.detach().cpu() for name, value in (means | further).items()}
        history.epochs.append(metrics)
        if self.failed:
            table = zip(
                history.seeds.tolist(), self.failed["step"].tolist(), self.failed["cause"].tolist(), strict=True
            )
            history.failures += [
                FailedStep(member, seed, len(history), step, Failure(cause).name.lower())
                for member, (seed, step, cause) in enumerate(table)
                if cause
            ]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        return {"batches": self.batches, "sums": self.sums, "failed": self.failed}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Take the place of the sums that gave ``state_dict``."""
        self.batches = state_dict["batches"]
        self.sums, self.failed = (
            {name: value.to(device) for name, value in state_dict[part].items()} for part in ("sums", "failed")
        )
