"""Eight agents learn CartPole by proximal policy optimisation, each from its own seed: returns of 100 iterations."""

# ruff: noqa: D103

import torch
from torch import nn
from torch.distributions import Categorical

import hfta_func as hfta
from hfta_func import rl

seeds, environment, iterations = range(8), rl.CartPole(), 100


def make_agent():
    def layers(outputs):
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    return nn.ModuleDict({"actor": layers(2), "critic": layers(1)})


def act(agent, x):
    action = (choice := Categorical(logits=agent.actor(x))).sample()
    return action, {"log_prob": choice.log_prob(action)}


def loss_fn(agent, batch):
    choice, gain = Categorical(logits=agent.actor(batch["observation"])), batch["advantage"]
    ratio, gain = (choice.log_prob(batch["action"]) - batch["log_prob"]).exp(), (gain - gain.mean()) / gain.std()
    error = (agent.critic(batch["observation"])[:, 0] - batch["target"]).square().mean()
    return (
        0.5 * error - torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * choice.entropy().mean()
    )


def collect(state):
    running, steps = rl.rollout(environment, policy, state, state.carry, 128)
    values = [value(state, steps[name], state.keys)[0] for name in ("observation", "next_observation")]
    steps["advantage"], steps["target"] = rl.gae(steps, *values)
    rows = {name: leaf.flatten(1, 2) for name, leaf in steps.items()}
    return (
        running,
        rl.minibatches(hfta.random.fold_in(state.keys, state.step), rows, 4, epochs=4),
        rl.episode_metrics(running),
    )


policy, value = (rl.make_policy(make_agent(), part) for part in (act, lambda agent, x: agent.critic(x)[..., 0]))
optimizer = hfta.chain(hfta.clip_grad_norm(0.5), hfta.adam(lr=1e-3))
step = hfta.make_train_step(make_agent(), loss_fn, optimizer, collect=collect)
running = rl.start(environment, hfta.random.keys(seeds), num_envs=4)
state = step.init(*hfta.init_params(make_agent, seeds), seeds=seeds, carry=running)
state, metrics = step.loop(state, iterations)
print(metrics["return"][-1].tolist())
