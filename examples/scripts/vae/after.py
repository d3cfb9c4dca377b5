"""A variational autoencoder of digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hfta_func as hfta


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 40)
        self.mu = nn.Linear(40, 5)
        self.logvar = nn.Linear(40, 5)
        self.fc3 = nn.Linear(5, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        hidden = F.relu(self.fc1(x))
        return self.mu(hidden), self.logvar(hidden)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(reconstruction, x, mu, logvar):
    bce = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def loss_fn(model, data):
    reconstruction, mu, logvar = model(data)
    return loss_function(reconstruction, data, mu, logvar)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args(argv)

    images = torch.tensor(load_digits().data).to(torch.get_default_dtype()) / 16
    train_loader, test_loader = DataLoader(images[:1400], args.batch_size), DataLoader(images[1400:], args.batch_size)
    array = hfta.Experiment(VAE, loss_fn, hfta.adam(lr=1e-3), seeds=args.seeds, options={"batch_dims": None})
    array.fit(train_loader, epochs=args.epochs, evaluate=test_loader)
    return array.models()


if __name__ == "__main__":
    main()
