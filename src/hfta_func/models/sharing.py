"""Shared tensors, held once and without a model axis: the base (frozen parameters and their buffers), shared parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from hfta_func._torch import parts, places_of, tensors_of, writes
from hfta_func.errors import StackError, StateError
from hfta_func.models.structure import is_sparse


def base_of(model: nn.Module, share_frozen: bool = True) -> dict[str, Tensor]:
    """The base by path: frozen parameters, and buffers of modules without trained parameters of their own.

    Without ``share_frozen`` it is sparse buffers alone, such as a graph's adjacency, which cannot be stacked.
    """
    sparse = {path: buffer for path, buffer in model.named_buffers() if is_sparse(buffer)}
    if not share_frozen:
        return sparse
    base: dict[str, Tensor] = {path: param for path, param in model.named_parameters() if not param.requires_grad}
    unshared = {
        id(buffer)
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
        for buffer in module.buffers(recurse=False)
    }
    return base | {path: x for path, x in model.named_buffers() if id(x) not in unshared} | sparse


def shared_of(model: nn.Module, shared_params: Sequence[str]) -> dict[str, Tensor]:
    """The shared parameters that are trained, by path.

    Args:
        model: The model.
        shared_params: Paths of parameters, or of submodules for all of their trained parameters.

    Raises:
        StackError: if a path has no trained parameter, or a forward pass would write one.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for path in shared_params:
        trained = [param for name, param in every.items() if f"{name}.".startswith(f"{path}.") and param.requires_grad]
        if not trained:
            raise StackError(
                f"shared_params names '{path}', which is no parameter or submodule with parameters that require grad; "
                f"share_frozen=True shares what is not trained"
            )
        chosen |= {id(param) for param in trained}
    return {path: param for path, param in model.named_parameters() if id(param) in chosen}


def statistics_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose running statistics are shared, so no call may write them."""
    known = {id(tensor) for tensor in base_of(model).values()}
    tracking = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    return [module for module in tracking if id(getattr(module, "running_mean", None)) in known]


class Base:
    """The base of a model, which its calls read and must not write.

    Args:
        model: The model.
        training: Train or eval mode of the calls; None keeps the mode of the model.

    Raises:
        StackError: if a forward pass would write the base, or the base has no gradient (inference mode).
    """

    def __init__(self, model: nn.Module, training: bool | None, share_frozen: bool = True):
        self.tensors = base_of(model, share_frozen)
        self.buffers = [path for path, _ in model.named_buffers() if path in self.tensors]
        slots = places_of(model)
        self._places = [(path, *slots[path], tensor) for path, tensor in self.tensors.items()]
        known = {id(tensor) for tensor in self.tensors.values()}
        for path, module in model.named_modules():
            held = [name for name, tensor in tensors_of(module).items() if id(tensor) in known]
            where = f"'{path}' ({type(module).__qualname__})" if path else f"the model ({type(module).__qualname__})"
            tracks = getattr(module, "track_running_stats", False) and module.training and training is None
            if tracks and "running_mean" in held:
                raise StackError(
                    f"{where} writes its running statistics in train mode, but all members share them with "
                    f"share_frozen=True; put this module in eval mode, or let its weight be trained"
                )

    @contextlib.contextmanager
    def reading(self, given: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """A block that reads the base, with the ``given`` tensors in place of those with the same paths."""
        for path, held, name, tensor in self._places:
            if path not in given and held.get(name) is not tensor:
                raise StateError(
                    f"the model holds another tensor as '{path}' than when this step was made, such as after .to(...) or "
                    f"load_state_dict(..., assign=True), and all members share it; make the step again"
                )
        tensors = {**self.tensors, **given}
        every = [(path, part, writes(part)) for path, tensor in tensors.items() for part in parts(tensor)]
        yield tensors
        for path, part, count in every:
            if writes(part) != count:
                raise _written(path)

    def check_kept(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], prefix: str) -> None:
        """Raise a StateError if a forward pass has replaced buffers of the base."""
        for path in self.buffers:
            if after[prefix + path] is not before[path]:
                raise _written(path)


def _written(path: str) -> StateError:
    return StateError(
        f"the model writes '{path}', which all members share with share_frozen=True; put the module that does so in eval "
        f"mode, or leave out share_frozen"
    )


def check_same_base(tensor: Tensor, first: Tensor, path: str, member: int, trained: bool = False) -> None:
    """Raise a StackError unless a model and model 0 have the same tensor, or equal values; the shapes must be equal."""
    if tensor is first:
        return
    if is_sparse(tensor):
        if bool((tensor.to_sparse_coo() - first.to_sparse_coo()).coalesce().values().any()):
            raise StackError(f"model {member}: the sparse '{path}' is not that of model 0; give all models one")
        return
    if len(parts(tensor)) > 1 and len(parts(tensor)) == len(parts(first)):
        for part, first_part in zip(parts(tensor), parts(first), strict=True):
            check_same_base(part, first_part, path, member, trained)
        return
    if tensor.data_ptr() == first.data_ptr() and tensor.stride() == first.stride():
        return
    tensor, first = tensor.detach(), first.detach()
    differs = (tensor != first) & ((tensor == tensor) | (first == first))
    if bool(differs.any()):
        index = tuple(int(i) for i in differs.nonzero()[0])
        kind, option = ("shared", "shared_params") if trained else ("frozen", "share_frozen")
        raise StackError(
            f"model {member}: the {kind} '{path}' is not that of model 0, with {tensor[index].item():.6g} and "
            f"{first[index].item():.6g} at {list(index)}; members that share a base start from one set of weights: load it "
            f"once, or leave out {option}"
        )
