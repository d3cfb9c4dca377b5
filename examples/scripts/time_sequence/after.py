"""Sine waves predicted by two LSTM cells, which L-BFGS trains on all waves at once."""

import argparse

import torch
from torch import nn

import hfta_func as hfta

HIDDEN = 12


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, HIDDEN)
        self.lstm2 = nn.LSTMCell(HIDDEN, HIDDEN)
        self.linear = nn.Linear(HIDDEN, 1)

    def forward(self, inputs, future=0):
        outputs = []
        h_t = torch.zeros(inputs.size(0), HIDDEN, dtype=inputs.dtype)
        c_t = torch.zeros(inputs.size(0), HIDDEN, dtype=inputs.dtype)
        h_t2 = torch.zeros(inputs.size(0), HIDDEN, dtype=inputs.dtype)
        c_t2 = torch.zeros(inputs.size(0), HIDDEN, dtype=inputs.dtype)
        for input_t in inputs.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs.append(output)
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def waves(count=10, length=40, period=8):
    draws = torch.Generator().manual_seed(2)
    shifts = torch.randint(-4 * period, 4 * period, (count, 1), generator=draws)
    return ((torch.arange(length) + shifts) / period).sin().to(torch.get_default_dtype())


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.8)
    args = parser.parse_args(argv)

    data = waves()
    inputs, targets = data[3:, :-1], data[3:, 1:]
    test_inputs, test_targets = data[:3, :-1], data[:3, 1:]
    criterion = nn.MSELoss()

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    def test_loss(model, batch):
        future = 20
        return criterion(model(batch[0], future)[:, :-future], batch[1])

    settings = {"seeds": args.seeds, "options": {"batch_dims": None}}
    array = hfta.Experiment(Sequence, loss_fn, hfta.lbfgs(lr=args.lr), test_loss, **settings)
    array.fit([(inputs, targets)], epochs=args.steps, evaluate=(test_inputs, test_targets))
    return array.models()


if __name__ == "__main__":
    main()
