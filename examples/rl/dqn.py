"""Deep Q-learning on CartPole with a replay buffer and a target network: many seeds as one program.

``python -m examples.rl.dqn --seeds 8 --lr 1e-3 --iterations 600``
"""

import argparse
import math

import torch
from torch import nn

import hfta_func as hfta
from hfta_func import rl

T, N, BATCH, UPDATES = 8, 4, 64, 4


def make_model(env):
    """The values of all actions."""
    size, actions = math.prod(env.observation_space.shape), int(env.action_space.n)
    return nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, actions))


def loss_fn(model, batch):
    """The error of the values, against targets that no gradient goes through (Mnih et al., 2015)."""
    value = model(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))[..., 0]
    return nn.functional.smooth_l1_loss(value, batch["target"])


def make(env, optimizer, discount=0.99, every=10, exploring=100, capacity=10_000, steps=1):
    """The training step of an array of agents, and the carry that it starts with."""
    model = make_model(env)
    greedy = rl.make_policy(model, lambda model, x: model(x).argmax(-1))
    values = rl.make_policy(model, lambda model, x: model(x))

    def policy(carry):
        """Random actions at first, and fewer and fewer of them."""
        rate = (1 - carry["turn"] / exploring).clamp(min=0.05)

        def act(state, observation, key):
            action, _ = greedy(state, observation, key)
            explores = hfta.random.uniform(hfta.random.fold_in(key, 1), action.shape[1:]) < rate.unsqueeze(-1)
            chance = hfta.random.randint(hfta.random.fold_in(key, 2), 0, int(env.action_space.n), action.shape[1:])
            return torch.where(explores, chance, action), {}

        return act

    def collect(state):
        carry = state.carry
        running, happened = rl.rollout(env, policy(carry), state, carry["running"], T)
        rows = rl.n_step(happened, steps, discount=discount)
        names = "observation", "action", "reward", "terminated", "next_observation", "discount"
        buffer = rl.written(carry["buffer"], {name: rows[name].flatten(1, 2) for name in names})
        renew = carry["turn"] % every == 0
        target = {path: torch.where(renew.reshape(-1, *(1,) * (param.dim() - 1)), param, carry["target"][path])
                  for path, param in state.params.items()}  # fmt: skip
        key = hfta.random.fold_in(state.keys, carry["turn"])
        batch, _ = rl.sample(buffer, key, UPDATES * BATCH)
        after, _ = values(hfta.Stacked(target, {}), batch["next_observation"], key)
        batch["target"] = batch["reward"] + batch["discount"] * torch.where(batch["terminated"], 0, after.amax(-1))
        batches = {name: batch[name].unflatten(1, (UPDATES, BATCH)).transpose(0, 1)
                   for name in ("observation", "action", "target")}  # fmt: skip
        carry = {"running": running, "buffer": buffer, "target": target, "turn": carry["turn"] + 1}
        return carry, batches, rl.episode_metrics(running)

    def start(params, seeds):
        running = rl.start(env, hfta.random.keys(seeds), N)
        _, happened = rl.rollout(env, greedy, hfta.Stacked(params, {}), running, T)
        rows = rl.n_step(happened, steps, discount=discount)
        names = "observation", "action", "reward", "terminated", "next_observation", "discount"
        buffer = rl.replay({name: rows[name].flatten(1, 2) for name in names}, capacity)
        turn = torch.zeros(len(seeds), dtype=torch.int64)
        return {"running": running, "buffer": buffer, "target": params, "turn": turn}

    return hfta.make_train_step(model, loss_fn, optimizer, collect=collect), start


def main(argv=None):
    """Train, and print returns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--compile", action="store_true")
    flags = parser.parse_args(argv)
    env, seeds = getattr(rl, flags.env)(), range(flags.seeds)
    step, start = make(env, hfta.adam(lr=(flags.lr * flags.seeds)[: flags.seeds]))
    params, _ = hfta.init_params(lambda: make_model(env), seeds)
    state = step.init(params, seeds=seeds, carry=start(params, seeds))
    loop = torch.compile(step.loop, fullgraph=True, dynamic=False) if flags.compile else step.loop
    for _ in range(0, flags.iterations, 50):
        state, metrics = loop(state, min(50, flags.iterations))
        print(" ".join(f"{value:6.1f}" for value in metrics["return"][-1].tolist()))
    return state, metrics


if __name__ == "__main__":
    main()
