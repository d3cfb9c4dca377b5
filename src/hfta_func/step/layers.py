"""The layers of an array that is a module: a tree of the model's own classes, whose parameters are ``[M, ...]``."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hfta_func import _torch
from hfta_func._torch import MODULE_ATTRIBUTES, places_of, pytree
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.body import is_users_file
from hfta_func.errors import StateError
from hfta_func.models.scalar_attributes import hold
from hfta_func.models.skeleton import outline

_MIXING = torch.optim.Adafactor, torch.optim.LBFGS
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_FLAGS = "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"
_TENSORS = "_parameters", "_buffers"
_PLAIN = bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType
_BACKWARD = "_backward_hooks", "_backward_pre_hooks"


class StackedParameter(nn.Parameter):
    """A parameter ``[M, ...]``; code that takes its number of axes for that of a layer's parameter gets an error."""

    def dim(self) -> int:
        """The number of axes, for PyTorch itself."""
        _refuse_readers()
        return super().dim()

    ndimension = dim

    ndim = property(dim)  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


def _refuse_readers() -> None:
    if torch.compiler.is_compiling():
        return
    code = sys._getframe(2).f_code
    if is_users_file(code.co_filename) or code.co_filename.endswith(("torch/nn/init.py", "torch/optim/_muon.py")):
        axes = "how many axes a parameter of an Ensemble has, of which the first is the models"
        cure = "initialise by ensemble.apply(init), group parameters by their layers, for layer in ensemble.modules()"
        muon = "train with hfta.muon instead of torch.optim.Muon"
        raise StateError(f"{code.co_name} reads {axes}, so a bias looks like a matrix; {cure}, and {muon}")


@functools.cache
def watch_optimizers() -> None:
    """Have optimizers of PyTorch refused that mix the entries of a parameter."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    if isinstance(optimizer, _MIXING) and any(isinstance(param, StackedParameter) for param in params):
        why = f"{type(optimizer).__name__} computes one update from the entries of all members of an Ensemble"
        cure = "train it by an optimizer that treats entries alike, such as Adam"
        raise StateError(f"{why}; {cure}, or train the models by make_train_step")


def layers_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the model that holds these tensors ``[M, ...]`` by path, numbers of the members' own among them."""
    tree = outline(model)
    hold(tree, tensors.keys() - places_of(tree).keys())
    firsts: dict[int, str] = {}
    for path, (held, name) in places_of(tree).items():
        # One that stands in several places has its first path in the array.
        if (first := firsts.setdefault(id(held[name]), path)) in tensors:
            held[name] = tensors[first]
    return tree


class Layers:
    """The layers of an ensemble, and what users have changed in them, for the model whose code runs.

    Args:
        tree: The layers.
    """

    def __init__(self, tree: nn.Module):
        self._seen = [_plain(layer) for layer in tree.modules()]
        self._names = [_names(layer) for layer in tree.modules()]
        self._given = {key for layer in tree.modules() for kind in _HOOKS for key in vars(layer)[kind]}
        self.has_hooks = False

    def index(self, tree: nn.Module, shared: Sequence[str], base: Sequence[str]) -> None:
        """Note where the tensors are, and the values that :meth:`values` returns.

        ``owners`` are path, module and name of parameters, buffers, parameters that members share and train, and their base.
        """
        watch_optimizers()
        common = {*shared, *base}
        named = [[path for path, _ in every] for every in (tree.named_parameters(), tree.named_buffers())]
        self.owners: list[list[tuple[str, nn.Module, str]]] = []
        for paths in (*([path for path in every if path not in common] for every in named), shared, base):
            places = [(path, *path.rpartition(".")[::2]) for path in paths]
            self.owners.append([(path, tree.get_submodule(at), name) for path, at, name in places])
        for _, module, name in self.owners[0]:
            # Pickles forget it.
            getattr(module, name).__class__ = StackedParameter
        self._watched: list[tuple[dict[str, Any], Any, list[Any]]] = []
        for layer in tree.modules():
            if "training" not in vars(layer):  # A compiled one, which passes it on.
                continue
            # Of one name alone a getter returns no tuple.
            get = operator.itemgetter("training", "_modules", *_plain(layer))
            self._watched.append((vars(layer), get, [vars(layer)[kind] for kind in (*_HOOKS, *_BACKWARD, *_TENSORS)]))

    def __getstate__(self) -> dict[str, Any]:
        # What :meth:`index` notes again.
        return {name: value for name, value in vars(self).items() if name not in ("owners", "_watched")}

    def values(self) -> list[Any]:
        """Objects that are others once a user has changed the modes, settings, hooks or children of layers."""
        values: list[Any] = []
        for names, get, tables in self._watched:
            values += get(names)
            values += names["_modules"].values()
            values += map(len, (names, *tables))
            values += [next(reversed(table), None) for table in tables[:2]]
        return values

    def follow(self, tree: nn.Module, model: nn.Module) -> None:
        """Bring the changes to the model; raises a StateError if they are to its parameters or children."""
        layers = [*tree.named_modules()]
        names = [_names(layer) for _, layer in layers]
        if names != self._names:
            differing = (path for (path, _), a, b in zip(layers, names, self._names, strict=False) if a != b)
            where = next(differing, layers[-1][0])
            why = f"'{where}' of an Ensemble is another layer than in its models, or has other parameters"
            raise StateError(f"{why}; change the models, and make an Ensemble of them: Ensemble.from_modules([...])")
        self.has_hooks = False
        for at, ((_, layer), module) in enumerate(zip(layers, model.modules(), strict=True)):
            # Numbers that calls count in the model go on there.
            changed = _plain(layer).items() - self._seen[at].items()
            vars(module).update(dict(changed), training=layer.training)
            self._seen[at] = _plain(layer)
            for kind in _HOOKS:
                before, hooks = vars(module)[kind], collections.OrderedDict[int, Any]()
                for key, hook in vars(layer)[kind].items():
                    hooks[key] = before[key] if key in self._given else _StackedHook(hook, layer)
                self.has_hooks |= not self._given.issuperset(hooks)
                vars(module)[kind] = hooks
            vars(module).update({kind: vars(layer)[kind] for kind in (*_FLAGS, *_BACKWARD)})
        for param, like in zip(model.parameters(), tree.parameters(), strict=True):
            param.requires_grad_(like.requires_grad)


def follow_member(tree: nn.Module, member: nn.Module) -> None:
    """Give layers the modes, settings and what is trained of a member."""
    for layer, module in zip(tree.modules(), member.modules(), strict=True):
        if any(vars(module)[kind].keys() - vars(layer)[kind].keys() for kind in (*_HOOKS, *_BACKWARD)):
            raise StateError("apply runs for each member alone; register hooks of all members on ensemble.modules()")
        settings = {name: value for name, value in _plain(module).items() if name not in vars(layer)["_buffers"]}
        vars(layer).update(settings, training=module.training)
    for param, like in zip(tree.parameters(), member.parameters(), strict=True):
        param.requires_grad_(like.requires_grad)


def _plain(layer: nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(layer).items() if isinstance(value, _PLAIN)}
    return {name: value for name, value in plain.items() if name not in (*MODULE_ATTRIBUTES, "forward")}


def _names(layer: nn.Module) -> tuple[Any, ...]:
    return type(layer), "forward" in vars(layer), *(tuple(vars(layer)[kind]) for kind in (*_TENSORS, "_modules"))


class _StackedHook:
    """A hook of a layer, called once for all members, with tensors ``[M, ...]``."""

    def __init__(self, hook: Any, layer: nn.Module):
        self._hook, self._layer = hook, layer

    def __deepcopy__(self, memo: Any) -> _StackedHook:
        return self

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if rehearsing.get():
            return None
        if torch.compiler.is_compiling():
            raise StateError("a hook of a layer of an Ensemble cannot be compiled; remove it, or call it uncompiled")
        interpreter: Any = _torch.current_interpreter() if _torch.interpreters() is not None else None
        if not hasattr(interpreter, "batch_size"):
            # A single member runs without vmap.
            one = pytree.tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, given)
            result = self._hook(self._layer, *one)
            return pytree.tree_map(lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, result)
        level, count = interpreter.level(), interpreter.batch_size()

        def stacked(x: Any, dim: int | None) -> Any:
            return _torch.expand(x, dim, count) if isinstance(x, Tensor) else x

        plain, dims = _torch.unwrap_leaves(given, level)
        with interpreter.lower():
            result = self._hook(self._layer, *pytree.tree_map(stacked, plain, dims))
        return pytree.tree_map(lambda x: _torch.add_batch_dim(x, 0, level) if isinstance(x, Tensor) else x, result)


def without_stacked_hooks(model: nn.Module) -> nn.Module:
    """A member without the hooks that are called for all members."""
    for module in model.modules():
        for kind in _HOOKS:
            for key in [key for key, hook in vars(module)[kind].items() if isinstance(hook, _StackedHook)]:
                del vars(module)[kind][key]
    return model


def write(buffer: Tensor, value: Tensor) -> None:
    """Write a buffer; one that torch.func does not differentiate gets the value without derivatives."""
    if torch.compiler.is_compiling() or _torch.is_wrapped(buffer) or not _torch.inside_transform():
        buffer.copy_(value)
        return
    while _torch.is_wrapped(value) and not _torch.is_batched(value):
        value = _torch.get_unwrapped(value)
    with contextlib.nullcontext() if _torch.is_wrapped(value) else _torch.outside_transforms():
        buffer.copy_(value)
