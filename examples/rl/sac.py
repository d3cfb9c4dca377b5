"""Soft actor-critic on Pendulum or MountainCarContinuous, with a learned temperature: many seeds as one program.

``python -m examples.rl.sac --seeds 16 --lr 1e-3 --iterations 1000 --out out/sac``
"""

import math

import torch
from torch import nn
from torch.distributions import Normal

import hfta_func as hfta
from examples.rl import common
from hfta_func import rl

# In each iteration: steps in each of an agent's environments, their number, rows of a batch, and batches; before the first,
# WARMUP steps of random actions.
T, N, BATCH, UPDATES, WARMUP = 2, 4, 64, 8, 64


class Agent(nn.Module):
    """An actor, two critics, and the logarithm of the temperature."""

    def __init__(self, env):
        super().__init__()
        size, self.size = math.prod(env.observation_space.shape), math.prod(env.action_space.shape)
        self.limit = float(env.action_space.high[0])
        self.actor = layers(size, 2 * self.size)
        self.critics = nn.ModuleList(layers(size + self.size, 1) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        """The distribution of actions before they are squashed."""
        mean, spread = self.actor(x).chunk(2, -1)
        return Normal(mean, (-5 + 3.5 * (spread.tanh() + 1)).exp())

    def sample(self, x):
        """Actions and their log-probabilities."""
        choice = self(x)
        z = choice.rsample()
        # The logarithm of the slope of limit * tanh(z).
        slope = 2 * (math.log(2) - z - nn.functional.softplus(-2 * z)) + math.log(self.limit)
        return self.limit * z.tanh(), (choice.log_prob(z) - slope).sum(-1)


def layers(inputs, outputs):
    """A network of two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def values(critics, x, action):
    """What each critic expects of an action."""
    return [critic(torch.cat((x, action), -1))[..., 0] for critic in critics]


def next_value(agent, x):
    """The lower value of the next action, and its entropy."""
    action, log_prob = agent.sample(x)
    return torch.minimum(*values(agent.critics, x, action)) - agent.log_alpha.exp() * log_prob


def wander(agent, x):
    """Any action."""
    return agent.limit * (2 * torch.rand(len(x), agent.size, dtype=x.dtype) - 1)


def loss_fn(agent, batch):
    """The losses of critics, actor and temperature, none of which moves what belongs to another (Haarnoja et al., 2018)."""
    x, alpha = batch["observation"], agent.log_alpha.exp()
    error = sum((value - batch["target"]).square().mean() for value in values(agent.critics, x, batch["action"]))
    action, log_prob = agent.sample(x)
    value = torch.minimum(*values(map(common.frozen, agent.critics), x, action))
    surprise = log_prob.detach() - agent.size
    return error + (alpha.detach() * log_prob - value).mean() - (alpha * surprise).mean(), {"alpha": alpha}


def make(env, lr, discount=0.99, tau=0.005, capacity=50_000):
    """The training step of an array of agents, and a function that makes its first state."""
    agent = Agent(env)
    policy = rl.make_policy(agent, lambda agent, x: agent.sample(x)[0])
    after = rl.make_policy(agent, next_value)

    def collect(state):
        carry, key = state.carry, hfta.random.fold_in(state.keys, state.step)
        running, steps = rl.rollout(env, policy, state, carry["running"], T)
        buffer = rl.written(carry["buffer"], common.transitions(steps))
        target = {path: old.lerp(state.params[path], 1 - (1 - tau) ** UPDATES) for path, old in carry["target"].items()}
        batch, _ = rl.sample(buffer, key, UPDATES * BATCH)
        value, _ = after(hfta.models.Stacked({**state.params, **target}, {}), batch["next_observation"], key)
        batch["target"] = batch["reward"] + discount * torch.where(batch["terminated"], 0, value)
        carry = {"running": running, "buffer": buffer, "target": target}
        return carry, common.updates(batch, UPDATES), rl.episode_metrics(running)

    step = hfta.make_train_step(agent, loss_fn, hfta.adam(lr=lr), collect=collect)

    def start(params, seeds):
        """Agents that have wandered for some steps."""
        running = rl.start(env, hfta.random.keys(seeds), N)
        first = hfta.models.Stacked(params, {})
        running, steps = rl.rollout(env, rl.make_policy(agent, wander), first, running, WARMUP)
        buffer = rl.written(rl.replay(common.transitions(steps), capacity), common.transitions(steps))
        target = {path: param for path, param in params.items() if path.startswith("critics")}
        return step.init(params, seeds=seeds, carry={"running": running, "buffer": buffer, "target": target})

    return step, start


def best(agent, x, memory):
    """The most likely action."""
    return agent.limit * agent(x).mean.tanh(), memory


def main(argv=None):
    """Train, print returns, and play."""
    envs = "Pendulum", "MountainCarContinuous"
    return common.main(argv, __doc__, Agent, make, best, envs=envs, lr=1e-3, iterations=1000)


if __name__ == "__main__":
    main()
