"""Cross-validation in ten folds: a model for each, and the accuracy on the rows that it was not trained on."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn

import hfta_func as hfta

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
data = x.float() / 16, y


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


train, test = zip(*KFold(10, shuffle=True, random_state=0).split(x), strict=True)
folds = hfta.Experiment(make_model, loss, hfta.adam(lr=3e-3), accuracy, seeds=10)
folds.fit(data, 64, rows=train, epochs=5, progress=False)
found = folds.evaluate(data, test)["accuracy"]
print(f"accuracy {found.mean():.4f} with a deviation of {found.std():.4f}")
