"""Operators, recorded as they run on tensors, and run again without the Python that called them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hfta_func._torch._release import private
from hfta_func._torch.compiler import set_compiling
from hfta_func._torch.levels import pytree
from hfta_func._torch.recorded import Call, Slot, simplified, slots_in

_Mode = private("torch.utils._python_dispatch", "TorchDispatchMode")
_below_autograd = private("torch._C", "_AutoDispatchBelowAutograd")
_set_grad_mode = private("torch._C", "_set_grad_enabled")
_is_zeros = private("torch", "_is_zerotensor")
_functions = [private("torch._C", name) for name in ("_VariableFunctions", "_nn", "TensorBase")]
_aten = torch.ops.aten


class NotReplayableError(Exception):
    """Why a computation cannot be run again as it was recorded."""


DIRECT: dict[Any, Callable[..., Any]] = {}
"""By operator, the function in Python that computes it on a CPU, which can be called without the dispatcher."""

PREPARED: dict[Any, Callable[..., Callable[..., Any] | None]] = {}
"""By operator, ``prepare(*args)``: a faster function for all arguments whose tensors are like these, or None."""

_MADE = {
    *(getattr(_aten, name).default for name in ("arange", "full", "full_like", "new_full", "new_ones", "new_zeros")),
    *(getattr(_aten, name).default for name in ("ones", "ones_like", "scalar_tensor", "zeros", "zeros_like")),
    _aten.arange.start,
    _aten.arange.start_step,
}
"""Operators that make a tensor of numbers alone."""
_SMALL = 1024
"""So many elements are kept rather than made again."""
_MASKS = (torch.bool, torch.uint8)

_recorders = 0


def num_recorders() -> int:
    """How many of the active dispatch modes record a tape: they run kernels on tensors that have values."""
    return _recorders


class Recorder(_Mode):
    """A context that records the operators which run on ``inputs`` and on what becomes of them.

    Tensors that no recorded operator has made are constants of the tape, held by reference. With ``compiling``, operators
    are called as they are in compiled graphs.
    """

    def __init__(self, inputs: Sequence[Tensor], compiling: bool = False):
        super().__init__()
        self._compiling = compiling
        self.why_not: str | None = None
        self.calls: list[Call] = []
        self.constants: dict[Slot, Tensor] = {}
        self.numbers: dict[Slot, Tensor] = {}
        self._slots = WeakTensorKeyDictionary()
        self._bases: dict[Slot, Slot] = {}
        self._views: dict[tuple[Any, ...], Slot] = {}
        self._twins = WeakTensorKeyDictionary()
        self._kept = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._fixed: dict[Slot, Tensor] = {}
        self._fixed_storages: set[int] = set()
        self._written_storages: set[int] = set()
        self._count = 0
        for tensor in inputs:
            self._new(tensor)

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
        if func is _aten.lift_fresh.default:
            # A tensor made of numbers: each replay has one of its own.
            fresh = Slot(self._count)
            self._count += 1
            self.numbers[fresh] = args[0].clone()
            result = func(*args)
            made = self._new(result)
            self.calls.append(Call(_aten.clone.default, (fresh,), {}, made, False, torch.is_grad_enabled()))
            self._note_fixed(result, made, is_made=True)
            return result
        given, named = pytree.tree_map(self.slot, (args, kwargs))
        writes, grad_mode = self._written(func, args, kwargs), torch.is_grad_enabled()
        set_compiling(False)
        try:
            result = func(*args, **kwargs)
        finally:
            set_compiling(self._compiling)
        if isinstance(result, Tensor) and not writes and self._is_seen(result, args):
            return result
        made = pytree.tree_map(self._slot_of_result, result)
        self.calls.append(Call(func, given, named, made, writes, grad_mode))
        if isinstance(result, Tensor):
            self._note_fixed(result, made, func in _MADE)
        return result

    def _is_seen(self, view: Tensor, args: Any) -> bool:
        """Whether a tensor reads the same memory in the same way as one that has a slot; then this becomes its slot, too."""
        if not (args and isinstance(args[0], Tensor)) or view in self._slots:
            return False
        if view.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
            return False
        source = self._slots[args[0]]
        base = self._bases.get(source, source)
        self._views.setdefault((base, *_geometry(args[0])), source)
        slot = self._views.setdefault((base, *_geometry(view)), Slot(self._count))
        self._slots[view] = slot
        if slot < self._count:
            self._twins[view] = True
            return True
        self._count, self._bases[slot] = self._count + 1, base
        return False

    def _note_fixed(self, tensor: Tensor, slot: Slot, is_made: bool) -> None:
        """Note a result that is the same in each replay unless it is written: made of numbers alone, or a view of such."""
        if self._compiling:
            return  # the compiler of a graph computes with such numbers instead of reading them
        storage = tensor.untyped_storage()._cdata
        if storage in self._fixed_storages or (is_made and tensor.numel() <= _SMALL):
            self._fixed_storages.add(storage)
            self._fixed[slot] = tensor

    def fixed(self, outputs: Sequence[Tensor]) -> dict[Slot, Tensor]:
        """Results that are the same in each replay, and that neither an operator nor who gets the outputs writes."""
        others = {*self._written_storages, *(tensor.untyped_storage()._cdata for tensor in outputs)}
        return {slot: one for slot, one in self._fixed.items() if one.untyped_storage()._cdata not in others}

    def slot(self, leaf: Any) -> Any:
        """The slot of a tensor; anything else as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        if _is_zeros(leaf):
            # Forward-mode derivatives make some; a kernel that a mode calls would read their memory.
            self._refuse("a tensor of zeros has no memory")
        if leaf not in self._slots:
            if type(leaf) not in (Tensor, torch.nn.Parameter):
                self._refuse(f"a {type(leaf).__qualname__} has operators of its own")
            self._kept.add(leaf.untyped_storage()._cdata)
            self.constants[self._new(leaf)] = leaf
        return self._slots[leaf]

    def output(self, tensor: Tensor) -> Slot:
        """The slot of a tensor that is an output; each is a tensor of its own, though memory may be shared."""
        slot = self.slot(tensor)
        if self._twins.pop(tensor, False):
            self.calls.append(Call(_aten.detach.default, (slot,), {}, self._new(tensor), False, self.calls[-1].grad_mode))
        return self._slots[tensor]

    def _new(self, tensor: Tensor) -> Slot:
        self._slots[tensor] = slot = Slot(self._count)
        self._count += 1
        return slot

    def _slot_of_result(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        return self._slots[leaf] if leaf in self._slots else self._new(leaf)

    def _check(self, func: Any, args: Any) -> None:
        tags = getattr(func, "tags", None)
        if tags is None:
            self._refuse(f"{func} takes functions")
        elif func is _aten.index.Tensor and not any(one is not None and one.dtype in _MASKS for one in args[1]):
            return  # only how many a mask selects is not known before
        elif torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self._refuse(f"{func} reads the values of a tensor")
        elif torch.Tag.inplace_view in tags or func in (_aten.set_.source_Tensor, _aten.resize_.default):
            self._refuse(f"{func} changes what a tensor is a view of")

    def _written(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operator writes one of its arguments; refuses those that live longer than the computation."""
        writes = False
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            writes = True
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and (
                    leaf not in self._slots or leaf.untyped_storage()._cdata in self._kept
                ):
                    self._refuse(f"{func} writes a tensor that was made before")
                elif isinstance(leaf, Tensor):
                    self._written_storages.add(leaf.untyped_storage()._cdata)
        return writes

    def _refuse(self, why: str) -> None:
        # A model may catch the error.
        self.why_not = self.why_not or why
        raise NotReplayableError(why)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    where = tensor.shape, tensor.stride(), tensor.storage_offset()
    return *where, tensor.dtype, tensor.is_conj(), tensor.is_neg()


class Tape:
    """``tape(inputs) -> outputs``: the recorded operators once more, on other tensors of the same kind.

    Args:
        recorder: What has been recorded.
        inputs: How many inputs there are.
        outputs: The outputs, tensors that were made meanwhile.
    """

    def __init__(self, recorder: Recorder, inputs: int, outputs: Sequence[Tensor]):
        if recorder.why_not is not None:
            raise NotReplayableError(recorder.why_not)
        self.inputs = [Slot(number) for number in range(inputs)]
        self.outputs = [recorder.output(tensor) for tensor in outputs]
        fixed = recorder.fixed(outputs)
        # Tensors that others hold, too, and those that are made of numbers alone.
        self.constants, self.numbers = recorder.constants, {**recorder.numbers, **fixed}
        self.calls = simplified(recorder.calls, self.outputs, fixed)
        self._functions: list[Callable[..., Any]] = []
        self._run: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return len(self.calls)

    def rehearse(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, while it is found out for every operator whether a faster function calls the same."""
        values: dict[Any, Any] = {**self.constants, **self.numbers, **dict(zip(self.inputs, inputs, strict=True))}
        self._functions, self._run, over = [], None, self._over()
        with torch.no_grad(), _below_autograd():
            for call in self.calls:
                _set_grad_mode(call.grad_mode)
                args, kwargs = pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, Slot) else leaf, call[1:3])
                function, result = _fastest(call.operator, args, kwargs)
                self._functions.append(function)
                _assign(values, call.result, result)
                del args, kwargs, result
                for slot in over[len(self._functions) - 1]:
                    values.pop(slot, None)
        self._run = self._compiled()
        return [values[slot] for slot in self.outputs]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for these inputs."""
        assert self._run is not None
        with torch.no_grad(), _below_autograd():
            return self._run(*inputs)

    def _over(self) -> list[list[Slot]]:
        """For every call the tensors that nobody needs after it."""
        slots = [slots_in((call.args, call.kwargs, call.result)) for call in self.calls]
        last = {slot: number for number, used in enumerate(slots) for slot in used}
        held = {*self.outputs, *self.constants, *self.numbers}
        return [sorted({slot for slot in used if last[slot] == number} - held) for number, used in enumerate(slots)]

    def _compiled(self) -> Callable[..., Any]:
        """The calls as one Python function, which forgets every tensor after its last use."""
        names: dict[str, Any] = {f"t{slot}": tensor for slot, tensor in (self.constants | self.numbers).items()}
        names["set_grad_mode"], grad_mode = _set_grad_mode, None
        lines = [f"def run({', '.join(f't{slot}' for slot in self.inputs)}):"]
        over = self._over()
        for number, (call, function) in enumerate(zip(self.calls, self._functions, strict=True)):
            if call.grad_mode != grad_mode:
                grad_mode = call.grad_mode
                lines.append(f"    set_grad_mode({grad_mode})")
            names[f"f{number}"] = function
            given = [_source(leaf, names) for leaf in call.args]
            given += [f"{name}={_source(leaf, names)}" for name, leaf in call.kwargs.items()]
            lines.append(f"    {_target(call.result)} = f{number}({', '.join(given)})")
            if over[number]:
                lines.append(f"    del {', '.join(f't{slot}' for slot in over[number])}")
        lines.append(f"    return [{', '.join(f't{slot}' for slot in self.outputs)}]")
        exec(compile("\n".join(lines), "<replayed step>", "exec"), names)
        return names["run"]


class _Differs(Exception):
    """A function calls another operator, or with other arguments."""


class _Expecting(_Mode):
    """A context in which one operator may be called, with these arguments."""

    def __init__(self, operator: Any, args: Any, kwargs: Any):
        super().__init__()
        self._expected, self._is_called = (operator, args, kwargs), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator, given, named = self._expected
        if self._is_called or func is not operator or not _same((args, kwargs or {}), (given, named)):
            raise _Differs
        self._is_called = True
        return func(*args, **kwargs or {})


def _fastest(operator: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """The fastest function that calls an operator, and what it returns; PyTorch's own bindings read arguments faster."""
    namespace, _, name = operator._schema.name.partition("::")
    bindings = (getattr(part, name, None) for part in _functions) if namespace == "aten" else ()
    for function in bindings:
        if function is not None:
            try:
                with _Expecting(operator, args, kwargs):
                    return function, function(*args, **kwargs)
            except (_Differs, TypeError):
                continue
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if operator in DIRECT and all(tensor.device.type == "cpu" for tensor in tensors):
        prepared = PREPARED[operator](*args, **kwargs) if operator in PREPARED else None
        function = prepared or DIRECT[operator]
        return function, function(*args, **kwargs)
    return operator._op, operator(*args, **kwargs)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return type(a) is type(b) and (a == b or a != a)


def _assign(values: dict[Any, Any], made: Any, result: Any) -> None:
    if isinstance(made, Slot):
        values[made] = result
    elif isinstance(made, (tuple, list)):
        for one, part in zip(made, result, strict=True):
            _assign(values, one, part)


def _target(made: Any) -> str:
    if isinstance(made, Slot):
        return f"t{made}"
    if isinstance(made, (tuple, list)) and made:
        return f"({', '.join(map(_target, made))},)"
    return "_"


def _source(value: Any, names: dict[str, Any]) -> str:
    if isinstance(value, Slot):
        return f"t{value}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_source(one, names) for one in value)}]"
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    name = f"c{len(names)}"
    names[name] = value
    return name
