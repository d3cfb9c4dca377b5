"""The training loop."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from tqdm.auto import tqdm

from hfta_func._types import CheckpointError, StateError
from hfta_func.files import atomic, checkpoint
from hfta_func.files.atomic import PathLike
from hfta_func.run.data import ArrayLoader
from hfta_func.run.history import Callback, History, Metrics, Running
from hfta_func.run.members import Best, Compact, Mode
from hfta_func.run.trainer import SegmentHooks
from hfta_func.run.trainers import make_trainer
from hfta_func.step.state import TrainState, refuse_shared
from hfta_func.workers.executor import Executor


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
    compile: bool = False,
    workers: int | Literal["auto"] | None = None,
    executor: Executor | None = None,
    restore_best: str | tuple[str, Mode] | None = None,
    compact: bool = False,
) -> Result:
    """Train an array for a number of epochs, or until no member is active.

    Ctrl-C ends training after the current step and sets ``history.interrupted``; a second Ctrl-C interrupts at once.

    Args:
        step: A training step, compiled or not.
        state: The initial state; it is not written unless the step was made with ``donate=True``.
        loader: An iterable over the batches of one epoch, such as an :class:`ArrayLoader`.
        epochs: Number of epochs.
        evaluate: ``evaluate(state) -> metrics``, called after each epoch: ``lambda state: eval_step(state, test)``.
        callbacks: Called after each epoch with ``(state, history)``, where ``len(history)`` is the epoch and
            ``history.epochs[-1]`` its metrics. A state that a callback returns replaces the current one; it may have fewer
            members or more, by :func:`take` and :func:`concat`, which an :class:`ArrayLoader` and the history follow by
            the members' seeds.
        progress: Show a progress bar with mean and standard deviation of each metric over the members.
        resume: A file for state, history and position, written after each epoch and on Ctrl-C; :func:`load` reads its
            state. If it exists, training continues from it with the same bits as without interruption, and ``state`` only
            gives structure and device. A loader continues by its ``state_dict`` and ``load_state_dict``, or, without
            these, by skipping the batches already seen. What would keep the file from being written is found before the
            first step; ``<name>.hfta-lock`` beside it keeps other runs out until this one ends, even if killed.
        save_every: Also write the file after every ``save_every`` steps of an epoch.
        compile: Let another process compile the step while it trains, see :func:`compile`.
        workers: Number of processes that train a part of the members each, with an equal share of the processors, or a GPU
            each. ``"auto"`` takes one for every processor if that is faster than this process alone, which it tries.
            Results are the same to rounding. Callbacks and ``evaluate`` run in this process. A process that dies is started
            again.
        executor: Workers that outlive the call, instead: a :class:`WorkerPool` or ``hfta_func.cluster.ray(...)``. Each trains
            a part of the members for a segment, an epoch or ``save_every`` steps; Ctrl-C is heeded between segments.
        restore_best: A metric, or a pair of one and ``"max"``: the returned state holds each member as of the epoch in which
            it was lowest, or highest. Who is active stays as it is.
        compact: Train the active members only, as a smaller array, once a quarter of them or more is inactive. The step's
            metrics of the others are NaN; callbacks, ``evaluate`` and the returned state have all members.

    Returns:
        The last state, and the history: the step's metrics, averaged over each epoch, and the metrics of ``evaluate``.

    Raises:
        ValueError: if the loader has no batch, ``epochs`` is no number of epochs, ``evaluate`` returns no metrics or one
            that the step reports too, or ``save_every`` is given without ``resume`` or is less than 1.
        CheckpointError: if ``resume`` is damaged, does not hold a run, cannot be written, or another run is using it.
        TypeError: if JSON and tensors cannot hold the loader's ``state_dict``.
        StateError: if ``resume`` holds a run of another model, optimizer or seeds, or members that share trained parameters
            are to be taken apart by ``restore_best``, ``workers`` or ``executor``.
        WorkerError: if the process of some members dies three times in a row.

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
        raise ValueError(f"save_every is {save_every} and resume is {resume}; pass at least 1, and a file to save to")
    if not isinstance(epochs, int) or epochs < 0:
        raise ValueError(f"epochs is {epochs!r}; it must be an integer, at least 0")
    if callable(callbacks):
        raise ValueError("callbacks is a single function; pass a list of them, [callback]")
    _check_state(state)
    for option, given in {"restore_best": restore_best, "workers": workers, "executor": executor}.items():
        if given is not None:
            refuse_shared(state, option)
    best = None if restore_best is None else Best(restore_best)
    history, running = History(state.keys), Running()
    # What it has besides iteration is optional.
    source: Any = loader
    batches = loader

    def run() -> dict[str, Any]:
        position = source.state_dict() if _has_position(source) else None
        held = {"history": history.state_dict(), "running": running.state_dict(), "loader": position}
        return {"run": held if best is None else {**held, "best": best.state_dict()}}

    def save() -> None:
        if resume is not None:
            checkpoint.write(resume, state, run())

    length = len(source) if hasattr(source, "__len__") else 0
    unchecked = resume is not None
    with contextlib.ExitStack() as stack:
        if resume is not None:
            stack.enter_context(atomic.holding(resume))
            if os.path.exists(resume):
                state, batches, source = _resume(resume, state, history, running, loader, best)
        bar = tqdm(
            total=epochs * length or None,
            initial=len(history) * length + running.batches,
            disable=not progress,
            unit="step",
            dynamic_ncols=True,
        )
        pressed, bar = stack.enter_context(ctrl_c()), stack.enter_context(bar)
        steps, members = epochs * length or None, len(history.seeds)
        trainer = make_trainer(step, state, batches, source, workers, compile, steps, executor, members)
        stack.callback(trainer.close)
        trainer = Compact(trainer) if compact else trainer

        def begin() -> None:
            nonlocal unchecked
            if unchecked:
                # What no file can hold is refused now and not after an epoch; loaders may only know their position here.
                checkpoint.check(state, run())
                unchecked = False

        while len(history) < epochs and not pressed() and bool(state.active.any()):
            bar.set_description(f"epoch {len(history) + 1}/{epochs}")
            ended = False
            while not ended and not pressed():
                limit = None if save_every is None else save_every - running.batches % save_every
                state, ended = trainer.segment(state, running, limit, SegmentHooks(begin, bar.update, pressed))
                if not ended and not pressed():
                    save()
            if ended:
                if running.batches == 0:
                    raise ValueError(
                        "the loader has no batch; pass an iterable that yields its batches in every epoch, and no larger "
                        "batch_size than there are rows if it has drop_last"
                    )
                metrics = running.close(history, evaluate(state) if evaluate is not None else {})
                running = Running()
                bar.set_postfix_str(_summary(metrics))
                if best is not None:
                    best.note(state, history)
                for callback in callbacks:
                    changed = callback(state, history)
                    if changed is not None:
                        _check_state(changed)
                        state, places = changed, history.follow(changed.keys)
                        if places is not None:
                            source = _follow(source, places, state, history)
                            trainer.follow(source)
                            if best is not None:
                                best.follow(places, state)
            save()
        history.interrupted = pressed()
    return Result(state if best is None else best.restored(state), history)


def _follow(loader: Any, places: list[int], state: TrainState, history: History) -> Any:
    """The loader of the members that the array has now."""
    if not isinstance(loader, ArrayLoader):
        return loader
    since = history.since[history.members].tolist()
    return loader.follow(places, state.keys, [loader.epoch - len(history) + epoch for epoch in since])


def _check_state(state: Any) -> None:
    # Steps with more than one model, such as a GAN's, have states of their own.
    if not all(hasattr(state, name) for name in ("keys", "step", "active")):
        raise StateError(
            f"expected a TrainState, or another state with keys, step and active, but got {type(state).__qualname__}; make "
            f"one with step.init(...)"
        )


def _resume(
    path: PathLike, like: TrainState, history: History, running: Running, loader: Any, best: Best | None
) -> tuple[TrainState, Iterable[Any], Any]:
    """Read the state, and fill the history and the running means; also returns the batches left in the epoch, and all."""
    state, metadata = checkpoint.read(path, like)
    if not isinstance(metadata, dict) or "run" not in metadata:
        raise CheckpointError(
            f"{path} holds a state but no run; start from it with fit(step, load(path, like=state), ...) and pass another "
            f"path as resume"
        )
    try:
        held = metadata["run"]
        count = len(like.keys)
        began = held["history"].get("seeds", state.keys)[:count].tolist()
        if began != like.keys.tolist():
            raise StateError(
                f"{path} holds a run with seeds {began} but the state has {like.keys.tolist()}; use a file of its own for "
                f"every run, or remove this one to start again"
            )
        history.load_state_dict(held["history"])
        running.load_state_dict(held["running"], like.keys.device)
        if operator.index(running.batches) < 0:
            raise ValueError(f"{running.batches} batches")
        if best is not None:
            best.load_state_dict(held["best"], state)
        if held["loader"] is not None and _has_position(loader):
            loader.load_state_dict(held["loader"])
            places = [number if number < count else -1 for number in history.members.tolist()]
            if places != [*range(count)]:
                loader = _follow(loader, places, state, history)
            return state, loader, loader
    except (StateError, CheckpointError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds a run that cannot be read ({type(error).__name__}: {error}); load another copy of it"
        ) from error
    return state, itertools.islice(loader, running.batches, None), loader


def _has_position(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


@contextlib.contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed, instead of interrupting; pressed again, it interrupts."""
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


def _summary(metrics: Metrics) -> str:
    """Mean and standard deviation over the members, and the number of members that failed."""
    shown = []
    for name, value in metrics.items():
        if name == "finite":
            failed = int((value < 1).sum())
            shown += [f"{failed} not finite"] if failed else []
        elif value.dim() == 1:
            # Members that a smaller array left out have none.
            value = value[~value.isnan()] if value.isnan().any() and not value.isnan().all() else value
            shown.append(f"{name} {value.mean():.4f} ± {value.std(correction=0):.4f}")
    return ", ".join(shown)
