"""Lowerings that are timed where they run, and kept on disk: one file for a processor, a number of threads and a version.

A case is settled once in a process: by its file, by a run that is resumed or the process that started this one, or by a
measurement in one of the first eager calls. Measuring may take a share of the time since it began. A record of a step settles
what it takes, as does a file of a run; what nobody has measured until then is the table's for the rest of the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._kernels import native
from hfta_func._torch import expected, is_wrapped, num_dispatch_modes, num_recorders
from hfta_func.rules._lowering import TIMED, Case, known_lowerings

_CLEAR, _MARGIN, _NOISE, _HOPELESS = 1.25, 1.1, 2.0, 3.0
"""How much faster than the table's choice another must be, within what a choice is close, how far two timings of one may be
apart, and how much slower than the best a first call may be, kernels prepared, before it is left out."""
_PREPARATION = 0.002
_SHARE, _LEAST = 0.05, 1.0
"""The share of the time since measuring began that it may take, and the seconds that this is at least a share of."""


class Measured(NamedTuple):
    """A choice of a lowering; of none if the table decides."""

    lowering: str
    reason: str
    is_close: bool = False  # to be made once more in a later process


_settled: dict[tuple[int, str], Measured] = {}
_given: dict[str, Measured] = {}
_waiting: set[tuple[int, str]] = set()
_closed: set[tuple[Any, ...]] = set()
_costs: dict[tuple[int, str], float] = {}
"""The seconds that a measurement may take which was given up: more than it had."""
_lock = threading.Lock()
_began = 0.0
_spent = 0.0
_lent: int | None = None
version = 0
"""How often something has been settled."""
pinned = ""
"""A digest of choices that were given to this process and are not those of its file."""


def is_on() -> bool:
    """Whether lowerings are measured, and measured ones used; not if ``HFTA_FUNC_MEASURE=0``."""
    return os.environ.get("HFTA_FUNC_MEASURE") != "0"


now = time.perf_counter


def seconds() -> float:
    """A clock for what computes here: of one thread, time that others take from it does not count."""
    return time.thread_time() if torch.get_num_threads() == 1 else now()


def threads() -> int:
    """The number of threads that choices are made for."""
    return _lent or torch.get_num_threads()


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """A block in which choices stay those for the present number of threads."""
    global _lent
    before, _lent = _lent, threads()
    try:
        yield
    finally:
        _lent = before


def chosen(case: Case) -> Measured | None:
    """What was chosen for a case by measurement; None if the table decides."""
    if case.op not in TIMED or case.device != "cpu" or case.tangents or not is_on():
        return None
    key = threads(), _text(case)
    known = _settled.get(key)
    if known is None:
        known = _given.get(key[1]) or _kept(key[0]).get(key[1])
        if known is None and num_recorders():
            known = Measured("", "")
        if known is None:
            return None
        _settle(key, known)
    return known if known.lowering in known_lowerings(case.op) else None


def is_open(call: tuple[Any, ...], tensors: Sequence[Tensor]) -> bool:
    """Whether the lowerings of a :func:`call` of these tensors may be timed now."""
    case: Case = call[1]
    if case.device != "cpu" or case.compiling or case.tangents or num_dispatch_modes() or call in _closed:
        return False
    # Outside of other transforms, tensors are ordinary ones.
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and not is_wrapped(x) for x in tensors)
    return plain and is_on() and _lent is None


def call(case: Case, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What it depends on whether there is something to time: the case, and which of these tensors need gradients."""
    needs = torch.is_grad_enabled() and tuple([x.requires_grad for x in tensors])
    return threads(), case, needs


def close(call: tuple[Any, ...]) -> None:
    """Time nothing in such calls any more."""
    _closed.add(call)


def measure(case: Case, default: str, names: Iterable[str], run: Callable[[str], Tensor], takes: float) -> bool:
    """Settle a case by timing ``run`` of the table's choice and of other lowerings; whether there was time for that.

    A run is expected to take so many seconds. If runs take longer, measuring ends as soon as its share of the time is spent,
    and begins again when there is twice as much; until then the table decides.
    """
    global _spent, _began
    key = threads(), _text(case)
    others = [name for name in dict.fromkeys(names) if name != default]
    known = _settled.get(key) or _given.get(key[1]) or _kept(key[0]).get(key[1])
    again = known is not None and known.is_close and key not in _settled
    if (known is not None and not again) or not others:
        return True
    start = now()
    _began = _began or start
    costs = _costs.get(key, (3 * takes + _PREPARATION / 2) * (1 + len(others)))
    left = _SHARE * max(_LEAST, start - _began) - _spent
    # Another thread that measures now would disturb this one.
    if costs > left or not _lock.acquire(blocking=False):
        _waiting.add(key)
        return False
    try:
        times = _times([default, *others], run, start + left)
    except TimeoutError:
        _costs[key] = 2 * max(costs, now() - start)
        _waiting.add(key)
        return False
    finally:
        _lock.release()
        _spent += now() - start
    _waiting.discard(key)
    if not times:
        _settle(key, known or Measured("", ""))
        return True
    fastest, *rest = sorted(times, key=lambda name: times[name])
    gain = times[default] / times[fastest]
    is_close = not again and bool(rest) and times[rest[0]] < _MARGIN * times[fastest]
    if gain > _CLEAR:
        choice = Measured(fastest, f"measured here: {gain:.1f}x of {default}", is_close)
    else:
        choice = Measured(default, "measured here: no other is much faster", is_close)
    _settle(key, choice)
    _keep(key, choice)
    return True


def _times(names: list[str], run: Callable[[str], Tensor], until: float) -> dict[str, float]:
    """The least seconds of each that is not given up; nothing if they are too noisy. No run begins after ``until``."""
    layout: Tensor | None = None

    def timed(name: str) -> float:
        nonlocal layout
        if now() > until:
            raise TimeoutError
        start = seconds()
        result = run(name)
        # What follows is used to the layout that the table's choice makes.
        if layout is not None and result.stride() != layout.stride():
            torch.empty_like(layout).copy_(result)
        took, layout = seconds() - start, result if layout is None else layout
        return took

    # The system hands memory out slowly: once there is enough for a few results, no candidate waits for it.
    result = run(names[0])
    torch.zeros(4 * result.numel(), dtype=result.dtype)
    times: dict[str, float] = {}
    for name in names:
        first = timed(name)
        best = min(times.values(), default=float("inf"))
        if first > _HOPELESS * best + _PREPARATION:
            continue
        least = [timed(name)]
        if least[0] <= best * _MARGIN**2:
            least.append(timed(name))
            if max(least) > _NOISE * min(least):
                least = sorted([*least, timed(name)])[:2]
                if least[1] > _NOISE * least[0]:
                    return {}
        times[name] = min(least)
    return times


def _settle(key: tuple[int, str], choice: Measured) -> None:
    global version
    _settled[key], version = choice, version + 1


def choices() -> dict[str, Any]:
    """What is chosen in this process, which settles what waits to be measured, too; for :func:`adopt`."""
    for key in _waiting - _settled.keys():
        _settle(key, Measured("", ""))
    _waiting.clear()
    rows = {text: [*row[:2]] for (count, text), row in _settled.items() if count == threads()}
    return {"rows": rows, "pinned": pinned, "threads": threads()}


def adopt(given: Mapping[str, Any], as_worker: bool = True) -> None:
    """Use the :func:`choices` of a run that is resumed; or of the process that this one works for, and measure nothing.

    Both then choose alike, whatever number of threads each has.
    """
    global pinned, version, _lent
    rows = {text: Measured(str(row[0]), str(row[1])) for text, row in given["rows"].items()}
    _given.update(rows)
    if as_worker:
        pinned, _lent = given["pinned"], given["threads"]
    else:
        kept, table = _kept(threads()), Measured("", "")
        others = [(text, row[0]) for text, row in sorted(_given.items()) if row[0] != kept.get(text, table)[0]]
        pinned = hashlib.sha256(repr(others).encode()).hexdigest()[:16] if others else ""
    for key in [key for key in _settled if key[1] in rows]:
        del _settled[key]
    version += 1


def _text(case: Case) -> str:
    shapes = [shape and [*map(expected, shape)] for shape in case.shapes]
    return repr((case.op, expected(case.num_models), case.dtype, shapes, case.shared, case.options))


def _file(count: int) -> pathlib.Path:
    facts = native.processor(), native.compiler() is None, count, torch.__version__, fingerprint()
    return native.folder() / "lowerings" / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _keep(key: tuple[int, str], choice: Measured) -> None:
    # A line that is added in one write is whole, whatever other processes write; where nothing can be written, the choice
    # holds for this process.
    _kept(key[0])[key[1]] = choice
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(key[0])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write(f"\n{json.dumps([key[1], *choice])}".encode())


@functools.cache
def _kept(count: int) -> dict[str, Measured]:
    """The choices of earlier processes for a number of threads; lines that are no choices are passed over."""
    rows: dict[str, Measured] = {}
    with contextlib.suppress(OSError, RuntimeError):
        for line in _file(count).read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                text, lowering, reason, is_close = json.loads(line)
                # Whatever comes after a close choice is the last word.
                rows[str(text)] = Measured(str(lowering), str(reason), bool(is_close) and text not in rows)
    return rows


@functools.cache
def fingerprint() -> str:
    """A hash of the rules and lowerings of this installation of the package."""
    digest = hashlib.sha256()
    for source in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
