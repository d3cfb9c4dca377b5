"""The workloads as the original HFTA trains many of them: its fused operators and optimizers.

Needs a checkout of https://github.com/UofT-EcoSystem/hfta, which ``sweep --hfta-source DIR`` names. Of its encoder layer only
the operators are used: it adds what the first linear layer makes, instead of what it takes, to what the second one makes.

References:
    Wang et al., "Horizontally Fused Training Array: An effective hardware utilization squeezer for training novel deep
    learning models", MLSys 2021.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from examples.bert.model import BERT
from examples.common import fused
from examples.common.task import Batch, autocast
from examples.mobilenet.model import MobileNet, SqueezeExcite
from examples.pointnet.model import PointNetClassifier, PointNetSegmenter, Transform
from examples.resnet.model import ResNet18
from examples.transformer.model import TransformerLM
from hfta import ops, optim
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import hfta_func
from benchmarks.workloads import GANJob, Job, Run, TaskJob


def convolution(kind: Any) -> Callable[[Any, int], nn.Module]:
    """HFTA's convolution in the place of PyTorch's."""

    def make(one: Any, count: int) -> nn.Module:
        options = {} if one.transposed else {"groups": one.groups}
        shape = one.in_channels, one.out_channels, one.kernel_size, one.stride, one.padding
        return kind(*shape, bias=one.bias is not None, **options, B=count)

    return make


FUSED: dict[type[nn.Module], Callable[[Any, int], nn.Module]] = {
    nn.Linear: lambda one, count: ops.Linear(one.in_features, one.out_features, B=count),
    nn.Conv1d: convolution(ops.Conv1d),
    nn.Conv2d: convolution(ops.Conv2d),
    nn.ConvTranspose2d: convolution(ops.ConvTranspose2d),
    nn.BatchNorm1d: lambda one, count: ops.BatchNorm1d(one.num_features, B=count),
    nn.BatchNorm2d: lambda one, count: ops.BatchNorm2d(one.num_features, B=count),
    nn.MaxPool2d: lambda one, count: ops.MaxPool2d(one.kernel_size, one.stride, one.padding, B=count),
    nn.Embedding: lambda one, count: ops.Embedding(one.num_embeddings, one.embedding_dim, B=count),
    nn.LayerNorm: lambda one, count: ops.LayerNorm(one.normalized_shape, B=count),
    nn.MultiheadAttention: lambda one, count: ops.MultiheadAttention(
        one.embed_dim, one.num_heads, one.dropout, B=count
    ),
    SqueezeExcite: lambda one, count: FusedSqueezeExcite(one),
    Transform: lambda one, count: FusedTransform(one),
}
"""What stands in the place of each of PyTorch's operators, and of layers that say which axes are an image's."""


class FusedSqueezeExcite(nn.Module):
    """``[N, M, C, H, W]`` to the same."""

    def __init__(self, one: SqueezeExcite):
        super().__init__()
        self.weigh = one.weigh

    def forward(self, x: Tensor) -> Tensor:
        """Weighs the channels by what the whole image has of them."""
        return x * self.weigh(x.mean((3, 4), keepdim=True))


class FusedTransform(nn.Module):
    """``[N, M, C, P] -> [N, M, C, C]``."""

    def __init__(self, one: Transform):
        super().__init__()
        self.points, self.cloud = one.points, one.cloud
        self.register_buffer("identity", one.identity, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """A matrix for each cloud."""
        cloud = self.cloud(_swapped(self.points(x).amax(-1)))
        return _swapped(cloud.unflatten(-1, self.identity.shape) + self.identity)


def _swapped(x: Tensor) -> Tensor:
    """``[N, M, ...] -> [M, N, ...]`` and back: images have models next to channels, features have them first."""
    return x.transpose(0, 1).contiguous()


def mlp(model: nn.Sequential, x: Tensor) -> Tensor:
    """``[M, N, features] -> [M, N, classes]``."""
    return model(x)


def convolutional(model: Any, x: Tensor) -> Tensor:
    """``[M, N, 3, H, W] -> [M, N, classes]``, of ResNet-18 and MobileNet."""
    x = _swapped(x)
    x = model.layers(model.stem(x) if isinstance(model, ResNet18) else x)
    return model.head(_swapped(x.mean((3, 4))))


def pointnet(model: Any, x: Tensor) -> Tensor:
    """``[M, N, 3, P] -> [M, N, classes]``, or ``[M, N, P, parts]``."""
    x = _swapped(x)
    # Without its heads, PointNet leaves models and channels where they are.
    points, cloud, _ = model.features(x)
    if isinstance(model, PointNetClassifier):
        return model.head(_swapped(cloud))
    cloud = cloud.unsqueeze(-1).expand(-1, -1, -1, points.shape[-1])
    return _swapped(model.head(torch.cat([points, cloud], 2))).mT


def encoded(model: Any, x: Tensor) -> Tensor:
    """``[M, N, L, D]`` after all layers of the model's encoder."""
    for layer in model.encoder.layers:
        mixed, _ = layer.self_attn(x, x, x, need_weights=False, attn_mask=model.mask)
        x = layer.norm1(x + layer.dropout1(mixed))
        hidden = layer.dropout(layer.activation(layer.linear1(x)))
        x = layer.norm2(x + layer.dropout2(layer.linear2(hidden)))
    return x


def transformer(model: TransformerLM, tokens: Tensor) -> Tensor:
    """``[M, N, L] -> [M, N, L, vocabulary]``."""
    x = model.dropout(model.embed(tokens) * math.sqrt(model.dim) + model.place)
    return model.decoder(encoded(model, x))


def bert(model: BERT, tokens: Tensor) -> Tensor:
    """``[M, N, L] -> [M, N, L, vocabulary]``."""
    places = model.places.weight[:, None, : tokens.shape[-1]]
    x = model.head(encoded(model, model.dropout(model.norm(model.tokens(tokens) + places))))
    logits = torch.baddbmm(model.bias[:, None], x.flatten(1, 2), model.tokens.weight.mT)
    return logits.unflatten(1, tokens.shape[1:])


FORWARD: dict[type[nn.Module] | tuple[type[nn.Module], ...], Callable[[Any, Tensor], Tensor]] = {
    (ResNet18, MobileNet): convolutional,
    (PointNetClassifier, PointNetSegmenter): pointnet,
    TransformerLM: transformer,
    BERT: bert,
    nn.Sequential: mlp,
}
"""What does with fused operators what a model does."""


def forward(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """The function of a model.

    Raises:
        RuntimeError: if there is none.
    """
    for kind, call in FORWARD.items():
        if isinstance(model, kind):
            return call
    raise RuntimeError(f"not written for {type(model).__name__}")


def fuse(model: nn.Module, params: dict[str, Tensor]) -> nn.Module:
    """The model with HFTA's operators in the place of its own, and with these stacked parameters."""
    count = len(next(iter(params.values())))
    before = {*model.modules()}
    for path, module in [*model.named_modules()]:
        if type(module) in FUSED:
            model.set_submodule(path, FUSED[type(module)](module, count))
    leaves = dict(renamed(params))
    with torch.no_grad():
        for path, own in [*model.named_parameters()]:
            leaf, (owner, _, name) = leaves[path], path.rpartition(".")
            module = model.get_submodule(owner)
            if module in before:
                # A parameter that belongs to no operator.
                setattr(module, name, nn.Parameter(leaf.clone()))
                continue
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


def run(job: Job) -> Run:
    """All members of a job."""
    assert isinstance(job, TaskJob | GANJob)
    return _gan(job) if isinstance(job, GANJob) else _task(job)


def _fused(job: Any, factory: Callable[[], nn.Module]) -> nn.Module:
    params, _ = fused.initial(factory, job.flags.seeds, job.device)
    return fuse(factory(), params).to(job.device)


def _task(job: TaskJob) -> Run:
    task, flags = job.task, job.flags
    call, model = forward(task.factory()), _fused(job, task.factory)
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


def _gan(job: GANJob) -> Run:
    """As ``examples.dcgan.main.Pair``, with the sums of all members' losses."""
    flags, steps = job.flags, itertools.count()
    generator, discriminator = _fused(job, job.generator), _fused(job, job.discriminator)
    make = functools.partial(optim.Adam, lr=flags.lr, betas=(flags.beta1[0], 0.999), B=len(flags.lr))
    generator_opt, discriminator_opt = make(generator.parameters()), make(discriminator.parameters())

    def draw(real: Tensor) -> Tensor:
        shape = len(real), job.noise, 1, 1
        if not job.quiet:
            return torch.randn(*real.shape[:2], *shape[1:], device=job.device)
        keys = hfta_func.random.keys(flags.seeds, device=job.device)
        keys = hfta_func.random.fold_in(keys, torch.full_like(keys, next(steps)))
        return _swapped(hfta_func.random.normal(keys, shape, dtype=real.dtype))

    def judged(images: Tensor, sign: int) -> Tensor:
        """The loss of each member, ``[M]``."""
        return softplus(sign * discriminator(images)).mean((0, 2, 3, 4))

    def step(batch: Batch) -> Tensor:
        real = _swapped(batch[0])
        generator_opt.zero_grad()
        discriminator_opt.zero_grad()
        with autocast(job.device, flags.amp):
            fake = generator(draw(real))
            loss_d = judged(real, -1) + judged(fake.detach(), 1)
        loss_d.sum().backward()
        discriminator_opt.step()
        with autocast(job.device, flags.amp):
            loss_g = judged(fake, -1)
        loss_g.sum().backward(inputs=[*generator.parameters()])
        generator_opt.step()
        return (loss_d + loss_g).detach()

    both = generator, discriminator, generator_opt, discriminator_opt
    return Run(step, lambda: [part.state_dict() for part in both])
