"""Twelve sparse autoencoders over two layers of one frozen transformer, as one array: widths, penalties and rates differ.

    python examples/autoencoders/main.py
    python examples/autoencoders/main.py --widths 64 96 --l1 0.01 --epochs 2 --limit 200

The transformer is trained here, on Python's own manual, character by character. Then it runs once over the text, its
activations go to disk, and the autoencoders train on these. A table has each member's reconstruction, active units and dead
units on text that nobody has seen; the last lines compare CPU time with a loop over the same autoencoders.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import hfta_func as hfta
from examples.common.data import text
from examples.common.losses import token_entropy

LAYERS = ("blocks.0", "blocks.2")
SIZE = 32
"""The width of the transformer."""


class Transformer(nn.Module):
    """A language model of characters."""

    def __init__(self, length: int):
        super().__init__()
        self.embed, self.place = nn.Embedding(128, SIZE), nn.Embedding(length, SIZE)
        layers = [
            nn.TransformerEncoderLayer(SIZE, 4, 4 * SIZE, 0.0, batch_first=True, norm_first=True) for _ in range(3)
        ]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(SIZE, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the characters that follow."""
        length = tokens.shape[-1]
        hidden = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


class Autoencoder(nn.Module):
    """A sparse autoencoder."""

    def __init__(self, width: int):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(SIZE, width), nn.Linear(width, SIZE)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, and the units."""
        units = torch.relu(self.encoder(inputs - self.decoder.bias))
        return self.decoder(units), units


def measured(model: nn.Module, batch: dict[str, Tensor], hparams: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reconstruction, penalty and units of one autoencoder, which is that of one layer."""
    inputs = torch.stack([batch[layer] for layer in LAYERS])[hparams["layer"].long()]
    outputs, units = model(inputs)
    alive = (units > 0).any(0).sum()
    return {
        "error": (outputs - inputs).square().sum() / (inputs - inputs.mean(0)).square().sum(),
        "penalty": (units * model.decoder.weight.norm(dim=0)).sum(-1).mean(),
        "squares": (outputs - inputs).square().sum(-1).mean(),
        "active": (units > 0).sum(-1).to(inputs.dtype).mean(),
        "dead": hparams["width"] - alive,
    }


def loss_fn(model: nn.Module, batch: dict[str, Tensor], hparams: dict[str, Tensor]) -> Tensor:
    """Squared error, and the sum of units by the lengths of what they write."""
    values = measured(model, batch, hparams)
    return values["squares"] + hparams["l1"] * values["penalty"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train transformer and autoencoders, and print a table; returns the exit status."""
    args = _parse(argv)
    torch.manual_seed(args.seed)
    train, test = (rows("".join(part), args.length)[: args.limit] for part in text.topics(Path()))
    network = pretrained(train, args)
    extract = hfta.models.make_feature_extractor(network, LAYERS)

    def activations(tokens: Tensor) -> dict[str, Tensor]:
        return {layer: output.flatten(0, 1) for layer, output in extract(tokens[:, :-1]).items()}

    once = hfta.ArrayLoader(train, 64, shared=True, shuffle=False, transform=activations)
    data = hfta.files.write_rows(args.out, once)
    print(f"{len(data[LAYERS[0]])} activations of {len(LAYERS)} layers are in {args.out}")

    grid = [*itertools.product(range(len(LAYERS)), args.widths, args.l1)]
    columns: dict[str, Any] = dict(zip(("layer", "width", "l1"), zip(*grid, strict=True), strict=True))
    columns["lr"] = [args.lr[number % len(args.lr)] for number in range(len(grid))]
    models = []
    for number, width in enumerate(columns["width"]):
        torch.manual_seed(args.seed + number)
        models.append(Autoencoder(width))
    model = hfta.padded(models)
    options: dict[str, Any] = {"batch_dims": None}
    step = hfta.make_train_step(model, loss_fn, hfta.adam(lr=columns["lr"]), **options)
    hparams = {name: columns[name] for name in ("layer", "width", "l1")}
    state = step.init(*hfta.stack_params(models, pad=model), seeds=range(len(grid)), hparams=hparams)
    loader = hfta.ArrayLoader(data, args.batch_size, shared=True, drop_last=True)
    begin = time.process_time()
    state, _ = hfta.fit(step, state, loader, epochs=args.epochs, progress=args.progress)
    spent = time.process_time() - begin

    metrics = hfta.make_eval_step(model, measured, **options)(state, activations(test))
    print("layer     width  l1      lr      error   active  dead")
    for number, (layer, width, l1) in enumerate(grid):
        error, active, dead = (metrics[name][number].item() for name in ("error", "active", "dead"))
        rate = columns["lr"][number]
        print(f"{LAYERS[layer]:<10}{width:<7d}{l1:<8g}{rate:<8g}{error:<8.4f}{active:<8.1f}{dead:.0f}")

    def train_alone(number: int) -> Callable[[Any], None]:
        """A step of one member in plain PyTorch."""
        alone, numbers = models[number], {name: torch.tensor(hparams[name][number]) for name in hparams}
        optimizer = torch.optim.Adam(alone.parameters(), lr=columns["lr"][number])

        def train(batch: Any) -> None:
            optimizer.zero_grad()
            loss_fn(alone, batch, numbers).backward()
            optimizer.step()

        return train

    steps, counts = [train_alone(number) for number in range(len(grid))], args.epochs * len(loader)
    batches = [batch for batch, _ in zip(loader, range(args.compare), strict=False)]
    seconds = {}
    for name, chosen in {"a loop": steps, "one autoencoder": steps[:1]}.items():
        begin = time.process_time()
        for batch, train in itertools.product(batches, chosen):
            train(batch)
        seconds[name] = (time.process_time() - begin) / len(batches)
    array = spent / counts
    print(f"CPU time per step: {1000 * array:.2f} ms as one array of {len(grid)}")
    for name, value in seconds.items():
        print(f"{1000 * value:.2f} ms as {name}, {value / array:.2f} of the array's")
    return 0


def pretrained(train: Tensor, args: argparse.Namespace) -> nn.Module:
    """The transformer, trained as anybody would."""
    network = Transformer(args.length)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(args.pretrain_epochs):
        for picked in torch.randperm(len(train)).split(32):
            optimizer.zero_grad()
            loss = token_entropy(network(train[picked, :-1]), train[picked, 1:])
            loss.backward()
            optimizer.step()
    return network


def rows(part: str, length: int) -> Tensor:
    """Characters as rows of tokens, each with the token that follows its last one."""
    numbers = torch.frombuffer(bytearray(part.encode("ascii", "replace")), dtype=torch.uint8).long()
    return numbers.unfold(0, length + 1, length).contiguous()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 96, 128])
    parser.add_argument("--l1", type=float, nargs="+", default=[0.03, 0.3], help="weights of the penalty")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="dealt to the members in turn")
    parser.add_argument("--epochs", type=int, default=3, help="of the autoencoders")
    parser.add_argument("--pretrain-epochs", type=int, default=1, help="of the transformer")
    parser.add_argument("--batch-size", type=int, default=128, help="activations of a batch")
    parser.add_argument("--length", type=int, default=64, help="characters of a row")
    parser.add_argument("--limit", type=int, default=1000, help="rows of text for training, and for testing")
    parser.add_argument("--compare", type=int, default=100, help="steps of the loop whose time is taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/autoencoders"), help="folder of the activations")
    parser.add_argument("--progress", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
