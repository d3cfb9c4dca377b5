"""An array as an ordinary module: a part of something larger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import can_look
from hfta_func._tree import num_models, take, tree_map
from hfta_func._types import BatchError, HyperparameterError, Params, StateError, Tree
from hfta_func.models.functional import bind, outline, tables_with_max_norm
from hfta_func.models.stack import Stacked, check_stacked, check_state, shapes, stack_params, unstack_params
from hfta_func.rules._aliasing import Known
from hfta_func.rules.vmap import vmap_routed
from hfta_func.step.batch import check_batch, copied, plain, restored, spread
from hfta_func.step.check import unwritten
from hfta_func.step.gradients import NOISE
from hfta_func.step.prediction import Prediction, gather
from hfta_func.step.state import TrainState, stacked

_MADE = ("_run", "_runs", "_known", "_places")
"""Attributes of an ensemble that are made anew in a copy."""


class Ensemble(nn.Module):
    """M models of one architecture as one ``nn.Module``, whose parameters are ``[M, ...]``.

    Optimizers, ``state_dict``, ``.to``, ``torch.compile``, ``torch.export`` and training frameworks take it for any other
    module, and gradients flow through it. Member ``i`` of a parameter ``path`` is ``ensemble.array.<path>[i]``.

    Args:
        model: Any module of the architecture, for code, settings, train mode and ``requires_grad``.
        params: Stacked parameters ``[M, ...]``; they are copied.
        buffers: Stacked buffers ``[M, ...]``; they are copied.
        seeds: One integer per member, from which all its noise comes; 0 to M - 1 by default.

    Raises:
        StackError: if params and buffers do not belong to the model.
        HyperparameterError: if there is not one seed per member.

    Example:
        >>> ensemble = Ensemble.from_modules([torch.nn.Linear(4, 1) for _ in range(3)])
        >>> ensemble(torch.randn(8, 4)).shape, ensemble(torch.randn(3, 8, 4), batch_dims=0).shape
        (torch.Size([3, 8, 1]), torch.Size([3, 8, 1]))
        >>> [(path, list(parameter.shape)) for path, parameter in ensemble.named_parameters()]
        [('array.weight', [3, 1, 4]), ('array.bias', [3, 1])]
    """

    keys: Tensor
    calls: Tensor

    def __init__(
        self,
        model: nn.Module,
        params: Params,
        buffers: Params | None = None,
        *,
        seeds: Sequence[int] | Tensor | None = None,
    ):
        super().__init__()
        buffers = dict(buffers or {})
        self.num_models = num_models((params, buffers))
        check_stacked((params, buffers), shapes(model))
        # In a tuple, or it would be a child with parameters of its own.
        self._model = (outline(model),)
        self.array = _Names()
        required = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
        kept, known = model.state_dict(keep_vars=True), dict(model.named_buffers())
        for path, leaf in params.items():
            self.array.hold(path, nn.Parameter(leaf.detach().clone(), requires_grad=required[path]))
        for path, leaf in buffers.items():
            # Numbers of the members' own are no buffers of the model.
            self.array.hold(path, leaf.detach().clone(), persistent=path in kept or path not in known)
        device = next(iter((*params.values(), *buffers.values()))).device
        keys = random.keys(range(self.num_models) if seeds is None else seeds, device=device)
        if keys.shape != (self.num_models,):
            raise HyperparameterError(
                f"got {keys.numel()} seeds but the array has {self.num_models} models; give one integer per model"
            )
        self.register_buffer("keys", keys.clone())
        # How often the members were called in train mode, which tells one call's noise from the next one's.
        self.register_buffer("calls", torch.zeros_like(keys))
        self.training = model.training
        self._choose()

    @classmethod
    def from_modules(cls, models: Iterable[nn.Module], *, seeds: Sequence[int] | Tensor | None = None) -> Ensemble:
        """An ensemble of models that exist; they are copied.

        Raises:
            StackError: if :func:`stack_params` refuses them.
        """
        if not isinstance(models, nn.Module):
            models = [*models]
        params, buffers = stack_params(models)
        models = [*models]
        return cls(models[0], params, buffers, seeds=seeds)

    def forward(self, *args: Any, batch_dims: Tree = None, **kwargs: Any) -> Any:
        """Call every member.

        In train mode each call draws new noise and updates the members' buffers, as a module alone does. In eval mode
        nothing changes, so that a model that draws in eval mode draws the same at every call.

        Args:
            args: The module's own arguments; tensors in them are shared by all members, or ``[M, ...]``.
            batch_dims: None if all members share the arguments, 0 if every tensor is ``[M, ...]``, or a tuple with None, 0
                or a tree of these for each of ``args``; ``kwargs`` are shared then.
            kwargs: Further arguments of the module.

        Returns:
            What the module returns, each tensor ``[M, ...]``.

        Raises:
            BatchError: if an argument has no model axis where ``batch_dims`` is 0.
            StateError: if the model writes its parameters in place.
        """
        training, stacked = self.training, self.stacked()
        if training and self._writes_tables and torch.is_grad_enabled():
            raise StateError(
                "a look-up table with max_norm shortens its own rows as it is read, which an Ensemble in train mode cannot "
                "do; train with make_train_step, or call .eval()"
            )
        # That of a training step, so that both draw the same.
        key = random.fold_in(self.keys, self.calls + NOISE if training else ~self.calls)
        output, buffers = _call(self._run, self._known, stacked, key, args, kwargs, batch_dims)
        if training:
            with torch.no_grad():
                self.calls += 1
                for path, buffer in stacked.buffers.items():
                    buffer.copy_(buffers[path])
        return output

    @torch.no_grad()
    def predict(self, batches: Any, *, batch_dims: Tree = None) -> Prediction:
        """What all members predict, in eval mode and without gradients; the ensemble's own mode stays as it is.

        Args:
            batches: One tensor ``[N, ...]``, or an iterable of batches, such as a ``DataLoader``. Each batch is a tensor, a
                tuple of several arguments, or a dict of them by name.
            batch_dims: As for :meth:`forward`.

        Raises:
            BatchError: if there is no batch, or a member returns anything but one tensor ``[N, ...]``.

        Example:
            >>> ensemble = Ensemble.from_modules([torch.nn.Linear(4, 1) for _ in range(3)])
            >>> found = ensemble.predict(torch.randn(8, 4))
            >>> found.mean.shape, found.std.shape, found.quantiles([0.05, 0.95]).shape
            (torch.Size([8, 1]), torch.Size([8, 1]), torch.Size([2, 8, 1]))
        """
        return _predict(self._model[0], self.stacked(), random.fold_in(self.keys, ~self.calls), batches, batch_dims)

    def stacked(self) -> Stacked:
        """The parameters and buffers by path, the ensemble's own and not copies."""
        params, buffers = ({path: getattr(*place) for path, place in places} for places in self._places)
        return Stacked(params, buffers)

    def members(self) -> list[nn.Module]:
        """Ordinary modules with storage of their own, in the modes of the ensemble's."""
        return unstack_params(self._model[0], *self.stacked())

    def take(self, index: int | slice | Sequence[int] | Tensor) -> Ensemble:
        """An ensemble of some members, with their noise as it would go on.

        Raises:
            StackError: if no member is selected or an index is out of range.
        """
        params, buffers, keys, calls = take((*self.stacked(), self.keys, self.calls), index)
        other = Ensemble(self._model[0], params, buffers, seeds=keys)
        other.calls.copy_(calls)
        return other

    def train(self, mode: bool = True) -> Ensemble:
        """Set train mode, or eval mode, of all members."""
        super().train(mode)
        self._model[0].train(mode)
        self._choose()
        return self

    def extra_repr(self) -> str:
        """Number and class of the members."""
        return f"{self.num_models} of {type(self._model[0]).__qualname__}"

    def _choose(self) -> None:
        """Have the code of the modules' present modes run, which is made once for each."""
        runs = vars(self).setdefault("_runs", {})
        named = self.array.named_parameters(), self.array.named_buffers()
        self._places = [[(path, self.array.place(path)) for path, _ in tensors] for tensors in named]
        modes = tuple(module.training for module in self._model[0].modules())
        if modes not in runs:
            runs[modes] = bind(self._model[0], _forward), Known()
        self._run, self._known = runs[modes]
        self._writes_tables = bool(tables_with_max_norm(self._model[0]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._choose()


def predict(model: nn.Module, state: TrainState | Stacked, batches: Any, *, batch_dims: Tree = None) -> Prediction:
    """What all members of an array predict, in eval mode and without gradients.

    Args:
        model: Any module of the architecture.
        state: A :class:`TrainState`, or what :func:`stack_params` returns.
        batches: One tensor ``[N, ...]``, or an iterable of batches, see :meth:`Ensemble.predict`.
        batch_dims: None if all members share the batches, 0 if every tensor is ``[M, N, ...]``, see :meth:`Ensemble.forward`.

    Raises:
        StateError: if the state does not belong to the model.
        BatchError: if there is no batch, or a member returns anything but one tensor ``[N, ...]``.

    Example:
        >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
        >>> predict(models[0], stack_params(models), torch.randn(8, 4)).mean.shape
        torch.Size([8, 1])
    """
    if not isinstance(state, TrainState | Stacked):
        raise StateError(
            f"expected a TrainState or a Stacked but got {type(state).__qualname__}; pass a training state"
        )
    params, buffers = stacked(state)
    check_state((params, buffers), shapes(model))
    count = num_models((params, buffers))
    device = next(iter(params.values())).device
    given = isinstance(state, TrainState)
    keys = random.fold_in(state.keys, ~state.step) if given else torch.zeros(count, dtype=torch.int64, device=device)
    with torch.no_grad():
        return _predict(model, Stacked(params, buffers), keys, batches, batch_dims)


def _predict(model: nn.Module, stacked: Stacked, keys: Tensor, batches: Any, batch_dims: Tree) -> Prediction:
    run, known = bind(model, _forward, training=False), Known()
    return gather(lambda *args, **kwargs: _call(run, known, stacked, keys, args, kwargs, batch_dims)[0], batches)


def _call(
    run: Callable[..., Any],
    known: Known,
    stacked: Stacked,
    keys: Tensor,
    args: Any,
    kwargs: dict[str, Any],
    batch_dims: Tree,
) -> tuple[Any, Params]:
    """The outputs and new buffers of all members."""
    given = {"args": args, "kwargs": kwargs}
    if isinstance(batch_dims, list):
        batch_dims = tuple(batch_dims)
    if isinstance(batch_dims, tuple) and len(batch_dims) != len(args):
        raise BatchError(f"batch_dims has {len(batch_dims)} parts for {len(args)} arguments; give one for each of them")
    dims = {"args": batch_dims, "kwargs": None} if isinstance(batch_dims, tuple) else batch_dims
    tree, params = plain(given), stacked.params
    check_batch(
        dims, tree_map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, tree), keys.shape[0], "the input"
    )
    # The first call finds out whether a model writes its parameters.
    if can_look(keys) and not known.tried:
        params = copied(params)

    def member(key: Tensor, params: Params, buffers: Params, tree: Tree) -> tuple[Any, Params]:
        own = restored(copied(tree), given)
        return run(params, buffers, *own["args"], key=key, **own["kwargs"])

    in_dims = (0, 0, 0, spread(dims, tree))
    with unwritten(params):
        return vmap_routed(member, in_dims, known)(keys, params, stacked.buffers, tree)


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


class _Names(nn.Module):
    """Tensors by path, in modules that only give names."""

    def place(self, path: str) -> tuple[nn.Module, str]:
        """The module that holds a tensor, and its name there."""
        parent, _, name = path.rpartition(".")
        return self.get_submodule(parent), name

    def hold(self, path: str, tensor: Tensor, persistent: bool = True) -> None:
        """Register a parameter or a buffer."""
        name, _, rest = path.partition(".")
        if rest:
            if name not in dict(self.named_children()):
                self.add_module(name, _Names())
            child: Any = self.get_submodule(name)
            child.hold(rest, tensor, persistent)
        elif isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, persistent=persistent)
