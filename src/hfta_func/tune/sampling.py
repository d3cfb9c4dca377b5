"""Optuna in a study: samplers, and storages that show the study to other programs."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfta_func._types import require

if TYPE_CHECKING:
    import optuna

Space = Mapping[str, Any] | Callable[["optuna.Trial"], Any]
"""Optuna's distributions by name, or a function that suggests the values of a trial."""
Event = list[Any]
"""``["enqueue", params]``, ``["ask", params]``, ``["report", trial, epoch, values]``, ``["change", trial, params]`` or
``["tell", trial, status, values]``."""


class SamplerSession:
    """Asks a sampler for trials and tells it their results; records these events, so that they can be replayed.

    The sampler works on a study of Optuna's in memory. To resume a study, all events are replayed, which brings the sampler
    to the same random state.
    """

    def __init__(self, space: Space, directions: Sequence[str], sampler: optuna.samplers.BaseSampler | None, seed: int):
        module = require("optuna", "tune")
        self._suggest = space if callable(space) else None
        # Those of a function are known once a trial has them.
        self.space: dict[str, Any] = {} if callable(space) else dict(space)
        for name, distribution in self.space.items():
            if not isinstance(distribution, module.distributions.BaseDistribution):
                raise ValueError(
                    f"space['{name}'] is a {type(distribution).__qualname__}; pass one of optuna.distributions, such as "
                    f"FloatDistribution(1e-4, 1.0, log=True)"
                )
        samplers = module.samplers
        # NumPy's seeds are not negative and have 32 bits.
        sampler = sampler or samplers.RandomSampler(seed=seed % 2**32)
        if not isinstance(sampler, samplers.BaseSampler):
            raise ValueError(f"sampler is {sampler!r}; pass one of optuna.samplers, such as TPESampler(seed=0)")
        fixed = samplers.RandomSampler, samplers.GridSampler, samplers.QMCSampler, samplers.BruteForceSampler
        self.learns = not isinstance(sampler, fixed)
        if isinstance(sampler, samplers.QMCSampler) and self.space:
            # Otherwise it draws at random until the first trial completes, whose space it takes.
            categorical = module.distributions.CategoricalDistribution
            numerical = {name: kind for name, kind in self.space.items() if not isinstance(kind, categorical)}
            restricted: Any = copy.copy(sampler)
            restricted.infer_relative_search_space = lambda study, trial: numerical
            sampler = restricted
        with _quiet():
            self.study: optuna.Study = module.create_study(sampler=sampler, directions=list(directions))
        self.events: list[Event] = []
        self._trials: list[Any] = []
        self._enqueued = 0
        self.is_exhausted = False
        """Whether the sampler has gone through all of its configurations."""

    def json(self, name: str) -> str:
        """A distribution as JSON."""
        return require("optuna", "tune").distributions.distribution_to_json(self.space[name])

    def ask(self) -> dict[str, Any]:
        """The parameters of the next trial; raises a ValueError if it lacks a name that was enqueued for it."""
        waiting = self.study.get_trials(deepcopy=False, states=(_state("waiting"),))
        for other in waiting:
            if other.number >= self._enqueued:
                self.events.append(["enqueue", other.system_attrs["fixed_params"]])
                self._enqueued = other.number + 1
        trial = self.study.ask(None if self._suggest else self.space)
        if self._suggest:
            if isinstance(returned := self._suggest(trial), Mapping):
                raise ValueError(
                    f"the space returned {returned!r}; suggest values by the trial, and set constants in build"
                )
            self.space |= trial.distributions
            for name in waiting[0].system_attrs["fixed_params"].keys() - trial.params if waiting else ():
                raise ValueError(f"enqueue names {name!r}, but this trial has {', '.join(trial.params)}")
        self._trials.append(trial)
        params = {name: trial.params[name] for name in self.space if name in trial.params}
        self.events.append(["ask", params])
        return params

    def report(self, trial: int, epoch: int, values: Sequence[float]) -> None:
        """A trial's values after an epoch."""
        if len(values) == 1:
            self._trials[trial].report(values[0], epoch)
        self.events.append(["report", trial, epoch, list(values)])

    def change(self, trial: int, params: Mapping[str, Any]) -> None:
        """A trial goes on with other parameters; Optuna keeps those asked for as the trial's own."""
        self._trials[trial].set_user_attr("params", dict(params))
        self.events.append(["change", trial, dict(params)])

    def tell(self, trial: int, status: str, values: Sequence[float] | None) -> None:
        """A trial has ended."""
        final = list(values) if status == "complete" and values is not None else None
        # A sampler that has run through its grid stops the loop of Study.optimize, which raises where there is none.
        try:
            with _quiet():
                self.study.tell(trial, final, _state(status))
        except RuntimeError:
            self.is_exhausted = True
        self.events.append(["tell", trial, status, None if values is None else list(values)])

    def is_feasible(self, trial: int) -> bool:
        """Whether a trial that has ended fulfils the constraints of the sampler, if it has any."""
        held = self.constraints(trial).values()
        return all(value <= 0 for values in held for value in (values if isinstance(values, Sequence) else [values]))

    def constraints(self, trial: int) -> dict[str, Any]:
        """What Optuna notes of the constraints of a trial that has ended: all of them, or each under a name of its own."""
        attributes = self.study.get_trials(deepcopy=False)[trial].system_attrs
        return {name: value for name, value in attributes.items() if name.partition(":")[0] == "constraints"}

    def replay(self, events: Sequence[Event]) -> None:
        """Repeat the events of a session; raises a ValueError if the sampler now gives other parameters."""
        for kind, *arguments in events:
            if kind != "ask":
                (self.study.enqueue_trial if kind == "enqueue" else getattr(self, kind))(*arguments)
            elif (params := self.ask()) != arguments[0]:
                raise ValueError(
                    f"the sampler gives trial {len(self._trials) - 1} {params}, but it was {arguments[0]}; go on with "
                    f"the same sampler and seed"
                )


def configurations(
    sampler: optuna.samplers.BaseSampler | None, space: Space, enqueue: Sequence[Mapping[str, Any]], most: int
) -> int | None:
    """The number of trials after which a sampler would repeat itself; None for any number, or more than ``most``."""
    samplers = require("optuna", "tune").samplers
    if isinstance(sampler, samplers.GridSampler):
        return sampler._n_min_trials + len(enqueue)  # pyright: ignore
    if not isinstance(sampler, samplers.BruteForceSampler):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = SamplerSession(space, ["minimize"], samplers.BruteForceSampler(seed=0), 0)
        for params in enqueue:
            session.study.enqueue_trial(dict(params))
        for count in range(most):
            if session.is_exhausted:
                return count
            session.ask()
            session.tell(count, "complete", [0.0])
    return None


def named(study: optuna.Study, metrics: Sequence[str]) -> None:
    """Name the objectives of Optuna's study, for its plots and dashboard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", require("optuna", "tune").exceptions.ExperimentalWarning)
        study.set_metric_names(list(metrics))


class Mirror:
    """A copy of the study in one of Optuna's storages, which shows it to other programs; each event is written once."""

    def __init__(
        self, session: SamplerSession, storage: Any, name: str | None, metrics: Sequence[str], about: Mapping[str, Any]
    ):
        self._module = require("optuna", "tune")
        self._session = session
        if name is None:
            raise ValueError("a storage keeps studies by name; pass name='...'")
        settings = json.dumps(about, sort_keys=True)
        with _storing(storage), _quiet():
            self.study: optuna.Study = self._module.create_study(
                storage=storage,
                sampler=self._module.samplers.RandomSampler(),
                study_name=name,
                directions=session.study.directions,
                load_if_exists=True,
            )
            before = self.study.user_attrs.get("hfta_func", settings)
            trials = self.study.get_trials(deepcopy=False)
        if before != settings or (trials and "hfta_func" not in self.study.user_attrs):
            raise ValueError(
                f"the storage has another study '{name}'{_difference(before, settings)}; pass another name, or the same "
                f"arguments"
            )
        with _storing(storage):
            self.study.set_user_attr("hfta_func", settings)
            named(self.study, metrics)
        self._storage = storage
        self._shown: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._reported: dict[int, set[int]] = {}
        self._is_known = False

    def _read(self) -> None:
        """Read the trials of the storage."""
        self._shown = {trial.user_attrs["trial"]: trial for trial in self.study.get_trials(deepcopy=False)}
        self._ended = {number for number, trial in self._shown.items() if trial.state.is_finished()}
        self._reported = {number: set(trial.intermediate_values) for number, trial in self._shown.items()}

    def show(self, trials: Sequence[Any], reports_of: Callable[[Any], Mapping[int, float]]) -> None:
        """Add new trials, the values of those that train, and the results of those that have ended."""
        with _storing(self._storage), _quiet():
            if not self._is_known:
                self._read()
            asked = self._session.study.get_trials(deepcopy=False)
            for trial in trials:
                shown = self._shown.get(trial.number)
                if shown is not None and shown.params != asked[trial.number].params:
                    raise ValueError(
                        f"the storage has another study '{self.study.study_name}', whose trial {trial.number} is "
                        f"{shown.params} and not {asked[trial.number].params}; pass another name, or the same sampler "
                        f"and seed"
                    )
            # Until the end, because Ctrl-C may break off what follows.
            self._is_known = False
            new = [trial for trial in trials if trial.number not in self._shown]
            for trial in new:
                # Added as a whole, so that no other process ever sees a part of it.
                about = {"distributions": asked[trial.number].distributions, "user_attrs": {"trial": trial.number}}
                self.study.add_trial(
                    self._module.trial.create_trial(state=_state("running"), params=trial.params, **about)
                )
            if new:
                self._read()
            for trial in trials:
                frozen = self._shown[trial.number]
                if trial.number in self._ended:
                    continue
                reported = self._reported[trial.number]
                reports = {epoch: value for epoch, value in reports_of(trial).items() if epoch not in reported}
                if trial.status == "running" and not reports:
                    continue
                # The only way of Optuna to report values of a trial that was added and not asked for.
                stored = self._module.trial.Trial(self.study, frozen._trial_id)
                for epoch, value in reports.items():
                    stored.report(value, epoch)
                    reported.add(epoch)
                if trial.status == "running":
                    continue
                if trial.params != frozen.params:
                    stored.set_user_attr("params", trial.params)
                if trial.error is not None:
                    stored.set_user_attr("error", trial.error)
                for name, value in self._session.constraints(trial.number).items():
                    self.study._storage.set_trial_system_attr(frozen._trial_id, name, value)
                final = list(trial.values[-1]) if trial.status == "complete" else None
                self.study.tell(frozen.number, final, _state(trial.status))
                self._ended.add(trial.number)
            self._is_known = True


def _state(status: str) -> Any:
    """Optuna's name of the status of a trial."""
    names = {"waiting": "WAITING", "running": "RUNNING", "complete": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL"}
    return require("optuna", "tune").trial.TrialState[names[status]]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging = require("optuna", "tune").logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _storing(storage: Any) -> Iterator[None]:
    # Optuna requires SQLAlchemy, and passes on its errors about a URL.
    from sqlalchemy.exc import ArgumentError

    try:
        yield
    except (require("optuna", "tune").exceptions.StorageInternalError, ArgumentError) as error:
        label = storage if isinstance(storage, str) else type(storage).__qualname__
        # The other lines are statements of SQL.
        why = str(error.__cause__ or error).partition("\n")[0]
        raise RuntimeError(
            f"the storage {label} cannot be used ({why}); another process may have locked it, or it is not writable, or "
            f"no URL such as sqlite:///study.db"
        ) from error


def _difference(before: str, now: str) -> str:
    old, new = json.loads(before), json.loads(now)
    changed = [name for name in new if old.get(name) != new[name]]
    return f", whose {changed[0]} is {old.get(changed[0])} and not {new[changed[0]]}" if changed else ""
