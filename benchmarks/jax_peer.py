"""The workloads as JAX trains many of them: ``jit(vmap(update))`` with Optax, layer by layer, from the same weights.

Needs ``pip install 'hfta_func[peers]'``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import optax
import torch
from examples.bert.model import BERT
from examples.common import fused
from examples.mobilenet.model import InvertedResidual, MobileNet, SqueezeExcite
from examples.pointnet.model import PointNetClassifier, PointNetSegmenter, Transform
from examples.resnet.model import BasicBlock, ResNet18
from examples.transformer.model import TransformerLM
from jax import lax
from torch import nn

import hfta_func as hfta
from benchmarks.workloads import GANJob, Job, Run, TaskJob

Arrays = dict[str, Any]


class Pass:
    """A forward pass in training: the parameters, the buffers as it leaves them, and the key of its noise."""

    def __init__(self, params: Arrays, buffers: Arrays, key: Any):
        self.params, self.buffers, self._key, self._draws = params, dict(buffers), key, 0

    def __call__(self, module: nn.Module, path: str, x: Any) -> Any:
        """What the module at a path does.

        Raises:
            RuntimeError: if that is not written here.
        """
        for kind, call in LAYERS.items():
            if isinstance(module, kind):
                return call(self, module, path, x)
        raise RuntimeError(f"not written for {type(module).__name__}")

    def inner(self, module: nn.Module, path: str, name: str, x: Any) -> Any:
        """What a module inside the one at a path does."""
        return self(module.get_submodule(name), f"{path}.{name}" if path else name, x)

    def leaf(self, path: str, name: str) -> Any:
        """A parameter of the module at a path, or None."""
        return self.params.get(f"{path}.{name}" if path else name)

    def dropout(self, x: Any, rate: float) -> Any:
        """Noise of its own at every call."""
        if not rate:
            return x
        self._draws += 1
        kept = jax.random.bernoulli(jax.random.fold_in(self._key, self._draws), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0)


def sequential(run: Pass, module: nn.Module, path: str, x: Any) -> Any:
    """One after another."""
    for name, _ in module.named_children():
        x = run.inner(module, path, name, x)
    return x


def linear(run: Pass, module: nn.Linear, path: str, x: Any) -> Any:
    """``nn.Linear``."""
    return x @ run.leaf(path, "weight").T + run.leaf(path, "bias")


def conv(run: Pass, module: Any, path: str, x: Any) -> Any:
    """``nn.Conv1d`` of single points, which is faster as a product of matrices, and ``nn.Conv2d`` with zeros around."""
    weight, bias = run.leaf(path, "weight"), run.leaf(path, "bias")
    if weight.ndim == 3 and module.kernel_size == module.stride == (1,) and module.groups == 1:
        x = jnp.einsum("oi,nip->nop", weight[..., 0], x)
    else:
        pads = [(pad, pad) for pad in module.padding]
        x = lax.conv_general_dilated(x, weight, module.stride, pads, feature_group_count=module.groups)
    return x if bias is None else x + bias.reshape(-1, *(1,) * (weight.ndim - 2))


def conv_transposed(run: Pass, module: nn.ConvTranspose2d, path: str, x: Any) -> Any:
    """``nn.ConvTranspose2d`` without a bias: a convolution of what lies apart by the stride."""
    weight = jnp.flip(run.leaf(path, "weight"), (2, 3)).swapaxes(0, 1)
    pads = [(size - 1 - int(pad),) * 2 for size, pad in zip(weight.shape[2:], module.padding, strict=True)]
    return lax.conv_general_dilated(x, weight, (1, 1), pads, lhs_dilation=module.stride)


def batch_norm(run: Pass, module: Any, path: str, x: Any) -> Any:
    """``nn.BatchNorm1d`` and ``nn.BatchNorm2d``, with running statistics."""
    axes = (0, *range(2, x.ndim))
    mean, var, count = x.mean(axes), x.var(axes), x.size / x.shape[1]
    for kind, value in (("mean", mean), ("var", var * count / (count - 1))):
        run.buffers[f"{path}.running_{kind}"] = 0.9 * run.buffers[f"{path}.running_{kind}"] + 0.1 * value
    run.buffers[f"{path}.num_batches_tracked"] = run.buffers[f"{path}.num_batches_tracked"] + 1
    scale, wide = run.leaf(path, "weight") * lax.rsqrt(var + module.eps), (-1, *(1,) * (x.ndim - 2))
    return (x - mean.reshape(wide)) * scale.reshape(wide) + run.leaf(path, "bias").reshape(wide)


def layer_norm(run: Pass, module: nn.LayerNorm, path: str, x: Any) -> Any:
    """``nn.LayerNorm`` over the last axis."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + module.eps) * run.leaf(path, "weight") + run.leaf(path, "bias")


def max_pool(run: Pass, module: nn.MaxPool2d, path: str, x: Any) -> Any:
    """``nn.MaxPool2d`` of a square."""
    size, stride, pad = int(module.kernel_size), int(module.stride), int(module.padding)
    edges = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, stride, stride), edges)


def basic_block(run: Pass, module: nn.Module, path: str, x: Any) -> Any:
    """ResNet's."""
    y = jax.nn.relu(run.inner(module, path, "bn1", run.inner(module, path, "conv1", x)))
    y = run.inner(module, path, "bn2", run.inner(module, path, "conv2", y))
    return jax.nn.relu(y + run.inner(module, path, "shortcut", x))


def resnet(run: Pass, model: nn.Module, path: str, x: Any) -> Any:
    """``[N, 3, H, W] -> [N, classes]``."""
    x = run.inner(model, path, "layers", run.inner(model, path, "stem", x))
    return run.inner(model, path, "head", x.mean((2, 3)))


def inverted_residual(run: Pass, module: InvertedResidual, path: str, x: Any) -> Any:
    """MobileNet's."""
    y = run.inner(module, path, "layers", x)
    return x + y if module.shortcut else y


def squeeze_excite(run: Pass, module: nn.Module, path: str, x: Any) -> Any:
    """MobileNet V3's."""
    return x * run.inner(module, path, "weigh", x.mean((2, 3), keepdims=True))


def mobilenet(run: Pass, model: nn.Module, path: str, x: Any) -> Any:
    """``[N, 3, H, W] -> [N, classes]``."""
    return run.inner(model, path, "head", run.inner(model, path, "layers", x).mean((2, 3)))


def transform(run: Pass, module: nn.Module, path: str, x: Any) -> Any:
    """``[N, C, P] -> [N, C, C]``."""
    found = run.inner(module, path, "cloud", run.inner(module, path, "points", x).max(-1))
    return found.reshape(-1, x.shape[1], x.shape[1]) + jnp.eye(x.shape[1])


def features(run: Pass, model: nn.Module, x: Any) -> tuple[Any, Any]:
    """``[N, 3, P] -> [N, a, P], [N, c]``."""
    own, path = model.get_submodule("features"), "features"
    x = run.inner(own, path, "first", run.inner(own, path, "align", x).swapaxes(1, 2) @ x)
    if getattr(own, "align_features", None) is not None:
        raise RuntimeError("not written for the transform of features")
    return x, run.inner(own, path, "rest", x).max(-1)


def classifier(run: Pass, model: nn.Module, path: str, x: Any) -> Any:
    """``[N, 3, P] -> [N, classes]``."""
    return run.inner(model, path, "head", features(run, model, x)[1])


def segmenter(run: Pass, model: nn.Module, path: str, x: Any) -> Any:
    """``[N, 3, P] -> [N, P, parts]``."""
    points, cloud = features(run, model, x)
    cloud = jnp.broadcast_to(cloud[..., None], (*cloud.shape, points.shape[-1]))
    return run.inner(model, path, "head", jnp.concatenate([points, cloud], 1)).swapaxes(1, 2)


def encoder_layer(run: Pass, module: nn.TransformerEncoderLayer, path: str, x: Any) -> Any:
    """An encoder layer that sees no later tokens, normalised after each of its halves."""
    own, name = module.self_attn, f"{path}.self_attn"
    qkv = x @ run.leaf(name, "in_proj_weight").T + run.leaf(name, "in_proj_bias")
    split = (*x.shape[:2], own.num_heads, -1)
    q, k, v = (part.reshape(split).swapaxes(1, 2) for part in jnp.split(qkv, 3, -1))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + run.buffers["mask"])
    mixed = (run.dropout(weights, own.dropout) @ v).swapaxes(1, 2).reshape(x.shape)
    mixed = run.inner(own, name, "out_proj", mixed)
    x = run.inner(module, path, "norm1", x + run.dropout(mixed, module.dropout1.p))
    hidden = run.inner(module, path, "linear1", x)
    act = jax.nn.relu(hidden) if module.activation is nn.functional.relu else jax.nn.gelu(hidden, approximate=False)
    out = run.inner(module, path, "linear2", run.dropout(act, module.dropout.p))
    return run.inner(module, path, "norm2", x + run.dropout(out, module.dropout2.p))


def transformer(run: Pass, model: TransformerLM, path: str, tokens: Any) -> Any:
    """``[N, L] -> [N, L, vocabulary]``."""
    x = run.params["embed.weight"][tokens] * math.sqrt(model.dim) + run.buffers["place"]
    x = run.inner(model, path, "encoder.layers", run.dropout(x, model.dropout.p))
    return run.inner(model, path, "decoder", x)


def bert(run: Pass, model: BERT, path: str, tokens: Any) -> Any:
    """``[N, L] -> [N, L, vocabulary]``; each place sees itself and those before it."""
    weight = run.params["tokens.weight"]
    x = run.inner(model, path, "norm", weight[tokens] + run.params["places.weight"][: tokens.shape[1]])
    x = run.inner(model, path, "encoder.layers", run.dropout(x, model.dropout.p))
    return run.inner(model, path, "head", x) @ weight.T + run.params["bias"]


LAYERS: dict[type[nn.Module] | tuple[type[nn.Module], ...], Callable[..., Any]] = {
    (nn.Sequential, nn.ModuleList): sequential,
    nn.Linear: linear,
    (nn.Conv1d, nn.Conv2d): conv,
    nn.ConvTranspose2d: conv_transposed,
    (nn.BatchNorm1d, nn.BatchNorm2d): batch_norm,
    nn.LayerNorm: layer_norm,
    nn.MaxPool2d: max_pool,
    nn.Flatten: lambda run, module, path, x: x.reshape(len(x), -1),
    nn.Dropout: lambda run, module, path, x: run.dropout(x, module.p),
    nn.ReLU6: lambda run, module, path, x: jax.nn.relu6(x),
    nn.ReLU: lambda run, module, path, x: jax.nn.relu(x),
    nn.Hardswish: lambda run, module, path, x: jax.nn.hard_swish(x),
    nn.Hardsigmoid: lambda run, module, path, x: jax.nn.hard_sigmoid(x),
    nn.LeakyReLU: lambda run, module, path, x: jax.nn.leaky_relu(x, module.negative_slope),
    nn.GELU: lambda run, module, path, x: jax.nn.gelu(x, approximate=False),
    nn.Tanh: lambda run, module, path, x: jnp.tanh(x),
    BasicBlock: basic_block,
    ResNet18: resnet,
    InvertedResidual: inverted_residual,
    SqueezeExcite: squeeze_excite,
    MobileNet: mobilenet,
    Transform: transform,
    PointNetClassifier: classifier,
    PointNetSegmenter: segmenter,
    nn.TransformerEncoderLayer: encoder_layer,
    TransformerLM: transformer,
    BERT: bert,
}
"""What each kind of module does."""


def run(job: Job) -> Run:
    """All members of a job.

    Raises:
        RuntimeError: if it is not written for the job, or JAX runs on another device.
    """
    assert isinstance(job, TaskJob | GANJob)
    flags = job.flags
    if flags.amp:
        raise RuntimeError("not written for lower precision")
    if jax.default_backend() != {"cpu": "cpu", "cuda": "gpu"}[job.device.type]:
        raise RuntimeError(f"JAX runs on {jax.default_backend()}, the others on {job.device.type}")
    jax.config.update("jax_enable_x64", torch.get_default_dtype() == torch.float64)
    update, carried, more = (_gan if isinstance(job, GANJob) else _task)(job)
    lr, keys = jnp.asarray(flags.lr, dtype=float), jax.vmap(jax.random.key)(jnp.asarray(flags.seeds))

    def numbered(carried: Any, *inputs: Any) -> Any:
        (count, own), (lr, key, *others) = carried, inputs
        own, loss = update(own, lr, jax.random.fold_in(key, count), *others)
        return (count + 1, own), loss

    each = jax.jit(jax.vmap(numbered), donate_argnums=(0,))
    carried = jnp.zeros(len(lr), jnp.int32), carried
    ready: dict[int, Any] = {}

    def step(batch: Any) -> torch.Tensor:
        nonlocal carried
        if id(batch) not in ready:
            # Batches lie on the device before the clock runs, as everybody's do.
            ready[id(batch)] = batch, [_array(leaf) for leaf in batch]
        carried, losses = each(carried, lr, keys, *ready[id(batch)][1], *more())
        return torch.from_numpy(numpy.array(losses))

    return Run(step, lambda: ())


def _array(leaf: torch.Tensor) -> Any:
    return jnp.asarray(leaf.numpy(force=True))


def _initial(job: Any, factory: Callable[[], nn.Module]) -> tuple[Arrays, Arrays]:
    trees = fused.initial(factory, job.flags.seeds, job.device)
    params, buffers = ({name: _array(leaf) for name, leaf in tree.items()} for tree in trees)
    return params, buffers


Update = tuple[Callable[..., Any], Any, Callable[[], tuple[Any, ...]]]
"""``update(carried, lr, key, *batch, *more) -> carried, loss`` of one member, what all carry, and what makes ``more``."""


def _task(job: TaskJob) -> Update:
    model, make = job.task.factory(), {"adam": optax.adam, "adadelta": optax.adadelta}[job.task.optimizer]
    params, buffers = _initial(job, job.task.factory)

    def loss_fn(params: Arrays, buffers: Arrays, key: Any, inputs: Any, targets: Any) -> tuple[Any, Arrays]:
        run = Pass(params, buffers, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(run(model, "", inputs), targets)
        return losses.mean(), run.buffers

    def update(carried: Any, lr: Any, key: Any, *batch: Any) -> Any:
        params, buffers, opt = carried
        (loss, buffers), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, buffers, key, *batch)
        updates, opt = make(lr).update(grads, opt, params)
        return (optax.apply_updates(params, updates), buffers, opt), loss

    return update, (params, buffers, jax.vmap(make(1.0).init)(params)), lambda: ()


def _gan(job: GANJob) -> Update:
    """A step of the discriminator, then one of the generator, on the images that it had made."""
    flags, steps = job.flags, iter(range(2**31))
    generator, discriminator = job.generator(), job.discriminator()
    (g, g_buffers), (d, d_buffers) = _initial(job, job.generator), _initial(job, job.discriminator)

    def make(lr: Any) -> optax.GradientTransformation:
        return optax.adam(lr, b1=flags.beta1[0])

    def latent() -> tuple[Any, ...]:
        if not job.quiet:
            return ()
        keys = hfta.random.keys(flags.seeds)
        keys = hfta.random.fold_in(keys, torch.full_like(keys, next(steps)))
        shape = flags.batch_size, job.noise, 1, 1
        return (_array(hfta.random.normal(keys, shape, dtype=torch.get_default_dtype())),)

    def generate(g: Arrays, buffers: Arrays, latent: Any) -> tuple[Any, Arrays]:
        run = Pass(g, buffers, None)
        return run(generator, "", latent), run.buffers

    def judged(d: Arrays, buffers: Arrays, images: Any, sign: int) -> tuple[Any, Arrays]:
        run = Pass(d, buffers, None)
        return jax.nn.softplus(sign * run(discriminator, "", images)).mean(), run.buffers

    def both(d: Arrays, buffers: Arrays, real: Any, fake: Any) -> tuple[Any, Arrays]:
        of_real, buffers = judged(d, buffers, real, -1)
        of_fake, buffers = judged(d, buffers, fake, 1)
        return of_real + of_fake, buffers

    def fool(fake: Any, d: Arrays, buffers: Arrays) -> tuple[Any, Arrays]:
        return judged(d, buffers, fake, -1)

    def update(carried: Any, lr: Any, key: Any, real: Any, latent: Any = None) -> Any:
        g, g_buffers, g_opt, d, d_buffers, d_opt = carried
        if latent is None:
            latent = jax.random.normal(key, (len(real), job.noise, 1, 1), real.dtype)
        fake, pull_back, g_buffers = jax.vjp(lambda g: generate(g, g_buffers, latent), g, has_aux=True)
        (loss_d, d_buffers), grads = jax.value_and_grad(both, has_aux=True)(d, d_buffers, real, fake)
        updates, d_opt = make(lr).update(grads, d_opt, d)
        d = optax.apply_updates(d, updates)
        (loss_g, d_buffers), on_images = jax.value_and_grad(fool, has_aux=True)(fake, d, d_buffers)
        updates, g_opt = make(lr).update(*pull_back(on_images), g_opt, g)
        return (optax.apply_updates(g, updates), g_buffers, g_opt, d, d_buffers, d_opt), loss_d + loss_g

    init = jax.vmap(make(1.0).init)
    return update, (g, g_buffers, init(g), d, d_buffers, init(d)), latent
