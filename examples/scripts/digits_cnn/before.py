"""Digits by a small convolutional network: Adadelta, a rate that falls after each epoch, a loss summed over the test set."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


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


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    print(f"test loss {loss / len(loader.dataset):.4f}, correct {correct} of {len(loader.dataset)}")
    return loss / len(loader.dataset)


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
    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = Net(args.dropout)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
        scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
        for _ in range(args.epochs):
            train(model, train_loader, optimizer)
            test(model, test_loader)
            scheduler.step()
        models.append(model)
    return models


if __name__ == "__main__":
    main()
