"""The loop of ``subjects.py``."""

import copy

import pandas
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

counts = torch.randint(40, 200, (24,), generator=torch.Generator().manual_seed(0))
x, w = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (int(counts.sum()), 24))
y = (x * w.repeat_interleave(counts, 0)).sum(1).tanh()
models, rows = [], []
for subject, trials in enumerate(torch.arange(len(x)).split(counts.tolist())):
    train, val = trials[:-20], trials[-20:]
    torch.manual_seed(subject)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(x[train], y[train])
    best, stale, best_state = float("inf"), 0, None
    for epoch in range(30):
        model.train()
        for inputs, targets in DataLoader(data, 16, sampler=RandomSampler(data, num_samples=16 * 8)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            error = nn.functional.mse_loss(model(x[val]), y[val]).item()
        stale += 1
        if error < best:
            best, best_epoch, stale, best_state = error, epoch, 0, copy.deepcopy(model.state_dict())
        if stale == 5:
            break
    model.load_state_dict(best_state)
    models.append(model)
    rows.append({"member": subject, "epoch": best_epoch, "mse": best})
print(pandas.DataFrame(rows).to_string(index=False))
