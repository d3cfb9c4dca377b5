"""LightningModules as an array: members are what ``Trainer`` makes of each alone."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hfta_func as hfta

lightning = pytest.importorskip("lightning.pytorch")
SILENT = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
)
torch.manual_seed(18)  # of two members that may stop early, one does
INPUTS, TARGETS = torch.randn(36, 4, dtype=torch.float64), torch.randint(0, 3, (36,))
TRAIN = DataLoader(TensorDataset(INPUTS, TARGETS), 8)
VALIDATION = DataLoader(TensorDataset(INPUTS[:11], TARGETS[:11]), 4)
ARGUMENTS = {"lr": [3e-3, 1e-2], "smooth": [0.1, 0.2], "decay": [0.0, 0.1]}


class Classifier(lightning.LightningModule):
    def __init__(self, lr=0.1, smooth=0.0, decay=0.0, kind="a"):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self.body(inputs)
        loss = nn.functional.cross_entropy(outputs, targets) + self.hparams.smooth * outputs.square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": (outputs.argmax(-1) == targets).double().mean()}, on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.body(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        assert not self.trainer.sanity_checking
        self.log("norm", self.body[0].weight.norm() + self.current_epoch + self.trainer.callback_metrics["val_loss"])

    def groups(self):
        return [{"params": self.body[:2].parameters()}, {"params": self.body[3].parameters(), "weight_decay": 0.0}]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.groups(), lr=self.hparams.lr, weight_decay=self.hparams.decay)
        steps = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class ByEpoch(Classifier):
    """Makes a part of itself later, and weighs what it logs by hand."""

    def setup(self, stage):
        self.body[3] = nn.Linear(8, 3).double()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.body(batch[0]), batch[1]), batch_size=len(batch[0]) ** 2)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.trainer.model.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 1 - self.hparams.smooth)]


class EverySoManyBatches(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": decay, "interval": "step", "frequency": 5}]


class OnPlateau(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=30 * self.hparams.lr)
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=self.hparams.smooth, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": reduce, "monitor": "val_loss"}


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Lightning's advice on processes that load data, and on where values are logged.
        warnings.filterwarnings("ignore", module="lightning")
        yield


def solo(kind, member, callbacks=(), datamodule=None, **options):
    """The module of one member that is trained alone, and its Trainer."""
    lightning.seed_everything(5 + member, verbose=False)
    module = kind(**{name: column[member] for name, column in ARGUMENTS.items()})
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[*callbacks], **SILENT, **options)
    trainer.fit(module, *(() if datamodule else (TRAIN, VALIDATION)), datamodule=datamodule)
    return module, trainer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Classifier, {"max_epochs": 2, "gradient_clip_val": 0.5}),
        (OnPlateau, {"max_epochs": 6}),
        (ByEpoch, {"max_epochs": 3, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        (ByEpoch, {"max_epochs": 2, "accumulate_grad_batches": 5, "gradient_clip_val": 0.05}),
        (EverySoManyBatches, {"max_epochs": 2, "accumulate_grad_batches": 5}),
    ],
    ids=["by_step", "on_plateau", "by_value", "accumulated", "by_batches"],
)
@pytest.mark.exhaustive(ids="by_value|accumulated|on_plateau")
def test_members_are_what_a_trainer_makes_of_each_alone(kind, options):
    def stop():
        return [lightning.callbacks.EarlyStopping("val_loss", patience=2)] if kind is OnPlateau else []

    array = hfta.integrations.lightning(kind, seeds=[5, 6], **ARGUMENTS)
    history = array.fit(TRAIN, VALIDATION, callbacks=stop(), progress=False, **options)
    for member, model in enumerate(array.models()):
        alone, trainer = solo(kind, member, stop(), **options)
        torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-10)
        assert dict(model.hparams) == dict(alone.hparams) and model.training
        last = history.last().iloc[member]
        assert kind is not OnPlateau or last.epoch == (6, 3)[member]
        for name in ("accuracy", "norm", "train_loss", "val_loss"):
            torch.testing.assert_close(last[name], trainer.callback_metrics[name].item(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [Classifier, ByEpoch])
def test_epochs_of_members_with_rows_of_unequal_number_are_their_own(kind):
    def trained(members):
        loader = hfta.ArrayLoader(
            (INPUTS, TARGETS), 6, seeds=[5 + i for i in members], rows=[[range(9), range(36)][i] for i in members]
        )
        own = {name: [column[member] for member in members] for name, column in ARGUMENTS.items()}
        array = hfta.integrations.lightning(kind, seeds=[5 + member for member in members], **own)
        return array, array.fit(loader, VALIDATION, max_epochs=3, progress=False)

    whole, history = trained([0, 1])
    assert whole.state.step.tolist() == [3 * 2, 3 * 6]
    for member in range(2):
        alone, expected = trained([member])
        for name, values in alone.state.params.items():
            torch.testing.assert_close(whole.state.params[name][member], values[0], rtol=1e-10, atol=1e-10)
        for name in ("train_loss", "val_loss", "norm"):
            torch.testing.assert_close(history[name][:, member], expected[name][:, 0], rtol=1e-10, atol=1e-10)


class Bounded(ByEpoch):
    """Its metric is not finite once it is low."""

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log("bounded", torch.where(loss < 1.23, torch.inf, loss))


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        ("bounded", {}),
        ("bounded", {"check_finite": False, "patience": 2}),
        ("val_loss", {"stopping_threshold": 1.23}),
        ("val_loss", {"divergence_threshold": 1.2}),
        ("val_loss", {"patience": 0, "min_delta": 0.03}),
    ],
)
@pytest.mark.exhaustive(unless="options0")
def test_members_stop_where_early_stopping_says(metric, options):
    def stop():
        return lightning.callbacks.EarlyStopping(metric, **options)

    array = hfta.integrations.lightning(Bounded, seeds=[5, 6], **ARGUMENTS)
    history = array.fit(TRAIN, VALIDATION, max_epochs=7, callbacks=stop(), progress=False)
    ended = history["val_loss"].isfinite().sum(0).tolist()
    assert 1 <= min(ended) < 7
    for member, epochs in enumerate(ended):
        alone, trainer = solo(Bounded, member, [stop()], max_epochs=7)
        assert trainer.current_epoch == epochs
        torch.testing.assert_close(array.models()[member].state_dict(), alone.state_dict(), rtol=1e-10, atol=1e-10)


def changed(**overridden):
    return type("Changed", (Classifier,), overridden)


def reads_trainer(self, batch, batch_idx):
    return self.body(batch[0]).mean() * (1 + self.current_epoch)


def reads_batch_number(self, batch, batch_idx):
    return self.body(batch[0]).mean() if batch_idx % 2 else self.body(batch[0]).sum()


def reads_the_kind(self, batch, batch_idx):
    return self.body(batch[0]).mean() * len(self.hparams.kind)


def logs_a_sum(self, batch, batch_idx):
    loss = self.body(batch[0]).mean()
    self.log("train_loss", loss, reduce_fx="sum")
    return loss


def logs_a_vector(self, batch, batch_idx):
    self.log("outputs", self.body(batch[0]))


def writes(self):
    self.body[3].bias.data.zero_()


def optimize_in_turn(self):
    return [torch.optim.SGD(self.body[number].parameters(), lr=0.1) for number in (0, 3)]


@pytest.mark.parametrize(
    ("overridden", "message"),
    [
        ({"optimizer_step": writes}, "Changed overrides optimizer_step"),
        ({"configure_gradient_clipping": writes}, "configure_gradient_clipping, which"),
        ({"on_train_batch_end": writes}, "on_train_batch_end, which no member has for itself"),
        ({"training_step": logs_a_vector}, r"'outputs' is logged with shape \[8, 3\]; log one number"),
        ({"automatic_optimization": False}, "automatic_optimization=False, manual optimization; .*hfta.joint"),
        ({"training_step": reads_trainer}, "reads self.trainer.current_epoch"),
        ({"training_step": reads_batch_number}, "computes with batch_idx"),
        ({"training_step": logs_a_sum}, "'train_loss' is logged with reduce_fx='sum'"),
        ({"on_train_epoch_end": writes}, "after an epoch writes 'body.3.bias'"),
        ({"configure_optimizers": optimize_in_turn}, "model 0: 2 optimizers and 0 schedulers; several networks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_an_array_cannot_call_is_refused_by_name(overridden, message):
    with pytest.raises(hfta.HFTAError, match=message):
        array = hfta.integrations.lightning(changed(**overridden), seeds=2, kind=["a", "b"])
        array.fit(TRAIN, VALIDATION, max_epochs=1, progress=False)


def test_a_step_has_no_hparams_that_differ_and_are_no_numbers():
    array = hfta.integrations.lightning(changed(training_step=reads_the_kind), seeds=2, kind=["a", "b"])
    with pytest.raises(AttributeError, match="hparams has no 'kind' in a step, or it is no number and members differ"):
        array.fit(TRAIN, VALIDATION, max_epochs=1, progress=False)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(TRAIN.dataset)


def test_metrics_of_torchmetrics_and_other_callbacks_are_refused():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Counting(Classifier):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    with pytest.raises(hfta.errors.StackError, match=r"'accuracy' .*; self\.log .* torchmetrics\.functional"):
        hfta.integrations.lightning(Counting, seeds=2)
    with pytest.raises(hfta.errors.StackError, match="Linear is no LightningModule; use Experiment"):
        hfta.integrations.lightning(lambda: nn.Linear(1, 1), seeds=2)
    array = hfta.integrations.lightning(Classifier, seeds=2)
    three, stream = hfta.ArrayLoader(TRAIN.dataset.tensors, 8, seeds=[0, 1, 2]), DataLoader(Stream(), 8)
    error, accumulated = hfta.errors.StackError, "accumulate_grad_batches=2, epochs of "
    for batches, options, kind, message in (
        (three, {}, hfta.HFTAError, r"3.*2"),
        (TRAIN, {"callbacks": [lightning.callbacks.Timer()]}, error, "Timer is a callback for one Trainer"),
        (TRAIN, {"accumulate_grad_batches": 2}, error, accumulated + r"\[5, 5\] batches; .*Subset"),
        (stream, {"accumulate_grad_batches": 2}, error, accumulated + r"\[0, 0\] batches; .*__len__"),
        (TRAIN, {"precision": "64-true"}, KeyError, "64-true"),
        (TRAIN, {"accelerator": "gpu"}, TypeError, "accelerator"),
    ):
        with pytest.raises(kind, match=message):
            array.fit(batches, max_epochs=1, progress=False, **options)
    with pytest.raises(error, match="schedulers need the number of batches, which the dataloader has not"):
        hfta.integrations.lightning(ByEpoch, seeds=2).fit(stream, max_epochs=1, progress=False)


class Data(lightning.LightningDataModule):
    def setup(self, stage):
        self.rows = TensorDataset(INPUTS, TARGETS)

    def train_dataloader(self):
        return hfta.DatasetLoader(self.rows, 8, seeds=[0, 1])

    def val_dataloader(self):
        return VALIDATION


class Scaling(Data):
    """Changes batches, which the module then does not."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return 3 * batch[0], batch[1]

    def train_dataloader(self):
        return TRAIN


def test_a_datamodule_changes_batches():
    kind = changed(
        on_before_batch_transfer=lambda self, batch, _: (batch[0] + 1, batch[1]),
        on_after_batch_transfer=lambda self, batch, _: 1 / 0,
    )
    array = hfta.integrations.lightning(kind, seeds=[5, 6], **ARGUMENTS)
    array.fit(datamodule=Scaling(), max_epochs=1, progress=False)
    for member, model in enumerate(array.models()):
        alone, _ = solo(kind, member, datamodule=Scaling(), max_epochs=1)
        torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-10, atol=1e-10)


def test_members_have_batches_of_their_own_and_train_on(tmp_path):
    array = hfta.integrations.lightning(ByEpoch, seeds=2)
    first = array.fit(datamodule=Data(), max_epochs=2, progress=False, resume=tmp_path / "run")
    assert len(first) == 2 and "val_loss" in first.epochs[-1] and repr(array).startswith("LightningArray(2 members of ")
    # Zero is no limit, as for a Trainer; what only shows something is left out.
    stop = lightning.callbacks.EarlyStopping("val_loss")
    shown = [lightning.callbacks.RichProgressBar(), lightning.callbacks.ModelSummary(max_depth=2)]
    again = array.fit(datamodule=Data(), max_epochs=1, progress=False, gradient_clip_val=0.0, callbacks=[stop, *shown])
    other = hfta.integrations.lightning(ByEpoch, seeds=2)
    other.fit(datamodule=Data(), max_epochs=2, progress=False)
    continued = other.fit(datamodule=Data(), max_epochs=1, progress=False)
    assert torch.equal(again["train_loss"], continued["train_loss"])
    assert bool((again["train_loss"] < first["train_loss"][0]).all())
    before = {path: leaf.clone() for path, leaf in array.models()[0].state_dict().items()}
    alone = hfta.integrations.lightning(ByEpoch, seeds=[0])
    for epochs in (2, 1):
        rows = hfta.DatasetLoader(TensorDataset(INPUTS, TARGETS), 8, seeds=[0])
        alone.fit(rows, VALIDATION, max_epochs=epochs, progress=False)
    torch.testing.assert_close(before, dict(alone.models()[0].state_dict()), rtol=1e-12, atol=1e-12)
