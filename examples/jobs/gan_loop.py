"""The loop of ``gan.py``."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

points = torch.view_as_real(torch.polar(torch.ones(8), torch.arange(8) * torch.pi / 4))


def mlp(*sizes):
    return nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.LeakyReLU())))[:-1]


distances = []
for seed, lr in enumerate([0.001, 0.005, 0.01, 0.02]):
    torch.manual_seed(seed)
    d, g = mlp(2, 64, 64, 1), mlp(8, 64, 64, 2)
    optimizer_d = torch.optim.Adam(d.parameters(), lr, betas=(0.5, 0.9))
    optimizer_g = torch.optim.Adam(g.parameters(), lr, betas=(0.5, 0.9))
    loader = DataLoader(points.repeat(256, 1), 64, shuffle=True)
    for _ in range(15):
        total = 0.0
        for real in loader:
            optimizer_d.zero_grad()
            fake = g(torch.randn(len(real), 8)).detach()
            loss_d = (F.softplus(-d(real)) + F.softplus(d(fake))).mean()
            loss_d.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            fake = g(torch.randn(len(real), 8))
            loss_g = F.softplus(-d(fake)).mean()
            loss_g.backward()
            optimizer_g.step()
            total += torch.cdist(fake.detach(), points).amin(1).mean().item()
    distances.append(total / len(loader))
print("distances " + ", ".join(f"{distance:.3f}" for distance in distances))
