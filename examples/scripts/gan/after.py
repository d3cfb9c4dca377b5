"""A GAN of points on a ring: two losses, two optimizers, and how far samples are from the ring."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

import hfta_func as hfta


def mlp(inputs, outputs, width=64):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def ring(points):
    angle = torch.rand(points, generator=torch.Generator().manual_seed(0)) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1)


def d_loss(discriminator, generator, real, latent):
    fake = generator(torch.randn(len(real), latent)).detach()
    return F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()


def g_loss(discriminator, generator, real, latent):
    return F.softplus(-discriminator(generator(torch.randn(len(real), latent)))).mean()


def distance(generator, latent):
    """The mean distance of samples from the ring."""
    noise = torch.randn(1000, latent, generator=torch.Generator().manual_seed(1))
    return (generator(noise).norm(dim=1) - 1).abs().mean()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--latent", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)

    seeds = range(args.seeds)
    loader = hfta.ArrayLoader(ring(2048), args.batch_size, seeds=seeds)
    models = [torch.manual_seed(seed) and nn.ModuleDict({"d": mlp(2, 1), "g": mlp(args.latent, 2)}) for seed in seeds]
    d_optimizer = hfta.adam(lr=args.lr, betas=(0.5, 0.99))
    g_optimizer = hfta.adam(lr=args.lr / 2, betas=(0.5, 0.99))
    step = hfta.joint(
        d=hfta.make_train_step(models[0], lambda model, real: d_loss(model.d, model.g, real, args.latent), d_optimizer),
        g=hfta.make_train_step(models[0], lambda model, real: g_loss(model.d, model.g, real, args.latent), g_optimizer),
    )
    state = step.init(*hfta.stack_params(models), seeds=seeds)
    state, _ = hfta.fit(step, state, loader, epochs=args.epochs)
    with torch.no_grad():
        error = [distance(hfta.export_model(models[0], state, seed).g, args.latent).item() for seed in seeds]
    print(f"distance: {error}")
    return error


if __name__ == "__main__":
    main()
