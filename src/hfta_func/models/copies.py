"""Copies of modules whose functions refer to the copy, where ``copy.deepcopy`` leaves them with the original.

A hook ``lambda module, args, output: self.outputs.append(output)`` or an attribute ``lambda x: self.layer(x)`` holds the
model that it was made for. In a copy it would go on to read and fill that one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import types
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hfta_func._torch import Places, outside_transforms, pytree
from hfta_func.calls.body import KEYS, Reference
from hfta_func.calls.captured import contents
from hfta_func.errors import StackError

T = TypeVar("T", bound=nn.Module)
_TENSORS = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
_UNCOPIED = torch.sparse_csr, torch.jagged


def copied_module(model: T, memo: dict[int, Any]) -> T:
    """``copy.deepcopy(model, memo)``, in which functions refer to the copies of what they refer to in the model."""
    held: Any = [vars(module) for module in model.modules()]
    for tensor in pytree.tree_leaves(held):
        # PyTorch copies neither compressed sparse tensors nor results of earlier calls, and jagged ones not for gradients.
        if isinstance(tensor, Tensor) and (tensor.layout in _UNCOPIED or tensor.grad_fn is not None):
            memo.setdefault(id(tensor), tensor.detach())
    given = dict(memo)
    # Under vmap, a tensor that requires grad cannot be made.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else outside_transforms():
        try:
            made = copy.deepcopy(model, memo)
        except (TypeError, RuntimeError):
            # What Python cannot copy, such as a lock or an open file, is used as it is.
            parts = (part for part in pytree.tree_leaves(held) if id(part) not in given)
            memo.clear()
            memo |= given | {
                id(part): part for part in parts if not isinstance(part, nn.Module) and not _is_copied(part)
            }
            try:
                made = copy.deepcopy(model, memo)
            except Exception as error:
                raise StackError(
                    f"the model cannot be copied ({type(error).__name__}: {error}), and members run on copies of it; mend "
                    f"its __deepcopy__ or __getstate__, so that copy.deepcopy(model) works"
                ) from error
    referring = _Referring(memo)
    originals = dict(model.named_modules(remove_duplicate=False))
    for path, module in made.named_modules(remove_duplicate=False):
        # A class whose __deepcopy__ makes a new module makes it in train mode, and may copy apart what modules share.
        module.training = getattr(originals.get(path), "training", module.training)
        if path in originals and type(module).__setstate__ is nn.Module.__setstate__:
            # What its __getstate__ leaves out, and nothing makes again, is used as it is, too.
            vars(module).update({k: v for k, v in vars(originals[path]).items() if k not in vars(module)})
    for module in made.modules():
        names = vars(module)
        for name, value in names.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                names[name] = referring(value)
    return made


def aliases(model: nn.Module, places: Places) -> list[tuple[Any, Any, Any]]:
    """Where plain attributes hold parameters or buffers of the model, too, as in ``self.penalised = [self.fc.weight]``.

    Each is a list, a dict, an object or a cell of a function, a key or name there, and a :class:`Reference` or a tuple
    with some; or a dict or a set, ``KEYS``, and a tuple with some.

    Raises:
        StackError: if a container holds one that cannot hold another.
    """
    tensors = {id(held[name]): Reference(held, name) for held, name in places.values() if held[name] is not None}
    entries: list[tuple[Any, Any, Any]] = []
    seen: dict[int, Any] = {}

    def visit(value: Any, holder: Any, key: Any) -> None:
        # A tuple is replaced in what holds it.
        if holder is not None and (source := _source(value, tensors)) is not value:
            entries.append((holder, key, source))
        if id(value) in seen or isinstance(value, Tensor | nn.Module | type | types.ModuleType):
            return
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                for content in contents(cell):
                    visit(content, cell, "")
        elif isinstance(value, dict | list | tuple | collections.deque):
            for part, content in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
                visit(content, None if isinstance(value, tuple) else value, part)
            keep_keys(value if isinstance(value, dict) else ())
        elif isinstance(value, set):
            keep_keys(value)
        elif isinstance(value, frozenset | functools.partial):
            fixed = value.args if isinstance(value, functools.partial) else tuple(value)
            if _source(fixed, tensors) is not fixed:
                raise StackError(
                    f"the model holds a parameter or a buffer in a {type(value).__name__}, where members cannot have their "
                    f"own; hold it in a list or a dict"
                )
            visit(getattr(value, "keywords", None), value, "keywords")
        elif hasattr(value, "__dict__"):
            for name, content in [*vars(value).items()]:
                visit(content, value, name)

    def keep_keys(holder: Any) -> None:
        keys = tuple([_source(key, tensors) for key in holder])
        # Behind the entries of its values, whose keys these are.
        if any(map(operator.is_not, keys, holder)):
            entries.append((holder, KEYS, keys))

    for module in model.modules():
        for name in vars(module).keys() - _TENSORS:
            visit(vars(module)[name], module, name)
    return entries


def _source(value: Any, tensors: dict[int, Reference]) -> Any:
    """A reference for a tensor, a tuple with references for one that holds such tensors, or the value itself."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, tuple):
        parts = [_source(part, tensors) for part in value]
        if any(map(operator.is_not, parts, value)):
            return getattr(value, "_make", tuple)(parts)
    return value


def _is_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return False
    return True


class _Referring:
    """Gives a setting of a copied module functions that refer to what ``memo`` has copied."""

    def __init__(self, memo: dict[int, Any]):
        self._memo = memo
        self._copies = {id(new) for old, new in memo.items() if id(new) != old}
        # What was made, by the identity of what it was made from, which is kept.
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, types.FunctionType) and self._refers(value, set()):
            return self._function(value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._memo:
            return types.MethodType(value.__func__, self._memo[id(value.__self__)])
        if type(value) is weakref.ref and id(value()) in self._memo:
            return weakref.ref(self._memo[id(value())])
        if type(value) is functools.partial:
            parts = (self(value.func), *map(self, value.args))
            return functools.partial(*parts, **{name: self(part) for name, part in value.keywords.items()})
        if isinstance(value, tuple):
            parts = [*map(self, value)]
            return getattr(value, "_make", tuple)(parts) if any(map(operator.is_not, parts, value)) else value
        # What holds others has been copied already.
        if isinstance(value, Tensor | nn.Module) or id(value) not in self._copies:
            return value
        self._made[id(value)] = value, value
        held = value if isinstance(value, dict | list) else getattr(value, "__dict__", {})
        for key, part in [*(held.items() if isinstance(held, dict) else enumerate(held))]:
            held[key] = self(part)
        return value

    def _refers(self, value: Any, seen: set[int]) -> bool:
        """Whether a function, or what it closes over, refers to what has been copied."""
        held = (
            value.__self__ if isinstance(value, types.MethodType) else value() if type(value) is weakref.ref else value
        )
        if id(held) in self._memo:
            return True
        if id(value) in seen or isinstance(value, Tensor | nn.Module | type | types.ModuleType):
            return False
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            parts = [content for cell in value.__closure__ or () for content in contents(cell)]
        elif isinstance(value, dict):
            parts = [*value.keys(), *value.values()]
        else:
            parts = value if isinstance(value, list | tuple | set) else getattr(value, "__dict__", {}).values()
        return any(self._refers(part, seen) for part in parts)

    def _function(self, func: types.FunctionType) -> types.FunctionType:
        # Functions that share a variable go on to share it.
        cells = tuple(
            self._made.setdefault(id(cell), (cell, types.CellType()))[1]
            if any(self._refers(x, set()) for x in contents(cell))
            else cell
            for cell in func.__closure__ or ()
        )
        made = types.FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__, cells)
        made.__kwdefaults__, made.__dict__ = func.__kwdefaults__, func.__dict__
        self._made[id(func)] = func, made
        for cell, old in zip(cells, func.__closure__ or (), strict=True):
            if cell is not old:
                (content,) = contents(old)
                is_code = isinstance(content, types.FunctionType | types.MethodType | weakref.ref)
                cell.cell_contents = self(content if is_code else self._copied(content))
        return made

    def _copied(self, content: Any) -> Any:
        before = {*self._memo}
        copied = copy.deepcopy(content, self._memo)
        self._copies |= {id(self._memo[old]) for old in self._memo.keys() - before if id(self._memo[old]) != old}
        return copied
