"""Models of different size as one: a padded model, of the largest size, and what it knows of the true sizes.

Parameters and buffers are padded with zeros, and each member's ``padded_size`` says which of the true sizes it has. Calls use
only the entries that a member has, so that the others neither matter nor get a gradient. Blocks that a model lacks pass on
their input.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, tensors_of, unwritten
from hfta_func._types import Params
from hfta_func.calls.copies import copied_module
from hfta_func.calls.padding import Padded, in_all
from hfta_func.errors import StackError
from hfta_func.models import sizes as by_size
from hfta_func.models.scalar_attributes import may_differ
from hfta_func.models.sizes import PRESENT, SIZE, Axes, Parts, joined, tensors_by_path
from hfta_func.models.structure import check_module

_SHAPELESS = {"kernel_size", "stride", "padding", "dilation", "output_padding", "num_layers"}


class Size(NamedTuple):
    """One of the true sizes.

    Args:
        model: A model of this size.
        modules: The paths of its modules, by their paths in the padded model.
        leaves: By path in the padded model, the path of a tensor and the positions of its entries along each axis.
    """

    model: nn.Module
    modules: dict[str, str]
    leaves: dict[str, tuple[str, tuple[Tensor, ...]]]


# With slots and without a __dict__, calls need not look for changes in it.
@dataclasses.dataclass(eq=False, slots=True)
class Padding:
    """What a padded model knows of its sizes.

    Args:
        sizes: The true sizes.
        signatures: What tells them apart.
        masks: By path of a parameter, the axes where sizes differ with ``bool[K, length]``: which entries each size has.
        optional: The paths of blocks that some sizes lack.
        numbers: The paths of numbers, such as dropout rates, in which models differ.
        shapes: Shape and dtype of each tensor of the padded model.
    """

    sizes: list[Size]
    signatures: list[Any]
    masks: dict[str, dict[int, Tensor]]
    optional: list[str]
    numbers: list[str]
    shapes: dict[str, tuple[torch.Size, torch.dtype]]

    def __deepcopy__(self, memo: Any) -> Padding:
        return self

    def masked(self, params: Params, padded: Padded) -> Params:
        """A member's parameters, with zeros for the entries that its size lacks, which get no gradient."""
        given = dict(params)
        for path in self.masks.keys() & params.keys():
            param = params[path]
            mask = in_all({axis: padded.of_member(table) for axis, table in self.masks[path].items()}, param)
            given[path] = param if mask is None else torch.where(mask, param, 0.0)
        return given

    def enlarged(self, number: int, tensors: Params) -> Params:
        """Tensors of a true size padded with zeros, by their paths in the padded model."""
        device = next((leaf.device for leaf in tensors.values()), None)
        leaves = {path: torch.zeros(shape, dtype=dtype, device=device) for path, (shape, dtype) in self.shapes.items()}
        for path, (alone, positions) in self.sizes[number].leaves.items():
            value = tensors[alone].detach()
            leaves[path] = leaves[path].index_put(positions, value) if positions else value.clone()
        present = {f"{path}.{PRESENT}": path in self.sizes[number].modules for path in self.optional}
        return leaves | {path: torch.tensor(value, device=device) for path, value in ({SIZE: number} | present).items()}

    def true(self, number: int, leaves: Params) -> Params:
        """A padded member's tensors in its true size, by its own paths; numbers in which members differ, too."""
        size, back = self.sizes[number], {}
        for path, leaf in leaves.items():
            if path in size.leaves:
                alone, positions = size.leaves[path]
                back[alone] = leaf[positions] if positions else leaf
            elif (owner := path.rpartition(".")[0]) in size.modules and path.rpartition(".")[2] not in (SIZE, PRESENT):
                back[f"{size.modules[owner]}.{path.rpartition('.')[2]}".lstrip(".")] = leaf
        return back

    def apart(self, params: Params, buffers: Params) -> Iterator[tuple[nn.Module, Params, Params]]:
        """For each member, the model of its size, and its parameters and buffers as an array of one."""
        for index, number in enumerate(buffers[SIZE].tolist()):
            trees = ({path: leaf[index] for path, leaf in tree.items()} for tree in (params, buffers))
            stacked = [{path: leaf[None] for path, leaf in self.true(number, tree).items()} for tree in trees]
            yield self.sizes[number].model, stacked[0], stacked[1]


def padding_of(model: nn.Module) -> Padding | None:
    """What a padded model knows of its sizes; None for other models."""
    padding = getattr(model, "padding", None)
    return padding if isinstance(padding, Padding) else None


def padded(models: Iterable[nn.Module]) -> nn.Module:
    """The model that an array of models of different size runs: as large as the largest of each size in them.

    The models may differ in widths, such as channels, hidden units and heads, and in the number of blocks of an
    ``nn.Sequential`` or ``nn.ModuleList``. Member ``i`` of the array is still the solo run ``i``: each call uses only what a
    member has. The first call of a step with inputs of new shapes is compared with a member of every size alone, and raises a
    VerifyError that names the module where results differ.

    Args:
        models: At least one model of every size; they are not changed.

    Returns:
        A model for :func:`make_train_step`, :func:`functional` and :func:`unstack_params`, which makes true sizes of it.

    Raises:
        StackError: if models differ in more than sizes and numbers; it names the model and the path.

    Example:
        >>> models = [torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1)) for width in (3, 8)]
        >>> model, (params, buffers) = padded(models), stack_params(models, pad=True)
        >>> params["0.weight"].shape
        torch.Size([2, 8, 2])
        >>> unstack_params(model, params, buffers)[0]
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
          (1): Linear(in_features=3, out_features=1, bias=True)
        )
    """
    models = list(models)
    for member, model in enumerate(models):
        check_module(model, f"model {member}: ")
    base = by_size.largest(models)
    of_base = f"model {next(member for member, model in enumerate(models) if model is base)}"
    kinds: dict[Any, tuple[nn.Module, dict[str, str]]] = {}
    numbers: dict[str, set[Any]] = {}
    for member, model in enumerate(models):
        aligned = by_size.aligned_modules(model, base, member, of_base)
        kinds.setdefault(by_size.signature_of(model, aligned), (model, aligned))
        for path, module in by_size.modules_at(model, aligned).items():
            for name in [name for name in vars(module) if may_differ(module, name)]:
                numbers.setdefault(joined(path, name), set()).add(vars(module)[name])
    varied = [path for path, values in numbers.items() if len(values) > 1 and any(isinstance(x, float) for x in values)]
    return _padded(base, kinds, varied)


def pad_member(template: Any, model: nn.Module, member: int) -> nn.Module:
    """A model in the size of the padded one."""
    padding: Padding = template.padding
    base = by_size.largest([size.model for size in padding.sizes])
    aligned = by_size.aligned_modules(model, base, member, "the padded model")
    signature = by_size.signature_of(model, aligned)
    if signature not in padding.signatures:
        raise StackError(
            f"model {member} has a size that the padded model was not made of; pass a model of this size to padded(...), too"
        )
    number = padding.signatures.index(signature)
    tensors, memo = tensors_by_path(model), {}
    enlarged = padding.enlarged(number, tensors)
    for path, leaf in tensors_by_path(template).items():
        alone = padding.sizes[number].leaves.get(path, ("",))[0]
        trained = tensors[alone].requires_grad if alone else leaf.requires_grad
        memo[id(leaf)] = nn.Parameter(enlarged[path], trained) if isinstance(leaf, nn.Parameter) else enlarged[path]
    result = copied_module(template, memo)
    for path, module in by_size.modules_at(model, aligned).items():
        for name, value in vars(module).items():
            if isinstance(value, float) or joined(path, name) in padding.numbers:
                setattr(result.get_submodule(path), name, value)
    return result


def _largest(columns: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*columns, strict=True)))


def _grown(axes: Parts, lengths: Mapping[int, int]) -> Parts:
    """The parts of a tensor of a block that others lack."""
    first = [(*axis[:-2], *(lengths.get(length, length) for length in axis[-2:])) for axis in axes[:2]]
    return (*first, *axes[2:])


def _padded(base: nn.Module, kinds: dict[Any, tuple[nn.Module, dict[str, str]]], numbers: list[str]) -> nn.Module:
    modules = [by_size.modules_at(model, aligned) for model, aligned in kinds.values()]
    parts = [by_size.parts_of(each) for each in modules]
    grown: Axes = {}
    # What a length of a size becomes, to pad blocks that others lack as those that all have.
    growth: list[dict[int, int]] = [{} for _ in kinds]
    everywhere = [key for key in parts[0] if all(key in each for each in parts)]
    for key in everywhere:
        columns = [each[key] for each in parts]
        grown[key] = tuple(_largest(axes) for axes in zip(*columns, strict=True))
        for column, lengths in zip(columns, growth, strict=True):
            for alone, large in zip(itertools.chain(*column[:2]), itertools.chain(*grown[key][:2]), strict=True):
                lengths[alone] = max(lengths.get(alone, 0), large)
    for key in dict.fromkeys(itertools.chain(*parts)):
        if key not in grown:
            pairs = zip(parts, growth, strict=True)
            columns = [_grown(each[key], lengths) for each, lengths in pairs if key in each]
            grown[key] = tuple(_largest(axes) for axes in zip(*columns, strict=True))
    template: Any = _template(base, modules, grown, growth, numbers)
    optional = [path for path, module in template.named_modules() if hasattr(module, PRESENT)]
    sizes, masks = [], {}
    for (model, aligned), each in zip(kinds.values(), parts, strict=True):
        known = {id(leaf): path for path, leaf in tensors_by_path(model).items()}
        leaves = {}
        for path in tensors_by_path(base):
            owner, _, name = path.rpartition(".")
            if (owner, name) in each:
                alone = tensors_of(model.get_submodule(aligned[owner]))[name]
                leaves[path] = known[id(alone)], _positions(each[owner, name], grown[owner, name])
        sizes.append(Size(copy.deepcopy(model), aligned, leaves))
    for path, leaf in template.named_parameters():
        axes = {axis: _mask(sizes, path, axis, length) for axis, length in enumerate(leaf.shape or (1,))}
        masks[path] = {axis: mask for axis, mask in axes.items() if not bool(mask.all())}
    masks = {path: axes for path, axes in masks.items() if axes}
    shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in tensors_by_path(template).items()}
    template.padding = Padding(sizes, [*kinds], masks, optional, numbers, shapes)
    return template


def _template(
    base: nn.Module, modules: list[dict[str, nn.Module]], grown: Axes, growth: list[dict[int, int]], numbers: list[str]
) -> nn.Module:
    """A copy of the model with the most modules, with tensors and integers of the largest sizes."""
    memo: dict[int, Any] = {}
    for path, module in base.named_modules():
        for name, leaf in tensors_of(module).items():
            shape = [math.prod(axis) for axis in grown.get((path, name), ())]
            if leaf is not None and shape != [*leaf.shape]:
                made = leaf.detach().new_zeros(shape)
                memo[id(leaf)] = nn.Parameter(made, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else made
    template = copied_module(base, memo)
    device = next((leaf.device for leaf in tensors_by_path(base).values()), None)
    template.register_buffer(SIZE, torch.zeros((), dtype=torch.int64, device=device))
    for path, module in [*template.named_modules()]:
        _grow_settings(module, path, modules, growth, numbers)
        has = {name: tuple(joined(path, name) in each for each in modules) for name, _ in module.named_children()}
        chains = [[*names] for _, names in itertools.groupby(has, has.__getitem__)]
        # Blocks in a row that the same members lack are passed over at once.
        if type(module) is nn.Sequential and len({*has.values()}) > 1:
            vars(module).update(padded_chains=chains)
        owner = path.rpartition(".")[0]
        if any(owner in each and path not in each for each in modules):
            module.register_buffer(PRESENT, torch.ones((), dtype=torch.bool, device=device))
    return template


def _positions(alone: Parts, large: Parts) -> tuple[Tensor, ...]:
    """Where the entries of a tensor lie along each axis of the padded one: indices that broadcast."""
    return tuple(
        torch.arange(math.prod(whole)).reshape(whole)[tuple(map(slice, axis))].reshape(-1, *(1,) * (len(alone) - at))
        for at, (axis, whole) in enumerate(zip(alone, large, strict=True), 1)
    )


def _mask(sizes: Sequence[Size], path: str, axis: int, length: int) -> Tensor:
    """Which entries along an axis each size has, ``bool[K, length]``; of a missing block, none."""
    mask = torch.zeros(len(sizes), length, dtype=torch.bool)
    for number, size in enumerate(sizes):
        if path in size.leaves:
            positions = size.leaves[path][1]
            mask[number, positions[axis].flatten() if positions else slice(None)] = True
    return unwritten(mask)


def _grow_settings(
    module: nn.Module, path: str, modules: Sequence[Mapping[str, nn.Module]], growth: Any, numbers: Sequence[str]
) -> None:
    """Set integers of a module to the largest that models have; where some lack it, to what its lengths have become."""
    missing = any(path not in each for each in modules)
    for name in [*vars(module)]:
        is_varied = joined(path, name) in numbers
        if is_varied or name in MODULE_ATTRIBUTES or by_size.sizes_in(vars(module)[name]) is None:
            continue
        columns = []
        for each, lengths in zip(modules, growth, strict=True):
            if path in each:
                values = by_size.sizes_in(vars(each[path]).get(name)) or ()
                grows = missing and name not in _SHAPELESS
                columns.append([lengths.get(value, value) if grows and value > 1 else value for value in values])
        old, new = vars(module)[name], _largest(columns)
        if new != by_size.sizes_in(old):
            setattr(module, name, new[0] if type(old) is int else type(old)(new))
    if isinstance(module, nn.MultiheadAttention):
        module.head_dim = module.embed_dim // module.num_heads
