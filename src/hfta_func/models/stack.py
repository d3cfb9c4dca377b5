"""Ordinary modules to stacked parameters and back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import seed_cpu, weight_hooks
from hfta_func._tree import num_models
from hfta_func._types import Params
from hfta_func.calls.copies import copied_module, mark
from hfta_func.errors import HyperparameterError, StackError, StateError
from hfta_func.models.padding import pad_member, padded, padding_of
from hfta_func.models.scalar_attributes import assign, is_placeholder, numbers_of
from hfta_func.models.sharing import base_of, check_same_base, shared_of
from hfta_func.models.sizes import SIZE
from hfta_func.models.structure import check_module, check_same_structure, computed, pairs


class Stacked(NamedTuple):
    """Parameters and buffers of M models, each leaf ``[M, ...]`` by its path in the module.

    The leaves do not require grad. A tied parameter has one leaf, under its first path. A number in which the models differ,
    such as a dropout rate, is a buffer ``float64[M]`` under the path of the attribute, for example ``"1.p"``.
    """

    params: Params
    buffers: Params

    def __repr__(self) -> str:
        counts = [len(leaf) for tree in self for leaf in tree.values() if isinstance(leaf, Tensor) and leaf.dim()]
        return f"Stacked({max(counts, default=0)} members, {len(self.params)} parameters, {len(self.buffers)} buffers)"


def stack_params(
    models: Iterable[nn.Module],
    *,
    share_frozen: bool = False,
    shared_params: Sequence[str] = (),
    pad: bool | nn.Module = False,
) -> Stacked:
    """Stack the parameters and buffers of M models of one architecture.

    The models may also differ in numbers in attributes of their modules, such as dropout rates: floats, or integers where
    another model has a float. A training state holds these numbers in ``hparams``, see :meth:`TrainStep.init`.

    Args:
        models: At least one module; the modules are not changed.
        share_frozen: Leave out the *base*: parameters that do not require grad, and buffers of modules that have no
            trained parameter of their own. The base must be equal in all models; steps made with
            ``share_frozen=True`` hold it once.
        shared_params: Also leave out these parameters, which members share and train together, see
            :func:`make_train_step`. They must be equal in all models.
        pad: Stack models of different size as one array, see :func:`padded`: True, or the model that it has made, which may
            have been made of more sizes than there are here.

    Raises:
        StackError: if there is no model, or two models differ in more than these
            numbers and the values of parameters and buffers, or in the base. It names the member, the path and both values.

    Example:
        >>> params, buffers = stack_params([torch.nn.Linear(2, 10) for _ in range(3)])
        >>> params["weight"].shape
        torch.Size([3, 10, 2])
        >>> stack_params([torch.nn.Dropout(rate) for rate in (0.1, 0.2)]).buffers
        {'p': tensor([0.1000, 0.2000], dtype=torch.float64)}
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise StackError(f"expected a list of models but got one {type(models).__qualname__}; pass [model]")
    models = list(models)
    if pad is False:
        return _stack(models, len(models), share_frozen, shared_params)
    model: Any = pad if isinstance(pad, nn.Module) else padded(models)
    members = (pad_member(model, each, member) for member, each in enumerate(models))
    stacked = _stack(members, len(models), share_frozen, shared_params)
    first = numbers_of(pad_member(model, models[0], 0))
    for path in [path for path in model.padding.numbers if path not in stacked.buffers]:
        stacked.buffers[path] = torch.full_like(stacked.buffers[SIZE], getattr(*first[path]), dtype=torch.float64)
    return stacked


def init_params(
    factory: Callable[..., nn.Module],
    seeds: Sequence[int] | Tensor,
    *,
    share_frozen: bool = False,
    shared_params: Sequence[str] = (),
    pad: bool | nn.Module = False,
    **arguments: Sequence[Any] | Tensor,
) -> Stacked:
    """Build one model per seed and stack them, with at most two models in memory besides the array.

    Member ``i`` is what ``torch.manual_seed(seeds[i]); factory()`` makes, with its own ``arguments``. The global generator
    does not change, and other threads that draw from it change nothing.

    Args:
        factory: Makes one model, for example ``lambda: MLP(64, 10)``.
        seeds: One integer per member.
        share_frozen: Leave out what all members share, as :func:`stack_params` does.
        shared_params: Leave out these parameters. Members start from their values in the model that is passed to
            :func:`make_train_step`, not from those that ``factory`` makes.
        pad: Models may differ in size, as in :func:`stack_params`; all of them are in memory at once.
        arguments: Keyword arguments of ``factory``, one value per member each, such as ``p=[0.1, 0.3]``.

    Raises:
        HyperparameterError: if a seed is not an integer, or an argument is not one value per member.
        StackError: if there is no seed, ``factory`` is itself a module, or :func:`stack_params` refuses its models.

    Example:
        >>> params, _ = init_params(lambda: torch.nn.Linear(2, 10), seeds=[0, 1])
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(params["weight"][1], torch.nn.Linear(2, 10).weight)
        True
        >>> init_params(lambda rate: torch.nn.Dropout(rate), seeds=[0, 1], rate=[0.1, 0.3]).buffers
        {'p': tensor([0.1000, 0.3000], dtype=torch.float64)}
    """
    values = random.keys(seeds).tolist()
    columns = {name: getattr(column, "tolist", lambda column=column: column)() for name, column in arguments.items()}
    for name, column in columns.items():
        if isinstance(column, str) or not isinstance(column, Sequence) or len(column) != len(values):
            raise HyperparameterError(
                f"{name} is {column!r} for {len(values)} models; give one value per model, or bind it in the factory"
            )

    rows = ({name: column[member] for name, column in columns.items()} for member in range(len(values)))
    made = map(functools.partial(build, factory), values, rows)
    if pad is not False:
        return stack_params([*made], share_frozen=share_frozen, shared_params=shared_params, pad=pad)
    return _stack(made, len(values), share_frozen, shared_params, is_given=False)


def build(factory: Callable[..., nn.Module], seed: int, arguments: Mapping[str, Any]) -> nn.Module:
    """The model that a factory makes by a seed; the global generator does not change."""
    if isinstance(factory, nn.Module):
        why, cure = f"factory is a module ({type(factory).__qualname__})", "pass a function that makes one"
        raise StackError(f"{why}; {cure}, so that every seed gets weights of its own")
    # With a list of GPUs, because PyTorch would otherwise warn if there are several.
    with random.one_thread(), torch.random.fork_rng(range(torch.cuda.device_count())):
        # Of devices that are not there, PyTorch would note the seed with a traceback each.
        (torch.manual_seed if torch.accelerator.is_available() else seed_cpu)(seed)
        return factory(**arguments)


def unstack_params(
    model: nn.Module, params: Params, buffers: Params, *, share_frozen: bool = False, shared: Params | None = None
) -> list[nn.Module]:
    """Make M ordinary modules with separate storage: the inverse of :func:`stack_params`.

    Args:
        model: Any module of the architecture, for code, settings, ties and ``requires_grad``; it is not changed.
        params: Stacked parameters ``[M, ...]``.
        buffers: Stacked buffers ``[M, ...]``.
        share_frozen: The array was stacked with ``share_frozen=True``. The modules use the same tensors as ``model`` for the
            base, which must be that of the array.
        shared: Parameters that members share, by path, as in ``state.shared.params``; all modules hold one copy of them.

    Raises:
        StackError: if paths or shapes differ from those of ``model``.

    Example:
        >>> layers = [torch.nn.Linear(2, 10) for _ in range(3)]
        >>> back = unstack_params(layers[0], *stack_params(layers))
        >>> torch.equal(back[2].weight, layers[2].weight)
        True
    """
    held: Params = {path: nn.Parameter(param.detach().clone()) for path, param in (shared or {}).items()}
    check_stacked((params, buffers), shapes(model, share_frozen, [*held]))
    return members_of(model, params, buffers, held)


def members_of(model: nn.Module, params: Params, buffers: Params, shared: Params) -> list[nn.Module]:
    """Modules with copies of their parameters and buffers, and the tensors in ``shared``; the rest is from ``model``."""
    if (padding := padding_of(model)) is not None:
        return [made for one in padding.apart(params, buffers) for made in members_of(*one, shared)]
    return [_member(model, params, buffers, shared, index) for index in range(num_models((params, buffers)))]


class Shapes(NamedTuple):
    """Shapes of a member's parameters and buffers by path, and the paths of the base and of numbers."""

    params: dict[str, torch.Size]
    buffers: dict[str, torch.Size]
    base: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()


def shapes(model: nn.Module, share_frozen: bool = False, shared_params: Sequence[str] = ()) -> Shapes:
    """The :class:`Shapes` of a model."""
    check_module(model)
    base = frozenset({*base_of(model, share_frozen), *shared_of(model, shared_params)})
    params = {path: parameter.shape for path, parameter in model.named_parameters() if path not in base}
    buffers = {path: buffer.shape for path, buffer in model.named_buffers() if path not in base}
    return Shapes(params, buffers, base, frozenset(numbers_of(model)))


_CURES: dict[type[Exception], str] = {
    StackError: "pass the model that the array was stacked from, and the same",
    StateError: "the state and the step must be of the same model, made with the same",
}


def check_stacked(stacked: tuple[Params, Params], expected: Shapes, error: type[Exception] = StackError) -> None:
    """Raise a StackError unless parameters and buffers fit a model with shapes ``expected``."""
    if mismatch := _mismatch(stacked, expected):
        raise error(f"{mismatch}; {_CURES[error]} share_frozen and shared_params")


check_state = functools.partial(check_stacked, error=StateError)
"""The same of a state and a step's model, which raises a StateError."""


def _mismatch(stacked: tuple[Params, Params], model: Shapes) -> str:
    """Describe the first difference between an array and a model; empty if there is none."""
    for are_buffers, leaves, expected in zip((False, True), stacked, (model.params, model.buffers), strict=True):
        for path in {**expected, **leaves}:
            if path not in leaves:
                return f"'{path}' is in the model but not in the array"
            if path not in expected and path in model.numbers and are_buffers:
                if is_placeholder(leaves[path]):
                    raise StateError(
                        f"'{path}' is a number of each member's own, which lies in the state's hparams; where params and "
                        f"buffers are wanted without a state, pass *hfta.step.stacked(state)"
                    )
            elif path not in expected:
                shares = "members share it; stack them with share_frozen=True, or shared_params"
                return f"'{path}' is in the array but {shares if path in model.base else 'not in the model'}"
            # Calls may fill a buffer that starts without entries.
            elif leaves[path].shape[1:] != expected[path] and not (are_buffers and 0 in expected[path]):
                return f"'{path}' is {[*leaves[path].shape[1:]]} per member but {[*expected[path]]} in the model"
    return ""


def _member(model: nn.Module, params: Params, buffers: Params, shared: Params, index: int) -> nn.Module:
    # A deep copy with tensors from the memo keeps ties, views of weights and plain attributes.
    memo: dict[int, Any] = {}
    for path, leaf in model.named_parameters():
        # A parameter that is not in the array is shared.
        made = nn.Parameter(params[path][index].detach().clone(), leaf.requires_grad) if path in params else leaf
        memo[id(leaf)] = shared.get(path, made)
    named = dict(model.named_buffers())
    for path, leaf in named.items():
        memo[id(leaf)] = buffers[path][index].detach().clone() if path in buffers else shared.get(path, leaf)
    for leaf in (*model.parameters(), *model.buffers()):
        mark(memo[id(leaf)], leaf)
    for leaf in model.modules():
        memo |= {id(tensor): tensor.detach().clone() for tensor in computed(leaf).values()}
    member = copied_module(model, memo)
    for leaf in member.modules():
        for name, compute in weight_hooks(leaf).items():
            setattr(leaf, name, compute())
    assign(member, {path: leaf[index].item() for path, leaf in buffers.items() if path not in named})
    return member


def _stack(
    models: Iterable[nn.Module], count: int, share_frozen: bool, shared_params: Sequence[str], is_given: bool = True
) -> Stacked:
    if not count:
        raise StackError("no models to stack; pass at least one")
    rest = iter(models)
    check_module(first := next(rest), "model 0: ")
    base, shared = base_of(first, share_frozen), shared_of(first, shared_params)
    all_first = dict(first.named_parameters()), dict(first.named_buffers())
    stacked = Stacked({}, {})
    numbers: dict[str, list[float]] = {}
    for member, model in enumerate(itertools.chain([first], rest)):
        check_module(model, f"model {member}: ")
        differing = check_same_structure(model, first, member, numbers)
        numbers |= {path: [first_value] * member for path, (_, first_value) in differing.items() if path not in numbers}
        for path, values in numbers.items():
            values.append(differing[path][0] if path in differing else values[0])
        both = dict(model.named_parameters()), dict(model.named_buffers())
        for leaves, named, first_named in zip(stacked, both, all_first, strict=True):
            for path, tensor, other in pairs(named, first_named, member):
                _check_tensors(tensor, other, path, member)
                if path in base or path in shared:
                    if path in base or is_given:
                        check_same_base(tensor, other, path, member, trained=path in shared)
                    continue
                if member == 0:
                    leaves[path] = torch.empty(count, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
                leaves[path][member].copy_(tensor.detach())
    device = next((leaf.device for tree in stacked for leaf in tree.values()), None)
    for path, values in numbers.items():
        stacked.buffers[path] = torch.tensor(values, dtype=torch.float64, device=device)
    return stacked


def _check_tensors(tensor: Tensor, first: Tensor, path: str, member: int) -> None:
    for what in ("shape", "dtype", "device", "requires_grad"):
        a, b = getattr(tensor, what), getattr(first, what)
        if a != b:
            name = f"'{path}'" if what == "shape" else f"the {what} of '{path}'"
            a, b = (list(a), list(b)) if what == "shape" else (a, b)
            raise StackError(f"model {member}: {name} is {a} but model 0 has {b}; members must share every {what}")
