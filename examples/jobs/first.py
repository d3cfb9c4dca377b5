"""README's first example: two learning rates with five seeds each, and every member's best epoch."""

import torch
from sklearn.datasets import load_digits  # pip install scikit-learn

import hfta_func as hfta

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


study = hfta.Experiment(make_model, loss, hfta.adam, accuracy, **hfta.grid(lr=[1e-3, 1e-2], seeds=5))
history = study.fit(train, batch_size=32, epochs=40, evaluate=test)
print(history.table("accuracy", "max"))
