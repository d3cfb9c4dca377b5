"""A table by a small network for several seeds: standardised columns, plateau schedule, early stopping, best checkpoint."""

import argparse
import os
import tempfile

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hfta_func as hfta


def load():
    x, y = load_diabetes(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, (y - y.mean()) / y.std(), test_size=0.2, random_state=0)
    x_train, x_val, y_train, y_val = train_test_split(x_train, y_train, test_size=0.2, random_state=0)
    scaler = StandardScaler().fit(x_train)
    parts = (x_train, y_train), (x_val, y_val), (x_test, y_test)
    return [TensorDataset(torch.tensor(scaler.transform(x)).float(), torch.tensor(y).float()) for x, y in parts]


class MLP(nn.Module):
    def __init__(self, inputs, hidden=64, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(inputs, hidden), *(nn.Linear(hidden, hidden) for _ in range(layers - 1))]
        )
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x).squeeze(-1)


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    parser.add_argument("--patience", type=int, default=12)
    parser.add_argument("--checkpoint", default=os.path.join(tempfile.gettempdir(), "tabular.pt"))
    args = parser.parse_args(argv)

    train_set, val_set, test_set = load()
    loader = DataLoader(train_set, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
    adamw = hfta.adamw(lr=args.lr, weight_decay=args.weight_decay)
    options = {"batch_dims": None}
    array = hfta.Experiment(lambda: MLP(inputs=10), mse, adamw, mse, seeds=args.seeds, options=options)
    stop, plateau = hfta.callbacks.early_stopping("mse", args.patience), hfta.schedules.plateau
    follow = [stop, plateau("mse", factor=0.5, patience=4)]
    best = {"evaluate": val_set.tensors, "restore_best": "mse", "callbacks": follow}
    array.fit(loader, epochs=args.epochs, **best)
    hfta.save(array.state, args.checkpoint)
    errors = array.evaluate(test_set.tensors)["mse"].tolist()
    print("test errors", errors)
    return errors


if __name__ == "__main__":
    main()
