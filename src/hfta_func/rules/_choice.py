"""Chooses a lowering for each call, by the table or by an override, and explains the choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from hfta_func._torch import expected, num_dispatch_modes, original
from hfta_func._types import text_table
from hfta_func.calls.body import module_path
from hfta_func.rules import _measured
from hfta_func.rules._lowering import FAMILIES, TABLE, Case, Row, candidates, known_lowerings, titles


@dataclasses.dataclass(eq=False)
class Override:
    """Forced lowerings, active until :meth:`remove` or the end of a ``with`` block; see :func:`override`."""

    lowerings: dict[str, str]
    modules: tuple[str, ...] | None

    def matches(self, path: str) -> bool:
        """Whether it applies to the module at ``path``."""
        return self.modules is None or any(path == name or path.startswith(f"{name}.") for name in self.modules)

    def remove(self) -> None:
        """End the override."""
        _set(tuple(other for other in _overrides if other is not self))

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


_overrides: tuple[Override, ...] = ()

state: str = ""
"""The active overrides, and choices that are another machine's, as text."""


def override(*, modules: str | Iterable[str] | None = None, **lowerings: str) -> Override:
    """Force how operators are lowered, everywhere or inside named submodules.

    Every operator that members can run one after another has ``"loop"``, which does for single layers what partial fusion
    does in HFTA. The choice changes speed and memory, never results beyond rounding.

    Args:
        modules: Paths of submodules, such as ``"layer4"``, which include the modules below them; None for everywhere.
            Operators of the backward pass belong to no module, except a convolution's gradients. Paths are not checked.
        lowerings: One lowering per family or operator, for example ``conv="loop"``; ``all="loop"`` covers all operators.
            ``all="table"`` neither measures lowerings nor uses measured ones, for the same choices on every machine.

    Returns:
        A handle with ``remove()`` that is also a context manager. If several overrides match, the latest decides.

    Raises:
        ValueError: if an operator, family or lowering does not exist.

    Example:
        >>> with rules.override(conv="loop"):
        ...     y = vmap(torch.conv1d)(torch.randn(3, 2, 4, 9), torch.randn(3, 5, 4, 3))
        >>> y.shape
        torch.Size([3, 2, 5, 7])

    References:
        Wang et al., Horizontally Fused Training Array, MLSys 2021, section 3 (partial fusion).
    """
    for name, lowering in lowerings.items():
        known = known_lowerings(name)
        if not known:
            families = sorted(set(FAMILIES.values()))
            raise ValueError(
                f"no operator or family is called '{name}'; name an operator, 'all', or one of the families {families}"
            )
        if lowering not in {*known, "table"}:
            raise ValueError(f"'{name}' has no lowering '{lowering}'; choose one of {sorted(known)}")
    modules = [modules] if isinstance(modules, str) else modules
    added = Override(lowerings, None if modules is None else tuple(modules))
    _set((*_overrides, added))
    return added


def _set(overrides: tuple[Override, ...]) -> None:
    global _overrides, state
    _overrides = overrides
    state = _measured.pinned + (repr(overrides) if overrides else "")


def adopt(choices: dict[str, Any], as_worker: bool = True) -> None:
    """Use the measured choices of another process, see :func:`_measured.adopt`."""
    _measured.adopt(choices, as_worker)
    _set(_overrides)


def is_explaining() -> bool:
    """Whether choices are recorded for :func:`explain`."""
    return _recorded is not None


class Choice(NamedTuple):
    """A row of the table that :func:`explain` prints."""

    op: str
    module: str
    num_models: int
    shapes: tuple[tuple[int, ...] | None, ...]
    shared: tuple[bool, ...]
    lowering: str
    reason: str


_recorded: list[Choice] | None = None


def remembered(decide: Callable[[Case], Any]) -> Callable[[Case], Any]:
    """``decide`` with a cache, which is bypassed while choices are overridden or recorded."""

    @functools.lru_cache(maxsize=4096)
    def known(case: Case, *measured: int) -> Any:
        return decide(case)

    def decided(case: Case) -> Any:
        # Under a dispatch mode the compiler may be tracing with symbolic sizes.
        plain = _overrides or _recorded is not None or num_dispatch_modes()
        return decide(case) if plain else known(case, _measured.version, _measured.threads())

    return decided


def _forced(case: Case, path: str) -> str | None:
    """The lowering that an override asks for, or ``"table"``."""
    for one in reversed(_overrides):
        forced = next((one.lowerings[name] for name in titles(case.op) if name in one.lowerings), None)
        if forced is not None and one.matches(path) and forced in {*known_lowerings(case.op), "table"}:
            return forced
    return None


def _row(case: Case) -> Row:
    """The row of the table for a call."""
    # A choice affects speed only, so these comparisons must not add guards to a graph of symbolic sizes.
    shapes = tuple(shape and tuple(map(expected, shape)) for shape in case.shapes)
    seen = case._replace(shapes=shapes, num_models=expected(case.num_models))
    return next(row for row in TABLE[case.op] if row.when(seen))


def _path() -> str:
    return module_path() if _recorded is not None or any(one.modules is not None for one in _overrides) else ""


def measure(case: Case, impossible: Collection[str], run: Callable[[str], Any]) -> bool:
    """Time the lowerings of a case, see :func:`_measured.measure`; not where one is forced."""
    if _forced(case, _path()) is not None:
        return False
    default = _row(case).lowering
    names = [name for name in candidates(case) if name not in impossible]
    return _measured.measure(case, "grouped" if default in impossible else default, names, run)


def choose(case: Case) -> Choice:
    """The lowering for a call, and why."""
    path = _path()
    forced = _forced(case, path)
    if forced not in (None, "table"):
        chosen = forced, "overridden"
    else:
        chosen = None if forced else _measured.chosen(case)
        # A graph takes long to compile a loop.
        if chosen is None or (case.compiling and chosen.lowering == "loop"):
            chosen = _row(case)[1:]
    choice = Choice(case.op, path, case.num_models, case.shapes, case.shared, *chosen)
    if _recorded is not None and FAMILIES[case.op] != "shape":
        _recorded.append(choice)
    return choice


@remembered
def lowering(case: Case) -> str:
    """The lowering for a call."""
    return choose(case).lowering


def is_simple(op: str) -> bool:
    """Whether an operator has a single row, and choices are neither overridden nor recorded."""
    return len(TABLE[op]) == 1 and not _overrides and _recorded is None


class Explanation(list[Choice]):
    """The calls of operators in the order in which they ran; prints as a table.

    Attributes:
        verified: The calls of a step that were compared with members alone.
    """

    verified: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [("operator", "module", "members", "shapes of one member (* shared)", "lowering", "reason")]
        for choice in self:
            shapes = ", ".join(
                ("*" if shared else "") + str(list(shape))
                for shape, shared in zip(choice.shapes, choice.shared, strict=True)
                if shape is not None
            )
            lines.append((choice.op, choice.module, str(choice.num_models), shapes, choice.lowering, choice.reason))
        compared = ", ".join(map(str, self.verified))
        return text_table(lines, "<" * 6) + (f"\ncompared with members alone: calls {compared}" if compared else "")


def explain(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run ``func(*args, **kwargs)`` and list how each operator was lowered, and why.

    Changes of shape and operators that PyTorch itself batches, such as additions and activations, are left out. A
    convolution chooses the lowerings of its two gradients beforehand, so they are listed in evaluation, too.

    Args:
        func: A training step, an evaluation step, or any function that uses ``vmap``. If it is compiled, the original runs.
        args: Its arguments, for example a state and a batch.
        kwargs: Its keyword arguments.

    Returns:
        A list of choices that prints as a table: operator, module path, members, shapes, lowering, reason.

    Example:
        >>> x, weight = torch.randn(3, 2, 4, 9), torch.randn(3, 5, 4, 3)
        >>> print(rules.explain(vmap(torch.conv1d), x, weight))
        operator     module  members  shapes of one member (* shared)  lowering  reason
        convolution          3        [2, 4, 9], [5, 4, 3]             ...
    """
    global _recorded
    func = original(func)
    before, _recorded = _recorded, Explanation()
    try:
        func(*args, **kwargs)
        _recorded.verified = tuple(getattr(getattr(func, "oracle", None), "verified", ()))
        return _recorded
    finally:
        _recorded = before
