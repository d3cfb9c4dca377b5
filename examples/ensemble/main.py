"""A deep ensemble on a table against a random forest and a single network: error, likelihood, and calibration.

    python examples/ensemble/main.py
    python examples/ensemble/main.py --data friedman --lr 0.01 --patience 20 --epochs 200

Every member has its own bootstrap sample of the rows and stops early; all train as one array.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import pandas
    from matplotlib.figure import Figure
    from sklearn import datasets
    from sklearn.ensemble import RandomForestRegressor
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples]'") from None

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hfta_func as hfta
from examples.ensemble.model import Batch, Regressor, loss_fn, mixture, nll

LEVELS = torch.linspace(0.05, 0.95, 19)
"""Shares of the targets that central intervals are meant to hold."""


class Quality(NamedTuple):
    """How well predictions fit the test rows."""

    rmse: float
    nll: float
    coverage: Tensor  # the share of targets inside the central interval of each level
    seconds: float


def load(name: str, rows: int) -> tuple[Batch, Batch, Batch]:
    """Rows to train on, to stop by and to test on; everything is standardised by the first."""
    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True)
    else:
        x, y = datasets.make_friedman1(n_samples=rows, noise=1.0, random_state=0)
    inputs, targets = torch.tensor(x).float(), torch.tensor(y).float()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    count = len(order)
    parts = order.split([count - 2 * (count // 5), count // 5, count // 5])
    fitted = parts[0]
    inputs, targets = ((part - part[fitted].mean(0)) / part[fitted].std(0) for part in (inputs, targets))
    train, val, test = ((inputs[part], targets[part]) for part in parts)
    return train, val, test


def quality(mean: Tensor, std: Tensor, targets: Tensor, seconds: float) -> Quality:
    """The quality of normal distributions."""
    std = std.clamp(min=1e-6)
    normal = torch.distributions.Normal(mean, std)
    # The level of the central interval that ends at the target.
    reached = 2 * (normal.cdf(targets) - 0.5).abs()
    coverage = (reached <= LEVELS[:, None]).float().mean(1)
    rmse = (mean - targets).square().mean().sqrt()
    return Quality(rmse.item(), -normal.log_prob(targets).mean().item(), coverage, seconds)


def train(
    flags: argparse.Namespace, data: tuple[Batch, Batch, Batch], members: int, bootstrap: bool
) -> tuple[Tensor, float]:
    """The outputs of an array on the test rows, ``[M, N, 2]``, and the seconds that training took."""

    def make_model() -> Regressor:
        return Regressor(data[0][0].shape[1], flags.width)

    start, seeds = time.perf_counter(), range(flags.seed, flags.seed + members)
    step = hfta.make_train_step(make_model(), loss_fn, hfta.adamw(lr=flags.lr, weight_decay=1e-3))
    state = step.init(*hfta.init_params(make_model, seeds), seeds=seeds)
    loader = hfta.ArrayLoader(data[0], flags.batch_size, seeds=seeds, bootstrap=bootstrap)
    evaluate = hfta.make_eval_step(make_model(), nll)
    state, _ = hfta.fit(
        *(step, state, loader),
        epochs=flags.epochs,
        evaluate=lambda state: evaluate(state, data[1]),
        callbacks=[hfta.callbacks.early_stopping("nll", patience=flags.patience)],
        restore_best="nll",
        compact=True,
        progress=False,
    )
    seconds = time.perf_counter() - start
    return hfta.predict(make_model(), state, data[2][0]).outputs, seconds


def forest(flags: argparse.Namespace, data: tuple[Batch, Batch, Batch]) -> Quality:
    """A random forest; the spread of its trees, with the error that they leave on rows out of the bag, is its deviation."""
    start = time.perf_counter()
    model = RandomForestRegressor(200, min_samples_leaf=3, oob_score=True, random_state=flags.seed)
    model.fit(data[0][0].numpy(), data[0][1].numpy())
    seconds = time.perf_counter() - start
    trees = torch.stack([torch.tensor(tree.predict(data[2][0].numpy())).float() for tree in model.estimators_])
    left = (torch.tensor(model.oob_prediction_).float() - data[0][1]).square().mean()
    return quality(trees.mean(0), (trees.var(0) + left).sqrt(), data[2][1], seconds)


def draw(qualities: dict[str, Quality], path: Path) -> None:
    """The calibration: how many targets the intervals hold, against how many they should."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="calibrated")
    for name, each in qualities.items():
        axes.plot(LEVELS.tolist(), each.coverage.tolist(), marker="o", markersize=3, label=name)
    axes.set(xlabel="share that the interval should hold", ylabel="share of test targets that it holds")
    axes.set(xlim=(0, 1), ylim=(0, 1), title="Central intervals of the predicted distributions")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", choices=["diabetes", "friedman"], default="diabetes", help="a table with a number to predict"
    )
    parser.add_argument("--rows", type=int, default=2000, help="rows of the synthetic table")
    parser.add_argument("--members", type=int, default=32, help="members of the ensemble")
    parser.add_argument("--width", type=int, default=64, help="units of each hidden layer")
    parser.add_argument("--epochs", type=int, default=100, help="most epochs of training")
    parser.add_argument("--patience", type=int, default=8, help="epochs without improvement after which a member stops")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first member")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of table and picture")
    flags = parser.parse_args(argv)
    for name, low in (("rows", 50), ("members", 2), ("width", 1), ("epochs", 1), ("patience", 1), ("batch_size", 1)):
        if getattr(flags, name) < low:
            parser.error(f"--{name.replace('_', '-')} is {getattr(flags, name)}; it must be at least {low}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    flags = parse(argv)
    data = load(flags.data, flags.rows)
    targets = data[2][1]
    outputs, seconds = train(flags, data, flags.members, bootstrap=True)
    alone, own_seconds = train(flags, data, 1, bootstrap=False)
    qualities = {
        f"ensemble of {flags.members}": quality(*mixture(outputs), targets, seconds),
        "one network": quality(*mixture(alone), targets, own_seconds),
        "random forest": forest(flags, data),
    }
    inside = {name: dict(zip(LEVELS.tolist(), each.coverage.tolist(), strict=True)) for name, each in qualities.items()}
    table = pandas.DataFrame(
        {
            "model": [*qualities],
            "rmse": [each.rmse for each in qualities.values()],
            "nll": [each.nll for each in qualities.values()],
            "inside 90 %": [each.coverage[17].item() for each in qualities.values()],
            "calibration error": [(each.coverage - LEVELS).abs().mean().item() for each in qualities.values()],
            "seconds": [each.seconds for each in qualities.values()],
        }
    )
    print(table.round(3).to_string(index=False))
    flags.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(flags.out / "ensemble.csv", index=False)
    pandas.DataFrame(inside).rename_axis("level").to_csv(flags.out / "ensemble-calibration.csv")
    draw(qualities, flags.out / "ensemble.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
