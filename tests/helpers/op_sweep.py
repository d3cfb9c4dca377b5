"""What becomes of every entry of PyTorch's own table of operators: fused, looped, or refused; a wrong result is an error.

``python tests/helpers/op_sweep.py`` writes ``op_db.csv``, which ``tests/rules/test_op_db.py`` compares with what it finds.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import hfta_func as hfta
from oracle import M, assert_array_is_loop, stack

TABLE = pathlib.Path(__file__).with_name("op_db.csv")
SAMPLES = 8
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
TOLERANCES = {torch.float32: 2e-3, torch.float64: 1e-9, torch.complex128: 1e-9}
ILL_CONDITIONED = {"linalg.householder_product": 100}
"""How many times the tolerance: so much of rounding the derivatives of a member alone have, for some of the table's samples.
It depends on the processor how much of it shows."""
FORMS = ("all", "first", "rest")
"""Which tensors of a sample are per member; members share the others."""
HOW = ("nested", "gradient", "tangent", "compiled")
"""In what else operators run: an array of arrays, derivatives inside ``vmap``, a compiled graph."""
PROCESSED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_"), torch.zeros_like),
    "chalf": lambda output: output.to(torch.complex64),
}
"""What is compared instead of the output: of memory as it was found the shape, of numbers that PyTorch cannot add others."""
NO_RULE = "no batching rule: one member after another"


class Found(NamedTuple):
    """A row of the table."""

    operator: str
    out_of_place: str  # fused; looped, refused or wrong if any sample is
    in_place: str  # likewise; "" for an operator that has no form in place
    note: str  # the operators without a rule, or why it is refused


def _title(op: OpInfo) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


OPERATORS: dict[str, OpInfo] = {
    _title(op): op
    for op in op_db
    if any(dtype in op.supported_dtypes("cpu") for dtype in DTYPES)
    # These run on GPUs only.
    and not op.name.startswith("jiterator")
}
"""The entries, by name."""


def dtype_of(op: OpInfo) -> torch.dtype:
    """The type that an operator is examined with."""
    return next(dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu"))


def examine(op: OpInfo, dtype: torch.dtype, count: int = SAMPLES, how: str = "") -> Found:
    """What becomes of an operator, out of place and in place; ``how`` is one of ``HOW``, or neither of them."""
    verdicts, notes = [], set()
    for func, in_place in ((op.op, False), (op.inplace_variant, True)):
        found = _verdicts(op, func, dtype, count, how, in_place) if func is not None else ()
        verdict = ""
        for verdict, note in found:
            notes |= note
            if verdict in ("wrong", "refused"):
                break
        verdicts.append(verdict)
    return Found(_title(op), *verdicts, " ".join(sorted(notes)))


def _verdicts(
    op: OpInfo, func: Callable[..., Any], dtype: torch.dtype, count: int, how: str, in_place: bool
) -> Iterator[tuple[str, set[str]]]:
    """One verdict for every sample, the last of all that it deserves."""
    verdict, names = "fused", set()
    tolerance = TOLERANCES.get(dtype, 0) * ILL_CONDITIONED.get(_title(op), 1)
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for members in _samples(op, dtype, count, differentiable and (op.supports_inplace_autograd or not in_place)):
        if in_place and not _is_possible_in_place(func, members[0]):
            continue
        forms = FORMS[: 1 if how or _count(members[0]) == 1 else 2 if in_place else 3]
        for form in forms:
            try:
                seen = hfta.rules.explain(_check, func, members, tolerance, form, in_place, how)
            except AssertionError as error:
                yield "wrong", {f"{form}: {str(error)[:200]}"}
            except (RuntimeError, ValueError, TypeError) as error:
                if form == "all" or not re.search("that all members share|running_mean or running_var", str(error)):
                    yield "refused", {_reason(error)}
            else:
                names |= {choice.op for choice in seen if choice.reason == NO_RULE}
                verdict = "looped" if names else "fused"
    yield verdict, names


def _samples(op: OpInfo, dtype: torch.dtype, count: int, gradients: bool) -> Iterator[list[Any]]:
    """The arguments ``((input, *args), kwargs)`` of each sample and what makes its output differentiable, per member."""
    draws = []
    for member in range(M):
        torch.manual_seed(member)
        # Not op.sample_inputs, which sets a seed of its own.
        drawn = op.sample_inputs_func(op, "cpu", dtype, requires_grad=gradients)
        found = [
            ((one.input, *one.args), one.kwargs, one.output_process_fn_grad) for one in itertools.islice(drawn, 64)
        ]
        draws.append([one for one in found if _count(one)])
    # Samples of all kinds, not the first ones only.
    total = min(map(len, draws))
    for place in sorted({index * total // count for index in range(min(count, total))}):
        members = [drawn[place] for drawn in draws]
        shapes = [optree.tree_map(_shape, one[:2]) for one in members]
        # Members of other shapes than the first are that one, scaled.
        chosen = members if all(shape == shapes[0] for shape in shapes) else [members[0]] * M
        process = PROCESSED.get(op.name, chosen[0][2])
        yield [(args, dict(sorted(kwargs.items())), process) for args, kwargs, _ in chosen]


def _count(member: Any) -> int:
    return sum(isinstance(x, Tensor) for x in optree.tree_leaves(member[:2]))


def _shape(x: Any) -> Any:
    return (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x


def _is_possible_in_place(func: Callable[..., Any], member: Any) -> bool:
    """Whether one member alone can: the result may need another shape or type."""
    args, kwargs, _ = member
    try:
        return func(args[0].detach().clone(), *args[1:], **kwargs).shape == args[0].shape
    except (RuntimeError, TypeError):
        return False


def _check(func: Callable[..., Any], members: list[Any], tolerance: float, form: str, in_place: bool, how: str) -> None:
    """One sample: outputs, gradients and what is written, of an array against every member alone."""
    process = members[0][2]
    tensors, _ = stack([one[:2] for one in members])
    # A tree that the compiler can trace.
    leaves, spec = pytree.tree_flatten(members[0][:2])
    places: dict[int, int] = {}
    for x in leaves:
        if isinstance(x, Tensor):
            places.setdefault(id(x), len(places))
    order = [places.get(id(x)) for x in leaves]
    in_dims = [0 if form == "all" or (form == "first") == (place == 0) else None for place in range(len(tensors))]
    inputs = [
        _distinct(x) if dim == 0 else x.detach()[0].requires_grad_(x.requires_grad)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]

    def run(*tensors: Tensor) -> Any:
        # What an array of arrays writes are its own inputs, which are copies.
        tensors = tuple(x.clone() for x in tensors) if how == "nested" else tensors
        args, kwargs = pytree.tree_unflatten(
            [x if place is None else tensors[place] for x, place in zip(leaves, order, strict=True)], spec
        )
        if not in_place:
            return process(func(*args, **kwargs))
        # A view of it is written, which its owner must show.
        owner = torch.stack([args[0], args[0]])
        return process(func(owner[0], *args[1:], **kwargs)), owner

    wanted = [place for place, x in enumerate(inputs) if x.requires_grad]
    one = _differentiated(run, how, wanted) if wanted else run

    def array(key: Tensor, *tensors: Tensor) -> Any:
        with hfta.calls.routed(key):
            if how != "nested":
                return one(*tensors)
            arrays = hfta.vmap(one)(*(torch.stack([x * 0.875 if x.is_floating_point() else x, x]) for x in tensors))
            return optree.tree_map(lambda x: x[1], arrays)

    def alone(member: int, *tensors: Tensor) -> Any:
        return one(*tensors)

    if how in ("gradient", "tangent"):
        inputs = [x.detach() for x in inputs]
    try:
        assert_array_is_loop(array, alone, inputs, tolerance, in_dims, how == "compiled")
    except RuntimeError:
        if not how or _works(one, [x[0] for x in inputs], how == "compiled"):
            raise


def _works(func: Callable[..., Any], inputs: list[Tensor], compiled: bool) -> bool:
    """Whether a member alone can: PyTorch lacks some derivatives and compiles not all."""
    torch._dynamo.reset()
    try:
        (torch.compile(func, fullgraph=True, backend="aot_eager") if compiled else func)(*(x.clone() for x in inputs))
    except (RuntimeError, AssertionError):
        return False
    return True


def _differentiated(run: Callable[..., Any], how: str, wanted: Sequence[int]) -> Callable[..., Any]:
    """``run``, or its derivatives inside ``vmap`` by the tensors at some places."""

    def outputs(tensors: Sequence[Tensor], *chosen: Tensor) -> list[Tensor]:
        given = dict(zip(wanted, chosen, strict=True))
        found = optree.tree_leaves(run(*(given.get(place, x) for place, x in enumerate(tensors))))
        return [x for x in found if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]

    def gradient(*tensors: Tensor) -> Any:
        def objective(*chosen: Tensor) -> Tensor:
            return torch.stack([x.abs().square().sum() for x in outputs(tensors, *chosen)]).sum()

        return torch.func.grad(objective, tuple(range(len(wanted))))(*(tensors[place] for place in wanted))

    def tangent(*tensors: Tensor) -> Any:
        chosen = tuple(tensors[place] for place in wanted)
        return torch.func.jvp(lambda *chosen: outputs(tensors, *chosen), chosen, tuple(x + 1 for x in chosen))

    return {"gradient": gradient, "tangent": tangent}.get(how, run)


def _distinct(x: Tensor) -> Tensor:
    """Members that the table gave the same values, scaled."""
    if not (x.is_floating_point() or x.is_complex()) or not torch.equal(x, x[:1].expand_as(x)):
        return x
    # Not 1.125 and 1.25: matrices of size 5 have singular values of 1.25, which a limit of 1 must not become.
    factors = torch.tensor([1.0, 1.0625, 1.1875], dtype=x.dtype).reshape(M, *(1,) * (x.dim() - 1))
    return (x.detach() * factors).requires_grad_(x.requires_grad)


def _reason(error: BaseException) -> str:
    """Why an operator is refused, in short."""
    text = re.sub(r"^(in )?(run|alone|<lambda>|array) \([^()]*\.py:\d+\):? ?", "", " ".join(str(error).split()))
    return re.split(r"; |, but|, for which|, and |, so |\. ", text)[0][:100]


@contextlib.contextmanager
def fresh_draws() -> Iterator[None]:
    """The table has functions that draw do so from the same seed at every call; inside they do not."""
    before = common_methods_invocations.wrapper_set_seed
    common_methods_invocations.wrapper_set_seed = lambda func, *args, **named: func(*args, **named)
    try:
        yield
    finally:
        common_methods_invocations.wrapper_set_seed = before


def table() -> dict[str, Found]:
    """The rows of the table, by operator."""
    with TABLE.open(newline="") as file:
        return {row[0]: Found(*row) for row in itertools.islice(csv.reader(file), 1, None)}


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fresh_draws(), TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Found._fields)
        for name in sys.argv[1:] or OPERATORS:
            row = examine(OPERATORS[name], dtype_of(OPERATORS[name]))
            writer.writerow(row)
            if "wrong" in row:
                print(row)


if __name__ == "__main__":
    main()
