"""Handwritten digits by a LightningModule with a data module, a schedule, clipping and early stopping, for several seeds."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hfta_func as hfta


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x, y = load_digits(return_X_y=True)
        x_train, x_val, y_train, y_val = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
        self.train_set = TensorDataset(torch.tensor(x_train).float(), torch.tensor(y_train))
        self.val_set = TensorDataset(torch.tensor(x_val).float(), torch.tensor(y_val))

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=256)


class LitDigits(L.LightningModule):
    def __init__(self, hidden=64, lr=1e-2, weight_decay=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.head(self.model(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--patience", type=int, default=5)
    args = parser.parse_args(argv)

    array = hfta.integrations.lightning(LitDigits, seeds=args.seeds, lr=args.lr)
    history = array.fit(
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[EarlyStopping("val_loss", patience=args.patience)],
        datamodule=DigitsData(args.batch_size),
    )
    accuracies = history["val_acc"][-1].tolist()
    for seed, accuracy in enumerate(accuracies):
        print(f"seed {seed}: accuracy {accuracy:.4f}")
    return accuracies


if __name__ == "__main__":
    main()
