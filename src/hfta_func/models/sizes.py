"""Compares models of different size: which modules have one place in all, and where their sizes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import MODULE_ATTRIBUTES, tensors_of
from hfta_func.errors import StackError
from hfta_func.models.scalar_attributes import is_number
from hfta_func.models.structure import check_same_class, setting_difference, settings_of_both, tensors_of_both

SIZE, PRESENT = "padded_size", "padded_present"
"""The buffers that tell a member's size, and whether it has a block."""

Parts = tuple[tuple[int, ...], ...]
"""A tensor's sizes by axis, each the product of parts that are padded apart, such as heads and the size of a head."""
Axes = dict[tuple[str, str], Parts]
"""The parts of tensors by module path and name."""


def largest(models: Sequence[nn.Module]) -> nn.Module:
    """The first of the models with the most modules and, of these, tensors, which has all that others have."""
    return max(models, key=lambda model: (len([*model.modules()]), len(tensors_by_path(model))))


def modules_at(model: nn.Module, aligned: Mapping[str, str]) -> dict[str, nn.Module]:
    """The modules of a model, by what :func:`aligned_modules` returns."""
    return {path: model.get_submodule(inner) for path, inner in aligned.items()}


def aligned_modules(model: nn.Module, base: nn.Module, member: int, other: str) -> dict[str, str]:
    """For each module of ``model``, its path by that of the module of ``base`` that has its place."""
    aligned: dict[str, str] = {}

    def align(module: nn.Module, like: nn.Module, path: str, inner: str) -> None:
        aligned[path] = inner
        where = f"'{path}'" if path else "the model"
        check_same_class(module, like, path, f"model {member}", other)
        names, likes = [name for name, _ in module.named_children()], [name for name, _ in like.named_children()]
        if names != likes and isinstance(like, nn.Sequential | nn.ModuleList) and len(names) <= len(likes):
            likes = _chosen([*module.children()], [*like.children()], likes)
        elif names != likes:
            raise StackError(
                f"model {member}: {where} has the modules {names} but in {other} it has {likes}; models of different size "
                f"may differ in the number of blocks of an nn.Sequential or nn.ModuleList, and one must have the most of each"
            )
        for name, known in zip(names, likes, strict=True):
            align(module.get_submodule(name), like.get_submodule(known), joined(path, known), joined(inner, name))

    align(model, base, "", "")
    known = tensors_of_both(model, base)
    for path, inner in aligned.items():
        _check_settings(model.get_submodule(inner), base.get_submodule(path), path, known, member, other)
    return aligned


def _chosen(blocks: Sequence[nn.Module], longer: Sequence[nn.Module], names: Sequence[str]) -> list[str]:
    """The names of the blocks in a longer sequence that have the places of shorter one's: its first ones and its last."""
    kinds, others, lacking = [*map(type, blocks)], [*map(type, longer)], len(longer) - len(blocks)
    fits = [at for at in range(len(blocks) + 1) if kinds == others[:at] + others[at + lacking :]]
    # The last block is often a layer of outputs.
    first = max([at for at in fits if at < len(blocks)], default=len(blocks))
    return [*names[:first], *names[lacking + first :]]


def _check_settings(module: nn.Module, like: nn.Module, path: str, known: set[int], member: int, other: str) -> None:
    """Raise a StackError if two modules differ in more than sizes and numbers."""
    for name, a, b in settings_of_both(module, like):
        sized = sizes_in(a) is not None and len(sizes_in(a) or ()) == len(sizes_in(b) or ())
        is_free = sized or (is_number(a) and is_number(b)) or name in ("padding", "padded_chains")
        if not is_free and (different := setting_difference(a, b, joined(path, name), known)):
            raise StackError(
                f"model {member}: '{different[0]}' is {different[1]!r} but in {other} it is {different[2]!r}; models of "
                f"different size may differ in integers, which are sizes, and floats, but share every other setting"
            )


def sizes_in(value: Any) -> tuple[int, ...] | None:
    """The integers of a setting that may be a size or several; None if it is none."""
    values = (value,) if type(value) is int else value
    is_sizes = isinstance(values, tuple | torch.Size) and all(type(each) is int for each in values)
    return tuple(values) if is_sizes else None


def signature_of(model: nn.Module, aligned: Mapping[str, str]) -> Any:
    """What tells a size from others: the modules that it has, shapes and integers."""
    modules = modules_at(model, aligned)
    settings = [((path, name), value) for path, module in modules.items() for name, value in vars(module).items()]
    sizes = [(key, sizes_in(value)) for key, value in settings if key[1] not in MODULE_ATTRIBUTES]
    shapes = tuple((key, tuple(leaf.shape)) for key, leaf in _named(modules).items())
    return tuple(aligned), tuple(each for each in sizes if each[1] is not None), shapes


def _named(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Tensor]:
    named = {(path, name): leaf for path, module in modules.items() for name, leaf in tensors_of(module).items()}
    return {key: leaf for key, leaf in named.items() if leaf is not None and key[1] not in (SIZE, PRESENT)}


def parts_of(modules: Mapping[str, nn.Module]) -> Axes:
    """The parts of each tensor's axes, by module path and name."""
    parts: Axes = {key: tuple((length,) for length in leaf.shape) for key, leaf in _named(modules).items()}
    for path, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            heads = module.num_heads, module.embed_dim // module.num_heads
            for name in ("in_proj_weight", "in_proj_bias"):
                if (key := (path, name)) in parts:
                    parts[key] = ((3, *heads), *parts[key][1:])
            key = f"{path}.out_proj".lstrip("."), "weight"
            parts[key] = (parts[key][0], heads)
        elif isinstance(module, nn.RNNBase):
            # Gates stand one below another.
            size = module.hidden_size
            of_module = {key: axes for key, axes in parts.items() if key[0] == path}
            parts |= {key: ((axes[0][0] // size, size), *axes[1:]) for key, axes in of_module.items()}
    return parts


def tensors_by_path(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def joined(path: str, name: str) -> str:
    """The path of what a module at a path calls by a name."""
    return f"{path}.{name}" if path else name
