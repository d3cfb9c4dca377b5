"""A GAN of points on a ring: two losses, two optimizers, and how far samples are from the ring."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--latent", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    loader = DataLoader(TensorDataset(ring(2048)), args.batch_size, shuffle=True)
    discriminator, generator = mlp(2, 1), mlp(args.latent, 2)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.99))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=args.lr / 2, betas=(0.5, 0.99))
    for epoch in range(args.epochs):
        for (real,) in loader:
            d_optimizer.zero_grad()
            loss_d = d_loss(discriminator, generator, real, args.latent)
            loss_d.backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            loss_g = g_loss(discriminator, generator, real, args.latent)
            loss_g.backward()
            g_optimizer.step()
        print(f"epoch {epoch}: d {loss_d.item():.3f} g {loss_g.item():.3f}")
    with torch.no_grad():
        error = distance(generator, args.latent).item()
    print(f"distance: {error}")
    return error


if __name__ == "__main__":
    main()
