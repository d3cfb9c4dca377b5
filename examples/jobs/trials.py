"""A tuner's trials: 24 random draws of learning rate and weight decay, each with three epochs."""

import torch
from optuna.distributions import FloatDistribution
from sklearn.datasets import load_digits
from torch import nn

import hfta_func as hfta
from hfta_func import tune

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


def build(fixed, members):
    experiment = hfta.Experiment(make_model, loss, hfta.adamw, accuracy, seeds=members.pop("seed"), **members)
    return tune.Array.of(experiment, train, 64, evaluate=test)


space = {"lr": FloatDistribution(1e-5, 1e-1, log=True), "weight_decay": FloatDistribution(1e-3, 10, log=True)}
study = tune.run(build, space, metric="accuracy", trials=24, epochs=3, progress=False)
print(f"accuracy {study.best.values[-1][0]:.4f} with a learning rate of {study.best.params['lr']:.5f}")
