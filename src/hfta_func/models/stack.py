"""Ordinary modules to stacked parameters and back.

Public: :class:`Stacked`, :func:`stack_params`, :func:`init_params`, :func:`unstack_params`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._errors import StackError, StateError
from hfta_func._tree import num_models
from hfta_func._types import Params
from hfta_func.models.structure import check_materialised, check_same_structure


class Stacked(NamedTuple):
    """Parameters and buffers of M models, each leaf ``[M, ...]`` by its path in the module.

    Leaves are plain data: they do not require grad. A tied parameter stands once, under its first path.
    """

    params: Params
    buffers: Params


def stack_params(models: Iterable[nn.Module]) -> Stacked:
    """Stack the parameters and buffers of M models of one architecture.

    The models are read, not changed. They must agree in everything but the values of their parameters and buffers.

    Args:
        models: At least one module.

    Raises:
        StackError: if there is no model, a lazy module has not been run yet, or two models differ in class, settings,
            shape, dtype, device, train mode, ``requires_grad`` or ties. It names the member, the path and both values.

    Example:
        >>> params, buffers = stack_params([torch.nn.Linear(2, 10) for _ in range(3)])
        >>> params["weight"].shape
        torch.Size([3, 10, 2])
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise StackError(f"expected a list of models but got one {type(models).__qualname__}; pass [model]")
    models = list(models)
    return _stack(models, len(models))


def init_params(factory: Callable[[], nn.Module], seeds: Sequence[int] | Tensor) -> Stacked:
    """Build one model per seed and stack them, holding no more than two models besides the array.

    Member ``i`` is what ``torch.manual_seed(seeds[i]); factory()`` makes. The global generator is left as it was.

    Args:
        factory: Makes one model, for example ``lambda: MLP(64, 10)``.
        seeds: One integer per member.

    Raises:
        HyperparameterError: if a seed is not an integer.
        StackError: if there is no seed, or the factory makes models that differ.

    Example:
        >>> params, _ = init_params(lambda: torch.nn.Linear(2, 10), seeds=[0, 1])
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(params["weight"][1], torch.nn.Linear(2, 10).weight)
        True
    """
    values = random.keys(seeds).tolist()

    def build() -> Iterable[nn.Module]:
        for seed in values:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = factory()
            yield model

    return _stack(build(), len(values))


def unstack_params(model: nn.Module, params: Params, buffers: Params) -> list[nn.Module]:
    """M ordinary modules with storage of their own, the inverse of :func:`stack_params`.

    Args:
        model: Any module of the architecture; it gives code, settings, ties and ``requires_grad``, and is not changed.
        params: Stacked parameters ``[M, ...]``.
        buffers: Stacked buffers ``[M, ...]``.

    Raises:
        StackError: if paths or shapes are not those of ``model``.

    Example:
        >>> layers = [torch.nn.Linear(2, 10) for _ in range(3)]
        >>> back = unstack_params(layers[0], *stack_params(layers))
        >>> torch.equal(back[2].weight, layers[2].weight)
        True
    """
    count = num_models((params, buffers))
    for stacked, own in zip((params, buffers), shapes(model), strict=True):
        check_matches(stacked, own)
    return [_member(model, params, buffers, index) for index in range(count)]


Shapes = tuple[dict[str, torch.Size], dict[str, torch.Size]]


def shapes(model: nn.Module) -> Shapes:
    """Shapes of one model's parameters and buffers by path."""
    return (
        {path: parameter.shape for path, parameter in model.named_parameters()},
        {path: buffer.shape for path, buffer in model.named_buffers()},
    )


def check_matches(stacked: Params, own: dict[str, torch.Size]) -> None:
    """Raise a StackError unless ``stacked`` has the shapes ``own`` of one model, with a model axis in front."""
    for path in [*own, *(path for path in stacked if path not in own)]:
        if path not in stacked or path not in own:
            here, there = ("the array", "the model") if path not in stacked else ("the model", "the array")
            raise StackError(
                f"'{path}' is in {there} but not in {here}; pass the model that the array was stacked from"
            )
        if stacked[path].shape[1:] != own[path]:
            raise StackError(
                f"'{path}' is {list(stacked[path].shape[1:])} per member but {list(own[path])} in the model; "
                f"pass the model that the array was stacked from"
            )


def check_state(stacked: tuple[Params, Params], own: Shapes) -> None:
    """Raise a StateError unless parameters and buffers are those of a step's model, whose shapes are ``own``."""
    for held, expected in zip(stacked, own, strict=True):
        try:
            check_matches(held, expected)
        except StackError as error:
            raise StateError(str(error)) from None


def _member(model: nn.Module, params: Params, buffers: Params, index: int) -> nn.Module:
    # A deep copy whose tensors are already there: ties, views of weights and plain attributes all come out right.
    memo: dict[int, Any] = {}
    for path, own in model.named_parameters():
        memo[id(own)] = nn.Parameter(params[path][index].detach().clone(), requires_grad=own.requires_grad)
    for path, own in model.named_buffers():
        memo[id(own)] = buffers[path][index].detach().clone()
    return copy.deepcopy(model, memo)


def _stack(models: Iterable[nn.Module], count: int) -> Stacked:
    first: nn.Module | None = None
    stacked = Stacked({}, {})
    for member, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise StackError(f"model {member} is a {type(model).__qualname__}; every model must be a torch.nn.Module")
        check_materialised(model, member)
        first = model if first is None else first
        check_same_structure(model, first, member)
        for held, mine, theirs in (
            (stacked.params, dict(model.named_parameters()), dict(first.named_parameters())),
            (stacked.buffers, dict(model.named_buffers()), dict(first.named_buffers())),
        ):
            _check_tensors(mine, theirs, member)
            for path, tensor in mine.items():
                if member == 0:
                    held[path] = torch.empty(count, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
                held[path][member].copy_(tensor.detach())
    if first is None:
        raise StackError("no models to stack; pass at least one")
    return stacked


def _check_tensors(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], member: int) -> None:
    for path in [*theirs, *(path for path in mine if path not in theirs)]:
        if path not in mine or path not in theirs:
            missing, holder = (member, 0) if path not in mine else (0, member)
            raise StackError(
                f"model {missing} has no '{path}' but model {holder} has one; models in one array must have the same "
                f"parameters and buffers"
            )
        for what in ("shape", "dtype", "device", "requires_grad"):
            a, b = getattr(mine[path], what), getattr(theirs[path], what)
            if a != b:
                shown = [list(value) if what == "shape" else value for value in (a, b)]
                name = f"'{path}'" if what == "shape" else f"the {what} of '{path}'"
                raise StackError(
                    f"model {member}: {name} is {shown[0]} but model 0 has {shown[1]}; models in one array must share "
                    f"every {what}"
                )
