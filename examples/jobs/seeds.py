"""How much a seed matters: 16 runs of one model that differ in nothing else."""

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


study = hfta.Experiment(make_model, loss, hfta.adam(lr=3e-3), accuracy, seeds=16)
study.fit(train, 64, epochs=5, progress=False)
found = study.evaluate(test)["accuracy"]
print(f"accuracy {found.mean():.4f} with a deviation of {found.std():.4f}")
