"""PPO by PureJaxRL's protocol in JAX: environments, rollouts and updates of all agents as one program.

Needs ``pip install 'hfta_func[peers]'``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.rl_ways import ENVS, EPOCHS, ITERATIONS, LR, MINIBATCHES, PER_ITERATION, STEPS

Arrays = dict[str, Any]


def layers(key: Any, width: int, outputs: int, gain: float) -> list[Any]:
    """Weights and biases."""
    sizes = (4, width, math.sqrt(2)), (width, width, math.sqrt(2)), (width, outputs, gain)
    keys = jax.random.split(key, len(sizes))
    return [
        (jax.nn.initializers.orthogonal(scale)(own, (inputs, out)), jnp.zeros(out))
        for own, (inputs, out, scale) in zip(keys, sizes, strict=True)
    ]


def output(stack: list[Any], x: Any) -> Any:
    """Of layers with tanh between them."""
    for weight, bias in stack[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = stack[-1]
    return x @ weight + bias


def cartpole(place: Any, action: Any) -> tuple[Any, Any]:
    """The next place ``[N, 4]``, and whether the pole has fallen or the cart has left."""
    x, speed, angle, spin = place.T
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    shared = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sine) / 1.1
    turning = (9.8 * sine - cosine * shared) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    pushing = shared - 0.05 * turning * cosine / 1.1
    x, speed, angle, spin = x + 0.02 * speed, speed + 0.02 * pushing, angle + 0.02 * spin, spin + 0.02 * turning
    return jnp.stack([x, speed, angle, spin], 1), (jnp.abs(x) > 2.4) | (jnp.abs(angle) > 12 * 2 * math.pi / 360)


def loss_fn(params: Arrays, batch: Arrays) -> Any:
    """Of PPO, with clipped values."""
    logs = jax.nn.log_softmax(output(params["actor"], batch["observation"]))
    value = output(params["critic"], batch["observation"])[:, 0]
    gain, target, before = batch["advantage"], batch["target"], batch["value"]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    ratio = jnp.exp(jnp.take_along_axis(logs, batch["action"][:, None], 1)[:, 0] - batch["log_prob"])
    surrogate = jnp.minimum(ratio * gain, ratio.clip(0.8, 1.2) * gain).mean()
    near = before + (value - before).clip(-0.2, 0.2)
    error = jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
    return 0.25 * error - surrogate + 0.01 * (jnp.exp(logs) * logs).sum(1).mean()


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adam(lambda count: LR * (1 - count // (EPOCHS * MINIBATCHES) / ITERATIONS), eps=1e-5),
)


def start(key: Any, width: int) -> Arrays:
    """An agent and its environments."""
    key, actor, critic, place = jax.random.split(key, 4)
    params = {"actor": layers(actor, width, 2, 0.01), "critic": layers(critic, width, 1, 1.0)}
    return {
        **{"key": key, "params": params, "opt": OPTIMIZER.init(params)},
        "place": jax.random.uniform(place, (ENVS, 4), minval=-0.05, maxval=0.05),
        **{"length": jnp.zeros(ENVS, jnp.int32), "last": jnp.full(ENVS, jnp.nan)},
    }


def act(state: Arrays, _: None) -> tuple[Arrays, Arrays]:
    """A step in every environment; those whose episode ends begin another one."""
    key, choosing, resetting = jax.random.split(state["key"], 3)
    place, params = state["place"], state["params"]
    logs = jax.nn.log_softmax(output(params["actor"], place))
    action = jax.random.categorical(choosing, logs)
    after, fallen = cartpole(place, action)
    length = state["length"] + 1
    done = fallen | (length >= 500)
    fresh = jax.random.uniform(resetting, place.shape, minval=-0.05, maxval=0.05)
    seen = {"observation": place, "action": action, "value": output(params["critic"], place)[:, 0], "done": done}
    seen["log_prob"] = jnp.take_along_axis(logs, action[:, None], 1)[:, 0]
    changed = {"key": key, "place": jnp.where(done[:, None], fresh, after), "length": jnp.where(done, 0, length)}
    return {**state, **changed, "last": jnp.where(done, length, state["last"])}, seen


def advantages(seen: Arrays, last: Any) -> Any:
    """Generalised advantages ``[T, N]``; every reward is 1."""

    def back(carry: Any, step: Arrays) -> tuple[Any, Any]:
        following, sofar = carry
        left = 1.0 - step["done"]
        sofar = 1.0 + 0.99 * following * left - step["value"] + 0.99 * 0.95 * left * sofar
        return (step["value"], sofar), sofar

    return jax.lax.scan(back, (last, jnp.zeros_like(last)), seen, reverse=True)[1]


def iterate(state: Arrays, _: None) -> tuple[Arrays, None]:
    """Collect, and train on minibatches."""
    state, seen = jax.lax.scan(act, state, None, STEPS)
    seen["advantage"] = advantages(seen, output(state["params"]["critic"], state["place"])[:, 0])
    seen["target"] = seen["advantage"] + seen["value"]
    flat = {name: leaf.reshape(PER_ITERATION, *leaf.shape[2:]) for name, leaf in seen.items()}
    key, mixing = jax.random.split(state["key"])
    orders = jax.vmap(lambda own: jax.random.permutation(own, PER_ITERATION))(jax.random.split(mixing, EPOCHS))

    def update(carry: Any, chosen: Any) -> tuple[Any, None]:
        params, opt = carry
        grads = jax.grad(loss_fn)(params, {name: leaf[chosen] for name, leaf in flat.items()})
        updates, opt = OPTIMIZER.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), None

    rows = orders.reshape(EPOCHS * MINIBATCHES, -1)
    (params, opt), _ = jax.lax.scan(update, (state["params"], state["opt"]), rows)
    return {**state, "key": key, "params": params, "opt": opt}, None


class Array:
    """All agents as one program."""

    def __init__(self, models: int, width: int, device: str):
        if jax.default_backend() != {"cpu": "cpu", "cuda": "gpu"}[device]:
            raise RuntimeError(f"JAX runs on {jax.default_backend()}, the others on {device}")
        keys = jax.vmap(jax.random.key)(jnp.arange(models))
        self._state = jax.jit(jax.vmap(functools.partial(start, width=width)))(keys)

        @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
        def run(state: Arrays, iterations: int) -> Arrays:
            return jax.vmap(lambda own: jax.lax.scan(iterate, own, None, iterations)[0])(state)

        self._run = run

    def train(self, iterations: int, number: int) -> list[float]:
        """Train on; the returns of all agents."""
        self._state = self._run(self._state, iterations)
        last = np.asarray(self._state["last"])
        return [float(own[~np.isnan(own)].mean()) if not np.isnan(own).all() else math.nan for own in last]
