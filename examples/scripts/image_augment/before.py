"""Small images by a convolutional network: a Dataset with augmentations, AdamW without decay of biases, warm-up and cosine,
label smoothing, clipping, and a checkpoint of the best epoch.
"""

import argparse
import math
import os
import random
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, train):
        images, labels = load_digits(return_X_y=True)
        rows = np.arange(len(images)) % 5 != 0
        rows = rows if train else ~rows
        self.images, self.labels = images[rows].reshape(-1, 8, 8).astype("float32") / 16, labels[rows]
        self.train = train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            top, left = random.randint(0, 2), random.randint(0, 2)
            image = np.pad(image, 1)[top : top + 8, left : left + 8]
            image = image * np.float32(np.random.uniform(0.8, 1.2))
        return torch.from_numpy(np.ascontiguousarray(image))[None], int(self.labels[index])


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


def create_model(width=16, drop_rate=0.1):
    blocks = Block(1, width, 1), Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(drop_rate), nn.Linear(2 * width, 10)
    )


def create_optimizer(args, model):
    decay = [param for param in model.parameters() if param.ndim > 1]
    no_decay = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr)


def create_scheduler(args, optimizer, steps_per_epoch):
    warmup, total = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()
        total += len(labels)
    return correct / total


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--output", default=os.path.join(tempfile.gettempdir(), "best.pt"))
    args = parser.parse_args(argv)

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    loader = DataLoader(Digits(train=True), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Digits(train=False), 256)
    model = create_model()
    criterion = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    optimizer = create_optimizer(args, model)
    scheduler = create_scheduler(args, optimizer, len(loader))

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        accuracy = validate(model, val_loader)
        print(f"epoch {epoch}: loss {loss.item():.4f} accuracy {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), args.output)
    print(f"best accuracy: {best}")
    return best


if __name__ == "__main__":
    main()
