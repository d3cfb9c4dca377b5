"""The workloads that are compared: HFTA's six at the published sizes and at small ones, an MLP, and networks as people start.

Those of HFTA are examples of ``examples/`` with model, loss, optimizer and embedded data, in the forms that the ways to train
them need: one ordinary model, an array, and PyTorch's own ``vmap``. The others are of one size, on random data.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from examples.common import fused, solo
from examples.common.data.images import to_float
from examples.common.flags import AdamFlags, Flags
from examples.common.losses import accuracy, cross_entropy
from examples.common.task import Batch, Task, autocast, find_device
from examples.dcgan import fused as gan
from examples.dcgan import main as dcgan
from examples.dcgan.model import on_fake, on_real
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import hfta_func as hfta

WORDS = 33278
"""Different words of WikiText-2."""
KERNELS: dict[str, dict[str, dict[str, bool]]] = {
    "fused": {"adam": {"fused": True}, "adadelta": {"foreach": True}},
    "foreach": {"adam": {"foreach": True}, "adadelta": {"foreach": True}},
    "default": {"adam": {}, "adadelta": {}},
}
"""How ``torch.optim`` updates: by the best kernels that it has (none is fused for Adadelta), by ``foreach``, or as it does
if nothing is said, on a CPU one parameter after another."""


class Spec(NamedTuple):
    """What is measured.

    Args:
        workload: A key of :data:`WORKLOADS`.
        size: ``"paper"`` or ``"small"``.
        num_models: M.
        batch_size: N.
        device: ``"cpu"`` or ``"cuda"``.
        amp: Whether in bfloat16.
        first: Seed of the first member.
        quiet: Whether without dropout and with the same latent vectors everywhere, so that results can be compared.
    """

    workload: str
    size: str
    num_models: int
    batch_size: int
    device: str = "cpu"
    amp: bool = False
    first: int = 0
    quiet: bool = False


class Run(NamedTuple):
    """One way to train: ``step(batch)`` trains and returns the losses ``[M]``; ``held()`` is what it keeps alive."""

    step: Callable[[Any], Tensor]
    held: Callable[[], Any]


class Job(Protocol):
    """A workload at some M and N."""

    batches: list[Any]

    def solo(self, member: int, compiled: bool | str, kernels: str = "fused") -> Run:
        """One member in plain PyTorch, whose optimizer updates by these of :data:`KERNELS`."""
        ...

    def array(self, **options: Any) -> tuple[Callable[..., Any], Any]:
        """Step, with further options of it, and state of all members."""
        ...

    def stock(self, compiled: bool) -> Run:
        """All members under ``torch.func.vmap`` without batching rules of ours, with the array's optimizer."""
        ...


class TaskJob:
    """A model with a loss."""

    def __init__(self, task: Task, flags: Flags, quiet: bool):
        self.flags, self.device = flags, find_device(flags.device)
        self.task = task._replace(factory=lambda: silent(task.factory())) if quiet else task
        self.batches = batches(fused.make_loader(task.train, task.training_batch, flags, self.device))

    def solo(self, member: int, compiled: bool | str, kernels: str = "fused") -> Run:
        """One member in plain PyTorch."""
        flags, task = self.flags.member(member), self.task
        torch.manual_seed(flags.seeds[0])
        model = task.factory().to(self.device)
        optimizer, _ = solo.make_optimizer(task.optimizer, model, flags, **KERNELS[kernels][task.optimizer])
        run = torch.compile(model, dynamic=False, mode=compiled_mode(compiled)) if compiled else model

        def step(batch: Batch) -> Tensor:
            optimizer.zero_grad()
            with autocast(self.device, flags.amp):
                loss = task.loss_fn(run, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Run(step, lambda: (model.state_dict(), [*map(dict, optimizer.state.values())]))

    def array(self, **options: Any) -> tuple[Callable[..., Any], Any]:
        """Step and state of all members."""
        step, state, _ = fused.prepare(self.task, self.flags, self.device, **options)
        return step, state

    def stock(self, compiled: bool) -> Run:
        """All members under ``torch.func.vmap``."""
        task, model = self.task, self.task.factory().to(self.device)
        params, buffers = fused.initial(task.factory, self.flags.seeds, self.device)
        optimizer = fused.OPTIMIZERS[task.optimizer](self.flags.per_model(), 1000)
        carried = params, buffers, optimizer.init(params)

        def loss_fn(params: Any, buffers: Any, batch: Batch) -> tuple[Tensor, Any]:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            bound = lambda *inputs: functional_call(model, (params, buffers), inputs)  # noqa: E731
            return task.loss_fn(bound, batch), buffers

        def update(params: Any, buffers: Any, opt: Any, batch: Batch) -> Any:
            with autocast(self.device, self.flags.amp):
                each = torch.func.vmap(grad_and_value(loss_fn, has_aux=True), randomness="different")
                grads, (losses, buffers) = each(params, buffers, batch)
            # In place, as all others do it.
            hfta.update_(optimizer, grads, opt, params)
            return (params, buffers, opt), losses

        return carry(update, carried, compiled)


class GANJob:
    """A generator and a discriminator."""

    def __init__(self, flags: dcgan.Flags, quiet: bool):
        self.flags, self.device, self.quiet = flags, find_device(flags.device), quiet
        self.generator, self.discriminator, self.noise, images, _ = dcgan.setting(flags)
        self.batches = batches(fused.make_loader((images,), lambda batch: (to_float(batch[0]),), flags, self.device))

    def solo(self, member: int, compiled: bool | str, kernels: str = "fused") -> Run:
        """One member in plain PyTorch."""
        flags = dataclasses.replace(self.flags.member(member), compile=bool(compiled))
        make = self.generator, self.discriminator, self.noise, flags
        with mock.patch.object(torch, "compile", functools.partial(torch.compile, mode=compiled_mode(compiled))):
            pair, steps = dcgan.Pair(*make, **KERNELS[kernels]["adam"]), itertools.count()

        def as_in_the_array(count: int) -> Tensor:
            keys = hfta.random.keys(self.flags.seeds, device=self.device)
            keys = hfta.random.fold_in(keys, torch.full_like(keys, next(steps)))
            return hfta.random.normal(keys, (count, self.noise, 1, 1), dtype=self.batches[0][0].dtype)[member]

        if self.quiet:
            pair.draw = as_in_the_array

        def step(batch: Batch) -> Tensor:
            losses = pair.step(batch[0])
            return losses["loss_d"] + losses["loss_g"]

        return Run(step, lambda: [part.state_dict() for part in pair.parts().values()])

    def array(self, donate: bool = True, **options: Any) -> tuple[Callable[..., Any], Any]:
        """Step and state of all members: the example's own, which is donated its state, or a joint step of two networks.

        Raises:
            RuntimeError: if there are other options, which a step of its own does not have.
        """
        if options:
            raise RuntimeError(f"the example's own step does not have {', '.join(options)}")
        if not donate:
            return self._joint()
        step, state = gan.prepare(self.generator, self.discriminator, self.noise, self.flags)

        def both(state: gan.GANState, batch: Batch) -> tuple[gan.GANState, dict[str, Tensor]]:
            state, losses = step(state, batch)
            return state, {"loss": losses["loss_d"] + losses["loss_g"]}

        return both, state

    def _joint(self) -> tuple[JointGAN, hfta.step.TrainState]:
        make, seeds, autocast = (
            (self.discriminator, self.generator),
            self.flags.seeds,
            torch.bfloat16 if self.flags.amp else None,
        )
        each = [
            zip("dg", own, strict=True)
            for own in zip(*(fused.initial(f, seeds, self.device) for f in make), strict=True)
        ]
        params, buffers = (
            {f"{name}.{path}": leaf for name, own in pairs for path, leaf in own.items()} for pairs in each
        )
        model = nn.ModuleDict({name: factory() for name, factory in zip("dg", make, strict=True)})
        optimizer = fused.adam(self.flags.per_model(), 1)
        steps = [hfta.make_train_step(model, loss, optimizer, autocast=autocast) for loss in (_loss_d, _loss_g)]
        step = hfta.joint(**dict(zip("dg", steps, strict=True)))
        return JointGAN(step, self.noise), step.init(params, buffers, seeds=seeds)

    def stock(self, compiled: bool) -> Run:
        """All members under ``torch.func.vmap``."""
        with mock.patch.object(hfta, "vmap", torch.func.vmap):
            step, state = self.array()

        def update(state: Any, batch: Batch) -> Any:
            state, metrics = step(state, batch)
            return (state,), metrics["loss"]

        return carry(update, (state,), compiled)


class JointGAN:
    """A joint step, both of whose losses have the same latent vectors, as :class:`examples.dcgan.main.Pair` has."""

    def __init__(self, step: hfta.step.JointStep, noise: int):
        self.step, self.noise = step, noise

    def __call__(self, state: hfta.step.TrainState, batch: Batch) -> tuple[hfta.step.TrainState, dict[str, Tensor]]:
        """Train both networks, and report the sum of their losses."""
        keys, real = hfta.random.fold_in(state.keys, state.step), batch[0]
        latent = hfta.random.normal(keys, (real.shape[1], self.noise, 1, 1), dtype=real.dtype)
        state, metrics = self.step(state, (real, latent))
        return state, {"loss": metrics["d.loss"] + metrics["g.loss"]}

    def replayed(self, steps: int) -> JointGAN:
        """As :meth:`hfta.step.JointStep.replayed`."""
        return JointGAN(self.step.replayed(steps), self.noise)


def _loss_d(model: Any, batch: Batch) -> Tensor:
    real, latent = batch
    return on_real(model.d(real)) + on_fake(model.d(model.g(latent)))


def _loss_g(model: Any, batch: Batch) -> Tensor:
    return on_real(model.d(model.g(batch[1])))


def compiled_mode(compiled: bool | str) -> str | None:
    """Of ``torch.compile``."""
    return compiled if isinstance(compiled, str) else None


def batches(loader: Any) -> list[Batch]:
    """Four of them, in PyTorch's default precision."""
    dtype = torch.get_default_dtype()
    four = itertools.islice(itertools.cycle(loader), 4)
    return [tuple(leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in batch) for batch in four]


def carry(update: Callable[..., Any], carried: Any, compiled: bool) -> Run:
    """A run that carries what ``update(*carried, batch) -> carried, losses`` changes."""
    run = torch.compile(update, fullgraph=True, dynamic=False) if compiled else update

    def step(batch: Batch) -> Tensor:
        nonlocal carried
        with torch.no_grad():
            carried, losses = run(*carried, batch)
        return losses

    return Run(step, lambda: carried)


def silent(model: nn.Module) -> nn.Module:
    """The model without its dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


class OwnFlags(AdamFlags):
    """The flags of an example, for a network of this file."""


def mlp() -> nn.Module:
    """Two hidden layers of 64 units."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def lenet(channels: int = 1, padding: int = 2) -> nn.Module:
    """LeNet-5 with ReLU (LeCun et al., Proceedings of the IEEE 86(11), 1998), or the network of PyTorch's CIFAR-10 pages."""
    convolutions = nn.Conv2d(channels, 6, 5, padding=padding), nn.Conv2d(6, 16, 5)
    layers = (layer for one in convolutions for layer in (one, nn.ReLU(), nn.MaxPool2d(2)))
    head = nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    return nn.Sequential(*layers, nn.Flatten(), *head)


def mnist() -> nn.Module:
    """The network of PyTorch's first example on MNIST."""
    convolutions = (
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
    )
    head = nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10)
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), *head)


class Residual(nn.Module):
    """Two convolutions of three by three with group norm, and a shortcut."""

    def __init__(self, i: int, o: int, stride: int):
        super().__init__()
        first, second = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, padding=1, bias=False)
        self.layers = nn.Sequential(first, nn.GroupNorm(4, o), nn.ReLU(), second, nn.GroupNorm(4, o))
        self.shortcut = nn.Identity() if i == o else nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, I, H, W] -> [N, O, H / stride, W / stride]``."""
        return torch.relu(self.layers(x) + self.shortcut(x))


def narrow_resnet() -> nn.Module:
    """A residual network whose first layers have twelve channels."""
    stem = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.GroupNorm(4, 12), nn.ReLU()
    blocks = Residual(12, 12, 1), Residual(12, 24, 2), Residual(24, 48, 2)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def sensors() -> nn.Module:
    """Two convolutions over signals of nine channels."""
    first, second = nn.Conv1d(9, 30, 5, padding=2), nn.Conv1d(30, 30, 5, padding=2)
    body = first, nn.ReLU(), nn.MaxPool1d(2), second, nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(30, 6))


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (64,)),
    "lenet": (lenet, (1, 28, 28)),
    "mnist": (mnist, (1, 28, 28)),
    "cifar": (functools.partial(lenet, 3, 0), (3, 32, 32)),
    "narrow-resnet": (narrow_resnet, (3, 32, 32)),
    "sensors": (sensors, (9, 128)),
}
"""Networks that are in no example: what makes one, and the shape of a sample."""


def _own(name: str) -> Task:
    factory, shape = OWN[name]
    generator, count = torch.Generator().manual_seed(0), 4096 if len(shape) == 1 else 512
    rows = torch.randn(count, *shape, generator=generator), torch.randint(0, 6, (count,), generator=generator)
    return Task(factory, cross_entropy, accuracy, "adam", rows, rows)


def _language(name: str) -> Callable[[Any], Task]:
    """A Transformer or BERT on random words of WikiText-2's vocabulary, or at the small size on embedded text."""

    def task(flags: Any) -> Task:
        main = importlib.import_module(f"examples.{name}.main")
        own = main.task(flags)
        if flags.size == "small" or (name == "bert" and flags.device == "cpu"):
            return own
        words = torch.randint(0, WORDS, (4096, flags.length + 1), generator=torch.Generator().manual_seed(0))
        factory = {
            "transformer": lambda: main.TransformerLM(WORDS, flags.length),
            "bert": lambda: main.BERT(WORDS, flags.length, causal=True),
        }[name]
        return own._replace(factory=factory, train=(words[:, :-1].clone(), words[:, 1:].clone()))

    return task


class Workload(NamedTuple):
    """One that is compared.

    Args:
        title: Its name in tables.
        main: Name of the example, or None.
        options: Flags that are not left as they are.
        sizes: N at the small size, at the published one on a CPU, and on a GPU.
    """

    title: str
    main: str | None
    options: dict[str, Any]
    sizes: tuple[int, int, int]


WORKLOADS = {
    "mlp": Workload("MLP 64-64-64-10", None, {}, (32, 32, 32)),
    "lenet": Workload("LeNet-5", None, {}, (32, 32, 32)),
    "mnist": Workload("MNIST tutorial", None, {}, (32, 32, 32)),
    "cifar": Workload("CIFAR-10 tutorial", None, {}, (32, 32, 32)),
    "narrow-resnet": Workload("ResNet of width 12", None, {}, (32, 32, 32)),
    "sensors": Workload("1-D, 9 channels", None, {}, (32, 32, 32)),
    "resnet": Workload("ResNet-18", "resnet", {}, (8, 8, 128)),
    "mobilenet-v2": Workload("MobileNet V2", "mobilenet", {"version": "v2"}, (8, 16, 1024)),
    "mobilenet-v3s": Workload("MobileNet V3-small", "mobilenet", {"version": "v3s"}, (8, 16, 1024)),
    "mobilenet-v3l": Workload("MobileNet V3-large", "mobilenet", {"version": "v3l"}, (8, 16, 1024)),
    "pointnet-cls": Workload("PointNet, classification", "pointnet", {"task": "cls"}, (8, 4, 32)),
    "pointnet-seg": Workload("PointNet, segmentation", "pointnet", {"task": "seg"}, (8, 4, 32)),
    "dcgan": Workload("DCGAN", "dcgan", {}, (8, 4, 128)),
    "transformer": Workload("Transformer", "transformer", {}, (4, 8, 32)),
    "bert": Workload("BERT", "bert", {"objective": "next"}, (4, 2, 32)),
}


def batch_size(name: str, size: str, device: str) -> int:
    """N, unless somebody wants another."""
    small, cpu, cuda = WORKLOADS[name].sizes
    return small if size == "small" else cuda if device == "cuda" else cpu


POINTS = {"small": 128, "cpu": 500, "cuda": 2500}


def make(spec: Spec) -> Job:
    """The workload of a spec, with data and without models yet."""
    work, members = WORKLOADS[spec.workload], range(spec.first, spec.first + spec.num_models)
    main = importlib.import_module(f"examples.{work.main}.main") if work.main else None
    kind = main.Flags if main else OwnFlags
    options = dict(work.options)
    if work.main == "pointnet":
        options["points"] = POINTS["small" if spec.size == "small" else spec.device]
    fixed = {"size": spec.size, "device": spec.device, "amp": spec.amp, "batch_size": spec.batch_size, **options}
    (rate,) = {field.name: field.default for field in dataclasses.fields(kind)}["lr"]
    # Rates that all train, each member's the same in arrays of any size.
    lr = tuple(rate * 0.5 ** (1 + member % 4 / 4) for member in members)
    flags = kind(
        lr=lr, seeds=tuple(members), limit=max(512, 4 * spec.batch_size), **_spread(kind, len(members)), **fixed
    )
    if work.main == "dcgan":
        return GANJob(flags, spec.quiet)
    if main is None:
        return TaskJob(_own(spec.workload), flags, spec.quiet)
    task = _language(work.main) if work.main in ("transformer", "bert") else main.task
    return TaskJob(task(flags), flags, spec.quiet)


def _spread(kind: type[Flags], count: int) -> dict[str, tuple[Any, ...]]:
    """The default of every other knob, for every member."""
    skip = ("lr", "seeds")
    found = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: value * count for name, value in found.items() if isinstance(value, tuple) and name not in skip}
