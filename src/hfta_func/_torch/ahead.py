"""Tapes that are compiled to libraries, which run without Python and without the compiler's modules."""

from __future__ import annotations

import collections
import importlib
import operator
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hfta_func._torch._release import private
from hfta_func._torch.dispatcher import written_by
from hfta_func._torch.levels import pytree
from hfta_func._torch.recorded import NotReplayableError, Slot, slots_in
from hfta_func._torch.tape import Tape

_NAMESPACE = "hfta_func::"


class Library(NamedTuple):
    """How a library is called, which lies in a file of its own."""

    captured: tuple[int, ...]  # which of the tensors that functions hold are inputs, after those of the tape
    outputs: tuple[int, ...]  # for each of the tape the number of the library's, or ``~number`` of the input that it is
    operators: tuple[str, ...]  # operators of this package that it calls


def compile_ahead(
    tape: Tape,
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    written: int,
    options: Mapping[str, Any],
    path: str,
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
    by_reference = [*tape.constants.items()]
    if any(id(tensor) not in places for _, tensor in by_reference):
        raise NotReplayableError("it reads a tensor that neither its state nor its functions hold")
    slots = [*tape.inputs, *(slot for slot, _ in by_reference)]
    outputs = [*tape.inputs[:written], *tape.outputs[written:]]
    made = [*dict.fromkeys(slot for slot in outputs if slot not in slots)]
    module = _module(tape, slots, made, written)
    given = (*inputs, *(tensor for _, tensor in by_reference))
    inductor: Any = importlib.import_module("torch._inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = {**options, "aot_inductor.output_path": path}
        inductor.aot_compile(module, given, options=chosen)
    called = ""
    for listed in pathlib.Path(path).parent.glob("*.wrapper.json"):
        # A library looks for the operators that it calls under its own name.
        called = listed.rename(pathlib.Path(path).with_suffix(".json")).read_text()
    names = {node.target._schema.name for node in module.graph.nodes if hasattr(node.target, "_schema")}
    return Library(
        tuple(places[id(tensor)] for _, tensor in by_reference),
        tuple(~slots.index(slot) if slot in slots else made.index(slot) for slot in outputs),
        tuple(
            sorted(name.removeprefix(_NAMESPACE) for name in names if name.startswith(_NAMESPACE) and name in called)
        ),
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
                assign(part, graph.call_function(operator.getitem, (node, number)))

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
        twin = getattr(torch.ops.hfta_func, f"{name}_", None) if f"{namespace}::" == _NAMESPACE else None
        if twin is None:
            continue
        (leaves,) = (call.args[int(place)] for place in written_by(twin.default)[0])
        pairs = zip(call.result, leaves, strict=True)
        if all(uses[made] == 1 and inputs.get(made) == leaf and leaf not in tape.outputs for made, leaf in pairs):
            twins[number] = twin.default
    return twins


def load_ahead(path: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """The function of a library that :func:`compile_ahead` has made."""
    return private("torch._C", "_aoti.AOTIModelContainerRunnerCpu")(path, 1).run
