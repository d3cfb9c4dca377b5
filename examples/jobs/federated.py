"""Federated averaging: 30 rounds over 16 clients that hold from 9 to 150 handwritten digits each, mostly of few classes."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hfta_func as hfta

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1272, 525]))
sizes = torch.arange(9, 160, 10)[:15].tolist()
clients = train[1].argsort(stable=True).split([*sizes, len(train[1]) - sum(sizes)])


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


federation = hfta.Experiment(make_model, loss, hfta.sgd(0.1), accuracy, seeds=16, init_seeds=[0] * 16)
for turn in range(1, 31):
    federation.fit(train, 16, rows=clients, epochs=1, progress=False)
    federation.state = hfta.step.average(federation.state, weights=[len(rows) for rows in clients])
    print(f"round {turn}: accuracy {federation.evaluate(test)['accuracy'][0]:.3f}")
