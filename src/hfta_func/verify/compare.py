"""What differs between an array and its members alone, and in which module that begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hfta_func.verify.alone import Output, Results

_NAMES = {
    "loss": "the loss",
    "metric": "metric '{}'",
    "output": "output{}",
    "buffer": "buffer '{}'",
    "parameter": "parameter '{}'",
    "gradient": "the gradient of '{}'",
    "attribute": "attribute '{}'",
}
"""What each kind of results is called, in the order in which they are compared."""
ROUNDING = 1e-4
"""The precision within whose square root rounding alone may be what differs: where a ReLU is on one side or the other."""


class Difference(NamedTuple):
    """A leaf in which an array and a member alone differ, with both values where they differ most."""

    kind: str
    path: str
    array: str
    alone: str

    def __str__(self) -> str:
        return f"{_NAMES[self.kind].format(self.path)} is {self.array} in the array and {self.alone} alone"


def difference(array: Results, alone: Results, eps: float, more: float = 0.0, judged: bool = True) -> Difference | None:
    """The first leaf that differs by more than rounding can, to which the precision of gradients is known to fall.

    Without a judge, gradients are held to the largest of all: that of a bias before a batch norm is rounding alone.
    """
    eps = max([eps, *map(float, alone.get("precision", {}).values())])
    # What comes of a loss that is NaN or infinite is never used.
    have_failed = has_failed(array) and has_failed(alone)
    kinds = ("loss",) if have_failed else [kind for kind in _NAMES if kind in array and kind in alone]
    for kind in kinds:
        floor = 1e-3 if judged or kind != "gradient" else max([1e-3, *map(_largest, alone[kind].values())])
        share = max(eps, more) if kind == "gradient" else eps
        for path, leaf in alone[kind].items():
            if path in array[kind] and not close(array[kind][path], leaf, share, floor):
                return Difference(kind, path, *_values(array[kind][path], leaf))
    return None


def has_failed(results: Results) -> bool:
    """Whether a loss is NaN or infinite."""
    return any(not bool(leaf.isfinite().all()) for leaf in results.get("loss", {}).values())


def close(a: Tensor, b: Tensor, eps: float, floor: float = 1e-3) -> bool:
    """Whether two results agree: numbers within the square root of their precision, or of ``eps`` if that is coarser."""
    if a.shape != b.shape or _is_inexact(a) != _is_inexact(b):
        return False
    a, b = _dense(a), _dense(b)
    if not _is_inexact(a) or a.dtype.itemsize == 1:
        return bool(torch.equal(a, b))
    # A number of a member's own takes the precision of what it meets, alone it may raise that.
    share = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps, eps) ** 0.5
    # In a seventh of the time of ``all``; not if there is a NaN.
    if not a.numel() or bool((a - b).abs().amax() <= share * floor):
        return True
    common = torch.promote_types(a.dtype, b.dtype)
    return bool(torch.allclose(a.to(common), b.to(common), share, share * max(_largest(b), floor), equal_nan=True))


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _dense(x: Tensor) -> Tensor:
    return x.detach().to_dense() if x.layout != torch.strided else x.detach()


def _largest(x: Tensor) -> float:
    x = _dense(x)
    return float(x.nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0


def _values(a: Tensor, b: Tensor) -> tuple[str, str]:
    """Both values, of the entry that differs most."""
    if a.shape != b.shape or a.dtype != b.dtype:
        kinds = [f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in (a, b)]
        return kinds[0], kinds[1]
    a, b = _dense(a), _dense(b)
    if a.dim() == 0:
        return f"{a.item():.6g}", f"{b.item():.6g}"
    gap = (a.to(torch.complex128) - b.to(torch.complex128)).abs().nan_to_num(torch.inf, torch.inf, torch.inf)
    at = [int(i) for i in torch.unravel_index((gap * (a != b)).nan_to_num(0).argmax(), gap.shape)]
    return f"{a[tuple(at)].item():.6g} at {at}", f"{b[tuple(at)].item():.6g}"


def origin(array: Sequence[Output], alone: Sequence[Output], member: int, paths: Mapping[str, str], eps: float) -> str:
    """The module in which an array begins to differ from a member alone; empty if that is none.

    Args:
        array: The outputs of the array's modules.
        alone: Those of the member's, in the order in which they were made.
        member: The member.
        paths: The path in the array of each path of the member's own.
        eps: The precision of the numbers.
    """
    by_path: dict[str, list[Output]] = {}
    for output in array:
        by_path.setdefault(output.path, []).append(output)
    pairs = [(each, by_path[at].pop(0)) for each in alone if by_path.get(at := paths.get(each.path, ""))]
    for each, other in pairs:
        if any(not _alike(b[member], a, eps) for a, b in zip(each.values, other.values, strict=False)):
            return _named(each)
    for each, other in pairs:
        if each.differentiable - other.differentiable:
            return _named(each)
    # Gradients begin to differ behind the last module at whose output they do not, on the way back.
    before = None
    for each, other in reversed(pairs):
        missing = each.grads.keys() - other.grads.keys()
        if missing or any(not _alike(other.grads[i][member], grad, eps) for i, grad in each.grads.items()):
            return "" if before is None else _named(before)
        before = each if each.grads else before
    return ""


def _named(output: Output) -> str:
    return f"'{output.path}' ({output.kind})" if output.path else f"the model's own code ({output.kind})"


def _alike(array: Tensor, alone: Tensor, eps: float) -> bool:
    """Whether the output of a module agrees, of which a padded one has further entries along some axes."""
    if array.dim() != alone.dim() or any(x < y for x, y in zip(array.shape, alone.shape, strict=True)):
        return False
    return close(array[tuple(slice(length) for length in alone.shape)], alone, eps)
