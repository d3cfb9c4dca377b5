"""The training loop."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hfta_func._torch import is_compilable, original
from hfta_func._tree import leaves
from hfta_func.errors import BatchError
from hfta_func.files import atomic, checkpoint
from hfta_func.files.atomic import PathLike
from hfta_func.optim._transforms import AccumulateState
from hfta_func.run.data import ArrayLoader
from hfta_func.run.evaluation import Evaluate, make_evaluation
from hfta_func.run.history import Callback, History, Metrics, Mode
from hfta_func.run.run import Best, Run
from hfta_func.run.trainer import END, Compact
from hfta_func.run.trainers import make_trainer
from hfta_func.step.indexed import IndexedStep
from hfta_func.step.state import TrainState, refuse_shared
from hfta_func.workers.pool import Executor


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
    evaluate: Evaluate | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    resume: PathLike | None = None,
    save_every: int | None = None,
    compile: bool = False,
    workers: int | Literal["auto"] | None = None,
    executor: Executor | None = None,
    restore_best: str | tuple[str, Mode] | None = None,
    compact: bool = False,
    sums: Collection[str] = (),
) -> Result:
    """Train an array for a number of epochs, or until no member is active.

    Ctrl-C ends training after the current step and sets ``history.interrupted``; a second Ctrl-C interrupts at once.

    Args:
        step: A training step, compiled or not.
        state: The initial state; it is not written unless the step was made with ``donate=True``.
        loader: An iterable over the batches of one epoch, such as an :class:`ArrayLoader` or a stream without a length. Its
            samplers are told the epoch by ``set_epoch``, if they have that. With
            ``rows`` of unequal number, an epoch of a member is its own, as alone: from its last batch to the end of the
            array's epoch it rests, and stays as it is.
        epochs: Number of epochs.
        evaluate: A pair ``(metric, data)``, for metrics after each epoch: ``metric(model, batch)`` of ONE model as in
            :func:`make_eval_step`, or a step made by it, and data that all members share: one batch as a tree of tensors, or
            an iterable over batches, of which means are weighted by their rows. These are the ``num_graphs`` of a batch of
            graphs, or the length of its tensors, and where tensors differ in length, what the metric returns as ``"rows"``,
            which is then no metric. An :class:`ArrayLoader` has each member's
            own data; of its ``rows`` a member sees each once, as alone. ``(metric, data, rows)`` is short for one with these
            rows in one batch. Or a function of the state, ``evaluate(state) -> metrics``.
        callbacks: Called after each epoch with ``(state, history)``, where ``len(history)`` is the epoch and
            ``history.epochs[-1]`` its metrics. A state that a callback returns replaces the current one; it may have fewer
            members or more, by :func:`take` and :func:`concat`, which an :class:`ArrayLoader` and the history follow; in
            states made in other ways, seeds tell the members. ``history.interrupted = True`` in a callback ends the run.
        progress: Show a progress bar with mean and standard deviation of each metric over the members.
        resume: A file for state, history and position, written after each epoch and on Ctrl-C; :func:`load` reads its
            state. If it exists, training continues from it with the same bits as without interruption, and ``state`` only
            gives structure and device. A loader continues by its ``state_dict`` and ``load_state_dict``, or, without
            these, from the states that its own generators, as of a shuffling ``DataLoader``, and those of PyTorch, Python and
            NumPy had at the start of the epoch, by skipping the batches already seen. What would keep the file from being
            written is found before the first step; ``<name>.hfta-lock`` beside it keeps other runs out until this one ends,
            even if killed.
        save_every: Also write the file after every ``save_every`` steps of an epoch.
        compile: Let another process compile the step while it trains, see :func:`compile`.
        workers: Number of processes that train a part of the members each, with an equal share of the processors, or a GPU
            each. ``"auto"`` begins in this process, and in a long run tries one
            process for every processor, or GPU, and goes on with what is faster. Results are the same to rounding. Callbacks
            and ``evaluate`` run in this process. A process that dies is started again.
        executor: An :class:`Executor` that outlives the call, instead: a :class:`WorkerPool` or
            ``hfta_func.cluster.ray(...)``. Each worker trains a part of the members for a segment, an epoch or ``save_every``
            steps; Ctrl-C is heeded between segments, or after a step or a second by workers of this machine.
        restore_best: A metric, or a pair of one and ``"max"``: the returned state holds each member as of the epoch in which
            it was lowest, or highest. Who is active stays as it is.
        compact: Train the members that are active and do not rest as a smaller array, once these are three quarters or less;
            if the step is compiled, once they are half, a quarter and so on, so that few sizes are compiled. The step's
            metrics of inactive ones are NaN; callbacks, ``evaluate`` and the returned state have all members.
        sums: Metrics of ``step`` and ``evaluate`` that are summed over the batches of an epoch, such as counts, or a loss
            with ``reduction="sum"``; integers as such. All others are means.

    Returns:
        The last state, and the history: the step's metrics, averaged over each epoch, and the metrics of ``evaluate``.

    Raises:
        BatchError: if the loader is no iterable over batches, such as data itself, or a batch does not fit the array.
        ValueError: if the loader has no batch, ``evaluate`` returns a metric that the step reports too, ``save_every`` is
            given without ``resume`` or is less than 1.
        CheckpointError: if ``resume`` is damaged, does not hold a run, cannot be written, or another run is using it.
        TypeError: if JSON and tensors cannot hold the loader's ``state_dict``.
        StateError: if ``resume`` holds a run of another model, optimizer or seeds, or members that share trained parameters
            are to be taken apart by ``restore_best``, ``workers`` or ``executor``.
        WorkerError: if the process of some members dies three times in a row, or cannot be started.

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
    epochs, callbacks = operator.index(epochs), [*callbacks]
    if save_every is not None and (resume is None or save_every < 1):
        raise ValueError(f"save_every is {save_every} and resume is {resume}; pass at least 1, and a file to save to")
    for option, given in {"restore_best": restore_best, "workers": workers, "executor": executor}.items():
        if given is not None:
            refuse_shared(state, option)
    check_loader(loader, step, state, compact or executor is not None or workers not in (None, 1))
    begun, resume = time.perf_counter(), os.path.abspath(resume) if isinstance(resume, str | os.PathLike) else resume
    with contextlib.ExitStack() as stack:
        # Ctrl-C waits from the first moment to the last, until there is a result to return.
        pressed = stack.enter_context(ctrl_c())
        best = None if restore_best is None else Best(restore_best)
        run = Run(state, loader, best, make_evaluation(step, evaluate, state, sums), sums)
        # A stream has no length, also behind a DataLoader, whose len() raises a TypeError then.
        length = operator.length_hint(loader)

        def save() -> None:
            if resume is not None:
                checkpoint.write(resume, run.state, run.state_dict())

        if resume is not None:
            stack.enter_context(atomic.holding(resume))
            if os.path.exists(resume):
                run.load(resume)
            # What no file can hold is refused before the first step, when a loader knows its position.
            run.begin = functools.cache(lambda: checkpoint.check(run.state, run.state_dict()))
        total, done = epochs * length or None, len(run.history) * length + run.running.batches
        bar = tqdm(total=total, initial=done, disable=not progress, unit="step", dynamic_ncols=True)
        stack.enter_context(bar)
        trainer = make_trainer(step, run, workers, compile, total, executor)
        stack.callback(trainer.close)
        segment = Compact(trainer, step, compile).segment if compact else trainer.segment

        def tick() -> bool:
            bar.update()
            return pressed()

        while len(run.history) < epochs and not (pressed() or run.history.interrupted) and bool(run.state.active.any()):
            bar.set_description(f"epoch {len(run.history) + 1}/{epochs}")
            run.begin_epoch(step)
            ended = False
            while not ended and not pressed():
                until = END if save_every is None else (run.running.batches // save_every + 1) * save_every
                ended = segment(run, until, tick)
                if not ended and not pressed():
                    save()
            if ended:
                bar.set_postfix_str(f"{trainer.status.partition(':')[0]}, {_summary(run.end_epoch())}")
                # Members that are left may need fewer batches than the loader has.
                bar.update(len(run.history) * length - bar.n if length else 0)
                run.history.seconds = time.perf_counter() - begun
                for callback in callbacks:
                    run.follow(callback)
            save()
    run.history.interrupted, run.history.status = run.history.interrupted or pressed(), trainer.status
    run.history.seconds = time.perf_counter() - begun
    run.history.verified = [*getattr(getattr(original(step), "oracle", None), "verified", ())]
    return Result(run.state if best is None else best.restored(run.state), run.history)


@contextlib.contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed, instead of interrupting; pressed again, it interrupts."""
    pressed = threading.Event()

    def note(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pressed.set()

    with contextlib.ExitStack() as stack:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, note)
            stack.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        yield pressed.is_set


def _summary(metrics: Metrics) -> str:
    """Mean and standard deviation over the members, and the number of members that failed."""
    failed = int((metrics["finite"] < 1).sum()) if "finite" in metrics else 0
    shown = [f"{failed} not finite"] if failed else []
    for name, value in metrics.items():
        if value.dim() == 1 and name != "finite":
            # Members that a smaller array left out have none; counts are integers, which have no mean.
            value = value.float()
            mean = value.nanmean()
            shown.append(f"{name} {mean:.4f} ± {(value - mean).square().nanmean().sqrt():.4f}")
    return ", ".join(shown)


def check_loader(loader: Any, step: Any, state: Any, is_divided: bool = False) -> None:
    """Raise a BatchError if the loader deals batches to members that share one, or rows of one batch to members."""
    count = len(getattr(state, "keys", ()))
    _warn_of_epochs(getattr(state, "opt_state", ()), operator.length_hint(loader))
    is_known = hasattr(inspect.unwrap(step), "batch_dims") or (isinstance(loader, ArrayLoader) and not loader.shared)
    divided = "workers and compact=True train parts of the members"
    if is_divided and not is_known:
        cure = "set its attribute: function.batch_dims = step.batch_dims"
        raise BatchError(f"{divided}, and a function around a step does not say whether these share a batch; {cure}")
    if is_divided and isinstance(original(step), IndexedStep):
        raise BatchError(f"{divided}, but by_index has one batch for all; leave them out")
    # A function of a user's own, also one with the names of a step that it wraps, may make one batch of them.
    dims = getattr(original(step), "batch_dims", 0) if is_compilable(step) else 0
    if isinstance(loader, ArrayLoader) and not loader.shared and dims is None:
        cure = "give the loader shared=True, or leave out batch_dims=None"
        raise BatchError(f"the loader has a batch for each member, but all members of the step share one; {cure}")
    if dims == 0 and isinstance(loader, DataLoader) and loader.batch_size == count > 1:
        text = f"the DataLoader has batches of {count} rows, as many as models, so that each would train on one row"
        raise BatchError(f"{text}; make the step with batch_dims=None to share batches, or pass a DatasetLoader")


def _warn_of_epochs(opt_state: Any, length: int) -> None:
    """Warn of schedules that step once in as many updates as an epoch has batches, where several batches are an update."""

    def is_table(node: Any) -> bool:
        return isinstance(node, Mapping) and "rows" in node

    for node in optree.tree_leaves(opt_state, lambda node: isinstance(node, AccumulateState)):
        inner = optree.tree_leaves(node.inner, is_table) if isinstance(node, AccumulateState) else []
        count = max(leaves(node.hyperparams)[0].tolist()) if inner else 1
        if count > 1 and any(is_table(table) and bool((table["every"] == length).any()) for table in inner):
            warnings.warn(
                f"schedulers step every {length} updates, as many as an epoch has batches, but an update is of {count:g} "
                f"batches here; to step once an epoch, pass from_torch every=len(loader) // {count:g}",
                stacklevel=4,
            )
