"""What layers of a frozen network compute, as data for an array."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func.models.structure import check_module


def make_feature_extractor(model: nn.Module, layers: Sequence[str] | Mapping[str, str]) -> Any:
    """A function that runs a frozen network once and returns the outputs of some of its layers.

    It is called with the model's arguments, in eval mode and without gradients, as ``transform`` of an
    :class:`ArrayLoader` whose batches all members share, or before a step. Nothing after the last of the layers runs.

    Args:
        model: The network, which is used as it is, without a copy; calls leave its mode and its hooks as they were.
        layers: Paths of submodules, as ``model.named_modules()`` has them, or a dict from these to names of the results, as
            that of torchvision takes.

    Returns:
        ``extractor(*args, **kwargs) -> dict[str, Tensor]``: the output of each layer by its path or name. Of a layer that
        returns a tuple, such as an LSTM, it is the first element; of one that is called several times, the first call's.

    Raises:
        StackError: if ``model`` is not a module.
        ValueError: if the model has no layer of a path, in which case it names those with similar paths, or has an adapter of
            peft that is trained.

    Example:
        >>> trunk = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> extract = make_feature_extractor(trunk, {"1": "hidden"})
        >>> extract(torch.randn(8, 4))["hidden"].shape
        torch.Size([8, 16])
    """
    check_module(model)
    names = dict(layers) if isinstance(layers, Mapping) else {path: path for path in layers}
    modules = dict(model.named_modules(remove_duplicate=False))
    if unknown := [path for path in names if path not in modules]:
        similar = difflib.get_close_matches(unknown[0], modules, n=5, cutoff=0.4) or [*modules][1:6]
        raise ValueError(f"the model has no layer '{unknown[0]}'; similar ones are {', '.join(map(repr, similar))}")
    if trained := [path for path, param in model.named_parameters() if param.requires_grad and ".lora_" in path]:
        raise ValueError(
            f"'{trained[0]}' of the model is trained, so that activations depend on the member; make the network part of "
            "the array with share_frozen=True, or freeze the adapter"
        )
    return functools.partial(_extracted, model, names)


class _AllComputedError(Exception):
    """Ends a call of the network."""


def _extracted(model: nn.Module, names: Mapping[str, str], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Run the network; raises a ValueError if a call of it does not reach one of the layers."""
    outputs: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple | list) else output
        # A copy, because a later layer may write it, as ReLU(inplace=True) does.
        outputs.setdefault(path, output.clone())
        if len(outputs) == len(names):
            raise _AllComputedError

    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with contextlib.ExitStack() as hooks, torch.no_grad(), contextlib.suppress(_AllComputedError):
            for path in names:
                hook = functools.partial(keep, path)
                hooks.callback(model.get_submodule(path).register_forward_hook(hook).remove)
            model(*args, **kwargs)
    finally:
        for module in training:
            module.training = True
    if missing := [path for path in names if path not in outputs]:
        raise ValueError(f"a call of the model does not call its layer '{missing[0]}'; leave it out, or name another")
    return {name: outputs[path] for path, name in names.items()}
