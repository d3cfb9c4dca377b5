"""TD3 with ten critics on a classic-control task, as one array of critics or as a loop over them.

    python examples/critics/main.py
    python examples/critics/main.py --critics loop --seeds 0 1 2 3

Both ways compute the same; what differs is the number of updates a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

try:
    import gymnasium
    import pandas
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; pip install 'hfta_func[examples]'") from None

if not __package__:
    # Python looks for modules beside a file that is run by its path; `examples` is two folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.critics.model import WAYS, Agent, Batch


class Buffer:
    """All transitions so far, of which updates draw some at random."""

    def __init__(self, size: int, observations: int, actions: int, seed: int):
        self.held = Batch(
            *(torch.zeros(size, observations), torch.zeros(size, actions), torch.zeros(size)),
            *(torch.zeros(size, observations), torch.zeros(size)),
        )
        self.count = 0
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, *transition: Tensor | float) -> None:
        """Keep one transition."""
        for held, value in zip(self.held, transition, strict=True):
            held[self.count] = value
        self.count += 1

    def draw(self, size: int) -> Batch:
        """Some transitions."""
        rows = torch.randint(self.count, (size,), generator=self.generator)
        return Batch(*(held[rows] for held in self.held))


def returns(agent: Agent, name: str, episodes: int, seed: int) -> float:
    """The mean return of the actor without noise."""
    env, total = gymnasium.make(name), 0.0
    scale = float(env.action_space.high[0])  # pyright: ignore[reportAttributeAccessIssue]
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        ended = False
        while not ended:
            action = agent.act(torch.as_tensor(obs, dtype=torch.float32))
            obs, reward, terminated, truncated, _ = env.step(scale * action.numpy())
            total, ended = total + float(reward), terminated or truncated
    env.close()
    return total / episodes


def train(flags: argparse.Namespace, seed: int) -> tuple[list[dict[str, float]], float]:
    """Train one agent; returns a row for each evaluation, and updates a second."""
    env = gymnasium.make(flags.env)
    scale = float(env.action_space.high[0])  # pyright: ignore[reportAttributeAccessIssue]
    observations, actions = env.observation_space.shape[0], env.action_space.shape[0]  # pyright: ignore
    agent = Agent(
        *(flags.critics, observations, actions),
        count=flags.count,
        width=flags.width,
        lr=flags.lr,
        seed=seed,
        compile=flags.compile,
    )
    buffer = Buffer(flags.steps, observations, actions, seed)
    obs, _ = env.reset(seed=seed)
    rows, seconds, updates = [], 0.0, 0
    for step in range(1, flags.steps + 1):
        now = torch.as_tensor(obs, dtype=torch.float32)
        # Actions at random at first, so that there is something to learn from.
        action = agent.act(now, 0.1) if step > flags.warmup else 2 * torch.rand(actions, generator=agent.noise) - 1
        obs, reward, terminated, truncated, _ = env.step(scale * action.numpy())
        # An episode that only ran out of time has a future.
        buffer.add(now, action, 0.1 * float(reward), torch.as_tensor(obs, dtype=torch.float32), float(terminated))
        if terminated or truncated:
            obs, _ = env.reset()
        if step > flags.warmup:
            start = time.perf_counter()
            agent.update(buffer.draw(flags.batch_size))
            # The first updates wait for compilers.
            if agent.updates > 4:
                seconds, updates = seconds + time.perf_counter() - start, updates + 1
        if step % flags.every == 0:
            found = returns(agent, flags.env, flags.episodes, 1000)
            rows.append({"critics": flags.critics, "seed": seed, "step": step, "return": found})
            print(f"seed {seed}, step {step}: return {found:.1f}", flush=True)
    env.close()
    return rows, updates / seconds if seconds else float("nan")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--critics", choices=[*WAYS], default="array", help="one array of critics, or a loop over them")
    parser.add_argument("--env", default="Pendulum-v1", help="a task of gymnasium with continuous actions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one agent each")
    parser.add_argument("--count", type=int, default=10, help="number of critics")
    parser.add_argument("--steps", type=int, default=6000, help="steps in the environment")
    parser.add_argument("--warmup", type=int, default=500, help="steps at random before the first update")
    parser.add_argument("--every", type=int, default=1000, help="steps between evaluations")
    parser.add_argument("--episodes", type=int, default=10, help="episodes of each evaluation")
    parser.add_argument("--width", type=int, default=64, help="units of each hidden layer")
    parser.add_argument("--batch-size", type=int, default=64, help="transitions per update")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--compile", action="store_true", help="compile both losses")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the table")
    flags = parser.parse_args(argv)
    for name, low in (("count", 2), ("steps", 1), ("every", 1), ("episodes", 1), ("width", 1), ("batch_size", 1)):
        if getattr(flags, name) < low:
            parser.error(f"--{name.replace('_', '-')} is {getattr(flags, name)}; it must be at least {low}")
    try:
        if not isinstance(gymnasium.make(flags.env).action_space, gymnasium.spaces.Box):
            parser.error(f"--env {flags.env} has no continuous actions; try Pendulum-v1 or MountainCarContinuous-v0")
    except gymnasium.error.Error as error:
        parser.error(f"--env {flags.env}: {error}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    flags = parse(argv)
    rows, speeds = [], []
    for seed in flags.seeds:
        found, speed = train(flags, seed)
        rows, speeds = rows + found, [*speeds, speed]
    flags.out.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(flags.out / f"critics-{flags.critics}.csv", index=False)
    last = torch.tensor([row["return"] for row in rows if row["step"] == max(row["step"] for row in rows)])
    deviation = f" ± {last.std():.1f}" if len(last) > 1 else ""
    print(f"{flags.critics}: return {last.mean():.1f}{deviation}, {sum(speeds) / len(speeds):.0f} updates a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
