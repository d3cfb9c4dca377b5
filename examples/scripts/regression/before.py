"""A polynomial fitted by one layer, until the loss is small."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

DEGREE = 4


def polynomials():
    draws = torch.Generator().manual_seed(0)
    weights = 3 * torch.randn(DEGREE, 1, generator=draws)
    while True:
        x = torch.cat([torch.randn(32, 1, generator=draws) ** power for power in range(1, DEGREE + 1)], 1)
        yield x, x @ weights + 0.5


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--small", type=float, default=1e-2)
    args = parser.parse_args(argv)

    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        fc = nn.Linear(DEGREE, 1)
        for number, (x, y) in enumerate(polynomials(), 1):
            fc.zero_grad()
            output = F.smooth_l1_loss(fc(x), y)
            output.backward()
            with torch.no_grad():
                for parameter in fc.parameters():
                    parameter.add_(parameter.grad, alpha=-args.lr)
            if output.item() < args.small:
                print(f"{number} batches")
                break
        models.append(fc)
    return models


if __name__ == "__main__":
    main()
