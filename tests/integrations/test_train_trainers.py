"""Trainers of transformers as an array: members are what ``trainer.train()`` makes of each alone."""

import pytest
import torch

import hfta_func as hfta

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

CONFIG = transformers.BertConfig(
    **{"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3},
)
ROWS = [{"input_ids": [1 + (row * k) % 29 for k in range(1, 4 + row % 5)], "labels": row % 3} for row in range(20)]
MEMBERS = [
    {"learning_rate": 1e-2, "weight_decay": 0.1, "seed": 3, "warmup_steps": 3, "max_grad_norm": 0.5},
    {"learning_rate": 3e-3, "weight_decay": 0.3, "seed": 4, "warmup_steps": 1, "max_grad_norm": 0.2},
]
SMOOTHED = [{**own, "label_smoothing_factor": factor} for own, factor in zip(MEMBERS, [0.0, 0.2], strict=True)]


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def accuracy(given):
    return {"accuracy": (given.predictions.argmax(-1) == given.label_ids).mean(), "mean": given.predictions.mean()}


class ByHand(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]).double())
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss


def make_classifier():
    return transformers.BertForSequenceClassification(CONFIG).double()


def make_trainer(folder, kind=transformers.Trainer, callbacks=(), rows=ROWS, model=make_classifier, **options):
    common = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": []}
    common |= {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return kind(
        args=transformers.TrainingArguments(str(folder), **common | options),
        model_init=model,
        **{"train_dataset": rows, "eval_dataset": ROWS[:7], "data_collator": collate, "compute_metrics": accuracy},
        callbacks=[*callbacks],
    )


def assert_as_alone(trainer, alone, rtol=1e-10, atol=1e-10):
    """A trainer's model is what another one makes of it, which is trained now."""
    alone.train()
    trained, expected = dict(trainer.model.named_parameters()), dict(alone.model.named_parameters())
    torch.testing.assert_close(trained, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("kind", "members", "options", "precision"),
    [
        (transformers.Trainer, MEMBERS, {"eval_strategy": "epoch", "lr_scheduler_type": "cosine"}, 1e-10),
        (ByHand, MEMBERS, {"eval_strategy": "epoch", "gradient_accumulation_steps": 5}, 1e-10),
        # LabelSmoother adds in float32.
        (transformers.Trainer, MEMBERS, {"label_smoothing_factor": 0.2, "optim": "sgd", "learning_rate": 0.2}, 1e-6),
        (transformers.Trainer, SMOOTHED, {"optim": "sgd", "learning_rate": 0.2}, 1e-6),
    ],
    ids=["padded", "accumulated", "smoothed", "some smoothed"],
)
@pytest.mark.exhaustive(ids="smoothed|accumulated")
def test_members_are_what_a_trainer_makes_of_each_alone(tmp_path, capsys, kind, members, options, precision):
    trainers = [make_trainer(tmp_path, kind, **member | options) for member in members]
    state, history = hfta.integrations.train_trainers(trainers, progress=False)
    assert [*history.columns] == sorted({*members[0]} - {"seed", *options})
    for member, (trainer, own) in enumerate(zip(trainers, members, strict=True)):
        alone = make_trainer(tmp_path, kind, **own | options)
        assert_as_alone(trainer, alone, precision, precision)
        for name in ("loss", "accuracy", "mean") if "eval_strategy" in options else ():
            value = alone.state.log_history[-2][f"eval_{name}"]
            torch.testing.assert_close(history[f"eval_{name}"][-1, member].item(), value, rtol=1e-9, atol=1e-12)
    assert not torch.equal(state.params["classifier.weight"][0], state.params["classifier.weight"][1])


class OwnBatches(transformers.Trainer):
    shuffle = False

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(ROWS, 4, shuffle=self.shuffle, collate_fn=collate)


def test_batches_of_a_user_and_several_data_sets_to_evaluate_on(tmp_path, capsys):
    def made(member):
        trainer = make_trainer(tmp_path, OwnBatches, **MEMBERS[member], num_train_epochs=1, eval_strategy="epoch")
        trainer.eval_dataset = {"first": ROWS[:3], "others": ROWS[3:9]}
        return trainer

    trainers = [made(member) for member in range(2)]
    _, history = hfta.integrations.train_trainers(trainers, progress=False)
    alone = made(1)
    assert_as_alone(trainers[1], alone)
    for logged in alone.state.log_history[:2]:
        names = [name for name in logged if name.endswith(("_loss", "_accuracy"))]
        assert len(names) == 2
        for name in names:
            torch.testing.assert_close(history[name][0, 1].item(), logged[name], rtol=1e-9, atol=1e-12)


def test_batches_that_a_user_shuffles_do_not_depend_on_what_was_drawn_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(OwnBatches, "shuffle", True)
    runs = []
    for seed in range(2):
        trainers = [make_trainer(tmp_path, OwnBatches, **member, num_train_epochs=1) for member in MEMBERS]
        torch.manual_seed(seed)
        runs.append(hfta.integrations.train_trainers(trainers, progress=False).history["loss"])
    assert torch.equal(*runs)


@pytest.mark.exhaustive
def test_language_models_divide_by_their_own_tokens(tmp_path, capsys):
    sizes = {"vocab_size": 30, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)

    def tokens(rows):
        batch = collate(rows)
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    def made(seed):
        options = {"optim": "sgd", "learning_rate": 0.1 * seed, "seed": seed, "gradient_accumulation_steps": 5}
        trainer = make_trainer(tmp_path, **options, model=lambda: transformers.GPT2LMHeadModel(config).double())
        trainer.data_collator = tokens
        return trainer

    trainers = [made(1), made(2)]
    hfta.integrations.train_trainers(trainers, progress=False)
    for seed, trainer in enumerate(trainers, 1):
        # Their loss is computed in float32.
        assert_as_alone(trainer, made(seed), rtol=1e-5, atol=1e-7)


@pytest.mark.exhaustive
def test_members_stop_early_where_their_trainers_do(tmp_path, capsys):
    options = {"eval_strategy": "epoch", "metric_for_best_model": "mean", "greater_is_better": True}
    options |= {"num_train_epochs": 5, "lr_scheduler_type": "constant"}

    def made(member):
        return make_trainer(tmp_path, callbacks=[transformers.EarlyStoppingCallback(1)], **member | options)

    trainers = [made(member) for member in MEMBERS]
    _, history = hfta.integrations.train_trainers(trainers, progress=False)
    epochs = []
    for trainer, member in zip(trainers, MEMBERS, strict=True):
        alone = made(member)
        assert_as_alone(trainer, alone, 1e-7, 1e-7)
        epochs.append(round(alone.state.epoch))
    assert history["eval_mean"].isfinite().sum(0).tolist() == epochs and len(history) == max(epochs) and min(epochs) < 5


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    def made():
        return [make_trainer(tmp_path, **member) for member in MEMBERS]

    def broken(state, history):
        if len(history) == 2:
            raise KeyboardInterrupt

    expected, _ = hfta.integrations.train_trainers(made(), progress=False)
    options = {"resume": tmp_path / "run", "save_every": 2, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        hfta.integrations.train_trainers(made(), callbacks=[broken], **options)
    state, _ = hfta.integrations.train_trainers(made(), **options)
    torch.testing.assert_close(state.params, expected.params, rtol=0, atol=0)


class Logging(transformers.Trainer):
    def training_step(self, *args, **options):
        return super().training_step(*args, **options)


class Callback(transformers.TrainerCallback):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{"max_steps": 5}] * 2, "max_steps is 5, which has no effect on an array"),
        ([{"eval_strategy": "steps", "eval_steps": 2}] * 2, "eval_strategy is 'steps'"),
        ([{"eval_on_start": True}] * 2, "eval_on_start is True, which has no effect on an array"),
        ([{"eval_delay": 2}] * 2, "eval_delay is 2, which has no effect on an array"),
        ([{"bf16_full_eval": True}] * 2, "bf16_full_eval is True"),
        ([{"num_train_epochs": 1.5}] * 2, "num_train_epochs is 1.5"),
        (
            [{"gradient_accumulation_steps": 2}] * 2,
            "gradient_accumulation_steps is 2 but an epoch has 5 batches; .*Subset",
        ),
        ([{"optim": "adafactor"}] * 2, "Adafactor has no counterpart"),
        ([{"num_train_epochs": 1}, {"num_train_epochs": 2}], "model 1: num_train_epochs is 2 but that of model 0 is 1"),
        ([{"kind": Logging}] * 2, "Logging overrides training_step"),
        ([{"kind": ByHand}, {}], "model 1: its __class__ is another one than that of model 0"),
        ([{"callbacks": [Callback()]}] * 2, "Callback is a callback for one Trainer"),
        ([{"rows": ROWS[:9]}, {}], "batches in an epoch; give all datasets one length"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_an_array_cannot_do_is_refused_by_name(tmp_path, options, message):
    trainers = [make_trainer(tmp_path, **option) for option in options]
    with pytest.raises(hfta.HFTAError, match=message):
        hfta.integrations.train_trainers(trainers, progress=False)
