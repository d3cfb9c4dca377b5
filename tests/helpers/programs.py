"""Programs: modules described by one line of words, for tests that try many of them.

A word is the name of an operation and a number that chooses its variant: ``"conv1d.3 keep.0 transpose.1 relu_.0"``. A
program starts with ``x`` and turns it into another tensor at every word. The number means something for every shape, and a
word that does not fit is left out, so every line is a program. Each family of operations is a table below.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 3
LARGEST = 600
"""Number of elements; a word that makes more is left out."""


class Spec(NamedTuple):
    """A program and what it starts from; its ``repr`` is what a failure prints."""

    words: str
    shape: tuple[int, ...] = (4,)  # of one sample of x
    dims: tuple[int | None, int | None, int | None] = (0, 0, 0)  # of x, z and ids: own or shared


class Run:
    """What a program works on: the current tensor, other inputs, and tensors that are read again at the end."""

    def __init__(self, x: Tensor, z: Tensor, ids: Tensor):
        self.x, self.z, self.ids, self.kept = x, z, ids, []

    def other(self) -> Tensor:
        """The second input, which is also read at the end, because it may be written from now on."""
        self.kept.append(self.z)
        return self.z


Step = Callable[["Program", Run], Tensor]
Op = Callable[["Program", Run, int], "Step | None"]


class Program(nn.Module):
    """The module of a spec."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.last = nn.Parameter(torch.ones(()))
        self.steps: list[Step] = []
        self.words: list[str] = []
        run = Run(*inputs(spec))
        for word in spec.words.split():
            name, _, number = word.partition(".")
            # Writes into places that are one in memory are undefined.
            if (name in WRITES or name.endswith("_")) and overlaps(run.x):
                continue
            before, kept = run.x, list(run.kept)
            try:
                step = OPS[name](self, run, int(number))
                if step is None:
                    continue
                with in_python():
                    run.x = step(self, run)
                if not 0 < run.x.numel() <= LARGEST or run.x.dim() > 5:
                    raise ValueError
            except Exception:
                run.x, run.kept = before, kept
                continue
            self.steps.append(step)
            self.words.append(word)

    def forward(self, x: Tensor, z: Tensor, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        run = Run(x, z, ids)
        for step in self.steps:
            run.x = step(self, run)
        return run.x, run.kept

    def add(self, module: nn.Module) -> str:
        """Register a module, and return its name."""
        name = f"m{len(self._modules)}"
        self.add_module(name, module)
        return name

    def param(self, value: Tensor) -> str:
        name = f"p{len(self._parameters)}"
        self.register_parameter(name, nn.Parameter(value))
        return name

    def buffer(self, value: Tensor) -> str:
        name = f"b{len(self._buffers)}"
        self.register_buffer(name, value)
        return name

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


NAMES = ("x", "z", "ids")


def inputs(spec: Spec, member: int = 0, step: int = 0, nudge: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """x, z and ids of one member at one step, a little larger by ``nudge``; what is shared is the same for all."""
    draws = [torch.Generator().manual_seed(1 + 10 * step + (0 if dim is None else member)) for dim in spec.dims]
    return (
        torch.randn(N, *spec.shape, generator=draws[0]) * (1 + nudge),
        torch.randn(N, 4, generator=draws[1]) * (1 + nudge),
        torch.randint(0, 5, (N, 3), generator=draws[2]),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A number that depends on every entry of what a program leaves behind, and the entries."""
    x, kept = model(batch["x"], batch["z"], batch["ids"])
    outputs = [x, *kept]
    return model.last * weighed(outputs), {f"y{i}": y for i, y in enumerate(outputs)}


def weighed(outputs: list[Tensor]) -> Tensor:
    means = [(y * torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape)).mean() for y in outputs]
    return torch.stack(means).sum()


def ranked(run: Run, rank: int) -> Tensor:
    """The current tensor with ``rank`` axes: the last ones joined, or ones of size 1 behind the batch."""
    x = run.x
    if x.dim() > rank:
        return x.flatten(rank - 1) if rank > 1 else x.flatten()
    return x[(slice(None), *(None,) * (rank - x.dim()))]


def layer(make: Callable[[Tensor, int], nn.Module], rank: int | None = None) -> Op:
    """A layer of ``torch.nn``, made for a tensor of ``rank`` axes."""

    def op(m: Program, run: Run, n: int) -> Step:
        name = m.add(make(run.x if rank is None else ranked(run, rank), n))
        return lambda m, run: first(m[name](run.x if rank is None else ranked(run, rank)))

    return op


def pure(func: Callable[[Tensor, int], Tensor]) -> Op:
    """A function of the current tensor."""
    return lambda m, run, n: lambda m, run: func(run.x, n)


def write(func: Callable[[Tensor, int], Any]) -> Op:
    """A write in place, into the current tensor or a part of it, which stays the current one."""

    def op(m: Program, run: Run, n: int) -> Step:
        def step(m: Program, run: Run) -> Tensor:
            func(run.x, n)
            return run.x

        return step

    return op


def drawn(func: Callable[[Tensor, int], Tensor]) -> Op:
    """Noise, in training only."""
    return lambda m, run, n: lambda m, run: func(run.x, n) if m.training else run.x


def stateful(
    make: Callable[[Tensor, int], Tensor], use: Callable[[Program, str, Run, int], Tensor], kind: str = "buffer"
) -> Op:
    """A buffer, or a parameter, and what is done with it."""

    def op(m: Program, run: Run, n: int) -> Step:
        name = getattr(m, kind)(make(run.x, n))
        return lambda m, run: use(m, name, run, n)

    return op


def weighted(make: Callable[[Tensor, int], Tensor], use: Callable[[Tensor, Tensor, int], Tensor]) -> Op:
    """A parameter, and a function of it and the current tensor."""
    return stateful(make, lambda m, name, run, n: use(run.x, m[name], n), "param")


def mixed(func: Callable[[Tensor, Run, int], Tensor]) -> Op:
    """A function of the current tensor and the other inputs."""
    return lambda m, run, n: lambda m, run: func(run.x, run, n)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def overlaps(x: Tensor) -> bool:
    """Whether two entries are one in memory."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return places.as_strided(x.shape, x.stride(), x.storage_offset()).unique().numel() < x.numel()


def axis(x: Tensor, n: int) -> int:
    return n % x.dim() - (x.dim() if n % 2 else 0)


def divisor(size: int, n: int) -> int:
    """One of the divisors of ``size``."""
    found = [d for d in range(1, size + 1) if size % d == 0]
    return found[n % len(found)]


def conv(kind: type[nn.Module], rank: int) -> Op:
    def make(x: Tensor, n: int) -> nn.Module:
        channels, transposed = x.shape[1], "Transpose" in kind.__name__
        groups = divisor(channels, n)
        kernel = [min(1 + (n >> i & 1) + i % 2, size) for i, size in enumerate(x.shape[2:])]
        options = {"stride": 1 + n % 2, "dilation": 1 + n // 2 % 2, "groups": groups, "bias": n % 3 != 0}
        if not transposed and n % 5 == 4:
            options |= {"padding": 1, "padding_mode": ("circular", "reflect", "replicate", "zeros")[n // 5 % 4]}
        else:
            options |= {"padding": n // 4 % 2}
        return kind(channels, groups * (1 + n // 3 % 2), kernel, **options)

    return layer(make, rank)


def in_one_layout(op: Op) -> Op:
    """The gradient comes back contiguous, because PyTorch's own kernel is wrong for some permuted ones of one model."""

    def wrapped(m: Program, run: Run, n: int) -> Step | None:
        step = op(m, run, n)

        def flattened(m: Program, run: Run) -> Tensor:
            y = step(m, run)
            return y.flatten().unflatten(0, y.shape)

        return flattened

    return wrapped


def batch_norm(kind: type[nn.Module], rank: int | None) -> Op:
    def make(x: Tensor, n: int) -> nn.Module:
        features = x.shape[1]
        momentum = (0.1, None, 0.4)[n % 3]
        return kind(features, momentum=momentum, affine=n % 2 == 0, track_running_stats=n % 5 != 4)

    return in_one_layout(layer(make, rank))


def instance_norm(kind: type[nn.Module], rank: int) -> Op:
    def make(x: Tensor, n: int) -> nn.Module:
        return kind(x.shape[1], affine=n % 2 == 0, track_running_stats=n % 3 == 0, momentum=0.3)

    return in_one_layout(layer(make, rank))


def recurrent(kind: type[nn.Module], **options: Any) -> Op:
    return layer(
        lambda x, n: kind(
            x.shape[-1], 2 + n % 2, num_layers=1 + n // 2 % 2, batch_first=n % 3 == 0, bidirectional=n % 5 == 4,
            bias=n % 7 != 6, **options,
        ),
        3,
    )  # fmt: skip


def attention(dropout: float = 0.0) -> Op:
    def op(m: Program, run: Run, n: int) -> Step:
        width = ranked(run, 3).shape[-1]
        name = m.add(
            nn.MultiheadAttention(
                width, divisor(width, n), dropout, bias=n % 3 != 0, batch_first=n % 2 == 0, add_bias_kv=n % 5 == 4
            )
        )

        def step(m: Program, run: Run) -> Tensor:
            x = ranked(run, 3)
            return m[name](x, x, x if n % 4 else x.flip(0), need_weights=n % 7 == 0)[0]

        return step

    return op


def transformer(dropout: float = 0.0) -> Op:
    return layer(
        lambda x, n: nn.TransformerEncoderLayer(
            x.shape[-1], divisor(x.shape[-1], n), 3, dropout, batch_first=n % 2 == 0, norm_first=n % 3 == 0,
            activation=("relu", "gelu")[n % 2],
        ),
        3,
    )  # fmt: skip


def embedding(m: Program, run: Run, n: int) -> Step:
    name = m.add(nn.Embedding(5, 2 + n % 3, padding_idx=2 if n % 2 else None, max_norm=1.0 if n % 7 == 6 else None))
    return lambda m, run: m[name](run.ids)


def embedding_bag(m: Program, run: Run, n: int) -> Step:
    name = m.add(nn.EmbeddingBag(5, 3, mode=("sum", "mean", "max")[n % 3], padding_idx=1 if n % 2 else None))
    return lambda m, run: m[name](run.ids)


def tied_embedding(m: Program, run: Run, n: int) -> Step:
    width = run.x.shape[-1]
    name = m.add(nn.Embedding(5, width))
    decoder = nn.Linear(width, 5, bias=False)
    decoder.weight = m[name].weight
    decoder_name = m.add(decoder)
    return lambda m, run: m[decoder_name](run.x + m[name](run.ids).mean((0, 1)))


def again(m: Program, run: Run, n: int) -> Step | None:
    """The same layer several times, or under a second name."""
    width = run.x.shape[-1]
    name = m.add(nn.Linear(width, width))
    other = name if n % 2 else m.add(m[name])

    def step(m: Program, run: Run) -> Tensor:
        x = run.x
        for turn in range(1 + n % 3):
            x = torch.tanh(m[name if turn % 2 else other](x))
        return x

    return step


def branch(m: Program, run: Run, n: int) -> Step:
    """Another layer in training than in evaluation, or one for wide inputs."""
    width = run.x.shape[-1]
    names = [m.add(nn.Linear(width, width)), m.add(nn.Linear(width, width, bias=False))]

    def step(m: Program, run: Run) -> Tensor:
        if n % 2:
            return m[names[m.training]](run.x)
        return m[names[0]](run.x) if run.x.shape[0] > 2 and run.x.dim() < 4 else m[names[1]](run.x).relu_()

    return step


def rows(m: Program, run: Run, n: int) -> Step:
    """A Python loop over rows."""
    name = m.add(nn.Linear(run.x[0].numel() if run.x.dim() > 1 else 1, 2))
    return lambda m, run: torch.stack([m[name](row.reshape(-1)) * (i + 1) for i, row in enumerate(run.x)])


def spectral(m: Program, run: Run, n: int) -> Step:
    kind = (nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm)[n % 2]
    name = m.add(kind(nn.Linear(run.x.shape[-1], 3)))
    return lambda m, run: m[name](run.x)


def keep(m: Program, run: Run, n: int) -> Step:
    def step(m: Program, run: Run) -> Tensor:
        run.kept.append(run.x)
        return run.x if n % 2 else run.x.clone()

    return step


def swap(m: Program, run: Run, n: int) -> Step | None:
    if not run.kept:
        return None

    def step(m: Program, run: Run) -> Tensor:
        place = n % len(run.kept)
        found, run.kept[place] = run.kept[place], run.x
        return found

    return step


def merge(m: Program, run: Run, n: int) -> Step | None:
    if not run.kept:
        return None

    def step(m: Program, run: Run) -> Tensor:
        other = run.kept[n % len(run.kept)]
        return run.x + other if other.shape == run.x.shape else run.x * other.mean()

    return step


def part(x: Tensor, n: int) -> Tensor:
    """A view of a part of a tensor, not by ``view``."""
    d = axis(x, n // 8)
    size = x.shape[d]
    return (
        lambda: x.select(d, n // 8 % size),
        lambda: x.narrow(d, size // 2, size - size // 2),
        lambda: x[..., ::2],
        lambda: x.transpose(0, -1),
        lambda: x.unfold(d, min(2, size), 2),
        lambda: x.chunk(2, d)[0],
        lambda: x.diagonal(0, 0, -1) if x.dim() > 1 else x,
        lambda: x.unsqueeze(d).expand(x.unsqueeze(d).shape).squeeze(d),
    )[n % 8]()


def keep_part(m: Program, run: Run, n: int) -> Step:
    def step(m: Program, run: Run) -> Tensor:
        run.kept.append(part(run.x, n))
        return run.x

    return step


def view(x: Tensor, n: int) -> Tensor:
    d = axis(x, n // 4)
    half = divisor(x.shape[d], n // 8)
    return (
        lambda: x.view(-1, x.shape[-1]),
        lambda: x.view(x.shape[0], -1),
        lambda: x.unflatten(d, (half, -1)),
        lambda: x.view(*x.shape[::-1]),
    )[n % 4]()


def indexed(x: Tensor, n: int) -> Tensor:
    index = torch.tensor([0, -1, 0])
    d = axis(x, n // 8)
    return (
        lambda: x[index],
        lambda: x[:, [0, -1]] if x.dim() > 1 else x[[0, -1]],
        lambda: x[..., index],
        lambda: x[torch.arange(2), ..., torch.tensor([0, -1])],
        lambda: x[None, :, ..., 0],
        lambda: x.index_select(d, torch.tensor([0, x.shape[d] - 1])),
        lambda: x.gather(d, (x > 0).long() % x.shape[d]),
        lambda: x.take_along_dim(x.argsort(d), d),
    )[n % 8]()


def assigned(x: Tensor, n: int) -> Any:
    """Assignments to entries."""
    d = axis(x, n // 16)
    return (
        lambda: x.__setitem__(0, 1.5),
        lambda: x.__setitem__((..., 0), x[..., -1].clone()),
        lambda: x.__setitem__(x > 0.5, 0.25),
        lambda: x.__setitem__((..., slice(None, None, 2)), x[..., ::2] * 2),
        lambda: x.__setitem__(torch.tensor([0, -1]), x[:2].clone() + 1),
        lambda: x.__setitem__((slice(1, None), ..., torch.tensor([0])), 0.5),
        lambda: x.index_add_(d, torch.tensor([0, 0]), x.narrow(d, 0, 1).repeat_interleave(2, d) * 0.5),
        lambda: x.index_fill_(d, torch.tensor([0]), 0.5),
        lambda: x.index_copy_(d, torch.tensor([0]), x.narrow(d, x.shape[d] - 1, 1).clone() * 2),
        lambda: x.scatter_(d, (x > 0).long() % x.shape[d], 0.75),
        lambda: x.scatter_add_(d, (x > 0).long() % x.shape[d], x.clone()),
        lambda: x.index_put_((torch.tensor([0, 0]),), x[:1].clone(), accumulate=True),
        lambda: x.masked_fill_(x < -0.5, -1.0),
        lambda: x.fill_diagonal_(0.5) if x.dim() == 2 else x.fill_(0.5),
        lambda: x.masked_scatter_(x > 0.5, x.clone().flip(0)),
        lambda: x.index_reduce_(d, torch.tensor([0]), x.narrow(d, 0, 1).clone(), "mean"),
    )[n % 16]()


def part_written(x: Tensor, n: int) -> Any:
    """Writes into a view, of which a view is written in turn."""
    y = part(x, n // 4)
    return (
        lambda: y.mul_(1.5),
        lambda: y.add_(y.clone().sigmoid()),
        lambda: part(y, n // 3).sub_(0.5),
        lambda: y.copy_(y.clone().flip(0).tanh()),
    )[n % 4]()


def fresh(x: Tensor, n: int) -> Tensor:
    """A new tensor that is filled piece by piece."""
    made = (torch.zeros_like, torch.empty_like, lambda x: x.new_zeros(x.shape), lambda x: x.new_full(x.shape, 0.5))
    y = made[n % 4](x)
    if n % 4 == 1:
        y.zero_()
    for i in range(x.shape[0]):
        y[i] = x[i] * (i + 1)
    y[..., 0] += 1
    part(y, n // 4).add_(part(x, n // 4))
    return y


def transposed_(x: Tensor, n: int) -> Any:
    y = x.clone()
    return (
        lambda: y.unsqueeze_(axis(x, n // 4)),
        lambda: y.transpose_(0, -1),
        lambda: y.squeeze_(),
        lambda: y.swapaxes_(-1, 0),
    )[n % 4]().mul_(0.5)


def state_(m: Program, name: str, run: Run, n: int) -> Tensor:
    """Statistics in a buffer of the shape of one sample: read, and written or replaced in training."""
    x, held = run.x, m[name]
    if m.training:
        value = x.detach().mean(0)
        if n % 4 == 0:
            held.mul_(0.9).add_(value, alpha=0.1)
        elif n % 4 == 1:
            held.lerp_(value, 0.2)
        elif n % 4 == 2:
            setattr(m, name, 0.5 * held + value)
        else:
            held[..., 0] = value[..., 0]
    return x - m[name]


def counter(m: Program, name: str, run: Run, n: int) -> Tensor:
    if n % 3 == 0:
        m[name].add_(1)
    elif n % 3 == 1:
        setattr(m, name, m[name] + 1)
    else:
        setattr(m, name, m[name] + m.training)
    return run.x * (1 + 0.1 * m[name])


def queue(m: Program, name: str, run: Run, n: int) -> Tensor:
    """The last three means, as a queue in a buffer."""
    held = m[name]
    mean = run.x.detach().mean()
    if n % 2:
        setattr(m, name, torch.cat([held[1:], mean[None]]))
    else:
        held.copy_(held.roll(1))
        held[0] = mean
    return run.x + m[name].sum()


LAYERS: dict[str, Op] = {
    "linear": layer(lambda x, n: nn.Linear(x.shape[-1], 1 + n % 4, bias=n % 3 != 0)),
    "bilinear": lambda m, run, n: (
        lambda name: lambda m, run: m[name](run.x, run.x.flip(-1))
    )(m.add(nn.Bilinear(run.x.shape[-1], run.x.shape[-1], 2, bias=n % 2 == 0))),
    "conv1d": conv(nn.Conv1d, 3),
    "conv2d": conv(nn.Conv2d, 4),
    "conv3d": conv(nn.Conv3d, 5),
    "convt1d": conv(nn.ConvTranspose1d, 3),
    "convt2d": conv(nn.ConvTranspose2d, 4),
    "bn0d": batch_norm(nn.BatchNorm1d, 2),
    "bn1d": batch_norm(nn.BatchNorm1d, 3),
    "bn2d": batch_norm(nn.BatchNorm2d, 4),
    "in1d": instance_norm(nn.InstanceNorm1d, 3),
    "in2d": instance_norm(nn.InstanceNorm2d, 4),
    "ln": layer(lambda x, n: nn.LayerNorm(list(x.shape[-1 - n % 2 :]), elementwise_affine=n % 3 != 0)),
    "gn": layer(lambda x, n: nn.GroupNorm(divisor(x.shape[1], n), x.shape[1], affine=n % 3 != 0)),
    "rms": layer(lambda x, n: nn.RMSNorm(list(x.shape[-1 - n % 2 :]), elementwise_affine=n % 3 != 0)),
    "lrn": layer(lambda x, n: nn.LocalResponseNorm(1 + n % 3), 3),
    "normed": spectral,
    "embedding": embedding,
    "bag": embedding_bag,
    "tied": tied_embedding,
    "mha": attention(),
    "transformer": transformer(),
    "rnn": recurrent(nn.RNN),
    "gru": recurrent(nn.GRU),
    "lstm": recurrent(nn.LSTM),
    "rnncell": layer(lambda x, n: nn.RNNCell(x.shape[-1], 3, nonlinearity=("tanh", "relu")[n % 2]), 2),
    "grucell": layer(lambda x, n: nn.GRUCell(x.shape[-1], 3, bias=n % 2 == 0), 2),
    "lstmcell": layer(lambda x, n: nn.LSTMCell(x.shape[-1], 3, bias=n % 2 == 0), 2),
    "prelu": layer(lambda x, n: nn.PReLU(x.shape[1] if n % 2 and x.dim() > 1 else 1)),
    "maxpool1d": layer(lambda x, n: nn.MaxPool1d(1 + n % 2, 1 + n // 2 % 2, ceil_mode=n % 3 == 0), 3),
    "maxpool2d": layer(lambda x, n: nn.MaxPool2d(1 + n % 2, 1 + n // 2 % 2, ceil_mode=n % 3 == 0), 4),
    "avgpool1d": layer(lambda x, n: nn.AvgPool1d(2, 1 + n % 2, n // 2 % 2, count_include_pad=n % 3 == 0), 3),
    "avgpool2d": layer(lambda x, n: nn.AvgPool2d((2, 1), 1 + n % 2, count_include_pad=n % 3 == 0), 4),
    "adaptive1d": layer(lambda x, n: (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)[n % 2](1 + n // 2 % 3), 3),
    "adaptive2d": layer(lambda x, n: (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)[n % 2](1 + n // 2 % 2), 4),
    "lppool": layer(lambda x, n: nn.LPPool1d(2, 1 + n % 2), 3),
    "unfold2d": layer(lambda x, n: nn.Unfold((1 + n % 2, 1), padding=n // 2 % 2), 4),
    "shuffle": layer(lambda x, n: nn.ChannelShuffle(divisor(x.shape[1], n)), 4),
    "upsample1d": layer(lambda x, n: nn.Upsample(scale_factor=2, mode=("nearest", "linear")[n % 2]), 3),
    "upsample2d": layer(lambda x, n: nn.Upsample(size=(3, 2), mode=("nearest", "bilinear", "bicubic")[n % 3]), 4),
    "pad1d": layer(
        lambda x, n: (nn.ReflectionPad1d, nn.ReplicationPad1d, nn.CircularPad1d, nn.ZeroPad1d)[n % 4](1), 3
    ),
    "pad2d": layer(lambda x, n: (nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d)[n % 3]((1, 0, 0, 1)), 4),
    "cosine": layer(lambda x, n: nn.Sequential(nn.Linear(x.shape[-1], 2), nn.Softmax(-1), nn.LogSigmoid())),
}  # fmt: skip

MATH: dict[str, Op] = {
    "relu": pure(lambda x, n: (F.relu, F.relu6, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish)[n % 8](x)),
    "sigmoid": pure(lambda x, n: (torch.sigmoid, torch.tanh, F.logsigmoid, F.softsign, F.tanhshrink)[n % 5](x)),
    "shrink": pure(lambda x, n: (F.hardshrink, F.softshrink, F.hardtanh, F.hardswish, F.hardsigmoid)[n % 5](x)),
    "leaky": pure(lambda x, n: (F.leaky_relu, F.softplus)[n % 2](x)),
    "glu": pure(lambda x, n: F.glu(x, axis(x, n))),
    "threshold": pure(lambda x, n: F.threshold(x, 0.1, 0.2)),
    "softmax": pure(lambda x, n: (F.softmax, F.log_softmax, F.softmin)[n % 3](x, axis(x, n // 3))),
    "normalize": pure(lambda x, n: F.normalize(x + 2, (2.0, 1.0)[n % 2], axis(x, n // 2))),
    "mean": pure(lambda x, n: x.mean(axis(x, n // 2), keepdim=n % 2 == 0)),
    "std": pure(lambda x, n: x.std(axis(x, n // 2), keepdim=n % 2 == 0)),
    "lse": pure(lambda x, n: x.logsumexp(axis(x, n // 2), keepdim=n % 2 == 0)),
    "amax": pure(lambda x, n: x.amax(axis(x, n // 2), keepdim=n % 2 == 0)),
    "max": pure(lambda x, n: x.max(axis(x, n // 2), keepdim=n % 2 == 0).values),
    # PyTorch's own kernel is wrong for some expanded tensors.
    "median": pure(lambda x, n: x.contiguous().median(axis(x, n)).values),
    "sort": pure(lambda x, n: x.sort(axis(x, n // 2), descending=n % 2 == 0).values),
    "topk": pure(lambda x, n: x.topk(1, axis(x, n)).values),
    "cumsum": pure(lambda x, n: (x.cumsum, lambda d: x.cumsum(d).flip(d), x.logcumsumexp)[n % 3](axis(x, n // 3))),
    "norm": pure(lambda x, n: torch.linalg.vector_norm(x + 1, dim=axis(x, n))),
    "matmul": pure(lambda x, n: x @ x.transpose(-1, -2) if x.dim() > 1 else x @ x),
    "einsum": pure(lambda x, n: torch.einsum("b...i,c...i->bc...", x, x.tanh())),
    "cdist": pure(lambda x, n: torch.cdist(x, x.flip(-1) + 3) if x.dim() > 1 else x),
    "sdpa": pure(lambda x, n: F.scaled_dot_product_attention(x, x, x, is_causal=n % 2 == 0) if x.dim() > 1 else x),
    "stack": pure(lambda x, n: torch.stack([x, x * 2], axis(x, n))),
    "cat": pure(lambda x, n: torch.cat([x, x.narrow(axis(x, n), 0, 1)], axis(x, n))),
    "repeat": pure(lambda x, n: x.repeat_interleave(2, axis(x, n)) if n % 2 else x.repeat(*(1,) * (x.dim() - 1), 2)),
    "flip": pure(lambda x, n: x.flip(axis(x, n // 2)) if n % 2 else x.roll(1, axis(x, n // 2))),
    "tril": pure(lambda x, n: (torch.tril, torch.triu)[n % 2](x)),
    "where": pure(lambda x, n: torch.where(x > 0, x, x * 0.5 if n % 2 else torch.tensor(0.25))),
    "clamp": pure(lambda x, n: x.clamp(-0.5, 1.0) if n % 2 else x.clamp(max=x.detach().mean())),
    "scatter": pure(lambda x, n: x.scatter_add(axis(x, n), (x > 0).long() % x.shape[axis(x, n)], x)),
    "select_scatter": pure(lambda x, n: x.select_scatter(x.select(axis(x, n), 0) * 2, axis(x, n), -1)),
    "onehot": pure(lambda x, n: F.one_hot((x > 0).long(), 2).to(x.dtype) * x.unsqueeze(-1)),
    "detach": pure(lambda x, n: x + x.detach().square().mean()),
    "indexed": pure(indexed),
    "fresh": pure(fresh),
    "transposed_": pure(transposed_),
}

VIEWS: dict[str, Op] = {
    "view": pure(view),
    "reshape": pure(lambda x, n: x.reshape(-1, divisor(x.numel(), n))),
    "flatten": pure(lambda x, n: x.flatten(n % x.dim() // 2)),
    "transpose": pure(lambda x, n: x.transpose(axis(x, n), axis(x, n // 5))),
    "permute": pure(lambda x, n: x.permute(*[(i + n) % x.dim() for i in range(x.dim())])),
    "unfold": pure(lambda x, n: x.unfold(axis(x, n // 4), min(2, x.shape[axis(x, n // 4)]), 1 + n % 2)),
    "split": pure(lambda x, n: x.split(1 + n % 2, axis(x, n // 4))[n // 2 % 2 - 1]),
    "unbind": pure(lambda x, n: x.unbind(axis(x, n))[-1]),
    "part": pure(part),
    "squeeze": pure(lambda x, n: x.squeeze()),
    "unsqueeze": pure(lambda x, n: x.unsqueeze(axis(x, n))),
    "expand": pure(lambda x, n: x.unsqueeze(axis(x, n)).expand(*[2 if s == 1 else s for s in x.unsqueeze(axis(x, n)).shape])),
    "contiguous": pure(lambda x, n: x.transpose(0, -1).contiguous().transpose(0, -1)),
}  # fmt: skip

WRITES: dict[str, Op] = {
    "relu_": pure(lambda x, n: (F.relu_, F.elu_, F.leaky_relu_, F.selu_, torch.sigmoid_, torch.tanh_)[n % 6](x)),
    "act_": pure(lambda x, n: (F.hardtanh_, F.celu_, lambda x: F.silu(x, True), lambda x: F.relu6(x, True))[n % 4](x)),
    "mul_": pure(lambda x, n: x.mul_(0.5) if n % 2 else x.add_(0.5)),
    "math_": pure(lambda x, n: (x.neg_, x.square_, lambda: x.clamp_(-1, 1), lambda: x.sub_(x.detach().mean()))[n % 4]()),
    "addc_": write(lambda x, n: (x.addcmul_ if n % 2 else x.addcdiv_)(x.clone(), x.detach() ** 2 + 1, value=0.5)),
    "part_": write(part_written),
    "assign": write(assigned),
    "zero_": write(lambda x, n: part(x, n).zero_()),
    "sigmoid_": write(lambda x, n: x.sigmoid_()),
    "threshold_": write(lambda x, n: F.threshold_(x, 0.1, 0.2) if n % 2 else x.fmod_(0.7)),
    "cumsum_": write(lambda x, n: x.cumsum_(axis(x, n)) if n % 2 else x.triu_()),
    "view_": pure(lambda x, n: view(x, n).mul_(1.5)),
    "nograd_": write(lambda x, n: x.detach().mul_(0.5)),
}  # fmt: skip

STATE: dict[str, Op] = {
    "scale": weighted(lambda x, n: torch.ones(x.shape[-1]), lambda x, p, n: x * p if n % 2 else x + p),
    "bias_": weighted(lambda x, n: torch.zeros(x.shape[-1]), lambda x, p, n: x.add_(p) if n % 2 else x.mul_(p)),
    "twice": weighted(
        lambda x, n: torch.randn(x.shape[-1], 3), lambda x, p, n: F.linear(torch.tanh(x @ p), p) if n % 2 else x @ p @ p.t()
    ),
    "row_": weighted(lambda x, n: torch.ones(()), lambda x, p, n: x.clone().index_put((torch.tensor([0]),), p)),
    "mask_": weighted(lambda x, n: torch.ones(()), lambda x, p, n: x.masked_fill(x > 0, p)),
    "ones": weighted(
        lambda x, n: torch.ones(3, x.shape[-1]),
        lambda x, p, n: torch.cat([x.flatten(0, -2), p]) if x.dim() > 1 else p @ x,
    ),
    "stats": stateful(lambda x, n: torch.zeros(x.shape[1:]), state_),
    "counter": stateful(lambda x, n: torch.zeros((), dtype=(torch.long, torch.float64)[n // 3 % 2]), counter),
    "queue": stateful(lambda x, n: torch.zeros(3), queue),
    "again": again,
    "branch": branch,
    "rows": rows,
    "keep": keep,
    "keep_part": keep_part,
    "swap": swap,
    "merge": merge,
}  # fmt: skip

INPUTS: dict[str, Op] = {
    "z": mixed(lambda x, run, n: (lambda s: x * s if n % 2 else x + s)(run.z.mean() if n % 3 else run.z[0, n % 4])),
    "z_": mixed(lambda x, run, n: x.add_(run.z.mean()) if n % 2 else x.mul_(run.z[0, 0])),
    "zcat": mixed(lambda x, run, n: torch.cat([x.flatten(1), run.z], 1) if x.dim() > 1 else torch.cat([x, run.z[0]])),
    "zmm": mixed(lambda x, run, n: x @ run.z[:, : x.shape[-1]].t() if n % 2 else F.linear(x, run.z[:, : x.shape[-1]])),
    "zmask": mixed(lambda x, run, n: torch.where(run.z[0, 0] > 0, x, -x)),
    "zfill_": mixed(lambda x, run, n: x.masked_fill_((run.z[:, 0] > 0).reshape(-1, *(1,) * (x.dim() - 1)), 0.5)),
    "zconv": mixed(lambda x, run, n: F.conv1d(x.unsqueeze(1), run.z[:2, None, : x.shape[-1]]) if x.dim() == 2 else x),
    "zonly": mixed(lambda x, run, n: run.other() if n % 2 else run.z * x.mean()),
    "zwrite": mixed(lambda x, run, n: run.other().mul_(0.5) if n % 2 else run.other().relu_()),
    "take": mixed(lambda x, run, n: x[run.ids % x.shape[0]] if n % 2 else x[..., run.ids[0] % x.shape[-1]]),
    "put_": mixed(lambda x, run, n: x.index_put_((run.ids[:, 0] % x.shape[0],), x.new_ones(()), accumulate=n % 2 == 0)),
    "add_at": mixed(lambda x, run, n: x.index_add(0, run.ids[0] % x.shape[0], x[:1].expand(3, *x.shape[1:]))),
    "ce": mixed(lambda x, run, n: x + F.cross_entropy(run.z * x.mean(), run.ids[:, 0] % 4)),
    "searched": mixed(lambda x, run, n: x * torch.searchsorted(run.z[0].sort().values, x.detach().contiguous())),
    "onehot_ids": mixed(lambda x, run, n: F.one_hot(run.ids, 5).to(x.dtype) * x.mean()),
}  # fmt: skip

NOISE: dict[str, Op] = {
    "drop": layer(lambda x, n: (nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.5, inplace=True))[n % 3]),
    "rrelu": layer(lambda x, n: nn.RReLU(inplace=n % 2 == 0)),
    "drop1d": layer(lambda x, n: (nn.Dropout1d, nn.FeatureAlphaDropout)[n % 2](0.4), 3),
    "drop2d": layer(lambda x, n: (nn.Dropout2d(0.3), nn.Dropout2d(0.3, inplace=True))[n % 2], 4),
    "randn": drawn(lambda x, n: x + (torch.randn_like(x) if n % 2 else torch.randn(x.shape))),
    "rand": drawn(lambda x, n: x * (torch.rand_like(x) if n % 2 else torch.rand(x.shape[-1]))),
    "bernoulli": drawn(lambda x, n: x * torch.bernoulli(x.sigmoid().detach() if n % 2 else torch.full((x.shape[-1],), 0.5))),
    "normal_": drawn(lambda x, n: x + (torch.empty_like(x).normal_() if n % 2 else torch.empty_like(x).uniform_(-1, 1))),
    "gumbel": drawn(lambda x, n: F.gumbel_softmax(x, hard=n % 2 == 0)),
    "perm": drawn(lambda x, n: x[torch.randperm(x.shape[0])] if n % 2 else x[..., torch.randint(0, x.shape[-1], (2,))]),
    "mha_drop": attention(0.3),
    "transformer_drop": transformer(0.2),
    "lstm_drop": recurrent(nn.LSTM, dropout=0.3),
    "sdpa_drop": drawn(lambda x, n: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4) if x.dim() > 1 else x),
    "normal": drawn(lambda x, n: torch.normal(x, 0.1) if n % 2 else x + torch.normal(0.0, 1.0, x.shape)),
    "part_noise": drawn(lambda x, n: (part(x, n).normal_(), x)[1]),
}  # fmt: skip


def made(x: Tensor, n: int) -> Tensor:
    """What comes of a tensor that the program makes and writes into."""
    d, out = axis(x, n // 8), torch.zeros(x.shape)
    return (
        lambda: out.add_(x),
        lambda: torch.ones(x.shape).mul_(x),
        lambda: torch.empty(x.shape).copy_(x),
        lambda: torch.full(x.shape[::-1], 0.5).permute(tuple(reversed(range(x.dim())))).sub_(x),
        lambda: out.index_add_(d, torch.arange(x.shape[d]).flip(0), x),
        lambda: torch.arange(float(x.numel())).view(x.shape).add_(x),
        lambda: assigned(out, x, d),
        lambda: x * total(x),
    )[n % 8]()


def assigned(out: Tensor, x: Tensor, d: int) -> Tensor:
    out.select(d, 0)[:] = x.select(d, 0)
    out[x > 1] = 2.0
    return out


def total(x: Tensor) -> Tensor:
    added = torch.zeros(())
    for row in x:
        added += row.mean()
    return added


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / (1 + ctx.saved_tensors[0].abs()) ** 2


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 0.25


def by_function(x: Tensor, n: int) -> Tensor:
    """A function that is differentiated by hand."""
    functions = (lambda: Reversed.apply(x, 0.5 + n % 5), lambda: Spike.apply(x) + x, lambda: Halved.apply(x * 1))
    return functions[n % 3]()


is_in_python = False
"""Whether operators of functions, such as ``torch.cond``, are the Python that they stand for."""


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """For a model alone: PyTorch would compile the operators of functions, which takes longer than all else."""
    global is_in_python
    before, is_in_python = is_in_python, True
    try:
        yield
    finally:
        is_in_python = before


Body = Callable[[Tensor], Tensor]
Flow = Callable[[Body, Tensor, int], Tensor]


def by_cond(body: Body, x: Tensor, n: int) -> Tensor:
    # Not zero, which rounding would decide where the mean has been subtracted.
    pred = x.mean() > (0.05, 0.3)[n % 2]
    sides = (body, lambda x: x.clone().mul_(0.5)) if n // 2 % 2 else (lambda x: -x, lambda x: body(x) * 2)
    # An array runs both sides, as a compiler does, so both must be able to run.
    return [side(x) for side in sides][not pred] if is_in_python else torch.cond(pred, *sides, (x,))


def by_if(body: Body, x: Tensor, n: int) -> Tensor:
    if (x.mean() > (0.0, 0.3)[n % 2]).item() if n // 2 % 2 else x[0].sum() > x[-1].sum():
        return body(x)
    return x * 0.5 if torch.allclose(x, x.mean(), atol=1.0) else -x


def by_while(body: Body, x: Tensor, n: int) -> Tensor:
    for _ in range(1 + n % 3):
        if x.square().mean() > 4:
            break
        x = body(x) * 1.25
    return x


def flow(func: Flow, drawn: bool = False) -> Op:
    """Control flow around a layer, a write into a new tensor, a function that is differentiated by hand, or noise."""

    def op(m: Program, run: Run, n: int) -> Step:
        width = run.x.shape[-1]
        name = m.add(nn.Linear(width, width))
        bodies: tuple[Body, ...] = (
            lambda x: m[name](x),
            lambda x: made(m[name](x), n // 4),
            lambda x: by_function(x, n // 4),
            lambda x: F.leaky_relu_(x * m[name].bias),
        )
        return lambda m, run: func(
            lambda x: F.dropout(x, 0.3, m.training) if drawn else bodies[n % 4](x), run.x, n // 4
        )

    return op


def lowered(x: Tensor, p: Tensor, n: int) -> Tensor:
    """What autocast computes in lower precision, of numbers for which it is exact: signs, and weights of as few bits.

    The gradient of a sign sums two products, which is exact in any order, and weights get none from here.
    """
    signs, weight = x + (x.sign() - x).detach(), p.detach().bfloat16().double()
    # A step under autocast lowers both itself.
    with torch.autocast("cpu", torch.bfloat16) if n // 6 % 2 else contextlib.nullcontext():
        if torch.is_autocast_enabled("cpu"):
            signs, weight = signs.float(), weight.float()
        y = (
            lambda: F.linear(signs, weight.t()),
            lambda: signs @ weight,
            lambda: torch.einsum("...i,io->...o", signs, weight),
            lambda: torch.bmm(signs.reshape(1, -1, signs.shape[-1]), weight[None]),
            lambda: F.prelu(signs, weight[0, 0]),
            lambda: torch.mm(signs.flatten(0, -2), weight),
        )[n % 6]()
    # The precision is part of the result.
    return y.to(x.dtype) * p.mean() + (y.dtype == torch.bfloat16)


MADE: dict[str, Op] = {"made": pure(made)}
FUNCTIONS: dict[str, Op] = {"function": pure(by_function)}
FLOWS: dict[str, Op] = {"cond": flow(by_cond)}
BRANCHES: dict[str, Op] = {"if": flow(by_if), "while": flow(by_while)}
"""Python's own branches on values, for which members part."""
BRANCHES_OF_NOISE: dict[str, Op] = {"if_drop": flow(by_if, True), "while_drop": flow(by_while, True)}
AUTOCAST: dict[str, Op] = {"lower": weighted(lambda x, n: torch.randn(x.shape[-1], 2), lowered)}
FAMILIES: dict[str, dict[str, Op]] = {
    "layers": LAYERS, "math": MATH, "views": VIEWS, "writes": WRITES, "state": STATE, "inputs": INPUTS, "noise": NOISE,
    "made": MADE, "functions": FUNCTIONS, "flows": FLOWS, "branches": BRANCHES,
    "branches of noise": BRANCHES_OF_NOISE, "autocast": AUTOCAST,
}  # fmt: skip
OPS: dict[str, Op] = {name: op for family in FAMILIES.values() for name, op in family.items()}


def models(spec: Spec, count: int) -> list[nn.Module]:
    """Copies of a program with parameters and buffers of their own."""
    torch.manual_seed(0)
    made = Program(spec)
    copies = [copy.deepcopy(made) for _ in range(count)]
    for member, model in enumerate(copies):
        draws = torch.Generator().manual_seed(100 + member)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point():
                    # Positive changes keep variances positive.
                    tensor.add_(torch.rand(tensor.shape, generator=draws) * 0.5)
                elif not name.endswith("num_batches_tracked"):
                    # Norms read the value of theirs, which members that run as one share.
                    tensor.add_(member)
    return copies
