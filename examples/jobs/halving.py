"""Successive halving by hand over two widths: 32 learning rates each, of which the better half of all goes on, four times."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hfta_func as hfta

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, val = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))
rates = torch.logspace(-4, 0, 32)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def error(model, batch):
    return (model(batch[0]).argmax(-1) != batch[1]).float().mean()


def begin(width):
    def make_model():
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    return hfta.Experiment(make_model, loss, hfta.adam, error, seeds=32, lr=rates)


arrays = {width: begin(width) for width in (16, 64)}
for epochs in (1, 2, 4, 8):
    for array in arrays.values():
        array.fit(train, 64, epochs=epochs, progress=False)
    scores = {width: array.evaluate(val)["error"] for width, array in arrays.items()}
    keep = {width: score <= torch.cat([*scores.values()]).median() for width, score in scores.items()}
    arrays = {width: array.take(keep[width]) for width, array in arrays.items() if keep[width].any()}
    left = {width: [round(rate, 5) for rate in array.hyperparameters["lr"]] for width, array in arrays.items()}
    print(f"after {epochs} epochs more: " + ", ".join(f"width {width}: {kept}" for width, kept in left.items()))
