"""Games on a grid of 10 x 10 cells, in the manner of MinAtar: small pictures, one channel for each kind of thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfta_func import random
from hfta_func._types import Tree
from hfta_func.rl.environment import Environment, spaces

SIZE = 10

Step = tuple[Tree, Tensor, Tensor, Tensor, Tensor]


def _pictures(channels: int) -> Any:
    return spaces.Box(0.0, 1.0, (channels, SIZE, SIZE), np.float32)


def _at(row: Tensor | int, column: Tensor) -> Tensor:
    """Grids ``[..., 10, 10]`` that are True at one cell."""
    cells = torch.arange(SIZE, device=column.device)
    rows = (torch.as_tensor(row, device=column.device).unsqueeze(-1) == cells).unsqueeze(-1)
    return rows & (column.unsqueeze(-1) == cells).unsqueeze(-2)


@dataclass(frozen=True)
class Bricks(Environment):
    """Keep a ball in the game with a paddle of one cell, and break bricks: 1 for each; three rows of them come back.

    Actions are left, stay and right. Channels are the paddle, the ball, where the ball was, and the bricks. The ball moves
    diagonally; an episode ends when it passes the paddle.

    Example:
        >>> state, observation = Bricks().reset(random.keys([0, 1]))
        >>> observation.shape, observation.sum((-1, -2))[0]
        (torch.Size([2, 4, 10, 10]), tensor([ 1.,  1.,  1., 30.]))
    """

    max_steps: int | None = field(default=1000, kw_only=True)
    observation_space = _pictures(4)
    action_space = spaces.Discrete(3)

    def reset(self, key: Tensor) -> tuple[Tree, Tensor]:
        """``(state, observation)`` of new episodes, one for each key ``[...]``."""
        goes_right = random.randint(key, 0, 2, ())
        column = torch.where(goes_right == 1, 0, SIZE - 1)
        row = torch.full_like(column, 3)
        bricks = self._wall(column)
        state = {
            **{"paddle": torch.full_like(column, 4), "row": row, "column": column, "bricks": bricks},
            **{"down": torch.ones_like(row), "right": 2 * goes_right - 1, "last": torch.stack((row, column), -1)},
        }
        return state, self._observe(state)

    @staticmethod
    def _wall(like: Tensor) -> Tensor:
        rows = torch.arange(SIZE, device=like.device)
        return ((rows >= 1) & (rows <= 3)).unsqueeze(-1).expand(*like.shape, SIZE, SIZE)

    def _observe(self, state: Any) -> Tensor:
        last = state["last"]
        paddle, ball = _at(SIZE - 1, state["paddle"]), _at(state["row"], state["column"])
        return torch.stack((paddle, ball, _at(last[..., 0], last[..., 1]), state["bricks"]), -3).to(self.dtype)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        row, column, down, right = (state[name] for name in ("row", "column", "down", "right"))
        paddle = (state["paddle"] + action - 1).clamp(0, SIZE - 1)
        right = torch.where((column + right < 0) | (column + right >= SIZE), -right, right)
        down = torch.where(row + down < 0, -down, down)
        next_column, next_row = column + right, row + down
        hit = (state["bricks"] & _at(next_row, next_column)).flatten(-2).any(-1)
        bricks = state["bricks"] & ~_at(next_row, next_column)
        at_bottom = next_row == SIZE - 1
        saved = at_bottom & ((next_column == paddle) | (column == paddle))
        # A ball that hits a brick or the paddle goes back, and stays in its row for this step.
        back = hit | saved
        next_row, down = torch.where(back, row, next_row), torch.where(back, -down, down)
        cleared = (~bricks.flatten(-2).any(-1)).unsqueeze(-1).unsqueeze(-1)
        after = {
            **{"paddle": paddle, "row": next_row, "column": next_column, "down": down, "right": right},
            **{"bricks": torch.where(cleared, self._wall(row), bricks), "last": torch.stack((row, column), -1)},
        }
        terminated = at_bottom & ~saved
        return after, self._observe(after), hit.to(self.dtype), terminated, torch.zeros_like(terminated)


@dataclass(frozen=True)
class Crossing(Environment):
    """Cross eight lanes of cars, one in each, again and again: 1 for each crossing; a car sends back to the start.

    Actions are up, stay and down. Channels are the walker, the cars, and where the cars were. Cars move by one cell every one
    to four steps, to the left or right.
    """

    max_steps: int | None = field(default=500, kw_only=True)
    observation_space = _pictures(3)
    action_space = spaces.Discrete(3)

    def reset(self, key: Tensor) -> tuple[Tree, Tensor]:
        """``(state, observation)`` of new episodes, one for each key ``[...]``."""
        every, way, cars = (
            random.randint(random.fold_in(key, site), 0, high, (SIZE - 2,))
            for site, high in ((1, 4), (2, 2), (3, SIZE))
        )
        every, way = every + 1, 2 * way - 1
        walker = torch.full_like(cars[..., 0], SIZE - 1)
        state = {
            **{"walker": walker, "cars": cars, "last": cars.clone()},
            **{"every": every, "way": way, "clock": torch.zeros_like(walker)},
        }
        return state, self._observe(state)

    def _observe(self, state: Any) -> Tensor:
        column = torch.full_like(state["walker"], SIZE // 2)
        lanes = torch.arange(1, SIZE - 1, device=column.device).expand(state["cars"].shape)
        cars, last = (_at(lanes, state[name]).any(-3) for name in ("cars", "last"))
        return torch.stack((_at(state["walker"], column), cars, last), -3).to(self.dtype)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        clock = state["clock"] + 1
        moves = (clock.unsqueeze(-1) % state["every"]) == 0
        cars = torch.where(moves, (state["cars"] + state["way"]) % SIZE, state["cars"])
        walker = (state["walker"] + action - 1).clamp(0, SIZE - 1)
        lanes = torch.arange(1, SIZE - 1, device=cars.device)
        hit = ((lanes == walker.unsqueeze(-1)) & (cars == SIZE // 2)).any(-1)
        crossed = walker == 0
        walker = torch.where(hit | crossed, SIZE - 1, walker)
        after = {**state, "walker": walker, "cars": cars, "last": state["cars"], "clock": clock}
        never = torch.zeros_like(crossed)
        return after, self._observe(after), crossed.to(self.dtype), never, never
