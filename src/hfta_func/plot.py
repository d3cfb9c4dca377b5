"""Plots of many members at once; they need ``pip install 'hfta_func[plot]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfta_func._types import require

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

# Okabe and Ito, "Color universal design", 2008: distinct with every kind of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def bands(
    frame: pandas.DataFrame,
    metric: str,
    *,
    by: str | None = None,
    x: str = "epoch",
    level: float = 0.9,
    ax: Axes | None = None,
) -> Axes:
    """Draw a metric over epochs: a line for the mean over members, a band for the central ``level`` of them.

    Values that are not finite are left out; the legend has the number of members with such values.

    Args:
        frame: One row per member and epoch, as :meth:`History.frame` makes it.
        metric: Column to draw.
        by: Column to group by, with a line and a band per group; None makes one group of all members.
        x: Column along the horizontal axis.
        level: Fraction of members in the band, between the quantiles ``(1 - level) / 2`` and ``(1 + level) / 2``.
        ax: Axes to draw on; by default those of a new figure.

    Returns:
        The axes; ``ax.figure.savefig(path)`` saves the picture.

    Raises:
        ImportError: if matplotlib or pandas is not installed.

    Example:
        >>> import pandas
        >>> from matplotlib.figure import Figure
        >>> frame = pandas.DataFrame({"member": [0, 1, 0, 1], "epoch": [1, 1, 2, 2], "loss": [3.0, 1.0, 2.0, 0.0]})
        >>> ax = bands(frame, "loss", ax=Figure().subplots())
        >>> ax.lines[0].get_ydata()
        array([2., 1.])
    """
    pandas, pyplot, ticker = (require(name, "plot") for name in ("pandas", "matplotlib.pyplot", "matplotlib.ticker"))
    axes: Any = ax if ax is not None else pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")[1]
    groups: Any = [(metric, frame)] if by is None else list(frame.groupby(by))
    for number, (name, group) in enumerate(groups):
        finite = group[metric].abs() < float("inf")
        label = str(name)
        if not finite.all():
            # The mean of the remaining members alone would look better than the array was.
            label += f" ({group[~finite]['member'].nunique()} not finite)"
        at = group[finite].groupby(x)[metric]
        low, mean, high = at.quantile((1 - level) / 2), at.mean(), at.quantile((1 + level) / 2)
        color, style = COLORS[number % len(COLORS)], ("-", "--", ":")[number // len(COLORS) % 3]
        axes.fill_between(mean.index, low, high, color=color, alpha=0.18, linewidth=0)
        # A line through one point is invisible.
        marker = "o" if len(mean) == 1 else None
        axes.plot(mean.index, mean, color=color, linestyle=style, marker=marker, linewidth=1.8, label=label)
    axes.set(xlabel=x, ylabel=metric)
    if pandas.api.types.is_integer_dtype(frame[x]):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.grid(color="0.92", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if by is not None:
        axes.legend(title=by, frameon=False, alignment="left")
    return axes


def heatmap(frame: pandas.DataFrame, metric: str, *, x: str, y: str, ax: Axes | None = None) -> Axes:
    """Draw a metric over two hyperparameters: means over members, in their last epoch; not finite if a member is not.

    Args:
        frame: One row per member, as :meth:`History.last` or :meth:`History.best` makes it, or one per member and epoch.
        metric: Column to draw.
        x: Column along the horizontal axis.
        y: Column along the vertical axis.
        ax: Axes to draw on; by default those of a new figure.

    Returns:
        The axes; ``ax.figure.savefig(path)`` saves the picture.

    Raises:
        ImportError: if matplotlib is not installed.

    Example:
        >>> import pandas
        >>> from matplotlib.figure import Figure
        >>> frame = pandas.DataFrame({"lr": [0.1, 0.1, 0.2, 0.2], "p": [0.0, 0.5, 0.0, 0.5], "loss": [1.0, 2.0, 3.0, 4.0]})
        >>> ax = heatmap(frame, "loss", x="lr", y="p", ax=Figure().subplots())
        >>> [text.get_text() for text in ax.texts]
        ['1', '3', '2', '4']
    """
    pyplot, numpy = require("matplotlib.pyplot", "plot"), require("numpy", "plot")
    axes: Any = ax if ax is not None else pyplot.subplots(layout="constrained")[1]
    if {"member", "epoch"} <= {*frame.columns}:
        frame = frame.sort_values("epoch", kind="stable").drop_duplicates("member", keep="last")
    # With NumPy's mean, because that of pandas leaves members out that are not finite.
    means = frame.groupby([y, x])[metric].agg(lambda values: values.to_numpy().mean()).unstack()
    picture = axes.imshow(means, cmap="cividis", aspect="auto", origin="lower")
    for (row, column), mean in numpy.ndenumerate(means):
        color = "white" if picture.norm(mean) < 0.5 else "black"
        axes.text(column, row, f"{mean:.3g}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(means.columns)), map(str, means.columns))
    axes.set_yticks(range(len(means.index)), map(str, means.index))
    axes.set(xlabel=x, ylabel=y)
    axes.figure.colorbar(picture, ax=axes, label=metric)
    return axes
