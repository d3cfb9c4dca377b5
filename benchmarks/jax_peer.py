"""The MLP, ResNet-18 and the Transformer as JAX trains many of them: ``jit(vmap(update))`` with Optax, from the same weights.

Needs ``pip install 'hfta_func[peers]'``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import optax
import torch
from examples.common import fused
from examples.resnet.model import ResNet18
from examples.transformer.model import TransformerLM
from jax import lax

from benchmarks.workloads import Run, TaskJob

Arrays = dict[str, Any]


def mlp(params: Arrays, buffers: Arrays, x: Any, key: Any) -> tuple[Any, Arrays]:
    """Three linear layers, named as in ``nn.Sequential``."""
    for name in ("0", "2"):
        x = jax.nn.relu(linear(params, name, x))
    return linear(params, "4", x), buffers


def resnet(params: Arrays, buffers: Arrays, x: Any, key: Any) -> tuple[Any, Arrays]:
    """ResNet-18 in training."""
    buffers = dict(buffers)

    def norm(name: str, x: Any) -> Any:
        mean, var, count = x.mean((0, 2, 3)), x.var((0, 2, 3)), x.size / x.shape[1]
        for kind, value in (("mean", mean), ("var", var * count / (count - 1))):
            buffers[f"{name}.running_{kind}"] = 0.9 * buffers[f"{name}.running_{kind}"] + 0.1 * value
        buffers[f"{name}.num_batches_tracked"] = buffers[f"{name}.num_batches_tracked"] + 1
        scale = params[f"{name}.weight"] * lax.rsqrt(var + 1e-5)
        shift = params[f"{name}.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    x = jax.nn.relu(norm("stem.1", conv(params["stem.0.weight"], x, 2)))
    edges = ((0, 0), (0, 0), (1, 1), (1, 1))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), edges)
    for stage in range(4):
        for block in range(2):
            name = f"layers.{stage}.{block}"
            stride = 2 if stage and not block else 1
            y = jax.nn.relu(norm(f"{name}.bn1", conv(params[f"{name}.conv1.weight"], x, stride)))
            y = norm(f"{name}.bn2", conv(params[f"{name}.conv2.weight"], y))
            if f"{name}.shortcut.0.weight" in params:
                x = norm(f"{name}.shortcut.1", conv(params[f"{name}.shortcut.0.weight"], x, stride))
            x = jax.nn.relu(y + x)
    return linear(params, "head", x.mean((2, 3))), buffers


def transformer(params: Arrays, buffers: Arrays, tokens: Any, key: Any, rate: float = 0.0) -> tuple[Any, Arrays]:
    """The language model in training."""
    keys = iter(jax.random.split(key, 9))

    def dropout(x: Any) -> Any:
        kept = jax.random.bernoulli(next(keys), 1 - rate, x.shape) if rate else True
        return jnp.where(kept, x / (1 - rate), 0)

    def norm(name: str, x: Any) -> Any:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]

    def attention(name: str, x: Any) -> Any:
        qkv = x @ params[f"{name}.in_proj_weight"].T + params[f"{name}.in_proj_bias"]
        q, k, v = (part.reshape(*x.shape[:2], 2, -1).swapaxes(1, 2) for part in jnp.split(qkv, 3, -1))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + buffers["mask"])
        mixed = (dropout(weights) @ v).swapaxes(1, 2).reshape(x.shape)
        return linear(params, f"{name}.out_proj", mixed)

    weight = params["embed.weight"]
    x = dropout(weight[tokens] * math.sqrt(weight.shape[-1]) + buffers["place"])
    for layer in range(2):
        name = f"encoder.layers.{layer}"
        x = norm(f"{name}.norm1", x + dropout(attention(f"{name}.self_attn", x)))
        hidden = dropout(jax.nn.relu(linear(params, f"{name}.linear1", x)))
        x = norm(f"{name}.norm2", x + dropout(linear(params, f"{name}.linear2", hidden)))
    return linear(params, "decoder", x), buffers


def linear(params: Arrays, name: str, x: Any) -> Any:
    """``nn.Linear``."""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def conv(weight: Any, x: Any, stride: int = 1) -> Any:
    """``nn.Conv2d`` without a bias that pads by half its kernel."""
    pad = weight.shape[-1] // 2
    return lax.conv_general_dilated(
        x, weight, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
    )


def forward(model: torch.nn.Module) -> Callable[..., tuple[Any, Arrays]]:
    """The function that does what the model does.

    Raises:
        RuntimeError: if there is none.
    """
    if isinstance(model, ResNet18):
        return resnet
    if isinstance(model, TransformerLM):
        return functools.partial(transformer, rate=model.dropout.p)
    if isinstance(model, torch.nn.Sequential):
        return mlp
    raise RuntimeError(f"not written for {type(model).__name__}")


def run(job: TaskJob) -> Run:
    """All members of a job."""
    task, flags = getattr(job, "task", None), job.flags
    if task is None or flags.amp:
        raise RuntimeError("not written for this workload")
    if jax.default_backend() != {"cpu": "cpu", "cuda": "gpu"}[job.device.type]:
        raise RuntimeError(f"JAX runs on {jax.default_backend()}, the others on {job.device.type}")
    jax.config.update("jax_enable_x64", torch.get_default_dtype() == torch.float64)
    call, make = forward(task.factory()), {"adam": optax.adam, "adadelta": optax.adadelta}[task.optimizer]
    params, buffers = (
        {name: jnp.asarray(leaf.numpy(force=True)) for name, leaf in tree.items()}
        for tree in fused.initial(task.factory, flags.seeds, job.device)
    )
    lr, keys = jnp.asarray(flags.lr, dtype=float), jax.vmap(jax.random.key)(jnp.asarray(flags.seeds))

    def loss_fn(params: Arrays, buffers: Arrays, inputs: Any, targets: Any, key: Any) -> tuple[Any, Arrays]:
        logits, buffers = call(params, buffers, inputs, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(), buffers

    def update(carried: Any, lr: Any, key: Any, inputs: Any, targets: Any) -> Any:
        params, buffers, opt, count = carried
        key = jax.random.fold_in(key, count)
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, buffers), grads = value_and_grad(params, buffers, inputs, targets, key)
        updates, opt = make(lr).update(grads, opt, params)
        return (optax.apply_updates(params, updates), buffers, opt, count + 1), loss

    each = jax.jit(jax.vmap(update), donate_argnums=(0,))
    opt = jax.vmap(lambda params: make(1.0).init(params))(params)
    carried = params, buffers, opt, jnp.zeros(len(lr), jnp.int32)

    ready: dict[int, Any] = {}

    def step(batch: Any) -> torch.Tensor:
        nonlocal carried
        if id(batch) not in ready:
            # Batches lie on the device before the clock runs, as everybody's do.
            ready[id(batch)] = batch, [jnp.asarray(leaf.numpy(force=True)) for leaf in batch]
        carried, losses = each(carried, lr, keys, *ready[id(batch)][1])
        return torch.from_numpy(numpy.array(losses))

    return Run(step, lambda: ())
