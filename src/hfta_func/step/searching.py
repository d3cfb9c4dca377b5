"""Steps of optimizers that evaluate losses themselves: as many evaluations as the members' searches ask for."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import inside_transform, untraced
from hfta_func._tree import leaves, tree_map
from hfta_func._types import Tree, recorded
from hfta_func.errors import TraceError
from hfta_func.optim._base import GradientTransformation
from hfta_func.step.commit import Commit, Failure
from hfta_func.step.replay import Replay
from hfta_func.step.state import TrainState


@recorded
def _latest_gradients() -> GradientTransformation:
    """An optimizer that changes nothing, and whose state is the latest gradients."""
    zeros = functools.partial(tree_map, torch.zeros_like)
    return GradientTransformation(lambda params: zeros(params), lambda grads, state, params: (zeros(grads), grads))


class Searching:
    """``searching(state, batch)``: a step with an optimizer that has a ``search``.

    Args:
        step: The training step, of whose kind each evaluation is one.
        model: Its model.
    """

    def __init__(self, step: Any, model: nn.Module):
        if step.options.shared_params or leaves(step.options.carry):
            raise ValueError(
                "lbfgs evaluates each member as often as its own search asks for; leave out shared_params and carry, or take "
                "another optimizer"
            )
        self._search = step.optimizer.search
        optimizer, options = _latest_gradients(), replace(step.options, donate=False)
        # The step itself, with what computes its gradients, but for what it does with them.
        self.evaluate = object.__new__(type(step))
        given = {"optimizer": optimizer, "options": options, "_made_from": (*step._made_from[:2], optimizer, options)}
        vars(self.evaluate).update(vars(step) | given, _searching=None)
        self.evaluate._commit = Commit(model, optimizer, options, False, ())
        # One batch is evaluated many times.
        self.evaluate._replay = None if options.replay is False else Replay(self.evaluate)

    @untraced("lbfgs evaluates as often as losses ask for, which is no graph")
    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Tensor]]:
        """Evaluate members until all searches have ended; the metrics are those of the first evaluation."""
        if inside_transform():
            raise TraceError("lbfgs evaluates as often as losses ask for; no transform can map or differentiate it")
        trained = {path: param for path, param in state.params.items() if path in self.evaluate.trainable}
        search, metrics, active = self._search(state.opt_state, trained, state.active), {}, state.active
        latest = state._replace(opt_state=self.evaluate.optimizer.init(trained))
        while bool(search.searching.any()) or not metrics:
            # All evaluations draw the noise of the step.
            latest = latest._replace(params=state.params | search.params, active=search.searching, step=state.step)
            latest, report = self.evaluate(latest, batch)
            metrics, active = (metrics, active) if metrics else (report, latest.active)
            search.tell(report["loss"], latest.opt_state, report["finite"])
        metrics["failure"] = torch.where(search.stuck, int(Failure.SEARCH), metrics["failure"])
        params, step = state.params | search.params, state.step + state.active
        return latest._replace(params=params, opt_state=search.state, active=active, step=step), metrics
