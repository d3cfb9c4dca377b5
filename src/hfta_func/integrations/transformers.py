"""M Trainers of ``transformers`` as an array, by their own arguments, losses, optimizers, batches and metrics."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from hfta_func import optim, random
from hfta_func.callbacks import early_stopping, while_active
from hfta_func.errors import BatchError, StackError
from hfta_func.models.stack import stack_params, unstack_params
from hfta_func.run.dataset import generators_restored, seed_all
from hfta_func.run.fit import Result, fit
from hfta_func.run.history import Callback, Metrics, Mode
from hfta_func.step.evaluate import make_eval_step
from hfta_func.step.exchange import from_torch
from hfta_func.step.state import TrainState, stacked
from hfta_func.step.train import make_train_step

# Negative, to differ from the numbers that other parts of this package fold into a key.
_COLLATING = -(2**61) - 6

_PER_MEMBER = {
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "warmup_steps"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "seed", "data_seed", "label_smoothing_factor"),
}
_WITHOUT_EFFECT = {"output_dir", "logging_dir", "run_name", "report_to", "hub_model_id", "project"}
_TAKEN: dict[str, tuple[Any, ...]] = {
    **dict(max_steps=(-1, 0), eval_strategy=("no", "epoch"), train_sampling_strategy=("random", "sequential")),
    **dict.fromkeys(("neftune_noise_alpha", "fsdp", "deepspeed"), (None, "", [], False)),
    **dict.fromkeys(("gradient_checkpointing", "torch_compile", "auto_find_batch_size"), (False,)),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval", "eval_on_start", "batch_eval_metrics"), (False,)),
    "eval_delay": (None, 0),
}
"""Arguments that only have an effect on one Trainer, and the values that an array takes."""
_OVERRIDDEN = "train", "training_step", "_inner_training_loop", "evaluate", "evaluation_loop", "log"
_PADDING = {"labels": -100, "attention_mask": 0, "token_type_ids": 0}


def train_trainers(trainers: Sequence[Any], *, progress: bool = True, **options: Any) -> Result:
    """Train M Trainers of ``transformers`` as one array, as ``trainer.train()`` of each would; their models are then trained.

    Every Trainer makes its own optimizer with its groups, scheduler and batches, in the order of its own seed, and the loss
    is its ``compute_loss``. Padding is added where members' texts differ in length. Noise such as dropout's is drawn from
    ``args.seed``, with other bits than in ``trainer.train()``. Nothing is written to ``output_dir``.

    Args:
        trainers: One Trainer per member. They may differ in their models' weights and in ``learning_rate``,
            ``weight_decay``, Adam's numbers, scheduler and warm-up, ``max_grad_norm``, ``seed``, ``data_seed``,
            ``label_smoothing_factor`` and the data they train on.
        progress: Show a progress bar.
        options: Further arguments of :func:`fit`, such as ``resume``, and of :func:`make_train_step`, such as
            ``checkpoint``.

    Returns:
        The state, and a history with ``loss`` and, if ``eval_strategy`` is ``"epoch"``, ``eval_loss`` and what
        ``compute_metrics`` returns; its frames have the arguments in which the Trainers differ.

    Raises:
        StackError: if a Trainer cannot be a member of an array: it names the argument, callback or method, and the cure.
        BatchError: if batches of members differ in more than the length of texts.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        >>> data = [{"input_ids": [row % 9, 1, 2], "labels": row % 2} for row in range(8)]
        >>> def make_trainer(lr, seed):
        ...     args = TrainingArguments("out", learning_rate=lr, seed=seed, num_train_epochs=2, use_cpu=True, report_to=[])
        ...     return Trainer(args=args, model_init=lambda: BertForSequenceClassification(config), train_dataset=data)
        >>> trainers = [make_trainer(lr, seed) for lr in (1e-3, 1e-2) for seed in (0, 1)]
        >>> state, history = train_trainers(trainers, progress=False)
        >>> history
        History(4 members, 2 epochs: loss, finite)
    """
    _check(trainers)
    args, models = trainers[0].args, [trainer.model.train() for trainer in trainers]
    epochs, groups, batches = int(args.num_train_epochs), args.gradient_accumulation_steps, _Batches(trainers)
    updates, rest = divmod(len(batches), groups)
    if rest:
        cure = "choose a batch size or a Subset of rows that gives a multiple of it"
        raise StackError(f"gradient_accumulation_steps is {groups} but an epoch has {len(batches)} batches; {cure}")
    for trainer in trainers:
        trainer.create_optimizer_and_scheduler(epochs * updates)
    optimizers, followed = [each.optimizer for each in trainers], [each.lr_scheduler for each in trainers]
    optimizer = from_torch(optimizers, followed, models=models, steps=epochs * updates)
    # Zero is no limit.
    limits = [trainer.args.max_grad_norm or torch.finfo(torch.float32).max for trainer in trainers]
    optimizer = optim.chain(optim.clip_grad_norm(limits), optimizer)
    if groups > 1:
        optimizer = optim.accumulate(optimizer, groups)
    smoothing = [trainer.args.label_smoothing_factor for trainer in trainers]
    hparams = {"label_smoothing_factor": smoothing} if len({*smoothing}) > 1 else {}
    step_names = {"chunk_size", "checkpoint", "save", "donate", "share_frozen", "nonfinite", "replay"}
    # Batches of many widths would each need a record of their own.
    step_options = {"replay": False, **{name: options.pop(name) for name in step_names & options.keys()}}
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    dims = {"inputs": 0, "num_items": batches.num_items_dim}
    # A Trainer without label smoothing has nothing that smooths.
    loss_fn = _Loss(max(trainers, key=lambda trainer: trainer.args.label_smoothing_factor))
    step = make_train_step(models[0], loss_fn, optimizer, batch_dims=dims, autocast=autocast, **step_options)
    share: dict[str, Any] = {"share_frozen": step.options.share_frozen}
    state = step.init(*stack_params(models, **share), seeds=[each.args.seed for each in trainers], hparams=hparams)
    if args.eval_strategy != "no":
        options["evaluate"] = _Evaluation(trainers, {**share, "autocast": autocast})
    if args.load_best_model_at_end:
        options.setdefault("restore_best", _best_metric(args))
    options["callbacks"] = [while_active, *_callbacks(trainers), *options.get("callbacks", ())]
    result = fit(step, state, batches, epochs=epochs, progress=progress, **options)
    for model, trained in zip(models, unstack_params(models[0], *stacked(result.state), **share), strict=True):
        model.load_state_dict(trained.state_dict())
    result.history.columns = _differing([{**trainer.args.to_dict(), "seed": 0} for trainer in trainers])
    return result


def _differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    columns = {name: [each[name] for each in settings] for name in settings[0].keys() - _WITHOUT_EFFECT}
    differing = {name: values for name, values in columns.items() if any(value != values[0] for value in values)}
    return dict(sorted(differing.items()))


def _check(trainers: Sequence[Any]) -> None:
    """Raise a StackError if the Trainers cannot be one array."""
    kind, base = type(trainers[0]), importlib.import_module("transformers").Trainer
    for name in _OVERRIDDEN:
        if getattr(kind, name, None) is not getattr(base, name, None):
            cure = "override compute_loss, prediction_step or what makes optimizers and data, or use make_train_step"
            raise StackError(f"{kind.__qualname__} overrides {name}, which an array does not call; {cure}")
    settings = [trainer.args.to_dict() for trainer in trainers]
    for name, values in _differing(settings).items():
        if name not in _PER_MEMBER:
            member = next(member for member, value in enumerate(values) if value != values[0])
            difference = f"model {member}: {name} is {values[member]!r} but that of model 0 is {values[0]!r}"
            raise StackError(f"{difference}; train an array for each")
    for name, taken in _TAKEN.items():
        if name in settings[0] and settings[0][name] not in taken:
            cure = "docs/howto/trainers.md says what to do instead"
            raise StackError(f"{name} is {settings[0][name]!r}, which has no effect on an array; {cure}")
    if settings[0]["num_train_epochs"] % 1:
        raise StackError(f"num_train_epochs is {settings[0]['num_train_epochs']}; give a whole number")
    if len({id(trainer.model) for trainer in trainers}) < len(trainers):
        raise StackError("several Trainers hold one model; give each its own, such as copy.deepcopy(model)")
    for member, trainer in enumerate(trainers):
        for field in ("__class__", "eval_dataset", "compute_loss_func"):
            value, expected = getattr(trainer, field), getattr(trainers[0], field)
            if value is not expected and value != expected:
                raise StackError(f"model {member}: its {field} is another one than that of model 0; give all the same")


def _best_metric(args: Any) -> tuple[str, Mode]:
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}", "max" if args.greater_is_better else "min"


def _callbacks(trainers: Sequence[Any]) -> list[Callback]:
    """The callbacks of :func:`fit` for those of the first Trainer; transformers' own only report and save."""
    (metric, mode), callbacks = _best_metric(trainers[0].args), list[Callback]()
    for callback in trainers[0].callback_handler.callbacks:
        name = type(callback).__qualname__
        if name == "EarlyStoppingCallback" and not callback.early_stopping_threshold:
            callbacks.append(early_stopping(metric, callback.early_stopping_patience, mode=mode))
        elif name == "EarlyStoppingCallback" or not type(callback).__module__.startswith("transformers."):
            cure = "pass callbacks=[...] with one of fit, and EarlyStoppingCallback without a threshold"
            raise StackError(f"{name} is a callback for one Trainer; {cure}")
    return callbacks


class _Loss:
    """``compute_loss`` of a Trainer as the loss of one member, times what gradients are divided by when they accumulate."""

    def __init__(self, trainer: Any):
        self._trainer = copy.copy(trainer)

    def __call__(self, model: nn.Module, batch: Any, hparams: Mapping[str, Tensor]) -> Tensor:
        trainer, num_items = self._trainer, batch["num_items"]
        if "label_smoothing_factor" in hparams:
            trainer.label_smoother = copy.copy(trainer.label_smoother)
            trainer.label_smoother.epsilon = hparams["label_smoothing_factor"]
        loss = trainer.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=num_items)
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            by_items = trainer.model_accepts_loss_kwargs and num_items is not None
            is_scaled = by_items or trainer.compute_loss_func is not None
        return loss * trainer.args.gradient_accumulation_steps if is_scaled else loss


class _Batches:
    """The batches of M Trainers, ``[M, N, ...]``, each in its own order; an epoch is a pure function of the seeds."""

    def __init__(self, trainers: Sequence[Any]):
        self._trainers, self._loaders = trainers, []
        for trainer in trainers:
            with generators_restored():
                # Accelerate orders rows by the seed that is set when it sees the loader.
                torch.manual_seed(trainer.args.seed)
                self._loaders.append(trainer.get_train_dataloader())
        sizes = {len(loader) for loader in self._loaders}
        if len(sizes) > 1:
            raise BatchError(f"Trainers have {sorted(sizes)} batches in an epoch; give all datasets one length")
        self._keys = random.keys([trainer.args.seed for trainer in trainers])
        self._position = self._next = (0, 0)
        self.num_items_dim = None if next(iter(self))["num_items"] is None else 0
        self._position = self._next = (0, 0)

    def __len__(self) -> int:
        return len(self._loaders[0])

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the batches of it that have been seen."""
        return {"position": [*self._position]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start the next iteration at a position from :meth:`state_dict`."""
        self._position = self._next = (*state_dict["position"],)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, start = self._next
        self._next, number = (epoch + 1, 0), 0
        groups = self._trainers[0].args.gradient_accumulation_steps
        seeds = random.fold_in(random.fold_in(self._keys, _COLLATING), epoch)
        iterators: list[Any] = []
        with generators_restored():
            for loader, seed in zip(self._loaders, seeds.tolist(), strict=True):
                # One of a user's own orders rows by PyTorch's generator, as do the processes of any.
                seed_all(seed)
                if hasattr(loader, "set_epoch"):
                    loader.set_epoch(epoch)
                iterators.append(iter(loader))
        for update in range(-(-len(self) // groups)):
            samples: list[Any] = []
            with generators_restored():
                drawn = zip(self._trainers, iterators, random.fold_in(seeds, update).tolist(), strict=True)
                for trainer, iterator, seed in drawn:
                    seed_all(seed)
                    samples.append(trainer.get_batch_samples(iterator, groups, trainer.args.device))
            several, counts = zip(*samples, strict=True)
            num_items = None if counts[0] is None else torch.stack([torch.as_tensor(count) for count in counts])
            for batches in zip(*several, strict=True):
                number += 1
                if number > start:
                    self._position = (epoch, number)
                    yield {"inputs": self._joined(batches), "num_items": num_items}
        self._position = (epoch + 1, 0)

    def _joined(self, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The batches of all members, padded to the longest texts."""
        values = {**_PADDING, "input_ids": getattr(self._trainers[0].model.config, "pad_token_id", None) or 0}
        side = getattr(self._trainers[0].processing_class, "padding_side", "right")
        joined: dict[str, Tensor] = {}
        for name, first in batches[0].items():
            leaves = [batch[name] for batch in batches]
            # Others do not stack, as PyTorch says.
            if name in values and side == "right" and "attention_mask" in batches[0] and first.dim() == 2:
                joined[name] = nn.utils.rnn.pad_sequence([leaf.T for leaf in leaves], True, values[name]).mT
            else:
                joined[name] = torch.stack(leaves)
        return joined


class _Evaluation:
    """``evaluation(state)``: what ``trainer.evaluate()`` of each member returns."""

    def __init__(self, trainers: Sequence[Any], options: Mapping[str, Any]):
        self._trainers, self._trainer = trainers, trainers[0]
        self._tools = importlib.import_module("transformers.trainer_pt_utils")
        self._structure: Any = None
        self._step = make_eval_step(trainers[0].model, self._predicted, **options)

    def _predicted(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss, logits, _ = self._trainer.prediction_step(model, dict(batch), self._trainer.compute_metrics is None)
        leaves, self._structure = optree.tree_flatten(logits)
        return {**({} if loss is None else {"loss": loss}), **{f"{i}": leaf for i, leaf in enumerate(leaves)}}

    def __call__(self, state: TrainState) -> Metrics:
        """The metrics of every member, over each data set if there are several."""
        datasets = self._trainer.eval_dataset
        names = {f"eval_{name}": name for name in datasets} if isinstance(datasets, dict) else {"eval": None}
        return {name: value for each in names.items() for name, value in self._metrics(state, *each).items()}

    def _metrics(self, state: TrainState, prefix: str, dataset: str | None) -> Metrics:
        args, prediction = self._trainer.args, importlib.import_module("transformers.trainer_utils").EvalPrediction
        outputs = [self._tools.EvalLoopContainer(args.eval_do_concat_batches) for _ in self._trainers]
        labels = self._tools.EvalLoopContainer(args.eval_do_concat_batches)
        total, rows = torch.zeros(len(outputs), dtype=torch.float64), 0
        for batch in self._trainer.get_eval_dataloader(dataset):
            metrics, size = self._step(state._replace(opt_state=()), batch), self._tools.find_batch_size(batch)
            rows += size
            if "loss" in metrics:
                total += size * metrics.pop("loss").double().cpu()
            targets = tuple(batch.get(name) for name in self._trainer.label_names)
            targets = targets[0] if len(targets) == 1 else targets
            labels.add(targets)
            for member, trainer in enumerate(self._trainers if metrics else ()):
                logits: Any = optree.tree_unflatten(self._structure, [leaf[member] for leaf in metrics.values()])
                if trainer.preprocess_logits_for_metrics is not None:
                    logits = trainer.preprocess_logits_for_metrics(logits, targets)
                outputs[member].add(logits)
        columns: dict[str, list[float]] = {f"{prefix}_loss": (total / rows).tolist()}
        for trainer, container in zip(self._trainers if self._trainer.compute_metrics else (), outputs, strict=False):
            given = prediction(predictions=container.get_arrays(), label_ids=labels.get_arrays())
            for name, value in trainer.compute_metrics(given).items():
                columns.setdefault(f"{prefix}_{name.removeprefix(f'{prefix}_')}", []).append(float(value))
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
