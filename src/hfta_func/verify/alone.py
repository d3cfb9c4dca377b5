"""One member alone: the user's own class with its tensors, in ordinary PyTorch."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._torch import batch_dim, get_unwrapped, is_compiled, is_wrapped, out_of_sight, pytree, run_uncompiled
from hfta_func._tree import tree_map
from hfta_func._types import Params
from hfta_func.calls.rewrites import OPERATORS
from hfta_func.calls.routing import routed
from hfta_func.errors import RandomnessError, StateError
from hfta_func.models.attributes import Snapshot
from hfta_func.models.functional import tables_with_max_norm
from hfta_func.models.padding import padding_of
from hfta_func.models.remat import checkpoints_of
from hfta_func.models.scalar_attributes import assign
from hfta_func.models.sizes import SIZE
from hfta_func.models.skeleton import with_zeros
from hfta_func.models.stack import members_of
from hfta_func.verify.held import as_tensor

Results = dict[str, Params]
"""Tensors by kind, such as "gradient", and path; those of an array are ``[M, ...]``."""

WRITES = (
    "the model writes its parameter '{}' in place, which a step must not do; make it a buffer, which a step returns anew, "
    "or change it between steps: state._replace(params=...), or by hfta.joint if it follows another network; what only a "
    "first call writes, write by calling each model once on a batch before stacking"
)

_SEEDING = threading.RLock()

Cast = Callable[[Any], Any]
"""Copies a tree, in float64 where that is judged."""


class Case(NamedTuple):
    """A call that is compared.

    Args:
        model: A module of the architecture, without values.
        trees: Parameters and buffers ``[M, ...]``, numbers of the members' own among these.
        shared: Tensors that all members share, by path.
        keys: ``int64[M]``.
        measure: ``measure(model, member, cast)``: what the function gives for one member, which is differentiated, and
            results by kind.
        again: ``again(cast, watch, judged, members)``: the results of the array, once more, or of an array of some members;
            ``watch`` is called with the model.
        trained: The paths of which there are gradients.
        scale: What each member's loss is multiplied by for its gradient, or None.
        autocast: As in the options of a step.
        training: Train or eval mode; None keeps the mode of the model.
        takes_gradients: Whether the function asks autograd for gradients, where none is trained.
        counts: Numbers in attributes of modules with which the call has begun, by path, where calls count.
        kept: The buffers that whoever calls keeps if members write them in eval mode; None for all.
    """

    model: nn.Module
    trees: tuple[Params, Params]
    shared: Params
    keys: Tensor
    measure: Callable[[nn.Module, int, Cast], tuple[Any, Results]]
    again: Callable[..., Results]
    trained: frozenset[str] = frozenset()
    scale: Tensor | None = None
    autocast: torch.dtype | None = None
    training: bool | None = None
    takes_gradients: bool = False
    counts: Mapping[str, Any] = {}
    kept: Collection[str] | None = None

    def alone(
        self, member: int, cast: Cast, watch: Callable[[nn.Module], None], judged: bool, model: nn.Module | None = None
    ) -> Results:
        """The results of one member alone, or of a ``model`` that has been called; judged ones without autocast."""
        model = self._model(member, cast, judged) if model is None else model
        watch(model)
        attributes = Snapshot(model)
        device, trained = self.keys.device, self.trained and not tables_with_max_norm(model)
        before = {path: x.detach().clone() for path, x in model.named_parameters() if trained and x.requires_grad}
        # A write of a frozen one is told by its count: a teacher that begins as its student keeps its values at first.
        fixed = [(path, x) for path, x in model.named_parameters() if trained and not x.requires_grad]
        frozen = [(path, x, _torch.writes(x), _torch.storage_number(x)) for path, x in fixed]
        is_training = self.training is not False and any(module.training for module in model.modules())
        evaluates = self.kept is not None and not is_training
        buffers = {path: x.clone() for path, x in model.named_buffers() if evaluates and x.layout == torch.strided}
        with torch.set_grad_enabled(bool(self.trained) or self.takes_gradients), checkpoints_of(model, frozenset()):
            casting = autocasting(device, None if judged else self.autocast, cached=True)
            with casting, keyed(self.keys[member]), seeding_refused():
                value, results = self.measure(model, member, cast)
            now = dict(model.named_parameters())
            for path, leaf in before.items():
                # Some are restored, to rounding.
                after = now[path].detach().to(leaf.dtype)
                if not (torch.equal(after, leaf) or torch.allclose(after, leaf, 1e-4, equal_nan=True)):
                    raise StateError(WRITES.format(path))
            for path, x, count, number in frozen:
                if now.get(path) is not x or (_torch.writes(x), _torch.storage_number(x)) != (count, number):
                    raise StateError(WRITES.format(path))
            if self.trained:
                graph = _graph(value)
                results["outside"] = _outside(model, graph)
                # A model may compute in coarser numbers than its own, such as a loss in float32.
                results["precision"] = {"": torch.tensor(max([0.0, *map(_torch.precision_of, graph)]))}
                results["gradient"] = self._gradient(model, value, 1 if self.scale is None else self.scale[member])
        results["attribute"] = assigned(attributes.changed(), None)
        after = {path: x.detach().clone() if evaluates else x.detach() for path, x in model.named_buffers()}
        dropped = {path: x for path, x in buffers.items() if not (torch.equal(x, after[path]) or x.isnan().any())}
        dropped = {path: x for path, x in dropped.items() if path not in (self.kept or ())}
        return results | {"buffer": after, "dropped": dropped}

    def _model(self, member: int, cast: Cast, judged: bool) -> nn.Module:
        params, buffers = ({path: leaf[member : member + 1] for path, leaf in tree.items()} for tree in self.trees)
        trained = {path: leaf.requires_grad for path, leaf in self.model.named_parameters()}
        # Copies of frozen ones could take much memory.
        shared = {path: cast(x) if judged or trained.get(path) else x.detach() for path, x in self.shared.items()}
        shared |= {path: nn.Parameter(shared[path], trained[path]) for path in shared.keys() & trained.keys()}
        if judged:
            params, buffers = cast(params), cast(buffers)
        (model,) = members_of(self.model, params, buffers, shared)
        for module in [*model.modules()]:
            if is_compiled(module):
                run_uncompiled(module)
            if isinstance(module, nn.TransformerEncoder):
                module.forward = types.MethodType(with_zeros, module)
        assign(model, self.counts)
        if self.training is not None:
            return model.train(self.training)
        for path, alone in self.paths(member).items():
            model.get_submodule(alone).training = self.model.get_submodule(path).training
        return model

    def paths(self, member: int) -> dict[str, str]:
        """The path of each module of a member's own, by its path in the array."""
        if (padding := padding_of(self.model)) is not None:
            return padding.sizes[int(self.trees[1][SIZE][member])].modules
        return {path: path for path, _ in self.model.named_modules()}

    def _gradient(self, model: nn.Module, value: Any, scale: Any) -> Params:
        trained = {path: leaf for path, leaf in model.named_parameters() if leaf.requires_grad}
        grads = torch.autograd.grad(value * scale, [*trained.values()], materialize_grads=True)
        # An autograd function may have called autograd itself, which adds to ``.grad``.
        pairs = zip(trained.items(), grads, strict=True)
        return {path: (grad if leaf.grad is None else grad + leaf.grad) / scale for (path, leaf), grad in pairs}

    def of_member(self, results: Results, member: int) -> Results:
        """A member's part of the array's results, in its true size."""
        parts = {kind: {path: leaf[member] for path, leaf in tree.items()} for kind, tree in results.items()}
        if (padding := padding_of(self.model)) is not None:
            # Which of their entries are padded, nobody knows.
            parts.pop("attribute", None)
            for kind in parts.keys() & {"gradient", "buffer", "parameter"}:
                parts[kind] = padding.true(int(self.trees[1][SIZE][member]), parts[kind])
        return parts


@contextlib.contextmanager
def seeding_refused() -> Iterator[None]:
    """A block in which this thread may not call ``torch.manual_seed``, which has no effect on members."""

    def refuse(seed: Any) -> Any:
        if threading.get_ident() == thread:
            why = "which has no effect on noise that is drawn from the member's own key"
            cure = "leave it out, or draw what is to be the same in every call outside of the function"
            raise RandomnessError(f"the model or the loss calls torch.manual_seed, {why}; {cure}")
        return seed_all(seed)

    with _SEEDING:
        seed_all, thread = torch.manual_seed, threading.get_ident()
        with _torch.replaced(torch, "manual_seed", refuse):
            yield


def _graph(value: Tensor) -> set[Any]:
    """The nodes of the graph of a value."""
    left, seen = [value.grad_fn], set[Any]()
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return seen


def _outside(model: nn.Module, graph: set[Any]) -> Params:
    """Parameters that would get a gradient and are not the model's."""
    inside, leaves = {*map(id, model.parameters())}, [node.variable for node in graph if hasattr(node, "variable")]
    return {str(i): x for i, x in enumerate(leaves) if isinstance(x, nn.Parameter) and id(x) not in inside}


class keyed(routed):
    """Routes noise by key and replaces nothing else."""

    replacements: Mapping[Any, Callable[..., Any]] = OPERATORS

    def again(self, key: Tensor | None, site: int, numbers: Any = ()) -> routed:
        """See :class:`routed`."""
        return keyed(key, site)


def autocasting(
    device: torch.device, dtype: torch.dtype | None, cached: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Autocast to ``dtype``, or nothing; tensors of one member are not cached, as they do not outlive ``vmap``."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=cached)


class Output:
    """What a module returned, and the gradients that arrived there, of all members or of one."""

    def __init__(self, path: str, kind: str):
        self.path, self.kind = path, kind
        self.values, self.differentiable, self.grads = list[Tensor](), set[int](), dict[int, Tensor]()

    def add(self, leaf: Tensor, count: int | None) -> None:
        """Note a tensor, and later its gradient; of ``count`` members at once as ``[M, ...]``."""
        number, (leaf, whole) = len(self.values), _unwrapped(leaf, count)
        # Of transforms of the model's own there is nothing to compare.
        if not is_wrapped(leaf):
            self.values.append(whole(leaf))
            if leaf.requires_grad:
                self.differentiable.add(number)
                leaf.register_hook(lambda grad: self.grads.__setitem__(number, whole(grad)))


def _unwrapped(leaf: Tensor, count: int | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The values of all members, and what copies these, or their gradient, as ``[M, ...]``, or of one as they are."""
    dim = batch_dim(leaf) if is_wrapped(leaf) else -1

    def whole(values: Tensor) -> Tensor:
        values = values.detach().clone()
        if count is None:
            return values
        return values.movedim(dim, 0) if dim >= 0 else values.expand(count, *values.shape)

    return get_unwrapped(leaf) if is_wrapped(leaf) else leaf, whole


def assigned(changes: Mapping[str, Any], count: int | None) -> Params:
    """The tensors and numbers among what a call has assigned to attributes; of ``count`` members at once as ``[M, ...]``."""
    with out_of_sight():
        named = {path: as_tensor(x) for path, x in changes.items() if isinstance(x, Tensor | int | float)}
        pairs = {path: _unwrapped(x, count) for path, x in named.items()}
        return {path: whole(x) for path, (x, whole) in pairs.items() if not is_wrapped(x)}


def noting(outputs: list[Output], count: int | None = None) -> Callable[[nn.Module], None]:
    """``watch(model)``: note every output of each module; of ``count`` members at once as ``[M, ...]``."""

    def watch(model: nn.Module) -> None:
        for path, module in model.named_modules():

            def note(module: nn.Module, args: Any, result: Any, path: str = path) -> None:
                outputs.append(noted := Output(path, type(module).__qualname__))
                with out_of_sight():
                    for leaf in filter(torch.is_tensor, pytree.tree_leaves(result)):
                        noted.add(leaf, count)

            module.register_forward_hook(note)

    return watch


def in_float64(tree: Any) -> Any:
    """A copy of a tree with numbers of float64."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.clone() if isinstance(leaf, Tensor) else leaf
        return leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64, copy=True)

    return tree_map(cast, tree)


def same(tree: Any) -> Any:
    """A copy of a tree."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, tree)
