"""The forward-forward algorithm: every layer learns alone to tell digits with right labels from those with wrong ones."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import hfta_func as hfta


class Layer(nn.Linear):
    def forward(self, x):
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(super().forward(direction))


def loss_fn(layer, batch, threshold=2.0):
    good, bad = (layer(x).pow(2).mean(1) for x in batch)
    return torch.log1p(torch.exp(torch.cat([threshold - good, bad - threshold]))).mean()


def load():
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images, labels = images[:600].to(torch.get_default_dtype()) / 16, labels[:600]
    marks = torch.eye(10, dtype=images.dtype)
    return [torch.cat([marks[at], images], 1) for at in (labels, (labels + 1 + torch.arange(600) % 9) % 10)]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.03)
    args = parser.parse_args(argv)

    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        net = nn.Sequential(Layer(74, 50), Layer(50, 50))
        models.append(net)
    positive, negative = load()
    options = {"batch_dims": None}
    for number, layers in enumerate(zip(*models, strict=True)):
        array = hfta.Experiment(layers, loss_fn, hfta.adam(lr=args.lr), seeds=args.seeds, options=options)
        array.fit([(positive, negative)] * args.steps, epochs=1)
        positive, negative = (array.ensemble()(part, **options).detach() for part in (positive, negative))
        options = {"batch_dims": 0}
        for net, layer in zip(models, array.models(), strict=True):
            net[number] = layer
    return models


if __name__ == "__main__":
    main()
