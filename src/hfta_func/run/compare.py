"""Comparison of configurations that were trained with the same seeds."""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hfta_func._types import html_table, require, text_table
from hfta_func.run.history import History

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_LARGEST = 100_000


class Difference(NamedTuple):
    """The difference of a configuration from the baseline, over pairs with the same seed.

    Args:
        name: The configuration.
        baseline: The configuration that it is compared with.
        pairs: Number of pairs of finite values.
        mean: Mean of the differences, the configuration minus the baseline.
        low: Lower end of the interval of the mean: BCa bootstrap over pairs (Efron, 1987).
        high: Upper end.
        deviation: Standard deviation of the differences.
        unpaired: The standard deviation without pairs, from those of both configurations.
        wins: Share of the pairs in which the configuration has the larger value, ties counted half.
        permutation: P-value of the two-sided permutation test of the mean, which swaps within pairs.
        seeds: Pairs that a two-sided t test at 5 % needs to find this mean with 80 % power; infinite if it is 0.
    """

    name: Any
    baseline: Any
    pairs: int
    mean: float
    low: float
    high: float
    deviation: float
    unpaired: float
    wins: float
    permutation: float
    seeds: float

    def seeds_for(self, difference: float) -> float:
        """Pairs that a two-sided t test at 5 % needs to find a given difference with 80 % power; infinite if it is 0.

        Args:
            difference: A mean difference that matters, in units of the metric.

        Example:
            >>> comparison = compare({"plain": [0.90, 0.91, 0.93, 0.90], "dropout": [0.92, 0.92, 0.94, 0.93]})
            >>> comparison.differences[0].seeds_for(0.02), comparison.differences[0].seeds_for(0.005)
            (5, 31)
        """
        return _seeds(difference, self.deviation)


class Comparison:
    """The differences of all configurations from a baseline; made by :func:`compare`.

    Attributes:
        differences: One :class:`Difference` for each configuration but the baseline.
        level: Level of the intervals.
    """

    def __init__(self, values: Mapping[Any, Mapping[Any, float]], baseline: Any, level: float, *draws: int):
        self.level, self._values, self._draws = level, values, draws
        # NaN, for rows without a name, differs from itself.
        others = [pair for pair in values.items() if pair[0] is not baseline and pair[0] != baseline]
        self.differences = [_difference(*pair, baseline, values[baseline], level, *draws) for pair in others]

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per configuration."""
        return require("pandas", "plot").DataFrame(self.differences)

    def __repr__(self) -> str:
        return f"Comparison({len(self.differences) + 1} configurations, baseline {self.differences[0].baseline!r})"

    def __str__(self) -> str:
        return "\n\n".join(text_table(rows, ">" * len(rows[0])) for rows in self._tables())

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self._tables()))

    def _tables(self) -> Sequence[list[tuple[str, ...]]]:
        """The cells of a table of configurations, and of one of differences."""
        each = [("", "seeds", "mean ± std", f"{self.level:.0%} interval")]
        for name, by_seed in self._values.items():
            finite = [*filter(math.isfinite, by_seed.values())]
            mean, deviation, low, high = _mean(finite, self.level, *self._draws)
            each.append((str(name), str(len(finite)), f"{mean:.4g} ± {deviation:.2g}", f"[{low:.4g}, {high:.4g}]"))
        rows = [("", "pairs", "difference", f"{self.level:.0%} interval", "wins", "p", "seeds")]
        for one in self.differences:
            interval = f"[{one.low:+.4g}, {one.high:+.4g}]"
            numbers = f"{one.mean:+.4g}", interval, f"{one.wins:.0%}", f"{one.permutation:.2g}", f"{one.seeds:.0f}"
            rows.append((f"{one.name} - {one.baseline}", str(one.pairs), *numbers))
        return each, rows

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw every difference with its interval, by matplotlib.

        Args:
            ax: Axes to draw on; by default those of a new figure.

        Returns:
            The axes; ``ax.figure.savefig(path)`` saves the picture.
        """
        axes: Any = require("matplotlib.pyplot", "plot").subplots()[1] if ax is None else ax
        for y, one in enumerate(self.differences):
            error = [[one.mean - one.low], [one.high - one.mean]]
            axes.errorbar(one.mean, y, xerr=error, fmt="o", ms=4, capsize=3, color="#0072B2")
        axes.axvline(0, color="black", lw=0.8)
        axes.set_yticks(range(len(self.differences)), [str(one.name) for one in self.differences])
        axes.invert_yaxis()
        axes.set_xlabel(f"difference from {self.differences[0].baseline}, {self.level:.0%} interval")
        return axes


def compare(
    runs: Any,
    metric: str | None = None,
    *,
    by: str | None = None,
    baseline: Any = None,
    level: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Comparison:
    """Compare configurations that were trained with the same seeds, as Bouthillier et al. (MLSys 2021) recommend.

    The unit of a comparison is the pair of two runs with one seed: they share initial weights, order of data and noise, so
    their difference varies less than that of unrelated runs, as far as the configurations are alike.

    Args:
        runs: Values by configuration and seed, in one of these forms: a dict of equally long sequences by name; a dict of
            histories; a pandas frame with the columns ``seed``, ``metric`` and ``by``; or a study of several seeds per trial.
        metric: The metric of histories and frames, in the last epoch, which must be the same for all.
        by: The frame's column that tells configurations apart.
        baseline: The configuration that the others are compared with; the first one by default.
        level: Level of the intervals.
        resamples: Samples of the bootstrap and of the permutation test.
        seed: Seed of both.

    Returns:
        The differences, as a table, a frame or a picture.

    Raises:
        ImportError: if scipy is not installed.
        ValueError: if there are fewer than two configurations, the baseline is none of them, two of them have no two seeds in
            common, one has a seed twice, or they end at different epochs.

    Example:
        >>> comparison = compare({"plain": [0.90, 0.91, 0.93, 0.90], "dropout": [0.92, 0.92, 0.94, 0.93]})
        >>> round(comparison.differences[0].mean, 4), comparison.differences[0].wins
        (0.0175, 1.0)
    """
    values = _by_seed(runs, metric, by)
    if len(values) < 2:
        raise ValueError(f"there are {len(values)} configurations; a comparison needs two")
    first = next(iter(values)) if baseline is None else baseline
    if first not in values or not 0 < level < 1:
        names = ", ".join(map(repr, values))
        raise ValueError(f"baseline is {first!r} and level {level}; pass one of {names}, and a number between 0 and 1")
    return Comparison(values, first, level, resamples, seed)


def _by_seed(runs: Any, metric: str | None, by: str | None) -> dict[Any, dict[Any, float]]:
    """Values by configuration and seed."""
    if hasattr(runs, "by_seed"):
        return runs.by_seed()
    given = _of_mapping(runs, metric) if isinstance(runs, Mapping) else _of_frame(runs, metric, by)
    for name, (seeds, _) in given.items():
        (seed, count), *_ = collections.Counter(seeds).most_common(1) or [(None, 1)]
        if count > 1:
            cure = "keep one of them, or tell them apart, in a frame by a column by= that is made of two"
            raise ValueError(f"there are several values for {name!r} and seed {seed}; {cure}")
    return {name: dict(zip(*pair, strict=True)) for name, pair in given.items()}


def _of_mapping(runs: Mapping[Any, Any], metric: str | None) -> dict[Any, tuple[Sequence[Any], list[float]]]:
    """Seeds and values by configuration."""
    lengths = {name: len(run) for name, run in runs.items()}
    if len({*lengths.values()}) > 1:
        cure = "give each one value per seed, in the same order, or histories of as many epochs"
        raise ValueError(f"the configurations have {lengths} values, or epochs of histories; {cure}")
    if metric is None and any(isinstance(run, History) for run in runs.values()):
        raise ValueError("histories have several metrics; pass metric=")

    def pair(run: Any) -> tuple[Sequence[Any], list[float]]:
        if isinstance(run, History):
            return run.seeds.tolist(), run[str(metric)][-1].tolist()
        return range(len(run)), [*map(float, run)]

    return {name: pair(run) for name, run in runs.items()}


def _of_frame(frame: Any, metric: str | None, by: str | None) -> dict[Any, tuple[Sequence[Any], list[float]]]:
    """Seeds and values by configuration."""
    if any(name is None or name not in [*getattr(frame, "columns", ())] for name in ("seed", metric, by)):
        raise ValueError("pass a dict of values or histories by name, a study, or a frame with 'seed', metric= and by=")
    if "epoch" in frame.columns:
        ends = frame.groupby([by, "seed"], dropna=False)["epoch"].max()
        if ends.min() < ends.max():
            text = f"{by} and seed end at different epochs, {ends.min()} to {ends.max()}"
            raise ValueError(f"{text}; pass rows of epochs that compare, such as frame[frame.epoch == {ends.min()}]")
        frame = frame.loc[frame["epoch"] == ends.max()]
    groups = frame.groupby(by, sort=False, dropna=False)
    return {name: (rows["seed"].tolist(), rows[metric].tolist()) for name, rows in groups}


def _difference(
    name: Any, values: Mapping[Any, float], baseline: Any, others: Mapping[Any, float], level: float, *draws: int
) -> Difference:
    numpy = require("numpy", "plot")
    common = [(value, others[key]) for key, value in values.items() if key in others]
    finite = [pair for pair in common if all(map(math.isfinite, pair))]
    if len(finite) < 2:
        raise ValueError(f"{name!r} and {baseline!r} have {len(finite)} seeds in common; a comparison needs two")
    pairs = numpy.array(finite)
    differences = pairs[:, 0] - pairs[:, 1]
    mean, deviation, low, high = _mean(differences, level, *draws)
    # The largest rounding error of a sum of differences, which would look like one: metrics are mostly float32.
    dtype = numpy.float32 if (pairs == pairs.astype(numpy.float32)).all() else numpy.float64
    rounding = float(len(pairs) * numpy.finfo(dtype).eps * numpy.abs(pairs).max())
    mean, low, high = (0.0 if abs(value) * len(pairs) <= rounding else value for value in (mean, low, high))
    return Difference(
        *(name, baseline, len(pairs), mean, low, high, deviation),
        unpaired=float(numpy.hypot(*pairs.std(axis=0, ddof=1))),
        wins=float((1 + numpy.sign(differences)).mean() / 2),
        permutation=_permuted(differences, rounding, *draws),
        seeds=_seeds(mean, deviation),
    )


def _mean(values: Any, level: float, resamples: int, seed: int) -> tuple[float, float, float, float]:
    """Mean and standard deviation of two values or more, and the ends of the interval of the mean."""
    numpy, stats = require("numpy", "plot"), require("scipy.stats", "plot")
    mean, deviation = float(numpy.mean(values)), float(numpy.std(values, ddof=1))
    if deviation == 0:
        return mean, deviation, mean, mean
    random = numpy.random.default_rng(seed)
    result = stats.bootstrap((values,), numpy.mean, confidence_level=level, n_resamples=resamples, rng=random)
    return mean, deviation, float(result.confidence_interval.low), float(result.confidence_interval.high)


def _permuted(differences: Any, rounding: float, resamples: int, seed: int) -> float:
    """The share of sign flips whose mean is at least as far from 0; of all flips if they are few, else of random ones.

    SciPy's permutation test takes sums that are equal but for rounding for different.
    """
    numpy, count = require("numpy", "plot"), len(differences)
    if 2**count <= resamples:
        signs = numpy.array([*itertools.product((1, -1), repeat=count)])
    else:
        signs = numpy.random.default_rng(seed).choice((1, -1), size=(resamples, count))
        signs = numpy.concatenate((numpy.ones((1, count)), signs))
    return float((numpy.abs(signs @ differences) >= abs(differences.sum()) - rounding).mean())


def _seeds(mean: float, deviation: float) -> float:
    """Pairs that a two-sided t test at 5 % needs for 80 % power, by the noncentral t distribution."""
    if mean == 0 or deviation == 0:
        return math.inf if mean == 0 else 2
    stats = require("scipy.stats", "plot")

    def power(count: int) -> float:
        critical, shift = stats.t.ppf(0.975, count - 1), abs(mean) / deviation * math.sqrt(count)
        return float(stats.nct.sf(critical, count - 1, shift) + stats.nct.cdf(-critical, count - 1, shift))

    return 2 + bisect.bisect_left(range(2, _LARGEST), 0.8, key=power)
