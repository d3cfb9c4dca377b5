"""A deep ensemble on a table: 20 bootstrapped members, each stopped early; mean and deviation as a program without Python."""

import sys

import torch
from sklearn.datasets import load_diabetes

import hfta_func as hfta

x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
train, val, test = ((20 * x[rows], (y[rows] - 152) / 77) for rows in torch.arange(442).split([300, 71, 71]))


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1), torch.nn.Flatten(0))


def mse(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


ensemble = hfta.Experiment(make_model, mse, hfta.adam(lr=3e-3), mse, seeds=20)
stop = hfta.callbacks.early_stopping("mse", 5)
options = {"callbacks": [stop], "restore_best": "mse", "compact": True, "progress": False}
ensemble.fit(train, 32, bootstrap=True, epochs=60, evaluate=val, **options)
deployed, alone = ensemble.ensemble().deploy(), ensemble.evaluate(test)["mse"].mean()
torch.export.save(deployed.export(test[0]), sys.argv[1])
mean, std = deployed(test[0])
print(f"error {(mean - test[1]).square().mean():.3f}, of a member {alone:.3f}, deviation {std.mean():.3f}")
