"""The loop of ``checkpoints.py``."""

import copy
import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, test = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


errors, epochs = [], []
for seed in range(8):
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rise, fall = LinearLR(optimizer, total_iters=19), CosineAnnealingLR(optimizer, T_max=20 * 18)
    scheduler = SequentialLR(optimizer, [rise, fall], milestones=[19])
    loader = DataLoader(TensorDataset(*train), 64, shuffle=True)
    path, epoch, best, stale = f"{sys.argv[1]}-{seed}.pt", 0, float("inf"), 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])
        epoch, best, best_epoch = saved["epoch"], saved["best"], saved["best_epoch"]
        stale, best_model = saved["stale"], saved["best_model"]
    while epoch < 20 and stale < 4:
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            error = (model(test[0]).argmax(-1) != test[1]).float().mean().item()
        epoch, stale = epoch + 1, stale + 1
        if error < best:
            best, best_epoch, stale, best_model = error, epoch, 0, copy.deepcopy(model.state_dict())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        state |= {"epoch": epoch, "best": best, "best_epoch": best_epoch, "stale": stale, "best_model": best_model}
        state["rng"] = torch.get_rng_state()
        torch.save(state, path)
    model.load_state_dict(best_model)
    errors.append(best)
    epochs.append(best_epoch)
print(f"error {sum(errors) / 8:.4f} after {sum(epochs) / 8:.2f} epochs")
