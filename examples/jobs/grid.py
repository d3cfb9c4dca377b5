"""A grid of learning rates and weight decays, with four seeds for each."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hfta_func as hfta

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


grid = hfta.grid(lr=[1e-4, 1e-3, 1e-2], weight_decay=[0.0, 0.1, 10.0], seeds=4)
study = hfta.Experiment(make_model, loss, hfta.adamw, accuracy, **grid)
history = study.fit(train, 64, epochs=4, evaluate=test, progress=False)
print(history.last().groupby(["lr", "weight_decay"]).accuracy.mean().unstack().round(4).to_string())
