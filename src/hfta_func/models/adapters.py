"""M adapters of ``peft`` over one base as an array; they may differ in rank, scale, dropout and targets."""

from __future__ import annotations

import copy
import functools
import operator
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._tree import num_models, take
from hfta_func._types import Params, require
from hfta_func.errors import HyperparameterError, StackError
from hfta_func.models.padded_calls import fitted
from hfta_func.models.sharing import base_of
from hfta_func.models.stack import build

_NAME = "default"
_peft = functools.partial(require, "peft", "adapters")
_FREE = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "init_lora_weights"}
"""Settings that do not affect a forward pass."""
_OF_LORA = {"r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora"}
_TARGETS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_RANKED = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class Adapters:
    """M adapters over one base, made by :func:`stack_adapters`.

    Attributes:
        model: The model to make steps with, with ``share_frozen=True``; its base is the given one.
        params: Trained parameters ``[M, ...]``. Smaller ranks are padded with zeros, which training does not change.
        buffers: Numbers in which members differ, such as scales and dropout rates; in a training state, ``hparams``.
        configs: The configuration of each adapter.
    """

    def __init__(self, model: nn.Module, params: Params, buffers: Params, configs: Sequence[Any], base: nn.Module):
        self.model, self.params, self.buffers = model, params, buffers
        self.configs, self._base = list(configs), base

    def take(self, index: Any) -> Adapters:
        """A selection of the adapters, as :func:`take` selects members of a state."""
        params, buffers = take((self.params, self.buffers), index)
        kept = take({"": torch.arange(len(self.configs))}, index)[""].tolist()
        return Adapters(self.model, params, buffers, [self.configs[i] for i in kept], self._base)

    def export(self, state: Any, index: int) -> Any:
        """One trained adapter as an ordinary ``PeftModel`` over the base; ``save_pretrained`` writes it in peft's format.

        Args:
            state: A training state, or anything else with ``params``.
            index: The member.

        Raises:
            StackError: if the state holds other adapters, or the member does not exist.
        """
        if num_models(state.params) != len(self.configs):
            raise StackError(
                f"the state holds {num_models(state.params)} members, but these are {len(self.configs)} adapters; after "
                f"take(state, index), call adapters.take(index).export(state, ...)"
            )
        params, index = take(state.params, operator.index(index)), operator.index(index)
        made = _made(self._base, self.configs[index], f"adapter {index}")
        base = base_of(made)
        memo: dict[int, Any] = {id(tensor): tensor for tensor in base.values()}
        for path, param in made.named_parameters():
            if path not in base:
                part = params[path][0][tuple(slice(size) for size in param.shape)]
                memo[id(param)] = nn.Parameter(part.detach().clone())
        return copy.deepcopy(made, memo)


def stack_adapters(base: nn.Module, adapters: Sequence[Any], *, seeds: Sequence[int] | None = None) -> Adapters:
    """Stack M adapters of ``peft`` over one base, which is held once.

    LoRA adapters may differ in rank, ``lora_alpha``, dropout and in the layers that they adapt.

    Args:
        base: The model that all adapters share.
        adapters: A ``peft`` configuration for each new adapter, or the folder of a saved one.
        seeds: One integer for each new adapter, which is then initialised as by
            ``torch.manual_seed(seed); get_peft_model(base, config)``. By default PyTorch's generator is used as it is.

    Returns:
        :class:`Adapters`. As under ``get_peft_model``, the base's parameters no longer require grad.

    Raises:
        StackError: if the adapters cannot form one array; it names the adapter and what differs.
        ImportError: if peft is missing.

    Example:
        >>> from peft import LoraConfig
        >>> base = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> configs = [LoraConfig(r=r, target_modules=["0", "2"]) for r in (2, 4, 8)]
        >>> adapters = stack_adapters(base, configs, seeds=[0, 1, 2])
        >>> step = make_train_step(
        ...     adapters.model, lambda model, x: model(x).square().mean(), adam(lr=1e-3), share_frozen=True
        ... )
        >>> state = step.init(adapters.params, adapters.buffers, seeds=[0, 1, 2])
        >>> state, metrics = step(state, torch.randn(3, 5, 8))
        >>> adapters.export(state, 0).base_model.model[0].lora_A["default"].weight.shape
        torch.Size([2, 8])
    """
    members = _new(base, [*adapters], seeds)
    configs = [member.peft_config[_NAME] for member in members]
    _check_configs(configs)
    trained = [{path: p for path, p in member.named_parameters() if p.requires_grad} for member in members]
    layers = [_layers(member) for member in members]
    kinds = [(_numbers(a), {path: x.shape for path, x in b.items()}) for a, b in zip(layers, trained, strict=True)]
    model, buffers = (members[0], {}) if kinds.count(kinds[0]) == len(kinds) else _union(base, configs, layers)
    params: Params = {}
    for path, param in model.named_parameters():
        if param.requires_grad:
            params[path] = torch.stack([_padded(one.get(path), param, path, i) for i, one in enumerate(trained)])
    known = base_of(model) | buffers
    for path in [path for path, _ in model.named_buffers() if path not in known]:
        buffers[path] = torch.stack([member.get_buffer(path) for member in members])
    return Adapters(model, params, buffers, configs, base)


def _new(base: nn.Module, adapters: Sequence[Any], seeds: Sequence[int] | None) -> list[Any]:
    if seeds is not None and len(seeds) != len(adapters):
        raise HyperparameterError(f"got {len(seeds)} seeds but {len(adapters)} adapters; give one integer per adapter")
    members = []
    for i, adapter in enumerate(adapters):
        if isinstance(adapter, str | os.PathLike):
            config = _peft().PeftConfig.from_pretrained(os.fspath(adapter))
            config.inference_mode = False
            members.append(_made(base, config, f"adapter {i} ({adapter})"))
            weights = _peft().utils.load_peft_weights(os.fspath(adapter), "cpu")
            _peft().set_peft_model_state_dict(members[-1], weights, _NAME)
        else:
            members.append(_made(base, adapter, f"adapter {i}", None if seeds is None else seeds[i], draws=True))
    return members


def _made(base: nn.Module, config: Any, title: str, seed: int | None = None, draws: bool = False) -> Any:
    """A new adapter; it changes the global generator only if it ``draws`` without a seed."""
    if getattr(config, "init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        raise StackError(
            f"{title} has init_lora_weights={config.init_lora_weights!r}, which may write the weights of the base, and all "
            f"adapters share them; pass True, False, 'gaussian' or 'orthogonal'"
        )
    over = copy.deepcopy(base, {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())})
    make = functools.partial(_peft().get_peft_model, over, copy.deepcopy(config))
    made: Any = make() if seed is None and draws else build(make, seed or 0, {})
    shared = {id(param) for param in base.parameters()}
    for module in made.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            if param.requires_grad and id(param) in shared:
                # A bias of the base that the adapter trains must not be shared.
                setattr(module, name, nn.Parameter(param.detach().clone()))
                param.requires_grad_(False)
            elif not param.requires_grad and id(param) not in shared:
                # What an adapter draws and does not train is its own.
                delattr(module, name)
                module.register_buffer(name, param.detach())
    return made.train(base.training)


def _check_configs(configs: Sequence[Any]) -> None:
    """Raise a StackError if adapters differ in what one array cannot hold."""
    first = configs[0].to_dict()
    is_lora, dora = first["peft_type"] == "LORA", first.get("use_dora")
    # With DoRA, a layer that is not adapted is not one with an adapter of zeros.
    free = _FREE | (_OF_LORA if is_lora else set()) | (_TARGETS if is_lora and not dora else set())
    for i, config in enumerate(configs):
        for name, value in config.to_dict().items():
            if name not in free and value != first.get(name):
                raise StackError(
                    f"adapter {i} has {name}={value!r} but adapter 0 has {first.get(name)!r}; adapters in one array "
                    f"may differ in {', '.join(sorted(free - _FREE)) or 'their values only'}"
                )


def _layers(model: nn.Module) -> dict[str, Any]:
    kind = _peft().tuners.lora.LoraLayer
    return {path: module for path, module in model.named_modules() if isinstance(module, kind)}


def _numbers(layers: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Scale and dropout rate of every adapted layer."""
    rates = {path: getattr(layer.lora_dropout[_NAME], "p", 0.0) for path, layer in layers.items()}
    return {path: (float(layer.scaling[_NAME]), float(rates[path])) for path, layer in layers.items()}


def _union(base: nn.Module, configs: Sequence[Any], layers: Sequence[Mapping[str, Any]]) -> tuple[Any, Params]:
    """A model with the adapted layers of all members and the largest rank, and the members' scales and dropout rates."""
    config = copy.deepcopy(configs[0])
    names = {path.removeprefix("base_model.model.") for member in layers for path in member}
    config.target_modules = "|".join(map(re.escape, sorted(names)))
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.rank_pattern, config.alpha_pattern = {}, {}
    numbers = [_numbers(member) for member in layers]
    config.r = max(layer.r[_NAME] for member in layers for layer in member.values())
    # A rate above 0 makes peft add dropout layers.
    config.lora_dropout = max(rate for member in numbers for _, rate in member.values())
    model = _made(base, config, "the array of adapters")
    buffers: Params = {}
    for path, layer in _layers(model).items():
        scales, rates = zip(*(member.get(path, (0.0, 0.0)) for member in numbers), strict=True)
        like = next(p for p in layer.parameters() if p.requires_grad)
        if len({*scales}) == 1:
            layer.scaling[_NAME] = scales[0]
        else:
            del layer.scaling
            layer.scaling = _Scale(scales[0])
            buffers[f"{path}.scaling.value"] = torch.tensor(scales, dtype=torch.float64, device=like.device)
        # The dropout layers were made with the largest rate of all, so each needs its members' rates.
        if isinstance(layer.lora_dropout[_NAME], nn.Dropout):
            buffers[f"{path}.lora_dropout.{_NAME}.p"] = torch.tensor(rates, dtype=torch.float64, device=like.device)
    return model, buffers


class _Scale(nn.Module):
    """The scale of one layer, indexed like peft's dict of scales by adapter."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def __getitem__(self, name: str) -> Any:
        return self.value


def _padded(tensor: Tensor | None, like: Tensor, path: str, member: int) -> Tensor:
    """A member's parameter, padded with zeros to the shape of the array's parameter."""
    ranked = any(name in path.split(".") for name in _RANKED)
    if tensor is None and ranked:
        return torch.zeros_like(like)
    if tensor is None or (tensor.shape != like.shape and not ranked):
        shape = "missing" if tensor is None else list(tensor.shape)
        raise StackError(f"adapter {member}: '{path}' is {shape} but in adapter 0 it is {list(like.shape)}")
    return fitted(tensor.detach(), like.shape)
