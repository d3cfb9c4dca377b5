"""Digits by a small convolutional network: Adadelta, a rate that falls after each epoch, a loss summed over the test set."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hfta_func as hfta


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 3)
        self.conv2 = nn.Conv2d(10, 20, 3)
        self.norm = nn.BatchNorm2d(20)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def load():
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.reshape(-1, 1, 8, 8).to(torch.get_default_dtype()) / 16
    return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


def train(model, batch):
    return F.nll_loss(model(batch[0]), batch[1])


def test(model, batch):
    output = model(batch[0])
    return {"test_loss": F.nll_loss(output, batch[1]), "accuracy": (output.argmax(1) == batch[1]).double().mean()}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=0.5)
    args = parser.parse_args(argv)

    train_set, test_set = load()
    train_loader, test_loader = DataLoader(train_set, args.batch_size), DataLoader(test_set, 100)
    optimizer = hfta.adadelta(lr=hfta.schedules.step_lr(args.lr, len(train_loader), args.gamma))
    shared = {"batch_dims": None}
    array = hfta.Experiment(lambda: Net(args.dropout), train, optimizer, test, seeds=args.seeds, options=shared)
    array.fit(train_loader, epochs=args.epochs, evaluate=test_loader)
    return array.models()


if __name__ == "__main__":
    main()
