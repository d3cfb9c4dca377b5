"""Proximal policy optimisation on CartPole or Pendulum: many seeds as one program.

``python -m examples.rl.ppo --seeds 16 --lr 1e-3 --env CartPole --iterations 100 --out out/ppo``
"""

import math

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import hfta_func as hfta
from examples.rl import common
from hfta_func import rl

# Steps of a rollout in each of an agent's environments, and their number.
T, N = 128, 4


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self, env: rl.Environment):
        super().__init__()
        size, self.discrete = math.prod(env.observation_space.shape), hasattr(env.action_space, "n")
        actions = int(env.action_space.n) if self.discrete else math.prod(env.action_space.shape)
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))
            for out in (actions, 1)
        )
        for layer, gain in ((self.actor[-1], 0.01), (self.critic[-1], 1.0)):
            nn.init.orthogonal_(layer.weight, gain)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, x):
        """The distribution of actions, and the value."""
        out = self.actor(x)
        choice = Categorical(logits=out) if self.discrete else Independent(Normal(out, self.log_std.exp()), 1)
        return choice, self.critic(x)[..., 0]


def act(agent, x):
    """An action, and what the loss needs to know of it."""
    choice, value = agent(x)
    action = choice.sample()
    return action, {"log_prob": choice.log_prob(action), "value": value}


def loss_fn(agent, batch, hparams):
    """The clipped surrogate, the value's error, and a bonus for entropy (Schulman et al., 2017)."""
    choice, value = agent(batch["observation"])
    ratio = (choice.log_prob(batch["action"]) - batch["log_prob"]).exp()
    gain = batch["advantage"]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    error = (value - batch["target"]).square().mean()
    return 0.5 * error - clipped - hparams["entropy"] * choice.entropy().mean()


def make(env, lr, entropy=0.01, discount=0.99, minibatches=4, epochs=4):
    """The training step of an array of agents, and a function that makes its first state."""
    agent = Agent(env)
    policy = rl.make_policy(agent, act)
    value = rl.make_policy(agent, lambda agent, x: agent(x)[1])

    def collect(state):
        running, steps = rl.rollout(env, policy, state, state.carry, T)
        next_value, _ = value(state, steps["next_observation"], state.keys)
        advantage, target = rl.gae(steps, steps["value"], next_value, discount=discount)
        rows = {name: steps[name] for name in ("observation", "action", "log_prob")}
        rows |= {"advantage": advantage, "target": target}
        rows = {name: leaf.flatten(1, 2) for name, leaf in rows.items()}
        batches = rl.minibatches(hfta.random.fold_in(state.keys, state.step), rows, minibatches, epochs=epochs)
        return running, batches, rl.episode_metrics(running)

    optimizer = hfta.chain(hfta.clip_grad_norm(0.5), hfta.adam(lr=lr))
    step = hfta.make_train_step(agent, loss_fn, optimizer, collect=collect)

    def start(params, seeds):
        running = rl.start(env, hfta.random.keys(seeds), N)
        return step.init(params, seeds=seeds, hparams={"entropy": entropy}, carry=running)

    return step, start


def best(agent, x, memory):
    """The most likely action."""
    return agent(x)[0].mode, memory


def main(argv=None):
    """Train, print returns, and play."""
    envs = "CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"
    return common.main(argv, __doc__, Agent, make, best, envs=envs, lr=1e-3, iterations=100)


if __name__ == "__main__":
    main()
