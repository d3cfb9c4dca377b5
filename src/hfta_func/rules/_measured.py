"""Lowerings that are timed where they run, and kept on disk: one file for a processor, a number of threads and a version.

A case is settled once in a process: by its file, by a run that is resumed or the process that started this one, or by a
measurement in one of the first eager calls. Measuring may take a share of the time since it began, each case included. A
record of a step settles what it takes, as does a file of a run; what nobody has measured until then is the table's for the
rest of the process, and measured in the next one. What takes more than the share of the first second is the table's for good.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfta_func._kernels import native
from hfta_func._torch import expected, is_wrapped, num_dispatch_modes, num_recorders
from hfta_func.rules._lowering import LOWERINGS, Case, known_lowerings

_CLEAR, _HOPELESS, _PREPARATION = 1.25, 2.0, 0.002
"""How much faster than the table's choice another must be, and how much slower than the best a first call may be, besides the
seconds in which it prepares kernels, before it is left out."""
_TURNS, _BUSY = 3, 2.0
"""How often a candidate is timed that does not replace the table's choice; and how many times as long as this thread computes
timing may take. Threads that sleep while they wait for each other take 1.5 times as long on an idle machine, on a busy one 5.
"""
_SHARE, _LEAST = 0.05, 1.0
"""The share of the time since measuring began that it may take, and the seconds that this is at least a share of."""


class Measured(NamedTuple):
    """A choice of a lowering; of none if the table decides."""

    lowering: str
    reason: str


TABLE = Measured("", "")
_settled: dict[tuple[int, str], Measured] = {}
_waiting: dict[tuple[int, str], float] = {}
"""The cases that are not timed yet, and the seconds that each would take, as far as that is known."""
closed: set[tuple[Any, ...]] = set()
"""The calls, see :func:`unmeasured`, that have nothing to time any more."""
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


now, thread_seconds = time.perf_counter, time.thread_time


def seconds() -> float:
    """A clock for what computes here: of one thread, time that others take from it does not count."""
    return thread_seconds() if torch.get_num_threads() == 1 else now()


def threads() -> int:
    """The number of threads that choices are made for."""
    return _lent or torch.get_num_threads()


@contextlib.contextmanager
def lending(count: int) -> Iterator[None]:
    """A block without this many threads, whose choices stay those for the present number."""
    global _lent
    before, number = _lent, torch.get_num_threads()
    _lent = threads()
    torch.set_num_threads(max(1, number - count))
    try:
        yield
    finally:
        _lent = before
        torch.set_num_threads(number)


def _known(key: tuple[int, str]) -> Measured | None:
    return _settled.get(key) or _kept(key[0]).get(key[1])


def chosen(case: Case) -> Measured | None:
    """What was chosen for a case by measurement; None if the table decides."""
    if case.op not in LOWERINGS or case.device != "cpu" or case.tangents or not is_on():
        return None
    key = threads(), _text(case)
    known = _known(key) or (TABLE if num_recorders() else None)
    if known is None:
        return None
    if key not in _settled:
        _settle(key, known)
    return known if known.lowering in known_lowerings(case.op) else None


def unmeasured(case: Case, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """A call whose lowerings may be timed now, by its case and which of these tensors need gradients; otherwise None."""
    call = threads(), case, torch.is_grad_enabled() and tuple([x.requires_grad for x in tensors])
    if num_dispatch_modes() or case.device != "cpu" or case.compiling or case.tangents or call in closed:
        return None
    # Outside of other transforms, tensors are ordinary ones.
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and not is_wrapped(x) for x in tensors)
    return call if plain and is_on() and _lent is None else None


def measure(case: Case, default: str, names: Iterable[str], run: Callable[[str], Any]) -> bool:
    """Settle a case by timing ``run`` of the table's choice and of other lowerings; whether there was time for that.

    What has no time waits, as does all on several threads while other programs have their cores, and the table decides.
    """
    global _spent, _began
    key = threads(), _text(case)
    others = [name for name in dict.fromkeys(names) if name != default]
    if not others or _known(key) is not None:
        return True
    start = now()
    _began = _began or start
    left = _SHARE * max(_LEAST, start - _began) - _spent
    if left <= _waiting.setdefault(key, 0.0):
        return False
    begun, computed = seconds(), thread_seconds()
    times, needed = _times([default, *others], run, left)
    took = seconds() - begun
    _spent += took
    # Times of threads that wait for each other, while other programs have their cores, say nothing.
    if took > _BUSY * (thread_seconds() - computed) or (not times and needed < _SHARE * _LEAST):
        _waiting[key] = max(needed, took)
        return False
    del _waiting[key]
    choice = Measured(default, "measured here: no other is much faster") if times else TABLE
    fastest = min(times, key=lambda name: times[name], default=default)
    if times and times[default] > _CLEAR * times[fastest]:
        choice = Measured(fastest, f"measured here: {times[default] / times[fastest]:.1f}x of {default}")
    _settle(key, choice)
    _keep(key, choice)
    return True


def _times(names: list[str], run: Callable[[str], Any], left: float) -> tuple[dict[str, float], float]:
    """The least seconds of each, none if timing all would take longer than ``left``; and how long it takes."""

    def timed(name: str) -> float:
        start = seconds()
        run(name)
        return seconds() - start

    # The system hands memory out slowly: once there is enough, no candidate waits for it.
    spent = timed(names[0])
    first = timed(names[0]) if spent < left else spent
    needed = spent + 2 * len(names) * first
    if needed > left:
        return {}, needed
    times = {names[0]: first} | {name: timed(name) for name in names[1:]}
    rivals = [name for name in names if times[name] <= _HOPELESS * min(times.values()) + _PREPARATION]
    # Candidates take turns, in both orders, so that no disturbance falls on one of them alone. What takes long varies less,
    # and what would replace the table's choice has to win twice as often.
    few = 1 if first > _PREPARATION else _TURNS
    for turn in range(2 * few):
        if len(rivals) < 2 or (turn >= few and times[names[0]] <= _CLEAR * min(times.values())):
            break
        for name in rivals:
            times[name] = min(times[name], timed(name))
        rivals = [name for name in reversed(rivals) if times[name] <= _HOPELESS * min(times.values())]
    return times, needed


def _settle(key: tuple[int, str], choice: Measured) -> None:
    global version
    _settled[key], version = choice, version + 1


def choices() -> dict[str, Any]:
    """What is chosen in this process, which settles what waits to be measured, too; for :func:`adopt`."""
    for key in _waiting.keys() - _settled.keys():
        _settle(key, TABLE)
    _waiting.clear()
    rows = {text: [*row] for (count, text), row in _settled.items() if count == threads()}
    return {"rows": rows, "pinned": pinned, "threads": threads()}


def adopt(given: Mapping[str, Any], as_worker: bool = True) -> None:
    """Use the :func:`choices` of a run that is resumed; or of the process that this one works for, and measure nothing.

    Both then choose alike, whatever number of threads each has.
    """
    global pinned, version, _lent
    if as_worker:
        pinned, _lent = given["pinned"], given["threads"]
    _settled.update({(threads(), text): Measured(str(row[0]), str(row[1])) for text, row in given["rows"].items()})
    if not as_worker:
        others = [(k, row[0]) for k, row in sorted(_settled.items()) if row[0] != _kept(k[0]).get(k[1], TABLE)[0]]
        pinned = hashlib.sha256(repr(others).encode()).hexdigest()[:16] if others else ""
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
                text, lowering, reason = json.loads(line)
                rows[str(text)] = Measured(str(lowering), str(reason))
    return rows


@functools.cache
def fingerprint() -> str:
    """A hash of the rules, lowerings and kernels of this installation of the package."""
    digest, rules = hashlib.sha256(), pathlib.Path(__file__).parent
    for source in sorted((*rules.glob("*.py"), *pathlib.Path(native.__file__).parent.glob("*.[ch]"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()
