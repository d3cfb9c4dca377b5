"""A siamese network that tells whether two digits are the same."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hfta_func as hfta


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, first, second):
        return self.head(torch.cat([self.features(first), self.features(second)], 1))


def pairs(count):
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.reshape(-1, 1, 8, 8).to(torch.get_default_dtype()) / 16
    draws = torch.Generator().manual_seed(0)
    first, other = torch.randint(len(images), (2, count), generator=draws)
    # Every other pair is of one digit.
    same = torch.tensor([int((labels == labels[at]).nonzero().flatten()[at % 100]) for at in first.tolist()])
    second = torch.where(torch.arange(count) % 2 == 0, same, other)
    return TensorDataset(images[first], images[second], (labels[first] == labels[second]).to(images.dtype))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args(argv)

    train_loader = DataLoader(pairs(480), args.batch_size)
    criterion = nn.BCELoss()

    def loss_fn(model, batch):
        first, second, targets = batch
        return criterion(model(first, second).squeeze(), targets)

    optimizer = hfta.adadelta(lr=hfta.schedules.step_lr(args.lr, len(train_loader), args.gamma))
    array = hfta.Experiment(SiameseNetwork, loss_fn, optimizer, seeds=args.seeds, options={"batch_dims": None})
    array.fit(train_loader, epochs=args.epochs)
    return array.models()


if __name__ == "__main__":
    main()
