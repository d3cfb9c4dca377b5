"""Federated averaging against a plain loop over clients, and 256 peers that average in the groups of a grid.

    python -m examples.federated.main fedavg
    python -m examples.federated.main peers --dropouts 0.1

Clients hold shards of scikit-learn's digits with skewed labels. All clients of all seeds train as one array, between whose
epochs members average.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

try:
    from examples.federated.model import Batch, Classifier, accuracy, load, loss_fn, shards
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples]'") from None

import hfta_func as hfta

Groups = Callable[[int], Tensor]
"""Which peers average in a round: ``[M]`` integers, equal in each group, and -1 of those that are away."""


def array(flags: argparse.Namespace, data: Batch, test: Batch, rows: list[list[Tensor]]) -> tuple[Tensor, list[int]]:
    """Federated averaging, all clients of all seeds at once; the accuracy ``[rounds, seeds]``, and clients' steps a round."""
    count = flags.clients * flags.seeds
    step = hfta.make_train_step(Classifier(), loss_fn, hfta.sgd(lr=flags.lr))
    # Clients of one seed begin with the same network.
    seeds = [seed for seed in range(flags.seeds) for _ in range(flags.clients)]
    state = step.init(*hfta.init_params(Classifier, seeds), seeds=range(count))
    shares = [each for clients in rows for each in clients]
    loader = hfta.ArrayLoader(data, flags.batch_size, seeds=range(count), rows=shares)
    measure = hfta.make_eval_step(Classifier(), accuracy)
    accuracies: list[Tensor] = []
    callbacks = [
        hfta.callbacks.averaging(seeds, weights=[len(each) for each in shares]),
        lambda state, history: accuracies.append(
            measure(hfta.take(state, range(0, count, flags.clients)), test)["accuracy"]
        ),
    ]
    hfta.fit(step, state, loader, epochs=flags.rounds, callbacks=callbacks, progress=False)
    return torch.stack(accuracies), loader.lengths


def loop(flags: argparse.Namespace, data: Batch, test: Batch, clients: list[Tensor], seed: int) -> list[float]:
    """The same in plain PyTorch, one client after another; the accuracy after each round."""
    torch.manual_seed(seed)
    model, common, accuracies = Classifier(), Classifier(), []
    sizes = [len(rows) for rows in clients]
    for _ in range(flags.rounds):
        total = [torch.zeros_like(value) for value in common.parameters()]
        for rows, size in zip(clients, sizes, strict=True):
            model.load_state_dict(common.state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=flags.lr)
            steps = math.ceil(size / flags.batch_size)
            # Every batch is full.
            passes = math.ceil(steps * flags.batch_size / size)
            order = torch.cat([rows[torch.randperm(size)] for _ in range(passes)])
            for batch in order.split(flags.batch_size)[:steps]:
                optimizer.zero_grad()
                loss_fn(model, (data[0][batch], data[1][batch])).backward()
                optimizer.step()
            for value, param in zip(total, model.parameters(), strict=True):
                value += param.detach() * (size / sum(sizes))
        for value, mean in zip(common.parameters(), total, strict=True):
            value.data.copy_(mean)
        with torch.no_grad():
            accuracies.append(float(accuracy(common, test)))
    return accuracies


def fedavg(flags: argparse.Namespace) -> None:
    """Federated averaging in both ways, with a table."""
    data, test = load()
    rows = [shards(data[1], flags.clients, flags.alpha, seed) for seed in range(flags.seeds)]
    start = time.perf_counter()
    together, steps = array(flags, data, test, rows)
    middle = time.perf_counter()
    alone = torch.tensor([loop(flags, data, test, rows[seed], seed) for seed in range(flags.seeds)]).T
    end = time.perf_counter()
    print(f"{flags.seeds} seeds of {flags.clients} clients, {min(steps)} to {max(steps)} steps a round")
    print("round  array          loop")
    for number in range(flags.rounds):
        if (number + 1) % max(1, flags.rounds // 10) == 0:
            print(f"{number + 1:5d}  {_spread(together[number])}  {_spread(alone[number])}")
    print(f"array {middle - start:.1f} s, loop {end - middle:.1f} s: {(end - middle) / (middle - start):.1f}x as fast")


def grid_of(*sizes: int) -> Groups:
    """Peers on a grid, who average along one dimension in each round (Ryabinin et al., "Moshpit SGD", NeurIPS 2021)."""
    numbers = torch.arange(math.prod(sizes)).reshape(sizes)

    def groups(turn: int) -> Tensor:
        # Along one dimension, peers have the same number.
        along = turn % len(sizes)
        first = numbers.select(along, 0).unsqueeze(along)
        return first.expand(sizes).flatten()

    return groups


def at_random(num_models: int, count: int) -> Groups:
    """Groups of equal sizes, drawn anew in each round."""
    (key,) = hfta.random.keys([0])
    return lambda turn: hfta.random.permutation(hfta.random.fold_in(key, turn), num_models) % count


def dropouts(groups: Groups, rate: float) -> Groups:
    """The same groups without peers that are away in a round, each with some probability."""
    (key,) = hfta.random.keys([0])

    def there(turn: int) -> Tensor:
        labels = groups(turn)
        return torch.where(hfta.random.bernoulli(hfta.random.fold_in(key, turn), rate, labels.shape), -1, labels)

    return there


def peers(flags: argparse.Namespace) -> None:
    """Averaging alone, held against its formula, and as part of training."""
    data, test = load()
    side = math.isqrt(flags.peers)
    grid, drawn = grid_of(side, side), at_random(flags.peers, side)
    ways = {
        "grid": grid,
        "grid, dropouts": dropouts(grid, flags.dropouts),
        "at random": drawn,
        "at random, dropouts": dropouts(drawn, flags.dropouts),
    }
    step = hfta.make_train_step(Classifier(), loss_fn, hfta.sgd(lr=flags.lr))
    begin = step.init(*hfta.init_params(Classifier, range(flags.peers)), seeds=range(flags.peers))
    print(f"{flags.peers} peers in {side} groups: mean-square distance to the average, by round, without training")
    for name, groups in ways.items():
        state, shown, formula = begin, [], 1.0
        for turn in range(4):
            state = hfta.step.average(state, hfta.step.mixing(groups(turn)))
            formula *= (_count(groups(turn)) - 1) / (flags.peers - 1)
            expected = f" ({formula:.1e})" if name.startswith("at random") else ""
            shown.append(f"{distance(state) / distance(begin):.1e}{expected}")
        print(f"  {name:20s}{'  '.join(shown)}")
    print("in brackets what is expected of groups at random; a grid is exact after 2 rounds")

    shares = shards(data[1], flags.peers, flags.alpha, 0)
    measure = hfta.make_eval_step(Classifier(), accuracy)
    trained = {
        "alone": dropouts(grid, 1.0),
        **ways,
        "all with all": lambda turn: torch.zeros(flags.peers).long(),
    }
    # Peers begin alike.
    same = begin._replace(params=hfta.init_params(Classifier, [0] * flags.peers).params)
    print(f"accuracy after {flags.rounds} rounds: of the average of all peers, of the worst peer; distance")
    for name, groups in trained.items():
        loader = hfta.ArrayLoader(data, flags.batch_size, seeds=range(flags.peers), rows=shares)
        start = time.perf_counter()
        state, _ = hfta.fit(
            step, same, loader, epochs=flags.rounds, callbacks=[hfta.callbacks.averaging(groups)], progress=False
        )
        seconds = time.perf_counter() - start
        middle = measure(hfta.take(hfta.step.average(state), [0]), test)["accuracy"].item()
        worst = measure(state, test)["accuracy"].min().item()
        print(f"  {name:20s}{middle:.3f}  {worst:.3f}  {distance(state):.2e}  {seconds:.1f} s")


def distance(state: hfta.step.TrainState) -> float:
    """The mean-square distance of members to the average of all."""
    return sum(float((leaf - leaf.mean(0)).square().sum()) / len(leaf) for leaf in state.params.values())


def _count(groups: Tensor) -> int:
    """How many groups there are; who is away is one by itself."""
    return len(groups[groups >= 0].unique()) + int((groups < 0).sum())


def _spread(values: Tensor) -> str:
    return f"{values.mean():.3f} ± {values.std(correction=0):.3f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["fedavg", "peers"], help="clients with a server, or peers without")
    parser.add_argument("--clients", type=int, default=64, help="clients of a server")
    parser.add_argument("--seeds", type=int, default=3, help="how many times with other shards and networks")
    parser.add_argument("--peers", type=int, default=256, help="peers, a square number")
    parser.add_argument("--rounds", type=int, default=20, help="how often members average")
    parser.add_argument("--alpha", type=float, default=0.3, help="concentration of labels; less is more skewed")
    parser.add_argument("--dropouts", type=float, default=0.1, help="share of peers that are away in a round")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    flags = parser.parse_args(argv)
    for name in ("clients", "seeds", "peers", "rounds", "batch_size"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(flags, name)}; it must be at least 1")
    if math.isqrt(flags.peers) ** 2 != flags.peers or flags.peers < 4:
        parser.error(f"--peers is {flags.peers}; it must be a square number of at least 4")
    if flags.alpha <= 0 or not 0 <= flags.dropouts <= 1:
        parser.error("--alpha must be more than 0, and --dropouts from 0 to 1")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    flags = parse(argv)
    (fedavg if flags.part == "fedavg" else peers)(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
