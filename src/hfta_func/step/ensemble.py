"""An array as an ordinary module: a part of something larger."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import constant_to_compiler, outside_transforms, set_compiling
from hfta_func._tree import num_models, take
from hfta_func._types import Params, Tree
from hfta_func.errors import StateError
from hfta_func.models.functional import tables_with_max_norm
from hfta_func.models.sharing import base_of, shared_of, statistics_of
from hfta_func.models.skeleton import outline
from hfta_func.models.stack import Stacked, check_stacked, members_of, shapes, stack_params
from hfta_func.step.gradients import NOISE
from hfta_func.step.layers import Layers, follow_member, layers_of, without_stacked_hooks, write
from hfta_func.step.prediction import Deployed, Predicting, Prediction, gather
from hfta_func.verify import Verify


class Ensemble(nn.Module):
    """M models of one architecture as one ``nn.Module``, whose parameters are ``[M, ...]``.

    Optimizers, ``state_dict``, ``.to``, ``torch.compile``, ``torch.export`` and training frameworks take it for any other
    module, and gradients flow through it. Member ``i`` of a parameter ``path`` is ``ensemble.array.<path>[i]``.

    Args:
        model: Any module of the architecture, for code, settings, train mode and ``requires_grad``.
        params: Stacked parameters ``[M, ...]``; they are copied.
        buffers: Stacked buffers ``[M, ...]``; they are copied.
        seeds: One integer per member, from which all its noise comes; 0 to M - 1 by default.
        share_frozen: The array was stacked with ``share_frozen=True``. The ensemble holds the base of ``model`` once, without
            a model axis, in the same memory as ``model`` until one of both is moved; what writes one, such as
            ``load_state_dict``, writes the other.
        shared: Parameters that members share and train, by path, without a model axis, as in ``state.shared.params``; they
            are copied. Their gradient is the sum over members.
        verify: Whether to compare with members alone, as for :func:`make_train_step`.

    Raises:
        StackError: if params, buffers and shared parameters do not belong to the model, or a frozen module would write the
            running statistics that all members share.
        StateError: if ``params`` is a whole state, which :func:`stacked` takes apart.
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
        share_frozen: bool = False,
        shared: Params | None = None,
        verify: Verify = True,
    ):
        super().__init__()
        self.verify: Verify = verify
        buffers, shared = dict(buffers or {}), dict(shared or {})
        self.num_models = num_models((params, buffers))
        check_stacked((params, buffers), shapes(model, share_frozen, [*shared]))
        base = base_of(model, share_frozen)
        self._shared, self._base = [*shared], [*base]
        # In a tuple, or it would be a child with parameters of its own.
        self._model = (outline(model),)
        required = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
        held: Params = {path: nn.Parameter(leaf.detach().clone(), required[path]) for path, leaf in params.items()}
        held |= {path: leaf.detach().clone() for path, leaf in buffers.items()}
        held |= {path: nn.Parameter(leaf.detach().clone()) for path, leaf in shared.items()}
        held |= {path: nn.Parameter(leaf.detach(), False) if path in required else leaf for path, leaf in base.items()}
        self.array = layers_of(model, held)
        self._numbers = [path for path in buffers if path not in dict(model.named_buffers())]
        self._layers = Layers(self.array)
        device = next(iter((*params.values(), *buffers.values()))).device
        keys = random.keys(range(self.num_models) if seeds is None else seeds, device=device)
        self.register_buffer("keys", keys.clone())
        # How often the members were called in train mode, which tells one call's noise from the next one's.
        self.register_buffer("calls", torch.zeros_like(keys))
        self.training = model.training
        self._index()

    @classmethod
    def from_modules(
        cls,
        models: Iterable[nn.Module],
        *,
        seeds: Sequence[int] | Tensor | None = None,
        share_frozen: bool = False,
        shared_params: Sequence[str] = (),
        verify: Verify = True,
    ) -> Ensemble:
        """An ensemble of models that exist; they are copied, but for the base.

        Args:
            models: At least one module.
            seeds: One integer per member.
            share_frozen: Hold parameters that are not trained, and their buffers, once, see :func:`stack_params`.
            shared_params: Paths of parameters or submodules that members share and train, see :func:`stack_params`.
            verify: Whether to compare with members alone.

        Raises:
            StackError: if :func:`stack_params` refuses them.
        """
        models = models if isinstance(models, nn.Module) else [*models]
        params, buffers = stack_params(models, share_frozen=share_frozen, shared_params=shared_params)
        first, *_ = models
        shared = shared_of(first, shared_params)
        return cls(first, params, buffers, seeds=seeds, share_frozen=share_frozen, shared=shared, verify=verify)

    def forward(self, *args: Any, batch_dims: Tree = None, **kwargs: Any) -> Any:
        """Call every member.

        The members' buffers change as those of modules alone. In train mode each call draws new noise; a model that draws in
        eval mode draws the same at every call.

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
        return self._called(*self._choose(), args, kwargs, batch_dims)

    def _called(self, run: Predicting, training: bool, args: Any, kwargs: dict[str, Any], batch_dims: Tree) -> Any:
        stacked, common = self.stacked(), (self._tensors(2), self._tensors(3))
        if training and self._writes_tables and torch.is_grad_enabled():
            raise StateError("an Ensemble in train mode cannot shorten rows by max_norm; train with make_train_step")
        # That of a training step, so that both draw the same.
        key = random.fold_in(self.keys, self.calls + NOISE if training else ~self.calls)
        output, buffers = run(stacked, common, key, args, kwargs, batch_dims)
        with torch.no_grad():
            if training:
                write(self.calls, self.calls + 1)
            for path, module, name in self._layers.owners[1]:
                if training or path in run.written:
                    if getattr(module, name).shape == buffers[path].shape:
                        write(getattr(module, name), buffers[path])
                    else:
                        setattr(module, name, buffers[path].clone())
        return output

    @torch.no_grad()
    def predict(self, batches: Any, *, batch_dims: Tree = None, inputs: Any = None) -> Prediction:
        """What all members predict, in eval mode and without gradients; the ensemble's own mode stays as it is.

        Args:
            batches: One tensor ``[N, ...]``, or an iterable of batches, such as a ``DataLoader``. Each batch is a tensor, a
                tuple of several arguments, or a dict of them by name.
            batch_dims: As for :meth:`forward`.
            inputs: What the model is called with, of each batch of a loader for training: ``inputs=lambda batch: batch[0]``.

        Raises:
            BatchError: if there is no batch, or a member returns anything but one tensor ``[N, ...]``.

        Example:
            >>> ensemble = Ensemble.from_modules([torch.nn.Linear(4, 1) for _ in range(3)])
            >>> prediction = ensemble.predict(torch.randn(8, 4))
            >>> prediction.mean.shape, prediction.std.shape, prediction.quantiles([0.05, 0.95]).shape
            (torch.Size([8, 1]), torch.Size([8, 1]), torch.Size([2, 8, 1]))
        """
        run, _ = self._choose(False)
        return gather(lambda *args, **kwargs: self._called(run, False, args, kwargs, batch_dims), batches, inputs)

    def deploy(self, outputs: Literal["values", "logits", "probabilities"] = "values") -> Deployed:
        """A module whose ``forward`` gives mean and standard deviation over members; its ``export(x)`` needs no package.

        Args:
            outputs: What they are taken of: what the members return, ``"values"`` or ``"logits"``, or the softmax of it over
                the last axis, ``"probabilities"``.

        Returns:
            A copy in eval mode, without gradients. Its ``export(x)`` is a program for ``torch.export.save`` and
            ``torch.onnx.export`` that takes any number of rows.

        Raises:
            ValueError: if ``outputs`` is something else.

        Example:
            >>> deployed = Ensemble.from_modules([torch.nn.Linear(4, 3) for _ in range(3)]).deploy("probabilities")
            >>> mean, std = deployed.export(torch.randn(8, 4)).module()(torch.randn(5, 4))
            >>> mean.shape, std.shape
            (torch.Size([5, 3]), torch.Size([5, 3]))
        """
        if outputs not in ("values", "logits", "probabilities"):
            raise ValueError(f"outputs is {outputs!r}; pass 'values', 'logits' or 'probabilities'")
        return Deployed(copy.deepcopy(self), outputs)

    def stacked(self) -> Stacked:
        """The parameters and buffers ``[M, ...]`` by path, the ensemble's own and not copies."""
        return Stacked(self._tensors(0), self._tensors(1))

    def shared(self) -> Params:
        """The parameters by path that members share and train, the ensemble's own and not copies."""
        return self._tensors(2)

    def members(self) -> list[nn.Module]:
        """Ordinary modules with storage of their own, in the modes of the ensemble's.

        They have one copy of what members share and train, and the base of the ensemble's.
        """
        return self._apart(*self.stacked())

    def take(self, index: int | slice | Sequence[int] | Tensor) -> Ensemble:
        """An ensemble of some members, with their noise as it would go on.

        It has a copy of what members share and train, and the base of this one.

        Raises:
            StackError: if no member is selected or an index is out of range.
        """
        params, buffers, keys, calls = take((*self.stacked(), self.keys, self.calls), index)
        (model,) = self._apart(*take((params, buffers), 0))
        options: Any = {"share_frozen": bool(self._base), "shared": self.shared(), "verify": self.verify}
        other = Ensemble(model, params, buffers, seeds=keys, **options)
        other.calls.copy_(calls)
        return other

    def train(self, mode: bool = True) -> Ensemble:
        """Set train mode, or eval mode, of all members; modules whose running statistics members share stay in eval mode."""
        super().train(mode)
        for module in statistics_of(self.array) if self._base else ():
            module.eval()
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Ensemble:
        """Apply a function, such as one that initialises layers, to the layers of each member on its own, one by one.

        Raises:
            StackError: if the members then differ in more than values.
        """
        members = [member.apply(fn) for member in self.members()]
        stacked = stack_params(members, share_frozen=bool(self._base), shared_params=self._shared)
        with torch.no_grad():
            for tree, new in zip(self.stacked(), stacked, strict=True):
                for path in tree.keys() & new.keys():
                    tree[path].copy_(new[path])
            for path, leaf in self.shared().items():
                leaf.copy_(members[0].get_parameter(path))
        follow_member(self.array, members[0])
        return self

    def _tensors(self, kind: int) -> Params:
        """Tensors by path: 0 parameters, 1 buffers, 2 parameters that members share and train, 3 their base."""
        return {path: getattr(module, name) for path, module, name in self._layers.owners[kind]}

    def _apart(self, params: Params, buffers: Params) -> list[nn.Module]:
        common: Params = {path: nn.Parameter(leaf.detach().clone()) for path, leaf in self.shared().items()}
        for path, leaf in self._tensors(3).items():
            common[path] = nn.Parameter(leaf.detach(), False) if isinstance(leaf, nn.Parameter) else leaf
        self._layers.follow(self.array, self._model[0])
        return [without_stacked_hooks(member) for member in members_of(self._model[0], params, buffers, common)]

    def _apply(self, fn: Any, recurse: bool = True) -> Ensemble:
        numbers = {path: buffer for path, buffer in self._tensors(1).items() if path in self._numbers}
        super()._apply(fn, recurse)
        # Numbers of the members' own are numbers of Python, which no cast rounds.
        for path, module, name in self._layers.owners[1]:
            if path in numbers:
                setattr(module, name, numbers[path].to(getattr(module, name).device))
        self._index()
        return self

    def _index(self) -> None:
        """Note where the tensors are."""
        self._layers.index(self.array, self._shared, self._base)
        self._modules_now = [*self.array.modules()]
        # What layers were when it was made, and what calls the members, by the modes of the layers.
        self._runs: dict[Any, tuple[list[Any], Predicting]] = {}
        self._writes_tables = bool(tables_with_max_norm(self._model[0]))

    def _choose(self, training: bool | None = None) -> tuple[Predicting, bool]:
        """What calls the members with the modes and settings that the layers have now, and whether one is in train mode."""
        modes = training, *[module.training for module in self._modules_now]
        self._prepare(modes)
        return self._runs[modes][1], any(modes)

    @constant_to_compiler
    def _prepare(self, modes: tuple[bool | None, ...]) -> bool:
        before, values = self._runs[modes][0] if modes in self._runs else (), self._layers.values()
        if len(values) == len(before) and all(map(operator.is_, values, before)):
            return True
        compiling = set_compiling(False)
        try:
            with outside_transforms():
                self._layers.follow(self.array, self._model[0])
                run = Predicting(self._model[0], modes[0], bool(self._base), self.verify and not self._layers.has_hooks)
        finally:
            set_compiling(compiling)
        self._runs[modes] = self._layers.values(), run
        return True

    def __getstate__(self) -> dict[str, Any]:
        # What a copy makes anew.
        return {name: value for name, value in vars(self).items() if name not in ("_runs", "_modules_now")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index()
