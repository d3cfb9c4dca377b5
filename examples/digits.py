"""Train 48 image classifiers as one array: 16 seeds for each of 3 learning rates, on scikit-learn's handwritten digits.

    python examples/digits.py

The model, the loss and the metric are those of one ordinary PyTorch model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import numpy
    import pandas
    from matplotlib.ticker import PercentFormatter
    from scipy import stats
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    import hfta_func as hfta
    from hfta_func.plot import bands
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples]'") from None

Batch = tuple[Tensor, Tensor]


class CNN(nn.Sequential):
    """Three convolutions with batch normalisation, then dropout and a linear layer; 8x8 -> 4x4 -> 2x2."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64, 10)),
        )


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one model."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """The fraction of images that one model gets right."""
    images, labels = batch
    return (model(images).argmax(-1) == labels).float().mean()


def load_digits() -> tuple[Batch, Batch]:
    """1347 training and 450 test images ``[N, 1, 8, 8]`` with their labels; the split is the same every time."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = images.astype("float32").reshape(-1, 1, 8, 8) / 16
    split = train_test_split(images, labels, test_size=450, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, split)
    return (train_images, train_labels), (test_images, test_labels)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, then print a table, save a picture and measure the gain."""
    args = parse(argv)
    # One member per pair; members of one seed start from the same weights and see the same batches and dropout masks.
    lr, seeds = zip(*itertools.product(args.lr, range(args.seeds)), strict=True)

    train, test = load_digits()
    loader = hfta.ArrayLoader(train, batch_size=32, seeds=seeds, drop_last=True)
    schedule = hfta.schedules.cosine(lr, T_max=args.epochs * len(loader))
    step = hfta.make_train_step(CNN(), loss_fn, hfta.adam(lr=schedule))
    evaluate = hfta.make_eval_step(CNN(), accuracy)

    state = step.init(*hfta.init_params(CNN, seeds), seeds=seeds)
    options = {"evaluate": lambda state: evaluate(state, test), "compile": args.compile}
    state, history = hfta.fit(step, state, loader, epochs=args.epochs, **options)

    frame = history.frame(lr=lr)
    print(f"\nTest accuracy in % after {args.epochs} epochs, {args.seeds} seeds for each learning rate\n")
    print(table(frame[frame.epoch == args.epochs]))
    draw(frame, args.out)
    print(f"\nPicture: {args.out}")
    run = torch.compile(step, fullgraph=True) if args.compile else step
    print(compare(run, state, lr, list(itertools.islice(loader, 10)), "compiled" if args.compile else "eager"))


def table(last: pandas.DataFrame) -> str:
    """One row per learning rate, with the 95 % bootstrap interval of the mean over seeds."""
    rows = [f"{'lr':>8} {'mean':>8} {'95 % interval':>17} {'worst':>8} {'best':>8}  seed of best"]
    for lr, members in last.groupby("lr"):
        percent = 100 * members.accuracy
        interval = stats.bootstrap((percent,), numpy.mean, method="percentile", random_state=0).confidence_interval
        between, best = "{:.2f} - {:.2f}".format(*interval), members.seed[percent.idxmax()]
        rows.append(f"{lr:8g} {percent.mean():8.2f} {between:>17} {percent.min():8.2f} {percent.max():8.2f}  {best:12}")
    return "\n".join(rows)


def draw(frame: pandas.DataFrame, path: Path) -> None:
    """Test accuracy over epochs."""
    ax = bands(frame, "accuracy", by="lr")
    ax.get_legend().set_title("learning rate")
    count = frame.member.nunique()
    caption = f"{count} CNNs trained as one array. Lines: mean over seeds; bands: the central 90 % of them"
    ax.set_title(caption, loc="left", fontsize="small", color="0.3")
    ax.set_ylabel("test accuracy")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(path, dpi=180)


def compare(
    step: Callable[..., Any], state: hfta.step.TrainState, lr: Sequence[float], batches: list[Batch], how: str
) -> str:
    """The time of a member's step in the array, and in an ordinary loop that trains members one after another."""
    # One member of each learning rate, on its own batches. The allocator is the process's, so both sides share it.
    hfta.step.keep_memory()
    rates = sorted(set(lr))
    members = [lr.index(rate) for rate in rates]
    models = hfta.unstack_params(CNN(), *hfta.take((state.params, state.buffers), members))
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate) for model, rate in zip(models, rates, strict=True)]
    alone = [[(images[member], labels[member]) for images, labels in batches] for member in members]

    def array() -> None:
        after = state
        for batch in batches:
            after, _ = step(after, batch)

    def loop() -> None:
        for model, optimizer, member_batches in zip(models, optimizers, alone, strict=True):
            for batch in member_batches:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()

    # The first two rounds warm up; array and loop take turns, so that both see the same machine.
    rounds = [(seconds(array) / len(lr), seconds(loop) / len(members)) for _ in range(10)][2:]
    together, single = (1e3 / len(batches) * statistics.median(times) for times in zip(*rounds, strict=True))
    size, threads = len(batches[0][1][0]), torch.get_num_threads()
    return (
        f"Ratio: {single / together:.1f}x. A member's step takes {single:.2f} ms trained by itself (nn.Module and "
        f"torch.optim.Adam, {len(members)} members timed one after another) and {together:.2f} ms as 1/{len(lr)} of an "
        f"array step ({how}); medians of {len(rounds)} alternating rounds of {len(batches)} batches of {size}, "
        f"{threads} threads, same allocator settings."
    )


def seconds(work: Callable[[], None]) -> float:
    """How long a piece of work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train many digit classifiers as one array.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=16, help="seeds for each learning rate, at least 2")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4, 1e-2, 2e-1], help="learning rates")
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="where to save the picture")
    parser.add_argument("--compile", action="store_true", help="compile the step while it trains")
    args = parser.parse_args(argv)
    if args.seeds < 2 or args.epochs < 1:
        parser.error("give at least 2 seeds, which an interval over seeds needs, and at least 1 epoch")
    return args


if __name__ == "__main__":
    main()
