"""ResNet-18 on small images, with Adadelta: many learning rates and seeds at once.

    python examples/resnet/main.py --lr 0.03 0.1 0.3 --hfta
    python examples/resnet/main.py --dataset cifar10 --data ~/data --lr 0.1 --seeds 0 1 2 3 --hfta --device cuda --amp

Several values of a flag make that many members; without --hfta they are trained one after another in plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.data import augment, images
from examples.common.flags import Flag
from examples.common.flags import Flags as Common
from examples.common.losses import accuracy, cross_entropy
from examples.common.run import run_task
from examples.common.task import Batch, Task
from examples.resnet.model import ResNet18


@dataclass(frozen=True, kw_only=True)
class Flags(Common):
    """The command line."""

    lr: Annotated[tuple[float, ...], Flag("learning rate")] = (0.1,)
    dataset: Annotated[Literal["digits", "cifar10", "mnist"], Flag("images to classify")] = "digits"
    crop: Annotated[int, Flag("pixels by which training images are moved at random", low=0)] = 2


def task(flags: Flags) -> Task:
    """What is trained."""
    data = images.load(flags.dataset, flags.data, 32, flags.limit)
    width = 64 if flags.size == "paper" else 8

    def augmented(batch: Batch) -> Batch:
        return augment.random_crop(batch[0], flags.crop), batch[1]

    return Task(
        factory=lambda: ResNet18(data.classes, width),
        loss_fn=cross_entropy,
        metric_fn=accuracy,
        optimizer="adadelta",
        train=data.train,
        test=data.test,
        prepare=lambda batch: (images.to_float(batch[0]), batch[1]),
        augment=augmented if flags.crop else lambda batch: batch,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run_task("resnet", argv, Flags, task, __doc__)


if __name__ == "__main__":
    sys.exit(main())
