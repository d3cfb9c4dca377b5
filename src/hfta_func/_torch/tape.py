"""Operators, recorded as they run on tensors, and run again without the Python that called them; also as libraries.

A library runs without the compiler's modules, too.
"""

from __future__ import annotations

import collections
import functools
import importlib
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, fx

from hfta_func._torch._release import private
from hfta_func._torch.dispatcher import below_autograd, written_by
from hfta_func._torch.levels import pytree
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
        self._run: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return len(self.calls)

    def rehearse(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, while it is found out for every operator whether a faster function calls the same."""
        values: dict[Any, Any] = {**self.constants, **self.numbers, **dict(zip(self.inputs, inputs, strict=True))}
        over, functions = self._over(), []

        def value(leaf: Any) -> Any:
            return values[leaf] if isinstance(leaf, Slot) else leaf

        with torch.no_grad(), below_autograd():
            for call, ended in zip(self.calls, over, strict=True):
                _set_grad_mode(call.grad_mode)
                args = mapped(value, call.args)
                kwargs = {name: mapped(value, leaf) for name, leaf in call.kwargs.items()}
                function, result = _fastest(call.operator, args, kwargs)
                functions.append(function)
                made = (leaf for leaf in _tree.tree_leaves(result) if isinstance(leaf, Tensor))
                values.update(zip(slots_in(call.result), made, strict=True))
                del args, kwargs, result, made
                for slot in ended:
                    values.pop(slot, None)
        self._run = self._compiled(functions, over)
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

    def _compiled(self, functions: Sequence[Any], over: Sequence[Sequence[Slot]]) -> Callable[..., Any]:
        """The calls as one Python function, which forgets every tensor after its last use."""
        names: dict[str, Any] = {f"t{slot}": tensor for slot, tensor in (self.constants | self.numbers).items()}
        names["set_grad_mode"], grad_mode = _set_grad_mode, None
        lines = [f"def run({', '.join(f't{slot}' for slot in self.inputs)}):"]
        for number, (call, function) in enumerate(zip(self.calls, functions, strict=True)):
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
    parts = _functions if namespace == "aten" and key not in _bindings else ()
    for function in [getattr(part, name) for part in parts if hasattr(part, name)]:
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


_NAMESPACE = "hfta_func::"


class Library(NamedTuple):
    """How a library is called, which lies in a file of its own."""

    captured: tuple[int, ...]  # which of the tensors that functions hold are inputs, after those of the tape
    outputs: tuple[int, ...]  # for each of the tape the number of the library's, or ``~number`` of the input that it is
    operators: tuple[str, ...]  # operators of this package that it calls


def compile_ahead(
    tape: Tape, inputs: Sequence[Tensor], held: Sequence[Tensor], written: int, options: Mapping[str, Any], path: str
) -> Library:
    """Compile a tape for tensors like ``inputs`` to a library at ``path``, a name that ends in ``.so``.

    Args:
        tape: The tape.
        inputs: Its inputs, for their shapes.
        held: Tensors that functions hold, which become inputs where the tape reads them.
        written: How many of the first outputs are written into the first inputs.
        options: The compiler's.
        path: Where the library goes. If it calls other operators, their list lies beside it, a ``.json``.

    Raises:
        NotReplayableError: if the tape reads a tensor that is nowhere among these.
    """
    places = {id(tensor): place for place, tensor in enumerate(held)}
    by_reference = tape.constants.values()
    if any(id(tensor) not in places for tensor in by_reference):
        raise NotReplayableError("it reads a tensor that neither its state nor its functions hold")
    slots = [*tape.inputs, *tape.constants]
    outputs = [*tape.inputs[:written], *tape.outputs[written:]]
    made = [*dict.fromkeys(slot for slot in outputs if slot not in slots)]
    module = _module(tape, slots, made, written)
    inductor: Any = importlib.import_module("torch._inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inductor.aot_compile(module, (*inputs, *by_reference), options={**options, "aot_inductor.output_path": path})
    called = ""
    for listed in pathlib.Path(path).parent.glob("*.wrapper.json"):
        # A library looks for the operators that it calls under its own name.
        called = listed.rename(pathlib.Path(path).with_suffix(".json")).read_text()
    names = {node.target._schema.name for node in module.graph.nodes if hasattr(node.target, "_schema")}
    return Library(
        tuple(places[id(tensor)] for tensor in by_reference),
        tuple(~slots.index(slot) if slot in slots else made.index(slot) for slot in outputs),
        tuple(sorted(one.removeprefix(_NAMESPACE) for one in names if one.startswith(_NAMESPACE) and one in called)),
    )


def _module(tape: Tape, slots: Sequence[Slot], made: Sequence[Slot], written: int) -> fx.GraphModule:
    """The tape's calls as a module: of what is in ``slots``, of which it writes the first ones, to what is in ``made``."""
    graph, module = fx.Graph(), torch.nn.Module()
    nodes: dict[Slot, Any] = {slot: graph.placeholder(f"input{slot}") for slot in slots}
    for slot, tensor in tape.numbers.items():
        module.register_buffer(f"constant{slot}", tensor)
        nodes[slot] = graph.get_attr(f"constant{slot}")

    def assign(made: Any, node: Any) -> None:
        if isinstance(made, Slot):
            nodes[made] = node
        for number, part in enumerate(made if isinstance(made, (tuple, list)) else ()):
            if part is not None:
                assign(part, graph.call_function(getitem, (node, number)))

    twins = _in_place(tape, written)
    # What writes comes once everything else has read the old values.
    for number, call in sorted(enumerate(tape.calls), key=lambda numbered: numbered[0] in twins):
        args, kwargs = pytree.tree_map(lambda leaf: nodes[leaf] if isinstance(leaf, Slot) else leaf, call[1:3])
        node = graph.call_function(twins.get(number, call.operator), tuple(args), kwargs)
        if number not in twins:
            assign(call.result, node)
    done = {slot for number in twins for slot in tape.calls[number].result}
    for slot, output in zip(tape.inputs[:written], tape.outputs, strict=False):
        if slot != output and output not in done:
            graph.call_function(torch.ops.aten.copy_.default, (nodes[slot], nodes[output]))
    graph.output([nodes[slot] for slot in made])
    return fx.GraphModule(module, graph)


def _in_place(tape: Tape, written: int) -> dict[int, Any]:
    """By the number of a call, the operator that writes what the call returns into the inputs that take it.

    Otherwise every one of these results is copied there by a kernel of its own.
    """
    inputs, uses = dict(zip(tape.outputs[:written], tape.inputs, strict=False)), collections.Counter(tape.outputs)
    uses.update(slot for call in tape.calls for slot in slots_in(call[1:3]))
    twins = {}
    for number, call in enumerate(tape.calls):
        namespace, _, name = call.operator._schema.name.partition("::")
        if f"{namespace}::" == _NAMESPACE and hasattr(torch.ops.hfta_func, f"{name}_"):
            twin = getattr(torch.ops.hfta_func, f"{name}_").default
            (leaves,) = (call.args[int(place)] for place in written_by(twin)[0])
            pairs = zip(call.result, leaves, strict=True)
            if all(uses[made] == 1 and inputs.get(made) == leaf and leaf not in tape.outputs for made, leaf in pairs):
                twins[number] = twin
    return twins


def load_ahead(path: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """The function of a library that :func:`compile_ahead` has made."""
    return private("torch._C", "_aoti.AOTIModelContainerRunnerCpu")(path, 1).run
