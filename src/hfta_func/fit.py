"""The training loop.

Public: :func:`fit`, :class:`Result`, :class:`History`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hfta_func.train import TrainState

if TYPE_CHECKING:
    import pandas

Metrics = dict[str, Tensor]
Callback = Callable[[int, TrainState, Metrics], "TrainState | None"]


class History:
    """Metrics of every member after every epoch."""

    def __init__(self, seeds: Tensor):
        self.seeds = seeds.cpu()
        self.epochs: list[Metrics] = []

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, name: str) -> Tensor:
        """One metric over all epochs: ``[epochs, M]``."""
        return torch.stack([metrics[name] for metrics in self.epochs])

    def frame(self, **columns: Sequence[Any] | Tensor) -> pandas.DataFrame:
        """A pandas frame with one row per member and epoch.

        Args:
            columns: Further columns by name, one value per member, such as ``lr=[...]``.

        Returns:
            Columns ``member``, ``seed``, those given, ``epoch``, and one per metric that is one number per member.
        """
        import pandas

        count = len(self.seeds)
        given = {
            name: values.tolist() if isinstance(values, Tensor) else list(values) for name, values in columns.items()
        }
        for name, values in given.items():
            if len(values) != count:
                raise ValueError(f"column {name} has {len(values)} values but the array has {count} models")
        frames = [
            pandas.DataFrame(
                {"member": range(count), "seed": self.seeds.tolist(), **given, "epoch": epoch}
                | {name: values.tolist() for name, values in metrics.items() if values.dim() == 1}
            )
            for epoch, metrics in enumerate(self.epochs, start=1)
        ]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()


class Result(NamedTuple):
    """The last state, and the metrics of all epochs."""

    state: TrainState
    history: History


def fit(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    loader: Iterable[Any],
    *,
    epochs: int,
    evaluate: Callable[[TrainState], Metrics] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> Result:
    """Train an array for some epochs.

    Args:
        step: A training step, compiled or not.
        state: Where to start; it is not written.
        loader: An iterable of batches, gone through once per epoch, such as an :class:`ArrayLoader`.
        epochs: How often.
        evaluate: ``evaluate(state) -> metrics`` after each epoch, for example ``lambda state: eval_step(state, test)``.
        callbacks: Each is called after every epoch with ``(epoch, state, metrics)``, epochs counted from 1; a callback
            that returns a state replaces the current one.
        progress: Show a bar with the mean and standard deviation of each metric over members.

    Returns:
        The last state, and the history: means of the step's metrics over the epoch, and the metrics of ``evaluate``.

    Example:
        >>> factory = lambda: torch.nn.Linear(4, 1)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> step = make_train_step(factory(), loss_fn, sgd(lr=0.1))
        >>> state = step.init(*init_params(factory, seeds=[0, 1, 2]), seeds=[0, 1, 2])
        >>> loader = ArrayLoader((torch.randn(32, 4), torch.randn(32, 1)), 8, seeds=[0, 1, 2])
        >>> state, history = fit(step, state, loader, epochs=2, progress=False)
        >>> history["loss"].shape
        torch.Size([2, 3])
    """
    history = History(state.keys)
    with _bar(epochs, loader, progress) as bar:
        for epoch in range(1, epochs + 1):
            bar.set_description(f"epoch {epoch}/{epochs}")
            sums: Metrics = {}
            batches = 0
            for batch in loader:
                state, metrics = step(state, batch)
                batches += 1
                for name, value in metrics.items():
                    value = value if value.is_floating_point() else value.float()
                    sums[name] = sums[name] + value if name in sums else value
                _execute(state.keys.device)
                bar.update()
            if batches == 0:
                raise ValueError("the loader gave no batch; pass an iterable that can be gone through once per epoch")
            metrics = {name: value / batches for name, value in sums.items()}
            if evaluate is not None:
                metrics |= evaluate(state)
            metrics = {name: value.detach().cpu() for name, value in metrics.items()}
            history.epochs.append(metrics)
            bar.set_postfix_str(_spread(metrics))
            for callback in callbacks:
                state = callback(epoch, state, metrics) or state
    return Result(state, history)


def _execute(device: torch.device) -> None:
    """Have a device that only records operations run them, or the steps of an epoch would become one long program."""
    if device.type == "xla":
        importlib.import_module("torch_xla").sync()


def _bar(epochs: int, loader: Any, progress: bool) -> tqdm[Any]:
    total = epochs * len(loader) if hasattr(loader, "__len__") else None
    return tqdm(total=total, disable=not progress, unit="step", dynamic_ncols=True)


def _spread(metrics: Metrics) -> str:
    """Mean and standard deviation over members."""

    def shown() -> Iterator[str]:
        for name, value in metrics.items():
            if name == "finite":
                stopped = int((value < 1).sum())
                if stopped:
                    yield f"{stopped} not finite"
            elif value.dim() == 1:
                yield f"{name} {value.mean():.4f} ± {value.std(correction=0):.4f}"

    return ", ".join(shown())
