"""Arrays in files, and plain PyTorch models out of an array."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import optree
from torch import Tensor, nn

from hfta_func._tree import leaves, num_models, paths, shared_paths, take
from hfta_func._types import HYPERPARAMS, Tree
from hfta_func.errors import StateError
from hfta_func.files import storage
from hfta_func.files.atomic import PathLike
from hfta_func.models.stack import Stacked, unstack_params
from hfta_func.step.state import TrainState, stacked

T = TypeVar("T")


def save(state: Tree, path: PathLike, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a state, or any stacked tree, to a file; if this fails, the file keeps its former content.

    Args:
        state: A tree whose leaves are ``[M, ...]``.
        path: Usually ends in ``.safetensors``. If several processes write it at once, the last one's file stays, whole.
        metadata: JSON data that :func:`read_metadata` returns under ``"metadata"``: strings as keys, finite numbers.

    Raises:
        StackError: if a leaf is not a stacked tensor.
        CheckpointError: if ``path`` is a directory or a device, the file cannot be written, or safetensors does not support
            the dtype of a leaf.
        TypeError, ValueError: if JSON cannot hold the metadata.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "models.safetensors")
        >>> stacked = stack_params([torch.nn.Linear(2, 1) for _ in range(3)])
        >>> save(stacked, path, metadata={"data": "digits"})
        >>> params, buffers = load(path, like=stacked, members=[2, 0])
        >>> torch.equal(params["weight"], stacked.params["weight"][[2, 0]])
        True
    """
    write(path, state, json.loads(json.dumps(metadata or {}, allow_nan=False)))


def load(path: PathLike, like: T, *, members: int | slice | Sequence[int] | Tensor | None = None) -> T:
    """Read a file of :func:`save`.

    Args:
        path: The file; all of it is checked before anything is returned.
        like: A tree of the same structure, for example ``step.init(...)``, of any number of models. The result has its
            devices and floating-point dtypes.
        members: The members to load, as in :func:`take`; all by default.

    Returns:
        A new tree of the structure of ``like``.

    Raises:
        CheckpointError: if the file is damaged, not a checkpoint, or of a later format.
        StateError: if it holds another model or optimizer; it names every path that differs.
        StackError: if a member does not exist.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "bias.safetensors")
        >>> save({"bias": torch.tensor([[1.0], [2.0]])}, path)
        >>> load(path, like={"bias": torch.zeros(1, 1, dtype=torch.float64)})
        {'bias': tensor([[1.], [2.]], dtype=torch.float64)}
    """
    return read(path, like, members)[0]


def read_metadata(path: PathLike) -> dict[str, Any]:
    """Read the header of a checkpoint, without checking its data.

    Args:
        path: The file.

    Returns:
        ``format_version``, ``package_version``, ``num_models``; ``shapes`` of one member by path; ``shared``, the paths of
        what members share and train; ``hyperparameters`` by path and ``seeds``, with one value per member (NaN and infinity
        as strings, which ``float`` reads); and the ``metadata`` given to :func:`save`.

    Raises:
        CheckpointError: if the header is damaged, not a checkpoint's, or of a later format.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "bias.safetensors")
        >>> save({"bias": torch.zeros(2, 5)}, path, metadata={"epoch": 3})
        >>> header = read_metadata(path)
        >>> header["num_models"], header["shapes"], header["metadata"]
        (2, {"state['bias']": [5]}, {'epoch': 3})
    """
    return json.loads(storage.text_of(path))


def export_model(model: nn.Module, state: TrainState | Stacked, index: int, *, share_frozen: bool = False) -> nn.Module:
    """One member as an ordinary module with a copy of its parameters.

    Args:
        model: Any module of the architecture, for code, settings, ties and ``requires_grad``; it is not changed.
        state: A training state, or the result of :func:`stack_params`.
        index: The member.
        share_frozen: Whether the array was stacked with ``share_frozen=True``; the module then shares the frozen tensors of
            ``model``, which must be those of the array.

    Raises:
        StackError: if the member does not exist, or the state belongs to another model.

    Example:
        >>> layers = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> exported = export_model(layers[0], stack_params(layers), 2)
        >>> layers[0].load_state_dict(exported.state_dict())
        <All keys matched successfully>
    """
    params, buffers = take(stacked(state), operator.index(index))
    return unstack_params(model, params, buffers, share_frozen=share_frozen)[0]


def write(path: PathLike, state: Tree, metadata: Mapping[str, Any]) -> None:
    """:func:`save` whose ``metadata`` may also hold tensors."""
    storage.write(path, *_content(state, metadata))


def check(state: Tree, metadata: Mapping[str, Any]) -> None:
    """Raise what :func:`write` would raise for any path."""
    storage.encode(*_content(state, metadata))


def plain(values: Any) -> Any:
    """Nested lists of numbers with NaN and infinity as strings, because JSON has neither."""
    if isinstance(values, list):
        return [plain(value) for value in values]
    return values if math.isfinite(values) else str(values)


def read(path: PathLike, like: T, members: Any = None) -> tuple[T, Any]:
    """The result of :func:`load`, and the metadata."""
    about, saved = storage.read(path)
    expected, shared, differences = _named(like), shared_paths(like, "state"), []
    for name in [*expected, *sorted(saved.keys() - expected.keys())]:
        if name not in saved or name not in expected:
            differences.append(f"{name} is only in {'like' if name in expected else 'the file'}")
            continue
        pair, axes = (saved[name], expected[name]), 0 if name in shared else 1
        shapes, dtypes = [[*leaf.shape[axes:]] for leaf in pair], [leaf.dtype for leaf in pair]
        if shapes[0] != shapes[1]:
            differences.append(f"{name} is {shapes[0]} per member in the file, {shapes[1]} in like")
        elif dtypes[0] != dtypes[1] and not all(dtype.is_floating_point for dtype in dtypes):
            differences.append(f"{name} is {dtypes[0]} in the file, {dtypes[1]} in like")
    if differences:
        cure = "pass a state of the same model, optimizer and step options as were saved"
        listed = "\n  ".join(differences)
        raise StateError(f"{path} does not fit like: {len(differences)} paths differ; {cure}:\n  {listed}")
    chosen = [
        saved[name].clone() if members is None or name in shared else take(saved[name], members) for name in expected
    ]
    moved = [tensor.to(leaf.device, leaf.dtype) for tensor, leaf in zip(chosen, expected.values(), strict=True)]
    state: Any = optree.tree_unflatten(optree.tree_structure(like), moved)  # pyright: ignore[reportArgumentType]
    return state, about["metadata"]


def _content(state: Tree, metadata: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, shared = _named(state), shared_paths(state, "state")
    held = [name for name in tensors if any(f".{field}[" in name for field in HYPERPARAMS)]
    return tensors, {
        "num_models": num_models(state),
        "shapes": {name: list(tensor.shape[name not in shared :]) for name, tensor in tensors.items()},
        "shared": sorted(shared),
        "hyperparameters": {name: plain(tensors[name].tolist()) for name in held},
        "seeds": tensors["state.keys"].tolist() if "state.keys" in tensors else None,
        "metadata": metadata,
    }


def _named(tree: Tree) -> dict[str, Tensor]:
    return dict(zip(paths(tree, "state"), leaves(tree), strict=True))
