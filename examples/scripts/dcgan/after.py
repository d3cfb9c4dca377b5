"""A DCGAN of digits: two networks with batch norms, and samples that are made once for both of their updates."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import hfta_func as hfta

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

    def d_loss(model, real):
        generator, discriminator = model.values()
        output = discriminator(real)
        loss_real = criterion(output, torch.ones_like(output))
        fake = generator(torch.randn(len(real), LATENT, 1, 1))
        output = discriminator(fake.detach())
        loss_fake = criterion(output, torch.zeros_like(output))
        return loss_real + loss_fake

    def g_loss(model, real):
        output = model.discriminator(model.generator(torch.randn(len(real), LATENT, 1, 1)))
        return criterion(output, torch.ones_like(output))

    adam = hfta.adam(lr=args.lr, betas=(0.5, 0.999))
    d_step, g_step = (hfta.make_train_step(models[0], loss, adam, batch_dims=None) for loss in (d_loss, g_loss))
    gan = hfta.joint(discriminator=d_step, generator=g_step, once=True)
    state, _ = hfta.fit(gan, gan.init(*hfta.stack_params(models), seeds=range(args.seeds)), loader, epochs=args.epochs)
    return hfta.unstack_params(models[0], state.params, state.buffers)


if __name__ == "__main__":
    main()
