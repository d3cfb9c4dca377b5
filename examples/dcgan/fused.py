"""An array of DCGANs through the lower-level functions: two stacked models, two optimizers, and a custom step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hfta_func as hfta
from examples.common.data.images import to_float
from examples.common.errors import BadInput
from examples.common.flags import Flags
from examples.common.fused import adam, fit, initial, make_loader
from examples.common.task import Batch, Metrics, Outcome, autocast, find_device
from examples.dcgan.frechet import SAMPLES, Moments, frechet, moments
from examples.dcgan.model import on_fake, on_real


class GANState(NamedTuple):
    """Everything that training changes, for M pairs of models; every leaf is ``[M, ...]``."""

    generator: hfta.models.Stacked
    discriminator: hfta.models.Stacked
    generator_opt: Any
    discriminator_opt: Any
    keys: Tensor
    step: Tensor
    active: Tensor


def make_step(
    generator: nn.Module, discriminator: nn.Module, optimizer: hfta.GradientTransformation, noise: int, amp: bool
) -> Callable[[GANState, Batch], tuple[GANState, Metrics]]:
    """``step(state, batch) -> (state, metrics)`` like a :class:`hfta.step.TrainStep` that is donated its state."""
    # Functions of one model; vmap makes them functions of all. Members do not meet, so that the gradient of the summed
    # losses, taken outside of vmap, holds every member's own.
    generate = hfta.vmap(hfta.functional(generator))
    judge = hfta.vmap(hfta.functional(discriminator))
    loss_real, loss_fake = hfta.vmap(on_real), hfta.vmap(on_fake)

    # Autocast is for the forward passes alone, as in a TrainStep, and no converted weight outlives them.
    def generated(params: Any, buffers: Any, latent: Tensor) -> tuple[Tensor, Any]:
        with autocast(latent.device, amp, cache=False):
            return generate(params, buffers, latent)

    def judged(params: Any, buffers: Any, images: Tensor, loss_fn: Callable[..., Tensor]) -> tuple[Tensor, Any]:
        with autocast(images.device, amp, cache=False):
            verdict, buffers = judge(params, buffers, images)
            losses = loss_fn(verdict)
        return losses.sum(), (losses, buffers)

    def fool(fake: Tensor, params: Any, buffers: Any) -> tuple[Tensor, Any]:
        return judged(params, buffers, fake, loss_real)

    def step(state: GANState, batch: Batch) -> tuple[GANState, Metrics]:
        (real,) = batch
        (g, g_buffers), (d, d_buffers) = state.generator, state.discriminator
        keys = hfta.random.fold_in(state.keys, state.step)
        latent = hfta.random.normal(keys, (real.shape[1], noise, 1, 1), dtype=real.dtype)
        pulled: Any = torch.func.vjp(lambda g: generated(g, g_buffers, latent), g, has_aux=True)
        fake, pull_back, g_buffers = pulled
        grads, (of_real, d_buffers) = torch.func.grad(judged, has_aux=True)(d, d_buffers, real, loss_real)
        others, (of_fake, d_buffers) = torch.func.grad(judged, has_aux=True)(d, d_buffers, fake, loss_fake)
        for path, grad in grads.items():
            grad.add_(others[path])
        hfta.update_(optimizer, grads, state.discriminator_opt, d)
        on_images, (g_losses, d_buffers) = torch.func.grad(fool, has_aux=True)(fake, d, d_buffers)
        (grads,) = pull_back(on_images)
        hfta.update_(optimizer, grads, state.generator_opt, g)
        state = state._replace(
            generator=hfta.models.Stacked(g, g_buffers),
            discriminator=hfta.models.Stacked(d, d_buffers),
            step=state.step + 1,
        )
        return state, {"loss_d": of_real + of_fake, "loss_g": g_losses}

    return torch.no_grad()(step)


def prepare(
    generator: Callable[[], nn.Module], discriminator: Callable[[], nn.Module], noise: int, flags: Flags
) -> tuple[Callable[..., Any], GANState]:
    """The step of an array, and the state before the first one."""
    device, seeds = find_device(flags.device), flags.seeds
    if flags.chunk_size != "all":
        raise BadInput(
            "--chunk-size auto: two networks take turns in a step that runs all members together; leave it out"
        )
    if device.type == "cpu":
        # As TrainStep.init does by itself.
        hfta.step.keep_memory()
    try:
        optimizer = adam(flags.per_model(), 1)
        g, d = initial(generator, seeds, device), initial(discriminator, seeds, device)
        state = GANState(
            *(g, d, optimizer.init(g.params), optimizer.init(d.params)),
            keys=hfta.random.keys(seeds, device=device),
            step=torch.zeros(len(seeds), dtype=torch.int64, device=device),
            active=torch.ones(len(seeds), dtype=torch.bool, device=device),
        )
    except hfta.HFTAError as error:
        raise BadInput(str(error)) from None
    return make_step(generator(), discriminator(), optimizer, noise, flags.amp), state


def train(
    generator: Callable[[], nn.Module],
    discriminator: Callable[[], nn.Module],
    noise: int,
    images: Tensor,
    reference: Moments,
    flags: Flags,
    keep: Path | None,
) -> Outcome:
    """Train one pair per seed on ``images``, bytes ``[N, C, H, W]``; ``reference`` is what samples are compared with."""
    step, state = prepare(generator, discriminator, noise, flags)
    loader = make_loader((images,), lambda batch: (to_float(batch[0]),), flags, find_device(flags.device))
    generate = hfta.vmap(hfta.functional(generator().eval()))

    @torch.no_grad()
    def test(state: GANState) -> Metrics:
        def sample(number: int, count: int) -> Tensor:
            latent = hfta.random.normal(hfta.random.fold_in(state.keys, 2**61 + number), (count, noise, 1, 1))
            return generate(*state.generator, latent)[0].cpu()

        sizes = [len(part) for part in torch.arange(SAMPLES).split(flags.batch_size)]
        samples = torch.cat([sample(number, count) for number, count in enumerate(sizes)], 1)
        return {"frechet": torch.stack([frechet(reference, moments(one)) for one in samples])}

    state, history, last = fit(step, state, loader, test, flags, keep)
    models = {
        "generator": hfta.unstack_params(generator(), *state.generator),
        "discriminator": hfta.unstack_params(discriminator(), *state.discriminator),
    }
    return Outcome(history, last, models)
