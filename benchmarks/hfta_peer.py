"""The MLP, ResNet-18 and the Transformer as the original HFTA trains many of them: its fused operators and optimizers.

Needs ``pip install git+https://github.com/UofT-EcoSystem/hfta``.

References:
    Wang et al., "Horizontally Fused Training Array: An effective hardware utilization squeezer for training novel deep
    learning models", MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from examples.common import fused
from examples.common.task import Batch, autocast
from examples.resnet.model import ResNet18
from examples.transformer.model import TransformerLM
from hfta import ops, optim
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.workloads import Run, TaskJob

FUSED: dict[type[nn.Module], Callable[[Any, int], nn.Module]] = {
    nn.Linear: lambda one, count: ops.Linear(one.in_features, one.out_features, B=count),
    nn.Conv2d: lambda one, count: ops.Conv2d(
        one.in_channels, one.out_channels, one.kernel_size, one.stride, one.padding, bias=one.bias is not None, B=count
    ),
    nn.BatchNorm2d: lambda one, count: ops.BatchNorm2d(one.num_features, B=count),
    nn.MaxPool2d: lambda one, count: ops.MaxPool2d(one.kernel_size, one.stride, one.padding, B=count),
    nn.Embedding: lambda one, count: ops.Embedding(one.num_embeddings, one.embedding_dim, B=count),
    nn.LayerNorm: lambda one, count: ops.LayerNorm(one.normalized_shape, B=count),
    nn.MultiheadAttention: lambda one, count: ops.MultiheadAttention(
        one.embed_dim, one.num_heads, one.dropout, B=count
    ),
}
"""HFTA's operator in the place of each of PyTorch's."""


def mlp(model: nn.Sequential, x: Tensor) -> Tensor:
    """``[M, N, features] -> [M, N, classes]``."""
    return model(x)


def resnet(model: ResNet18, x: Tensor) -> Tensor:
    """``[M, N, 3, H, W] -> [M, N, classes]``; convolutions have models next to channels."""
    x = model.layers(model.stem(x.transpose(0, 1).contiguous()))
    return model.head(x.mean((3, 4)).transpose(0, 1))


def transformer(model: TransformerLM, tokens: Tensor) -> Tensor:
    """``[M, N, L] -> [M, N, L, vocabulary]``."""
    x = model.dropout(model.embed(tokens) * math.sqrt(model.dim) + model.place)
    for layer in model.encoder.layers:
        mixed, _ = layer.self_attn(x, x, x, need_weights=False, attn_mask=model.mask)
        x = layer.norm1(x + layer.dropout1(mixed))
        hidden = layer.dropout(layer.linear1(x).relu())
        x = layer.norm2(x + layer.dropout2(layer.linear2(hidden)))
    return model.decoder(x)


def forward(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """The function that does what the model does with fused operators.

    Raises:
        RuntimeError: if there is none.
    """
    for kind, call in ((ResNet18, resnet), (TransformerLM, transformer), (nn.Sequential, mlp)):
        if isinstance(model, kind):
            return call
    raise RuntimeError(f"not written for {type(model).__name__}")


def fuse(model: nn.Module, params: dict[str, Tensor]) -> nn.Module:
    """The model with HFTA's operators in the place of its own, and with these stacked parameters."""
    count = len(next(iter(params.values())))
    for path, module in [*model.named_modules()]:
        if type(module) in FUSED:
            model.set_submodule(path, FUSED[type(module)](module, count))
    leaves = dict(renamed(params))
    with torch.no_grad():
        for path, own in model.named_parameters():
            leaf, module = leaves[path], model.get_submodule(path.rpartition(".")[0])
            # HFTA has the weight of a linear layer as [M, in, out], its bias as [M, 1, out].
            transposed = isinstance(module, ops.Linear) and own is module.weight
            own.copy_(leaf.mT if transposed else leaf.view_as(own))
    return model


def renamed(params: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names as HFTA has them, whose attention has a linear layer for each of query, key, value and output."""
    for path, leaf in params.items():
        if ".in_proj_" in path:
            for name, part in zip("qkv", leaf.chunk(3, 1), strict=True):
                yield path.replace("in_proj_", f"linear_{name}."), part
        else:
            yield path.replace(".out_proj.", ".linear_o."), leaf


def run(job: TaskJob) -> Run:
    """All members of a job."""
    task, flags = getattr(job, "task", None), job.flags
    if task is None:
        raise RuntimeError("not written for this workload")
    model = task.factory()
    call = forward(model)
    params, _ = fused.initial(task.factory, flags.seeds, job.device)
    model = fuse(model, params).to(job.device)
    make = {"adam": optim.Adam, "adadelta": optim.Adadelta}[task.optimizer]
    optimizer = make(model.parameters(), lr=flags.lr, B=len(flags.lr))

    def step(batch: Batch) -> Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        with autocast(job.device, flags.amp):
            logits = call(model, inputs)
            each = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
            losses = each.view(len(targets), -1).mean(1)
        # The gradient of a sum is that of each member's own loss.
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return Run(step, lambda: (model.state_dict(), [*map(dict, optimizer.state.values())]))
