"""Proximal policy optimisation with memory, on a CartPole whose velocities are not seen: many seeds as one program.

``python -m examples.rl.recurrent_ppo --seeds 16 --lr 1e-3 --iterations 200 --out out/recurrent``
"""

import torch
from torch import nn
from torch.distributions import Categorical

import hfta_func as hfta
from examples.rl import common
from hfta_func import rl

# Steps of a rollout in each of an agent's environments, their number, and the size of its memory.
T, N, MEMORY = 32, 8, 32
# Positions are small and values large; what a GRU reads and what its memory is read for should be near 1.
SEEN, UNIT = 10, 20


class Agent(nn.Module):
    """A GRU that sees positions only, an actor and a critic."""

    def __init__(self, env):
        super().__init__()
        self.eyes, self.cell = nn.Linear(2, MEMORY), nn.GRUCell(MEMORY, MEMORY)
        self.actor, self.critic = nn.Linear(MEMORY, int(env.action_space.n)), nn.Linear(MEMORY, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, x, memory):
        """The memory after a step."""
        return self.cell(self.eyes(SEEN * x[..., ::2]).tanh(), memory)

    def value(self, memory):
        """The return that is expected."""
        return UNIT * self.critic(memory)[..., 0]


def act(agent, given):
    """An action, the memory after it, and what the loss needs to know of it."""
    memory = agent(*given)
    choice = Categorical(logits=agent.actor(memory))
    action = choice.sample()
    return action, {"log_prob": choice.log_prob(action), "after": memory, "value": agent.value(memory)}


def loss_fn(agent, batch):
    """The clipped surrogate of whole sequences, the value's error, and a bonus for entropy (Schulman et al., 2017)."""
    memory, memories = batch["memory"][:, 0], []
    for t in range(T):
        memories.append(agent(batch["observation"][:, t], memory))
        memory = torch.where(batch["done"][:, t, None], 0, memories[-1])
    memories = torch.stack(memories, 1)
    choice, value = Categorical(logits=agent.actor(memories)), agent.value(memories)
    ratio = (choice.log_prob(batch["action"]) - batch["log_prob"]).exp()
    gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return 0.5 * ((value - batch["target"]) / UNIT).square().mean() - clipped - 0.01 * choice.entropy().mean()


def make(env, lr, discount=0.99, minibatches=2, epochs=4):
    """The training step of an array of agents, and a function that makes its first state."""
    agent = Agent(env)
    policy = rl.make_policy(agent, act)
    value = rl.make_policy(agent, lambda agent, given: agent.value(agent(*given)))

    def collect(state):
        def turn(carry, _):
            running, memory = carry
            # Other numbers than those of the environments, whose steps count upwards from 0.
            key = hfta.random.fold_in(running.keys, -1 - running.taken)
            action, more = policy(state, (running.observation, memory), key)
            after, outcome = rl.advance(env, running, action)
            done = outcome["terminated"] | outcome["truncated"]
            seen = {"observation": running.observation, "action": action, "memory": memory, "done": done}
            # An episode begins without memories.
            return (after, torch.where(done.unsqueeze(-1), 0, more["after"])), {**seen, **more, **outcome}

        carry, steps = hfta.calls.scan(turn, state.carry, length=T)
        steps = {name: leaf.transpose(0, 1) for name, leaf in steps.items()}
        given = [steps[name].flatten(1, 2) for name in ("next_observation", "after")]
        next_value = value(state, tuple(given), state.keys)[0].unflatten(1, (T, N))
        advantage, target = rl.gae(steps, steps["value"], next_value, discount=discount)
        names = "observation", "action", "memory", "done", "log_prob"
        rows = {name: steps[name] for name in names} | {"advantage": advantage, "target": target}
        # A row is what happened in one environment, [T, ...].
        rows = {name: leaf.transpose(1, 2) for name, leaf in rows.items()}
        batches = rl.minibatches(hfta.random.fold_in(state.keys, state.step), rows, minibatches, epochs=epochs)
        return carry, batches, rl.episode_metrics(carry[0])

    optimizer = hfta.chain(hfta.clip_grad_norm(0.5), hfta.adam(lr=lr))
    step = hfta.make_train_step(agent, loss_fn, optimizer, collect=collect)

    def start(params, seeds):
        running = rl.start(env, hfta.random.keys(seeds), N)
        memory = running.observation.new_zeros(len(seeds), N, MEMORY)
        return step.init(params, seeds=seeds, carry=(running, memory))

    return step, start


def best(agent, x, memory):
    """The most likely action, and the memory after it."""
    memory = agent(x, x.new_zeros(len(x), MEMORY) if memory is None else memory)
    return agent.actor(memory).argmax(-1), memory


def main(argv=None):
    """Train, print returns, and play."""
    return common.main(argv, __doc__, Agent, make, best, envs=["CartPole"], lr=1e-3, iterations=200)


if __name__ == "__main__":
    main()
