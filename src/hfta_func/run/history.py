"""The metrics and failures of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from hfta_func._tree import tree_map
from hfta_func._types import SIGNS, direction_of, html_table, require, sparkline, text_table
from hfta_func.errors import StateError
from hfta_func.step.state import TrainState

if TYPE_CHECKING:
    import pandas


Metrics = dict[str, Tensor]
Mode = Literal["min", "max"]


class FailedStep(NamedTuple):
    """A member's first failure in an epoch.

    Args:
        member: The member's number.
        seed: The member's seed.
        epoch: The epoch, counted from 1.
        step: Number of batches the member had seen before; seed and step determine the noise of the step.
        cause: Name of the :class:`Failure`: ``"loss"``, ``"gradient"``, ``"overflow"`` or ``"search"``.
    """

    member: int
    seed: int
    epoch: int
    step: int
    cause: str


class History:
    """Metrics of all members in every epoch, and failures.

    Args:
        seeds: The members' seeds ``[M]``.

    Attributes:
        seeds: The seeds of all members that the run has had, in the order in which they were added.
        members: ``int64[M]``, the numbers of the members that it has now, which are their columns. Others have NaN.
        since: For each member, the number of epochs before it was added.
        epochs: Metrics of each epoch by name, on the CPU.
        failures: The first :class:`FailedStep` of each member in each epoch, ordered by epoch and member.
        interrupted: Whether Ctrl-C, or a callback that has set this, ended the last :func:`fit`.
        status: What trained in the last :func:`fit`, how and why, such as ``"replayed: 64 operators"``.
        seconds: How long the last :func:`fit` took, in callbacks so far.
        verified: The calls of the step in this process that were compared with members alone, see :func:`make_train_step`.
        columns: Columns of its frames by name, one value per member, such as the hyperparameters of an :class:`Experiment`.
    """

    def __init__(self, seeds: Tensor):
        self.seeds = seeds.cpu()
        self.members = torch.arange(len(self.seeds), device="cpu")
        self.since = torch.zeros_like(self.members)
        self.epochs: list[Metrics] = []
        self.failures: list[FailedStep] = []
        self.interrupted, self.status, self.seconds = False, "", 0.0
        self.verified: list[int] = []
        self.columns: Mapping[str, Sequence[Any]] = {}

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[str]:
        """The names of the metrics of the last epoch."""
        return iter(self.epochs[-1] if self.epochs else ())

    def __getitem__(self, name: str) -> Tensor:
        """One metric over all epochs: ``[epochs, M]``."""
        for epoch, metrics in enumerate(self.epochs or [{}], start=1):
            if name not in metrics:
                raise KeyError(f"epoch {epoch} has no metric '{name}'; it has {', '.join(metrics)}")
        return torch.stack([metrics[name] for metrics in self.epochs])

    def follow(self, keys: Tensor, origins: Sequence[int] | None = None) -> list[int] | None:
        """Change the members to those with these keys.

        Args:
            keys: The members' keys.
            origins: The index that each has among the members before, -1 where that is not known; by default the keys tell.

        Returns:
            The index that each had among the members before, -1 for a new one; None if the members are the same.

        Raises:
            StateError: if some of several members with one seed are gone, because it is not known which.
        """
        old, new = self.seeds[self.members].tolist(), keys.tolist()
        if origins is None and old == new:
            return None
        places = {seed: place for place, seed in enumerate(old)} if len({*old}) == len(old) else {}
        if origins is None and not places and {*old} & {*new}:
            text = f"a callback returned other members, and some of seeds {old} are equal, so it is not known which"
            raise StateError(f"{text}; select them by hfta.take, or make them inactive (state.active)")
        known = origins or [-1] * len(new)
        origins = [places.get(seed, -1) if place < 0 else place for place, seed in zip(known, new, strict=True)]
        # Of several copies of a member, the first one is that member and the others are new.
        before = [-1 if place in origins[:at] else place for at, place in enumerate(origins)]
        if before == [*range(len(old))]:
            return None
        width, added = len(self.seeds), [at for at, place in enumerate(before) if place < 0]
        numbers, new_ones = self.members.tolist(), itertools.count(width)
        members = [next(new_ones) if place < 0 else numbers[place] for place in before]
        self.members = torch.tensor(members, device="cpu")
        if added:
            self.seeds = torch.cat([self.seeds, keys.cpu()[added]])
            self.since = torch.cat([self.since, torch.full((len(added),), len(self), device="cpu")])
            columns = torch.arange(width, device="cpu")
            self.epochs = tree_map(lambda value: widened(value, columns, width, len(self.seeds)), self.epochs)
        return before

    def frame(self, **columns: Sequence[Any] | Tensor) -> pandas.DataFrame:
        """A pandas frame with one row per member and epoch.

        Args:
            columns: Further columns by name, one value per member, such as ``lr=[...]``.

        Returns:
            Columns ``member``, ``seed``, the given ones, ``epoch``, and one per metric with one number per member; a metric
            with the name of another column is called ``<name>_metric``.

        Raises:
            ImportError: if pandas is not installed.
        """
        pandas, count = require("pandas", "plot"), len(self.seeds)
        fixed = {"member": range(count), "seed": self.seeds.tolist(), **self.columns}
        fixed |= {name: values.tolist() if isinstance(values, Tensor) else values for name, values in columns.items()}
        frames = []
        for epoch, metrics in enumerate(self.epochs or [{}], start=1):
            shown = {name: values.tolist() for name, values in metrics.items() if values.shape == (count,)}
            rows = {**fixed, "epoch": epoch}
            rows |= {f"{name}_metric" if name in rows else name: values for name, values in shown.items()}
            frames.append(pandas.DataFrame(rows))
        return pandas.concat(frames, ignore_index=True).iloc[: count * len(self)]

    def last(self, **columns: Sequence[Any] | Tensor) -> pandas.DataFrame:
        """:meth:`frame` with one row per member: the last epoch in which it was trained or evaluated.

        Example:
            >>> history = History(torch.tensor([7, 8]))
            >>> history.epochs = [{"loss": torch.tensor([0.5, 1.0])}, {"loss": torch.tensor([0.75, 0.25])}]
            >>> history.last(lr=[0.1, 0.2]).loss.tolist()
            [0.75, 0.25]
        """
        latest = self.frame(**columns).iloc[::-1]
        is_absent = latest.iloc[:, latest.columns.get_loc("epoch") + 1 :].isna().all(axis=1)
        rows = latest.iloc[is_absent.argsort(kind="stable")].drop_duplicates("member")
        return rows.sort_values("member", ignore_index=True)

    def best(self, metric: str, mode: Mode = "min", **columns: Sequence[Any] | Tensor) -> pandas.DataFrame:
        """:meth:`frame` with one row per member: its best epoch, or its first one if the metric has only been NaN.

        Args:
            metric: Name of a metric with one number per member.
            mode: Whether lower or higher values are better.
            columns: Further columns, as of :meth:`frame`.

        Example:
            >>> history = History(torch.tensor([7, 8]))
            >>> history.epochs = [{"loss": torch.tensor([0.5, 1.0])}, {"loss": torch.tensor([0.75, 0.25])}]
            >>> history.best("loss").epoch.tolist()
            [1, 2]
        """
        rows = self._best(metric, mode) * len(self.seeds) + torch.arange(len(self.seeds), device="cpu")
        return self.frame(**columns).iloc[rows.tolist()].reset_index(drop=True)

    def table(self, metric: str, mode: Mode = "min") -> str:
        """The best epoch of every member as text, without pandas: seed, :attr:`columns`, value and epoch.

        Args:
            metric: Name of a metric with one number per member.
            mode: Whether lower or higher values are better.

        Example:
            >>> history = History(torch.tensor([7, 8]))
            >>> history.epochs = [{"loss": torch.tensor([0.5, 1.0])}, {"loss": torch.tensor([0.75, 0.25])}]
            >>> print(history.table("loss"))
            2 members, 2 epochs, 0.0 s
            member  seed    loss  best epoch
                 0     7  0.5000           1
                 1     8  0.2500           2
        """
        epochs = self._best(metric, mode)
        best = [f"{value:.4f}" for value in self[metric].double().gather(0, epochs[None])[0].tolist()]
        given = {name: column for name, column in self.columns.items() if name not in ("member", "seed", "seeds")}
        columns = {"member": range(len(best)), "seed": self.seeds.tolist(), **given, metric: best}
        columns["best epoch"] = (epochs + 1).tolist()
        texts = [[f"{each:g}" if isinstance(each, float) else str(each) for each in one] for one in columns.values()]
        rows = [[*columns], *map(list, zip(*texts, strict=True))]
        return f"{len(best)} members, {len(self)} epochs, {self.seconds:.1f} s\n{text_table(rows, '>' * len(columns))}"

    def _best(self, metric: str, mode: Mode) -> Tensor:
        """The number of each member's best epoch, its first one if the metric has only been NaN."""
        present(self, metric)
        return (self[metric].double() * SIGNS[direction_of(mode)]).nan_to_num(torch.inf).argmin(0)

    def __repr__(self) -> str:
        names = f": {', '.join(self.epochs[-1])}" if self.epochs else ""
        return f"History({len(self.seeds)} members, {len(self)} epochs{names})"

    def _repr_html_(self) -> str:
        rows = [["metric", "mean ± std in the last epoch", "mean by epoch"]]
        for name, values in self.epochs[-1].items() if self.epochs else ():
            if values.dim() == 1:
                finite = values[values.isfinite()].double()
                means = [metrics[name].double().nanmean().item() for metrics in self.epochs if name in metrics]
                deviation = (finite - finite.mean()).square().mean().sqrt()
                rows.append([name, f"{finite.mean():.4g} ± {deviation:.2g}", sparkline(means)])
        return f"{self!r}{html_table(rows)}"

    def state_dict(self) -> dict[str, Any]:
        """The history as few tensors and plain data: consecutive epochs with the same metrics are stacked."""
        epochs, kinds = [], [[(name, each.dtype, each.shape) for name, each in one.items()] for one in self.epochs]
        for _, numbers in itertools.groupby(range(len(kinds)), kinds.__getitem__):
            block = [self.epochs[number] for number in numbers]
            epochs.append([len(block), {name: torch.stack([metrics[name] for metrics in block]) for name in block[0]}])
        members = {"seeds": self.seeds, "members": self.members, "since": self.since}
        return {"epochs": epochs, "failures": self.failures, **members}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the epochs and failures of :meth:`state_dict`."""
        self.epochs = []
        for length, block in state_dict["epochs"]:
            self.epochs += [{name: values[at].cpu() for name, values in block.items()} for at in range(length)]
        self.failures = [FailedStep(*failure) for failure in state_dict["failures"]]
        # Files of earlier versions have no such entries, because members could not change.
        for name in ("seeds", "members", "since"):
            setattr(self, name, state_dict.get(name, getattr(self, name)).cpu())


def present(history: History, metric: str) -> Tensor:
    """A metric ``[epochs, M]`` of the members that a run has now, in floating point.

    Raises:
        ValueError: if the metric does not have one number per member.
    """
    values = history[metric]
    if values.shape[1:] != history.seeds.shape:
        text = f"metric '{metric}' has shape {[*values.shape[1:]]} per epoch"
        raise ValueError(f"{text}; a callback needs one number per model {[*history.seeds.shape]}")
    return (values if values.is_floating_point() else values.double())[:, history.members]


def widened(value: Tensor, columns: Tensor, count: int, width: int) -> Tensor:
    """A metric of ``count`` members in their columns of ``width``; the other columns are NaN."""
    if value.shape[:1] != (count,) or (count == width and columns.tolist() == [*range(width)]):
        return value
    value = value if value.is_floating_point() else value.double()
    return value.new_full((width, *value.shape[1:]), torch.nan).index_copy(0, columns, value)


Callback = Callable[[TrainState, History], "TrainState | None"]
"""A function that :func:`fit` calls after each epoch; a state that it returns replaces the current one."""


def is_better(value: Tensor, best: Tensor, sign: int) -> Tensor:
    """Where ``value`` is better than ``best``; NaN is never better, and anything else is better than NaN."""
    return ~value.isnan() & ~(sign * value >= sign * best)
