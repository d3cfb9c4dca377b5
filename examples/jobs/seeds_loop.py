"""The loop of ``seeds.py``."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


accuracies = []
for seed in range(16):
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(*train), 64, shuffle=True)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracies.append((model(test[0]).argmax(-1) == test[1]).float().mean())
found = torch.stack(accuracies)
print(f"accuracy {found.mean():.4f} with a deviation of {found.std():.4f}")
