"""M LightningModules as an array, by their own steps, optimizers, schedulers, hooks and logged values."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hfta_func import optim
from hfta_func.callbacks import while_active
from hfta_func.errors import StackError
from hfta_func.integrations import lightning_steps
from hfta_func.models.stack import build, stack_params, unstack_params
from hfta_func.run.data import ArrayLoader
from hfta_func.run.dataset import generators_restored
from hfta_func.run.experiment import columns_of
from hfta_func.run.fit import fit
from hfta_func.run.history import Callback, History, present
from hfta_func.step.state import TrainState, stacked
from hfta_func.step.train import TrainStep, make_train_step

_AFTER_EPOCHS = "on_validation_epoch_end", "on_train_epoch_end"
_REFUSED = (
    *("backward", "on_before_backward", "on_after_backward", "configure_gradient_clipping", "on_before_zero_grad"),
    *("on_before_optimizer_step", "optimizer_zero_grad", "optimizer_step", "lr_scheduler_step", "configure_callbacks"),
    *(f"on_{kind}_batch_{end}" for kind in ("train", "validation") for end in ("start", "end")),
    *("on_train_epoch_start", "on_validation_epoch_start", "on_validation_start", "on_validation_end"),
    *("on_validation_model_eval", "on_validation_model_train"),
)
"""Hooks that members cannot have."""
_PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_CLIPS = {"norm": optim.clip_grad_norm, "value": optim.clip_grad_value}


def lightning(
    module: Callable[..., nn.Module], *, seeds: Any, options: Mapping[str, Any] | None = None, **arguments: Any
) -> LightningArray:
    """M LightningModules of one class, trained together as M Trainers would train them one after the other.

    Args:
        module: The class, or a function that makes one module.
        seeds: Number of members, or one integer per member: member ``i`` is ``seed_everything(seeds[i]); module(...)``.
        options: Further arguments of :func:`make_train_step`.
        arguments: Arguments of ``module``, each a value for all members or a list of one per member.

    Raises:
        HyperparameterError: if a list has another length than there are members.
        StackError: if ``module`` makes no LightningModule, or one with a hook that an array cannot call; it is named.

    Example:
        >>> import lightning as L
        >>> class Regression(L.LightningModule):
        ...     def __init__(self, lr):
        ...         super().__init__()
        ...         self.save_hyperparameters()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        ...         self.log("train_loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        >>> array = lightning(Regression, seeds=3, lr=[0.01, 0.02, 0.03])
        >>> array.fit(torch.utils.data.DataLoader(data, 8), max_epochs=2, progress=False)
        History(3 members, 2 epochs: loss, finite, train_loss)
        >>> [model.hparams.lr for model in array.models()]
        [0.01, 0.02, 0.03]
    """
    return LightningArray(module, seeds, options or {}, arguments)


class LightningArray:
    """M LightningModules that train together; made by :func:`lightning`.

    Attributes:
        step: The :class:`TrainStep` of the last :meth:`fit`.
        state: Its last :class:`TrainState`.
        history: Its :class:`History`, whose frames have the arguments of the modules.
    """

    step: TrainStep
    state: TrainState

    def __init__(self, module: Any, seeds: Any, options: Mapping[str, Any], arguments: Mapping[str, Any]):
        self.seeds, columns = columns_of(seeds, arguments)
        rows = ({name: column[member] for name, column in columns.items()} for member in range(len(self.seeds)))

        def factory(**row: Any) -> Any:
            # What setup and configure_model draw follows what the module has drawn.
            return module(**row), torch.get_rng_state()

        made: Any = [build(factory, seed, row) for seed, row in zip(self.seeds, rows, strict=True)]
        self._members, self._drawn = map(list, zip(*made, strict=True))
        self._options, self._columns, self._name = options, columns, type(self._members[0]).__qualname__
        bases = [kind for kind in type(self._members[0]).__mro__ if kind.__name__ == "LightningModule"]
        if not bases:
            raise StackError(f"{self._name} is no LightningModule; use Experiment for others")
        self._base = bases[0]
        for name in filter(self._has, _REFUSED):
            cure = "docs/howto/lightning.md says what to do instead"
            raise StackError(f"{self._name} overrides {name}, which no member has for itself; {cure}")
        if not self._members[0].automatic_optimization:
            cure = "return the loss from training_step; several networks train by hfta.joint"
            raise StackError(f"{self._name} has automatic_optimization=False, manual optimization; {cure}")
        for path, child in self._members[0].named_modules():
            if any(kind.__module__.startswith("torchmetrics.") for kind in type(child).__mro__):
                cure = "self.log what a function returns for the batch, such as one of torchmetrics.functional"
                raise StackError(f"'{path}' is a metric of torchmetrics, which belongs to no member; {cure}")
        self.history = History(torch.tensor(self.seeds))

    def fit(
        self,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        *,
        max_epochs: int,
        datamodule: Any = None,
        gradient_clip_val: float | Sequence[float] | None = None,
        gradient_clip_algorithm: str = "norm",
        accumulate_grad_batches: int = 1,
        precision: str = "32-true",
        callbacks: Any = (),
        **options: Any,
    ) -> History:
        """Train all members from where they are, with new optimizers, as ``Trainer(...).fit(...)`` does.

        Every value that a module logs is in the history under its name: its mean over the rows of the epoch.

        Args:
            train_dataloaders: Batches that all members share, such as a ``DataLoader``; or an :class:`ArrayLoader` or
                :class:`DatasetLoader`, which has each member's own. By default the module's or ``datamodule``'s.
            val_dataloaders: Those of ``validation_step``.
            max_epochs: Number of epochs.
            datamodule: A ``LightningDataModule``.
            gradient_clip_val: Largest norm or value of a gradient, one for all members or one each; 0 is no limit.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``.
            accumulate_grad_batches: Number of batches for each update, of which an epoch must be a multiple.
            precision: ``"bf16-mixed"``, ``"16-mixed"``, or that of the modules by default.
            callbacks: One or several of Lightning's class ``EarlyStopping``, and callbacks of :func:`hfta_func.fit`.
            options: Further arguments of :func:`hfta_func.fit`, such as ``resume`` and ``restore_best``.

        Raises:
            StackError: if optimizers, schedulers or callbacks cannot be those of an array.
            TraceError: if a step reads ``self.trainer``, ``batch_idx`` or the value of a tensor.
        """
        members, package = self._members, self._base.__module__.removesuffix(".core.module")
        facts = dict(max_epochs=max_epochs, current_epoch=0, sanity_checking=False)
        for member in members:
            member.trainer = lightning_steps.TrainerFacts(**facts, accumulate_grad_batches=accumulate_grad_batches)
        train, validation = self._set_up(members, datamodule, train_dataloaders, val_dataloaders)
        is_dealt = isinstance(train, ArrayLoader) and not train.shared
        batches = train.lengths if is_dealt else [operator.length_hint(train)] * len(members)
        updates = [each // accumulate_grad_batches for each in batches]
        if accumulate_grad_batches > 1 and not all(each and each % accumulate_grad_batches == 0 for each in batches):
            cure = "choose a batch size or a Subset of rows that gives a multiple of it, or give the data a __len__"
            raise StackError(f"accumulate_grad_batches={accumulate_grad_batches}, epochs of {batches} batches; {cure}")
        for member, each, count in zip(members, batches, updates, strict=False):
            if each:
                vars(member.trainer).update(num_training_batches=each, estimated_stepping_batches=count * max_epochs)
        core = importlib.import_module(f"{package}.core.optimizer")
        optimizer, followers = lightning_steps.optimizer_of(members, core, updates, max_epochs)
        if gradient_clip_val not in (None, 0):
            optimizer = optim.chain(_CLIPS[gradient_clip_algorithm](gradient_clip_val), optimizer)
        if accumulate_grad_batches > 1:
            optimizer = optim.accumulate(optimizer, accumulate_grad_batches)
        for member in members:
            member.on_fit_start()
            member.on_train_start()
        models = self.models()
        hparams = lightning_steps.share_hparams(models)
        step_options: dict[str, Any] = {"autocast": _PRECISIONS[precision], **self._options}
        step_options.setdefault("batch_dims", 0 if is_dealt else None)
        rows_of = importlib.import_module(f"{package}.utilities.data").extract_batch_size
        about = rows_of, lightning_steps.batch_hooks(datamodule, self._base)
        loss_fn = functools.partial(lightning_steps.loss_of, *about)
        self.step = make_train_step(models[0], loss_fn, optimizer, **step_options)
        params = stack_params(models, share_frozen=self.step.options.share_frozen)
        state = self.step.init(*params, seeds=self.seeds, hparams=hparams)
        if validation is not None and self._has("validation_step"):
            options["evaluate"] = functools.partial(lightning_steps.metrics_of, *about), validation
        hooks = [self._after_epoch] if any(map(self._has, _AFTER_EPOCHS)) else []
        given = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        options["callbacks"] = [while_active, *hooks, *map(_callback_of, given), *followers]
        self.state, self.history = fit(self.step, state, train, epochs=max_epochs, **options)
        self.history.columns = self._columns
        self._members = self._with(self.state, range(len(self._members)))
        for member, before in zip(self._members, members, strict=True):
            member.trainer = before.trainer
            member.on_train_end()
            member.on_fit_end()
        return self.history

    def models(self) -> list[Any]:
        """Every member as a LightningModule of its own, with its ``hparams``."""
        return [copy.deepcopy(member) for member in self._members]

    def __repr__(self) -> str:
        return f"LightningArray({len(self.seeds)} members of {self._name}, {len(self.history)} epochs)"

    def _has(self, name: str) -> bool:
        """Whether the module overrides a method of LightningModule."""
        return getattr(type(self._members[0]), name, None) is not getattr(self._base, name, None)

    def _with(self, state: TrainState, numbers: Sequence[int]) -> list[Any]:
        """Modules with the parameters and buffers that a state has of them."""
        models = [copy.deepcopy(self._members[number]) for number in numbers]
        trained = unstack_params(models[0], *stacked(state), share_frozen=self.step.options.share_frozen)
        for model, module in zip(models, trained, strict=True):
            tensors = (itertools.chain(each.parameters(), each.buffers()) for each in (model, module))
            for old, new in zip(*tensors, strict=True):
                old.data = new.data
        return models

    def _set_up(self, members: list[Any], datamodule: Any, train: Any, validation: Any) -> tuple[Any, Any]:
        """The batches for training and for validation, None for none, once modules and data are set up."""
        if datamodule is not None:
            datamodule.prepare_data()
            datamodule.setup("fit")
        for member, drawn in zip(members, self._drawn, strict=True):
            with generators_restored():
                torch.set_rng_state(drawn)
                member.prepare_data()
                member.setup("fit")
                member.configure_model()
        source = members[0] if datamodule is None else datamodule
        train = source.train_dataloader() if train is None else train
        if validation is None and (datamodule is not None or self._has("val_dataloader")):
            validation = source.val_dataloader()
        return train, validation

    def _after_epoch(self, state: TrainState, history: History) -> None:
        """Call the hooks of every active member, on a module as it is now, and record what they log."""
        numbers, logged = history.members.tolist(), {}
        for index, model in enumerate(self._with(state, numbers)):
            if not state.active[index]:
                continue
            metrics = {name: values[numbers[index]] for name, values in history.epochs[-1].items()}
            before = copy.deepcopy(model.state_dict())
            values: Any = {}
            facts = self._members[numbers[index]].trainer
            facts.current_epoch = len(history) - 1
            model.trainer = lightning_steps.TrainerFacts(**vars(facts), callback_metrics=metrics)
            lightning_steps.record_into(model, values)
            for hook in _AFTER_EPOCHS:
                getattr(model, hook)()
            for path, leaf in model.state_dict().items():
                if not torch.equal(leaf, before[path]):
                    raise StackError(f"a hook of {self._name} after an epoch writes '{path}'; use a callback of fit")
            for name, (value, _) in values.items():
                column = logged.setdefault(name, torch.full((len(history.seeds),), torch.nan, dtype=torch.float64))
                column[numbers[index]] = value
        history.epochs[-1].update(logged)


def _callback_of(callback: Any) -> Callback:
    """A callback of :func:`hfta_func.fit` for one of Lightning, or of the user."""
    kinds = [kind for kind in type(callback).__mro__ if "lightning" in kind.__module__]
    if not kinds:
        return callback
    if {kind.__name__ for kind in kinds} & {"ProgressBar", "ModelSummary"}:
        # These only show what fit shows by itself.
        return lambda state, history: None
    if kinds[0].__name__ != "EarlyStopping":
        cure = "restore_best keeps best epochs, resume writes files, and callback(state, history) is called each epoch"
        raise StackError(f"{kinds[0].__name__} is a callback for one Trainer; pass fit none: {cure}")

    def stop(state: TrainState, history: History) -> TrainState:
        # Each member has Lightning's own callback, which sees all of its epochs again.
        ended: list[bool] = []
        for column in present(history, callback.monitor).unbind(1):
            stopper = copy.deepcopy(callback)
            ended.append(any(stopper._evaluate_stopping_criteria(value)[0] for value in column))
        return state._replace(active=state.active & ~torch.tensor(ended, device=state.active.device))

    return stop
