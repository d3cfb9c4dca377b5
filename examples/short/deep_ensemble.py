"""A deep ensemble on a table: 20 bootstrapped members, each stopped early; mean and deviation on a test set."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import hfta_func as hfta

x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
train, val, test = ((20 * x[rows], (y[rows] - 152) / 77) for rows in torch.arange(442).split([300, 71, 71]))


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


seeds = range(20)
step = hfta.make_train_step(make_model(), mse, hfta.adam(lr=3e-3))
evaluate = hfta.make_eval_step(make_model(), mse)
state = step.init(*hfta.init_params(make_model, seeds), seeds=seeds)
loader = hfta.ArrayLoader(train, 32, seeds=seeds, bootstrap=True)
options = {"callbacks": [hfta.early_stopping("mse", 5)], "restore_best": "mse", "compact": True, "progress": False}
state, _ = hfta.fit(step, state, loader, epochs=60, evaluate=lambda state: evaluate(state, val), **options)
found, alone = hfta.predict(make_model(), state, test[0]), evaluate(state, test)["mse"].mean()
print(f"error {(found.mean - test[1]).square().mean():.3f}, of a member {alone:.3f}, deviation {found.std.mean():.3f}")
