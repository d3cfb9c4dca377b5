"""Environments of gymnasium, one call for the environments of all members."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfta_func import random
from hfta_func._tree import tree_map
from hfta_func._types import check_counts
from hfta_func.errors import StateError
from hfta_func.rl.environment import Running, began, check_action, check_keys, counted
from hfta_func.rl.rollouts import Policy, acted


class GymnasiumEnvs:
    """M agents in N environments each of a ``gymnasium.vector`` environment with M * N of them.

    They are objects that change, so they are no part of a state; use :meth:`rollout` in place of
    :func:`~hfta_func.rl.rollout`, uncompiled.

    Args:
        envs: Made with ``vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}``, or ``DISABLED``, which
            gymnasium's wrappers need. Environments of member i are those from ``i * N`` on.
        num_models: Number M of members.

    Raises:
        StateError: if another autoreset mode hides final observations, or a wrapper mixes statistics of all agents.
    """

    def __init__(self, envs: Any, num_models: int):
        inner = envs
        while num_models > 1 and inner is not None:
            if (name := type(inner).__name__) in ("NormalizeObservation", "NormalizeReward"):
                raise StateError(f"{name} mixes the statistics of all agents; use rl.moments, which are each one's own")
            inner = getattr(inner, "env", None)
        mode = getattr(envs.metadata.get("autoreset_mode"), "value", None)
        self._is_told = mode == "Disabled"
        if mode not in ("Disabled", "SameStep"):
            cure = "vector_kwargs={'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP}"
            raise StateError(f"the environments' autoreset_mode is {mode}; make them with {cure}")
        self.envs, self.num_models, self.num_envs = envs, num_models, envs.num_envs // num_models

    def start(self, keys: Tensor) -> Running:
        """All environments at the start of their first episodes, seeded by the members' ``keys``."""
        check_keys(keys, self.num_models)
        seeds = random.randint(random.fold_in(keys.unsqueeze(-1), torch.arange(self.num_envs)), 0, 2**31, ())
        observation, _ = self.envs.reset(seed=seeds.flatten().tolist())
        return began(keys, self.num_envs, (), self._apart(observation), torch.float32)

    @torch.compiler.disable
    def rollout(self, policy: Policy, state: Any, running: Running, steps: int) -> tuple[Running, dict[str, Tensor]]:
        """As :func:`~hfta_func.rl.rollout`.

        Args:
            policy: From :func:`make_policy`.
            state: The agents.
            running: From :meth:`start` or the latest rollout; the environments themselves go on where they are.
            steps: Number T of steps in each environment.

        Raises:
            StateError: if members are not those of the environments, which do not follow them.
        """
        check_counts(steps=steps)
        if (count := len(running.keys)) != self.num_models:
            text = f"there are {count} members in environments of {self.num_models}, which do not follow them"
            raise StateError(f"{text}; train all of them in this process, without workers and compact")
        happened = []
        for _ in range(steps):
            running, outcome = acted(policy, state, running, self._advance)
            happened.append(outcome)
        return running, tree_map(lambda *parts: torch.stack(parts, 1), *happened)

    def _apart(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values)).unflatten(0, (self.num_models, self.num_envs)).clone()

    def _advance(self, running: Running, action: Tensor) -> tuple[Running, dict[str, Tensor]]:
        space = self.envs.single_action_space
        check_action(space, action, running.length.shape)
        # NumPy has no bfloat16.
        acts = action.detach().flatten(0, 1).cpu()
        acts = acts.double().numpy().clip(space.low, space.high) if acts.is_floating_point() else acts.long().numpy()
        observation, reward, terminated, truncated, infos = self.envs.step(acts.astype(space.dtype))
        final, ended = np.array(observation), terminated | truncated
        if self._is_told and ended.any():
            observation, _ = self.envs.reset(options={"reset_mask": ended})
        elif ended.any():
            final[ended] = np.stack([*infos["final_obs"][ended]])
        reward, terminated, truncated = self._apart(reward).float(), self._apart(terminated), self._apart(truncated)
        after = running._replace(observation=self._apart(observation))
        step = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return counted(after, terminated | truncated, **step, next_observation=self._apart(final))
