"""Operators and which tensors they run on, recorded as they run, and which of them a replay needs."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hfta_func._torch._release import private, replaced
from hfta_func._torch.compiler import set_compiling
from hfta_func._torch.dispatcher import operator, out_of_place, with_generator, written_by
from hfta_func._torch.levels import storage_number

_tree: Any = optree
_DispatchMode: Any = private("torch.utils._python_dispatch", "TorchDispatchMode")
_Guards = private("torch._C._dynamo.guards", "TensorGuards")
_is_zeros = private("torch", "_is_zerotensor")
_aten = torch.ops.aten
_random: Any = torch.random
# Whose threads draw nothing: a bar of tqdm has one, and so have notebooks, queues and writers of logs.
_QUIET = {"tqdm", "ipykernel", "IPython", "multiprocessing", "tensorboard"}


class Mode(_DispatchMode):
    """A mode whose dispatch is a plain call: wrapped for the compiler, as by default, the first one imports it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Drawing(Mode):
    """Passes a generator to the random operators of this thread on the CPU, and stands for it beside the process's."""

    def __init__(self):
        super().__init__()
        self._thread, self._process_generator = threading.get_ident(), _random.default_generator
        self._generator: Any = torch.Generator("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator if threading.get_ident() == self._thread else self._process_generator, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seeded, kwargs = with_generator(func), kwargs or {}
        if seeded is not None and kwargs.get("generator") is None:
            devices = [kwargs.get("device"), *(leaf.device for leaf in args if isinstance(leaf, Tensor))]
            if all(device is None or torch.device(device).type == "cpu" for device in devices):
                return seeded(*args, **{**kwargs, "generator": self._generator})
        return func(*args, **kwargs)


@contextlib.contextmanager
def thread_generator() -> Iterator[None]:
    """A block, one at a time, in which this thread draws on the CPU from a generator of its own.

    ``torch.manual_seed``, ``get_rng_state`` and ``fork_rng`` are of it there. It draws the bits that the process's would.
    """
    others = {*threading.enumerate()} - {threading.current_thread()}
    works = [getattr(thread, "_target", None) or type(thread) for thread in others]
    if all(str(work.__module__).partition(".")[0] in _QUIET for work in works):
        # Nobody else draws from the process's meanwhile, and a mode costs some microseconds an operator.
        with torch.random.fork_rng([]):
            yield
        return
    mode = _Drawing()
    with replaced(_random, "default_generator", mode), mode:
        yield


def seed_cpu(seed: int) -> None:
    """Seed the generator that this thread draws from on the CPU."""
    _random.default_generator.manual_seed(seed)


class NotReplayableError(Exception):
    """Why a computation cannot be run again as it was recorded."""


class Slot(int):
    """The number of a tensor of a tape, where a recorded call has a tensor."""


class Call(NamedTuple):
    """A call of an operator."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any  # with a slot for every tensor
    writes: bool
    grad_mode: bool  # some kernels keep more for a backward pass if it is on


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """``is_like(*others)``: whether others have the same types, dtypes, devices, shapes, strides and ``requires_grad``.

    It is never so where one tensor stands twice among the others.
    """
    return _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def mapped(func: Callable[[Any], Any], arguments: Any) -> Any:
    """A function of all leaves among arguments, or results, of an operator."""
    if isinstance(arguments, (tuple, list)):
        return type(arguments)([mapped(func, one) for one in arguments])
    return func(arguments)


def slots_in(tree: Any) -> list[Slot]:
    return [tree] if isinstance(tree, Slot) else [leaf for leaf in _tree.tree_leaves(tree) if isinstance(leaf, Slot)]


def simplified(calls: Sequence[Call], outputs: Sequence[Slot], constants: Iterable[Slot]) -> list[Call]:
    """The calls without those whose results nobody needs, or are constants."""
    used, needed, fixed = set(outputs), [], {*constants}
    for call in reversed(calls):
        results = slots_in(call.result)
        if call.writes or (used.intersection(results) and not fixed.issuperset(results)):
            used.update(slots_in((call.args, call.kwargs)))
            needed.append(call)
    return needed[::-1]


_MADE = {
    *map(operator, ("arange", "arange.start", "arange.start_step", "full", "full_like", "lift_fresh", "new_full")),
    *map(operator, ("new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like")),
}
"""Operators that make a tensor of numbers alone."""
_SMALL = 2**16
"""So many elements are kept rather than made again."""
_MOST = 2**16
"""Calls of a tape: a rollout of 2,048 steps has five times as many, which take 2 GB and a minute to record."""
_MASKS = (torch.bool, torch.uint8)

_unwritten = WeakTensorKeyDictionary()
_recorders = 0


def unwritten(tensor: Tensor) -> Tensor:
    """The same tensor, of which recorders then know that nobody writes it."""
    _unwritten[tensor] = True
    return tensor


def num_recorders() -> int:
    """How many of the active dispatch modes record a tape: they run kernels on tensors that have values."""
    return _recorders


class Recorder(Mode):
    """A context that records the operators which run on ``inputs`` and on what becomes of them.

    Tensors that no recorded operator has made are constants of the tape, held by reference. With ``compiling``, operators
    are called as they are in compiled graphs. Inputs at the positions ``fixed`` have the same values in each replay.
    """

    def __init__(self, inputs: Sequence[Tensor], compiling: bool = False, fixed: Sequence[int] = ()):
        super().__init__()
        self._compiling = compiling
        self.why_not: str | None = None
        self.calls: list[Call] = []
        self.constants: dict[Slot, Tensor] = {}
        self.numbers: dict[Slot, Tensor] = {}
        self._slots: dict[int, tuple[weakref.ref[Tensor], Slot]] = {}
        self._kept = {storage_number(tensor) for tensor in inputs}
        self._fixed: dict[Slot, Tensor] = {}
        self._written_storages: set[int] = set()
        self._count = 0
        self._given = {self._new(tensor): tensor for tensor in inputs}
        self._sources = {Slot(position): inputs[position] for position in fixed}

    def __enter__(self) -> Any:
        global _recorders
        _recorders += 1
        self._before = set_compiling(self._compiling)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        global _recorders
        _recorders -= 1
        set_compiling(self._before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args)
        if len(self.calls) >= _MOST:
            self._refuse(f"it has more than {_MOST:,} operators")
        if func is _aten.lift_fresh.default:
            # A tensor made of numbers: each replay has one of its own.
            numbers, result = args[0].clone(), func(*args)
            fresh, made = self._new(numbers), self._new(result)
            self.numbers[fresh] = numbers
            self.calls.append(Call(_aten.clone.default, (fresh,), {}, made, False, torch.is_grad_enabled()))
            self._note_fixed(result, made, func, ())
            return result
        given, named = mapped(self.slot, args), {name: mapped(self.slot, one) for name, one in kwargs.items()}
        writes, grad_mode = self._written(func, args, kwargs), torch.is_grad_enabled()
        before = set_compiling(False)
        try:
            result = func(*args, **kwargs)
        finally:
            set_compiling(before)
        if func is _aten.detach.default:
            # The same tensor without a history, which a tape has not.
            self._slots[id(result)] = weakref.ref(result), given[0]
            return result
        if (twin := _view_of(func)) is not None:
            # The tensor is another view from now on.
            func, made, writes = twin, self._new(result), False
        else:
            made = mapped(self._slot_of_result, result)
        self.calls.append(Call(func, given, named, made, writes, grad_mode))
        if isinstance(result, Tensor):
            arguments = (leaf for leaf in _tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if storage_number(result) not in map(storage_number, arguments):
                # New memory, perhaps where a tensor was that had been written and is no more.
                self._written_storages.discard(storage_number(result))
            self._note_fixed(result, made, func, slots_in((given, named)))
        return result

    def _note_fixed(self, tensor: Tensor, slot: Slot, func: Any, given: Sequence[Slot]) -> None:
        """Note a result that is the same in each replay: made of numbers alone, or of tensors that are the same."""
        if self._compiling:
            return  # the compiler of a graph computes with such numbers instead of reading them
        sources = [] if func in _MADE else [self._fixed.get(one, self._sources.get(one)) for one in given]
        is_fixed = func in _MADE or (bool(sources) and torch.Tag.nondeterministic_seeded not in func.tags)
        is_fixed &= tensor.numel() <= _SMALL
        if is_fixed and all(one is not None and storage_number(one) not in self._written_storages for one in sources):
            self._fixed[slot] = tensor

    def fixed(self, outputs: Sequence[Tensor]) -> dict[Slot, Tensor]:
        """Results that are the same in each replay, and that neither an operator nor who gets the outputs writes."""
        others = {*self._written_storages, *self._kept, *(storage_number(tensor) for tensor in outputs)}
        return {slot: one for slot, one in self._fixed.items() if storage_number(one) not in others}

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same values in each replay."""
        slot = self._known(tensor)
        return slot in self._fixed or slot in self._sources

    def slot(self, leaf: Any) -> Any:
        """The slot of a tensor; anything else as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        if _is_zeros(leaf):
            # Forward-mode derivatives make some; a kernel that a mode calls would read their memory.
            self._refuse("a tensor of zeros has no memory")
        slot = self._known(leaf)
        if slot is None:
            if type(leaf) not in (Tensor, torch.nn.Parameter):
                self._refuse(f"a {type(leaf).__qualname__} has operators of its own")
            self._kept.add(storage_number(leaf))
            self.constants[slot := self._new(leaf)] = self._given[slot] = leaf
            if leaf in _unwritten:
                self._sources[slot] = leaf
        return slot

    def output(self, tensor: Tensor) -> Slot:
        """The slot of a tensor that is an output; each is a tensor of its own, though memory may be shared."""
        slot = self.slot(tensor)
        if self._given.setdefault(slot, tensor) is not tensor:
            slot, source = self._new(tensor), slot
            self.calls.append(Call(_aten.detach.default, (source,), {}, slot, writes=False, grad_mode=False))
        return slot

    def _new(self, tensor: Tensor) -> Slot:
        slot = Slot(self._count)
        self._slots[id(tensor)] = weakref.ref(tensor), slot
        self._count += 1
        return slot

    def _known(self, tensor: Tensor) -> Slot | None:
        known = self._slots.get(id(tensor))
        # At its address there may have been another one, which is no more.
        return known[1] if known is not None and known[0]() is tensor else None

    def _slot_of_result(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        slot = self._known(leaf)
        return self._new(leaf) if slot is None else slot

    def _check(self, func: Any, args: Any) -> None:
        why = _why_not(func)
        is_view_of_known = _view_of(func) is not None and self._known(args[0]) is not None
        if is_view_of_known and storage_number(args[0]) not in self._kept:
            return
        # Only how many a mask selects is not known before.
        if why and not (func is _aten.index.Tensor and not any(x is not None and x.dtype in _MASKS for x in args[1])):
            self._refuse(f"{func} {why}")

    def _written(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operator writes one of its arguments; refuses those that live longer than the computation."""
        written, _ = written_by(func)
        for leaf in _tree.tree_leaves([args[key] if isinstance(key, int) else kwargs.get(key) for key in written]):
            if self._known(leaf) is None or storage_number(leaf) in self._kept:
                self._refuse(f"{func} writes a tensor that was made before")
            self._written_storages.add(storage_number(leaf))
        return bool(written)

    def _refuse(self, why: str) -> None:
        # A model may catch the error.
        self.why_not = self.why_not or why
        raise NotReplayableError(why)


@functools.cache
def _view_of(func: Any) -> Any:
    """For an operator that changes what a tensor is a view of, such as ``transpose_``, the one that makes the view."""
    twin = out_of_place(func.name()) if torch.Tag.inplace_view in getattr(func, "tags", ()) else None
    return None if twin is None else operator(twin)


@functools.cache
def _why_not(func: Any) -> str:
    """Why an operator cannot be replayed; empty if it can be."""
    tags = getattr(func, "tags", None)
    if tags is None:
        return "takes functions"
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return "reads the values of a tensor"
    if torch.Tag.inplace_view in tags or func in (_aten.set_.source_Tensor, _aten.resize_.default):
        return "changes what a tensor is a view of"
    return ""
