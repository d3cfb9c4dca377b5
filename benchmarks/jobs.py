"""Jobs around the training step, as an array and as the ordinary loop: lines of code and processor time.

``python -m benchmarks jobs`` takes about two minutes. Each job is a pair of functions over the same model, loss and data,
which do not count; what both return is compared. The loops use PyTorch's fused optimizers where there are any.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hfta_func as hfta
from benchmarks import adapters
from benchmarks._measure import ROOT, interleaved, machine, table
from benchmarks._tables import markdown
from benchmarks.lbfgs import equation, make_network
from benchmarks.readme import replaced

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- jobs, made by python -m benchmarks jobs -->"
SEEDS = range(8)
RATES = [1e-3 * 1.5**seed for seed in SEEDS]
X = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] + X[:, 2] > 0.8).long()
TEST = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
EPOCHS = 40


def make_model(inputs: int = 16, width: int = 32) -> nn.Module:
    """A classifier."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2))


def entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss of most jobs."""
    return F.cross_entropy(model(batch[0]), batch[1])


def error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """A metric."""
    return {"error": entropy(model, batch)}


# Heads on one frozen network.

TRUNK = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()).requires_grad_(False)
HEAD = functools.partial(make_model, 128, 64)


def heads_array() -> Tensor:
    """The trunk runs once for all heads."""
    extract = hfta.models.make_feature_extractor(TRUNK, {"3": "hidden"})
    loader = hfta.ArrayLoader(
        (X, Y), 32, shared=True, shuffle=False, transform=lambda batch: (extract(batch[0])["hidden"], batch[1])
    )
    heads = hfta.Experiment(HEAD, entropy, hfta.adam(lr=RATES), seeds=8, options={"batch_dims": None})
    return heads.fit(loader, epochs=EPOCHS, progress=False)["loss"][-1]


def heads_loop() -> Tensor:
    """The trunk runs once for each head."""
    losses = torch.zeros(8)
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = HEAD()
        optimizer = torch.optim.Adam(model.parameters(), lr=RATES[seed], fused=True)
        for epoch in range(EPOCHS):
            for inputs, targets in zip(X.split(32), Y.split(32), strict=True):
                optimizer.zero_grad()
                with torch.no_grad():
                    hidden = TRUNK(inputs)
                loss = entropy(model, (hidden, targets))
                loss.backward()
                optimizer.step()
                if epoch == EPOCHS - 1:
                    losses[seed] += loss.detach() / (len(X) // 32)
    return losses


# Second order.

POINTS = torch.rand(100, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([2.0, 1.0]) - torch.tensor(
    [1.0, 0.0]
)
START = torch.cat([torch.linspace(-1, 1, 50)[:, None], torch.zeros(50, 1)], 1)
BURGERS = (POINTS, START, -(torch.pi * START[:, :1]).sin())
SEARCH: dict[str, Any] = {"line_search_fn": "strong_wolfe", "max_iter": 10}


def second_order_array() -> Tensor:
    """Every member with a line search of its own."""
    search = hfta.lbfgs(**SEARCH)
    networks = hfta.Experiment(lambda: make_network(30), equation, search, seeds=8, options={"batch_dims": None})
    return networks.fit([BURGERS], epochs=12, progress=False)["loss"][1]


def second_order_loop() -> Tensor:
    """Closures."""
    losses = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = make_network(30)
        optimizer = torch.optim.LBFGS(model.parameters(), **SEARCH)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = equation(model, BURGERS)
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).detach() for _ in range(12)][1])
    return torch.stack(losses)


# Adapters with batches of unequal length.

SLOW = [rate / 10 for rate in RATES]
LORA = adapters.Job("tiny", 8, batch=4, length=32)
TOKENS = torch.randint(LORA.vocabulary, (60, 32, LORA.length), generator=torch.Generator().manual_seed(0))
OWNERS = torch.randint(8, (60, 32), generator=torch.Generator().manual_seed(1))


def adapters_array() -> Tensor:
    """Each row of a batch passes the base once and its own adapter."""
    stacked = hfta.models.stack_adapters(adapters.make_base(LORA), [adapters.make_config(LORA)] * 8, seeds=SEEDS)
    step = hfta.make_train_step(stacked.model, adapters.loss_fn, hfta.adamw(lr=SLOW), share_frozen=True)
    step, state = hfta.step.by_index(step), step.init(stacked.params, stacked.buffers, seeds=SEEDS)
    for tokens, index in zip(TOKENS, OWNERS, strict=True):
        state, metrics = step(state, (tokens, index))
    return metrics["loss"].nan_to_num()


def adapters_loop() -> Tensor:
    """Each adapter with its rows."""
    loop, losses = adapters.Loop(LORA), torch.zeros(8)
    for member, (model, optimizer) in enumerate(zip(loop.models, loop.optimizers, strict=True)):
        optimizer.param_groups[0]["lr"] = SLOW[member]
        for tokens, index in zip(TOKENS, OWNERS, strict=True):
            losses[member] = 0.0
            if (rows := index == member).any():
                loss = adapters.loss_fn(model, tokens[rows])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[member] = loss.detach()
    return losses


# Data of each member's own.

STRENGTHS = [0.05 * seed for seed in SEEDS]
RARE = [1.0 + seed for seed in SEEDS]


def data_array() -> Tensor:
    """Strength of noise, weight of the rare class and draws of rows differ."""

    def loss_fn(model: nn.Module, batch: Any, hparams: dict[str, Tensor]) -> Tensor:
        inputs = batch[0] + hparams["strength"] * torch.randn_like(batch[0])
        weight = torch.stack([torch.ones_like(hparams["rare"]), hparams["rare"]])
        return F.cross_entropy(model(inputs), batch[1], weight)

    numbers = {"strength": STRENGTHS, "rare": RARE}
    models = hfta.Experiment(make_model, loss_fn, hfta.adam(lr=3e-3), error, seeds=8, **numbers)
    weights = torch.stack([1.0 + (rare - 1) * Y for rare in RARE])
    return models.fit((X, Y), 32, epochs=EPOCHS, weights=weights, evaluate=(X, Y), progress=False)["error"][-1]


def data_loop() -> Tensor:
    """A loader and a criterion for each."""
    errors = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
        criterion = nn.CrossEntropyLoss(torch.tensor([1.0, RARE[seed]]))
        sampler = WeightedRandomSampler(1.0 + (RARE[seed] - 1) * Y, len(X))
        for _ in range(EPOCHS):
            for inputs, targets in DataLoader(TensorDataset(X, Y), 32, sampler=sampler):
                optimizer.zero_grad()
                inputs = inputs + STRENGTHS[seed] * torch.randn_like(inputs)
                criterion(model(inputs), targets).backward()
                optimizer.step()
        with torch.no_grad():
            errors.append(error(model, (X, Y))["error"])
    return torch.stack(errors)


# Hidden state from batch to batch.

TEXT = torch.randint(40, (12 * 40 + 1, 8), generator=torch.Generator().manual_seed(0)).cumsum(0) % 40
PIECES = [(TEXT[at : at + 12], TEXT[at + 1 : at + 13]) for at in range(0, 12 * 40, 12)]


class Words(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.logits = nn.Embedding(40, 24), nn.LSTM(24, 24), nn.Linear(24, 40)

    def forward(self, words: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        """Logits of the words that follow, and the hidden state."""
        output, hidden = self.rnn(self.words(words), hidden)
        return self.logits(output).flatten(0, 1), hidden


def next_word(model: nn.Module, batch: Any, hidden: Any) -> tuple[Tensor, Any]:
    """The loss, and the hidden state."""
    logits, hidden = model(batch[0], hidden)
    return F.cross_entropy(logits, batch[1].flatten()), hidden


def hidden_array() -> Tensor:
    """The state is carried by the step."""
    options = {"batch_dims": None, "carry": (torch.zeros(1, 8, 24), torch.zeros(1, 8, 24))}
    words = hfta.Experiment(Words, next_word, hfta.sgd(lr=1.0), seeds=8, options=options)
    return words.fit(PIECES, epochs=6, progress=False)["loss"][-1]


def hidden_loop() -> Tensor:
    """The state is a variable, detached for each batch."""
    losses = torch.zeros(8)
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for epoch in range(6):
            hidden = (torch.zeros(1, 8, 24), torch.zeros(1, 8, 24))
            for batch in PIECES:
                optimizer.zero_grad()
                loss, hidden = next_word(model, batch, hidden)
                loss.backward()
                optimizer.step()
                hidden = tuple(part.detach() for part in hidden)
                if epoch == 5:
                    losses[seed] += loss.detach() / len(PIECES)
    return losses


# Stop when good enough.

GOOD, MOST = 0.02, 200


def target_array() -> Tensor:
    """Members leave the array at a loss."""
    options: dict[str, Any] = {"callbacks": [hfta.callbacks.stop_at("loss", GOOD)], "compact": True, "progress": False}
    models = hfta.Experiment(make_model, entropy, hfta.adam(lr=3e-3), seeds=8, options={"batch_dims": None})
    loader = hfta.ArrayLoader((X, Y), 32, shared=True, shuffle=False)
    models.fit(loader, epochs=MOST, **options)
    return (models.state.step // len(loader)).float()


def target_loop() -> Tensor:
    """Each breaks."""
    epochs = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
        for epoch in range(1, MOST + 1):  # noqa: B007
            total = 0.0
            for batch in zip(X.split(32), Y.split(32), strict=True):
                optimizer.zero_grad()
                loss = entropy(model, batch)
                loss.backward()
                optimizer.step()
                total += loss.item()
            if total / (len(X) // 32) <= GOOD:
                break
        epochs.append(float(epoch))
    return torch.tensor(epochs)


# Settings whose value is the mean of several seeds.

SETTINGS = [{"lr": 3e-4 * 1.4**number} for number in range(12)]


def nested_array() -> Tensor:
    """Halving of means, in arrays of all settings and seeds."""
    from optuna.distributions import CategoricalDistribution

    from hfta_func import tune

    def build(fixed: Any, members: Any) -> tune.Array:
        models = hfta.Experiment(make_model, entropy, hfta.adam, error, seeds=members.pop("seed"), **members)
        return tune.Array.of(models, (X, Y), 32, shuffle=False, evaluate=(X, Y))

    space = {"lr": CategoricalDistribution([each["lr"] for each in SETTINGS])}
    options = {"scheduler": tune.halving(eta=2, first=3), "direction": "minimize", "enqueue": SETTINGS}
    options |= {"max_models": 48, "progress": False}
    study = tune.run(build, space, metric="error", trials=12, epochs=12, seeds=4, **options)
    return torch.tensor([study.best.values[-1][0], *study.best.std])


def nested_loop() -> Tensor:
    """Halving of means, one model after another."""
    runs = {}
    for number, setting in enumerate(SETTINGS):
        for seed in range(4):
            torch.manual_seed(seed)
            model = make_model()
            runs[number, seed] = model, torch.optim.Adam(model.parameters(), fused=True, **setting)
    left, done = [*range(len(SETTINGS))], 0
    for rung in (3, 6, 12):
        values = {}
        for number in left:
            errors = []
            for seed in range(4):
                model, optimizer = runs[number, seed]
                for _ in range(done, rung):
                    for batch in zip(X.split(32), Y.split(32), strict=True):
                        optimizer.zero_grad()
                        entropy(model, batch).backward()
                        optimizer.step()
                    with torch.no_grad():
                        last = error(model, (X, Y))["error"].item()
                errors.append(last)
            values[number] = statistics.fmean(errors), statistics.stdev(errors)
        left, done = sorted(left, key=values.__getitem__)[: len(left) // 2], rung
    return torch.tensor(values[left[0]])


class Pair(NamedTuple):
    """A job, and by how much the results of both ways may differ."""

    title: str
    array: Callable[[], Tensor]
    loop: Callable[[], Tensor]
    # Of losses in float32, whose rounding Adam amplifies, differently in each process; heads agree to 1e-12 in float64.
    bound: float = 2e-2


JOBS = {
    "heads": Pair("eight heads on one frozen network", heads_array, heads_loop),
    "second order": Pair("eight differential equations by L-BFGS", second_order_array, second_order_loop, 0.05),
    "adapters": Pair("batches that mix the rows of eight LoRA adapters", adapters_array, adapters_loop),
    # They draw other rows and other noise.
    "data": Pair("eight strengths of augmentation, class weights and samplers", data_array, data_loop, 0.5),
    "hidden state": Pair("eight language models with a hidden state", hidden_array, hidden_loop),
    "target": Pair("eight models that stop at a loss", target_array, target_loop, 0.5),
    "nested": Pair("twelve settings with four seeds each, halved by their means", nested_array, nested_loop),
}


def lines(func: Callable[..., Any]) -> int:
    """Lines of code of a function's body: no docstring, no comments, nothing blank."""
    source = textwrap.dedent(inspect.getsource(func))
    body: Any = ast.parse(source).body[0]
    code = source.splitlines()[body.body[0].end_lineno : body.end_lineno]
    return len([line for line in code if line.strip() and not line.strip().startswith("#")])


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Processor time."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(pair: Pair, rounds: int) -> dict[str, Any]:
    """Lines, seconds and agreement of both ways; the first run of each does not count."""
    results = pair.array(), pair.loop()
    timers = {way: functools.partial(cpu_seconds, getattr(pair, way)) for way in ("array", "loop")}
    times = interleaved(timers, rounds, warmup=0)
    return {
        "lines": {way: lines(getattr(pair, way)) for way in timers},
        "seconds": {way: statistics.median(values) for way, values in times.items()},
        "difference": float((results[0] - results[1]).abs().max()),
        "agrees": bool((results[0] - results[1]).abs().max() <= pair.bound),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and say whether arrays and loops agreed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks jobs", description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=[*JOBS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE too")
    parser.add_argument("--write", action="store_true", help="also into docs/benchmarks.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    hfta.step.keep_memory()
    results = {name: measure(JOBS[name], args.rounds) for name in args.jobs}
    rows = []
    for name, one in results.items():
        count, seconds = one["lines"], one["seconds"]
        ratio = f"{seconds['loop'] / seconds['array']:.2f}" if one["agrees"] else f"differs by {one['difference']:.2g}"
        numbers = [count["array"], count["loop"], *(f"{seconds[way]:.2f}" for way in ("array", "loop")), ratio]
        rows.append([JOBS[name].title, *map(str, numbers)])
    head = ["job", "lines, array", "lines, loop", "CPU s, array", "CPU s, loop", "loop / array"]
    print(table(head, rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "jobs": results}, indent=2) + "\n")
    if args.write:
        about = machine()
        where = f"One thread of an {about['cpu']}, PyTorch {about['torch'].split('+')[0]}, {about['date']}."
        PAGE.write_text(replaced(PAGE.read_text(), f"{markdown(head, rows)}\n\n{where}", BEGIN))
    return 0 if all(one["agrees"] for one in results.values()) else 1
