"""A script: data, a model, the loop that trains it alone, and the array that everyday jobs compare with it."""

import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from ways import train_solo

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
BATCHES = [(X[i : i + 6], Y[i : i + 6]) for i in range(0, 24, 6)]


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def fitted(
    loss, members=3, make=make, data=BATCHES, epochs=3, template=None, hparams=None, fit=None, around=None, **options
):
    """A trained array and its history; ``around`` makes another function of its step."""
    options = {"batch_dims": None} | options
    step = hfta.make_train_step(template or make(), loss, hfta.sgd(lr=0.1), **options)
    state = step.init(*hfta.init_params(make, range(members)), seeds=range(members), hparams=hparams)
    return hfta.fit(around(step) if around else step, state, data, epochs=epochs, progress=False, **(fit or {}))


def array(loss, members=3, make=make, **options):
    """The models of a trained array."""
    state, _ = fitted(loss, members, make, **options)
    return hfta.unstack_params(make(), *hfta.step.stacked(state))


def loop(loss, seed, make=make, epochs=3, end_epoch=lambda epoch, model: None, batch=tuple, data=BATCHES, lr=0.1):
    """One model trained alone."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for epoch in range(epochs):
        train_solo(model, loss, optimizer, map(batch, data))
        end_epoch(epoch + 1, model)
    return model


def assert_same(models, expected, tolerance=1e-10):
    for found, model in zip(models, expected, strict=True):
        torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=tolerance, atol=tolerance)


def assert_trained(state, models, rtol=1e-10, atol=1e-12):
    """The parameters of a state are those of models trained alone."""
    for member, model in enumerate(models):
        found = {path: leaf[member] for path, leaf in state.params.items()}
        torch.testing.assert_close(found, dict(model.named_parameters()), rtol=rtol, atol=atol)
