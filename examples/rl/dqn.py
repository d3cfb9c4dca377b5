"""Deep Q-learning on CartPole with a replay buffer and a target network: many seeds as one program.

``python -m examples.rl.dqn --seeds 16 --lr 1e-3 --iterations 600 --out out/dqn``
"""

import math

import torch
from torch import nn

import hfta_func as hfta
from examples.rl import common
from hfta_func import rl

# In each iteration: steps in each of an agent's environments, their number, rows of a batch, and batches.
T, N, BATCH, UPDATES = 8, 4, 64, 4


def make_model(env):
    """The values of all actions."""
    size, actions = math.prod(env.observation_space.shape), int(env.action_space.n)
    return nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, actions))


def loss_fn(model, batch):
    """The error of the values, against targets that no gradient goes through (Mnih et al., 2015)."""
    value = model(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))[..., 0]
    return nn.functional.smooth_l1_loss(value, batch["target"])


def make(env, lr, discount=0.99, every=10, exploring=100, capacity=10_000, steps=1):
    """The training step of an array of agents, and a function that makes its first state."""
    model, count = make_model(env), int(env.action_space.n)
    greedy = rl.make_policy(model, lambda model, x: model(x).argmax(-1))
    values = rl.make_policy(model, lambda model, x: model(x))

    def policy(turn):
        """Random actions at first, and fewer and fewer of them."""
        rate = (1 - turn / exploring).clamp(min=0.05)

        def act(state, observation, key):
            action, _ = greedy(state, observation, key)
            explores = hfta.random.uniform(hfta.random.fold_in(key, 1), action.shape[1:]) < rate.unsqueeze(-1)
            chance = hfta.random.randint(hfta.random.fold_in(key, 2), 0, count, action.shape[1:])
            return torch.where(explores, chance, action), {}

        return act

    def rows(act, state, running):
        """What happens next, as transitions over several steps."""
        running, happened = rl.rollout(env, act, state, running, T)
        return running, common.transitions(rl.n_step(happened, steps, discount=discount))

    def collect(state):
        carry, turn = state.carry, state.step // UPDATES
        running, new = rows(policy(turn), state, carry["running"])
        buffer = rl.written(carry["buffer"], new)
        renew = turn % every == 0
        target = {path: torch.where(renew.reshape(-1, *(1,) * (param.dim() - 1)), param, carry["target"][path])
                  for path, param in state.params.items()}  # fmt: skip
        key = hfta.random.fold_in(state.keys, turn)
        batch, _ = rl.sample(buffer, key, UPDATES * BATCH)
        after, _ = values(hfta.models.Stacked(target, {}), batch["next_observation"], key)
        batch["target"] = batch["reward"] + batch["discount"] * torch.where(batch["terminated"], 0, after.amax(-1))
        carry = {"running": running, "buffer": buffer, "target": target}
        return carry, common.updates(batch, UPDATES), rl.episode_metrics(running)

    step = hfta.make_train_step(model, loss_fn, hfta.adam(lr=lr), collect=collect)

    def start(params, seeds):
        running = rl.start(env, hfta.random.keys(seeds), N)
        buffer = rl.replay(rows(greedy, hfta.models.Stacked(params, {}), running)[1], capacity)
        return step.init(params, seeds=seeds, carry={"running": running, "buffer": buffer, "target": params})

    return step, start


def best(model, x, memory):
    """The action of the highest value."""
    return model(x).argmax(-1), memory


def main(argv=None):
    """Train, print returns, and play."""
    envs = "CartPole", "Acrobot", "MountainCar"
    return common.main(argv, __doc__, make_model, make, best, envs=envs, lr=1e-3, iterations=600)


if __name__ == "__main__":
    main()
