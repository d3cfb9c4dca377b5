"""The entry point: ``run`` searches a space."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

import hfta_func as hfta
from hfta_func._types import Direction
from hfta_func.tune.array import Build
from hfta_func.tune.cohorts import Scheduler
from hfta_func.tune.folder import StudyFolder
from hfta_func.tune.groups import Size
from hfta_func.tune.options import StudyOptions
from hfta_func.tune.population import Population
from hfta_func.tune.sampling import SamplerSession, Space, configurations
from hfta_func.tune.search import Search
from hfta_func.tune.study import Study
from hfta_func.workers.pool import Executor

if TYPE_CHECKING:
    import optuna


def run(
    build: Build,
    space: Space,
    *,
    metric: str | Sequence[str],
    direction: Direction | Sequence[Direction] = "maximize",
    nonfusible: Sequence[str] = (),
    trials: int,
    epochs: int,
    scheduler: Scheduler | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    enqueue: Sequence[Mapping[str, Any]] = (),
    timeout: float | None = None,
    target: float | None = None,
    keep: int | Literal["best", "all"] = "best",
    batch: int | None = None,
    max_models: Size = "auto",
    seeds: int = 1,
    storage: Any = None,
    name: str | None = None,
    seed: int = 0,
    resume: Any = None,
    progress: bool = True,
    callbacks: Sequence[Callable[..., Any]] = (),
    workers: int | Literal["auto"] | None = None,
    executor: Executor | None = None,
) -> Study:
    """Search a space; trials with the same non-fusible values train as arrays, and stopped trials make room for new ones.

    Args:
        build: ``build(fixed, members) -> Array``, as for :class:`~hfta_func.tune.Population`.
        space: Optuna's distributions by name; or a function of a trial of Optuna's that suggests values, of which trials may
            have different ones. Members of an array have the same names.
        metric: The metric of the step or of ``evaluate`` that is compared; or several metrics, without a scheduler.
        direction: Whether large or small values are better, for each metric.
        nonfusible: Names whose values decide shapes or code, so that trials of one array must have equal ones.
        trials: Number of configurations, with those of earlier calls, at most as many as a grid has; 0 is the scheduler's
            default, which only Hyperband has.
        epochs: Epochs of a trial that is not stopped.
        scheduler: Decides which trials go on; by default all.
        sampler: Optuna's sampler, by default random search. One that learns from results gets each as soon as it is known.
        enqueue: Configurations to try next unless they have been tried; the sampler chooses the values that they lack.
        timeout: Seconds after which the study ends with the next epoch; the same call goes on.
        target: A value of the metric that is good enough: a trial that has it after an epoch is complete, and a new one takes
            its place. Schedulers see its last value at all later rungs, too.
        keep: Which complete trials keep their states: the ``"best"``, which is the front of several objectives, ``"all"``,
            or how many of the best.
        batch: Number of trials that the sampler is asked for at a time. By default all of a cohort, or, of a sampler that
            learns from results, as many as an array holds.
        max_models: The largest array; ``"auto"`` is the number that :func:`hfta_func.plan` recommends.
        seeds: Number of members of every trial, with the seeds ``seed``, ``seed + 1``, ...: the same for all trials, so that
            their differences are paired; trials are compared by the mean of their values, and ``std`` is their spread.
        storage: Optuna's storage or its URL, which holds the trials and shows them to other programs, such as Optuna's
            dashboard. The same call goes on with what is missing, also with more ``trials``; trials that had not ended
            train from their start, unless there is a folder, too.
        name: Name of the study in the storage.
        seed: The first seed of members, and the seed of random search.
        resume: The study's folder, with its storage, if ``storage`` names no other, and the members' states: the same call
            goes on where a broken-off one ended, with the same results to the bit.
        progress: Show a progress bar.
        callbacks: Called with the study after every array that has trained.
        workers: Number of processes that train an array each, with an equal share of the processors, or a GPU each;
            ``"auto"`` is one per processor or GPU. ``build`` is sent to them, and makes its arrays there. A process that dies
            is replaced, and its call is repeated.
        executor: An executor instead of ``workers``: a :class:`~hfta_func.workers.WorkerPool` or
            ``hfta_func.cluster.ray(...)``.

    Returns:
        The study. Ctrl-C ends it early, and sets ``interrupted``, as do ``timeout`` and a callback's ``study.optuna.stop()``.

    Raises:
        ImportError: if Optuna is not installed.
        ValueError: if the space is empty or has no fusible name, an argument has an invalid value, or a folder or storage
            holds another study.
        KeyError: if the metric is not reported.
        TypeError: if ``build`` cannot be sent to workers.
        WorkerError: if no worker is left.
        StateError: if ``build`` returns another number of members than it was asked for.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from optuna.distributions import FloatDistribution
        >>> import hfta_func as hfta
        >>> from hfta_func import tune
        >>> x = torch.randn(64, 4)
        >>> def build(fixed, members):
        ...     factory = lambda: nn.Linear(4, 1)
        ...     loss_fn = lambda model, batch: (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
        ...     seeds = members["seed"]
        ...     step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=members["lr"]))
        ...     state = step.init(*hfta.init_params(factory, seeds), seeds=seeds)
        ...     return tune.Array(step, state, hfta.ArrayLoader(x, 16, seeds=seeds), model=factory())
        >>> study = tune.run(
        ...     build, {"lr": FloatDistribution(1e-4, 1.0, log=True)}, metric="loss", direction="minimize", trials=9,
        ...     epochs=9, scheduler=tune.halving(eta=3), max_models=4, progress=False)
        >>> [trial.status for trial in study.trials].count("complete"), study.best.params["lr"] > 0.01
        (1, True)
        >>> study.export(study.best.number)
        Linear(in_features=4, out_features=1, bias=True)
    """
    searched = space, metric, direction, nonfusible, trials, epochs, scheduler or Scheduler()
    options = StudyOptions(*searched, batch, max_models, seeds, seed, keep, timeout, target)
    if workers is not None and executor is not None:
        raise ValueError("there are workers and an executor, which has its own; pass one of both")
    if storage is not None and name is None:
        raise ValueError("a storage keeps studies by name; pass name='...'")
    most = configurations(sampler, space, enqueue, sum(cohort.trials for cohort in options.cohorts((), None)[1]))
    with contextlib.ExitStack() as stack:
        if workers not in (None, 1):
            executor = stack.enter_context(hfta.workers.WorkerPool(workers))
        members = Population(build, nonfusible=nonfusible, max_models=max_models, seed=seed, executor=executor)
        stack.callback(members.jobs.stop)
        folder = None if resume is None else stack.enter_context(StudyFolder(resume).held())
        if folder is not None and storage is None:
            storage, name = folder.storage(), "study"
        session = SamplerSession(space, options.directions, sampler, seed, storage, name)
        session.identify(options.about(), options.metrics)
        study = Study(members, session, options)
        if folder is not None and (index := folder.restore(members)) is not None:
            study.trajectory = [(seconds, number, value) for seconds, number, value in index.get("trajectory", ())]

        def save() -> None:
            if folder is not None:
                folder.save(members, trajectory=study.trajectory)

        search = Search(study, options, most, save)
        for params in enqueue:
            session.enqueue(params)
        bar = stack.enter_context(tqdm(total=search.total, disable=not progress, unit="trial", dynamic_ncols=True))
        try:
            for has_trained in search.rounds():
                bar.update(len(study.trials) - study.counts["running"] - bar.n)
                for callback in callbacks if has_trained else ():
                    callback(study)
            save()
        except KeyboardInterrupt:
            # Between arrays; while an array trains, Ctrl-C waits for the end of its step.
            members.interrupted = True
        members.interrupted |= session.is_stopped or study.counts["running"] > 0
    if not study.interrupted and study.trials and all(trial.status == "failed" for trial in study.trials):
        raise RuntimeError(f"every trial failed, the first one with {study.trials[0].error}")
    return study
