"""What the examples of reinforcement learning share: a command line, training by ``fit``, and playing in gymnasium."""

import argparse
import os

import gymnasium
import numpy as np
import torch
from matplotlib.image import imsave

import hfta_func as hfta
from hfta_func import rl

NAMES = {
    "CartPole": "CartPole-v1",
    "Acrobot": "Acrobot-v1",
    "MountainCar": "MountainCar-v0",
    "MountainCarContinuous": "MountainCarContinuous-v0",
    "Pendulum": "Pendulum-v1",
}
"""The environments of ``hfta_func.rl``, and what gymnasium calls them."""
EPOCH = 10
"""Iterations between two looks at the returns."""


def main(argv, description, make_agent, make, best, *, envs, lr, iterations):
    """Train agents as one array; the best of them plays in gymnasium.

    Args:
        argv: The command line; None is that of Python.
        description: What the example does.
        make_agent: ``make_agent(env)``, the module of an agent.
        make: ``make(env, lr) -> (step, start)``, where ``start(params, seeds)`` is the first state.
        best: ``best(agent, observation, memory) -> (action, memory)``, what it takes for the best action.
        envs: The environments that it is for, the default first.
        lr: The default learning rate.
        iterations: The default number of iterations.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default=envs[0], choices=envs)
    parser.add_argument("--seeds", type=int, default=8, help="number of agents")
    parser.add_argument("--lr", type=float, nargs="+", default=[lr], help="one value, or one per agent")
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--compile", action="store_true", help="compile an iteration as one graph")
    parser.add_argument("--workers", type=int, help="number of processes")
    parser.add_argument("--log", metavar="DIR", help="write metrics for TensorBoard")
    parser.add_argument("--resume", metavar="FILE", help="keep the run in a file, and go on from it")
    parser.add_argument("--out", metavar="DIR", help="write the best agent, and a picture of how it plays")
    flags = parser.parse_args(argv)
    if len(flags.lr) not in (1, flags.seeds):
        parser.error(f"--lr has {len(flags.lr)} values for {flags.seeds} agents; give one, or one per agent")
    if flags.iterations < 1 or flags.iterations % EPOCH:
        parser.error(f"--iterations is {flags.iterations}; give a multiple of {EPOCH}, the iterations of an epoch")
    game = gymnasium.make(NAMES[flags.env], render_mode="rgb_array" if flags.out else None)
    if flags.out:
        os.makedirs(flags.out, exist_ok=True)
        game.reset()
        try:
            game.render()
        except gymnasium.error.DependencyNotInstalled as error:
            parser.error(f"the picture of --out needs more: {error}")
    env, seeds = getattr(rl, flags.env)(), range(flags.seeds)
    rates = flags.lr * (flags.seeds // len(flags.lr))
    step, start = make(env, rates)
    params, _ = hfta.init_params(lambda: make_agent(env), seeds)
    state = start(params, seeds)
    if flags.resume and os.path.exists(flags.resume):
        check_resumed(flags.resume, state, rates, parser.error)
    state, history = hfta.fit(
        step,
        state,
        [None] * EPOCH,
        epochs=flags.iterations // EPOCH,
        callbacks=[hfta.callbacks.tensorboard(flags.log)] if flags.log else [],
        compile=flags.compile,
        workers=flags.workers,
        resume=flags.resume,
    )
    returns = history["return"][-1]
    print("returns:", *(f"{value:.1f}" for value in returns.tolist()))
    if flags.out:
        agent = hfta.export_model(make_agent(env), state, int(returns.nan_to_num(-torch.inf).argmax()))
        torch.save(agent.state_dict(), os.path.join(flags.out, "agent.pt"))
        total, frames = play(agent, best, game)
        imsave(os.path.join(flags.out, "agent.png"), np.concatenate(frames, 1))
        print(f"the best agent plays for a return of {total:.1f}: {os.path.join(flags.out, 'agent.png')}")
    return state, history


def check_resumed(file, state, rates, refuse):
    """Refuse to go on with a run that was begun with other settings, of which its file would keep its own."""
    try:
        begun = hfta.files.read_metadata(file)
        held = [("--lr", rates, value) for path, value in begun["hyperparameters"].items() if path.endswith("['lr']")]
        for flag, given, before in (("--seeds", [len(rates)], [begun["num_models"]]), *held):
            if given != before:
                refuse(
                    f"{flag} is {given}, but the run in {file} was begun with {before}; give the same, or another file"
                )
        hfta.load(file, like=state)
    except hfta.errors.StateError:
        refuse(f"the run in {file} is of another example or --env; give the same, or another file")
    except hfta.errors.CheckpointError as error:
        refuse(error)


@torch.no_grad()
def play(agent, best, game, seed=0, pictures=6):
    """The return of one episode, and pictures of it."""
    (observation, _), memory, total, frames, ended = game.reset(seed=seed), None, 0.0, [], False
    while not ended:
        action, memory = best(agent, torch.as_tensor(observation)[None], memory)
        observation, reward, terminated, truncated, _ = game.step(action[0].numpy()[()])
        total, ended = total + float(reward), terminated or truncated
        if game.render_mode:
            frames.append(game.render())
    return total, frames[:: max(1, len(frames) // pictures)][:pictures]


def transitions(steps):
    """What replay keeps of a rollout, ``[M, T * N, ...]``; ``discount`` is there where it is over several steps."""
    names = "observation", "action", "reward", "terminated", "next_observation", "discount"
    return {name: steps[name].flatten(1, 2) for name in names if name in steps}


def updates(batch, count):
    """A sample ``[M, n, ...]`` as that many batches."""
    return {name: leaf.unflatten(1, (count, -1)).transpose(0, 1) for name, leaf in batch.items()}


def frozen(module):
    """The module as a function whose parameters get no gradient."""
    params = {name: param.detach() for name, param in module.named_parameters()}
    return lambda *args: torch.func.functional_call(module, params, args)
