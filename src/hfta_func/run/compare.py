"""Comparison of configurations that were trained with the same seeds."""

from __future__ import annotations

import abc
import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

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
        sign: P-value of the two-sided sign test, without ties.
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
    sign: float
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
        return _seeds(require("scipy.stats", "plot"), difference, self.deviation)


class Tabled(abc.ABC):
    """What is shown as tables, as text and in notebooks."""

    @abc.abstractmethod
    def _tables(self) -> Sequence[list[tuple[str, ...]]]:
        """The rows of every table, each with its head."""

    def __str__(self) -> str:
        return "\n\n".join(text_table(rows, ">" * len(rows[0])) for rows in self._tables())

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self._tables()))


class Comparison(Tabled):
    """The differences of all configurations from a baseline; made by :func:`compare`.

    Attributes:
        differences: One :class:`Difference` for each configuration but the baseline.
        level: Level of the intervals.
    """

    def __init__(self, differences: list[Difference], level: float, summarise: Callable[[], list[tuple[Any, ...]]]):
        self.differences = differences
        self.level = level
        self._summarise = summarise

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per configuration."""
        return require("pandas", "plot").DataFrame(self.differences)

    def __repr__(self) -> str:
        return f"Comparison({len(self.differences) + 1} configurations, baseline {self.differences[0].baseline!r})"

    def _tables(self) -> Sequence[list[tuple[str, ...]]]:
        """The cells of a table of configurations, and of one of differences."""
        each = [("", "seeds", "mean ± std", f"{self.level:.0%} interval")]
        for name, seeds, mean, deviation, low, high in self._summarise():
            each.append((str(name), str(seeds), f"{mean:.4g} ± {deviation:.2g}", f"[{low:.4g}, {high:.4g}]"))
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
        metric: The metric of histories and frames, in the last epoch.
        by: The frame's column that tells configurations apart.
        baseline: The configuration that the others are compared with; the first one by default.
        level: Level of the intervals.
        resamples: Samples of the bootstrap and of the permutation test.
        seed: Seed of both.

    Returns:
        The differences, as a table, a frame or a picture.

    Raises:
        ImportError: if scipy is not installed.
        ValueError: if there are fewer than two configurations, the baseline is none of them, or two of them have no two seeds
            in common.

    Example:
        >>> comparison = compare({"plain": [0.90, 0.91, 0.93, 0.90], "dropout": [0.92, 0.92, 0.94, 0.93]})
        >>> round(comparison.differences[0].mean, 4), comparison.differences[0].wins
        (0.0175, 1.0)
    """
    values = _by_seed(runs, metric, by)
    if len(values) < 2:
        raise ValueError(f"there are {len(values)} configurations; a comparison needs two")
    first, options = checked_baseline(baseline, values, level), (level, resamples, seed)
    others = [pair for pair in values.items() if pair[0] != first]
    differences = [_difference(*pair, first, values[first], *options) for pair in others]
    return Comparison(differences, level, functools.partial(_summaries, values, *options))


def checked_baseline(baseline: Any, names: Mapping[Any, Any], level: float) -> Any:
    """The baseline, by default the first name; raises a ValueError if it is none of them, or a level is none."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must be between 0 and 1")
    first = next(iter(names), None) if baseline is None else baseline
    if first not in names:
        raise ValueError(f"the baseline {first!r} is none of the configurations {', '.join(map(repr, names))}")
    return first


def _by_seed(runs: Any, metric: str | None, by: str | None) -> dict[Any, dict[Any, float]]:
    """Values by configuration and seed."""
    if hasattr(runs, "by_seed"):
        return runs.by_seed()
    if isinstance(runs, Mapping):
        histories = {name: run for name, run in runs.items() if isinstance(run, History)}
        if histories and metric is None:
            raise ValueError("histories have several metrics; pass metric=")
        listed = {
            name: [*(run.tolist() if isinstance(run, Tensor) else run)]
            for name, run in runs.items()
            if name not in histories
        }
        lengths = {name: len(run) for name, run in listed.items()}
        if len({*lengths.values()}) > 1:
            raise ValueError(
                f"the configurations have {lengths} values; give each one value per seed, in the same order"
            )
        seeds = {name: run.seeds.tolist() for name, run in histories.items()}
        listed |= {name: run[str(metric)][-1].tolist() for name, run in histories.items()}
        return {name: dict(zip(seeds.get(name, range(len(listed[name]))), listed[name], strict=True)) for name in runs}
    if any(name is None or name not in [*getattr(runs, "columns", ())] for name in ("seed", metric, by)):
        raise ValueError(
            "pass a dict of values or histories by name, a study, or a frame with the columns 'seed', metric= and by="
        )
    frame = runs.loc[runs["epoch"] == runs["epoch"].max()] if "epoch" in runs.columns else runs
    if (twice := frame.duplicated([by, "seed"])).any():
        name, seed = frame.loc[twice, [by, "seed"]].iloc[0]
        cure = "keep one of them, or pass a column by= that tells them apart, such as one made of two columns"
        raise ValueError(f"the frame has several rows for {by} {name} and seed {seed}; {cure}")
    return {name: dict(zip(rows["seed"], rows[metric], strict=True)) for name, rows in frame.groupby(by, sort=False)}


def _difference(
    name: Any, values: Mapping[Any, float], baseline: Any, others: Mapping[Any, float], level: float, *draws: int
) -> Difference:
    numpy, stats = require("numpy", "plot"), require("scipy.stats", "plot")
    common = [(value, others[key]) for key, value in values.items() if key in others]
    finite = [pair for pair in common if all(map(math.isfinite, pair))]
    if len(finite) < 2:
        raise ValueError(f"{name!r} and {baseline!r} have {len(finite)} seeds in common; a comparison needs two")
    pairs = numpy.array(finite)
    differences = pairs[:, 0] - pairs[:, 1]
    mean, deviation, low, high = _mean(numpy, stats, differences, level, *draws)
    # The largest rounding error of a sum of differences, which would look like one: metrics are mostly float32.
    dtype = numpy.float32 if (pairs == pairs.astype(numpy.float32)).all() else numpy.float64
    rounding = float(len(pairs) * numpy.finfo(dtype).eps * numpy.abs(pairs).max())
    mean, low, high = (0.0 if abs(value) * len(pairs) <= rounding else value for value in (mean, low, high))
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    return Difference(
        *(name, baseline, len(pairs), mean, low, high, deviation),
        unpaired=float(numpy.hypot(*pairs.std(axis=0, ddof=1))),
        wins=(wins + (len(pairs) - wins - losses) / 2) / len(pairs),
        sign=float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0,
        permutation=_permuted(numpy, differences, rounding, *draws),
        seeds=_seeds(stats, mean, deviation),
    )


def _summaries(values: Mapping[Any, Mapping[Any, float]], *options: Any) -> list[tuple[Any, ...]]:
    """Name, number of finite values, mean, standard deviation and interval of each configuration."""
    numpy, stats = require("numpy", "plot"), require("scipy.stats", "plot")
    finite = {name: numpy.array([*filter(math.isfinite, by_seed.values())]) for name, by_seed in values.items()}
    return [(name, len(each), *_mean(numpy, stats, each, *options)) for name, each in finite.items()]


def _mean(
    numpy: Any, stats: Any, values: Any, level: float, resamples: int, seed: int
) -> tuple[float, float, float, float]:
    """Mean and standard deviation of two values or more, and the ends of the interval of the mean."""
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if deviation == 0:
        return mean, deviation, mean, mean
    random = numpy.random.default_rng(seed)
    result = stats.bootstrap((values,), numpy.mean, confidence_level=level, n_resamples=resamples, rng=random)
    return mean, deviation, float(result.confidence_interval.low), float(result.confidence_interval.high)


def _permuted(numpy: Any, differences: Any, rounding: float, resamples: int, seed: int) -> float:
    """The share of sign flips whose mean is at least as far from 0; of all flips if they are few, else of random ones.

    SciPy's permutation test takes sums that are equal but for rounding for different.
    """
    count, is_exact = len(differences), 2 ** len(differences) <= resamples
    signs = [*itertools.product((1, -1), repeat=count)] if is_exact else None
    signs = numpy.array(signs) if is_exact else numpy.random.default_rng(seed).choice((1, -1), size=(resamples, count))
    far = int((numpy.abs(signs @ differences) >= abs(differences.sum()) - rounding).sum())
    return (far + (not is_exact)) / (len(signs) + (not is_exact))


def _seeds(stats: Any, mean: float, deviation: float) -> float:
    """Pairs that a two-sided t test at 5 % needs for 80 % power, by the noncentral t distribution."""
    if mean == 0 or deviation == 0:
        return math.inf if mean == 0 else 2

    def power(count: int) -> float:
        critical, shift = stats.t.ppf(0.975, count - 1), abs(mean) / deviation * math.sqrt(count)
        return float(stats.nct.sf(critical, count - 1, shift) + stats.nct.cdf(-critical, count - 1, shift))

    count = 2 + bisect.bisect_left(range(2, _LARGEST), 0.8, key=power)
    return math.inf if count == _LARGEST else count
