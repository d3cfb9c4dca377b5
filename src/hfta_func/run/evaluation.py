"""Metrics over many batches: of steps, and of an array over data after every epoch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import original
from hfta_func._tree import leaves, per_model, take, tree_map, where
from hfta_func._types import ROWS, Params
from hfta_func.errors import BatchError
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import FailedStep, History, Metrics
from hfta_func.run.row_sampling import array_of, is_dataset, moved
from hfta_func.step.batch import plain, restored
from hfta_func.step.commit import Failure
from hfta_func.step.evaluate import EvalStep
from hfta_func.step.joint import JointStep
from hfta_func.step.members import num_positional
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep

Evaluate = Callable[[TrainState], Metrics] | tuple[Callable[..., Any], Any] | tuple[Callable[..., Any], Any, Any]
"""What :func:`fit` takes as ``evaluate``."""


def make_evaluation(
    step: Any, evaluate: Evaluate | None, state: TrainState, sums: Collection[str] = ()
) -> Callable[[TrainState], Metrics] | None:
    """A function of the state for what :func:`fit` takes as ``evaluate``; raises a ValueError if it is none of that."""
    step = original(step)
    is_metric = isinstance(evaluate, types.FunctionType) and num_positional(evaluate) > 1
    if evaluate is None or (callable(evaluate) and not is_metric):
        return evaluate
    pair: Any = evaluate if isinstance(evaluate, tuple) and len(evaluate) in (2, 3) else [None]
    if not callable(pair[0]) or not isinstance(original(pair[0]), EvalStep) | isinstance(step, TrainStep | JointStep):
        cure = "pass (metric, data) or (metric, data, rows), metric(model, batch) of ONE model; or a function of states"
        raise ValueError(f"evaluate is a {type(evaluate).__qualname__}, step a {type(step).__qualname__}; {cure}")
    metric, data, *rows = pair
    if rows:
        data = ArrayLoader(data, len(leaves(data)[0]), seeds=state.keys, rows=rows[0])
    return Evaluation(step, metric, data, sums)


class Evaluation:
    """``evaluation(state)``: every member's metrics over data, means over its batches weighted by their rows, or ``sums``."""

    def __init__(self, step: Any, metric: Callable[..., Any], data: Any, sums: Collection[str] = ()):
        if is_dataset(data):
            cure = "pass a DataLoader of it, such as torch.utils.data.DataLoader(dataset, 256)"
            raise BatchError(f"the data to evaluate on is a data set, {type(data).__qualname__}; {cure}")
        self._is_batch = is_batch(data)
        # The batches, each time anew; a single one is a list of it.
        self._data: Any = [restored(tree_map(_tensor_of, plain(data)), data)] if self._is_batch else data
        self._made_from, self._sums = (step, metric), sums
        # The buffers that the latest call has written.
        self.written: Params = {}
        self._axis = int(isinstance(data, ArrayLoader) and not data.shared)
        made, dims, trained = original(metric), 0 if self._axis else None, None
        if not isinstance(made, EvalStep):
            made = metric = EvalStep(step.outline, metric, dataclasses.replace(step.options, batch_dims=dims))
            trained = step
        # A compiled one keeps no buffers.
        is_compiled = metric is not made and made.options.batch_dims == dims
        self._step: Any = metric if is_compiled else made.that_keeps(dims, trained)

    def follow(self, positions: list[int], keys: Tensor) -> Evaluation:
        """The evaluation of members that were at ``positions`` before, -1 for new ones."""
        if self._axis == 0:
            return self
        return Evaluation(*self._made_from, self._data.follow(positions, keys, [0] * len(keys)), self._sums)

    def __call__(self, state: TrainState) -> Metrics:
        """The metrics of every member; raises a BatchError if one has no rows, or it is not known how many a batch has."""
        state, device, count = state._replace(opt_state=()), state.keys.device, len(state.keys)
        self.written = {}
        if self._is_batch:
            # Moved once, not in every epoch.
            self._data = moved(self._data, device)
        running, lengths, is_plain = Running(), None, isinstance(self._step, EvalStep)
        is_dealt = isinstance(self._data, ArrayLoader)
        for members, batch in self._data.once() if is_dealt else zip(itertools.repeat(None), self._data):
            batch = moved(batch, device)
            part = state if members is None else take(state, members)
            metrics, new = self._step.with_buffers(part, batch) if is_plain else (self._step(part, batch), {})
            if new:
                before = {path: state.buffers[path] for path in new}
                whole = new if members is None else {k: x.index_copy(0, members, new[k]) for k, x in before.items()}
                self.written |= where(state.active, whole, before)
                state = state._replace(buffers=state.buffers | self.written)
            rows: Any = metrics.pop("rows", None)
            if rows is None:
                sizes = rows_in(batch, self._axis)
                rows, lengths = (sizes[0], lengths) if len(sizes) == 1 else (1, sizes)
            if not isinstance(rows, Tensor) and rows == 0:
                continue
            if self._is_batch:
                return metrics
            few = running if members is None else running.part(members)
            few.accumulate(metrics, rows, summed=self._sums)
            if members is not None:
                running.put(few, members, count)
        if lengths is not None and running.batches > 1:
            text = f"the tensors of a batch have lengths {lengths}, so that means over batches have no weights"
            raise BatchError(f"{text}; have the metric return the number of rows as 'rows', a tensor")
        if running.batches == 0:
            cure = "pass data with rows, or a loader that can be iterated over in every epoch, such as a list"
            raise BatchError(f"there is no row to evaluate; {cure}")
        return running.means(self._sums)


def rows_in(batch: Any, axis: int) -> list[int]:
    """The number of rows of a batch, its ``num_graphs`` or the length of all its tensors; all lengths if these differ."""
    if isinstance(graphs := getattr(batch, "num_graphs", None), int):
        return [graphs]
    tensors = [leaf for leaf in leaves(plain(batch)) if isinstance(leaf, Tensor) and leaf.dim() > axis]
    return sorted({tensor.size(axis) for tensor in tensors})


def _tensor_of(leaf: Any) -> Any:
    """The tensor of an array or column of numbers; anything else as it is."""
    array = array_of(leaf)
    return torch.as_tensor(array) if getattr(getattr(array, "dtype", None), "kind", "") in {*"biufc"} else leaf


def is_batch(data: Any) -> bool:
    """Whether data is one batch, and not an iterable over batches."""
    if isinstance(data, list):
        return len(data) > 0 and all(isinstance(part, Tensor) for part in data)
    return isinstance(data, Tensor | Mapping | tuple) or hasattr(data, "ndim") or not isinstance(data, Iterable)


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
            failed = {"cause": torch.where(active, failure, 0), "step": metrics.get("failed_step", step - 1)}
            # Of members that had none before.
            self.failed = where(self.failed["cause"] == 0, failed, self.failed) if self.failed else failed
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
                total, weight = where(present, total, total.new_zeros(())), torch.where(present, weight, 0)
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

    def means(self, summed: Collection[str] = ()) -> Metrics:
        """The mean of each metric, or the sum of those named, in its own type, float32 at least; sums of integers as such."""
        metrics = {name: value if name in summed else self._mean(name) for name, value in self.sums.items()}
        rows = {name: metrics.pop(name + ROWS) for name in [*metrics] if name + ROWS in metrics}
        return metrics | {name: metrics[name] / rows[name] for name in rows}

    def failures(self, history: History) -> list[FailedStep]:
        """The first failure of each member in the epoch that the history has recorded last."""
        if not self.failed:
            return []
        epoch = torch.full_like(history.members, len(history))
        columns = history.members, history.seeds[history.members], epoch, self.failed["step"], self.failed["cause"]
        rows = zip(*map(Tensor.tolist, columns), strict=True)
        return [FailedStep._make((*row, Failure(cause).name.lower())) for *row, cause in rows if cause]

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        parts = {"counts": self.counts, "sums": self.sums, "dtypes": self.dtypes, "failed": self.failed}
        return {"batches": self.batches, **{name: {**part} for name, part in parts.items()}}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore the sums of :meth:`state_dict`."""
        # Older files have no counts, and sums in the type of the means.
        state_dict = {"counts": dict.fromkeys(state_dict["sums"], state_dict["batches"]), "dtypes": {}, **state_dict}
        vars(self).update(tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, state_dict))

    def _mean(self, name: str) -> Tensor:
        value = self.sums[name].to(_double(self.sums[name]))
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
