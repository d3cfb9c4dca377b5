"""Which calls are compared with members alone, and what a difference says."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import optree
import torch
from torch import Tensor, nn

from hfta_func._torch import inside_transform, num_dispatch_modes
from hfta_func._tree import leaves
from hfta_func.errors import HFTAError, RandomnessError, StateError, VerifyError
from hfta_func.models.padding import padding_of
from hfta_func.models.sizes import PRESENT, SIZE
from hfta_func.verify.alone import Case, Output, Results, in_float64, noting, same
from hfta_func.verify.compare import ROUNDING, Difference, difference, has_failed, origin
from hfta_func.verify.held import Held, OneCall
from hfta_func.verify.reached import Reached

Verify = Literal["first"] | bool

_KNOWN = object()
_NOWHERE = "no module's output differs, so it is what the function makes of them, a buffer or a parameter's gradient"
_MOST = 16
"""Most kinds of calls whose first one is compared: batches whose shapes always change are compared at 10, 100, ... only."""


class Oracle:
    """Compares calls with members that run alone: the first of each kind, and calls 10, 100, 1,000, ...

    Args:
        verify: True; "first" for the first calls only; False for none.
        func: The user's function.
        model: The model whose counters go on; it is not kept.

    Attributes:
        calls: How many calls there were.
        verified: The numbers of those that were compared.
    """

    def __init__(self, verify: Verify, func: Any, model: nn.Module):
        self._func, self._model, self._first = func, weakref.ref(model), verify is not False
        self.calls, self.verified, self._kinds = 0, list[int](), set[Any]()
        self._next = 10 if verify is True else float("inf")
        # What calls change in Python; all that functions hold, until the first call is compared.
        self.changing: Held | None = None
        self.has_warned = self.is_comparing = False
        # Whether the model has generators of its own, once a member has run.
        self.has_generators: bool | None = None
        # What more of gradients needs no judge, which takes as long as several steps: rounding alone was found to move them.
        self.rounding = 0.0

    def __call__(self, keys: Tensor, batch: Any = _KNOWN) -> Trial | None:
        """Count a call; what compares it, where it is compared.

        Args:
            keys: ``int64[M]``.
            batch: The batch; none where the call is known to be of a kind that was compared.
        """
        self.calls += 1
        kind = None if batch is _KNOWN or not self._first else _kind(keys, batch)
        is_new = kind is not None and kind not in self._kinds and len(self._kinds) < _MOST
        self.is_comparing = (is_new or self.calls >= self._next) and _can_compare(keys)
        if not self.is_comparing:
            return None
        self._kinds.add(kind)
        while self.calls >= self._next:
            self._next *= 10
        trial = Trial(self, self.reached(keys.device), batch is _KNOWN)
        self.changing = self.changing or trial.before
        return trial

    def reached(self, device: torch.device) -> Reached:
        """What calls can reach, and may change, in Python."""
        return Reached(self._func, self._model(), device=device)

    def as_one_call(self, run: Callable[..., Any], count: int) -> OneCall | None:
        """``run`` for groups of ``count`` members whose calls are to count as one, where calls change what functions hold."""
        if self.changing is None or torch.compiler.is_compiling():
            return None
        return OneCall(run, self.changing.again(), count)

    def is_next(self) -> bool:
        """Whether the next call is compared, of whatever kind it is."""
        return self.calls + 1 >= self._next


def _kind(keys: Tensor, batch: Any) -> Any:
    parts, layout = optree.tree_flatten(batch, none_is_leaf=True)
    shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in parts]
    return layout, *shapes, keys.shape[0]


def _can_compare(keys: Tensor) -> bool:
    """Whether values can be looked at: not inside of other computations, or of what observes operators."""
    if torch.compiler.is_compiling() or inside_transform() or num_dispatch_modes():
        return False
    device = keys.device.type
    return device not in ("meta", "xla") and not (device == "cuda" and torch.cuda.is_current_stream_capturing())


class Trial:
    """A call that is compared; made before it, and called behind it with its results."""

    def __init__(self, oracle: Oracle, reached: Reached, is_replayed: bool):
        self._oracle, self._reached, self.before, self._is_replayed = oracle, reached, reached.held, is_replayed
        # Attributes that are other in each run of one member.
        self._clocks: set[str] = set()

    def __call__(self, case: Case, results: Results, members: Sequence[int] | None = None) -> None:
        """Compare; raises a VerifyError that names what differs, and the first module that does.

        Args:
            case: The call.
            results: What it gave for all members.
            members: Those to compare; the first and the last, or of padded ones the first of every size, by default.
        """
        if self._oracle.changing is self.before:
            self._oracle.changing = self.before.changed()
        written = {x.data_ptr() for x, *_ in changing.tensors} if (changing := self._oracle.changing) else set()
        for path, x in case.shared.items() if written else ():
            if x.data_ptr() in written:
                raise StateError(f"a call writes '{path}', which all members share; leave its module in eval mode")
        after = self.before.again()
        self.before.restore(after)
        left = self.before
        try:
            for member in _chosen(case) if members is None else members:
                self._compare(case, results, member)
            self._oracle.verified.append(self._oracle.calls)
            left = after
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            # Compare no more.
            self._oracle._first, self._oracle._next = False, float("inf")
            left = after
            why = "there is no memory left to run a member alone and compare, so that calls are no longer verified"
            warnings.warn(f"{why}; pass verify=False to say so yourself", stacklevel=2)
        finally:
            # Members have left generators as they were before the call, as they are after an error.
            left.restore(self.before)
            # The next call may be recorded, which asks nobody whether it is compared.
            self._oracle.is_comparing = False

    def _compare(self, case: Case, results: Results, member: int) -> None:
        eps = 0.0 if case.autocast is None else torch.finfo(case.autocast).eps
        array = case.of_member(results, member)
        try:
            alone = self._alone(case, member)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            # PyTorch alone may refuse what fails a member of an array, such as a dropout rate of 1.5 or a target of NaN.
            if has_failed(array) and not isinstance(error, HFTAError):
                return
            raise
        if (met := difference(array, alone, eps, self._oracle.rounding)) is None:
            return
        if met.kind == "attribute":
            again, before = self._alone(case, member)["attribute"], alone["attribute"]
            if clocks := {path for path in before if path not in again or not torch.equal(before[path], again[path])}:
                self._clocks |= clocks
                return self._compare(case, results, member)
        try:
            # What rounding could explain shows in any two members, as well as in all.
            is_small = difference(array, alone, max(eps, ROUNDING)) is None
            judged = self._judged(case, member, is_small, array, eps)
            if judged is None and is_small and met.kind == "gradient":
                self._oracle.rounding = ROUNDING
            if judged is None and (self._is_replayed or not is_small):
                # A replayed call must be what the array computes itself, and any call what the next one computes.
                again = case.of_member(self._again(case, same, None, False), member)
                judged = difference(array, again, eps, judged=False)
        except (RuntimeError, ValueError, TypeError, HFTAError):
            # What does not run in float64 gets more room for rounding.
            dtypes = [leaf.dtype for leaf in leaves(case.trees) if leaf.is_floating_point()]
            eps = max([eps, *(torch.finfo(dtype).eps for dtype in dtypes)]) ** 0.5
            judged = difference(array, alone, eps, judged=False)
        if judged is not None:
            is_steady = difference(self._alone(case, member), alone, eps) is None
            raise VerifyError(self._text(case, member, judged if judged.kind == met.kind else met, is_steady))

    def _judged(self, case: Case, member: int, by_two: bool, array: Results, eps: float) -> Difference | None:
        """What differs in float64, of an array of all members or of this one and another."""
        alone = self._alone(case, member, in_float64, judged=True)
        if by_two and difference(array, alone, eps) is None:
            return None
        count = case.keys.shape[0]
        pair = [member, (member + 1) % count] if by_two and count > 2 and padding_of(case.model) is None else None
        with torch.random.fork_rng([]):
            again = self._again(case, in_float64, None, True, pair)
        return difference(case.of_member(again, member if pair is None else 0), alone, 0.0)

    def _again(self, case: Case, cast: Any, watch: Any, judged: bool, members: Any = None) -> Results:
        try:
            return case.again(cast, watch, judged, members)
        finally:
            self.before.restore()

    def _alone(
        self, case: Case, member: int, cast: Any = same, watch: Any = None, judged: bool = False, again: bool = False
    ) -> Results:
        """The results of a member alone; after it, all that functions hold is as before."""
        held, models, begun = [self.before], list[Any](), time.perf_counter()

        def start(model: Any) -> None:
            models.append(model)
            if self._oracle.has_generators is not False:
                generators = Reached(model, device=case.keys.device).held.generators
                generators = [x for x in generators if all(x[1] is not y[1] for y in self.before.generators)]
                held.append(Held(generators=generators))
                self._oracle.has_generators = bool(generators)
            if watch is not None:
                watch(model)

        try:
            alone = case.alone(member, cast, start, judged)
            dropped = [*alone.pop("dropped", {})]
            why = f"the model writes its buffer '{''.join(dropped[:1])}' in eval mode, where an array drops it"
            # A cache is recomputed to the same values.
            if dropped and difference(case.alone(member, cast, lambda model: None, judged, models[0]), alone, 0.0):
                cure = "write it in train mode only, or evaluate by fit(evaluate=...) or an Ensemble, which keep it"
                raise StateError(f"{why}; {cure}")
        finally:
            moved = [each.restore() for each in held]
        if any(moved) and not again:
            # Another thread may have drawn, such as one that loads batches: then the generator moves without a call, too, or
            # a second call does not move it.
            time.sleep(time.perf_counter() - begun)
            if not self.before.restore():
                return self._alone(case, member, cast, watch, judged, True)
        for name in filter(None, moved if again else ()):
            why = f"the model or the loss draws from the generator of {name}, so that all members would share its noise"
            cure = "draw by torch.randn and the like, which take the member's own key"
            raise RandomnessError(f"{why}; {cure}, or in the collate_fn of a DatasetLoader")
        alone["attribute"] = {path: x for path, x in alone["attribute"].items() if path not in self._clocks}
        if dropped and not self._oracle.has_warned:
            self._oracle.has_warned = True
            warnings.warn(f"{why}; write it in train mode if later calls are to find it", stacklevel=2)
        names = sorted(filter(None, map(self._reached.name_of, alone.pop("outside", {}).values())))
        if names and not self._oracle.has_warned:
            self._oracle.has_warned = True
            first, *others = names
            more = f" and {len(others)} more" if others else ""
            cure = "make it a submodule of the model, or call requires_grad_(False) on it if it is to be frozen"
            why = f"the loss depends on {first}{more}, which requires grad but is not the model's and is not trained"
            warnings.warn(f"{why}; {cure}", stacklevel=2)
        return alone

    def _text(self, case: Case, member: int, met: Difference, is_steady: bool) -> str:
        page = "see 'What is not guarded' in the documentation"
        cure = f"run members one by one with chunk_size=1, in ordinary PyTorch, or {page}"
        if padding_of(case.model) is not None:
            cure = "give all models one size there, or stack each size as an array of its own"
        if not is_steady:
            clocks = "as by a clock, an iterator, an array of NumPy or a class attribute"
            cure = f"count in a number, list or dict that the function holds, pass it in the batch, or {page}"
            cure = f"alone, too, a second call gives something else, {clocks}; {cure}"
        return f"model {member}, call {self._oracle.calls}: {met}; {self._where(case, member)}; {cure}"

    def _where(self, case: Case, member: int) -> str:
        for cast, judged, eps in ((in_float64, True, 0.0), (same, False, 0.0)):
            array, alone = list[Output](), list[Output]()
            try:
                self._again(case, cast, noting(array, case.keys.shape[0]), judged)
                self._alone(case, member, cast, noting(alone), judged)
            except (RuntimeError, ValueError, TypeError, HFTAError):
                continue
            if name := origin(array, alone, member, {inner: path for path, inner in case.paths(member).items()}, eps):
                return f"the first module that differs, or whose input does, is {name}"
        return _NOWHERE


def _chosen(case: Case) -> list[int]:
    """The first and the last member, or of padded ones the first of every size."""
    count, buffers = case.keys.shape[0], case.trees[1]
    if padding_of(case.model) is None:
        return [*dict.fromkeys((0, count - 1))]
    sizes = [leaf.tolist() for path, leaf in buffers.items() if path.rpartition(".")[2] in (SIZE, PRESENT)]
    firsts = {size: member for member, size in reversed([*enumerate(zip(*sizes, strict=True))])}
    return sorted(firsts.values())
