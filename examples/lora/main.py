"""Sixteen LoRA adapters over one GPT-2, every rank with every learning rate and mix of data, as one array over one base.

    python examples/lora/main.py
    python examples/lora/main.py --ranks 2 8 --lr 0.003 0.01 --size small --limit 200

The base is trained here, on Python's own manual, character by character. The adapters then teach it the code of Python's
library, in a mix with what it has seen before: each adapter trains on its own rows. The best one is written in the format of
peft, and the base beside it in that of transformers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

try:
    from peft import LoraConfig
    from transformers import GPT2Config, GPT2LMHeadModel

    import hfta_func as hfta
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[adapters]'") from None

from examples.common.data import text
from examples.common.losses import token_entropy

SIZES = {"small": (2, 64, 2), "paper": (4, 256, 4)}
"""Layers, width and heads."""
MODULES = (
    "argparse",
    "ast",
    "collections/__init__",
    "dataclasses",
    "inspect",
    "pathlib",
    "subprocess",
    "tempfile",
    "typing",
)
"""Files of Python's library; the last one is for testing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train base and adapters, print a table and write the best adapter; returns the exit status."""
    args = _parse(argv)
    torch.manual_seed(args.seed)
    base = make_base(args)
    (manual, manual_test), (code, code_test) = (
        [rows(part, args) for part in parts] for parts in (read_manual(), read_code())
    )
    begin = time.perf_counter()
    pretrain(base, manual, args)
    grid = [*itertools.product(args.ranks, args.mixes, args.lr)]
    configs = [
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=r".*attn\.c_(attn|proj)", fan_in_fan_out=True)
        for rank, _, _ in grid
    ]
    print(f"The base took {time.perf_counter() - begin:.1f} s: perplexity {_alone(base, manual_test):.2f} on the manual, "
          f"{_alone(base, code_test):.2f} on code")  # fmt: skip
    # One seed for all: they differ in rank, mix and learning rate alone.
    seeds = [args.seed] * len(grid)
    adapters = hfta.models.stack_adapters(base, configs, seeds=seeds)
    step = hfta.make_train_step(
        adapters.model, next_token, hfta.adamw(lr=[lr for _, _, lr in grid]), donate=True, share_frozen=True
    )
    evaluate = hfta.make_eval_step(
        adapters.model, lambda model, batch: {"entropy": next_token(model, batch)}, share_frozen=True
    )
    state = step.init(adapters.params, adapters.buffers, seeds=seeds)
    both = tuple(torch.cat(pair) for pair in zip(code, manual, strict=True))
    member_rows = [mixed(len(code[0]), len(manual[0]), mix) for _, mix, _ in grid]
    loader = hfta.ArrayLoader(both, args.batch_size, seeds=seeds, rows=member_rows)
    begin = time.perf_counter()
    state, history = hfta.fit(
        *(step, state, loader),
        epochs=args.epochs,
        evaluate=lambda state: evaluate(state, code_test),
        progress=args.progress,
    )
    print(f"{len(grid)} adapters took {time.perf_counter() - begin:.1f} s; perplexity on code:")
    perplexities = history["entropy"][-1].exp().tolist()
    print("rank  manual  " + "".join(f"lr {lr:<9g}" for lr in args.lr))
    for number, (rank, mix) in enumerate(itertools.product(args.ranks, args.mixes)):
        row = perplexities[number * len(args.lr) : (number + 1) * len(args.lr)]
        print(f"{rank:<6d}{mix:<8g}" + "".join(f"{value:<12.4f}" for value in row))
    best = min(range(len(grid)), key=lambda i: perplexities[i] if math.isfinite(perplexities[i]) else math.inf)
    adapters.export(state, best).save_pretrained(args.out / "adapter")
    base.save_pretrained(args.out / "base")
    print(f"Best: {perplexities[best]:.4f} by rank {grid[best][0]}, lr {grid[best][2]:g}, {grid[best][1]:.0%} manual; "
          f"written to {args.out / 'adapter'}")  # fmt: skip
    return 0


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of the characters that follow."""
    tokens, targets = batch
    return token_entropy(model(input_ids=tokens, use_cache=False).logits, targets)


def make_base(args: argparse.Namespace) -> Any:
    """A GPT-2 of its configuration, with random weights."""
    layers, width, heads = SIZES[args.size]
    config = GPT2Config(
        vocab_size=128, n_positions=args.length, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def read_manual() -> list[str]:
    """Python's manual, for training and for testing."""
    return ["".join(part) for part in text.topics(Path())]


def read_code() -> list[str]:
    """Code of Python's library, for training and for testing."""
    folder = Path(argparse.__file__).parent
    *train, test = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    return ["".join(train), test]


def rows(part: str, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Characters as rows of tokens, and the tokens that follow them."""
    numbers = torch.frombuffer(bytearray(part.encode("ascii", "replace")), dtype=torch.uint8).long()
    windows = numbers.unfold(0, args.length + 1, args.length)[: args.limit]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def mixed(code: int, manual: int, share: float) -> list[int]:
    """The rows of an adapter, as many as there are rows of code; a share is from the manual, whose rows follow the code's."""
    if not 0 <= share <= 1 or round(share * code) > manual:
        raise SystemExit(
            f"--mixes has {share:g}, but the manual has {manual} rows to take the place of {code}; choose less"
        )
    taken = round(share * code)
    return [*range(code - taken), *range(code, code + taken)]


def pretrain(base: Any, data: tuple[Tensor, Tensor], args: argparse.Namespace) -> None:
    """Train the base, as anybody would."""
    optimizer = torch.optim.AdamW(base.train().parameters(), lr=args.pretrain_lr)
    for _ in range(args.pretrain_epochs):
        order = torch.randperm(len(data[0]))
        for picked in order.split(args.batch_size):
            optimizer.zero_grad()
            next_token(base, (data[0][picked], data[1][picked])).backward()
            optimizer.step()


@torch.no_grad()
def _alone(model: Any, data: tuple[Tensor, Tensor]) -> float:
    losses = [
        next_token(model.eval(), batch) * len(batch[0]) for batch in zip(*(x.split(64) for x in data), strict=True)
    ]
    model.train()
    return float((sum(losses, torch.zeros(())) / len(data[0])).exp())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument(
        "--mixes",
        type=float,
        nargs="+",
        default=[0.0, 0.25],
        help="shares of rows that are from the manual instead of code",
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--epochs", type=int, default=3, help="of the adapters")
    parser.add_argument("--pretrain-epochs", type=int, default=3, help="of the base")
    parser.add_argument("--pretrain-lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="characters of a row")
    parser.add_argument("--limit", type=int, help="rows of every text")
    parser.add_argument("--size", choices=[*SIZES], default="paper")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder of the best adapter and of the base")
    parser.add_argument("--progress", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
