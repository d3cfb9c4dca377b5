"""Numbers in plain attributes of modules, such as dropout rates, in which members of one array may differ.

Stacked, they are buffers ``float64[M]`` under the path of the attribute. In a call, the attribute is the member's number as a
tensor without axes. A training state holds them in ``hparams``, and empty *placeholders* in ``buffers``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES
from hfta_func._types import Params
from hfta_func.errors import HyperparameterError, StateError

T = TypeVar("T")


def is_number(value: Any) -> bool:
    """Whether this is a plain Python number, and no bool."""
    return isinstance(value, float) or type(value) is int


def may_differ(module: nn.Module, name: str) -> bool:
    """Whether members may differ in this attribute: not if its class has the name too, which would hide a buffer."""
    return is_number(vars(module).get(name)) and name not in MODULE_ATTRIBUTES and not hasattr(type(module), name)


def numbers_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module and attribute name of each number in which members may differ, by path."""
    owners = [(path, x, name) for path, x in model.named_modules() for name in vars(x) if may_differ(x, name)]
    return {f"{path}.{name}" if path else name: (module, name) for path, module, name in owners}


def numbers_of_python(model: nn.Module) -> None:
    """Make numbers of NumPy, such as ``np.sqrt(8)``, in attributes of modules those of Python."""
    for module in model.modules():
        for name, value in vars(module).items():
            kind = type(value)
            if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(value, "shape", None) == ():
                vars(module)[name] = value.item()


def expanded(named: Mapping[str, T], known: Iterable[str]) -> dict[str, T]:
    """Values by path, where a name such as ``"*.p"`` stands for all known paths that it matches; full paths come first.

    Raises:
        HyperparameterError: if such a name matches none, or there are no names.
    """
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise HyperparameterError(f"hparams is {named!r}; give a dict of numbers by name")
    values: dict[str, T] = {}
    patterns = [name for name in named if not {*"*?["}.isdisjoint(name)]
    for name in patterns:
        matched = fnmatch.filter(known, name)
        if not matched:
            raise HyperparameterError(f"'{name}' matches no number of the model; {numbers_text(known, name)}")
        values |= dict.fromkeys(matched, named[name])
    return values | {name: value for name, value in named.items() if name not in patterns}


def numbers_text(known: Iterable[str], wanted: str) -> str:
    """What an error says of the numbers that a model has, those of the wanted name first."""
    name = wanted.rpartition(".")[2]
    paths = sorted(known, key=lambda path: (path.rpartition(".")[2] != name, path))
    return f"it has {', '.join(paths[:20]) or 'none in attributes of its modules'}{', ...' * (len(paths) > 20)}"


def hold(model: nn.Module, paths: Collection[str]) -> None:
    """Replace numbers by buffers, so that calls can set them; paths that are none of the model's numbers are passed over."""
    for module, name in [owner for path, owner in numbers_of(model).items() if path in paths]:
        delattr(module, name)
        module.register_buffer(name, torch.empty((), dtype=torch.float64, device="meta"))


def assign(model: nn.Module, numbers: Mapping[str, Any]) -> None:
    """Set numbers of a model by path."""
    for path, number in numbers.items():
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, number)


def placeholder_for(number: Tensor) -> Tensor:
    """The placeholder ``[M, 0]`` for a number ``[M]`` in the buffers of a training state."""
    return number.new_empty(*number.shape, 0)


def is_placeholder(leaf: Tensor) -> bool:
    """Whether a buffer is a placeholder for a number in ``hparams``."""
    return leaf.shape[1:] == (0,)


def filled(buffers: Params, hparams: Params) -> Params:
    """Buffers whose placeholders are replaced by the numbers in ``hparams``."""
    numbers = {path: hparams[path] for path in hparams if path in buffers and is_placeholder(buffers[path])}
    return buffers | numbers if numbers else buffers


def emptied(buffers: Params, hparams: Params, like: Params) -> Params:
    """The inverse of :func:`filled`: buffers with the placeholders that ``like`` has."""
    placeholders = {path: like[path] for path in hparams if path in like and is_placeholder(like[path])}
    return buffers | placeholders if placeholders else buffers


def changed(path: str) -> StateError:
    """The error if a model assigns a number in which members differ."""
    return StateError(
        f"the model changes its number '{path}' in a call, and members differ in it; make it a buffer, "
        f"self.register_buffer(name, tensor) in __init__, and write a tensor to that"
    )
