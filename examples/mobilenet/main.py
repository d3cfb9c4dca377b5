"""MobileNet V2, V3-small or V3-large on images, with Adam: every member its own optimizer and decay.

    python examples/mobilenet/main.py --version v3s --lr 0.01 0.003 --beta1 0.9 0.8 --hfta
    python examples/mobilenet/main.py --version v2 v2 v3l v3l --lr 0.01 0.003 0.01 0.003 --hfta --dataset cifar10

Versions cannot be fused with each other: the second line trains two arrays.
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
from examples.common.flags import AdamFlags, Flag
from examples.common.losses import accuracy, cross_entropy
from examples.common.run import run_task
from examples.common.task import Task
from examples.mobilenet.model import MobileNet


@dataclass(frozen=True, kw_only=True)
class Flags(AdamFlags):
    """The command line."""

    version: Annotated[Literal["v2", "v3s", "v3l"], Flag("which MobileNet", apart=True)] = "v3s"
    batch_size: Annotated[int, Flag("samples per step", low=1, apart=True)] = 1024
    dataset: Annotated[Literal["digits", "cifar10", "mnist", "imagenet"], Flag("images to classify")] = "digits"
    image_size: Annotated[int, Flag("edge of the images in pixels", low=1)] = 32
    flip: Annotated[bool, Flag("mirror half of the training images")] = False


def task(flags: Flags) -> Task:
    """What is trained."""
    data = images.load(flags.dataset, flags.data, flags.image_size, flags.limit)
    width = 1.0 if flags.size == "paper" else 0.25
    return Task(
        factory=lambda: MobileNet(flags.version, data.classes, width),
        loss_fn=cross_entropy,
        metric_fn=accuracy,
        optimizer="adam",
        train=data.train,
        test=data.test,
        prepare=lambda batch: (images.to_float(batch[0]), batch[1]),
        augment=lambda batch: (augment.random_flip(batch[0]), batch[1]) if flags.flip else batch,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run_task("mobilenet", argv, Flags, task, __doc__)


if __name__ == "__main__":
    sys.exit(main())
