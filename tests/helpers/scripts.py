"""A script: data, a model, the loop that trains it alone, and the array that everyday jobs compare with it."""

import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
BATCHES = [(X[i : i + 6], Y[i : i + 6]) for i in range(0, 24, 6)]


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def array(
    loss, members=3, make=make, data=BATCHES, epochs=3, template=None, optimizer=None, fit=None, around=None, **options
):
    """The models of a trained array; ``around`` makes another function of its step."""
    options = {"batch_dims": None} | options
    step = hfta.make_train_step(template or make(), loss, optimizer or hfta.sgd(lr=0.1), **options)
    state = step.init(*hfta.init_params(make, range(members)), seeds=range(members))
    state, _ = hfta.fit(around(step) if around else step, state, data, epochs=epochs, progress=False, **(fit or {}))
    return hfta.unstack_params(make(), *hfta.step.stacked(state))


def loop(loss, seed, make=make, epochs=3, end_epoch=lambda epoch: None, batch=lambda batch: batch):
    """One model trained alone."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for each in BATCHES:
            optimizer.zero_grad()
            loss(model, batch(each)).backward()
            optimizer.step()
        end_epoch(epoch + 1)
    return model


def assert_same(models, expected, tolerance=1e-10):
    for found, model in zip(models, expected, strict=True):
        torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=tolerance, atol=tolerance)
