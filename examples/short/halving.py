"""Successive halving by hand over two widths: 32 learning rates each, of which the better half of all goes on, four times."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hfta_func as hfta

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
train, val = ((x[rows].float() / 16, y[rows]) for rows in torch.arange(1797).split([1200, 597]))
rates = torch.logspace(-4, 0, 32)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def error(model, batch):
    return (model(batch[0]).argmax(-1) != batch[1]).float().mean()


def begin(width):
    def make_model():
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    step, evaluate = (
        hfta.make_train_step(make_model(), loss, hfta.adam(rates)),
        hfta.make_eval_step(make_model(), error),
    )
    state = step.init(*hfta.init_params(make_model, range(32)), seeds=range(32))
    return step, evaluate, state, hfta.ArrayLoader(train, 64, seeds=range(32))


arrays = {width: begin(width) for width in (16, 64)}
for epochs in (1, 2, 4, 8):
    scores = {}
    for width, (step, evaluate, state, loader) in arrays.items():
        state, _ = hfta.fit(step, state, loader, epochs=epochs, progress=False)
        arrays[width], scores[width] = (step, evaluate, state, loader), evaluate(state, val)["error"]
    limit = torch.cat([*scores.values()]).median()
    for width, (step, evaluate, state, loader) in [*arrays.items()]:
        del arrays[width]
        if (keep := scores[width] <= limit).any():
            arrays[width] = step, evaluate, hfta.take(state, keep), loader.take(keep)
    left = {width: rates[state.keys].tolist() for width, (_, _, state, _) in arrays.items()}
    print(f"after {epochs} epochs more: " + ", ".join(f"width {w}: {[round(r, 5) for r in left[w]]}" for w in left))
