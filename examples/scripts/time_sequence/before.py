"""Sine waves predicted by two LSTM cells, which L-BFGS trains on all waves at once."""

import argparse

import torch
from torch import nn

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
    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = Sequence()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=args.lr)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            return loss

        for i in range(args.steps):
            loss = optimizer.step(closure)
            with torch.no_grad():
                future = 20
                test_loss = criterion(model(test_inputs, future)[:, :-future], test_targets)
            print(f"step {i}: loss {loss.item():.4f}, test loss {test_loss.item():.4f}")
        models.append(model)
    return models


if __name__ == "__main__":
    main()
