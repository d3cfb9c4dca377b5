"""Evaluation where the data is: models go to the sites, and only declared metrics come back."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
import queue
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from hfta_func import make_eval_step, num_models, stack_params
from hfta_func.cluster import ray_actors
from hfta_func.errors import WorkerError
from hfta_func.models import Stacked
from hfta_func.step import EvalStep
from hfta_func.workers.pool import Pool, WorkerPool
from hfta_func.workers.process import dumps, one_line_error

if TYPE_CHECKING:
    import pandas

Mask = Callable[[Any], Tensor]


class Site(NamedTuple):
    """A site whose data does not leave it.

    Args:
        name: Its name in the table.
        load: Called at the site; returns a tree of tensors with one row per sample.
        resources: Resources of the Ray nodes that are this site, such as ``{"hospital-a": 1}``; without them, the site is a
            process on this machine.
    """

    name: str
    load: Callable[[], Any]
    resources: Mapping[str, float] | None = None


class Score(NamedTuple):
    """One metric of one member for one group of rows at one site.

    Args:
        site: Name of the site.
        group: Name of the group.
        member: Index of the model.
        metric: Name of the metric.
        rows: Number of rows, 0 without an answer.
        mean: Mean over the rows, NaN without an answer.
        low: Lower end of the mean's confidence interval.
        high: Upper end.
        status: ``"ok"``, ``"refused: ..."`` for a group that is too small, ``"missing: ..."`` for a site without an answer,
            or ``"failed: ..."`` for an error at the site.
    """

    site: str
    group: str
    member: int
    metric: str
    rows: int
    mean: float
    low: float
    high: float
    status: str


class Scores(list[Score]):
    """All scores of an evaluation, by site, group, member and metric."""

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per score."""
        return importlib.import_module("pandas").DataFrame([*self], columns=[*Score._fields])


def evaluate(
    models: Sequence[nn.Module],
    sites: Sequence[Site],
    metric_fn: Callable[..., Any],
    *,
    metrics: Sequence[str],
    groups: Mapping[str, Mask] | None = None,
    min_count: int = 10,
    level: float = 0.95,
    batch_size: int = 256,
    timeout: float = 600.0,
) -> Scores:
    """Evaluate M models at K sites at once; each site gets all models as one array.

    The data never leaves its site. Each site returns, for each group, member and declared metric, the number of rows, the
    mean and its confidence interval, which are checked at the site before they are sent. Of an error at a site only the class
    is returned, without its text. This protects from mistakes only: ``metric_fn`` and ``load`` run at the site, so a site
    must trust their authors.

    Args:
        models: Modules of one architecture.
        sites: The sites.
        metric_fn: ``metric_fn(model, batch)`` of ONE model in eval mode: a number for every row, ``[N]``, or a dict of such
            tensors by name. The mean of booleans has Wilson's interval, the mean of other numbers a normal one.
        metrics: Names of all metrics that ``metric_fn`` returns; a single tensor has the function's name.
        groups: Masks ``[N]`` of rows by name, each a function of a site's data; by default one group of all rows.
        min_count: A group of fewer rows is refused, and so is one that differs from another group in fewer rows.
        level: Level of the confidence intervals.
        batch_size: Number of rows that are evaluated at once.
        timeout: Seconds after which a site without an answer is missing.

    Raises:
        ValueError: if there is no site, two have one name, or a number is not valid.
        StackError: if the models are not of one architecture.
        TypeError: if ``metric_fn`` or ``load`` cannot be sent.
        ImportError: if a site has resources and Ray is not installed.

    Example:
        .. code-block:: python

            sites = [Site("a", load_a, {"hospital-a": 1}), Site("b", load_b, {"hospital-b": 1})]
            scores = evaluate(models, sites, correct, metrics=["correct"], min_count=20)
            print(scores.frame())
    """
    _check(sites, metrics, groups, min_count, level)
    groups = {"all": _all_rows} if groups is None else dict(groups)
    width = statistics.NormalDist().inv_cdf((1 + level) / 2)
    step, stacked = make_eval_step(models[0], metric_fn), stack_params(models)
    visit = _Visit(step, stacked, tuple(metrics), groups, min_count, width, batch_size)
    for site in sites:
        try:
            dumps(site.load)
        except Exception as error:
            text = f"site {site.name!r}: load cannot be sent ({one_line_error(error)})"
            raise TypeError(f"{text}; open what it uses inside it") from error
    with contextlib.ExitStack() as stack:
        pools: dict[str, Pool] = {}
        for site in sites:
            made = WorkerPool(1) if site.resources is None else ray_actors.lone(site.resources)
            pools[site.name] = stack.enter_context(made)
        for site in sites:
            pools[site.name].submit(visit, load=site.load)
        deadline = time.monotonic() + timeout
        answers = {name: _answer(pool, deadline, timeout) for name, pool in pools.items()}
    scores = Scores()
    for site, group in itertools.product(sites, groups):
        answer = answers[site.name]
        result = answer if isinstance(answer, str) else answer[group]
        for member, (index, metric) in itertools.product(range(len(models)), enumerate(metrics)):
            refused = 0, math.nan, math.nan, math.nan, result
            numbers: Any = refused if isinstance(result, str) else (*result[member][index], "ok")
            scores.append(Score(site.name, group, member, metric, *numbers))
    return scores


@dataclasses.dataclass(frozen=True)
class _Visit:
    """The function that is called at a site."""

    step: EvalStep
    stacked: Stacked
    metrics: tuple[str, ...]
    groups: Mapping[str, Mask]
    min_count: int
    width: float
    batch_size: int
    label = "metric_fn"

    def __call__(self, load: Callable[[], Any]) -> Any:
        try:
            return self._scores(optree.tree_map(torch.as_tensor, load()))
        except _Refusal as error:
            return f"failed: {error}"
        except Exception as error:
            # Its text may contain data.
            return f"failed: {type(error).__name__}"

    def _scores(self, data: Any) -> dict[str, Any]:
        sizes = {len(leaf) if leaf.dim() else 0 for leaf in optree.tree_leaves(data)}
        if len(sizes) != 1:
            raise _Refusal("load returned leaves of unequal numbers of rows")
        (rows,) = sizes
        masks: dict[str, Tensor] = {}
        refused: dict[str, str] = {}
        for name, mask in self.groups.items():
            selected = torch.as_tensor(mask(data))
            if selected.dtype != torch.bool or selected.shape != (rows,):
                raise _Refusal(f"group {name!r} is no boolean for every row")
            if int(selected.sum()) < self.min_count:
                refused[name] = f"refused: fewer than {self.min_count} rows"
            # The difference of two groups' sums would be that of a few rows.
            elif any(0 < int((selected ^ other).sum()) < self.min_count for other in masks.values()):
                refused[name] = f"refused: fewer than {self.min_count} rows apart from another group"
            else:
                masks[name] = selected
        if not masks:
            return refused
        parts = [self._measured(data, start, rows) for start in range(0, rows, self.batch_size)]
        values = {name: torch.cat([part[name] for part in parts], 1) for name in self.metrics}
        members = range(num_models(self.stacked))
        scores = {
            name: [[self._summary(values[metric][member, selected]) for metric in self.metrics] for member in members]
            for name, selected in masks.items()
        }
        return {**refused, **scores}

    def _measured(self, data: Any, start: int, rows: int) -> dict[str, Tensor]:
        """The metrics of the batch that begins at row ``start``."""
        stop = min(rows, start + self.batch_size)
        measured = self.step(self.stacked, optree.tree_map(lambda leaf: leaf[start:stop], data))
        if set(measured) != set(self.metrics):
            raise _Refusal(f"metric_fn returned {sorted(measured)}, but {sorted(self.metrics)} were declared")
        for name, values in measured.items():
            if values.shape[1:] != (stop - start,) or values.is_complex():
                raise _Refusal(f"metric {name!r} is no number for every row")
        return measured

    def _summary(self, values: Tensor) -> tuple[int, float, float, float]:
        """Number, mean and interval of some values."""
        count, width = len(values), self.width
        mean = middle = float(values.double().mean())
        half = width * float(values.double().std()) / math.sqrt(count)
        if values.dtype == torch.bool:
            middle = (mean + width**2 / (2 * count)) / (1 + width**2 / count)
            half = width * math.sqrt(mean * (1 - mean) / count + (width / (2 * count)) ** 2) / (1 + width**2 / count)
        return count, mean, middle - half, middle + half


class _Refusal(Exception):
    """The site returns no scores; unlike other errors, the text contains no data."""


def _all_rows(data: Any) -> Tensor:
    return torch.ones(len(optree.tree_leaves(data)[0]), dtype=torch.bool)


def _answer(pool: Pool, deadline: float, timeout: float) -> Any:
    """A site's scores or refusals by group, or one text for all groups."""
    try:
        answer = pool.wait(max(0.0, deadline - time.monotonic()))[1]
    except queue.Empty:
        return f"missing: no answer in {timeout:g} s"
    except WorkerError as error:
        return f"missing: {one_line_error(error)}"
    if isinstance(answer, Exception):
        return f"failed: {one_line_error(answer) if isinstance(answer, ImportError) else type(answer).__name__}"
    return answer


def _check(sites: Any, metrics: Any, groups: Any, min_count: int, level: float) -> None:
    names = [site.name for site in sites]
    if not names or len({*names}) < len(names):
        raise ValueError(f"sites are {names}; pass a list of Site, each with a name of its own")
    if isinstance(metrics, str) or not metrics or len({*metrics}) < len(metrics):
        raise ValueError(f"metrics is {metrics!r}; pass a list of the names that metric_fn returns, each once")
    if groups is not None and not groups:
        raise ValueError("groups is empty; leave it out for one group of all rows")
    if min_count < 2 or not 0 < level < 1:
        raise ValueError(f"min_count is {min_count} and level {level}; give at least 2, and a number between 0 and 1")
