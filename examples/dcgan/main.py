"""DCGAN: a generator and a discriminator against each other, with Adam for each.

    python -m examples.dcgan.main --lr 0.0001 0.0002 0.0004 --hfta
    python -m examples.dcgan.main --dataset cifar10 --data ~/data --beta1 0.5 0.9 --hfta --device cuda --amp

The quality is a Fréchet distance between real and generated images; lower is better.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from examples.common import solo
from examples.common.data import images
from examples.common.flags import Flag
from examples.common.flags import Flags as Common
from examples.common.run import run
from examples.common.task import Batch, Metrics, Outcome, autocast, find_device
from examples.dcgan.frechet import SAMPLES, Moments, frechet, moments
from examples.dcgan.model import Discriminator, Generator, on_fake, on_real


@dataclass(frozen=True, kw_only=True)
class Flags(Common):
    """The command line."""

    lr: Annotated[tuple[float, ...], Flag("learning rate of both")] = (0.0002,)
    beta1: Annotated[tuple[float, ...], Flag("decay of the average of gradients")] = (0.5,)
    dataset: Annotated[Literal["digits", "mnist", "cifar10", "lsun"], Flag("images to imitate")] = "digits"


Factory = Callable[[], nn.Module]


def setting(flags: Flags) -> tuple[Factory, Factory, int, Tensor, Moments]:
    """What makes a generator and a discriminator, channels of noise, images, and what samples are compared with."""
    size, width, noise = (64, 64, 100) if flags.size == "paper" else (16, 16, 16)
    data, _ = images.load(flags.dataset, flags.data, size, flags.limit).train
    models = functools.partial(Generator, size, width, noise), functools.partial(Discriminator, size, width)
    return *models, noise, data, moments(images.to_float(data[:10_000]))


def train_array(flags: Flags, keep: Path | None) -> Outcome:
    """All members as one program."""
    return importlib.import_module("examples.dcgan.array").train(*setting(flags), flags, keep)


def train_solo(flags: Flags, keep: Path | None) -> Outcome:
    """The one member of ``flags`` in plain PyTorch."""
    make_generator, make_discriminator, noise, real, reference = setting(flags)
    device = find_device(flags.device)
    torch.manual_seed(flags.seeds[0])
    generator = make_generator().to(device)
    torch.manual_seed(flags.seeds[0])
    discriminator = make_discriminator().to(device)
    optimizers = [solo.make_optimizer("adam", model, flags)[0] for model in (generator, discriminator)]
    generate, judge = (torch.compile(m) if flags.compile else m for m in (generator, discriminator))

    def step(batch: Batch) -> Metrics:
        inputs = images.to_float(batch[0])
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast(device, flags.amp):
            fake = generate(torch.randn(len(inputs), noise, 1, 1, device=device))
            loss_d = on_real(judge(inputs)) + on_fake(judge(fake.detach()))
        loss_d.backward()
        optimizers[1].step()
        with autocast(device, flags.amp):
            loss_g = on_real(judge(fake))
        loss_g.backward()
        optimizers[0].step()
        return {"loss_d": loss_d.detach(), "loss_g": loss_g.detach()}

    @torch.no_grad()
    def test() -> Metrics:
        generator.eval()
        sizes = [len(part) for part in torch.arange(SAMPLES).split(flags.batch_size)]
        samples = torch.cat([generator(torch.randn(count, noise, 1, 1, device=device)).cpu() for count in sizes])
        generator.train()
        return {"frechet": frechet(reference, moments(samples))}

    made: dict[str, Any] = {"generator": generator, "discriminator": discriminator}
    parts = {**made, "generator_opt": optimizers[0], "discriminator_opt": optimizers[1]}
    history = solo.fit(step, test, (real,), parts, flags, keep)
    return Outcome(history, solo.single(test()), {name: [model] for name, model in made.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run("dcgan", argv, Flags, train_array, train_solo, __doc__)


if __name__ == "__main__":
    sys.exit(main())
