"""What members share: parameters that are not trained and their buffers, held once, without a model axis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hfta_func._torch import outside_transforms, own_tensors, parts, places_of, refusing_writes, writes
from hfta_func._types import StackError, StateError


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that all members share, by path: frozen parameters, and buffers of modules that train none of their own."""
    base: dict[str, Tensor] = {path: param for path, param in model.named_parameters() if not param.requires_grad}
    own = {
        id(buffer)
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
        for buffer in module.buffers(recurse=False)
    }
    return base | {path: buffer for path, buffer in model.named_buffers() if id(buffer) not in own}


def shared_of(model: nn.Module, shared_params: Sequence[str]) -> dict[str, Tensor]:
    """The parameters that members share and train, by path.

    Args:
        model: The model.
        shared_params: Paths of parameters, or of submodules, all of whose trained parameters are meant.

    Raises:
        StackError: if a path has no trained parameter, or one that a forward would write.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for path in shared_params:
        found = [param for name, param in every.items() if name == path or name.startswith(f"{path}.")]
        if not found:
            raise StackError(
                f"shared_params names '{path}', which is no parameter or submodule with parameters of the model"
            )
        trained = [param for param in found if param.requires_grad]
        if not trained:
            raise StackError(
                f"shared_params names '{path}', which does not require grad; share_frozen=True shares what is not trained"
            )
        chosen |= {id(param) for param in trained}
    for path, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and any(id(param) in chosen for param in module.parameters()):
            raise StackError(
                f"'{path}' has max_norm, so each member shortens rows of its own; it cannot be in shared_params"
            )
    return {path: param for path, param in model.named_parameters() if id(param) in chosen}


def statistics_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose running statistics all members share, so that no call may write them."""
    known = {id(tensor) for tensor in base_of(model).values()}
    tracking = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    return [module for module in tracking if id(getattr(module, "running_mean", None)) in known]


class Base:
    """The base of a model, for its calls to read.

    Args:
        model: The model.
        training: The mode of the calls; None is the model's own.

    Raises:
        StackError: if a forward would write the base, or nothing can be trained over it.
    """

    def __init__(self, model: nn.Module, training: bool | None):
        self.tensors = base_of(model)
        self.buffers = [path for path, _ in model.named_buffers() if path in self.tensors]
        self._tried = False
        places = places_of(model)
        self._places = [(path, *places[path], tensor) for path, tensor in self.tensors.items()]
        known = {id(tensor) for tensor in self.tensors.values()}
        for path, module in model.named_modules():
            held = [name for name, tensor in own_tensors(module).items() if id(tensor) in known]
            where = f"'{path}' ({type(module).__qualname__})" if path else f"the model ({type(module).__qualname__})"
            tracks = getattr(module, "track_running_stats", False) and module.training and training is None
            if tracks and "running_mean" in held:
                raise StackError(
                    f"{where} writes its running statistics in train mode, but all members share them with "
                    f"share_frozen=True; put this module in eval mode, or let its weight be trained"
                )
            if getattr(module, "max_norm", None) is not None and "weight" in held:
                raise StackError(
                    f"{where} has max_norm, so it shortens rows of its frozen weight in place, which all members share; "
                    f"shorten them beforehand and set max_norm to None"
                )
        for path, tensor in self.tensors.items():
            if tensor.is_inference():
                raise StackError(
                    f"'{path}' was made in inference mode, so nothing can be trained over it; load the base outside of "
                    f"torch.inference_mode()"
                )

    @contextlib.contextmanager
    def reading(self, given: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """A block that reads the tensors, or those given for the same paths.

        In the first one, a write raises a StateError before anything is changed.
        """
        tensors = {**self.tensors, **given}
        for path, held, name, tensor in self._places:
            if path not in given and held.get(name) is not tensor:
                raise StateError(
                    f"the model holds another tensor as '{path}' than when this step was made, such as after .to(...) or "
                    f"load_state_dict(..., assign=True), and all members share it; make the step again"
                )
        if self._tried or not tensors:
            every = [(path, part) for path, tensor in tensors.items() for part in parts(tensor)]
            before = [writes(part) for _, part in every]
            yield tensors
            for (path, part), count in zip(every, before, strict=True):
                if writes(part) != count:
                    raise _written(path)
            return
        # Not every operator says what it writes: batch normalisation does not. Weights in 8 bits are not what those write.
        copies = {path: tensors[path].clone() for path in self.buffers if tensors[path].is_floating_point()}
        read = {**tensors, **copies}
        with refusing_writes(read, _written):
            yield read
        with outside_transforms():
            for path, copy in copies.items():
                if not bool(_same(copy, tensors[path]).all()):
                    raise _written(path)
        self._tried = True

    def check_kept(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], prefix: str) -> None:
        """Raise a StateError if a forward has put other buffers in place of the base's."""
        for path in self.buffers:
            if after[prefix + path] is not before[path]:
                raise _written(path)


def _written(path: str) -> StateError:
    return StateError(
        f"the model writes '{path}', which all members share with share_frozen=True; put the module that does so in eval "
        f"mode, or leave out share_frozen"
    )


def _same(mine: Tensor, theirs: Tensor) -> Tensor:
    return (mine == theirs) | ((mine != mine) & (theirs != theirs))


def check_same_base(mine: Tensor, theirs: Tensor, path: str, member: int, trained: bool = False) -> None:
    """Raise a StackError unless a model and model 0, whose tensors have one shape, share this one or hold equal values."""
    if mine is theirs:
        return
    if len(parts(mine)) > 1 and len(parts(mine)) == len(parts(theirs)):
        for own, other in zip(parts(mine), parts(theirs), strict=True):
            check_same_base(own, other, path, member, trained)
        return
    if mine.data_ptr() == theirs.data_ptr() and mine.stride() == theirs.stride():
        return
    mine, theirs = mine.detach(), theirs.detach()
    same = _same(mine, theirs)
    if not bool(same.all()):
        place = tuple(int(i) for i in (~same).nonzero()[0])
        most = (mine.double() - theirs.double()).abs().nan_to_num(torch.inf).max().item()
        raise StackError(
            f"model {member}: the {'shared' if trained else 'frozen'} '{path}' is not that of model 0, from which it differs "
            f"by up to {most:.3g}, e.g. "
            f"{mine[place].item():.6g} and {theirs[place].item():.6g} at {list(place)}; members that share a base start from "
            f"one set of weights: load it once, or leave out {'shared_params' if trained else 'share_frozen'}"
        )


def check_device(base: Mapping[str, Tensor], device: torch.device) -> None:
    """Raise a StateError if a shared tensor is not where the members are."""
    for path, tensor in base.items():
        if tensor.device != device:
            raise StateError(
                f"'{path}', which all members share, is on {tensor.device}, but the members are on {device}; move the model "
                f"before the step is made, and leave it there"
            )
