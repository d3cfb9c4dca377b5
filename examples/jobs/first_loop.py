"""The loop of ``first.py``."""

import itertools
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


start, rows = time.perf_counter(), []
for lr, seed in itertools.product([1e-3, 1e-2], range(5)):
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    loader, found = DataLoader(TensorDataset(*train), 32, shuffle=True), []
    for _ in range(40):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append((model(test[0]).argmax(-1) == test[1]).float().mean().item())
    rows.append((len(rows), seed, lr, max(found), found.index(max(found)) + 1))
print(f"{len(rows)} models, 40 epochs, {time.perf_counter() - start:.1f} s")
print("member  seed     lr  accuracy  best epoch")
for member, seed, lr, accuracy, epoch in rows:
    print(f"{member:6}  {seed:4}  {lr:5g}  {accuracy:8.4f}  {epoch:10}")
