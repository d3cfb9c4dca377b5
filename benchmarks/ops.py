"""Forward and backward pass of single operators, for M members: array, serial loop, and PyTorch's own ``vmap``.

The rows are layers of six workloads (ResNet-18 with the ImageNet stem on 32x32 images, MobileNetV2, PointNet, DCGAN, a
Transformer language model, BERT-Medium), small relatives of them, and layers of sizes as people write them ("sized"), in
float32. The loop runs M ordinary calls, each with its own tensors; the two arrays run one ``vmap`` over stacked tensors, the
gradient taken outside. Data of convolution, pooling and batch normalisation lie in memory as they do inside an array of
networks, ``[N, M, C, ...]``, and gradients like the outputs that they belong to. All rows take turns under the same allocator
settings; a ratio is the median over rounds. Before it is shown, outputs and gradients are compared. Rows below the loop come
first. ``--filter "M 8, sized"`` runs a part, and ``--threads 2`` uses two threads.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import hfta_func as hfta
from benchmarks._measure import interleaved, seconds, table
from hfta_func.calls.made import MadeCalls
from hfta_func.rules.vmap import vmap_routed
from hfta_func.step.chunks import fastest

TOLERANCE = 1e-3


class Row(NamedTuple):
    """An operator on one member's tensors; ``make`` draws them, the first ``data`` of them data, the others parameters."""

    family: str
    name: str
    num_models: int
    func: Callable[..., Tensor]
    make: Callable[[], tuple[Tensor, ...]]
    data: int = 1
    frozen: bool = False  # whether members share the parameters, which need no gradient

    def dims(self) -> tuple[int | None, ...]:
        """The model axis of each tensor."""
        return tuple(None if self.frozen and i >= self.data else 0 for i in range(len(self.make())))


def randn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Inputs of the given shapes, scaled so that sums over many of them stay near one."""
    return lambda: tuple(torch.randn(shape) / math.sqrt(math.prod(shape[1:]) or 1) for shape in shapes)


def conv(title: str, num_models: int, batch: int, size: int, i: int, o: int, kernel: int, **options: Any) -> Row:
    """A two-dimensional convolution; ``bias=True`` for one with a bias."""
    has_bias = options.pop("bias", False)
    marks = "".join(f" {key} {options[key]}" for key in ("dilation", "groups") if key in options) + " + bias" * has_bias
    stride = f"/{options['stride']}" if "stride" in options else ""
    weight = (o, i // options.get("groups", 1), kernel, kernel)
    return Row(
        "conv",
        f"{title} {i}→{o} {kernel}x{kernel}{stride} on {size}², N {batch}{marks}",
        num_models,
        functools.partial(F.conv2d, **options),
        lambda: (torch.randn(batch, i, size, size), *randn(weight, *[(o,)] * has_bias)()),
    )


def conv_transpose(title: str, num_models: int, batch: int, size: int, i: int, o: int, **options: Any) -> Row:
    """A transposed 4x4 convolution, as DCGAN's generator has them."""
    return Row(
        "conv",
        f"{title} transposed {i}→{o} 4x4 on {size}², N {batch}",
        num_models,
        lambda x, weight: F.conv_transpose2d(x, weight, **options),
        lambda: (torch.randn(batch, i, size, size), *randn((i, o, 4, 4))()),
    )


def points(title: str, num_models: int, batch: int, length: int, i: int, o: int) -> Row:
    """A pointwise one-dimensional convolution, as PointNet has them."""
    return Row(
        "conv",
        f"{title} 1d {i}→{o} on {length}, N {batch}",
        num_models,
        F.conv1d,
        lambda: (torch.randn(batch, i, length), *randn((o, i, 1), (o,))()),
    )


def linear(title: str, num_models: int, rows: int, i: int, o: int) -> Row:
    """A linear layer."""
    return Row(
        "linear",
        f"{title} {i}→{o}, {rows} rows",
        num_models,
        F.linear,
        lambda: (torch.randn(rows, i), *randn((o, i), (o,))()),
    )


def attention(title: str, num_models: int, batch: int, heads: int, length: int, dim: int, **options: Any) -> Row:
    """Scaled dot-product attention."""
    return Row(
        "attention",
        f"{title} heads {heads}, L {length}, D {dim}, N {batch}",
        num_models,
        lambda *qkv: F.scaled_dot_product_attention(*qkv, **options),
        lambda: tuple(torch.randn(batch, heads, length, dim) for _ in range(3)),
        data=3,
    )


def batch_norm(title: str, num_models: int, *shape: int) -> Row:
    """Batch normalisation in training, running statistics included."""
    return Row(
        "norm",
        f"{title} batch norm {list(shape)}",
        num_models,
        lambda x, weight, bias, mean, var: F.batch_norm(x, mean.detach(), var.detach(), weight, bias, True),
        lambda: (torch.randn(shape), *(torch.rand(shape[1]) for _ in range(4))),
    )


def norm(title: str, num_models: int, func: Callable[..., Tensor], shape: Sequence[int], features: int) -> Row:
    """Another normalisation with weight and bias."""
    return Row(
        "norm",
        f"{title} {list(shape)}",
        num_models,
        func,
        lambda: (torch.randn(*shape), *(torch.rand(features) for _ in range(2))),
    )


def cross_entropy(title: str, num_models: int, rows: int, classes: int) -> Row:
    """Cross entropy with class indices."""
    return Row(
        "loss",
        f"{title} cross entropy {rows} x {classes}",
        num_models,
        F.cross_entropy,
        lambda: (torch.randn(rows, classes), torch.randint(classes, (rows,))),
        data=2,
    )


def embedding(title: str, num_models: int, tokens: Sequence[int], vocabulary: int, dim: int) -> Row:
    """A look-up table."""
    return Row(
        "embedding",
        f"{title} {vocabulary} x {dim}, {list(tokens)} tokens",
        num_models,
        F.embedding,
        lambda: (torch.randint(vocabulary, tuple(tokens)), torch.randn(vocabulary, dim)),
    )


def recurrent(kind: str, num_models: int, batch: int, time: int, i: int, h: int) -> Row:
    """One recurrent layer."""
    cell = kind.split()[-1]
    gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[cell]

    def func(x: Tensor, state: Tensor, *weights: Tensor) -> Tensor:
        states = (state, state) if cell == "lstm" else state
        return getattr(torch, cell)(x, states, list(weights), True, 1, 0.0, True, False, False)[0]

    shapes = (gates * h, i), (gates * h, h), (gates * h,), (gates * h,)
    return Row(
        "recurrent",
        f"{kind} N {batch}, T {time}, I {i}, H {h}",
        num_models,
        func,
        lambda: (torch.randn(time, batch, i), torch.zeros(1, batch, h), *randn(*shapes)()),
        data=2,
    )


def _bce(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y.sigmoid())


def plain(family: str, title: str, num_models: int, func: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Row:
    """Any other function of normal tensors."""
    return Row(family, title, num_models, func, lambda: tuple(torch.randn(shape) for shape in shapes), len(shapes))


def frozen(row: Row) -> Row:
    """The same with parameters that all members share and nobody trains, as those under adapters."""
    return row._replace(name=f"{row.name}, shared", frozen=True)


def signal(title: str, num_models: int, batch: int, length: int, i: int, o: int, kernel: int) -> Row:
    """A one-dimensional convolution with as many pixels out as in."""
    return Row(
        "conv",
        f"{title} 1d {i}→{o} of {kernel} on {length}, N {batch}",
        num_models,
        lambda x, weight: F.conv1d(x, weight, padding=kernel // 2),
        lambda: (torch.randn(batch, i, length), *randn((o, i, kernel))()),
    )


def as_people_size_them(num_models: int) -> Iterator[Row]:
    """Layers whose sizes are no powers of two."""
    for i, o in ((3, 6), (6, 16), (10, 20), (12, 12), (20, 20), (30, 30), (50, 50), (84, 84)):
        yield conv("sized", num_models, 32, 14, i, o, 5)
        yield conv("sized", num_models, 16, 16, i, o, 3, padding=1)
        yield signal("sized", num_models, 32, 64, i, o, 5)
    yield conv("sized", num_models, 16, 16, 12, 24, 3, padding=1, stride=2)
    yield conv("sized", num_models, 16, 16, 12, 12, 3, padding=2, dilation=2)
    yield conv("sized", num_models, 16, 16, 12, 12, 3, padding=1, groups=3)
    yield conv_transpose("sized", num_models, 16, 8, 12, 3, stride=2, padding=1)
    yield conv("sized", num_models, 16, 16, 32, 32, 3, padding=1, groups=32)
    yield conv("sized", num_models, 8, 32, 3, 64, 7, padding=3, stride=2, bias=True)
    yield conv("sized", num_models, 16, 16, 24, 96, 1, bias=True)
    for batch, i, o in (
        (32, 1, 6),
        (16, 1, 32),
        (16, 3, 12),
        (8, 3, 32),
        (8, 3, 64),
        (1, 12, 12),
        (1, 3, 64),
        (1, 32, 32),
    ):
        yield conv("sized", num_models, batch, 28, i, o, 3, padding=1, bias=True)
    yield Row(
        "conv",
        "sized 3d 6→12 of 3 on 8³, N 8",
        num_models,
        functools.partial(F.conv3d, padding=1),
        lambda: (torch.randn(8, 6, 8, 8, 8), *randn((12, 6, 3, 3, 3))()),
    )
    for i, o in ((5, 3), (20, 50), (84, 10), (120, 84), (300, 100)):
        yield linear("sized", num_models, 32, i, o)
    for width in (10, 30, 100):
        yield norm("sized layer norm", num_models, functools.partial(_layer_norm, width), (32, 20, width), width)
        yield embedding("sized", num_models, (32, 20), 1000, width)
    yield norm("sized group norm", num_models, lambda x, w, b: F.group_norm(x, 3, w, b), (16, 12, 16, 16), 12)
    yield batch_norm("sized", num_models, 16, 12, 16, 16)
    yield attention("sized", num_models, 8, 3, 20, 10)
    yield plain(
        "pooling", "sized max pool 2x2 on [32, 6, 28, 28]", num_models, lambda x: F.max_pool2d(x, 2), (32, 6, 28, 28)
    )
    for kind in ("lstm", "gru", "rnn_tanh"):
        yield recurrent(f"sized {kind}", num_models, 20, 12, 10, 50)


def _layer_norm(width: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (width,), weight, bias)


SHARED = (
    linear("small transformer", 16, 64, 32, 128),
    linear("transformer", 8, 256, 128, 512),
    linear("gpt", 8, 256, 256, 768),
    linear("gpt head", 8, 64, 256, 8000),
    conv("small resnet", 8, 8, 16, 32, 32, 3, padding=1),
    conv("resnet18 layer1", 8, 8, 8, 64, 64, 3, padding=1),
    conv("mobilenet depthwise", 8, 32, 16, 96, 96, 3, padding=1, groups=96),
    conv_transpose("dcgan", 4, 16, 16, 128, 64, stride=2, padding=1),
    norm("small transformer layer norm", 16, lambda x, w, b: F.layer_norm(x, (32,), w, b), (4, 16, 32), 32),
    norm("gpt layer norm", 8, lambda x, w, b: F.layer_norm(x, (256,), w, b), (4, 64, 256), 256),
    norm("group norm", 8, lambda x, w, b: F.group_norm(x, 8, w, b), (8, 64, 8, 8), 64),
    embedding("transformer", 8, (8, 32), 2000, 128),
)  # fmt: skip

ROWS = (
    *map(frozen, SHARED),
    conv("small resnet", 16, 32, 8, 8, 8, 3, padding=1),
    conv("small resnet stem", 16, 8, 32, 3, 8, 7, stride=2, padding=3),
    conv("small resnet", 8, 8, 32, 16, 16, 3, padding=1),
    conv("small resnet", 8, 8, 16, 32, 32, 3, padding=1),
    conv("small resnet", 8, 8, 8, 16, 16, 3, padding=1),
    conv("small resnet", 16, 8, 4, 32, 32, 3, padding=1),
    conv("small resnet", 16, 8, 2, 64, 64, 3, padding=1),
    conv("small resnet shortcut", 8, 32, 8, 8, 16, 1, stride=2),
    conv("small mobilenet expand", 8, 8, 16, 4, 24, 1),
    conv("small mobilenet depthwise", 8, 8, 16, 24, 24, 3, padding=1, groups=24),
    conv("small mobilenet project", 16, 8, 8, 24, 8, 1),
    points("small pointnet", 16, 8, 128, 3, 8),
    points("small pointnet", 16, 8, 128, 8, 16),
    points("small pointnet", 4, 8, 128, 16, 128),
    conv_transpose("small dcgan", 8, 8, 1, 32, 64),
    conv_transpose("small dcgan", 8, 8, 4, 64, 32, stride=2, padding=1),
    conv_transpose("small dcgan", 16, 8, 16, 8, 3, stride=2, padding=1),
    conv("small dcgan", 16, 8, 32, 3, 8, 4, stride=2, padding=1),
    conv("digits", 16, 32, 8, 1, 16, 3, padding=1),
    conv("resnet18 stem", 8, 8, 32, 3, 64, 7, stride=2, padding=3),
    conv("resnet18 layer1", 4, 8, 8, 64, 64, 3, padding=1),
    conv("resnet18 layer1", 8, 8, 8, 64, 64, 3, padding=1),
    conv("resnet18 layer1", 16, 8, 8, 64, 64, 3, padding=1),
    conv("resnet18 layer2", 8, 8, 8, 64, 128, 3, stride=2, padding=1),
    conv("resnet18 layer2", 8, 8, 4, 128, 128, 3, padding=1),
    conv("resnet18 shortcut", 8, 8, 8, 64, 128, 1, stride=2),
    conv("resnet18 layer3", 8, 8, 4, 128, 256, 3, stride=2, padding=1),
    conv("resnet18 layer3", 8, 8, 2, 256, 256, 3, padding=1),
    conv("resnet18 layer4", 8, 8, 2, 256, 512, 3, stride=2, padding=1),
    conv("resnet18 layer4", 8, 8, 1, 512, 512, 3, padding=1),
    conv("resnet18 (CIFAR stem)", 4, 8, 32, 64, 64, 3, padding=1),
    conv("resnet18 (CIFAR stem)", 4, 8, 4, 512, 512, 3, padding=1),
    conv("mobilenet expand", 8, 32, 16, 16, 96, 1),
    conv("mobilenet project", 8, 32, 16, 96, 24, 1),
    conv("mobilenet depthwise", 8, 32, 16, 96, 96, 3, padding=1, groups=96),
    conv("mobilenet expand", 8, 32, 4, 96, 576, 1),
    conv("mobilenet depthwise", 8, 32, 4, 576, 576, 3, padding=1, groups=576),
    conv("mobilenet head", 8, 32, 1, 320, 1280, 1),
    points("pointnet", 8, 8, 512, 3, 64),
    points("pointnet", 8, 8, 512, 64, 128),
    points("pointnet", 4, 8, 512, 128, 1024),
    conv_transpose("dcgan", 8, 16, 1, 100, 512),
    conv_transpose("dcgan", 4, 16, 4, 512, 256, stride=2, padding=1),
    conv_transpose("dcgan", 4, 16, 16, 128, 64, stride=2, padding=1),
    conv_transpose("dcgan", 8, 16, 32, 64, 3, stride=2, padding=1),
    conv("dcgan", 8, 16, 64, 3, 64, 4, stride=2, padding=1),
    conv("dcgan", 4, 16, 16, 128, 256, 4, stride=2, padding=1),
    conv("dcgan", 8, 16, 4, 512, 1, 4),
    linear("small mlp", 4, 32, 64, 64),
    linear("small mlp", 16, 32, 64, 64),
    linear("small resnet", 8, 8, 64, 10),
    linear("small pointnet", 8, 8, 128, 64),
    linear("small transformer", 16, 64, 32, 32),
    linear("small transformer", 8, 64, 32, 256),
    linear("small bert", 4, 64, 64, 256),
    linear("resnet18", 8, 8, 512, 10),
    linear("pointnet", 8, 8, 1024, 512),
    linear("transformer", 8, 256, 128, 128),
    linear("transformer", 8, 256, 128, 2000),
    linear("transformer", 8, 256, 128, 33278),
    linear("bert", 4, 256, 512, 2048),
    linear("bert", 4, 256, 2048, 512),
    attention("small transformer", 16, 4, 2, 16, 16),
    attention("small transformer, causal", 8, 4, 2, 16, 16, is_causal=True),
    attention("small bert", 4, 4, 4, 16, 16),
    attention("transformer", 8, 8, 2, 32, 64),
    attention("transformer, causal", 16, 8, 2, 32, 64, is_causal=True),
    attention("bert", 4, 8, 8, 32, 64),
    batch_norm("small resnet", 16, 32, 8, 8, 8),
    batch_norm("small resnet", 8, 8, 32, 4, 4),
    batch_norm("small pointnet", 4, 8, 16, 128),
    norm("small transformer layer norm", 16, lambda x, w, b: F.layer_norm(x, (32,), w, b), (4, 16, 32), 32),
    norm("small bert layer norm", 8, lambda x, w, b: F.layer_norm(x, (64,), w, b), (4, 16, 64), 64),
    norm("small group norm", 16, lambda x, w, b: F.group_norm(x, 4, w, b), (8, 16, 8, 8), 16),
    batch_norm("resnet18", 8, 8, 64, 8, 8),
    batch_norm("resnet18", 8, 8, 512, 1, 1),
    batch_norm("mobilenet", 8, 32, 96, 16, 16),
    batch_norm("pointnet", 4, 8, 1024, 512),
    norm("transformer layer norm", 8, lambda x, w, b: F.layer_norm(x, (128,), w, b), (8, 32, 128), 128),
    norm("bert layer norm", 4, lambda x, w, b: F.layer_norm(x, (512,), w, b), (8, 32, 512), 512),
    norm("group norm", 8, lambda x, w, b: F.group_norm(x, 8, w, b), (8, 64, 8, 8), 64),
    cross_entropy("small resnet", 16, 32, 10),
    cross_entropy("small transformer", 8, 64, 256),
    plain("loss", "small dcgan bce with logits", 8, _bce, (16,), (16,)),
    cross_entropy("transformer", 8, 256, 2000),
    cross_entropy("transformer", 8, 256, 33278),
    cross_entropy("bert", 4, 256, 33278),
    embedding("small transformer", 16, (4, 16), 256, 32),
    embedding("small bert", 4, (4, 16), 256, 64),
    embedding("transformer", 8, (8, 32), 2000, 128),
    embedding("transformer", 8, (8, 32), 33278, 128),
    embedding("bert", 4, (8, 32), 33278, 512),
    recurrent("small lstm", 16, 4, 8, 16, 32),
    recurrent("small gru", 8, 4, 8, 16, 32),
    recurrent("lstm", 8, 8, 16, 32, 64),
    recurrent("lstm", 16, 16, 32, 64, 128),
    recurrent("gru", 8, 8, 16, 32, 64),
    recurrent("rnn_tanh", 16, 8, 16, 32, 64),
    plain("pooling", "small resnet max pool 3x3/2 on [8, 8, 16, 16]", 16, lambda x: F.max_pool2d(x, 3, 2, 1), (8, 8, 16, 16)),
    plain("pooling", "small pointnet maximum over 128 points of [8, 128, 128]", 8, lambda x: x.max(-1)[0], (8, 128, 128)),
    plain("pooling", "small mobilenet average of [8, 64, 2, 2]", 8, lambda x: F.adaptive_avg_pool2d(x, 1), (8, 64, 2, 2)),
    plain("pooling", "resnet18 max pool 3x3/2 on [8, 64, 16, 16]", 8, lambda x: F.max_pool2d(x, 3, 2, 1), (8, 64, 16, 16)),
    plain("pooling", "digits max pool 2x2 on [32, 16, 8, 8]", 16, lambda x: F.max_pool2d(x, 2), (32, 16, 8, 8)),
    plain("pooling", "pointnet maximum over 512 points of [8, 1024, 512]", 4, lambda x: x.max(-1)[0], (8, 1024, 512)),
    plain("pooling", "mobilenet average of [32, 320, 4, 4]", 8, lambda x: F.adaptive_avg_pool2d(x, 1), (32, 320, 4, 4)),
    plain("activation", "small relu [8, 8, 8, 8]", 16, F.relu, (8, 8, 8, 8)),
    plain("activation", "small gelu [4, 16, 128]", 8, F.gelu, (4, 16, 128)),
    plain("activation", "relu [8, 64, 8, 8]", 8, F.relu, (8, 64, 8, 8)),
    plain("activation", "gelu [8, 32, 512]", 8, F.gelu, (8, 32, 512)),
    *itertools.chain.from_iterable(map(as_people_size_them, (2, 8, 32))),
)  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times of every row, in seconds by mode, and whether the modes agree."""
    titles = [f"{row.family}: M {row.num_models}, {row.name}" for row in ROWS]
    wanted = [i for i, row in enumerate(ROWS) if args.filter in f"{titles[i]}; {row.family} {row.name}"]
    run = functools.partial(_measure, quick=args.quick, device=args.device, threads=torch.get_num_threads())
    results = {}
    for i, one in zip(wanted, map(run, wanted) if args.quick else _apart(run, wanted), strict=True):
        results[titles[i]] = one
        if args.verbose:
            print(*_line(titles[i], one), flush=True)
    return results


def _apart(run: Callable[[int], Any], rows: Sequence[int]) -> Iterator[Any]:
    """Each row in a process of its own, or the memory that one leaves behind would decide about the times of the next."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(run, rows)


def tensors(row: Row, device: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Inputs of every member by themselves, and stacked."""
    torch.manual_seed(0)
    members = [[x.to(device).requires_grad_(x.is_floating_point()) for x in row.make()] for _ in range(row.num_models)]
    shared = [dim is None for dim in row.dims()]
    for member in members:
        member[:] = [first.detach() if one else x for x, first, one in zip(member, members[0], shared, strict=True)]
    columns = zip(zip(*members, strict=True), shared, strict=True)
    stacks = [column[0] if one else torch.stack([x.detach() for x in column]) for column, one in columns]
    if row.family in ("conv", "pooling") or "batch norm" in row.name:
        stacks[0] = stacks[0].transpose(0, 1).contiguous().transpose(0, 1)
    pairs = zip(stacks, shared, strict=True)
    return members, [x if one else x.requires_grad_(x.is_floating_point()) for x, one in pairs]


def like(output: Tensor) -> Tensor:
    """A gradient for an output, laid out in memory like it."""
    return torch.empty_like(output).normal_()


def _measure(number: int, quick: bool, device: str, threads: int) -> dict[str, Any]:
    row = ROWS[number]
    torch.set_num_threads(threads)
    hfta.step.keep_memory()
    warnings.filterwarnings("ignore", "There is a performance drop")
    members, stacks = tensors(row, device)
    dims = row.dims()
    grads = like(hfta.vmap(row.func, dims)(*stacks).detach())
    own = [grad.contiguous() for grad in grads]

    def serial() -> list[tuple[Tensor, ...]]:
        return [_run(row.func, member, grad) for member, grad in zip(members, own, strict=True)]

    known = MadeCalls()

    @functools.cache
    def chunks(size: int) -> list[tuple[list[Tensor], Tensor]]:
        return [_part(row, stacks, grads, start, start + size) for start in range(0, row.num_models, size)]

    def array(size: int) -> list[Tensor]:
        # Steps run inside ``routed`` and so without the mode of ``hfta.vmap``.
        routed = size < row.num_models
        func = vmap_routed(row.func, dims, known) if routed else hfta.vmap(row.func, dims)
        pieces = [_run(func, inputs, grad) for inputs, grad in chunks(size)]
        if len(pieces) == 1:
            return list(pieces[0])
        # A step gets the gradients of the parameters as stacks, while activations stay in their chunks.
        output, *others = zip(*pieces, strict=True)
        data = [x.requires_grad for x in stacks[: row.data]].count(True)
        return [*output, *(x for column in others[:data] for x in column), *map(torch.cat, others[data:])]

    expected = [torch.stack(column) for column in zip(*serial(), strict=True)]
    agrees = all(map(_close, _run(hfta.vmap(row.func, dims), stacks, grads), expected))
    best = fastest(array, row.num_models, torch.device(device))
    chunks.cache_clear()
    modes = {
        "serial": serial,
        "stock vmap": _stock(row, stacks, grads),
        "array": lambda: array(row.num_models),
        **({"chunks": lambda: array(best)} if best < row.num_models else {}),
    }
    # About 30 ms a round for each mode.
    calls = max(1, min(100, int(0.03 / seconds(serial, 2, device)))) if not quick else 1
    timers = {name: functools.partial(_timed, name, work, calls, device) for name, work in modes.items()}
    times = interleaved(timers, 2 if quick else 7, warmup=0 if quick else 1)
    hfta.rules.install()
    return {"family": row.family, "num_models": row.num_models, "chunk_size": best, "agrees": agrees, "times": times}


def _part(row: Row, stacks: list[Tensor], grads: Tensor, start: int, stop: int) -> tuple[list[Tensor], Tensor]:
    """Inputs of some members: activations by themselves, as a network of these members computes them; parameters as views."""
    if stop - start == row.num_models:
        return stacks, grads
    parts = [stack.detach()[start:stop] for stack in stacks]
    parts[: row.data] = [_alone(part) for part in parts[: row.data]]
    triples = zip(parts, stacks, row.dims(), strict=True)
    return [stack if dim is None else x.requires_grad_(x.is_floating_point()) for x, stack, dim in triples], _alone(
        grads[start:stop]
    )


def _alone(part: Tensor) -> Tensor:
    """A copy whose axes lie in memory in the order in which they lay."""
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    back = [order.index(axis) for axis in range(part.dim())]
    return part.permute(order).contiguous().permute(back)


def _stock(row: Row, inputs: Sequence[Tensor], grads: Tensor) -> Callable[[], object]:
    """PyTorch's own ``vmap``, the gradient outside it where it can be and inside otherwise."""
    hfta.rules.uninstall()
    func, dims = row.func, row.dims()
    outside = functools.partial(_run, torch.func.vmap(func, dims), inputs, grads)
    wanted = tuple(i for i, x in enumerate(inputs) if x.requires_grad)

    def gradient(grad: Tensor, *values: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        def of(*leaves: Tensor) -> Tensor:
            filled = list(values)
            for i, leaf in zip(wanted, leaves, strict=True):
                filled[i] = leaf
            return func(*filled)

        output, pullback = torch.func.vjp(of, *(values[i] for i in wanted))
        return output, pullback(grad)

    plain = [x.detach() for x in inputs]
    try:
        outside()
    except RuntimeError:
        return lambda: torch.func.vmap(gradient, (0, *dims))(grads, *plain)
    return outside


def _timed(mode: str, work: Callable[[], object], calls: int, device: str) -> float:
    (hfta.rules.uninstall if mode == "stock vmap" else hfta.rules.install)()
    work()
    return seconds(work, calls, device)


def _run(func: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    output = func(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    # Members that share a table look up words in it, of which nothing has a gradient.
    return output.detach(), *(torch.autograd.grad(output, wanted, grad, materialize_grads=True) if wanted else ())


def _close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6))


def _best(one: dict[str, Any]) -> list[float]:
    return one["times"].get("chunks", one["times"]["array"])


def ratio(one: dict[str, Any], base: str) -> float:
    """How many times as fast as ``base`` the array is, by the median over rounds."""
    return statistics.median(a / b for a, b in zip(one["times"][base], _best(one), strict=True))


def _line(name: str, one: dict[str, Any]) -> list[str]:
    if not one["agrees"]:
        return [name, *("-",) * 5, "differs", "differs"]
    times = {mode: f"{statistics.median(values) * 1e3:.2f}" for mode, values in one["times"].items()}
    chunk = str(one["chunk_size"]) if "chunks" in times else ""
    cells = [times["serial"], times["stock vmap"], times["array"], chunk, times.get("chunks", "")]
    return [name, *cells, *(f"{ratio(one, base):.2f}x" for base in ("serial", "stock vmap"))]


def show(results: dict[str, Any]) -> str:
    """The table, and geometric means."""
    head = ["operator, ms", "serial", "stock vmap", "array", "chunk", "in chunks", "serial / best", "stock / best"]
    # Slower than the loop first.
    order = sorted(results, key=lambda name: results[name]["agrees"] and ratio(results[name], "serial") >= 1)
    text = table(head, [_line(name, results[name]) for name in order])
    good = {name: one for name, one in results.items() if one["agrees"]}
    groups = {
        "all rows": good,
        "sizes that are no powers of two": {name: one for name, one in good.items() if ", sized" in name},
        "small rows": {name: one for name, one in good.items() if ", small" in name},
        "published sizes": {name: one for name, one in good.items() if not re.search(", (small|sized)", name)},
    }
    for title, group in groups.items():
        for base in ("serial", "stock vmap") if group else ():
            ratios = [ratio(one, base) for one in group.values()]
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            text += f"\n{base} / array, {title}: geometric mean {mean:.2f}x over {len(ratios)}, least {least:.2f}x"
    return text
