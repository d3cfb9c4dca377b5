"""Twin delayed deterministic policy gradients on Pendulum or MountainCarContinuous: many seeds as one program.

``python -m examples.rl.td3 --seeds 16 --lr 1e-3 --iterations 1000 --out out/td3``
"""

import math

import torch
from torch import nn

import hfta_func as hfta
from examples.rl import common
from hfta_func import rl

# In each iteration: steps in each of an agent's environments, their number, rows of a batch, and batches; before the first,
# WARMUP steps of random actions. The actor is updated once for every DELAY updates of the critics.
T, N, BATCH, UPDATES, WARMUP, DELAY = 2, 4, 64, 8, 64, 2


class Agent(nn.Module):
    """An actor and two critics."""

    def __init__(self, env):
        super().__init__()
        size, self.size = math.prod(env.observation_space.shape), math.prod(env.action_space.shape)
        self.limit = float(env.action_space.high[0])
        self.actor = layers(size, self.size)
        self.critics = nn.ModuleList(layers(size + self.size, 1) for _ in range(2))

    def forward(self, x):
        """The best actions."""
        return self.limit * self.actor(x).tanh()


def layers(inputs, outputs):
    """A network of two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def values(critics, x, action):
    """What each critic expects of an action."""
    return [critic(torch.cat((x, action), -1))[..., 0] for critic in critics]


def act(agent, x):
    """The best action, and noise."""
    action = agent(x)
    return (action + 0.1 * agent.limit * torch.randn_like(action)).clamp(-agent.limit, agent.limit)


def wander(agent, x):
    """Any action."""
    return agent.limit * (2 * torch.rand(len(x), agent.size, dtype=x.dtype) - 1)


def next_value(agent, x):
    """The lower value of an action like the next one."""
    action = agent(x)
    noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5) * agent.limit
    return torch.minimum(*values(agent.critics, x, (action + noise).clamp(-agent.limit, agent.limit)))


def loss_fn(agent, batch):
    """The losses of critics and actor, neither of which moves what belongs to the other (Fujimoto et al., 2018)."""
    x = batch["observation"]
    error = sum((value - batch["target"]).square().mean() for value in values(agent.critics, x, batch["action"]))
    value, *_ = values(map(common.frozen, agent.critics), x, agent(x))
    return error - (batch["share"] * value).mean()


def make(env, lr, discount=0.99, tau=0.005, capacity=50_000):
    """The training step of an array of agents, and a function that makes its first state."""
    agent = Agent(env)
    policy, after = rl.make_policy(agent, act), rl.make_policy(agent, next_value)

    def collect(state):
        carry, key = state.carry, hfta.random.fold_in(state.keys, state.step)
        running, steps = rl.rollout(env, policy, state, carry["running"], T)
        buffer = rl.written(carry["buffer"], common.transitions(steps))
        target = {path: old.lerp(state.params[path], 1 - (1 - tau) ** UPDATES) for path, old in carry["target"].items()}
        batch, _ = rl.sample(buffer, key, UPDATES * BATCH)
        value, _ = after(hfta.models.Stacked(target, {}), batch["next_observation"], key)
        batch["target"] = batch["reward"] + discount * torch.where(batch["terminated"], 0, value)
        batches = common.updates(batch, UPDATES)
        # Of the DELAY gradients whose mean moves the actor, all but the last are zero.
        last = torch.arange(UPDATES, device=key.device) % DELAY == DELAY - 1
        batches["share"] = (DELAY * last[:, None, None]).expand_as(batches["reward"])
        return {"running": running, "buffer": buffer, "target": target}, batches, rl.episode_metrics(running)

    groups = {"actor": hfta.accumulate(hfta.adam(lr=lr), every=DELAY), "critics": hfta.adam(lr=lr)}
    optimizer = hfta.partition({name: name for name in groups}, groups)
    step = hfta.make_train_step(agent, loss_fn, optimizer, collect=collect)

    def start(params, seeds):
        """Agents that have wandered for some steps."""
        running = rl.start(env, hfta.random.keys(seeds), N)
        first = hfta.models.Stacked(params, {})
        running, steps = rl.rollout(env, rl.make_policy(agent, wander), first, running, WARMUP)
        buffer = rl.written(rl.replay(common.transitions(steps), capacity), common.transitions(steps))
        return step.init(params, seeds=seeds, carry={"running": running, "buffer": buffer, "target": params})

    return step, start


def best(agent, x, memory):
    """The best action."""
    return agent(x), memory


def main(argv=None):
    """Train, print returns, and play."""
    envs = "Pendulum", "MountainCarContinuous"
    return common.main(argv, __doc__, Agent, make, best, envs=envs, lr=1e-3, iterations=1000)


if __name__ == "__main__":
    main()
