"""A language model of words: an LSTM whose state goes on from batch to batch, with clipped gradients and a falling rate."""

import argparse

import torch
from torch import nn

import hfta_func as hfta

WORDS = 40


class RNNModel(nn.Module):
    def __init__(self, width=24, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, WORDS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self, columns):
        weight = self.encoder.weight
        return tuple(weight.new_zeros(self.rnn.num_layers, columns, self.rnn.hidden_size) for _ in range(2))


def text(length=2400):
    """Words in an order that can be learned: each follows from the two before it, most of the time."""
    draws = torch.Generator().manual_seed(0)
    words = [1, 2]
    for strays in torch.rand(length, generator=draws) < 0.1:
        words.append(int(torch.randint(WORDS, (), generator=draws)) if strays else (3 * words[-1] + words[-2]) % WORDS)
    return torch.tensor(words)


def batchify(words, columns):
    rows = len(words) // columns
    return words[: rows * columns].reshape(columns, rows).t().contiguous()


def batches(source, bptt):
    for at in range(0, len(source) - 1, bptt):
        length = min(bptt, len(source) - 1 - at)
        yield source[at : at + length], source[at + 1 : at + 1 + length].flatten()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--bptt", type=int, default=12)
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--clip", type=float, default=0.25)
    args = parser.parse_args(argv)

    train_data = batchify(text(), args.columns)
    criterion = nn.CrossEntropyLoss()
    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        models.append(RNNModel())

    def loss_fn(model, batch, hidden):
        output, hidden = model(batch[0], hidden)
        return criterion(output, batch[1]), hidden

    loader = list(batches(train_data, args.bptt))
    sgd = hfta.sgd(lr=hfta.schedules.step_lr(args.lr, len(loader), 0.5))
    optimizer = hfta.chain(hfta.clip_grad_norm(args.clip), sgd)
    options = {"batch_dims": None, "carry": models[0].init_hidden(args.columns)}
    array = hfta.Experiment(models, loss_fn, optimizer, seeds=args.seeds, options=options)
    array.fit(loader, epochs=args.epochs)
    return array.models()


if __name__ == "__main__":
    main()
