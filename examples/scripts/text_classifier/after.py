"""Sentences by a small BERT with transformers' Trainer: warm-up, weight decay, padding by batch, evaluation by epoch."""

import argparse
import random
import tempfile

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hfta_func as hfta

WORDS = "the a film plot cast was is felt truly rather never good great fresh moving bad dull weak awful slow".split()
VOCABULARY = {word: number for number, word in enumerate(["[PAD]", "[CLS]", *WORDS])}


class Reviews(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(size):
            label = rng.randrange(2)
            text = rng.choices(WORDS[:11], k=rng.randint(3, 10))
            text.insert(rng.randrange(len(text)), rng.choice(WORDS[15:] if label else WORDS[11:15]))
            self.items.append({"input_ids": [1, *(VOCABULARY[word] for word in text)], "labels": label})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(features):
    width = max(len(feature["input_ids"]) for feature in features)
    ids = torch.tensor([feature["input_ids"] + [0] * (width - len(feature["input_ids"])) for feature in features])
    labels = torch.tensor([feature["labels"] for feature in features])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def compute_metrics(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def make_trainer(args, seed, train_set, eval_set):
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    training_args = TrainingArguments(
        output_dir=args.output,
        seed=seed,
        learning_rate=args.lr,
        weight_decay=0.01,
        warmup_steps=10,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    return Trainer(
        model_init=lambda: BertForSequenceClassification(config),
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=collate,
        compute_metrics=compute_metrics,
    )


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rows", type=int, default=480)
    parser.add_argument("--output", default=tempfile.gettempdir())
    args = parser.parse_args(argv)

    train_set, eval_set = Reviews(args.rows, seed=1), Reviews(200, seed=2)
    trainers = [make_trainer(args, seed, train_set, eval_set) for seed in range(args.seeds)]
    _, history = hfta.integrations.train_trainers(trainers)
    print(history.last())
    return history["eval_loss"][-1].tolist()


if __name__ == "__main__":
    main()
