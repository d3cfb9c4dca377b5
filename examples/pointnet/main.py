"""PointNet on clouds of points, with Adam: the class of a cloud, or the part that each point belongs to.

    python examples/pointnet/main.py --task cls --lr 0.001 0.003 0.01 --hfta
    python examples/pointnet/main.py --task seg --feature-transform --seeds 0 1 2 3 --hfta
    python examples/pointnet/main.py --task seg --dataset shapenet --category Chair --data ~/data --hfta

Clouds are turned around the vertical axis and jittered while training, each member's by its own noise.
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

from examples.common.data import augment, shapes
from examples.common.errors import BadInput
from examples.common.flags import AdamFlags, Flag
from examples.common.run import run_task
from examples.common.task import Batch, Metrics, Task
from examples.pointnet.model import PAPER, SMALL, PointNetClassifier, PointNetSegmenter, orthogonality


@dataclass(frozen=True, kw_only=True)
class Flags(AdamFlags):
    """The command line."""

    task: Annotated[Literal["cls", "seg"], Flag("classification or segmentation", apart=True)] = "cls"
    lr: Annotated[tuple[float, ...], Flag("learning rate")] = (0.001,)
    batch_size: Annotated[int, Flag("samples per step", low=2, apart=True)] = 32
    feature_transform: Annotated[bool, Flag("align features too (STNkd), with a penalty for shear")] = False
    points: Annotated[int, Flag("points of a cloud", low=1)] = 2500
    dataset: Annotated[Literal["surfaces", "shapenet", "modelnet40"], Flag("clouds to learn from")] = "surfaces"
    category: Annotated[str, Flag("ShapeNet's category whose parts are learned")] = "Chair"


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one model; classes ``[N]`` or parts ``[N, P]``."""
    clouds, labels = batch
    logits, transform = model(clouds)
    loss = nn.functional.cross_entropy(logits, labels)
    return loss if transform is None else loss + 0.001 * orthogonality(transform)


def metric_fn(model: nn.Module, batch: Batch) -> Metrics:
    """Accuracy; of parts also the mean over clouds of intersection over union, averaged over the parts that occur."""
    clouds, labels = batch
    logits, _ = model(clouds)
    predicted = logits.argmax(1)
    metrics = {"accuracy": (predicted == labels).float().mean()}
    if labels.dim() == 1:
        return metrics
    parts = torch.arange(logits.shape[1], device=labels.device)[:, None]
    predicted_parts, true_parts = predicted.unsqueeze(1) == parts, labels.unsqueeze(1) == parts
    both, either = ((predicted_parts & true_parts).sum(-1).float(), (predicted_parts | true_parts).sum(-1))
    occurs = (either > 0).float()
    iou = ((both / either.clamp(min=1)) * occurs).sum(1) / occurs.sum(1)
    return {"iou": iou.mean(), **metrics}


def task(flags: Flags) -> Task:
    """What is trained."""
    if flags.task == "seg" and flags.dataset == "modelnet40":
        raise BadInput("--task seg: ModelNet40 has no parts; use surfaces or shapenet")
    category = flags.category if flags.task == "seg" and flags.dataset == "shapenet" else None
    data = shapes.load(flags.dataset, flags.data, flags.points, flags.limit, category)
    kind, outputs = (PointNetClassifier, data.classes) if flags.task == "cls" else (PointNetSegmenter, data.parts)
    sizes, label = PAPER if flags.size == "paper" else SMALL, 1 if flags.task == "cls" else 2
    return Task(
        factory=lambda: kind(outputs, sizes, flags.feature_transform),
        loss_fn=loss_fn,
        metric_fn=metric_fn,
        optimizer="adam",
        train=(data.train[0], data.train[label]),
        test=(data.test[0], data.test[label]),
        augment=lambda batch: (augment.jitter(augment.random_turn(batch[0])), batch[1]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run_task("pointnet", argv, Flags, task, __doc__)


if __name__ == "__main__":
    sys.exit(main())
