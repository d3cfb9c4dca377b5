"""A Transformer language model, with Adadelta.

    python examples/transformer/main.py --lr 0.3 1 3 --hfta
    python examples/transformer/main.py --dataset wikitext2 --data ~/data --lr 1 3 --gamma 0.5 0.25 --hfta --device cuda

It learns the next character of Python's own manual, or the next word of WikiText-2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from torch import nn

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.data import text
from examples.common.flags import AdadeltaFlags, Flag
from examples.common.losses import next_token, perplexity
from examples.common.run import run_task
from examples.common.task import Batch, Metrics, Task
from examples.transformer.model import TransformerLM


@dataclass(frozen=True, kw_only=True)
class Flags(AdadeltaFlags):
    """The command line."""

    batch_size: Annotated[int, Flag("sequences per step", low=1, apart=True)] = 32
    length: Annotated[int, Flag("tokens of a sequence", low=1)] = 32
    dataset: Annotated[Literal["topics", "wikitext2"], Flag("text to learn from")] = "topics"


def metric_fn(model: nn.Module, batch: Batch) -> Metrics:
    """The loss of the test text."""
    return {"entropy": next_token(model, batch)}


def task(flags: Flags) -> Task:
    """What is trained."""
    data = text.load(flags.dataset, flags.data, flags.length, flags.limit)
    dim = 128 if flags.size == "paper" else 32
    return Task(
        factory=lambda: TransformerLM(data.vocabulary, flags.length, dim),
        loss_fn=next_token,
        metric_fn=metric_fn,
        optimizer="adadelta",
        train=data.train,
        test=data.test,
        derive=perplexity,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run_task("transformer", argv, Flags, task, __doc__)


if __name__ == "__main__":
    sys.exit(main())
