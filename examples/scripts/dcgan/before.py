"""A DCGAN of digits: two networks with batch norms, and samples that are made once for both of their updates."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

LATENT = 8


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Sequential):
    def __init__(self, width=6):
        super().__init__(
            nn.ConvTranspose2d(LATENT, 2 * width, 2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    def __init__(self, width=6):
        super().__init__(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 2, bias=False),
            nn.Sigmoid(),
            nn.Flatten(0),
        )


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args(argv)

    images = torch.tensor(load_digits().images)[:320, None].to(torch.get_default_dtype()) / 8 - 1
    loader = DataLoader(images, args.batch_size)
    criterion = nn.BCELoss()
    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        generator, discriminator = Generator().apply(weights_init), Discriminator().apply(weights_init)
        models.append(nn.ModuleDict({"generator": generator, "discriminator": discriminator}))
        of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
        of_generator = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
        for epoch in range(args.epochs):
            for real in loader:
                discriminator.zero_grad()
                output = discriminator(real)
                loss_real = criterion(output, torch.ones_like(output))
                loss_real.backward()
                fake = generator(torch.randn(len(real), LATENT, 1, 1))
                output = discriminator(fake.detach())
                loss_fake = criterion(output, torch.zeros_like(output))
                loss_fake.backward()
                of_discriminator.step()

                generator.zero_grad()
                output = discriminator(fake)
                loss = criterion(output, torch.ones_like(output))
                loss.backward()
                of_generator.step()
            print(f"epoch {epoch}: d {(loss_real + loss_fake).item():.4f} g {loss.item():.4f}")
    return models


if __name__ == "__main__":
    main()
