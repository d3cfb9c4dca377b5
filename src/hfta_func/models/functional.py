"""A module as a pure function of its parameters, buffers and key."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func import _torch
from hfta_func._torch import NotReplayableError, first_member, pytree, tensors_of
from hfta_func._types import Params
from hfta_func.calls.autodiff import rehearsing
from hfta_func.calls.body import Body
from hfta_func.calls.copies import copied_module
from hfta_func.calls.padding import Padded
from hfta_func.calls.recompute import routing
from hfta_func.errors import StateError, TraceError
from hfta_func.models.attributes import Snapshot, Undoing, aliases, examined, undo
from hfta_func.models.padded_calls import Events
from hfta_func.models.padding import padding_of
from hfta_func.models.remat import checkpoints_of, rematerialise, tables_with_max_norm, trace_through_checkpoint
from hfta_func.models.scalar_attributes import assign, changed, hold
from hfta_func.models.sharing import Base
from hfta_func.models.sizes import SIZE, joined, tensors_by_path
from hfta_func.models.skeleton import skeleton


def functional(model: nn.Module, *, share_frozen: bool = False) -> Callable[..., tuple[Any, Params]]:
    """The model's forward pass as a pure function.

    Args:
        model: A module, for code, settings and train mode; it is copied, without its parameters' storage.
        share_frozen: Use the base of ``model`` for all members, see :func:`stack_params`; ``params`` and ``buffers`` contain
            only the rest.

    Returns:
        ``apply(params, buffers, *args, key=None, **kwargs) -> (output, new_buffers)`` for ONE member's parameters.
        It does not write its arguments: running statistics come back in ``new_buffers``. All random calls of the model
        draw from ``key``; without a key they draw from PyTorch's generator.

    Raises:
        StackError: if this is no module, or one with hooks of the backward pass.
        StateError: from ``apply``, if it is given a parameter that the model does not have.
        RandomnessError: from ``apply`` with a key, if the model calls a random operator that cannot draw from a key.

    Example:
        >>> params, buffers = stack_params([torch.nn.BatchNorm1d(2) for _ in range(3)])
        >>> apply = functional(torch.nn.BatchNorm1d(2))
        >>> output, new_buffers = vmap(apply)(params, buffers, torch.randn(3, 8, 2))
        >>> output.shape, new_buffers["num_batches_tracked"], buffers["num_batches_tracked"]
        (torch.Size([3, 8, 2]), tensor([1, 1, 1]), tensor([0, 0, 0]))
    """
    return Bound(model, lambda model, *args, **kwargs: model(*args, **kwargs), share_frozen=share_frozen)


class Bound:
    """``func(model, *args, **kwargs)`` as a pure function ``(params, buffers, *args, key=None, **kwargs)``.

    ``func`` receives an ordinary module that holds the given tensors. ``checkpoint`` names submodules to rematerialise in
    the backward pass, see :func:`make_train_step`. ``training`` sets train or eval mode; None keeps the mode of the model.
    Look-up tables with ``max_norm`` shorten rows of the given parameters if ``renorms`` is True, else of copies. With
    ``share_frozen`` the base of the model is used for paths that are not in ``params``.
    """

    def __init__(
        self,
        model: nn.Module,
        func: Callable[..., Any],
        checkpoint: bool | Sequence[str] = False,
        training: bool | None = None,
        renorms: bool = False,
        share_frozen: bool = False,
    ):
        inner = skeleton(model) if training is None else skeleton(model).train(training)
        self._base = Base(model, share_frozen)
        self._func, self._checkpoint, self._renorms = func, checkpoint, renorms
        # Whose counters go on, unless nobody holds it, their paths, and those with which the latest call has begun.
        self._template: Callable[[], nn.Module | None] = weakref.ref(model)
        self._counters: set[str] = set()
        self.counts: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        self.assigned: list[dict[str, Any]] | None = None
        """What each call leaves in attributes, by path, where that is to be compared."""
        # The buffers that calls in eval mode have written, in order.
        self.written: dict[str, None] = {}
        self.ends_calls = True
        """Whether counters go on after each call; otherwise :meth:`end_call` says so, after those of all groups."""
        self._skeleton = inner
        # A model may keep layers in train mode.
        self._evaluates = training is False or not any(module.training for module in inner.modules())
        for path, layer in inner.named_modules() if self._evaluates else ():
            # A batch norm writes its running statistics uncounted.
            if layer.training and getattr(layer, "track_running_stats", False):
                names = [joined(path, name) for name, _ in layer.named_buffers(recurse=False)]
                self.written |= {name: None for name in names if name not in self._base.buffers}
        self._paths = {path for path, _ in (*inner.named_parameters(), *inner.named_buffers())}
        self._start(inner)

    def _start(self, inner: nn.Module, numbers: tuple[str, ...] = ()) -> None:
        """Use a skeleton for all calls, in which the ``numbers`` are buffers."""
        self._inner, self._numbers = inner, numbers
        self._shared = {id(tensor): tensor for tensor in tensors_by_path(inner).values()}
        self._holders, self._rewritten = _holders(inner), () if self._renorms else tables_with_max_norm(inner)
        self.trained = {path for path, param in inner.named_parameters() if param.requires_grad}
        # A call puts its tensors into a module, so concurrent calls in other threads need other modules.
        self._first, self._idle = self._make(), []
        self.assigned_paths: set[str] = set()
        """The attributes that calls have changed."""
        self._is_counted = False
        self._undoing: list[Undoing] = []
        padding = padding_of(inner)
        self._events = None if padding is None else Events(padding, numbers, self._func, self._recorded)

    def __getstate__(self) -> dict[str, Any]:
        # In another process, nobody else has the model.
        return {**vars(self), "_template": type(None)}

    def _make(self, remat: bool = True) -> tuple[Body, Snapshot]:
        body = Body(copied_module(self._inner, dict(self._shared)), self._func)
        rematerialise(body.model, remat and self._checkpoint)
        body.places = _torch.places_of(body)
        body.aliases = aliases(body.model, body.places)
        for path, module in body.model.named_modules():
            names = [name for name in tensors_of(module) if joined(path, name) in self._base.buffers]
            body.fixed |= {(id(module), name) for name in names}
        return body, Snapshot(body.model)

    def __call__(self, params: Params, buffers: Params, *args: Any, key: Tensor | None = None, **kwargs: Any) -> Any:
        """Call the function with one member's tensors; see :class:`Bound`."""
        numbers = tuple([path for path in buffers if path not in self._paths])
        if numbers != self._numbers:
            self._prepare(numbers)
        if torch.compiler.is_compiling():
            # Exports that do not compile need no tracing of checkpoints.
            if self._is_counted:
                raise TraceError(
                    f"each call of the model changes {', '.join(map(repr, sorted(self._counters)))}, from which it computes, "
                    f"and a compiled step has one value for all calls; make it a buffer, or leave the step uncompiled"
                )
            if torch.compiler.is_dynamo_compiling():
                trace_through_checkpoint()
            padded = None if self._events is None else Padded(buffers[SIZE], self._events.latest)
            results = self._call(self._first[0], params, buffers, (args, kwargs), key, padded)
            undo(self._undoing)
            return results
        padded = None if self._events is None else self._events(self._inner, params, buffers, (args, kwargs), key)
        body, attributes = one = self._idle.pop() if self._idle else self._make()
        template = self._template() or self._skeleton
        # A first call may have made some, and set them only after those of all groups.
        self.counts |= {path: number for path in self._counters for number in _attribute(template, path)}
        assign(body.model, self.counts)
        with checkpoints_of(body.model, body.fixed) as checkpoints, self._base.reading(params):
            results = self._call(body, params, buffers, (args, kwargs), key, padded)
        changed = attributes.changed()
        if self.assigned is not None:
            self.assigned.append(changed)
        if not self.assigned_paths.issuperset(changed):
            self._examine(params, buffers, (args, kwargs), key)
            self.assigned_paths.update(changed)
            self._undoing = self._first[1].undoing(self.assigned_paths)
        if self._counters and _torch.num_recorders():
            raise NotReplayableError("the model counts its calls")
        if self._counters and not rehearsing.get():
            self._left.update((path, changed[path]) for path in self._counters if path in changed)
            if self.ends_calls:
                self.end_call()
        # The backward pass runs rematerialised modules again.
        if not (self._checkpoint or checkpoints):
            undo(attributes.undoing(changed))
            self._idle.append(one)
        return results

    @property
    def differentiates_shared(self) -> bool:
        """Whether a call has taken gradients by tensors that members share."""
        return any(body.differentiates_shared for body, _ in self._idle)

    def count_with(self, other: Bound) -> None:
        """Go on with the counters of another function of the model."""
        self._template, self._counters = lambda: other._template() or other._skeleton, other._counters

    def end_call(self) -> None:
        """Let the counters of the model go on."""
        if self._left:
            assign(self._template() or self._skeleton, self._left)
            self._left.clear()

    def _recorded(self, params: Params, buffers: Params, inputs: tuple[Any, Any], key: Tensor, recorder: Any) -> None:
        """Call the function with a new copy of the model, for a recorder of its events."""
        body, _ = self._make(False)
        with checkpoints_of(body.model, body.fixed), self._base.reading(params):
            self._call(body, params, buffers, inputs, key, recorder)

    @contextlib.contextmanager
    def observed(self, watch: Callable[[nn.Module], None]) -> Iterator[None]:
        """A block whose calls, one at a time, use a new copy of the model after ``watch(copy)``."""
        body, _ = self._make()
        watch(body.model)
        with _torch.replaced(self, "_idle", [(body, Snapshot(body.model))]):
            yield

    # The compiler cannot trace copies of modules, so it runs this while it traces.
    @_torch.constant_to_compiler
    def _prepare(self, numbers: tuple[str, ...]) -> bool:
        inner = copied_module(self._skeleton, {id(leaf): leaf for leaf in tensors_by_path(self._skeleton).values()})
        hold(inner, numbers)
        self._start(inner, numbers)
        return True

    def _call(
        self, body: Body, params: Params, buffers: Params, inputs: tuple[Any, Any], key: Tensor | None, padded: Any
    ) -> tuple[Any, Params]:
        (args, kwargs), whole = inputs, params
        if isinstance(padded, Padded) and self._events is not None:
            params = self._events.padding.masked(params, padded)
        # Modules update running statistics in place, so they get copies, and the call leaves the new ones in `tensors`.
        # Inference mode counts no writes.
        is_inference = self._evaluates and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if is_inference else contextlib.nullcontext():
            given = {**self._base.tensors, **params, **{path: tensor.clone() for path, tensor in buffers.items()}}
        given |= {path: params[path].clone() for path in self._rewritten if path in params}
        tensors = {f"model.{name}": x for path, x in given.items() for name in self._holders.get(path, (path,))}
        if not tensors.keys() <= body.places.keys():
            unknown = min(tensors.keys() - body.places.keys()).removeprefix("model.")
            raise StateError(f"the model has no parameter or buffer '{unknown}'; pass what stack_params returns for it")
        numbers = [given[path] for path in self._numbers]
        watched = {path: _written(given[path]) for path in (buffers if self._evaluates else self._numbers)}
        # The same numbers are in the ``hparams`` among a loss's arguments.
        again = [x[path] for x in args if numbers and isinstance(x, dict) for path in self._numbers if path in x]
        with routing(key, [*numbers, *again], padded):
            if torch.compiler.is_compiling():
                output = torch.func.functional_call(body, tensors, args, kwargs, tie_weights=False)
            else:
                output = _torch.call_with(body.places, tensors, body, *args, **kwargs)
        if self._renorms and params is not whole:
            for path in whole.keys() & {*tables_with_max_norm(self._inner)}:
                whole[path].detach().copy_(params[path].detach())
        self._base.check_kept(given, tensors, "model.")
        changed_buffers = {path: tensors[f"model.{path}"] for path in buffers}
        for path, version in watched.items():
            if changed_buffers[path] is not given[path] or _written(given[path]) != version:
                if path in self._numbers:
                    raise changed(path)
                self.written[path] = None
        return output, changed_buffers

    def _examine(self, *given: Any) -> None:
        """Find out what attributes carry from call to call; raise a StateError if it is more than a counter."""

        def part(leaf: Tensor, factor: float = 1) -> Tensor:
            leaf = first_member(leaf)
            return leaf * factor if factor != 1 and leaf.is_floating_point() else leaf.clone()

        def run(body: Body, altered: bool, buffers: Params | None) -> Any:
            params, start, inputs, key = given
            params = {path: part(param) for path, param in params.items()}
            # Halved values are still valid as probabilities, variances and masks.
            inputs = pytree.tree_map_only(Tensor, lambda x: part(x, 0.5 if altered else 1), inputs)
            buffers = {path: part(buffer) for path, buffer in (start if buffers is None else buffers).items()}
            torch.manual_seed(altered)
            key = None if key is None else part(key) + altered
            padded = None if self._events is None else self._events(self._inner, params, buffers, inputs, key)
            return self._call(body, params, buffers, inputs, key, padded)

        device = next((leaf for leaf in given[0].values() if leaf.is_cuda), None)
        with _torch.outside_transforms(), torch.random.fork_rng([] if device is None else [device.device]):
            counters, is_counted = examined(run, self._make)
        self._counters |= counters
        self._is_counted |= is_counted


def _written(tensor: Tensor) -> int:
    """How often a tensor was written; the compiler counts no writes."""
    return 0 if torch.compiler.is_dynamo_compiling() else _torch.writes(tensor)


def _attribute(model: nn.Module, path: str) -> list[Any]:
    owner, _, name = path.rpartition(".")
    return [x for key, x in vars(model.get_submodule(owner)).items() if key == name]


def _holders(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All paths of each parameter or buffer (one for each module that holds it) by its first path."""
    # ``functional_call(tie_weights=True)`` would list a module with two paths twice, and fail to restore its tensors.
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, tensor in tensors_of(module).items():
            if tensor is not None:
                paths.setdefault(id(tensor), []).append(joined(path, name))
    return {names[0]: tuple(names) for names in paths.values()}
