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


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    x, y = dataset.tensors
    return F.mse_loss(model(x), y).item()


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
    errors = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = MLP(inputs=10)
        loader = DataLoader(train_set, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=4)
        best, waited = float("inf"), 0
        for _ in range(args.epochs):
            model.train()
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            val_loss = evaluate(model, val_set)
            scheduler.step(val_loss)
            if val_loss < best:
                best, waited = val_loss, 0
                torch.save(model.state_dict(), args.checkpoint)
            else:
                waited += 1
                if waited == args.patience:
                    break
        model.load_state_dict(torch.load(args.checkpoint))
        errors.append(evaluate(model, test_set))
        print(f"seed {seed}: test error {errors[-1]:.4f}")
    return errors


if __name__ == "__main__":
    main()
