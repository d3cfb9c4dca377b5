"""Four GANs with learning rates of their own learn a ring of eight points; how far their samples are from the nearest one."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import hfta_func as hfta

seeds, rates = range(4), [0.001, 0.005, 0.01, 0.02]
points = torch.view_as_real(torch.polar(torch.ones(8), torch.arange(8) * torch.pi / 4))


def mlp(*sizes):
    return nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.LeakyReLU())))[:-1]


def make_model():
    return nn.ModuleDict({"d": mlp(2, 64, 64, 1), "g": mlp(8, 64, 64, 2)})


def loss_d(model, real):
    return (F.softplus(-model.d(real)) + F.softplus(model.d(model.g(torch.randn(len(real), 8))))).mean()


def loss_g(model, real):
    fake = model.g(torch.randn(len(real), 8))
    return F.softplus(-model.d(fake)).mean(), {"distance": torch.cdist(fake.detach(), points).amin(1).mean()}


d, g = (hfta.make_train_step(make_model(), loss, hfta.adam(rates, betas=(0.5, 0.9))) for loss in (loss_d, loss_g))
step = hfta.joint(d=d, g=g)
state = step.init(*hfta.init_params(make_model, seeds), seeds=seeds)
loader = hfta.ArrayLoader(points.repeat(256, 1), 64, seeds=seeds)
_, history = hfta.fit(step, state, loader, epochs=15, progress=False)
print("distances " + ", ".join(f"{distance:.3f}" for distance in history["g.distance"][-1]))
