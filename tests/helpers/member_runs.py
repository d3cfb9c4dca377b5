"""Runs whose members come, go and become inactive."""

import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta

SEEDS = [5, 3, 8, 9]
M = len(SEEDS)


def factory():
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)).double()


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


DATA = tuple(torch.randn(12, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for size in (4, 2))


class Run:
    """A step, its state and what a run of some seeds needs."""

    def __init__(self, seeds=SEEDS, **options):
        self.step = hfta.make_train_step(factory(), mse, hfta.adam(lr=0.05), **options)
        self.loader = hfta.ArrayLoader(DATA, 5, seeds=seeds)
        evaluate = hfta.make_eval_step(factory(), mse)
        self.evaluate = lambda state: evaluate(state, DATA)
        self.state = self.step.init(*hfta.init_params(factory, seeds), seeds=seeds)

    def note_sizes(self, step=None):
        """Train by a function that notes the number of members at each call, in the list that is returned."""
        sizes, step = [], step or self.step

        def noted(state, batch):
            sizes.append(hfta.num_models(state))
            return step(state, batch)

        noted.batch_dims, self.step = self.step.batch_dims, noted
        return sizes

    def fit(self, epochs, *callbacks, **options):
        options = {"evaluate": self.evaluate, "progress": False} | options
        return hfta.fit(self.step, self.state, self.loader, epochs=epochs, callbacks=callbacks, **options)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, equal_nan=True)


def stop(**when):
    """Members that become inactive after an epoch, by name ``e<epoch>``."""

    def callback(state, history):
        active = state.active.clone()
        active[when.get(f"e{len(history)}", [])] = False
        return state._replace(active=active)

    return callback
