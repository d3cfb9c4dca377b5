"""Evidence that an array trains as well as its members do by themselves: every example, both ways, on its embedded data.

    python examples/convergence.py
    python examples/convergence.py resnet bert-next --docs out/pictures

A member begins with the weights of its solo run but sees other batches and other noise, so the two do not end alike. What
is compared are the members together: both ways must reach the stated quality, and their means may differ by no more than
seeds explain.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

try:
    import matplotlib
    import numpy
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
    from PIL import Image
    from scipy import stats
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples]'") from None

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SEEDS = tuple(range(8))
"""One member each."""

LEVEL = 0.01
"""Welch's t-test calls a difference of means more than seed noise if it is less probable than this."""

LABELS = {
    "loss": "training loss",
    "loss_d": "training loss (discriminator)",
    "iou": "test IoU",
    "frechet": "Fréchet distance",
}
"""What metrics are called in pictures; others are of the test data."""


class Case(NamedTuple):
    """One workload.

    Args:
        name: What its picture is named after.
        title: Model and data, in words.
        argv: The example, then its flags.
        metric: Column of the example's table.
        better: Which values of the metric are better.
        stated: The quality that the mean over members must reach.
    """

    name: str
    title: str
    argv: str
    metric: str
    better: Literal["higher", "lower"]
    stated: float


CASES = (
    Case(
        "resnet",
        "Small ResNet-18, handwritten digits",
        "resnet --epochs 12 --batch-size 32 --lr 0.1",
        *("accuracy", "higher", 0.95),
    ),
    Case(
        "mobilenet",
        "Narrow MobileNet V3-small, handwritten digits",
        "mobilenet --version v3s --epochs 12 --batch-size 32 --lr 0.003 --step-size 4",
        *("accuracy", "higher", 0.95),
    ),
    Case(
        "pointnet-cls",
        "Small PointNet, classes of generated surfaces",
        "pointnet --task cls --points 256 --epochs 10 --lr 0.003 --step-size 4",
        *("accuracy", "higher", 0.97),
    ),
    Case(
        "pointnet-seg",
        "Small PointNet, parts of generated surfaces",
        "pointnet --task seg --points 256 --epochs 14 --lr 0.003 --step-size 5",
        *("iou", "higher", 0.8),
    ),
    Case(
        "dcgan",
        "Small DCGAN, handwritten digits",
        "dcgan --epochs 40 --batch-size 64 --lr 0.001",
        *("frechet", "lower", 3.0),
    ),
    # Counts of single characters give a perplexity of 25.3 on the test text, those of pairs 11.1.
    Case(
        "transformer",
        "Small Transformer, next character of Python's manual",
        "transformer --epochs 4 --lr 3 --step-size 3",
        *("perplexity", "lower", 10.5),
    ),
    Case(
        "bert-masked",
        "Small BERT, masked characters of Python's manual",
        "bert --objective masked --epochs 3 --lr 3 --step-size 2",
        *("perplexity", "lower", 14.0),
    ),
    Case(
        "bert-next",
        "Small BERT, next character of Python's manual",
        "bert --objective next --epochs 3 --lr 3 --step-size 2",
        *("perplexity", "lower", 7.5),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, judge and draw; returns 1 if a criterion is not met, else 0."""
    args = parse(argv)
    rows = []
    for case in args.cases:
        array, solo = (train(case, how, args.out) for how in ("array", "solo"))
        row = judge(case, final(array, case.metric), final(solo, case.metric))
        draw(case, array, solo, row, args.docs / f"{case.name}.png")
        # An array has the same seconds in the rows of all its members.
        seconds = {
            f"{how}_seconds": (run.seconds / run.models).sum() for how, run in (("array", array), ("solo", solo))
        }
        rows.append({**row, **seconds})
    frame = pandas.DataFrame(rows).round({"array_seconds": 1, "solo_seconds": 1}).round(4)
    print("\n" + frame.to_string(index=False))
    print(f"\nTable: {write(frame, args.docs / 'quality.csv')}")
    return int((frame.verdict != "passed").any())


def train(case: Case, how: str, out: Path) -> pandas.DataFrame:
    """The example's table after all seeds as one array, or one after another in plain PyTorch."""
    example, *flags = case.argv.split()
    folder = out / case.name / how
    flags += ["--size", "small", "--eval", "--seeds", *map(str, SEEDS), "--out", str(folder)]
    if how == "array":
        # The networks of a GAN take turns in a step of its own, which runs all members together.
        flags += ["--hfta", *(["--chunk-size", "auto"] if example != "dcgan" else [])]
    if importlib.import_module(f"examples.{example}.main").main(flags):
        raise SystemExit(f"{case.name}: the example did not run to its end")
    return pandas.read_csv(folder / f"{example}.csv")


def final(run: pandas.DataFrame, metric: str) -> list[float]:
    """The metric of every member after the last epoch."""
    return run[run.epoch == run.epoch.max()].sort_values("member")[metric].tolist()


def judge(case: Case, array: Sequence[float], solo: Sequence[float]) -> dict[str, Any]:
    """A row of the table of qualities, from the metric of every member both ways; one that is not a number fails.

    References:
        Welch, "The generalization of 'Student's' problem when several different population variances are involved",
        Biometrika 1947.
    """
    row: dict[str, Any] = {"case": case.name, "metric": case.metric, "better": case.better, "stated": case.stated}
    problems = []
    for how, values in ("array", array), ("solo", solo):
        row |= {f"{how}_{name}": float(of(values)) for name, of in (("mean", numpy.mean), ("min", min), ("max", max))}
        mean = row[f"{how}_mean"]
        if not (mean >= case.stated if case.better == "higher" else mean <= case.stated):
            problems.append(f"{how} misses the stated quality")
    # The test has no answer for values that are all the same.
    row["p"] = 1.0 if len({*array, *solo}) == 1 else float(stats.ttest_ind(array, solo, equal_var=False).pvalue)
    if not row["p"] >= LEVEL:
        problems.append("array and solo differ beyond seed noise")
    return {**row, "verdict": "; ".join(problems) or "passed"}


def draw(case: Case, array: pandas.DataFrame, solo: pandas.DataFrame, row: dict[str, Any], path: Path) -> None:
    """The array's members over their solo runs: training loss, test metric, and the metric after the last epoch."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    count = array.member.nunique()
    figure.suptitle(f"{case.title}: {count} seeds as one array, and each by itself", fontsize="large")
    left, middle, right = figure.subplots(1, 3, width_ratios=[4, 4, 2])
    runs = (array, matplotlib.colormaps["viridis"](numpy.linspace(0, 0.9, count))), (solo, ["0.65"] * count)
    # The first metric of an example's table is what it trains by.
    for ax, metric in (left, array.columns[array.columns.get_loc("epoch") + 1]), (middle, case.metric):
        alone, together = (_curves(ax, run, metric, colors) for run, colors in reversed(runs))
        ax.set(xlabel="epoch", ylabel=LABELS.get(metric, f"test {metric}"))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for position, (run, colors) in enumerate(runs):
        values = final(run, case.metric)
        right.scatter(position + numpy.linspace(-0.2, 0.2, count), values, c=colors, s=22, zorder=2)
        right.hlines(numpy.mean(values), position - 0.3, position + 0.3, color="black", linewidth=1.2, zorder=3)
    right.set(
        xticks=[0, 1], xticklabels=["array", "solo"], xlim=(-0.5, 1.5), ylabel=f"{middle.get_ylabel()}, last epoch"
    )
    right.set_xlabel(f"black: means\nWelch: p = {row['p']:.2g}")
    for ax in left, middle, right:
        ax.grid(color="0.92", linewidth=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    line, _ = (ax.axhline(case.stated, color="#D55E00", linestyle=":", linewidth=1.6) for ax in (middle, right))
    legend = {
        f"{count} solo runs in plain PyTorch": alone[0],
        f"one array of {count} members": tuple(together),
        f"stated quality: mean {'≥' if case.better == 'higher' else '≤'} {case.stated:g}": line,
    }
    style = {"loc": "outside lower center", "ncols": 3, "frameon": False, "handlelength": 2.5}
    figure.legend(list(legend.values()), list(legend), handler_map={tuple: HandlerTuple(None, pad=0)}, **style)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=150)
    # A third of the size, and nothing that is seen is lost.
    Image.open(pixels).convert("RGB").quantize(128).save(path, optimize=True, dpi=(150, 150))


def _curves(ax: Axes, run: pandas.DataFrame, metric: str, colors: Any) -> list[Line2D]:
    # A few points are seen better than the corners of lines.
    style = {"linewidth": 1.2, "marker": "o" if run.epoch.max() < 6 else None, "markersize": 3}
    members = zip(run.groupby("member"), colors, strict=True)
    return [ax.plot(own.epoch, own[metric], color=color, **style)[0] for (_, own), color in members]


def write(frame: pandas.DataFrame, path: Path) -> Path:
    """Save the table; cases that were not run now keep their rows."""
    if path.exists():
        kept = pandas.read_csv(path)
        frame = pandas.concat([kept[~kept.case.isin(frame.case)], frame])
    order = [case.name for case in CASES]
    frame.sort_values("case", key=lambda names: names.map(order.index)).to_csv(path, index=False)
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    known = {case.name: case for case in CASES}

    def find(name: str) -> Case:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no case '{name}'; choose from {', '.join(known)}")
        return known[name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", metavar="NAME", nargs="*", type=find, default=CASES, help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("out/convergence"), help="folder for what the examples write")
    parser.add_argument(
        "--docs", type=Path, default=Path("docs/convergence"), help="folder for pictures and quality.csv"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
