"""Operators, recorded as they run on tensors, and run again without the Python that called them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from hfta_func._torch._release import private
from hfta_func._torch.dispatcher import below_autograd
from hfta_func._torch.recorded import Mode, NotReplayableError, Recorder, Slot, mapped, simplified, slots_in

_tree: Any = optree
_set_grad_mode = private("torch._C", "_set_grad_enabled")
_functions = [private("torch._C", name) for name in ("_VariableFunctions", "_nn", "TensorBase")]


DIRECT: dict[Any, Callable[..., Any]] = {}
"""By operator, the function in Python that computes it on a CPU, which can be called without the dispatcher."""

PREPARED: dict[Any, Callable[..., Callable[..., Any] | None]] = {}
"""By operator, ``prepare(*args)``: a faster function for all arguments whose tensors are like these, or None."""


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
        self.calls = simplified(recorder.calls, self.outputs, fixed)
        # Tensors that others hold, too, and those that are made of numbers alone.
        used = {*self.outputs, *slots_in([call[1:3] for call in self.calls])}
        self.constants = recorder.constants
        self.numbers = {slot: one for slot, one in {**recorder.numbers, **fixed}.items() if slot in used}
        self._functions: list[Callable[..., Any]] = []
        self._run: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return len(self.calls)

    def rehearse(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, while it is found out for every operator whether a faster function calls the same."""
        values: dict[Any, Any] = {**self.constants, **self.numbers, **dict(zip(self.inputs, inputs, strict=True))}
        over = self._over()
        self._functions, self._run = [], None

        def value(leaf: Any) -> Any:
            return values[leaf] if isinstance(leaf, Slot) else leaf

        with torch.no_grad(), below_autograd():
            for call in self.calls:
                _set_grad_mode(call.grad_mode)
                args = mapped(value, call.args)
                kwargs = {name: mapped(value, leaf) for name, leaf in call.kwargs.items()}
                function, result = _fastest(call.operator, args, kwargs)
                self._functions.append(function)
                _assign(values, call.result, result)
                del args, kwargs, result
                for slot in over[len(self._functions) - 1]:
                    values.pop(slot, None)
        self._run = self._compiled(over)
        return [values[slot] for slot in self.outputs]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for these inputs."""
        assert self._run is not None
        with torch.no_grad(), below_autograd():
            return self._run(*inputs)

    def _over(self) -> list[list[Slot]]:
        """For every call the tensors that nobody needs after it."""
        slots = [slots_in((call.args, call.kwargs, call.result)) for call in self.calls]
        last = {slot: number for number, used in enumerate(slots) for slot in used}
        held = {*self.outputs, *self.constants, *self.numbers}
        return [sorted({slot for slot in used if last[slot] == number} - held) for number, used in enumerate(slots)]

    def _compiled(self, over: Sequence[Sequence[Slot]]) -> Callable[..., Any]:
        """The calls as one Python function, which forgets every tensor after its last use."""
        names: dict[str, Any] = {f"t{slot}": tensor for slot, tensor in (self.constants | self.numbers).items()}
        names["set_grad_mode"], grad_mode = _set_grad_mode, None
        lines = [f"def run({', '.join(f't{slot}' for slot in self.inputs)}):"]
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
        exec(_code("\n".join(lines)), names)
        return names["run"]


@functools.lru_cache(256)
def _code(source: str) -> Any:
    """Compiled once for all steps of the same operators, such as those of the folds or trials of a study."""
    return compile(source, "<replayed step>", "exec")


class _Differs(Exception):
    """A function calls another operator, or with other arguments."""


class _Expecting(Mode):
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


_bindings: dict[Any, Callable[..., Any] | None] = {}
"""The binding that calls an operator with arguments of these types, once it is known."""


def _fastest(operator: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """The fastest function that calls an operator, and what it returns; PyTorch's own bindings read arguments faster."""
    key = operator, *map(_type, args), *((name, _type(value)) for name, value in kwargs.items())
    if (known := _bindings.get(key)) is not None:
        return known, known(*args, **kwargs)
    namespace, _, name = operator._schema.name.partition("::")
    bindings = (
        (getattr(part, name, None) for part in _functions) if namespace == "aten" and key not in _bindings else ()
    )
    for function in bindings:
        if function is not None:
            try:
                with _Expecting(operator, args, kwargs):
                    result = function(*args, **kwargs)
            except (_Differs, TypeError):
                continue
            _bindings[key] = function
            return function, result
    _bindings[key] = None
    tensors = [leaf for leaf in _tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if operator in DIRECT and all(tensor.device.type == "cpu" for tensor in tensors):
        prepared = PREPARED[operator](*args, **kwargs) if operator in PREPARED else None
        function = prepared or DIRECT[operator]
        return function, function(*args, **kwargs)
    return operator._op, operator(*args, **kwargs)


def _type(value: Any) -> Any:
    return (list, *map(_type, value)) if isinstance(value, (tuple, list)) else type(value)


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
