"""Members of several networks, which train in turn: a step for each network, one after the other."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hfta_func import random
from hfta_func._torch import Compiled, can_look, inside_transform
from hfta_func._tree import leaves, tree_map, where
from hfta_func._types import Params, Tree
from hfta_func.errors import StackError
from hfta_func.models.structure import ties
from hfta_func.optim._transforms import PartitionState, covers
from hfta_func.step.batch import rows_of
from hfta_func.step.commit import Failure
from hfta_func.step.state import TrainState, stored
from hfta_func.step.train import TrainStep

# Negative, as all numbers that this package folds into the keys of a state.
_NOISE = -(2**62) - 2**60


def joint(*, every: Mapping[str, int] | None = None, once: bool = False, **steps: TrainStep) -> JointStep:
    """One step for members of several networks, each with its own loss and optimizer: GANs, actors and critics.

    The networks are children of one module, such as ``nn.ModuleDict({"d": ..., "g": ...})``. Each step is made with that
    module and trains the child of its name; its loss calls the other children as they are by then, and gives them no
    gradient. A child without a step is not trained.

    Args:
        every: With ``{"g": 5}``, ``g`` is updated once for every five updates of the others. A batch then holds the rows of
            five: it is split into five parts of equal size, the others are updated with each part, and ``g`` with the last.
        once: Whether what several losses compute is made once in the script, such as the samples of a GAN: losses draw the
            same noise, and after a loss has moved the buffers of a network, later ones leave them until it is updated. By
            default each loss draws its own noise and moves the buffers of all that it calls: the script samples anew.
        steps: The steps by the names of their networks, in the order of their updates.

    Returns:
        A :class:`JointStep`, which is used like a :class:`TrainStep`.

    Raises:
        LossError: if there is no step, or no parameter of that name requires grad.
        StackError: if two networks hold the same parameter.
        ValueError: if steps differ in ``batch_dims``, ``share_frozen`` or ``donate``, or an argument has an invalid value.

    Example:
        >>> def make_model():
        ...     return torch.nn.ModuleDict({"d": torch.nn.Linear(2, 1), "g": torch.nn.Linear(3, 2)})
        >>> def loss_d(model, real):
        ...     return (model.d(model.g(torch.randn(len(real), 3))) - model.d(real)).mean()
        >>> def loss_g(model, real):
        ...     return -model.d(model.g(torch.randn(len(real), 3))).mean()
        >>> d, g = (make_train_step(make_model(), loss, adam(lr=[1e-3, 1e-2])) for loss in (loss_d, loss_g))
        >>> step = joint(d=d, g=g)
        >>> state = step.init(*init_params(make_model, seeds=[0, 1]), seeds=[0, 1])
        >>> state, metrics = step(state, torch.randn(2, 8, 2))
        >>> sorted(metrics)
        ['d.loss', 'failure', 'finite', 'g.loss']
    """
    return JointStep(steps, every or {}, once)


class JointStep(Compiled):
    """``step(state, batch) -> (state, metrics)``, a pure function; made by :func:`joint`."""

    def __init__(self, steps: Mapping[str, TrainStep], every: Mapping[str, int], once: bool = False):
        self._made_from = steps, every, once
        for name, count in every.items():
            if name not in steps or count < 1:
                raise ValueError(f"every has {name!r}: {count!r}; give {', '.join(steps)} integers of at least 1")
        (first, *_), last = steps.values(), [*steps][-1]
        alike = {name: getattr(first.options, name) for name in ("batch_dims", "share_frozen", "donate")}
        for name, step in steps.items():
            for field, other in (alike | {"shared_params": ()}).items():
                if (value := getattr(step.options, field)) != other:
                    raise ValueError(f"{field} is {value} for '{name}'; in a joint step it must be {other} for all")
            if leaves(step.options.carry):
                why = f"'{name}' has carry=, which a joint step does not pass on"
                raise ValueError(f"{why}; keep it in buffers of the model")
            for path, other in ties(step.outline).items():
                owners = {path.partition(".")[0], other.partition(".")[0]}
                if len(owners) > 1 and owners <= steps.keys():
                    raise StackError(f"'{path}' is '{other}', too; make what networks share a child with its own step")
        self.options, self.outline = first.options, first.outline
        self.base, self.batch_dims = first.base, first.batch_dims
        self._every = {name: every.get(name, 1) for name in steps}
        self._parts = math.lcm(*self._every.values())
        self._once, self._noise = once, {name: _NOISE - zlib.crc32(b"" if once else name.encode()) for name in steps}
        # A member that fails goes back to where it was before the first network, so only the last update may be in place.
        in_place = last if self.options.donate and self._every[last] == self._parts and not once else None
        options = {name: replace(step.options, network=name, donate=name == in_place) for name, step in steps.items()}
        self._steps = {name: TrainStep(*step._made_from[:3], options[name]) for name, step in steps.items()}
        # Counters of the module are those of all losses.
        self._gradients, *others = [step._gradients for step in self._steps.values()]
        for each in others:
            each.count_with(self._gradients)
        self.oracle = self._gradients.oracle
        """What compares calls of the first network's step with members alone."""

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
        """The state before the first step, as :meth:`TrainStep.init`; ``opt_state.groups`` is that of each network.

        Args:
            params: Stacked parameters of the whole module.
            buffers: Stacked buffers.
            seeds: One integer per member.
            hparams: The third argument of the losses that take one.
        """
        # One that takes no numbers refuses them.
        chosen = max(self._steps, key=lambda name: self._steps[name]._gradients.takes_hparams)
        given = {name: hparams if name == chosen else None for name in self._steps}
        states = {n: step.init(params, buffers, seeds=seeds, hparams=given[n]) for n, step in self._steps.items()}
        return states[chosen]._replace(
            opt_state=PartitionState({name: state.opt_state for name, state in states.items()}),
            loss_scale={name: state.loss_scale for name, state in states.items()},
        )

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
        with torch.set_grad_enabled(inside_transform()):
            after, failure, reports = self._updates(state, batch)
            failed = _is_real(failure)
            if not can_look(failed) or bool((failed & state.active).any()):
                fields = "params", "buffers", "opt_state"
                after = after._replace(**{f: where(~failed, getattr(after, f), getattr(state, f)) for f in fields})
            means = {k: torch.stack(v).mean(0) if v[0].is_floating_point() else v[-1] for k, v in reports.items()}
            metrics = {"finite": failure == int(Failure.NONE), "failure": failure, **means}
            if self.options.donate:
                metrics = tree_map(torch.clone, metrics)
            return stored(state, after, self.options.donate), metrics

    def replayed(self, steps: int | None = None) -> JointStep:
        """The step, each of whose networks is replayed from now on; see :meth:`TrainStep.replayed`.

        Args:
            steps: How often it will be called, if that is known.
        """
        for name, step in self._steps.items():
            step.replayed(steps and steps * self._parts // self._every[name])
        return self

    @property
    def status(self) -> str:
        """How the latest update of all networks ran, and of each; see :attr:`TrainStep.status`."""
        by_name = {name: step.status for name, step in self._steps.items()}
        kind = "replayed" if all(status.startswith("replayed") for status in by_name.values()) else "eager"
        return f"{kind}: " + "; ".join(f"{name} {status}" for name, status in by_name.items())

    def _updates(self, state: TrainState, batch: Tree) -> tuple[TrainState, Tensor, dict[str, list[Tensor]]]:
        """The state after all updates, members that have failed included; why they have failed; and all reports."""
        before, failure, reports = state, torch.zeros_like(state.step), {}
        for part in range(self._parts):
            rows, start = rows_of(self.batch_dims, batch, part, self._parts), state.buffers
            for name in [name for name, count in self._every.items() if (part + 1) % count == 0]:
                given = state._replace(
                    opt_state=state.opt_state.groups[name],
                    keys=random.fold_in(before.keys, self._noise[name]),
                    step=before.step * self._parts + part,
                    active=state.active & ~_is_real(failure),
                    loss_scale=state.loss_scale[name],
                )
                gradients = self._steps[name]._gradients
                if torch.compiler.is_dynamo_compiling():
                    # A compiler does not know the values of what other networks have become.
                    first = given._replace(params=before.params, buffers=before.buffers)
                    gradients.rehearse(gradients.tensors(first), rows, {})
                after, report = self._steps[name](given, rows)
                if self._once:
                    # What has moved since the latest update of its network stays.
                    kept = {k: torch.where(x != start[k], x, after.buffers[k]) for k, x in given.buffers.items()}
                    start = {path: kept[path] if covers(name, path) else leaf for path, leaf in start.items()}
                    after = after._replace(buffers=kept)
                state = after._replace(
                    opt_state=PartitionState({**state.opt_state.groups, name: after.opt_state}),
                    keys=before.keys,
                    active=state.active & (after.active | ~given.active),
                    loss_scale={**state.loss_scale, name: after.loss_scale},
                )
                failure = torch.where(_is_real(failure) | (report["failure"] == 0), failure, report["failure"])
                for metric in [metric for metric in report if metric not in ("finite", "failure")]:
                    reports.setdefault(f"{name}.{metric}", []).append(report[metric])
        return state._replace(step=before.step + before.active), failure, reports


def _is_real(failure: Tensor) -> Tensor:
    """Members that have failed; one whose gradient overflowed under a loss scale has only skipped an update."""
    return (failure == int(Failure.LOSS)) | (failure == int(Failure.GRADIENT))
