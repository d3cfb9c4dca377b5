"""The forward-forward algorithm: every layer learns alone to tell digits with right labels from those with wrong ones."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Layer(nn.Linear):
    def forward(self, x):
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(super().forward(direction))


def loss_fn(layer, batch, threshold=2.0):
    good, bad = (layer(x).pow(2).mean(1) for x in batch)
    return torch.log1p(torch.exp(torch.cat([threshold - good, bad - threshold]))).mean()


def load():
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images, labels = images[:600].to(torch.get_default_dtype()) / 16, labels[:600]
    marks = torch.eye(10, dtype=images.dtype)
    return [torch.cat([marks[at], images], 1) for at in (labels, (labels + 1 + torch.arange(600) % 9) % 10)]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.03)
    args = parser.parse_args(argv)

    models = []
    for seed in range(args.seeds):
        positive, negative = load()
        torch.manual_seed(seed)
        net = nn.Sequential(Layer(74, 50), Layer(50, 50))
        for number, layer in enumerate(net):
            optimizer = torch.optim.Adam(layer.parameters(), lr=args.lr)
            for _ in range(args.steps):
                optimizer.zero_grad()
                loss = loss_fn(layer, (positive, negative))
                loss.backward()
                optimizer.step()
            positive, negative = layer(positive).detach(), layer(negative).detach()
            print(f"layer {number}: loss {loss.item():.4f}")
        models.append(net)
    return models


if __name__ == "__main__":
    main()
