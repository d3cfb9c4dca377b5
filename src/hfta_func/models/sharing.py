"""Shared tensors, held once and without a model axis: the base (frozen parameters and their buffers), shared parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from hfta_func._torch import parts, writes
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
    trained = [x for x in model.modules() if any(p.requires_grad for p in x.parameters(recurse=False))]
    unshared = {id(buffer) for module in trained for buffer in module.buffers(recurse=False)}
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

    Raises:
        StateError: from a call that writes the base.
    """

    def __init__(self, model: nn.Module, share_frozen: bool = True):
        self.tensors = base_of(model, share_frozen)
        self.buffers = [path for path, _ in model.named_buffers() if path in self.tensors]

    @contextlib.contextmanager
    def reading(self, params: Mapping[str, Tensor]) -> Iterator[None]:
        """A block that reads the base, with the tensors of ``params`` in place of those with the same paths."""
        every = [(path, part, writes(part)) for path, x in self.tensors.items() for part in parts(params.get(path, x))]
        yield
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
    pairs = () if tensor is first else zip(parts(tensor.detach()), parts(first.detach()), strict=True)
    for a, b in pairs:
        if is_sparse(a):
            differs = (a.to_sparse_coo() - b.to_sparse_coo()).coalesce().values() != 0
        else:
            differs = (a != b) & ((a == a) | (b == b))
        if bool(differs.any()):
            kind = "shared" if trained else "sparse" if is_sparse(a) else "frozen"
            option = "shared_params" if trained else "share_frozen"
            raise StackError(
                f"model {member}: {int(differs.sum())} entries of the {kind} '{path}' are not those of model 0; members that "
                f"share a base start from one set of weights: load it once, or leave out {option}"
            )
