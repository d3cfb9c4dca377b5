"""BERT-Medium, with Adadelta.

    python examples/bert/main.py --objective masked --lr 0.3 1 3 --hfta --size small
    python examples/bert/main.py --objective next --dataset wikitext2 --data ~/data --lr 1 3 --hfta --device cuda --amp

It learns tokens that are masked, or the next token; what it reads is as in the Transformer's example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.bert.model import BERT, MEDIUM, SMALL
from examples.common.data import text
from examples.common.flags import AdadeltaFlags, Flag
from examples.common.losses import next_token, perplexity, token_entropy
from examples.common.run import run_task
from examples.common.task import Batch, Metrics, Task


@dataclass(frozen=True, kw_only=True)
class Flags(AdadeltaFlags):
    """The command line."""

    objective: Annotated[Literal["masked", "next"], Flag("what is predicted of the tokens", apart=True)] = "masked"
    batch_size: Annotated[int, Flag("sequences per step", low=1, apart=True)] = 32
    length: Annotated[int, Flag("tokens of a sequence", low=1)] = 32
    dataset: Annotated[Literal["topics", "wikitext2"], Flag("text to learn from")] = "topics"


def masked_tokens(vocabulary: int, share: float = 0.15):
    """The loss of one model that restores tokens chosen at random, in an array by the member's own noise.

    Of the chosen, 80 % become the mask, which is token number ``vocabulary``, 10 % another token, 10 % stay.
    """

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch[0]
        chosen, kind = torch.rand(tokens.shape, device=tokens.device), torch.rand(tokens.shape, device=tokens.device)
        others = torch.randint(0, vocabulary, tokens.shape, device=tokens.device)
        spoilt = torch.where(kind < 0.8, vocabulary, torch.where(kind < 0.9, others, tokens))
        chosen = chosen < share
        return token_entropy(model(torch.where(chosen, spoilt, tokens)), tokens, chosen)

    return loss_fn


def task(flags: Flags) -> Task:
    """What is trained."""
    data = text.load(flags.dataset, flags.data, flags.length, flags.limit)
    sizes, causal = MEDIUM if flags.size == "paper" else SMALL, flags.objective == "next"
    loss_fn = next_token if causal else masked_tokens(data.vocabulary)

    def metric_fn(model: nn.Module, batch: Batch) -> Metrics:
        return {"entropy": loss_fn(model, batch)}

    return Task(
        factory=lambda: BERT(data.vocabulary + (not causal), flags.length, sizes, causal),
        loss_fn=loss_fn,
        metric_fn=metric_fn,
        optimizer="adadelta",
        train=data.train,
        test=data.test,
        derive=perplexity,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run_task("bert", argv, Flags, task, __doc__)


if __name__ == "__main__":
    sys.exit(main())
