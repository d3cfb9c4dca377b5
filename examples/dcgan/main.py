"""DCGAN: a generator and a discriminator against each other, with Adam for each.

    python examples/dcgan/main.py --lr 0.0001 0.0002 0.0004 --hfta
    python examples/dcgan/main.py --dataset cifar10 --data ~/data --beta1 0.5 0.9 --hfta --device cuda --amp

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

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common import solo
from examples.common.data import images
from examples.common.flags import Flag
from examples.common.flags import Flags as Common
from examples.common.run import run
from examples.common.task import Metrics, Outcome, autocast, find_device
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
    return importlib.import_module("examples.dcgan.fused").train(*setting(flags), flags, keep)


class Pair:
    """The two models of one member in plain PyTorch, with their optimizers, whose ``kernels`` may be chosen."""

    def __init__(self, make_generator: Factory, make_discriminator: Factory, noise: int, flags: Flags, **kernels: bool):
        self.device, self.noise, self.amp = find_device(flags.device), noise, flags.amp
        solo.seed_noise(self.device, flags.seeds[0])
        self.generator = make_generator().to(self.device)
        solo.seed_noise(self.device, flags.seeds[0])
        self.discriminator = make_discriminator().to(self.device)
        models = self.generator, self.discriminator
        self.generator_opt, self.discriminator_opt = (
            solo.make_optimizer("adam", model, flags, **kernels)[0] for model in models
        )
        self._generate, self._judge = (torch.compile(m, dynamic=False) if flags.compile else m for m in models)

    def parts(self) -> dict[str, Any]:
        """Everything that training changes."""
        return {name: part for name, part in vars(self).items() if hasattr(part, "state_dict") and name[0] != "_"}

    def draw(self, count: int) -> Tensor:
        """Latent vectors."""
        return torch.randn(count, self.noise, 1, 1, device=self.device)

    def step(self, inputs: Tensor) -> Metrics:
        """Train both on images between -1 and 1."""
        self.generator_opt.zero_grad()
        self.discriminator_opt.zero_grad()
        with autocast(self.device, self.amp):
            fake = self._generate(self.draw(len(inputs)))
            loss_d = on_real(self._judge(inputs)) + on_fake(self._judge(fake.detach()))
        loss_d.backward()
        self.discriminator_opt.step()
        with autocast(self.device, self.amp):
            loss_g = on_real(self._judge(fake))
        # The discriminator's weights get no gradients that nobody would use.
        loss_g.backward(inputs=[*self.generator.parameters()])
        self.generator_opt.step()
        return {"loss_d": loss_d.detach(), "loss_g": loss_g.detach()}


def train_solo(flags: Flags, keep: Path | None) -> Outcome:
    """The one member of ``flags`` in plain PyTorch."""
    make_generator, make_discriminator, noise, real, reference = setting(flags)
    pair = Pair(make_generator, make_discriminator, noise, flags)

    @torch.no_grad()
    def test() -> Metrics:
        pair.generator.eval()
        sizes = [len(part) for part in torch.arange(SAMPLES).split(flags.batch_size)]
        samples = torch.cat([pair.generator(pair.draw(count)).cpu() for count in sizes])
        pair.generator.train()
        return {"frechet": frechet(reference, moments(samples))}

    history, last = solo.fit(
        lambda batch: pair.step(images.to_float(batch[0])), test, (real,), pair.parts(), flags, keep
    )
    models = {"generator": [pair.generator], "discriminator": [pair.discriminator]}
    return Outcome(history, last, models)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    return run("dcgan", argv, Flags, train_array, train_solo, __doc__)


if __name__ == "__main__":
    sys.exit(main())
