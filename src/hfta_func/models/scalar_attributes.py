"""Numbers that modules keep in plain attributes, such as dropout rates, and in which members of one array may differ.

Stacked, they are buffers ``float64[M]`` under the path of the attribute, and a call finds its member's number, a tensor
without axes, where the module keeps its own. A training state holds them in ``hparams``, and in ``buffers`` empty *places*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, writes
from hfta_func._types import HFTAError, Params, StateError, TraceError
from hfta_func.calls.body import user_code_location
from hfta_func.calls.control_flow import Diverged
from hfta_func.calls.routing import routed
from hfta_func.calls.scalar_args import called_with

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def is_number(value: Any) -> bool:
    """Whether this is a plain number of Python's."""
    return isinstance(value, float) or type(value) is int


def is_own(module: nn.Module, name: str) -> bool:
    """Whether a number of this name can be a member's own: classes are shared by members, and found before buffers."""
    return is_number(vars(module).get(name)) and name not in MODULE_ATTRIBUTES and not hasattr(type(module), name)


def numbers_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Who holds each number that can be a member's own, and under which name, by path."""
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        for name in vars(module)
        if is_own(module, name)
    }


def rates_of(model: nn.Module) -> frozenset[str]:
    """The paths of those that are dropout rates of PyTorch's layers, which have to be between 0 and 1."""
    kinds = {"p": _DROPOUTS, "dropout": (nn.MultiheadAttention, nn.RNNBase)}
    return frozenset(
        path for path, (module, name) in numbers_of(model).items() if isinstance(module, kinds.get(name, ()))
    )


def hold(model: nn.Module, paths: Iterable[str]) -> None:
    """Make buffers of numbers, for calls with other values; raises a StateError if the model has no such number."""
    places = numbers_of(model)
    for path in paths:
        if path not in places:
            raise StateError(f"the model has no parameter or buffer '{path}'; pass what stack_params returns for it")
        module, name = places[path]
        delattr(module, name)
        module.register_buffer(name, torch.empty((), dtype=torch.float64, device="meta"))


def assign(model: nn.Module, numbers: Mapping[str, Tensor]) -> None:
    """Give a model numbers of its own."""
    places = numbers_of(model)
    for path, number in numbers.items():
        module, name = places[path]
        setattr(module, name, number.item())


def place_for(number: Tensor) -> Tensor:
    """What stands for a number ``[M]`` among the buffers of a training state: ``[M, 0]``."""
    return number.new_empty(*number.shape, 0)


def is_place(leaf: Tensor) -> bool:
    """Whether this stands for a number that lies elsewhere."""
    return leaf.shape[1:] == (0,)


def filled(buffers: Params, hparams: Params) -> Params:
    """Buffers with the numbers of ``hparams`` in their places."""
    if not hparams:
        return buffers
    numbers = {path: hparams[path] for path in hparams if path in buffers and is_place(buffers[path])}
    return buffers | numbers if numbers else buffers


def emptied(buffers: Params, hparams: Params, like: Params) -> Params:
    """Buffers with the places that ``like`` has for numbers of ``hparams``."""
    if not hparams:
        return buffers
    places = {path: like[path] for path in hparams if path in like and is_place(like[path])}
    return buffers | places if places else buffers


@contextlib.contextmanager
def explained(mode: routed, numbers: Mapping[str, Tensor]) -> Iterator[None]:
    """A block in the mode, in which errors say what a number of the members' own cannot do."""
    before = {path: writes(number) for path, number in numbers.items()}
    try:
        with mode:
            yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, HFTAError | Diverged):
            raise
        given = called_with(error)
        found = [path for path, number in numbers.items() if any(leaf is number for leaf in given)]
        if not found and ".item()" not in str(error) and not isinstance(error, TypeError):
            raise
        names, text = ", ".join(map(repr, found or numbers)), str(error).partition("\n")[0]
        raise TraceError(
            f"{user_code_location(error)} needs a Python number where it has a tensor, and {names} "
            f"{'is' if found else 'may be'} why: "
            f"members differ in it, so it is a tensor in calls; compute with it as with one, or give all models the same"
            f"{'' if text.startswith('vmap:') else f' ({text})'}"
        ) from error
    for path, number in numbers.items():
        if writes(number) != before[path]:
            raise changed(path)


def changed(path: str) -> StateError:
    """The error of a model that assigns or writes a number of the members' own."""
    return StateError(
        f"the model changes its number '{path}' in a call, and members differ in it; make it a buffer, "
        f"self.register_buffer(name, tensor) in __init__, and write a tensor to that"
    )
