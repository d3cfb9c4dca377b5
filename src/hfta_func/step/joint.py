"""Members of several networks, which train in turn: a step for each network, one after the other."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._torch import Compiled, can_look, inside_transform
from hfta_func._tree import tree_map, where, write
from hfta_func._types import LossError, Params, StackError, StateError, Tree
from hfta_func.optim._transforms import PartitionState
from hfta_func.step.batch import rows_of
from hfta_func.step.check import require
from hfta_func.step.failures import Failure
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep

# Negative, as all numbers that this package folds into the keys of a state.
_NOISE = -(2**62) - 2**60

_KEPT = "params", "buffers", "opt_state"


def joint(*, every: Mapping[str, int] | None = None, **steps: TrainStep) -> JointStep:
    """One step for members of several networks, each with its own loss and optimizer: GANs, actors and critics.

    The networks are children of one module, such as ``nn.ModuleDict({"d": ..., "g": ...})``. Each step is made with that
    module and trains the child of its name; its loss calls the other children as they are by then, and gives them no
    gradient. A child without a step is not trained.

    Args:
        every: With ``{"g": 5}``, ``g`` is updated once for every five updates of the others. A batch then holds the rows of
            five: it is split into five parts of equal size, the others are updated with each part, and ``g`` with the last.
        steps: The steps by the names of their networks, in the order of their updates.

    Returns:
        A :class:`JointStep`, which is used like a :class:`TrainStep`.

    Raises:
        LossError: if there is no step, or no parameter of that name requires grad.
        StackError: if two networks hold the same parameter.
        ValueError: if steps differ in ``batch_dims``, ``share_frozen`` or ``donate``, one has ``shared_params``, or ``every``
            has another name or no positive integer.

    Example:
        >>> def make_model():
        ...     return torch.nn.ModuleDict({"d": torch.nn.Linear(2, 1), "g": torch.nn.Linear(3, 2)})
        >>> def loss_d(model, real):
        ...     fake = model.g(torch.randn(len(real), 3))
        ...     return (model.d(fake) - model.d(real)).mean() + model.d.weight.square().sum()
        >>> def loss_g(model, real):
        ...     return -model.d(model.g(torch.randn(len(real), 3))).mean()
        >>> optimizers = adam(lr=[1e-3, 1e-2]), adam(lr=1e-3)
        >>> d, g = map(make_train_step, [make_model()] * 2, [loss_d, loss_g], optimizers)
        >>> step = joint(d=d, g=g)
        >>> state = step.init(*init_params(make_model, seeds=[0, 1]), seeds=[0, 1])
        >>> state, metrics = step(state, torch.randn(2, 8, 2))
        >>> sorted(metrics)
        ['d.loss', 'failure', 'finite', 'g.loss']
    """
    return JointStep(steps, every or {})


class JointStep(Compiled):
    """``step(state, batch) -> (state, metrics)``, a pure function; made by :func:`joint`."""

    def __init__(self, steps: Mapping[str, TrainStep], every: Mapping[str, int]):
        self._made_from = steps, every
        if not steps:
            raise LossError("there is no network to train; name a step for each, joint(d=..., g=...)")
        for name, count in every.items():
            if name not in steps or not isinstance(count, int) or count < 1:
                raise ValueError(
                    f"every has {name!r}: {count!r}; give some of {', '.join(steps)} integers of at least 1"
                )
        _check_steps(steps)
        first, last = next(iter(steps.values())), [*steps][-1]
        self.options, self.base, self.batch_dims = first.options, first.base, first.batch_dims
        self._every = {name: every.get(name, 1) for name in steps}
        self._parts = math.lcm(*self._every.values())
        self._noise = {name: _NOISE - zlib.crc32(name.encode()) for name in steps}
        # A member that fails goes back to where it was before the first network, so only the last update may be in place.
        in_place = last if self.options.donate and self._every[last] == self._parts else None
        self._steps = {name: step.of_network(name, donate=name == in_place) for name, step in steps.items()}

    def __reduce__(self) -> Any:
        return JointStep, self._made_from

    def init(
        self,
        params: Params,
        buffers: Params | None = None,
        *,
        seeds: Sequence[int] | Tensor,
        hparams: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """The state before the first step, whose ``opt_state.groups`` holds the optimizers' states by network.

        Args:
            params: Stacked parameters of the whole module, as for :meth:`TrainStep.init`.
            buffers: Stacked buffers.
            seeds: One integer per member.
            hparams: The third argument of the losses that take one.

        Raises:
            Exception: what :meth:`TrainStep.init` raises.
        """
        chosen = next(
            (name for name, step in self._steps.items() if step._gradients.takes_hparams), next(iter(self._steps))
        )
        states = {
            name: step.init(params, buffers, seeds=seeds, hparams=hparams if name == chosen else None)
            for name, step in self._steps.items()
        }
        scales = {name: state.loss_scale for name, state in states.items() if state.loss_scale}
        opt_state = PartitionState({name: state.opt_state for name, state in states.items()})
        return states[chosen]._replace(opt_state=opt_state, loss_scale=scales or ())

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """Update every network of each active member in turn.

        A member of which one network fails keeps all of its networks as they were before the step.

        Returns:
            The new state and the metrics, each ``[M, ...]``: ``finite`` and ``failure`` of the member, and what each network
            reports, such as ``d.loss``: the mean of its updates, where there are several.

        Raises:
            StateError: if the state does not belong to these networks and optimizers.
            BatchError: if the rows of a batch cannot be split as ``every`` asks.
            Exception: what a :class:`TrainStep` raises.
        """
        require(state)
        groups = getattr(state.opt_state, "groups", {})
        if groups.keys() != self._steps.keys():
            raise StateError(
                f"the state has optimizers for {', '.join(groups) or 'no networks'}, but this step trains "
                f"{', '.join(self._steps)}; make a state with step.init(...)"
            )
        with torch.set_grad_enabled(inside_transform()):
            after, failure, reports = self._updates(state, batch)
            failed = _is_real(failure)
            if not can_look(failed) or bool((failed & state.active).any()):
                kept = {field: where(~failed, getattr(after, field), getattr(state, field)) for field in _KEPT}
                after = after._replace(**kept)
            metrics = {"finite": ~failed, "failure": failure} | {
                f"{name}.{metric}": _mean([report[metric] for report in reports[name]])
                for name in self._steps
                for metric in reports[name][0]
                if metric not in ("finite", "failure")
            }
            if not self.options.donate:
                return after, metrics
            # A metric may be a tensor of the state.
            metrics = tree_map(torch.clone, metrics)
            write(state, after)
            return state, metrics

    def _updates(self, state: TrainState, batch: Tree) -> tuple[TrainState, Tensor, dict[str, list[dict[str, Tensor]]]]:
        """The state after all updates, members that have failed included; why they have failed; and all reports."""
        before, failure = state, torch.zeros_like(state.step)
        reports: dict[str, list[dict[str, Tensor]]] = {name: [] for name in self._steps}
        parts = [rows_of(self.batch_dims, batch, part, self._parts) for part in range(self._parts)]
        for name, step in self._steps.items() if torch.compiler.is_dynamo_compiling() else ():
            step._gradients.rehearse(self._given(name, state, before.step, state.active), parts[0])
        for part, rows in enumerate(parts):
            for name in [name for name, count in self._every.items() if (part + 1) % count == 0]:
                given = self._given(name, state, before.step * self._parts + part, state.active & ~_is_real(failure))
                after, report = self._steps[name](given, rows)
                scales = {name: after.loss_scale} if given.loss_scale else {}
                state = state._replace(
                    params=after.params,
                    buffers=after.buffers,
                    opt_state=PartitionState({**state.opt_state.groups, name: after.opt_state}),
                    active=state.active & (after.active | ~given.active),
                    loss_scale={**dict(state.loss_scale), **scales} or (),
                )
                failure = torch.where(_is_real(failure) | (report["failure"] == 0), failure, report["failure"])
                reports[name].append(report)
        return state._replace(step=before.step + before.active), failure, reports

    def _given(self, name: str, state: TrainState, number: Tensor, active: Tensor) -> TrainState:
        """The state that the step of a network is given for its update with this number."""
        return state._replace(
            opt_state=state.opt_state.groups[name],
            keys=random.fold_in(state.keys, self._noise[name]),
            step=number,
            active=active,
            loss_scale=dict(state.loss_scale).get(name, ()),
        )


def _is_real(failure: Tensor) -> Tensor:
    """Members that have failed; one whose gradient overflowed under a loss scale has only skipped an update."""
    return (failure == int(Failure.LOSS)) | (failure == int(Failure.GRADIENT))


def _mean(values: list[Tensor]) -> Tensor:
    """The mean of a metric over several updates; the last value where it has none, as of integers."""
    if len(values) == 1 or not values[0].is_floating_point():
        return values[-1]
    return torch.stack(values).mean(0)


def _check_steps(steps: Mapping[str, TrainStep]) -> None:
    """Raise unless all are steps that fit together, and no parameter belongs to two networks, which would both update it."""
    for name, step in steps.items():
        if not isinstance(step, TrainStep):
            what = type(step).__qualname__
            raise ValueError(f"{name} is a {what}; pass what make_train_step returned, and compile the joint step")
        if step.options.shared_params:
            raise ValueError(f"the step of '{name}' has shared_params, which joint does not train; leave them out")
        for field in ("batch_dims", "share_frozen", "donate"):
            first, value = (getattr(one.options, field) for one in (next(iter(steps.values())), step))
            if value != first:
                raise ValueError(f"{field} is {value} for '{name}' but {first} before; give all steps the same")
        for tied in step._shapes.ties.items():
            owners = {path.partition(".")[0] for path in tied}
            if len(owners) > 1 and owners <= steps.keys():
                raise StackError(
                    f"'{tied[0]}' is '{tied[1]}', too, and each network has an optimizer of its own; make what they share a "
                    f"child of the module, with a step of its own"
                )
