"""Mixed precision, a schedule and early stopping, with checkpoints that a run that was broken off goes on from; 8 seeds."""

import sys

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


def error(model, batch):
    return (model(batch[0]).argmax(-1) != batch[1]).float().mean()


rate = hfta.schedules.warmup(hfta.schedules.cosine(1e-2, T_max=20 * 18), steps=19)
study = hfta.Experiment(make_model, loss, hfta.adamw(rate), error, seeds=8, options={"autocast": torch.bfloat16})
options = {"callbacks": [hfta.callbacks.early_stopping("error", 4)], "restore_best": "error", "resume": sys.argv[1]}
history = study.fit(train, 64, epochs=20, evaluate=test, progress=False, **options)
best = history.best("error")
print(f"error {best.error.mean():.4f} after {best.epoch.mean():.2f} epochs")
