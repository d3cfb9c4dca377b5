"""L-BFGS, which evaluates the loss of every member at points of its own choice until its step is done."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, Literal

import torch
from torch import Tensor

from hfta_func._tree import where
from hfta_func._types import Params, PerModel, check_counts, recorded
from hfta_func.errors import HyperparameterError
from hfta_func.optim._base import GradientTransformation, Hyperparams, Range, check_choice, restrict, zero_count
from hfta_func.optim._leafwise import FIELDS

_SLOTS = "func_evals", "n_iter", "d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss"
LBFGSState = namedtuple("LBFGSState", [*FIELDS, *_SLOTS, "num_pairs"])
"""What ``torch.optim.LBFGS`` keeps, by the same names; the pairs of changes that it remembers are a ring ``[M, H, D]``."""
restrict(LBFGSState, lr=Range.POSITIVE, max_iter=Range.AT_LEAST_ONE, max_eval=Range.AT_LEAST_ONE)
restrict(LBFGSState, tolerance_grad=Range.NONNEGATIVE, tolerance_change=Range.NONNEGATIVE)

_C1, _C2 = 1e-4, 0.9
"""The constants of Wolfe's conditions: sufficient decrease and curvature."""


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
        >>> model, target = torch.nn.Linear(1, 1), torch.tensor([[3.0], [5.0]])
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
        flat, count, numbers = flattened(params), zero_count(params), hyperparams.init(params)
        pairs, zero = (
            flat.new_zeros(len(flat), history_size, flat.shape[1]),
            torch.zeros_like(count, dtype=torch.float64),
        )
        fields: dict[str, Any] = {"step": count, "hyperparams": numbers, **dict.fromkeys(("t", "prev_loss"), zero)}
        fields |= {
            "old_dirs": pairs,
            "old_stps": pairs.clone(),
            "ro": pairs[:, :, 0].clone(),
            "H_diag": flat.new_ones(len(flat)),
        }
        fields |= {name: torch.zeros_like(flat) for name in ("d", "prev_flat_grad")}
        return LBFGSState(**{name: count.clone() for name in LBFGSState._fields if name not in fields}, **fields)

    def update(grads: Params, state: LBFGSState, params: Params) -> Any:
        raise HyperparameterError(
            "lbfgs evaluates the loss itself, so it can be no part of a chain, accumulate or partition; give it alone to "
            "make_train_step, and freeze parameters by requires_grad_(False)"
        )

    return GradientTransformation(
        init, update, search=functools.partial(Search, hyperparams, line_search_fn is not None)
    )


def flattened(params: Params) -> Tensor:
    """All parameters of each member in one row ``[M, D]``, complex numbers as pairs; by path, in whatever order they come."""
    leaves = [params[path] for path in sorted(params)]
    reals = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.cat([real.reshape(len(real), -1) for real in reals], 1)


def _restored(flat: Tensor, like: Params) -> Params:
    """The inverse of :func:`flattened`."""
    shapes = {path: torch.view_as_real(like[path]) if like[path].is_complex() else like[path] for path in sorted(like)}
    columns = flat.split([leaf[0].numel() for leaf in shapes.values()], 1)
    reals = {
        path: x.reshape(leaf.shape).to(leaf.dtype) for (path, leaf), x in zip(shapes.items(), columns, strict=True)
    }
    return {
        path: torch.view_as_complex(reals[path]) if leaf.is_complex() else reals[path] for path, leaf in like.items()
    }


class Search:
    """A step of L-BFGS for all members: it says where to evaluate each of them, and is told what comes out.

    Each member is somewhere else in its own iterations and line searches, all of which advance by one evaluation in a call of
    :meth:`tell`, by masks.

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
        self.searching = active
        """``bool[M]``, the members that are to be evaluated at :attr:`point` next."""
        self.x = self.point = flattened(params)
        # Pairs are written in place.
        self._state = state._replace(**{name: getattr(state, name).clone() for name in ("old_dirs", "old_stps", "ro")})
        self._evals = self._iters = torch.zeros_like(state.step)
        self._loss, self._grad = state.prev_loss, state.prev_flat_grad
        self._bracket: list[Tensor] = []
        self.stuck = torch.zeros_like(active)
        """``bool[M]``, the members whose last search has found no lower loss."""

    @property
    def params(self) -> Params:
        """The parameters at :attr:`point`: those of members that are done are their last."""
        return _restored(self.point, self._like)

    @property
    def state(self) -> Any:
        """The optimizer's state after the step."""
        return self._state._replace(func_evals=self._state.func_evals + self._evals)

    def tell(self, losses: Tensor, grads: Params, finite: Tensor) -> None:
        """Go on with the losses ``[M]`` and gradients of :attr:`params`; those that are not ``finite`` count as infinite."""
        loss, grad = torch.where(finite, losses.double(), torch.inf), flattened(grads)
        is_first, k = not bool(self._evals.any()), self._numbers
        self._evals = self._evals + self.searching
        if is_first:
            self._loss, self._grad, started = loss, grad, self.searching & finite
            self._state = self._state._replace(step=self._state.step + started)
            self.searching = begins = started & (grad.abs().amax(1) > k["tolerance_grad"])
        else:
            ended = self._searched(loss, grad) if self._is_wolfe else self._moved(loss, grad)
            move = self._state.d * self._state.t.to(grad.dtype)[:, None]
            self.x = where(ended, self.x + move, self.x)
            done = (self._iters >= k["max_iter"]) | (self._evals >= self._max_eval)
            done |= (self._grad.abs().amax(1) <= k["tolerance_grad"]) | (move.abs().amax(1) <= k["tolerance_change"])
            done |= (self._loss - self._state.prev_loss).abs() < k["tolerance_change"]
            self.stuck = self.stuck | (ended & (self._state.t == 0))
            self.searching, begins = self.searching & ~(ended & done), ended & ~done
        if bool(begins.any()):
            self._iterate(begins)
        ahead = torch.addcmul(self.x, self._state.d, self._state.t.to(grad.dtype)[:, None])
        self.point = where(self.searching, ahead, self.x)

    def _iterate(self, who: Tensor) -> None:
        """Begin an iteration, with a new direction, for some members."""
        state, grad, k = self._state, self._grad, self._numbers
        change, move = grad - state.prev_flat_grad, state.d * state.t.to(grad.dtype)[:, None]
        curvature = (change * move).sum(1)
        pushed = who & (curvature > 1e-10)
        new = pushed.nonzero()[:, 0]
        places = new, state.num_pairs[new] % state.ro.shape[1]
        state.old_dirs[places], state.old_stps[places], state.ro[places] = change[new], move[new], 1 / curvature[new]
        scale = torch.where(pushed, curvature / (change * change).sum(1), state.H_diag)
        state = state._replace(
            n_iter=state.n_iter + who,
            num_pairs=state.num_pairs + pushed,
            H_diag=scale,
            prev_flat_grad=where(who, grad, state.prev_flat_grad),
            prev_loss=torch.where(who, self._loss, state.prev_loss),
        )
        rows = who.nonzero()[:, 0]
        direction = state.d.index_copy(0, rows, _direction(state, grad, rows))
        length = torch.where(state.n_iter == 1, (1 / grad.abs().sum(1)).clamp(max=1).double(), 1.0) * k["lr"]
        self._state = state = state._replace(d=direction, t=torch.where(who, length, state.t))
        slope = (grad * direction).sum(1).double()
        flat = who & (slope > -k["tolerance_change"])
        self._iters = self._iters + who
        self.searching, who = self.searching & ~flat, who & ~flat
        if self._is_wolfe:
            self._begin_search(who, slope)
            return
        # The last point of a step is not evaluated.
        last = who & (self._iters >= k["max_iter"])
        self.x = where(last, self.x + direction * state.t.to(grad.dtype)[:, None], self.x)
        self.searching = self.searching & ~last

    def _moved(self, loss: Tensor, grad: Tensor) -> Tensor:
        """Take the point of a fixed step as it is; where it is not finite, stay, and forget the pairs that led there."""
        state, is_finite = self._state, loss.isfinite()
        failed, moved = self.searching & ~is_finite, self.searching & is_finite
        self._loss, self._grad = torch.where(moved, loss, self._loss), where(moved, grad, self._grad)
        forgotten = {name: torch.where(failed, 0, getattr(state, name)) for name in ("n_iter", "num_pairs", "t")}
        forgotten |= {"ro": where(failed, 0 * state.ro, state.ro), "H_diag": torch.where(failed, 1, state.H_diag)}
        self._state = state._replace(**forgotten)
        return self.searching

    def _begin_search(self, who: Tensor, slope: Tensor) -> None:
        """Begin a line search from where some members are, along their directions."""
        start = [torch.zeros_like(slope), self._loss, slope, self._grad]
        if not self._bracket:
            self._bracket = [torch.stack([one, one], 1) for one in start]
            self._slope, self._budget = slope, self._max_eval
            self._low, self._tries, self._zooms, self._is_slow = (
                0 * self._iters,
                0 * self._iters,
                ~who & False,
                who & False,
            )
        self._bracket = [_put(old, 0, new, who) for old, new in zip(self._bracket, start, strict=True)]
        self._slope = torch.where(who, slope, self._slope)
        self._budget = torch.where(who, self._max_eval - self._evals, self._budget)
        self._tries = torch.where(who, 0, self._tries)
        self._zooms, self._is_slow = self._zooms & ~who, self._is_slow & ~who

    def _searched(self, loss: Tensor, grad: Tensor) -> Tensor:
        """Advance line searches by an evaluation; returns the members whose search has ended, with the length that it found."""
        state, slope, low, tries = self._state, self._slope, self._low, self._tries
        steepness = (grad * state.d).sum(1).double()
        new = [state.t, loss, steepness, grad]
        brackets, zooms = self.searching & ~self._zooms, self.searching & self._zooms
        lengths, losses, slopes, _ = self._bracket
        too_high = loss > state.prev_loss + _C1 * state.t * slope
        is_flat, is_out = steepness.abs() <= -_C2 * slope, tries >= self._budget
        # Bracketing: the interval between the last two points, once it holds a minimum.
        holds = too_high | ((tries > 1) & (loss >= losses[:, 0]))
        accepted = brackets & ~is_out & ~holds & is_flat
        grows = brackets & ~is_out & ~holds & ~is_flat & (steepness < 0)
        # Zooming: the new point replaces the upper end, or becomes the lower one.
        worse = too_high | (loss >= _pick(losses, low))
        flips = zooms & ~worse & ~is_flat & (steepness * (_pick(lengths, 1 - low) - _pick(lengths, low)) >= 0)
        place = torch.where(zooms, torch.where(worse, 1 - low, low), (~accepted).long())
        start = [torch.zeros_like(loss), state.prev_loss, slope, state.prev_flat_grad]
        before = lengths[:, 0]
        self._bracket = [
            _put(
                _put(_put(old, 1 - low, _pick(old, low), flips), 0, first, brackets & is_out),
                place,
                one,
                self.searching,
            )
            for old, first, one in zip(self._bracket, start, new, strict=True)
        ]
        lengths, losses, slopes, grads = self._bracket
        lower = (losses[:, 0] > losses[:, 1]).long()
        self._low = low = torch.where(accepted, 0, torch.where(zooms & ~worse, low, lower))
        self._zooms = self.searching & (self._zooms | ~(grows | accepted | is_out))
        width = (lengths[:, 1] - lengths[:, 0]).abs() * state.d.abs().amax(1)
        ended = accepted | (zooms & ~worse & is_flat) | (self._zooms & (width < self._numbers["tolerance_change"]))
        ended = self.searching & (ended | is_out)
        least, most = lengths.amin(1), lengths.amax(1)
        bounds = torch.where(grows, state.t + 0.01 * (state.t - before), least), torch.where(grows, state.t * 10, most)
        length = _cubic_minimum(lengths, losses, slopes, *bounds)
        # Away from an end of the interval, if the search is there twice in a row.
        margin = 0.1 * (most - least)
        is_near = self._zooms & (torch.minimum(most - length, length - least) < margin)
        leaves = is_near & (self._is_slow | (length >= most) | (length <= least))
        inside = torch.where((length - most).abs() < (length - least).abs(), most - margin, least + margin)
        self._is_slow = torch.where(self.searching & self._zooms, is_near & ~leaves, self._is_slow)
        length = torch.where(leaves, inside, length)
        self._bracket = [_put(old, 0, old[:, 1], grows) for old in self._bracket]
        self._tries = tries + 1
        self._state = state._replace(
            t=torch.where(ended, _pick(lengths, low), torch.where(self.searching, length, state.t))
        )
        self._loss = torch.where(ended, _pick(losses, low), self._loss)
        self._grad = where(ended, _pick(grads, low), self._grad)
        return ended


def _pick(ends: Tensor, place: Tensor) -> Tensor:
    """One of the two ends of each member, ``[M, 2, ...], [M] -> [M, ...]``."""
    return where(place == 1, ends[:, 1], ends[:, 0])


def _put(ends: Tensor, place: Any, value: Tensor, who: Tensor) -> Tensor:
    """The ends ``[M, 2, ...]``, with a value at the place, 0 or 1, of some members."""
    return torch.stack([where(who & (place == end), value, ends[:, end]) for end in (0, 1)], 1)


def _cubic_minimum(x: Tensor, f: Tensor, slope: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The minimum in bounds of the cubic through two points ``[M, 2]``, or else the middle of the bounds."""
    far = (x[:, 0] <= x[:, 1]).long()
    (x1, f1, s1), (x2, f2, s2) = ([_pick(one, place) for one in (x, f, slope)] for place in (1 - far, far))
    d1 = s1 + s2 - 3 * (f1 - f2) / (x1 - x2)
    root = (d1 * d1 - s1 * s2).sqrt()
    least = x2 - (x2 - x1) * ((s2 + root - d1) / (s2 - s1 + 2 * root))
    # Of an infinite loss there is no cubic.
    return torch.where(least.isnan(), (low + high) / 2, least.maximum(low).minimum(high))


def _direction(state: Any, grad: Tensor, rows: Tensor) -> Tensor:
    """Minus the approximate inverse Hessian times the gradient, for members at ``rows``, by the two loops over their pairs."""
    count, size = state.num_pairs[rows], state.ro.shape[1]
    pairs: list[tuple[Tensor, ...]] = []
    rest = -grad[rows]
    # From the latest pair to the first; places of the ring that hold none yet are zero and change nothing.
    for back in range(1, 1 + min(int(count.max()), size)):
        places = rows, (count - back) % size
        change, move, ro = state.old_dirs[places], state.old_stps[places], state.ro[places]
        share = (move * rest).sum(1) * ro
        rest = torch.addcmul(rest, change, -share[:, None])
        pairs.append((change, move, ro, share))
    result = rest * state.H_diag[rows][:, None]
    for change, move, ro, share in reversed(pairs):
        result = torch.addcmul(result, move, (share - (change * result).sum(1) * ro)[:, None])
    return result
