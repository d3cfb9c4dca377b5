"""Short runs of many kinds of networks at the sizes of everyday work: ``fit`` as it is by default, over an ordinary loop.

A run is everything from the call of ``fit`` to its end: what it compares, measures and records on the way is in its time, as
it is in a user's. Loop and array take turns; the loop has PyTorch's fused optimizers. The first run of a process, which
measures what no file knows yet, has a column of its own; the other is the median of the later ones. Processor time on one
thread, wall clock on several.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from benchmarks import _code, workloads
from benchmarks._measure import add_to, table

BATCHES = 4
"""Different batches of a run, which come round."""


class Family(NamedTuple):
    """A network, how its loss is computed, and ``batch(generator)``, which makes a batch of one member."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: str = "adam"


def classified(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def fitted(model: nn.Module, batch: Any) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def rows(count: int, *shape: int, classes: int = 0) -> Callable[[torch.Generator], Any]:
    """Random rows with classes, or with numbers."""

    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(count, *shape, generator=generator)
        if classes:
            return x, torch.randint(classes, (count,), generator=generator)
        return x, torch.randn(count, 1, generator=generator)

    return batch


class Graph(nn.Module):
    """Two layers of a graph network: messages along edges, gathered by sum, or by mean, maximum and minimum."""

    def __init__(self, kinds: Sequence[str], width: int = 32):
        super().__init__()
        self.kinds, self.enter = kinds, nn.Linear(16, width)
        self.layers = nn.ModuleList([nn.Linear(width * len(kinds), width) for _ in range(2)])
        self.leave = nn.Linear(width, 4)

    def gather(self, x: Tensor, target: Tensor) -> Tensor:
        """Of the messages ``[E, C]`` to each node."""
        zeros = x.new_zeros(self.nodes, x.shape[1])
        if self.kinds == ["sum"]:
            return zeros.index_add(0, target, x)
        where = target[:, None].expand_as(x)
        parts = [zeros.scatter_reduce(0, where, x, kind, include_self=False) for kind in self.kinds]
        return torch.cat(parts, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """``[nodes, 16], [2, E] -> [nodes, 4]``."""
        self.nodes = len(x)
        x = self.enter(x)
        for layer in self.layers:
            x = F.relu(layer(self.gather(x[edges[0]], edges[1])))
        return self.leave(x)


def graph(nodes: int, edges: int) -> Callable[[torch.Generator], Any]:
    """A random graph with a class for every node."""

    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(nodes, 16, generator=generator)
        return (
            *(x, torch.randint(nodes, (2, edges), generator=generator)),
            torch.randint(4, (nodes,), generator=generator),
        )

    return batch


def of_nodes(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of all nodes."""
    return F.cross_entropy(model(*batch[:2]), batch[2])


class Spike(torch.autograd.Function):
    """A step, with the derivative of a fast sigmoid in its place (Zenke and Ganguli, Neural Computation 30(6), 2018)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """One where the potential is above zero."""
        return (x > 0).to(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """What the gradient needs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """The surrogate."""
        return grad_outputs[0] / (1 + 10 * ctx.saved_tensors[0].abs()) ** 2


class Spiking(nn.Module):
    """Two layers of leaky neurons over ten steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 64] -> [N, 10]``, the mean over steps."""
        hidden, out, total = x.new_zeros(len(x), 100), x.new_zeros(len(x), 10), x.new_zeros(len(x), 10)
        for _ in range(10):
            hidden = 0.9 * hidden + self.first(x)
            spikes = Spike.apply(hidden - 1)
            hidden = hidden - spikes
            out = 0.9 * out + self.second(spikes)
            total = total + out
        return total / 10


class Recurrent(nn.Module):
    """A recurrent layer and a linear one on its last step."""

    def __init__(self, kind: type[nn.Module], width: int, **options: Any):
        super().__init__()
        self.layer = kind(12, width, batch_first=True, **options)
        self.head = nn.Linear(width * (1 + options.get("bidirectional", False)), 5)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, 12] -> [N, 5]``."""
        return self.head(self.layer(x)[0][:, -1])


def pair(i: int, o: int) -> nn.Sequential:
    """Two convolutions with batch norm."""
    own = nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()
    return nn.Sequential(*own, nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    """Three levels of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([pair(3, 16), pair(16, 32), pair(32, 64)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.joined, self.head = nn.ModuleList([pair(64, 32), pair(32, 16)]), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, H, W] -> [N, 1, H, W]``."""
        kept = []
        for layer in self.down:
            x = layer(x if not kept else F.max_pool2d(x, 2))
            kept.append(x)
        for up, joined, skip in zip(self.up, self.joined, kept[1::-1], strict=True):
            x = joined(torch.cat([up(x), skip], 1))
        return self.head(x)


def masks(generator: torch.Generator) -> Any:
    """Images with a mask each."""
    x = torch.randn(4, 3, 64, 64, generator=generator)
    return x, (torch.randn(4, 1, 64, 64, generator=generator) > 0).float()


class Block(nn.Module):
    """A residual block with batch norm."""

    def __init__(self, i: int, o: int, stride: int):
        super().__init__()
        first = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()
        self.layers = nn.Sequential(*first, nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o))
        self.shortcut = nn.Identity() if stride == 1 and i == o else nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, I, H, W] -> [N, O, H / stride, W / stride]``."""
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet14() -> nn.Module:
    """Fourteen layers, the first of sixteen channels (He et al., CVPR 2016, for CIFAR)."""
    sizes = (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    blocks = itertools.starmap(Block, sizes)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def bag(generator: torch.Generator) -> Any:
    """Sixteen words of 10,000 in each row."""
    words = torch.randint(10_000, (32, 16), generator=generator)
    return words, torch.randint(4, (32,), generator=generator)


def triplets(model: nn.Module, batch: Any) -> Tensor:
    """The hardest positive and negative of each row (Hermans et al., arXiv:1703.07737)."""
    out = model(batch[0])
    far, same = torch.cdist(out, out), batch[1][:, None] == batch[1]
    return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 1).mean()


class Spectral(nn.Module):
    """Eigenvalues, or singular values, of a matrix made from each row."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.enter, self.head = kind, nn.Linear(20, 64), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 20] -> [N, 1]``."""
        square = self.enter(x).unflatten(-1, (8, 8))
        if self.kind == "svd":
            return self.head(torch.linalg.svdvals(square))
        return self.head(torch.linalg.eigvalsh(square + square.mT))


def equation(model: nn.Module, batch: Any) -> Tensor:
    """The residual of ``u'' = -u`` (Raissi et al., Journal of Computational Physics 378, 2019)."""
    x = batch[0].clone().requires_grad_()
    first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return (torch.autograd.grad(first.sum(), x, create_graph=True)[0] + model(x)).square().mean()


def tanh_network() -> nn.Module:
    """Three hidden layers of 32 units."""
    hidden = [layer for width in (1, 32, 32) for layer in (nn.Linear(width, 32), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(32, 1))


def words_network() -> nn.Module:
    """The mean of a bag of words, and a linear layer."""
    return nn.Sequential(nn.EmbeddingBag(10_000, 32), nn.Linear(32, 4))


def embedding_network() -> nn.Module:
    """One hidden layer of 64 units."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def _own(name: str) -> Family:
    factory, shape = workloads.OWN[name]
    return Family(factory, rows(32, *shape, classes=6), classified)


FAMILIES: dict[str, Family] = {
    **{name: _own(name) for name in workloads.OWN},
    "lenet, N 64": Family(workloads.lenet, rows(64, 1, 28, 28, classes=10), classified),
    "logistic regression": Family(functools.partial(nn.Linear, 64, 10), rows(32, 64, classes=10), classified),
    "linear, SGD": Family(functools.partial(nn.Linear, 13, 1), rows(32, 13), fitted, "sgd"),
    "GCN, index_add": Family(functools.partial(Graph, ["sum"]), graph(1000, 5000), of_nodes),
    "PNA, scatter_reduce": Family(functools.partial(Graph, ["mean", "amax", "amin"]), graph(500, 2500), of_nodes),
    "spiking": Family(Spiking, rows(32, 64, classes=10), classified),
    "embedding bag, SGD": Family(words_network, bag, classified, "sgd"),
    "LSTM, bidirectional": Family(
        functools.partial(Recurrent, nn.LSTM, 64, bidirectional=True), rows(16, 20, 12, classes=5), classified
    ),
    "GRU": Family(functools.partial(Recurrent, nn.GRU, 64), rows(16, 20, 12, classes=5), classified),
    "U-Net": Family(UNet, masks, lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])),
    "ResNet-14": Family(resnet14, rows(16, 3, 32, 32, classes=10), classified),
    "triplets, cdist": Family(embedding_network, rows(64, 64, classes=8), triplets),
    "eigh": Family(functools.partial(Spectral, "eigh"), rows(32, 20), fitted),
    "svd": Family(functools.partial(Spectral, "svd"), rows(32, 20), fitted),
    "PINN": Family(tanh_network, rows(128, 1), equation),
}
"""By the names of the table."""


def data(family: Family, members: int) -> list[Any]:
    """Batches of all members, ``[M, ...]``."""
    generators = [torch.Generator().manual_seed(member) for member in range(members)]
    return [tuple(map(torch.stack, zip(*map(family.batch, generators), strict=True))) for _ in range(BATCHES)]


def made(family: Family, members: int) -> list[nn.Module]:
    """The models, each from its seed."""
    found = []
    for member in range(members):
        torch.manual_seed(member)
        found.append(family.model())
    return found


def loop(family: Family, batches: list[Any], steps: int) -> Callable[[], None]:
    """What trains one model after another."""
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[family.optimizer]
    models = made(family, len(batches[0][0]))
    own = [[tuple(leaf[member] for leaf in batch) for batch in batches] for member in range(len(models))]

    def train() -> None:
        for model, rounds in zip(models, own, strict=True):
            optimizer = kind(model.parameters(), lr=1e-3, fused=True)
            for batch in itertools.islice(itertools.cycle(rounds), steps):
                optimizer.zero_grad()
                family.loss(model, batch).backward()
                optimizer.step()

    return train


def array(family: Family, batches: list[Any], steps: int) -> Callable[[], None]:
    """The same by :func:`hfta_func.fit`."""
    models = made(family, len(batches[0][0]))
    optimizer = {"adam": hfta.adam, "sgd": hfta.sgd}[family.optimizer](lr=1e-3)
    step = hfta.make_train_step(models[0], family.loss, optimizer)
    state = step.init(*hfta.stack_params(models), seeds=range(len(models)))

    def train() -> None:
        hfta.fit(step, state, batches * (steps // BATCHES), epochs=1, progress=False)

    return train


def measured(family: Family, members: int, steps: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Ratios of the first run and of the later ones, and milliseconds of the loop."""
    batches, ratios, serial = data(family, members), [], []
    loop(family, batches, BATCHES)()
    for _ in range(rounds):
        times = []
        for way in (loop, array):
            train = way(family, batches, steps)
            start = clock()
            train()
            times.append(clock() - start)
        ratios.append(times[0] / times[1])
        serial.append(times[0])
    later = ratios[1:]
    return {
        "first": ratios[0],
        "ratio": statistics.median(later),
        "range": (min(later), max(later)),
        "loop_ms": 1e3 * statistics.median(serial),
    }


def show(found: dict[str, Any]) -> str:
    """A table, the slowest first."""
    ordered = sorted(found.items(), key=lambda item: item[1]["ratio"])
    lines = [
        [
            name,
            f"{row['first']:.2f}",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["range"]),
            f"{row['loop_ms']:.0f}",
        ]
        for name, row in ordered
    ]
    return table(["family", "first run", "later runs", "range", "loop, ms"], lines)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, and print a table for each number of members and of steps."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks families", description=__doc__)
    parser.add_argument("--models", type=int, nargs="+", default=[2, 4, 8], help="numbers of members")
    parser.add_argument("--steps", type=int, nargs="+", default=[40, 400], help="steps of a run")
    parser.add_argument("--threads", type=int, choices=[1, 2], default=1)
    parser.add_argument("--rounds", type=int, default=6, help="runs of each, the first on its own")
    parser.add_argument("--filter", default="", help="only families whose name holds this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add all numbers to FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    for members, steps in itertools.product(args.models, args.steps):
        case, found = f"M {members}, {steps} steps{', two threads' if args.threads == 2 else ''}", {}
        for name, family in FAMILIES.items():
            if args.filter in name:
                found[name] = measured(family, members, steps, args.rounds, clock)
                print(f"{name}: {found[name]['ratio']:.2f}", file=sys.stderr, flush=True)
                if args.json:
                    add_to(args.json, "families", _code.stamp(), {f"{name}: {case}": found[name]})
        print(f"\n{case}\n{show(found)}", flush=True)
    return 0
