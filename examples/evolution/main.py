"""Train without gradients: a policy that balances a pole, or a network of thresholds that reads handwritten digits.

    python examples/evolution/main.py cartpole
    python examples/evolution/main.py digits --rank 0 --lr 0.01 0.03 0.1

Each run is an evolution strategy: a population of perturbed copies of one network, whose fitness moves that network. All
members of all runs are one array. `--rank 0` draws full noise for every matrix, as OpenAI-ES does; a small rank is that of
EGGROLL. The policy's fitness is its return in episodes that all members share. Units of the other network are plus or minus
one, so their derivative is zero wherever there is one, and its fitness is the likelihood of the training images.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

try:
    from sklearn import datasets

    import hfta_func as hfta
    from hfta_func import es, rl
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples,rl]'") from None


class Threshold(nn.Module):
    """Units that are plus or minus one."""

    def forward(self, inputs: Tensor) -> Tensor:
        """The sign, with zero as minus one."""
        return (inputs > 0).to(inputs.dtype) * 2 - 1


def make_policy() -> nn.Module:
    """A policy for two actions."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def make_reader() -> nn.Module:
    """A network that reads digits of 8 by 8 pixels."""
    return nn.Sequential(nn.Linear(64, 64), Threshold(), nn.Linear(64, 10))


Task = tuple[Callable[[nn.Module], Callable[[Any], Tensor]], Callable[[Any], Tensor], str]
"""``evaluate_with(model) -> evaluate(members)``, a score of the trained networks, and what the score is."""


def cartpole(steps: int, episodes: int) -> Task:
    """The task to balance a pole for some steps; fitness is the mean return of episodes."""
    environment = rl.CartPole(max_steps=steps)

    def act(model: nn.Module, observation: Tensor) -> Tensor:
        return model(observation).argmax(-1)

    def evaluate_with(model: nn.Module, episodes: int = episodes) -> Callable[[Any], Tensor]:
        policy = rl.make_policy(model, act)

        def evaluate(members: Any) -> Tensor:
            # Members of a run have one key, so that they meet the same episodes.
            keys = hfta.random.fold_in(members.keys, members.step)
            running = rl.start(environment, keys, num_envs=episodes)
            running, _ = rl.rollout(environment, policy, members, running, steps)
            return rl.episode_metrics(running)["return"]

        return evaluate

    return evaluate_with, evaluate_with(make_policy(), 16), f"return over 16 episodes of at most {steps} steps"


def digits(rows: int) -> Task:
    """The task to read handwritten digits; fitness is the likelihood of the images for training."""
    images, labels = (torch.from_numpy(part) for part in datasets.load_digits(return_X_y=True))
    images = (images / 16).float()
    train, test = (images[:1437][:rows], labels[:1437][:rows]), (images[1437:], labels[1437:])

    def likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return -nn.functional.cross_entropy(model(batch[0]), batch[1])

    def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).argmax(-1) == batch[1]).float().mean()

    def evaluate_with(model: nn.Module) -> Callable[[Any], Tensor]:
        evaluate = hfta.make_eval_step(model, likelihood)
        return lambda members: evaluate(members, train)["likelihood"]

    measure = hfta.make_eval_step(make_reader(), accuracy)
    return evaluate_with, lambda state: measure(state, test)["accuracy"], "accuracy on 360 images for testing"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print fitness and scores; returns the exit status."""
    args = _parse(argv)
    torch.set_num_threads(1)
    is_policy = args.task == "cartpole"
    make = make_policy if is_policy else make_reader
    evaluate_with, score, title = cartpole(args.steps, args.episodes) if is_policy else digits(args.rows)
    model, count = make(), max(len(args.lr), len(args.sigma), args.runs)
    sigma, lr = ([each[run % len(each)] for run in range(count)] for each in (args.sigma, args.lr))
    # `evaluate` needs the strategy's model, which may hold the factors of noise.
    strategy = es.make_strategy(
        model,
        hfta.adam(lr=lr),
        population=args.population,
        sigma=sigma,
        rank=args.rank or None,
        evaluate=lambda members: evaluate(members),
    )
    evaluate = evaluate_with(strategy.model)
    seeds = range(args.seed, args.seed + count)
    state = strategy.init(*hfta.init_params(make, seeds), seeds=seeds)

    begin = time.process_time()
    print("generation  fitness")
    for _ in range(args.generations // args.every):
        state, history = hfta.fit(strategy.step, state, [None] * args.every, epochs=1, progress=False)
        print(f"{int(state.step[0]):>10}  {' '.join(f'{value:8.3f}' for value in history['fitness'][-1].tolist())}")
    seconds = time.process_time() - begin
    print(f"\n{title}:\n   sigma      lr   score")
    for row in zip(sigma, lr, score(state).tolist(), strict=True):
        print("{:>8g}{:>8g}{:>8.3f}".format(*row))
    members = count * args.population
    print(
        f"\nCPU time: {seconds:.1f} s, {1e3 * seconds / args.generations:.1f} ms for {members} members of a generation"
    )
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["cartpole", "digits"])
    parser.add_argument("--runs", type=int, default=4, help="number of runs, with seeds of their own")
    parser.add_argument("--population", type=int, default=64, help="members of a run, an even number")
    parser.add_argument(
        "--sigma", type=float, nargs="+", help="of the noise, one value or several for the runs in turn"
    )
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates of Adam, for the runs in turn")
    parser.add_argument("--rank", type=int, default=1, help="of the noise of matrices; 0 is full noise")
    parser.add_argument("--generations", type=int, help="number of generations")
    parser.add_argument("--every", type=int, help="generations between two lines")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=200, help="of an episode of cartpole, at most")
    parser.add_argument("--episodes", type=int, default=2, help="episodes of cartpole for each member")
    parser.add_argument("--rows", type=int, default=1437, help="images of digits for training")
    args = parser.parse_args(argv)
    defaults = {"cartpole": ([0.5], [0.2], 40, 10), "digits": ([0.1], [0.03], 200, 20)}[args.task]
    for name, value in zip(("sigma", "lr", "generations", "every"), defaults, strict=True):
        setattr(args, name, getattr(args, name) or value)
    if args.generations % args.every:
        parser.error(f"--generations is {args.generations}; give a multiple of --every {args.every}")
    return args


if __name__ == "__main__":
    sys.exit(main())
