"""A variational autoencoder of digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


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


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args(argv)

    images = torch.tensor(load_digits().data).to(torch.get_default_dtype()) / 16
    train_loader, test_loader = DataLoader(images[:1400], args.batch_size), DataLoader(images[1400:], args.batch_size)
    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for epoch in range(args.epochs):
            model.train()
            for data in train_loader:
                optimizer.zero_grad()
                reconstruction, mu, logvar = model(data)
                loss = loss_function(reconstruction, data, mu, logvar)
                loss.backward()
                optimizer.step()
            total = 0
            model.eval()
            with torch.no_grad():
                for data in test_loader:
                    reconstruction, mu, logvar = model(data)
                    total += loss_function(reconstruction, data, mu, logvar).item()
            print(f"epoch {epoch}: test loss {total / len(images[1400:]):.4f}")
        models.append(model)
    return models


if __name__ == "__main__":
    main()
