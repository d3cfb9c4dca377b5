"""The loop of ``grid.py``."""

import itertools

import pandas
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


rows = []
for lr, weight_decay, seed in itertools.product([1e-4, 1e-3, 1e-2], [0.0, 0.1, 10.0], range(4)):
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    loader = DataLoader(TensorDataset(*train), 64, shuffle=True)
    for epoch in range(4):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(-1) == test[1]).float().mean().item()
        rows.append({"lr": lr, "weight_decay": weight_decay, "seed": seed, "epoch": epoch, "accuracy": accuracy})
frame = pandas.DataFrame(rows)
last = frame[frame.epoch == frame.epoch.max()]
print(last.groupby(["lr", "weight_decay"]).accuracy.mean().unstack().round(4).to_string())
