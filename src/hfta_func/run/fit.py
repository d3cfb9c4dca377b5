"""The training loop.

Public: :func:`fit`, :class:`Result`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from hfta_func._errors import CheckpointError, StateError
from hfta_func.files import checkpoint
from hfta_func.files.storage import PathLike
from hfta_func.run.history import Callback, History, Metrics, Running
from hfta_func.step.state import TrainState


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
    resume: PathLike | None = None,
    save_every: int | None = None,
) -> Result:
    """Train an array for some epochs, or until no member is active.

    Ctrl-C ends it after the current step, and ``history.interrupted`` tells; a second Ctrl-C interrupts at once.

    Args:
        step: A training step, compiled or not.
        state: Where to start; it is not written, unless the step was made with ``donate=True``.
        loader: An iterable of batches, gone through once per epoch, such as an :class:`ArrayLoader`.
        epochs: How often.
        evaluate: ``evaluate(state) -> metrics`` after each epoch, for example ``lambda state: eval_step(state, test)``.
        callbacks: Each is called after every epoch with ``(state, history)``, where ``len(history)`` is the epoch and
            ``history.epochs[-1]`` its metrics; a callback that returns a state replaces the current one.
        progress: Show a bar with the mean and standard deviation of each metric over members.
        resume: A file that holds the run: state, history, and position in the current epoch. It is written after every
            epoch and when Ctrl-C ends the run. If it is there already, training goes on from it, to the same bits as
            without a break; ``state`` then gives structure and device only. A loader with ``state_dict`` and
            ``load_state_dict`` goes on by these, another is gone through again without the batches already seen.
            :func:`load` reads the state in it.
        save_every: Write the file after so many steps of an epoch, too.

    Returns:
        The last state, and the history: means of the step's metrics over the epoch, and the metrics of ``evaluate``.

    Raises:
        CheckpointError: if ``resume`` is a damaged file or not one of a run.
        StateError: if ``resume`` holds a run of another model, optimizer or seeds.

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
    if save_every is not None and (resume is None or save_every < 1):
        raise ValueError(f"save_every is {save_every} and resume is {resume}; give at least 1, and a file to save to")
    history, running, batches = History(state.keys), Running(), loader
    if resume is not None and os.path.exists(resume):
        state, batches = _resume(resume, state, history, running, loader)

    def keep() -> None:
        if resume is not None:
            _keep(resume, state, history, running, loader)

    done = len(history), running.batches
    with _ctrl_c() as pressed, _bar(epochs, done, loader, progress) as bar:
        while len(history) < epochs and not pressed() and bool(state.active.any()):
            bar.set_description(f"epoch {len(history) + 1}/{epochs}")
            for batch in batches:
                # A copy, because a step that was given the state may write it.
                active = state.active.clone()
                state, metrics = step(state, batch)
                running.add(metrics, active, state.step)
                _execute(state.keys.device)
                bar.update()
                if pressed():
                    break
                if save_every is not None and running.batches % save_every == 0:
                    keep()
            else:
                if running.batches == 0:
                    raise ValueError(
                        "the loader gave no batch; pass an iterable that can be gone through once per epoch"
                    )
                metrics = running.close(history, evaluate(state) if evaluate is not None else {})
                running, batches = Running(), loader
                bar.set_postfix_str(_spread(metrics))
                for callback in callbacks:
                    state = callback(state, history) or state
            keep()
        history.interrupted = pressed()
    return Result(state, history)


def _keep(path: PathLike, state: TrainState, history: History, running: Running, loader: Any) -> None:
    position = loader.state_dict() if _tells_position(loader) else None
    run = {"history": history.state_dict(), "running": running.state_dict(), "loader": position}
    checkpoint.write(path, state, {"run": run})


def _resume(
    path: PathLike, like: TrainState, history: History, running: Running, loader: Any
) -> tuple[TrainState, Iterable[Any]]:
    """The state that the file holds, and the batches that are left of its epoch; the records are filled in place."""
    state, metadata = checkpoint.read(path, like)
    if "run" not in metadata:
        raise CheckpointError(
            f"{path} holds a state but no run; start from it with fit(step, load(path, like=state), ...) and give resume "
            f"another path"
        )
    if state.keys.tolist() != like.keys.tolist():
        raise StateError(
            f"{path} holds a run with seeds {state.keys.tolist()} but the state has {like.keys.tolist()}; give every run a "
            f"file of its own, or remove this one to start anew"
        )
    run = metadata["run"]
    history.load_state_dict(run["history"])
    running.load_state_dict(run["running"], like.keys.device)
    if run["loader"] is not None and _tells_position(loader):
        loader.load_state_dict(run["loader"])
        return state, loader
    return state, itertools.islice(loader, running.batches, None)


def _tells_position(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, where it would interrupt; pressed again, it does."""
    pressed = threading.Event()

    def note(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pressed.set()

    main = threading.current_thread() is threading.main_thread()
    if not (main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield pressed.is_set
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _execute(device: torch.device) -> None:
    """Have a device that only records operations run them, or the steps of an epoch would become one long program."""
    if device.type == "xla":
        importlib.import_module("torch_xla").sync()


def _bar(epochs: int, done: tuple[int, int], loader: Any, progress: bool) -> tqdm[Any]:
    """A bar over all steps, of which some epochs and some batches of the next one are done."""
    length = len(loader) if hasattr(loader, "__len__") else 0
    initial = done[0] * length + done[1]
    return tqdm(total=epochs * length or None, initial=initial, disable=not progress, unit="step", dynamic_ncols=True)


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
