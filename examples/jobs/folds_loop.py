"""The loop of ``folds.py``."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
data = TensorDataset(x.float() / 16, y)


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


accuracies = []
for fold, (train, test) in enumerate(KFold(10, shuffle=True, random_state=0).split(x)):
    torch.manual_seed(fold)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(Subset(data, train), 64, shuffle=True)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
    model.eval()
    inputs, targets = data[test]
    with torch.no_grad():
        accuracies.append((model(inputs).argmax(-1) == targets).float().mean())
found = torch.stack(accuracies)
print(f"accuracy {found.mean():.4f} with a deviation of {found.std():.4f}")
