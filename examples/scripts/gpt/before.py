"""A small GPT of characters: decay for matrices only, warm-up and cosine, clipped gradients, a loss on held-out text."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

SIZE, CONTEXT = 20, 16


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=24, layers=2, heads=3):
        super().__init__()
        self.tokens, self.places = nn.Embedding(SIZE, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SIZE, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight
        self.register_buffer("at", torch.arange(CONTEXT))

    def forward(self, x, targets):
        logits = self.head(self.norm(self.blocks(self.tokens(x) + self.places(self.at))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(count, seed, rows=16):
    """Sequences that count up by a step of their own."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts, steps = torch.randint(1, SIZE, (2, rows, 1), generator=draws)
        sequence = (starts + steps * torch.arange(CONTEXT + 1)) % SIZE
        yield sequence[:, :-1], sequence[:, 1:]


def make_optimizer(model, lr):
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def make_scheduler(optimizer, steps, warmup=5):
    def factor(step):
        return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * step / steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args(argv)

    models = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = GPT()
        optimizer = make_optimizer(model, args.lr)
        scheduler = make_scheduler(optimizer, args.steps)
        for x, y in batches(args.steps, seed=0):
            loss = model(x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            held_out = sum(model(x, y).item() for x, y in batches(4, seed=1)) / 4
        print(f"loss {held_out:.4f}")
        models.append(model)
    return models


if __name__ == "__main__":
    main()
