"""The loop of ``ensemble.py``."""

import copy
import sys

import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
train, val, test = ((20 * x[rows], (y[rows] - 152) / 77) for rows in torch.arange(442).split([300, 71, 71]))


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1), torch.nn.Flatten(0))


class Ensemble(torch.nn.Module):
    def __init__(self, models):
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, x):
        outputs = torch.stack([model(x) for model in self.models])
        return outputs.mean(0), outputs.std(0)


def error_of(model, inputs, targets):
    model.eval()
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(inputs), targets).item()


models = []
for seed in range(20):
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = torch.randint(300, (300,))
    loader = DataLoader(TensorDataset(train[0][rows], train[1][rows]), 32, shuffle=True)
    best, stale, best_state = float("inf"), 0, None
    for _ in range(60):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        error, stale = error_of(model, *val), stale + 1
        if error < best:
            best, stale, best_state = error, 0, copy.deepcopy(model.state_dict())
        if stale == 5:
            break
    model.load_state_dict(best_state)
    models.append(model)
alone = sum(error_of(model, *test) for model in models) / len(models)
deployed = Ensemble(models).eval()
program = torch.export.export(deployed, (test[0],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
torch.export.save(program, sys.argv[1])
with torch.no_grad():
    mean, std = deployed(test[0])
print(f"error {(mean - test[1]).square().mean():.3f}, of a member {alone:.3f}, deviation {std.mean():.3f}")
