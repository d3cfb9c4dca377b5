"""A model for each of 24 subjects with 40 to 200 trials: rows, validation, best epoch and end of its own."""

import torch
from torch import nn

import hfta_func as hfta

counts = torch.randint(40, 200, (24,), generator=torch.Generator().manual_seed(0))
x, w = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (int(counts.sum()), 24))
data = x, (x * w.repeat_interleave(counts, 0)).sum(1).tanh()
trials = torch.arange(len(x)).split(counts.tolist())
train, val = [rows[:-20] for rows in trials], [rows[-20:] for rows in trials]


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


subjects = hfta.Experiment(make_model, mse, hfta.adam(lr=1e-2), seeds=24)
stop = hfta.callbacks.early_stopping("mse", 5)
options = {"callbacks": [stop], "restore_best": "mse", "compact": True, "progress": False}
history = subjects.fit(data, 16, rows=train, batches_per_epoch=8, epochs=30, evaluate=(mse, data, val), **options)
print(history.best("mse")[["member", "epoch", "mse"]].to_string(index=False))
