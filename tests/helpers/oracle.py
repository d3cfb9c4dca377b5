"""The oracle of the coverage tests: members one after another, each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

import hfta_func as hfta
from comparisons import assert_tensors_close

M = 3
KEYS = torch.tensor([3, 14, 15])


def stack(trees: Sequence[Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Stack the tensors of M trees, one per member.

    Returns:
        The tensors ``[M, ...]``, and a function from one member's tensors back to a tree. What is no tensor must be the
        same for all members and is taken from the first; a tensor that stands twice in its tree is stacked once. They
        require a gradient where the first member's do.
    """
    rows = [optree.tree_leaves(tree, none_is_leaf=True) for tree in trees]
    first, spec = rows[0], optree.tree_structure(trees[0], none_is_leaf=True)
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    for column in zip(*rows, strict=True):
        if isinstance(column[0], Tensor) and id(column[0]) not in places:
            places[id(column[0])] = len(tensors)
            tensors.append(torch.stack([x.detach() for x in column]).requires_grad_(column[0].requires_grad))

    def unstack(one: Sequence[Tensor]) -> Any:
        return optree.tree_unflatten(spec, [one[places[id(x)]] if id(x) in places else x for x in first])

    return tensors, unstack


def assert_array_is_loop(
    array: Callable[..., Any],
    alone: Callable[..., Any],
    inputs: Sequence[Tensor],
    tolerance: float,
    in_dims: Sequence[int | None] | None = None,
    compiled: bool = False,
) -> None:
    """Outputs, gradients, and what is written into the inputs: members as an array against each member alone.

    Args:
        array: ``array(key, *tensors)``, a function of one member, is mapped over all of them.
        alone: ``alone(i, *tensors)`` is what member ``i`` computes alone. If it draws from PyTorch's generator, which the
            array does not, each member alone is ``array`` with its key instead.
        inputs: ``[M, ...]``, or without the model axis where ``in_dims`` is None; of those that require a gradient it is
            compared.
        tolerance: Relative and absolute.
        in_dims: 0 or None for each input; all 0 if left out.
        compiled: Whether the array is compiled, to one graph.
    """
    in_dims = in_dims or [0] * len(inputs)
    outputs, grads, written = _run_array(array, inputs, in_dims, compiled)
    expected_outputs, expected_grads, expected_written = _run_alone(array, alone, inputs, in_dims)
    _close("outputs", outputs, expected_outputs, tolerance)
    _close("inputs afterwards", [written[i] for i in expected_written], list(expected_written.values()), tolerance)
    _close("gradients", grads, expected_grads, tolerance)


def _run_array(
    array: Any, inputs: Sequence[Tensor], in_dims: Sequence[int | None], compiled: bool
) -> tuple[Any, list[Tensor], Any]:
    # Copies, because a leaf that requires a gradient may not be written.
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    copies = [x.clone() for x in leaves]
    mapped = hfta.vmap(array, (0, *in_dims))
    if compiled:
        torch._dynamo.reset()
        mapped = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    outputs = _tensors(mapped(_keys(inputs), *copies))
    return outputs, _grads(outputs, [x for x in leaves if x.requires_grad]), copies


def _run_alone(
    array: Any, alone: Any, inputs: Sequence[Tensor], in_dims: Sequence[int | None]
) -> tuple[list[Tensor], list[Tensor], dict[int, Tensor]]:
    members = [
        [
            (x if dim is None else x[i]).detach().clone().requires_grad_(x.requires_grad)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        for i in range(M)
    ]
    copies = [[x.clone() for x in member] for member in members]
    before = _generators()
    outputs = [_tensors(alone(i, *copies[i])) for i in range(M)]
    if not all(map(torch.equal, _generators(), before)):
        copies = [[x.clone() for x in member] for member in members]
        outputs = [_tensors(array(_keys(inputs)[i], *copies[i])) for i in range(M)]
    stacked = [torch.stack(column) for column in zip(*outputs, strict=True)]
    wanted = [[x for x in member if x.requires_grad] for member in members]
    grads = iter(_grads(stacked, [x for member in wanted for x in member]))
    columns = list(zip(*([next(grads) for _ in member] for member in wanted), strict=True))
    shared = [dim is None for x, dim in zip(inputs, in_dims, strict=True) if x.requires_grad]
    written = {
        place: torch.stack([copy[place] for copy in copies])
        for place, copy in enumerate(copies[0])
        if copy._version and in_dims[place] == 0
    }
    return stacked, [_sum_or_stack(column, one) for column, one in zip(columns, shared, strict=True)], written


def _keys(inputs: Sequence[Tensor]) -> Tensor:
    return KEYS.to(inputs[0].device) if inputs else KEYS


def _generators() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _sum_or_stack(column: Sequence[Tensor], shared: bool) -> Tensor:
    """The gradient of a shared input is the sum over members, of any other that of each."""
    stacked = torch.stack(list(column))
    return stacked.sum(0) if shared else stacked


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _grads(outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """The gradient of a sum that weights every entry of every output differently."""
    outputs = [x for x in outputs if x.requires_grad]
    if not outputs:
        return [torch.zeros_like(x) for x in wanted]
    weights = [torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape) for x in outputs]
    grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True, materialize_grads=True)
    return [grad.to_dense() for grad in grads]


def _close(what: str, got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(expected), f"{len(got)} {what}, expected {len(expected)}"
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_tensors_close(one, other, tolerance, f"{what}, number {place}")


def for_every(samples: Iterable[tuple[str, Any]], check: Callable[[Any], None]) -> None:
    """Check all samples, and report every kind of failure with the first sample that shows it."""
    failures: dict[str, list[tuple[str, Exception]]] = {}
    threads = torch.get_num_threads()
    # Samples are tiny: several threads would spend their time waiting for each other.
    torch.set_num_threads(1)
    try:
        for description, sample in samples:
            try:
                check(sample)
            except Exception as error:
                kind = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                failures.setdefault(kind, []).append((description, error))
    finally:
        torch.set_num_threads(threads)
    if failures:
        report = [
            f"{len(found)} samples, such as {' '.join(found[0][0].split())[:300]}: {kind}"
            for kind, found in failures.items()
        ]
        raise AssertionError("\n".join(report)) from next(iter(failures.values()))[0][1]
