"""The loop of ``trials.py``."""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def objective(trial):
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    weight_decay = trial.suggest_float("weight_decay", 1e-3, 10, log=True)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    loader = DataLoader(TensorDataset(*train), 64, shuffle=True)
    for epoch in range(3):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(-1) == test[1]).float().mean().item()
        trial.report(accuracy, epoch)
    return accuracy


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
study.optimize(objective, n_trials=24)
print(f"accuracy {study.best_value:.4f} with a learning rate of {study.best_params['lr']:.5f}")
