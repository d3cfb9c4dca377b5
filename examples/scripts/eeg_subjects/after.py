"""A decoder of EEG for every subject: recordings of two kinds of imagined movement, a small EEGNet each, early stopping."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hfta_func as hfta


def load_subject(subject, trials=160, channels=8, samples=64):
    """Synthetic trials: two rhythms at places of the head that differ between subjects, in noise."""
    generator = torch.Generator().manual_seed(1000 + subject)
    labels = torch.arange(trials) % 2
    time = torch.linspace(0, 1, samples)
    pattern = torch.randn(2, channels, generator=generator)
    phase = 6.3 * torch.rand(trials, 1, generator=generator)
    frequency = torch.where(labels == 0, 10.0, 11.5 + subject % 3)[:, None]
    rhythm = torch.sin(6.283 * frequency * time + phase)
    noise = torch.randn(trials, channels, samples, generator=generator)
    return 0.5 * pattern[labels][:, :, None] * rhythm[:, None] + noise, labels


class EEGNet(nn.Module):
    def __init__(self, channels=8, samples=64, filters=8, p=0.25):
        super().__init__()
        self.temporal = nn.Conv2d(1, filters, (1, 17), padding=(0, 8), bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.spatial = nn.Conv2d(filters, 2 * filters, (channels, 1), groups=filters, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * filters)
        self.dropout = nn.Dropout(p)
        self.classifier = nn.Linear(2 * filters * (samples // 8), 2)

    def forward(self, x):
        x = self.norm1(self.temporal(x.unsqueeze(1)))
        x = F.avg_pool2d(F.elu(self.norm2(self.spatial(x))), (1, 8))
        return self.classifier(self.dropout(x).flatten(1))


def split(trials):
    return torch.randperm(trials, generator=torch.Generator().manual_seed(0)).split(
        [trials // 2, trials // 4, trials // 4]
    )


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def metrics(model, batch):
    logits = model(batch[0])
    return {"val_loss": F.cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(1) == batch[1]).float().mean()}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--subjects", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--patience", type=int, default=10)
    args = parser.parse_args(argv)

    x, y = map(torch.stack, zip(*(load_subject(subject) for subject in range(args.subjects)), strict=True))
    train, val, test = ([(i * 160 + part).tolist() for i in range(args.subjects)] for part in split(160))
    data, seeds = (x.flatten(0, 1), y.flatten(0, 1)), range(args.subjects)
    array = hfta.Experiment(EEGNet, loss_fn, hfta.adamw(lr=args.lr, weight_decay=1e-2), metrics, seeds=seeds)
    stop = [hfta.callbacks.early_stopping("val_loss", args.patience)]
    best = {"evaluate": (metrics, data, val), "restore_best": "val_loss", "callbacks": stop}
    array.fit(data, args.batch_size, rows=train, epochs=args.epochs, **best)
    accuracies = array.evaluate(data, test)["accuracy"].tolist()
    print("accuracies", accuracies)
    return accuracies


if __name__ == "__main__":
    main()
