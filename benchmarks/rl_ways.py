"""PPO by PureJaxRL's protocol in several ways, each in a process of its own that does what it is told."""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import hfta_func as hfta
from benchmarks._child import serve
from hfta_func import rl

STEPS, ENVS, EPOCHS, MINIBATCHES, LR = 128, 4, 4, 4, 2.5e-4
PER_ITERATION = STEPS * ENVS
ITERATIONS = 500_000 // PER_ITERATION
"""The length of a run, over which the learning rate falls to 0."""


def make_agent(width: int) -> nn.ModuleDict:
    """An actor and a critic of two hidden layers each."""

    def layers(outputs: int, gain: float) -> nn.Sequential:
        made = nn.Sequential(
            *(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))
        )
        for layer, scale in zip(made[::2], (math.sqrt(2), math.sqrt(2), gain), strict=True):
            nn.init.orthogonal_(layer.weight, scale)
            nn.init.zeros_(layer.bias)
        return made

    return nn.ModuleDict({"actor": layers(2, 0.01), "critic": layers(1, 1.0)})


def act(agent: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """An action, and what the loss has to know of it."""
    # Checks of arguments read values, which keeps a call from being replayed.
    choice = Categorical(logits=agent.actor(x), validate_args=False)
    action = choice.sample()
    return action, {"log_prob": choice.log_prob(action), "value": agent.critic(x)[..., 0]}


def loss_fn(agent: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of PPO, with clipped values."""
    choice = Categorical(logits=agent.actor(batch["observation"]), validate_args=False)
    value = agent.critic(batch["observation"])[..., 0]
    gain, target, before = batch["advantage"], batch["target"], batch["value"]
    gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
    ratio = (choice.log_prob(batch["action"]) - batch["log_prob"]).exp()
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    near = before + (value - before).clamp(-0.2, 0.2)
    error = torch.maximum((value - target).square(), (near - target).square()).mean()
    return 0.25 * error - surrogate - 0.01 * choice.entropy().mean()


class Array:
    """All agents as one array: a loop that is compiled, or replayed as ``fit`` does."""

    def __init__(self, models: int, width: int, device: str, compiled: bool):
        environment, agent, seeds = rl.CartPole(), make_agent(width).to(device), range(models)
        policy = rl.make_policy(agent, act)
        value = rl.make_policy(agent, lambda agent, x: agent.critic(x)[..., 0])

        def collect(state: Any) -> Any:
            running, steps = rl.rollout(environment, policy, state, state.carry, STEPS)
            last, _ = value(state, running.observation, state.keys)
            # The protocol takes the end of the time for the end of the episode.
            steps["terminated"] = steps["terminated"] | steps["truncated"]
            ahead = torch.cat([steps["value"][:, 1:], last.unsqueeze(1)], 1)
            steps["advantage"], steps["target"] = rl.gae(steps, steps["value"], ahead)
            names = "observation", "action", "log_prob", "value", "advantage", "target"
            rows = {name: steps[name].flatten(1, 2) for name in names}
            keys = hfta.random.fold_in(state.keys, state.step)
            return running, rl.minibatches(keys, rows, MINIBATCHES, epochs=EPOCHS), rl.episode_metrics(running)

        lr = hfta.schedules.Schedule(
            {"value": LR}, lambda count, value: value * (1 - count // (EPOCHS * MINIBATCHES) / ITERATIONS)
        )
        optimizer = hfta.chain(hfta.clip_grad_norm(0.5), hfta.adam(lr=lr, eps=1e-5))
        step = hfta.make_train_step(agent, loss_fn, optimizer, collect=collect)
        step = step if compiled else step.replayed(ITERATIONS)
        self._loop = torch.compile(step.loop, fullgraph=True, dynamic=False) if compiled else step.loop
        params, _ = hfta.init_params(lambda: make_agent(width).to(device), seeds)
        carry = rl.start(environment, hfta.random.keys(seeds, device=device), ENVS)
        self._state, self._cuda = step.init(params, seeds=seeds, carry=carry), device == "cuda"

    def train(self, iterations: int, number: int) -> list[float]:
        """Train on; the returns of all agents."""
        self._state, metrics = self._loop(self._state, iterations)
        return metrics["return"][-1].tolist()


class Plain:
    """One agent after another in plain PyTorch, with environments of gymnasium or of EnvPool, as CleanRL has it."""

    def __init__(self, models: int, width: int, device: str, envpool: bool):
        torch.set_num_threads(1)
        self._first, self._width, self._envpool = models, width, envpool

    def train(self, iterations: int, number: int) -> list[float]:
        """Train an agent from its start; its return. ``models`` is the first one's seed, ``number`` counts from it."""
        seed = self._first + number
        torch.manual_seed(seed)
        envs, agent, last = self._environments(seed), make_agent(self._width), np.full(ENVS, np.nan)
        optimizer, total = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5), np.zeros(ENVS)
        seen = torch.as_tensor(envs.reset(seed=seed)[0] if not self._envpool else envs.reset()[0])
        for iteration in range(iterations):
            optimizer.param_groups[0]["lr"] = LR * (1 - iteration / ITERATIONS)
            rows: dict[str, list[Tensor]] = {}
            for _ in range(STEPS):
                with torch.no_grad():
                    action, more = act(agent, seen)
                after, reward, terminated, truncated, _ = envs.step(action.numpy())
                total, done = total + reward, terminated | truncated
                last, total = np.where(done, total, last), np.where(done, 0, total)
                outcome = {"reward": torch.as_tensor(reward).float(), "done": torch.as_tensor(done).float()}
                for name, leaf in {"observation": seen, "action": action, **more, **outcome}.items():
                    rows.setdefault(name, []).append(leaf)
                seen = torch.as_tensor(after)
            self._update(agent, optimizer, {name: torch.stack(leaves) for name, leaves in rows.items()}, seen)
        envs.close()
        return [float(np.nanmean(last))] if not np.isnan(last).all() else [math.nan]

    def _environments(self, seed: int) -> Any:
        if self._envpool:
            return importlib.import_module("envpool").make_gymnasium("CartPole-v1", num_envs=ENVS, seed=seed)
        vector = importlib.import_module("gymnasium").vector
        make = importlib.import_module("gymnasium").make
        mode = vector.AutoresetMode.SAME_STEP
        return vector.SyncVectorEnv([lambda: make("CartPole-v1")] * ENVS, autoreset_mode=mode)

    def _update(self, agent: nn.Module, optimizer: Any, rows: dict[str, Tensor], seen: Tensor) -> None:
        with torch.no_grad():
            following, sofar, gains = agent.critic(seen)[:, 0], torch.zeros(ENVS), []
            for step in reversed(range(STEPS)):
                left = 1 - rows["done"][step]
                error = rows["reward"][step] + 0.99 * following * left - rows["value"][step]
                sofar, following = error + 0.99 * 0.95 * left * sofar, rows["value"][step]
                gains.append(sofar)
        rows["advantage"] = torch.stack(gains[::-1])
        rows["target"] = rows["advantage"] + rows["value"]
        flat = {name: leaf.flatten(0, 1) for name, leaf in rows.items()}
        for _ in range(EPOCHS):
            for chosen in torch.randperm(PER_ITERATION).chunk(MINIBATCHES):
                optimizer.zero_grad()
                loss_fn(agent, {name: leaf[chosen] for name, leaf in flat.items()}).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()


WAYS = ("compiled", "replayed", "JAX", "EnvPool", "processes")


class Desk:
    """What a process answers."""

    def __init__(self, way: str, *settings: Any):
        self._settings, self._agents = settings, None
        if way == "JAX":
            self._make = importlib.import_module("benchmarks.rl_jax").Array
        else:
            kind = Array if way in ("compiled", "replayed") else Plain
            self._make = functools.partial(
                kind, **{"compiled" if kind is Array else "envpool": way in ("compiled", "EnvPool")}
            )

    def ready(self) -> None:
        """Everything is imported."""

    def turn(self, iterations: int, number: int) -> tuple[float, list[float]]:
        """Seconds to train for some iterations, in the first turn with all that comes before; and returns."""
        start = time.perf_counter()
        if self._agents is None:
            self._agents = self._make(*self._settings)
        returns = self._agents.train(iterations, number)
        return time.perf_counter() - start, returns


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(Desk(*json.loads(sys.argv[1])))
