"""Agents trained one at a time, by ordinary loops over environments of gymnasium: the oracle of learning."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import torch
from examples.rl import common, ppo, recurrent_ppo, sac, td3
from torch import optim


class Games:
    """N environments of gymnasium, and the return of the episode that ended last in each."""

    def __init__(self, name, count, seed):
        self.games = [gymnasium.make(common.NAMES[name]) for _ in range(count)]
        first = [game.reset(seed=1000 * seed + number)[0] for number, game in enumerate(self.games)]
        self.observation = torch.as_tensor(np.stack(first))
        self.totals, self.returns = [0.0] * count, [float("nan")] * count

    def step(self, action):
        """What a rollout holds of one step, and whether episodes ended."""
        rows, after = [], []
        for number, (game, chosen) in enumerate(zip(self.games, action.numpy(), strict=True)):
            final, reward, terminated, truncated, _ = game.step(chosen)
            rows.append((final, np.float32(reward), terminated, truncated))
            self.totals[number] += float(reward)
            if terminated or truncated:
                self.returns[number] = self.totals[number]
                final, self.totals[number] = game.reset()[0], 0.0
            after.append(final)
        self.observation = torch.as_tensor(np.stack(after))
        names = "next_observation", "reward", "terminated", "truncated"
        return {
            name: torch.as_tensor(np.stack(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }


def on_policy(example, name, seed, lr, iterations, epochs=4, discount=0.99, decay=0.95):
    """The return of an agent of PPO, with or without memory: the mean over its environments."""
    torch.manual_seed(seed)
    is_recurrent, n = example is recurrent_ppo, example.N
    games = Games(name, n, seed)
    agent = example.Agent(common.rl.CartPole() if name == "CartPole" else common.rl.Pendulum())
    optimizer, memory = optim.Adam(agent.parameters(), lr=lr), torch.zeros(n, recurrent_ppo.MEMORY)
    for _ in range(iterations):
        steps, next_values = [], []
        with torch.no_grad():
            for _ in range(example.T):
                observation = games.observation
                action, more = example.act(agent, (observation, memory) if is_recurrent else observation)
                outcome = games.step(action)
                done = outcome["terminated"] | outcome["truncated"]
                after, final = more.pop("after", None), outcome["next_observation"]
                next_values.append(agent.value(agent(final, after)) if is_recurrent else agent.critic(final)[..., 0])
                steps.append(
                    {"observation": observation, "action": action, "memory": memory, "done": done, **outcome, **more}
                )
                memory = torch.where(done[:, None], 0, after) if is_recurrent else memory
        later = torch.zeros(n)
        for step, following in zip(reversed(steps), reversed(next_values), strict=True):
            bootstrap = torch.where(step["terminated"], 0.0, discount * following)
            surprise = step["reward"] + bootstrap - step["value"]
            later = surprise + discount * decay * torch.where(step["done"], 0.0, later)
            step["advantage"], step["target"] = later, later + step["value"]
        rows = {key: torch.stack([step[key] for step in steps], 1) for key in steps[0]}
        rows = rows if is_recurrent else {key: leaf.flatten(0, 1) for key, leaf in rows.items()}
        size = len(rows["action"])
        for _ in range(epochs):
            for index in torch.randperm(size).chunk(2 if is_recurrent else 4):
                batch = {key: leaf[index] for key, leaf in rows.items()}
                optimizer.zero_grad()
                given = () if is_recurrent else ({"entropy": 0.01},)
                example.loss_fn(agent, batch, *given).backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    return float(np.mean(games.returns))


def off_policy(example, name, seed, lr, iterations, discount=0.99, tau=0.005):
    """The return of an agent of DQN, SAC or TD3: the mean over its environments."""
    torch.manual_seed(seed)
    games, is_continuous = Games(name, example.N, seed), example in (sac, td3)
    agent = (example.Agent if is_continuous else example.make_model)(getattr(common.rl, name)())
    target, replay = copy.deepcopy(agent), []

    def collect(act):
        observation = games.observation
        with torch.no_grad():
            action = act(observation)
        outcome = games.step(action)
        leaves = {"observation": observation, "action": action, **outcome}
        replay.extend({key: leaf[number] for key, leaf in leaves.items()} for number in range(example.N))

    if is_continuous:
        for _ in range(example.WARMUP):
            collect(lambda x: example.wander(agent, x))
        actor, critics = [*agent.actor.parameters()], [*agent.critics.parameters()]
        others = [param for param in agent.parameters() if not any(param is one for one in (*actor, *critics))]
        optimizers = [optim.Adam([*critics, *others], lr=lr), optim.Adam(actor, lr=lr)]
    else:
        optimizers = [optim.Adam(agent.parameters(), lr=lr)]
    acts = {sac: lambda x: agent.sample(x)[0], td3: lambda x: td3.act(agent, x)}
    for turn in range(iterations):
        rate = max(0.05, 1 - turn / 100)

        def explore(x, rate=rate):
            chance = torch.randint(0, 2, (len(x),))
            return torch.where(torch.rand(len(x)) < rate, chance, agent(x).argmax(-1))

        for _ in range(example.T):
            collect(acts.get(example, explore))
        if not is_continuous and turn % 10 == 0:
            target.load_state_dict(agent.state_dict())
        for update in range(example.UPDATES):
            chosen = [replay[number] for number in torch.randint(len(replay), (example.BATCH,)).tolist()]
            batch = {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}
            with torch.no_grad():
                after = batch["next_observation"]
                if example is sac:
                    action, log_prob = agent.sample(after)
                    value = torch.minimum(*sac.values(target.critics, after, action)) - agent.log_alpha.exp() * log_prob
                else:
                    value = td3.next_value(target, after) if example is td3 else target(after).amax(-1)
                batch["target"] = batch["reward"] + discount * torch.where(batch["terminated"], 0.0, value)
            is_due = example is not td3 or update % td3.DELAY == td3.DELAY - 1
            batch["share"] = torch.ones(example.BATCH)
            agent.zero_grad()
            loss = example.loss_fn(agent, batch)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            for optimizer in optimizers if is_due else optimizers[:1]:
                optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), agent.parameters(), strict=True) if is_continuous else ():
                    old.lerp_(new, tau)
    return float(np.mean(games.returns))


def trained(example, *args, **options):
    """The return of one agent of an example."""
    return (on_policy if example in (ppo, recurrent_ppo) else off_policy)(example, *args, **options)
