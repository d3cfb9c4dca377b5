"""Digits at twice their resolution by a sub-pixel convolutional network."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset

import hfta_func as hfta


class Net(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 12, 3, padding=1)
        self.conv3 = nn.Conv2d(12, factor**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(factor)
        for layer in (self.conv1, self.conv2):
            init.orthogonal_(layer.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight)

    def forward(self, x):
        return self.shuffle(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))


def load():
    images = torch.tensor(load_digits().images)[:, None].to(torch.get_default_dtype()) / 16
    small = F.avg_pool2d(images, 2)
    return TensorDataset(small[:800], images[:800]), TensorDataset(small[800:1000], images[800:1000])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args(argv)

    train_set, test_set = load()
    train_loader, test_loader = DataLoader(train_set, args.batch_size), DataLoader(test_set, 50)
    criterion = nn.MSELoss()

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    def psnr(model, batch):
        return -10 * torch.log10(loss_fn(model, batch))

    array = hfta.Experiment(Net, loss_fn, hfta.adam(lr=3e-3), psnr, seeds=args.seeds, options={"batch_dims": None})
    array.fit(train_loader, epochs=args.epochs, evaluate=test_loader)
    return array.models()


if __name__ == "__main__":
    main()
