"""A polynomial fitted by one layer, until the loss is small."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hfta_func as hfta

DEGREE = 4


def polynomials():
    draws = torch.Generator().manual_seed(0)
    weights = 3 * torch.randn(DEGREE, 1, generator=draws)
    while True:
        x = torch.cat([torch.randn(32, 1, generator=draws) ** power for power in range(1, DEGREE + 1)], 1)
        yield x, x @ weights + 0.5


def loss_fn(fc, batch):
    return F.smooth_l1_loss(fc(batch[0]), batch[1])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--small", type=float, default=1e-2)
    args = parser.parse_args(argv)

    options = {"seeds": args.seeds, "options": {"batch_dims": None}}
    array = hfta.Experiment(lambda: nn.Linear(DEGREE, 1), loss_fn, hfta.sgd(lr=args.lr), **options)
    for number, batch in enumerate(polynomials(), 1):
        state, metrics = array.step(array.state, batch)
        array.state = state._replace(active=state.active & (metrics["loss"] >= args.small))
        if not array.state.active.any():
            print(f"{number} batches")
            break
    return array.models()


if __name__ == "__main__":
    main()
