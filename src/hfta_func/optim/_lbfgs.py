"""L-BFGS, which evaluates the loss of every member at points of its own choice until its step is done."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._tree import per_model, where
from hfta_func._types import Params, PerModel, check_counts, recorded
from hfta_func.errors import HyperparameterError
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, check_choice, restrict, zero_count
from hfta_func.optim._leafwise import FIELDS

_KEPT = "func_evals n_iter num_pairs t prev_loss H_diag d prev_flat_grad old_dirs old_stps ro"
LBFGSState = namedtuple("LBFGSState", [*FIELDS, *_KEPT.split()])
"""What ``torch.optim.LBFGS`` keeps, by the same names; the pairs of changes that it remembers are a ring ``[M, H, D]``."""
restrict(LBFGSState, lr=Range.POSITIVE, max_iter=Range.AT_LEAST_ONE, max_eval=Range.AT_LEAST_ONE)
restrict(LBFGSState, tolerance_grad=Range.NONNEGATIVE, tolerance_change=Range.NONNEGATIVE)


@recorded
def lbfgs(
    lr: PerModel = 1.0,
    max_iter: PerModel = 20,
    max_eval: PerModel | None = None,
    tolerance_grad: PerModel = 1e-7,
    tolerance_change: PerModel = 1e-9,
    history_size: int = 100,
    line_search_fn: Literal["strong_wolfe"] | None = None,
) -> GradientTransformation:
    """L-BFGS with a strong Wolfe line search or a fixed step, as ``torch.optim.LBFGS`` computes it.

    A step of :func:`make_train_step` is ``optimizer.step(closure)``: up to ``max_iter`` iterations on one batch. The step
    itself evaluates the loss, for all members at once, each at the point that its own search asks for, until all are done.
    All evaluations of a step draw the same noise. The loss that a step reports is that of its first evaluation. A member
    whose last search finds no lower loss stays at its best point, and ``metrics["failure"]`` is ``Failure.SEARCH``.

    Args:
        lr: Learning rate: the first length that a line search tries, or that of all steps.
        max_iter: Most iterations in a step.
        max_eval: Most evaluations in a step, after which it ends; by default 1.25 ``max_iter``.
        tolerance_grad: A step ends where no entry of the gradient is larger.
        tolerance_change: A step ends where neither parameters nor loss change by more.
        history_size: How many pairs of changes are remembered, each of the size of the parameters twice.
        line_search_fn: ``"strong_wolfe"``, or None for steps of fixed length ``lr``.

    Raises:
        HyperparameterError: in a :func:`chain`, :func:`accumulate` or :func:`partition`, at the first update.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> def loss_fn(model, x):
        ...     return torch.nn.functional.mse_loss(model(x), 2 * x + 1)
        >>> step = make_train_step(model, loss_fn, lbfgs(line_search_fn="strong_wolfe"), batch_dims=None)
        >>> state = step.init(*init_params(lambda: torch.nn.Linear(1, 1), seeds=[0, 1]), seeds=[0, 1])
        >>> state, metrics = step(state, torch.linspace(-1, 1, 8)[:, None])
        >>> state.params["weight"].flatten()
        tensor([2.0000, 2.0000])

    References:
        Nocedal and Wright, "Numerical optimization", 2nd edition, 2006, algorithms 3.5, 3.6, 7.4 and 7.5.
    """
    check_counts(history_size=history_size)
    check_choice("line_search_fn", line_search_fn, (None, "strong_wolfe"))
    specs = {"lr": lr, "max_iter": max_iter, "tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
    hyperparams = Hyperparams(LBFGSState, **specs, **({} if max_eval is None else {"max_eval": max_eval}))

    def init(params: Params) -> LBFGSState:
        flat, count = _flattened(params), zero_count(params)
        pairs = flat.new_zeros(len(flat), history_size, flat.shape[1])
        counts, numbers = [count.clone() for _ in range(4)], [count.double(), count.double(), flat.new_ones(len(flat))]
        memory = torch.zeros_like(flat), torch.zeros_like(flat), pairs, pairs.clone(), pairs[:, :, 0].clone()
        return LBFGSState(counts[0], hyperparams.init(params), *counts[1:], *numbers, *memory)

    def update(grads: Params, state: LBFGSState, params: Params) -> Any:
        why = "lbfgs evaluates losses itself, so it can be no part of a chain, accumulate or partition; give it alone"
        raise HyperparameterError(f"{why} to make_train_step, and freeze parameters by requires_grad_(False)")

    search = functools.partial(Search, hyperparams, line_search_fn is not None)
    return GradientTransformation(init, update, search=search)


def _flattened(params: Params) -> Tensor:
    """All parameters of each member in one row ``[M, D]``: by path, since files and workers may order them anew."""
    return torch.cat([params[path].reshape(len(params[path]), -1) for path in sorted(params)], 1)


def _restored(flat: Tensor, like: Params) -> Params:
    """The inverse of :func:`_flattened`."""
    columns = flat.split([like[path][0].numel() for path in sorted(like)], 1)
    parts = zip(sorted(like), columns, strict=True)
    return {path: column.reshape(like[path].shape).to(like[path].dtype) for path, column in parts}


class Search:
    """A step of L-BFGS for all members: it says where to evaluate each of them, and is told what comes out.

    Each member is somewhere else in its own iterations and line searches. A call of :meth:`tell` advances all of them by one
    evaluation, by masks.

    Args:
        hyperparams: Of the optimizer.
        is_wolfe: Whether there is a line search.
        state: The optimizer's state before the step.
        params: The parameters that are trained, before the step.
        active: ``bool[M]``, the members that take part.
    """

    def __init__(self, hyperparams: Hyperparams, is_wolfe: bool, state: Any, params: Params, active: Tensor):
        at = hyperparams.at(state.hyperparams, state.step)
        self._numbers, self._is_wolfe, self._like = at, is_wolfe, params
        self._max_eval = at["max_eval"] if "max_eval" in at else torch.floor(at["max_iter"] * 5 / 4)
        self.searching, self.stuck = active, torch.zeros_like(active)
        """``bool[M]``: members to evaluate at :attr:`params` next; those whose last search has found no lower loss."""
        # The pairs are written in place.
        self.state = state._replace(**{name: getattr(state, name).clone() for name in ("old_dirs", "old_stps", "ro")})
        """The optimizer's state after the step."""
        self._x, self._loss, self._grad = _flattened(params), state.prev_loss, state.prev_flat_grad
        self._evals = self._iters = self._began = torch.zeros_like(state.step)
        # Of a line search: its interval, whether the second end is the lower one, and how it went on.
        self._ends = (self._start, self._start)
        self._is_second = self._zooms = self._is_slow = self.stuck

    @property
    def params(self) -> Params:
        """The parameters where members are to be evaluated; those of members that are done are their last."""
        return _restored(where(self.searching & (self._evals > 0), self._x + self._move, self._x), self._like)

    @property
    def _move(self) -> Tensor:
        return self.state.d * per_model(self.state.t, self.state.d)

    @property
    def _start(self) -> tuple[Tensor, ...]:
        """Where line searches start: length, loss, slope, gradient."""
        loss, grad = self.state.prev_loss, self.state.prev_flat_grad
        return torch.zeros_like(loss), loss, _dot(grad, self.state.d).double(), grad

    def tell(self, losses: Tensor, grads: Params, finite: Tensor) -> None:
        """Go on with the losses ``[M]`` and gradients of :attr:`params`; those that are not ``finite`` count as infinite."""
        loss, grad = torch.where(finite, losses.double(), torch.inf), _flattened(grads)
        is_first, k = not bool(self._evals.any()), self._numbers
        self._evals = self._evals + self.searching
        self.state = self.state._replace(func_evals=self.state.func_evals + self.searching)
        if is_first:
            self._loss, self._grad, started = loss, grad, self.searching & finite
            self.state = self.state._replace(step=self.state.step + started)
            self.searching = begins = started & (grad.abs().amax(1) > k["tolerance_grad"])
        else:
            ended = self._searched(loss, grad) if self._is_wolfe else self._moved(loss, grad)
            move = self._move
            self._x = where(ended, self._x + move, self._x)
            done = (self._iters >= k["max_iter"]) | (self._evals >= self._max_eval)
            done |= (self._grad.abs().amax(1) <= k["tolerance_grad"]) | (move.abs().amax(1) <= k["tolerance_change"])
            done |= (self._loss - self.state.prev_loss).abs() < k["tolerance_change"]
            self.stuck = self.stuck | (ended & (self.state.t == 0))
            self.searching, begins = self.searching & ~(ended & done), ended & ~done
        if bool(begins.any()):
            self._iterate(begins)

    def _iterate(self, who: Tensor) -> None:
        """Begin an iteration, with a new direction, for some members."""
        state, grad, k = self.state, self._grad, self._numbers
        change, move = grad - state.prev_flat_grad, self._move
        curvature = _dot(change, move)
        pushed = who & (curvature > 1e-10)
        new = pushed.nonzero()[:, 0]
        places = new, state.num_pairs[new] % state.ro.shape[1]
        state.old_dirs[places], state.old_stps[places], state.ro[places] = change[new], move[new], 1 / curvature[new]
        scale = torch.where(pushed, curvature / _dot(change, change), state.H_diag)
        loss, before = where(who, (self._loss, grad), (state.prev_loss, state.prev_flat_grad))
        state = state._replace(prev_loss=loss, prev_flat_grad=before, H_diag=scale)
        state = state._replace(n_iter=state.n_iter + who, num_pairs=state.num_pairs + pushed)
        rows = who.nonzero()[:, 0]
        length = torch.where(state.n_iter == 1, (1 / grad.abs().sum(1)).clamp(max=1).double(), 1.0) * k["lr"]
        direction = state.d.index_copy(0, rows, _direction(state, grad, rows))
        self.state = state._replace(d=direction, t=torch.where(who, length, state.t))
        self._iters = self._iters + who
        is_flat = who & (_dot(grad, direction) > -k["tolerance_change"])
        # The last point of a step without line search is not evaluated.
        last = who & ~is_flat & (self._iters >= k["max_iter"]) & (not self._is_wolfe)
        self._x = where(last, self._x + self._move, self._x)
        self.searching = self.searching & ~is_flat & ~last
        self._ends = where(who, (self._start, self._start), self._ends)
        self._began = torch.where(who, self._evals, self._began)
        self._zooms, self._is_slow = self._zooms & ~who, self._is_slow & ~who

    def _moved(self, loss: Tensor, grad: Tensor) -> Tensor:
        """Take the point of a fixed step as it is; where it is not finite, stay, and forget the pairs that led there."""
        moved = self.searching & loss.isfinite()
        self._loss, self._grad = where(moved, (loss, grad), (self._loss, self._grad))
        fresh = {"t": 0, "n_iter": 0, "ro": 0, "H_diag": 1}
        held = {name: getattr(self.state, name) for name in fresh}
        reset = {name: torch.full_like(held[name], value) for name, value in fresh.items()}
        self.state = self.state._replace(**where(self.searching & ~moved, reset, held))
        return self.searching

    def _searched(self, loss: Tensor, grad: Tensor) -> Tensor:
        """Advance line searches by an evaluation; returns the members whose search ends, at the length in the state."""
        state, start, (one, two), is_second = self.state, self._start, self._ends, self._is_second
        new = state.t, loss, _dot(grad, state.d).double(), grad
        begins, zooms = self.searching & ~self._zooms, self.searching & self._zooms
        low, high = where(is_second, (two, one), (one, two))
        too_high = loss > start[1] + 1e-4 * state.t * start[2]
        is_flat, is_out = new[2].abs() <= -0.9 * start[2], self._evals > self._max_eval
        # At first the interval is that between the last two points, and grows until it holds a minimum.
        holds = too_high | ((self._evals - self._began > 2) & (loss >= one[1]))
        accepted = begins & ~is_out & ~holds & is_flat
        grows = begins & ~is_out & ~holds & ~is_flat & (new[2] < 0)
        # Then the new point replaces the higher end, or becomes the lower one.
        worse = too_high | (loss >= low[1])
        flips = zooms & ~worse & ~is_flat & (new[2] * (high[0] - low[0]) >= 0)
        to_second = torch.where(zooms, worse ^ is_second, ~accepted)
        previous = one[0]
        one, two = where(flips, (low, low), (one, two))
        one = where(begins & is_out, start, one)
        one, two = where(self.searching & ~to_second, new, one), where(self.searching & to_second, new, two)
        self._is_second = is_second = torch.where(zooms & ~worse, is_second, ~accepted & (one[1] > two[1]))
        self._zooms = self.searching & (self._zooms | ~(grows | accepted))
        least, most = torch.minimum(one[0], two[0]), torch.maximum(one[0], two[0])
        is_small = self._zooms & ((most - least) * state.d.abs().amax(1) < self._numbers["tolerance_change"])
        ended = self.searching & (accepted | (zooms & ~worse & is_flat) | is_small | is_out)
        bounds = where(grows, (state.t + 0.01 * (state.t - previous), state.t * 10), (least, most))
        length = _cubic_minimum(one, two, *bounds)
        # Away from an end of the interval, if the search is there twice in a row.
        margin = 0.1 * (most - least)
        is_near = self._zooms & (torch.minimum(most - length, length - least) < margin)
        leaves = is_near & (self._is_slow | (length >= most) | (length <= least))
        inside = torch.where((length - most).abs() < (length - least).abs(), most - margin, least + margin)
        length, self._is_slow = torch.where(leaves, inside, length), is_near & ~leaves
        self._ends = where(grows, two, one), two
        best = where(is_second, two, one)
        self._loss, self._grad = where(ended, (best[1], best[3]), (self._loss, self._grad))
        self.state = state._replace(t=where(ended, best[0], torch.where(self.searching, length, state.t)))
        return ended


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def _cubic_minimum(one: Any, two: Any, low: Tensor, high: Tensor) -> Tensor:
    """The minimum in bounds of the cubic through two points, by length, loss and slope; or else the middle of the bounds."""
    (x1, f1, s1), (x2, f2, s2) = where(one[0] <= two[0], (one[:3], two[:3]), (two[:3], one[:3]))
    d1 = s1 + s2 - 3 * (f1 - f2) / (x1 - x2)
    root = (d1 * d1 - s1 * s2).sqrt()
    least = x2 - (x2 - x1) * ((s2 + root - d1) / (s2 - s1 + 2 * root))
    # Of an infinite loss there is no cubic.
    return torch.where(least.isnan(), (low + high) / 2, least.maximum(low).minimum(high))


def _direction(state: Any, grad: Tensor, rows: Tensor) -> Tensor:
    """Minus the approximate inverse Hessian times the gradient, for members at ``rows``: two loops over their pairs."""
    count, size, pairs = state.num_pairs[rows], state.ro.shape[1], []
    # From the latest pair to the first; places of the ring that hold none yet are zero and change nothing.
    backs = torch.arange(1, 1 + min(int(count.max()), size), device=count.device)
    places = rows * size + (count - backs[:, None]) % size
    changes, moves, rest = state.old_dirs.flatten(0, 1), state.old_stps.flatten(0, 1), -grad[rows]
    for place, ro in zip(places, state.ro.flatten()[places], strict=True):
        change, move = changes.index_select(0, place), moves.index_select(0, place)
        share = _dot(move, rest) * ro
        rest = torch.addcmul(rest, change, share[:, None], value=-1)
        pairs.append((change, move, ro, share))
    result = rest * state.H_diag[rows, None]
    for change, move, ro, share in reversed(pairs):
        result = torch.addcmul(result, move, (share - _dot(change, result) * ro)[:, None])
    return result
