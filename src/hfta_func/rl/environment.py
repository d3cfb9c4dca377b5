"""Environments as pure functions of tensors, many at once: the contract, and what surrounds an episode."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, cast

import optree
import torch
from torch import Tensor

from hfta_func import random
from hfta_func._torch import can_look, num_recorders
from hfta_func._tree import leaves, names, tree_map
from hfta_func._types import Tree, check_counts, require
from hfta_func.calls.scan import alike
from hfta_func.errors import BatchError, StateError
from hfta_func.rules.vmap import vmap

spaces = require("gymnasium.spaces", "rl")

# Folded into the keys of members, as all numbers of this package negative.
_START, _RESET = -(2**62) - 2**59, -(2**62) - 2**58


@dataclasses.dataclass(frozen=True)
class Environment(abc.ABC):
    """What an environment is: two pure functions of tensors, for any number of environments at once.

    Leaves of its state, observations, actions and keys have the environments' axes in front, ``[...]``. Fields of a subclass
    that are numbers may be one per member, such as a list of M lengths; they are then part of the state.

    Args:
        dtype: Floating-point dtype of state, observations and rewards.
        max_steps: Steps after which an episode is truncated; None is never.
    """

    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)
    max_steps: int | None = dataclasses.field(default=None, kw_only=True)

    observation_space: ClassVar[Any]
    action_space: ClassVar[Any]

    @abc.abstractmethod
    def reset(self, key: Tensor) -> tuple[Tree, Tensor]:
        """``(state, observation)`` of new episodes, one for each key ``[...]``."""

    def restart(self, state: Tree, key: Tensor) -> tuple[Tree, Tensor]:
        """As :meth:`reset`, for environments that have been in a ``state``, of which they may keep parts."""
        return self.reset(key)

    @abc.abstractmethod
    def step(self, state: Tree, action: Tensor, key: Tensor) -> tuple[Tree, Tensor, Tensor, Tensor, Tensor]:
        """``(state, observation, reward, terminated, truncated)`` after an action."""

    def numbers(self, key: Tensor) -> dict[str, Tensor]:
        """The fields that are one number per member, for environments with these keys, to be held in their state."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        listed = {name: each for name, each in given.items() if getattr(each, "ndim", isinstance(each, list | tuple))}
        vectors = {name: torch.as_tensor(value, dtype=self.dtype, device=key.device) for name, value in listed.items()}
        return {name: v.reshape(-1, *(1,) * (key.dim() - 1)).expand(key.shape) for name, v in vectors.items()}

    def number(self, state: Any, *names: str) -> list[Any]:
        """Numbers of these names: those of the state, if they differ between members."""
        return [state["numbers"].get(name, getattr(self, name)) for name in names]


class Running(NamedTuple):
    """M members' environments, N each: everything that :func:`rollout` carries. Every leaf is ``[M, ...]``.

    Args:
        keys: The members' keys for their environments.
        taken: Steps that have been taken in each of a member's environments.
        state: The environments' own, ``[M, N, ...]``.
        observation: What the policy sees next.
        length: Steps in the running episodes.
        total: Rewards of the running episodes, added up.
        episodes: Number of episodes that have ended.
        last_length: Length of the episode that ended last.
        last_total: Its return; NaN before the first end.
    """

    keys: Tensor
    taken: Tensor
    state: Tree
    observation: Tensor
    length: Tensor
    total: Tensor
    episodes: Tensor
    last_length: Tensor
    last_total: Tensor


def start(environment: Environment, keys: Tensor, num_envs: int) -> Running:
    """Environments at the start of their first episodes.

    Args:
        environment: The environment.
        keys: One key per member, such as ``random.keys(seeds)``.
        num_envs: Number N of environments per member.

    Raises:
        ValueError: if there is no environment, or its ``max_steps`` is no count.
        BatchError: if ``keys`` are not one per member.
        StateError: if an environment mixes several or remembers; it names the environment and the leaf.
        RandomnessError: if it draws otherwise than by its key.
        TraceError: if it reads values of tensors; it names the line. If it returns a state of another structure, shape or
            dtype; it names the leaf.

    Example:
        >>> from hfta_func import rl
        >>> running = start(rl.CartPole(), random.keys([0, 1, 2]), num_envs=4)
        >>> running.observation.shape
        torch.Size([3, 4, 4])
    """
    check_counts(num_envs=num_envs, max_steps=1 if environment.max_steps is None else environment.max_steps)
    check_keys(keys)
    keys = random.fold_in(keys, _START)
    state, observation = environment.reset(environment_keys(keys, num_envs))
    if can_look(keys):
        _check(environment, state, observation, environment_keys(keys, num_envs))
    return began(keys, num_envs, state, observation, _number(observation))


def _number(observation: Tensor) -> torch.dtype:
    return observation.dtype if observation.is_floating_point() else torch.float32


def began(keys: Tensor, num_envs: int, state: Tree, observation: Tensor, reward: torch.dtype) -> Running:
    """Environments at the start of their first episodes, with rewards of a dtype."""
    zeros = torch.zeros(len(keys), num_envs, dtype=torch.int64, device=keys.device)
    total = zeros.to(reward)
    running = Running(keys, zeros[:, 0], state, observation, zeros, total, zeros, zeros, total + torch.nan)
    # For a tensor in two places a loop would compile again, because its results are tensors of their own.
    return tree_map(torch.clone, running)


def check_keys(keys: Tensor, count: int | None = None) -> None:
    """Raise a BatchError unless there is a key for each member: one for all would give them the same draws."""
    if keys.dtype != torch.int64 or keys.dim() != 1 or (count is not None and len(keys) != count):
        text = f"keys are {keys.dtype}{[*keys.shape]}, but must be torch.int64[{count or 'M'}], one per member"
        raise BatchError(f"{text}; see random.keys(seeds)")


def environment_keys(keys: Tensor, num_envs: int) -> Tensor:
    """Keys ``[M, N]`` for the environments of members with keys ``[M]``."""
    return random.fold_in(keys.unsqueeze(-1), torch.arange(num_envs, device=keys.device))


def _check(environment: Environment, state: Tree, observation: Tensor, keys: Tensor) -> None:
    """Take a step in all environments, and in each alone; it must be the same step, of the shapes that it began with."""
    name, space = type(environment).__qualname__, environment.action_space
    flat, layout = optree.tree_flatten(cast(Any, state))

    def step(flat: list[Tensor], action: Tensor, key: Tensor) -> Any:
        result = environment.step(optree.tree_unflatten(layout, flat), action, key)
        return dict(zip(("state", "observation", "reward", "terminated", "truncated"), result, strict=True))

    actions = require("gymnasium.vector.utils", "rl").batch_space(space, keys.numel())
    actions.seed(0)
    action = torch.as_tensor(actions.sample(), device=keys.device).unflatten(0, keys.shape)
    together = step([leaf.clone() for leaf in flat], action, keys)
    for part, given in (("state", state), ("observation", observation)):
        alike(given, part, (f"{name}.reset", f"{name}.step"))(together[part])
    alone = vmap(vmap(lambda *given: leaves(step(*given))))(flat, action, keys)
    near = max(1e-3, 8 * torch.finfo(_number(observation)).eps)
    for path, one, all_of_them in zip(names(together), alone, leaves(together), strict=True):
        if not torch.allclose(one.double(), all_of_them.double(), rtol=near, atol=near, equal_nan=True):
            raise StateError(f"{name}.step mixes environments or remembers: {path} of one alone is another; keep apart")


def check_action(space: Any, action: Tensor, shape: torch.Size) -> None:
    """Raise a StateError unless actions ``[M, N, ...]`` are of a space."""
    is_whole, wanted = space.dtype.kind != "f", [*shape, *space.shape]
    if [*action.shape] != wanted or action.is_floating_point() == is_whole:
        raise StateError(f"the policy's actions are {action.dtype}{[*action.shape]}, but {space} asks for {wanted}")
    if isinstance(space, spaces.Discrete) and can_look(action) and not num_recorders():
        low, high = action.min(), action.max()
        if low < space.start or high >= space.start + space.n:
            raise StateError(f"the policy's actions are {low} to {high}, but {space} has {space.n} actions")


def advance(environment: Environment, running: Running, action: Tensor) -> tuple[Running, dict[str, Tensor]]:
    """Take a step in every environment; those whose episode ends begin another one.

    Args:
        environment: The environment.
        running: Where the environments are.
        action: Actions ``[M, N, ...]``.

    Returns:
        Where they are next, and what the step gave, ``[M, N, ...]`` each: ``reward``, ``terminated``, ``truncated`` and
        ``next_observation``, the final one where an episode ended.
    """
    check_action(environment.action_space, action, running.length.shape)
    # Integers of 8 bits wrap around where an environment computes with them, and booleans cannot be subtracted.
    action = action if action.is_floating_point() else action.long()
    keys = environment_keys(random.fold_in(running.keys, running.taken), running.length.shape[1])
    state, final, reward, terminated, truncated = environment.step(running.state, action, keys)
    reward, limit = reward.to(running.total.dtype), environment.max_steps
    truncated = truncated if limit is None else truncated | ((running.length + 1 >= limit) & ~terminated)
    done = terminated | truncated
    new_state, new_observation = environment.restart(state, random.fold_in(keys, _RESET))
    state = tree_map(lambda new, old: chosen(done, new, old), new_state, state)
    after = running._replace(state=state, observation=chosen(done, new_observation, final))
    return counted(after, done, reward=reward, terminated=terminated, truncated=truncated, next_observation=final)


def counted(running: Running, done: Tensor, **step: Tensor) -> tuple[Running, dict[str, Tensor]]:
    """What is known of the episodes after one more step, and what it gave."""
    now = {"length": running.length + 1, "total": running.total + step["reward"]}
    last = {f"last_{name}": torch.where(done, each, getattr(running, f"last_{name}")) for name, each in now.items()}
    now = {name: torch.where(done, 0, each) for name, each in now.items()}
    return running._replace(taken=running.taken + 1, episodes=running.episodes + done, **now, **last), step


def chosen(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """New values where a mask of the front axes holds, and old ones elsewhere."""
    return torch.where(mask.reshape(*mask.shape, *(1,) * (new.dim() - mask.dim())), new, old)


def episode_metrics(running: Running) -> dict[str, Tensor]:
    """Metrics ``[M]`` of the episodes that ended last: their mean ``return`` and ``length``, NaN before the first, and how
    many ``episodes`` have ended.

    Args:
        running: The members' environments.
    """
    ended = running.episodes > 0
    last = {"return": running.last_total, "length": running.last_length.to(running.total.dtype)}
    means = {name: torch.where(ended, values, 0).sum(1) / ended.sum(1) for name, values in last.items()}
    return means | {"episodes": running.episodes.sum(1)}
