"""A population of members that train as arrays; members can be dropped, added or copied between epochs."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

import hfta_func as hfta
from hfta_func._types import SIGNS, Direction, require
from hfta_func.files.atomic import PathLike
from hfta_func.tune.array import Build, Trainer
from hfta_func.tune.folder import StudyFolder
from hfta_func.tune.groups import Group, Jobs, Member, Size, check_alive, group_key, rows_of, with_keys
from hfta_func.workers.pool import Executor, Inline

if TYPE_CHECKING:
    import pandas


class Population:
    """Members that train as arrays, also as ``tune.population``.

    Args:
        build: ``build(fixed, members) -> Array``. ``fixed`` has the values of the non-fusible names, which all members of an
            array share; ``members`` has a list with one value per member for every other name, and for ``"seed"``.
        table: The configurations: a list of dicts, a dict of lists, or a pandas frame. A configuration without a ``"seed"``
            gets ``seed``.
        nonfusible: Names whose values decide shapes or code, so that members of one array must have equal ones.
        max_models: The largest array; ``"auto"`` is the number that :func:`hfta_func.plan` recommends.
        seed: The seed of members whose configuration names none.
        executor: What trains the arrays, several at a time, such as a :class:`~hfta_func.workers.WorkerPool`; or this
            process.

    Raises:
        ValueError: if the configurations do not have the same names, or ``max_models`` is
            not positive.
        StateError: if ``build`` returns another number of members than it was asked for.

    Attributes:
        members: All members by number, with those that were dropped or failed.
        nonfusible: The names whose values are equal for all members of an array.
        interrupted: Whether Ctrl-C ended the last :meth:`fit`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import hfta_func as hfta
        >>> from hfta_func import tune
        >>> x = torch.randn(64, 4)
        >>> def build(fixed, members):
        ...     factory = lambda: nn.Sequential(nn.Linear(4, fixed["width"]), nn.ReLU(), nn.Linear(fixed["width"], 1))
        ...     loss_fn = lambda model, batch: (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
        ...     seeds = members["seed"]
        ...     step = hfta.make_train_step(factory(), loss_fn, hfta.adam(lr=members["lr"]))
        ...     state = step.init(*hfta.init_params(factory, seeds), seeds=seeds)
        ...     return tune.Array(step, state, hfta.ArrayLoader(x, 16, seeds=seeds))
        >>> table = {"lr": [1e-3, 1e-2, 1e-1, 1e-2], "width": [8, 8, 8, 16]}
        >>> members = tune.population(build, table, nonfusible=["width"], max_models=8)
        >>> members.fit(epochs=2)
        >>> best = members.keep(top=0.5, by="loss", direction="minimize")
        >>> members.fit(epochs=2)
        >>> [members.members[number].epoch for number in best]
        [4, 4]
    """

    def __init__(
        self, build: Build, table: Any = (), *, nonfusible: Sequence[str] = (), max_models: Size = "auto", seed: int = 0,
        executor: Executor | None = None,
    ):  # fmt: skip
        if max_models != "auto" and not (isinstance(max_models, int) and max_models >= 1):
            raise ValueError(f"max_models is {max_models!r}; pass a number of models, at least 1, or 'auto'")
        self.members: list[Member] = []
        self.nonfusible = tuple(nonfusible)
        self._trainer, self._seed = Trainer(build), seed
        self._limit: Size = max_models
        self._groups: dict[tuple[Any, ...], Group] = {}
        self.last: tuple[int, ...] = ()
        self.interrupted = False
        self.jobs = Jobs(executor or Inline())
        self.add(table)

    def add(self, table: Any) -> list[int]:
        """Add members.

        Args:
            table: Configurations, as those of the population.

        Returns:
            Their numbers.
        """
        added = self.extend(rows_of(table))
        by_group, errors = collections.defaultdict[Group, list[Member]](list), dict[int, Exception]()
        for number in added:
            by_group[self.group_of(self.members[number])].append(self.members[number])
        for group, members in by_group.items():
            errors |= group.make(members)
        self._fail(errors)
        if added and len(errors) == len(added):
            raise errors[added[0]]
        return added

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Add members with the names of all others; they are made when they train."""
        first = len(self.members)
        self.members += [Member(number, {"seed": self._seed, **row}) for number, row in enumerate(rows, first)]
        return [*range(first, len(self.members))]

    @property
    def groups(self) -> list[Group]:
        """The groups of members that can share arrays."""
        return list(self._groups.values())

    def group_of(self, member: Member) -> Group:
        """The group of members that have the names and the non-fusible values of this one."""
        key = group_key(member.config, self.nonfusible)
        if key not in self._groups:
            fixed = {name: member.config[name] for name in self.nonfusible if name in member.config}
            self._groups[key] = Group(self._trainer, len(self._groups), fixed, self._limit)
        return self._groups[key]

    def _fail(self, errors: Mapping[int, Exception]) -> None:
        for number, error in errors.items():
            member = self.members[number]
            member.status, member.error = "failed", f"{type(error).__name__}: {error}"
            self.group_of(member).drop([number])

    @property
    def alive(self) -> list[int]:
        """The numbers of the members that can train."""
        return [member.number for member in self.members if member.status == "alive"]

    def fit(self, epochs: int) -> None:
        """Train every member for some more epochs; Ctrl-C ends it, and the epochs of arrays that were training are lost."""
        self.interrupted = False
        targets = {number: self.members[number].epoch + epochs for number in self.alive}
        try:
            while not self.interrupted and self.advance(targets):
                pass
        except KeyboardInterrupt:
            self.interrupted = True

    def advance(self, targets: Mapping[int, int], seconds: float | None = None) -> list[int]:
        """Train arrays, as many at a time as the executor can, until one of them has trained.

        An array trains for as many epochs as all its members need. Which members share an array changes no result.

        Args:
            targets: The epoch that each member is to reach.
            seconds: When they are over, arrays end with their epoch.

        Returns:
            The members of the array that has trained, or of half of one that failed; none if all have reached their targets.
        """
        try:
            while self.jobs.free > 0 and self._start(targets, seconds):
                pass
            if not self.jobs.under_way:
                return []
            group, members, result = self.jobs.wait()
        except BaseException:
            self.jobs.stop()
            raise
        self._record(group, members, result)
        self.last = tuple(member.number for member in members)
        return [*self.last]

    def _start(self, targets: Mapping[int, int], seconds: float | None) -> bool:
        """Begin to train an array; returns whether any member waited for that."""
        idle = (self.members[number] for number in targets.keys() - self.jobs.members)
        waiting = [one for one in idle if one.status == "alive" and one.epoch < targets[one.number]]
        if not waiting:
            return False
        # Members that trained last first, because their states are one block on the device.
        waiting.sort(key=lambda member: (member.number not in self.last, member.number))
        group = self.group_of(waiting[0])
        together = [member for member in waiting if self.group_of(member) is group]
        # As many as an array is likely to hold are made, so that no more states than those that train are in memory.
        turns = -(-len(together) // (16 if group.limit == "auto" else group.limit))
        self._fail(group.make(together[: -(-len(together) // turns)]))
        if (first := waiting[0]).status == "failed":
            return True
        same = [one for one in together if one.status == "alive" and (not group.is_shared or one.epoch == first.epoch)]
        # All free workers get a share of those that wait.
        most = group.capacity([member.number for member in same], targets[first.number] - first.epoch)
        most = min(most, -(-len(waiting) // self.jobs.free))
        self._fail(group.make(same[:most]))
        chosen = sorted((one for one in same[:most] if one.status == "alive"), key=lambda one: one.number)
        self.jobs.start(group, chosen, min(targets[one.number] - one.epoch for one in chosen), seconds)
        return True

    def _record(self, group: Group, members: Sequence[Member], result: Any) -> None:
        self.interrupted = getattr(result, "interrupted", False)
        alive = [member.number for member in members if member.status == "alive"]
        if self.interrupted:
            self.jobs.stop()
        elif isinstance(result, Exception):
            self._fail(dict.fromkeys(alive, result))
        else:
            group.take_back([member.number for member in members], result.state, alive)
            for index, member in enumerate(members):
                if member.status == "alive":
                    member.metrics += [{name: row[index] for name, row in each.items()} for each in result.epochs]
                    member.epoch += len(result.epochs)
                    member.seconds += result.seconds / len(members)

    def keep(self, *, top: float, by: str, direction: Direction = "maximize") -> list[int]:
        """Drop all members but the best; :meth:`drop` drops given ones.

        Args:
            top: Number of members that stay, or, below 1, their share of those alive, rounded up.
            by: The metric that ranks members, in the last epoch; NaN is worst, and of equal values the first is better.
            direction: Whether large or small values are better.

        Returns:
            The members that stay, best first.
        """
        ranked = self.ranked(by, direction)
        count = math.ceil(top * len(ranked)) if top < 1 else int(top)
        self.drop(ranked[count:])
        return ranked[:count]

    def drop(self, members: Iterable[int]) -> None:
        """Drop members that are alive."""
        dropped = {*members}
        for number in dropped:
            self.members[number].status = "dropped"
        for group in self._groups.values() if dropped else ():
            group.drop(dropped)

    def ranked(self, by: str, direction: Direction = "maximize") -> list[int]:
        """The members alive, best first by a metric of the last epoch; NaN is worst, and equal ones keep their order."""
        values = {number: SIGNS[direction] * self.members[number].value(by) for number in self.alive}
        return sorted(values, key=lambda number: (math.isnan(values[number]), values[number]))

    def copy(self, pairs: Sequence[tuple[int, int]], /, **changes: Sequence[float]) -> None:
        """Have members copy the states of others, with new values of hyperparameters; nothing is compiled anew.

        Args:
            pairs: Pairs of a member and the member that it copies, of the same architecture and after as many epochs. It
                keeps its seed, the order of its data, and the keys in what it carries: integers called ``keys``.
            changes: New values of hyperparameters by name, as for :func:`hfta_func.with_hyperparams`, one per pair.
        """
        check_alive(self.members, [number for pair in pairs for number in pair])
        for name, values in changes.items():
            if len(values) != len(pairs) or name in self.nonfusible:
                raise ValueError(f"'{name}' has {len(values)} values; give fusible names one for each of the pairs")
        by_group: dict[Group, list[int]] = {}
        for index, (copy, source) in enumerate((self.members[a], self.members[b]) for a, b in pairs):
            if (group := self.group_of(copy)) is not self.group_of(source) or copy.epoch != source.epoch:
                text = f"members {copy.number} and {source.number} have trained {copy.epoch} and {source.epoch} epochs"
                raise ValueError(f"{text}, or differ in names or non-fusible values; copy members that are alike")
            by_group.setdefault(group, []).append(index)
        for group, indices in by_group.items():
            copies, sources = ([pairs[index][side] for index in indices] for side in (0, 1))
            group.make(self.members[number] for number in (*copies, *sources))
            state = with_keys(group.gather(sources), group.gather(copies))
            values = {name: [column[index] for index in indices] for name, column in changes.items()}
            group.put(copies, hfta.with_hyperparams(state, **values) if values else state)
            for row, (copy, source) in enumerate(zip(copies, sources, strict=True)):
                member = self.members[copy]
                member.config |= {name: column[row] for name, column in values.items()}
                member.parents.append((member.epoch, source))

    def save(self, folder: PathLike) -> None:
        """Write all members, their metrics and lineage to a folder; if this fails, the folder keeps its former content.

        Raises:
            CheckpointError: if the folder cannot be written, or another process is using it.
        """
        with StudyFolder(folder).held() as study_folder:
            study_folder.save(self)

    def load(self, folder: PathLike) -> None:
        """Take over the members of a folder of :meth:`save`; the population must have no members.

        Raises:
            ValueError: if the population has members, or the folder has none or was saved with other non-fusible names.
            CheckpointError: if a file is damaged, or another process is using the folder.
        """
        if self.members:
            raise ValueError("the population has members; load into one that was made with an empty table")
        with StudyFolder(folder).held() as study_folder:
            if study_folder.restore(self) is None:
                raise ValueError(f"{folder} holds no members; pass a folder that save has written")

    def state(self, member: int) -> Any:
        """The state of a member that is alive, as an array of one."""
        check_alive(self.members, [member])
        group = self.group_of(self.members[member])
        for error in group.make([self.members[member]]).values():
            raise error
        return group.gather([member])

    def export(self, member: int) -> nn.Module:
        """A member as an ordinary module; its array must have been built with ``model``."""
        state, model = self.state(member), self.group_of(self.members[member]).array.model
        if model is None:
            raise ValueError("build returned an Array without a model, which exported models are made of; give it one")
        return hfta.export_model(model, state, 0)

    def frame(self) -> pandas.DataFrame:
        """A pandas frame with one row per member and epoch: number, status, configuration, epoch and metrics."""
        rows = [
            {"member": member.number, "status": member.status, **member.config, "epoch": epoch, **metrics}
            for member in self.members
            for epoch, metrics in enumerate(member.metrics, start=1)
        ]
        return require("pandas", "plot").DataFrame(rows)
