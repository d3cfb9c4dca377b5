"""Optuna in a study: its storage holds the trials, and its sampler is asked for new ones."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfta_func._types import require

if TYPE_CHECKING:
    import optuna

Space = Mapping[str, Any] | Callable[["optuna.Trial"], Any]
"""Optuna's distributions by name, or a function that suggests the values of a trial."""


class SamplerSession:
    """A study of Optuna's, in memory or in a storage, that is asked for trials and told their results.

    What a sampler draws for a trial follows from the sampler's first draw, the trial's number and the parameter's name, so a
    study that goes on from its storage draws as one that was never broken off.
    """

    def __init__(
        self, space: Space, directions: Sequence[str], sampler: Any, seed: int, storage: Any = None, name: Any = None
    ):
        self._optuna = module = require("optuna", "tune")
        self._suggest = space if callable(space) else None
        # Those of a function are known once a trial has them.
        self.space: dict[str, Any] = {} if callable(space) else dict(space)
        samplers = module.samplers
        # NumPy's seeds are not negative and have 32 bits.
        sampler = sampler or samplers.RandomSampler(seed=seed % 2**32)
        fixed = samplers.RandomSampler, samplers.GridSampler, samplers.QMCSampler, samplers.BruteForceSampler
        self.learns = not isinstance(sampler, fixed)
        self._is_stored = storage is not None
        with quiet():
            known = dict(storage=storage, study_name=name, load_if_exists=True)
            self.study: optuna.Study = module.create_study(directions=list(directions), **known)
            self._frozen = self.study.get_trials(deepcopy=False)
            self.study.sampler = self._seeded(sampler)
        # Optuna's own may be called in its loop alone.
        self.study.stop = self._stop
        self.is_stopped = False
        """Whether ``study.stop()`` was called."""
        self.is_exhausted = False
        """Whether the sampler has gone through all of its configurations."""
        # The numbers by which a storage knows the trials.
        self._ids = {trial.number: trial._trial_id for trial in self._frozen}
        self._reported = {trial.number: max(trial.intermediate_values, default=0) for trial in self._frozen}

    def _stop(self) -> None:
        self.is_stopped = True

    def _seeded(self, sampler: Any) -> Any:
        states, base = [*_random_states(sampler)], self.study.user_attrs.get("draws")
        if base is None:
            base = int(states[0].randint(2**31)) if states else 0
            self.study.set_user_attr("draws", base)
        seeded = copy.copy(sampler)

        def draw(trial: Any, name: str = "") -> None:
            for state in _random_states(seeded):
                state.seed([base, trial.number, zlib.crc32(name.encode())])

        def before_trial(study: Any, trial: Any) -> None:
            draw(trial)
            sampler.before_trial(study, trial)

        def sample_independent(study: Any, trial: Any, name: str, distribution: Any) -> Any:
            draw(trial, name)
            return self._plain(sampler.sample_independent(study, trial, name, distribution))

        seeded.before_trial, seeded.sample_independent = before_trial, sample_independent
        if isinstance(sampler, self._optuna.samplers.QMCSampler) and self.space:
            # Otherwise it draws at random until the first trial completes, whose space it takes.
            numerical = {name: kind for name, kind in self.space.items() if not hasattr(kind, "choices")}
            seeded.infer_relative_search_space = lambda study, trial: numerical
        return seeded

    def identify(self, about: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Note what the study searches; raises a ValueError if its storage holds another one."""
        before, now = self.study.user_attrs.get("hfta_func"), json.loads(json.dumps(about))
        if before is None and self._frozen:
            before = dict.fromkeys(now)
        for name, value in (before or now).items():
            if value != now.get(name):
                text = f"the storage has another study '{self.study.study_name}', whose {name} is {value} and not"
                raise ValueError(f"{text} {now.get(name)}; pass another name or folder, or the same arguments")
        with quiet():
            self.study.set_user_attr("hfta_func", now)
            self.study.set_metric_names(list(metrics))

    def begun(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The trials that the storage holds, each with its parameters; without those that wait or were asked for in part."""
        for frozen in self._frozen:
            if "cohort" in frozen.user_attrs:
                suggested = self._values(self._optuna.trial.FixedTrial(frozen.params))
                yield frozen, frozen.user_attrs.get("params") or suggested

    def enqueue(self, params: Mapping[str, Any]) -> None:
        """Have a sampler's next trial take these parameters, unless one has or had the same."""
        with quiet():
            self.study.enqueue_trial({name: self._plain(value) for name, value in params.items()}, skip_if_exists=True)

    def _plain(self, value: Any) -> Any:
        """What a storage, which keeps numbers and text alone, has for a value."""
        return repr(value) if self._is_stored and not isinstance(value, bool | int | float | str | None) else value

    def _values(self, trial: Any) -> dict[str, Any]:
        """The values of a trial of Optuna's by name, in the order in which the space suggests them."""
        view = _View(trial, self._plain)
        if self._suggest is None:
            for name, kind in self.space.items():
                categorical = hasattr(kind, "choices")
                view.suggest_categorical(name, kind.choices) if categorical else trial._suggest(name, kind)
        else:
            self._suggest(view)  # pyright: ignore[reportArgumentType]
        values = {**trial.params, **view.values}
        self.space |= {name: kind for name, kind in trial.distributions.items() if name not in self.space}
        return {name: values[name] for name in self.space if name in values}

    def ask(self) -> tuple[Any, dict[str, Any]]:
        """The next trial of Optuna's and its parameters; raises a ValueError if it lacks a name that was enqueued for it."""
        partial = [one for one in self._frozen if one.state.name == "RUNNING" and "cohort" not in one.user_attrs]
        self._frozen = []
        trial = self._optuna.trial.Trial(self.study, partial[0]._trial_id) if partial else self.study.ask()
        self._ids[trial.number] = trial._trial_id
        params = self._values(trial)
        enqueued = self.study._storage.get_trial(trial._trial_id).system_attrs.get("fixed_params", {})
        for name in enqueued.keys() - trial.params:
            raise ValueError(f"enqueue names {name!r}, but this trial has {', '.join(trial.params)}")
        return trial, params

    def report(self, trial: int, values: Mapping[int, float]) -> None:
        """A trial's values by epoch; those that are known are not written again."""
        for epoch, value in values.items():
            if epoch > self._reported.get(trial, 0):
                self.study._storage.set_trial_intermediate_value(self._ids[trial], epoch, value)
                self._reported[trial] = epoch

    def note(self, trial: int, **attributes: Any) -> None:
        """Note attributes of a trial that has not ended."""
        for name, value in attributes.items():
            self.study._storage.set_trial_user_attr(self._ids[trial], name, value)

    def tell(self, trial: int, status: str, values: Sequence[float] | None = None) -> None:
        """A trial has ended."""
        before, state = self.is_stopped, self._optuna.trial.TrialState[STATES[status]]
        with quiet():
            self.study.tell(trial, values if status == "complete" else None, state)
        # A sampler that has gone through its grid stops the study.
        self.is_exhausted, self.is_stopped = self.is_stopped, before


class _View:
    """A trial of Optuna's whose choices may be any values."""

    def __init__(self, trial: Any, plain: Callable[[Any], Any]):
        self._trial, self._plain = trial, plain
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        plain = [self._plain(choice) for choice in choices]
        value = self._trial.suggest_categorical(name, plain)
        matching = [choice for choice, text in zip(choices, plain, strict=True) if text is not choice and text == value]
        self.values[name] = matching[0] if matching else value
        return self.values[name]


def _random_states(sampler: Any) -> Iterator[Any]:
    """The generators of a sampler and of those in it."""
    for value in vars(sampler).values():
        if isinstance(value, require("optuna", "tune").samplers.BaseSampler):
            yield from _random_states(value)
        elif isinstance(getattr(value, "rng", None), require("numpy", "tune").random.RandomState):
            yield value.rng


def configurations(sampler: Any, space: Space, enqueue: Sequence[Mapping[str, Any]], most: int) -> int | None:
    """The number of trials after which a sampler would repeat itself; None for any number, or more than ``most``."""
    samplers = require("optuna", "tune").samplers
    if not isinstance(sampler, samplers.GridSampler | samplers.BruteForceSampler):
        return None
    with quiet():
        session = SamplerSession(space, ["minimize"], copy.deepcopy(sampler), 0)
    for params in enqueue:
        session.enqueue(params)
    for count in range(most):
        if session.is_exhausted:
            return count
        trial, _ = session.ask()
        session.tell(trial.number, "complete", [0.0])
    return None


STATES = {"running": "RUNNING", "complete": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL"}
"""Optuna's name of the status of a trial."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's log and its warnings of experiments."""
    optuna = require("optuna", "tune")
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
