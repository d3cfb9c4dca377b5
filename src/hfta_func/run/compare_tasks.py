"""Comparison of configurations by their scores in several tasks, each trained with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hfta_func._types import check_counts, require
from hfta_func.run.compare import Tabled, checked_baseline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Estimate(NamedTuple):
    """A statistic of a configuration's scores, and the ends of its interval."""

    name: Any
    statistic: str
    value: float
    low: float
    high: float


class TaskComparison(Tabled):
    """What the scores ``[seeds, tasks]`` of configurations say; made by :func:`compare_tasks`.

    Attributes:
        estimates: An :class:`Estimate` of each statistic of each configuration.
    """

    def __init__(self, scores: dict[Any, Any], baseline: Any, optimum: float, *options: Any):
        self._scores, self._options, numpy = scores, options, require("numpy", "plot")
        statistics: dict[str, tuple[Any, ...]] = {"iqm": (_iqm,)}
        statistics["median"], statistics["mean"] = (lambda runs: numpy.median(runs.mean(-2), axis=-1),), (_mean,)
        statistics["optimality gap"] = (lambda runs: optimum - _mean(runs.clip(max=optimum)),)
        statistics[f"improves on {baseline}"] = (_improvement, scores[baseline])
        self.estimates = [
            Estimate(name, statistic, *map(float, self._estimated(function, runs, *others)))
            for name, runs in scores.items()
            for statistic, (function, *others) in statistics.items()
            if not others or name != baseline
        ]

    def profile(self, name: Any, thresholds: Sequence[float]) -> tuple[Any, Any, Any]:
        """The performance profile of a configuration: its share of scores above each threshold, with pointwise intervals.

        Args:
            name: The configuration.
            thresholds: Where to look, such as ``numpy.linspace(0, 1, 101)``.

        Returns:
            The shares, and the lower and upper ends of their intervals, as arrays.

        Example:
            >>> compare_tasks({"ours": [[0.5, 1.0], [0.7, 0.2]]}).profile("ours", [0.0, 0.6, 1.0])[0]
            array([1. , 0.5, 0. ])
        """
        stack = require("numpy", "plot").stack
        return self._estimated(lambda runs: stack([_mean(runs > at) for at in thresholds], -1), self._scores[name])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the performance profiles, in bands of their intervals, by matplotlib.

        Args:
            ax: Axes to draw on; by default those of a new figure.

        Returns:
            The axes; ``ax.figure.savefig(path)`` saves the picture.
        """
        axes: Any = require("matplotlib.pyplot", "plot").subplots()[1] if ax is None else ax
        ends = [end for runs in self._scores.values() for end in (runs.min(), runs.max())]
        thresholds = require("numpy", "plot").linspace(min(ends), max(ends), 201)
        for name in self._scores:
            shares, low, high = self.profile(name, thresholds)
            (line,) = axes.plot(thresholds, shares, label=str(name))
            axes.fill_between(thresholds, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        axes.set(xlabel=f"score, with {self._options[0]:.0%} intervals", ylabel="share of runs with a higher score")
        axes.legend()
        return axes

    def _estimated(self, statistic: Callable[..., Any], *scores: Any) -> tuple[Any, Any, Any]:
        """A statistic and the ends of its interval: percentiles of a bootstrap that draws the seeds of every task anew."""
        numpy, (level, resamples, seed) = require("numpy", "plot"), self._options
        random = numpy.random.default_rng(seed)
        rows = [random.integers(len(runs), size=(resamples, *runs.shape)) for runs in scores]
        drawn = [numpy.take_along_axis(runs[None], index, 1) for runs, index in zip(scores, rows, strict=True)]
        low, high = numpy.quantile(statistic(*drawn), ((1 - level) / 2, (1 + level) / 2), axis=0)
        return statistic(*scores), low, high

    def _tables(self) -> list[list[tuple[str, ...]]]:
        cells = {(e.name, e.statistic): f"{e.value:.3g} [{e.low:.3g}, {e.high:.3g}]" for e in self.estimates}
        statistics = dict.fromkeys(statistic for _, statistic in cells)
        rows = [(str(name), *(cells.get((name, statistic), "") for statistic in statistics)) for name in self._scores]
        return [[(f"{self._options[0]:.0%} intervals", *statistics), *rows]]


def compare_tasks(
    scores: Mapping[Any, Any],
    *,
    baseline: Any = None,
    optimum: float = 1.0,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> TaskComparison:
    """Compare configurations by scores in several tasks, as Agarwal et al. (NeurIPS 2021) recommend and rliable computes.

    Of scores ``x[n, k]`` of N seeds in K tasks, normalised so that tasks are comparable:

    - *iqm*, the interquartile mean: the mean of all NK scores but the ``floor(NK / 4)`` lowest and as many highest ones;
    - *median*: ``median_k(mean_n(x[n, k]))``, and *mean*: ``mean_nk(x[n, k])``;
    - *optimality gap*: ``optimum - mean_nk(min(x[n, k], optimum))``, which is better if it is smaller;
    - *improvement* on the baseline's ``y``: ``mean_nmk(x[n, k] > y[m, k])``, ties counted half (Mann and Whitney, 1947);
    - *performance profile*: ``mean_nk(x[n, k] > threshold)``, see :meth:`TaskComparison.profile`.

    Intervals are percentiles of a stratified bootstrap: the seeds of each task are drawn with replacement, independently.

    Args:
        scores: By configuration, scores ``[seeds, tasks]``: arrays, tensors or lists. Numbers of seeds may differ. Give runs
            that failed a low score: NaN makes statistics NaN.
        baseline: The configuration that the others are compared with; the first one by default.
        optimum: The score from which on a run counts as solved.
        level: Level of the intervals.
        resamples: Samples of the bootstrap.
        seed: Seed of the bootstrap.

    Returns:
        The statistics, as a table or a picture.

    Raises:
        ImportError: if scipy is not installed.
        ValueError: if the baseline is none of the configurations, scores are not of two seeds or more, or there are no
            resamples.

    Example:
        >>> found = compare_tasks({"plain": [[0.2, 0.4], [0.3, 0.6]], "tuned": [[0.5, 0.6], [0.7, 0.8]]})
        >>> found.estimates[-1].statistic, found.estimates[-1].value
        ('improves on plain', 0.9375)
    """
    check_counts(resamples=resamples)
    first = checked_baseline(baseline, scores, level)
    numpy, arrays = require("numpy", "plot"), {}
    for name, given in scores.items():
        runs = numpy.asarray(given.tolist() if isinstance(given, Tensor) else given, dtype=numpy.float64)
        tasks = next(iter(arrays.values()), runs).shape[1:]
        if runs.ndim != 2 or len(runs) < 2 or not runs.size or runs.shape[1:] != tasks:
            shapes = {key: [*each.shape] for key, each in (arrays | {name: runs}).items()}
            raise ValueError(f"the scores are {shapes}; give [seeds, tasks] of two seeds or more in the same tasks")
        arrays[name] = runs
    return TaskComparison(arrays, first, optimum, level, resamples, seed)


# Each takes scores [..., N, K] and returns [...]; resamples are an axis in front.


def _iqm(scores: Any) -> Any:
    return require("scipy.stats", "plot").trim_mean(scores.reshape(*scores.shape[:-2], -1), 0.25, axis=-1)


def _mean(scores: Any) -> Any:
    return scores.mean((-2, -1))


def _improvement(scores: Any, others: Any) -> Any:
    # One task after another, because all pairs take memory.
    tasks = [(scores[..., :, None, task], others[..., None, :, task]) for task in range(scores.shape[-1])]
    return sum(_mean(runs > other) + _mean(runs >= other) for runs, other in tasks) / (2 * len(tasks))
