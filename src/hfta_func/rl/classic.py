"""Classic control problems, with gymnasium's dynamics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hfta_func import random
from hfta_func._types import PerModel, Tree
from hfta_func.rl.environment import Environment, spaces

Step = tuple[Tree, Tensor, Tensor, Tensor, Tensor]


def _box(*high: float, low: tuple[float, ...] | None = None) -> Any:
    bounds = np.array(high, np.float32)
    return spaces.Box(-bounds if low is None else np.array(low, np.float32), bounds, dtype=np.float32)


@dataclass(frozen=True)
class Classic(Environment):
    """An environment whose state is a vector ``place`` that starts uniformly in a box."""

    box: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]]

    def reset(self, key: Tensor) -> tuple[Tree, Tensor]:
        """``(state, observation)`` of new episodes, one for each key ``[...]``."""
        return self.restart({"numbers": self.numbers(key)}, key)

    def restart(self, state: Tree, key: Tensor) -> tuple[Tree, Tensor]:
        """As :meth:`reset`, with the physics of the ``state``."""
        low, high = (torch.tensor(bound, dtype=self.dtype, device=key.device) for bound in self.box)
        place = low + (high - low) * random.uniform(key, (len(low),), dtype=self.dtype)
        return {"place": place, "numbers": state["numbers"]}, self.observe(place)

    def observe(self, place: Tensor) -> Tensor:
        """The observation in a place."""
        return place

    def next(self, state: Tree, *place: Tensor, reward: Tensor, terminated: Tensor) -> Step:
        """What a step returns, from the parts of the next place."""
        vector = torch.stack(place, -1)
        after = {"place": vector, "numbers": state["numbers"]}
        return after, self.observe(vector), reward, terminated, torch.zeros_like(terminated)


@dataclass(frozen=True)
class CartPole(Classic):
    """Balance a pole on a cart by pushing it left or right: gymnasium's CartPole-v1, a reward of 1 a step.

    Args:
        gravity: In m/s^2.
        mass_cart: In kg.
        mass_pole: In kg.
        length: Half the pole's length in m.
        force: Of a push, in N.

    Example:
        >>> environment = CartPole(length=[0.5, 1.0], dtype=torch.float64)
        >>> state, observation = environment.reset(random.keys([0, 1]))
        >>> state, observation, *_ = environment.step(state, torch.tensor([0, 1]), random.keys([2, 3]))
        >>> observation.shape
        torch.Size([2, 4])
    """

    gravity: PerModel = 9.8
    mass_cart: PerModel = 1.0
    mass_pole: PerModel = 0.1
    length: PerModel = 0.5
    force: PerModel = 10.0
    max_steps: int | None = field(default=500, kw_only=True)
    box = (-0.05,) * 4, (0.05,) * 4
    observation_space = _box(4.8, math.inf, math.radians(24), math.inf)
    action_space = spaces.Discrete(2)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        gravity, cart, pole, length, push = self.number(state, "gravity", "mass_cart", "mass_pole", "length", "force")
        x, speed, angle, spin = state["place"].unbind(-1)
        mass, sine, cosine = cart + pole, angle.sin(), angle.cos()
        # Equations of Florian, "Correct equations for the dynamics of the cart-pole system", without friction.
        shared = ((2 * action - 1).to(self.dtype) * push + pole * length * spin.square() * sine) / mass
        turning = (gravity * sine - cosine * shared) / (length * (4.0 / 3.0 - pole * cosine.square() / mass))
        pushing = shared - pole * length * turning * cosine / mass
        x, speed = x + 0.02 * speed, speed + 0.02 * pushing
        angle, spin = angle + 0.02 * spin, spin + 0.02 * turning
        terminated = (x.abs() > 2.4) | (angle.abs() > 12 * 2 * math.pi / 360)
        return self.next(state, x, speed, angle, spin, reward=torch.ones_like(x), terminated=terminated)


@dataclass(frozen=True)
class MountainCar(Classic):
    """Swing a car up a hill by pushing left, not at all or right: gymnasium's MountainCar-v0, a reward of -1 a step.

    Args:
        force: Of a push, as a change of speed.
        gravity: As a change of speed.
    """

    force: PerModel = 0.001
    gravity: PerModel = 0.0025
    goal = 0.5
    max_steps: int | None = field(default=200, kw_only=True)
    box = (-0.6, 0.0), (-0.4, 0.0)
    observation_space = _box(0.6, 0.07, low=(-1.2, -0.07))
    action_space = spaces.Discrete(3)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        (force,) = self.number(state, "force")
        place, speed, terminated = self.roll(state, (action - 1).to(self.dtype) * force)
        return self.next(state, place, speed, reward=-torch.ones_like(place), terminated=terminated)

    def roll(self, state: Tree, push: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Place, speed, and whether the goal is reached, after a push."""
        (gravity,) = self.number(state, "gravity")
        place, speed = state["place"].unbind(-1)
        speed = (speed + push - gravity * torch.cos(3 * place)).clamp(-0.07, 0.07)
        place = (place + speed).clamp(-1.2, 0.6)
        speed = torch.where((place == -1.2) & (speed < 0), 0.0, speed)
        return place, speed, (place >= self.goal) & (speed >= 0)


@dataclass(frozen=True)
class MountainCarContinuous(MountainCar):
    """Swing a car up a hill with a force in [-1, 1]: gymnasium's MountainCarContinuous-v0, 100 for the goal minus the work.

    Args:
        force: Of a push, as a change of speed.
        gravity: As a change of speed.
    """

    force: PerModel = 0.0015
    goal = 0.45
    max_steps: int | None = field(default=999, kw_only=True)
    action_space = _box(1.0)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        (force,) = self.number(state, "force")
        action = action[..., 0].to(self.dtype)
        place, speed, terminated = self.roll(state, action.clamp(-1, 1) * force)
        return self.next(state, place, speed, reward=100.0 * terminated - 0.1 * action.square(), terminated=terminated)


@dataclass(frozen=True)
class Pendulum(Classic):
    """Swing a pendulum up and hold it there with little torque: gymnasium's Pendulum-v1.

    Args:
        gravity: In m/s^2.
        mass: In kg.
        length: In m.
    """

    gravity: PerModel = 10.0
    mass: PerModel = 1.0
    length: PerModel = 1.0
    max_steps: int | None = field(default=200, kw_only=True)
    box = (-math.pi, -1.0), (math.pi, 1.0)
    observation_space = _box(1.0, 1.0, 8.0)
    action_space = _box(2.0)

    def observe(self, place: Tensor) -> Tensor:
        """The observation in a place."""
        angle, spin = place.unbind(-1)
        return torch.stack((angle.cos(), angle.sin(), spin), -1)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        gravity, mass, length = self.number(state, "gravity", "mass", "length")
        angle, spin = state["place"].unbind(-1)
        torque = action[..., 0].to(self.dtype).clamp(-2, 2)
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        cost = upright.square() + 0.1 * spin.square() + 0.001 * torque.square()
        # PyTorch divides a number by a tensor through its reciprocal, which rounds otherwise than a number by a number.
        turning = 3 * gravity * angle.sin() / (2 * length) + 3 * torque / (mass * (length * length))
        spin = (spin + 0.05 * turning).clamp(-8, 8)
        never = torch.zeros_like(angle, dtype=torch.bool)
        return self.next(state, angle + 0.05 * spin, spin, reward=-cost, terminated=never)


@dataclass(frozen=True)
class Acrobot(Classic):
    """Swing the lower of two links above a line by torque at their joint: gymnasium's Acrobot-v1, -1 a step until then.

    Args:
        gravity: In m/s^2.
        mass: Of each link, in kg.
        length: Of the upper link, in m.
    """

    gravity: PerModel = 9.8
    mass: PerModel = 1.0
    length: PerModel = 1.0
    max_steps: int | None = field(default=500, kw_only=True)
    box = (-0.1,) * 4, (0.1,) * 4
    observation_space = _box(1, 1, 1, 1, 4 * math.pi, 9 * math.pi)
    action_space = spaces.Discrete(3)

    def observe(self, place: Tensor) -> Tensor:
        """The observation in a place."""
        upper, lower, *speeds = place.unbind(-1)
        return torch.stack((upper.cos(), upper.sin(), lower.cos(), lower.sin(), *speeds), -1)

    def step(self, state: Tree, action: Tensor, key: Tensor) -> Step:
        """``(state, observation, reward, terminated, truncated)`` after an action."""
        torque, start, size = (action - 1).to(self.dtype), state["place"], 0.2
        # The classic Runge-Kutta method of fourth order.
        first = self._derivative(state, start, torque)
        second = self._derivative(state, start + size / 2 * first, torque)
        third = self._derivative(state, start + size / 2 * second, torque)
        fourth = self._derivative(state, start + size * third, torque)
        end = start + size / 6.0 * (first + 2 * second + 2 * third + fourth)
        angles = (end[..., :2] + math.pi).remainder(2 * math.pi) - math.pi
        upper, lower = torch.where(end[..., :2].abs() > math.pi, angles, end[..., :2]).unbind(-1)
        speeds = end[..., 2].clamp(-4 * math.pi, 4 * math.pi), end[..., 3].clamp(-9 * math.pi, 9 * math.pi)
        terminated = -upper.cos() - (lower + upper).cos() > 1.0
        return self.next(state, upper, lower, *speeds, reward=terminated.to(self.dtype) - 1, terminated=terminated)

    def _derivative(self, state: Tree, place: Tensor, torque: Tensor) -> Tensor:
        """Sutton and Barto, "Reinforcement Learning", 2nd edition, section 11.3; moments of inertia are 1."""
        gravity, mass, length = self.number(state, "gravity", "mass", "length")
        upper, lower, spin, swing = place.unbind(-1)
        # Centres of mass are half a metre from the joints.
        reach, middle = length * 0.5, 0.5
        both = mass * middle**2 + mass * (length**2 + middle**2 + 2 * reach * lower.cos()) + 2
        one = mass * (middle**2 + reach * lower.cos()) + 1
        pull = mass * middle * gravity * (upper + lower - math.pi / 2).cos()
        coupling = mass * reach * lower.sin()
        drag = -coupling * swing.square() - 2 * coupling * swing * spin + pull
        drag = drag + mass * (middle + length) * gravity * (upper - math.pi / 2).cos()
        bending = torque + one / both * drag - coupling * spin.square() - pull
        bending = bending / (mass * middle**2 + 1 - one.square() / both)
        return torch.stack((spin, swing, -(one * bending + drag) / both, bending), -1)
