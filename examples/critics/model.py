"""Actor and critic of TD3, and an agent with many critics, as one array or one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import hfta_func as hfta


class Batch(NamedTuple):
    """Transitions from the replay buffer, ``[N, ...]``."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    done: Tensor


def mlp(inputs: int, outputs: int, width: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))
    )


class Actor(nn.Module):
    """An action in [-1, 1] for each observation."""

    def __init__(self, observations: int, actions: int, width: int):
        super().__init__()
        self.layers = mlp(observations, actions, width)

    def forward(self, obs: Tensor) -> Tensor:
        """``[N, observations] -> [N, actions]``."""
        return torch.tanh(self.layers(obs))


class Critic(nn.Module):
    """The value of an action."""

    def __init__(self, observations: int, actions: int, width: int):
        super().__init__()
        self.layers = mlp(observations + actions, 1, width)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """``[N, observations], [N, actions] -> [N]``."""
        return self.layers(torch.cat([obs, action], -1)).squeeze(-1)


class Loop(nn.Module):
    """Critics one after another, as one writes them without arrays."""

    def __init__(self, critics: list[nn.Module]):
        super().__init__()
        self.critics = nn.ModuleList(critics)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """``[N, observations], [N, actions] -> [M, N]``."""
        return torch.stack([critic(obs, action) for critic in self.critics])


class CriticLoss(nn.Module):
    """The sum of the critics' losses; critics are independent, so its gradient holds the gradient of each."""

    gamma = 0.99

    def __init__(self, critics: nn.Module, target_actor: nn.Module, target_critics: nn.Module):
        super().__init__()
        self.critics, self.target_actor, self.target_critics = critics, target_actor, target_critics

    def forward(self, batch: Batch, noise: Tensor, chosen: Tensor) -> Tensor:
        """All critics towards one target."""
        with torch.no_grad():
            action = (self.target_actor(batch.next_obs) + noise).clamp(-1, 1)
            value = self.target_critics(batch.next_obs, action)[chosen].amin(0)
            target = batch.reward + self.gamma * (1 - batch.done) * value
        return (self.critics(batch.obs, batch.action) - target).square().mean(1).sum()


class ActorLoss(nn.Module):
    """What all critics value on average, negated."""

    def __init__(self, actor: nn.Module, critics: nn.Module):
        super().__init__()
        self.actor, self.critics = actor, critics

    def forward(self, batch: Batch) -> Tensor:
        """The actor towards what the critics value."""
        return -self.critics(batch.obs, self.actor(batch.obs)).mean()


def differentiated(loss: nn.Module, name: str, compile: bool) -> Callable[..., Tensor]:
    """A loss that also leaves the gradients of the parameters of its child ``name`` there, for an optimizer.

    Compiled, forward and backward pass are one graph. Two graphs, as of ``loss.backward()``, would hand tensors from one to
    the other, write masks of activations for it, and compute gradients of parameters that nobody asked for.
    """
    params: dict[str, Tensor] = {f"{name}.{path}": param for path, param in loss.get_submodule(name).named_parameters()}

    def with_params(params: dict[str, Tensor], *args: object) -> Tensor:
        return torch.func.functional_call(loss, params, args)

    compiled = torch.compile(torch.func.grad_and_value(with_params), fullgraph=True) if compile else None

    def run(*args: object) -> Tensor:
        if compiled is not None:
            with torch.no_grad():
                grads, value = compiled(params, *args)
            for path, param in params.items():
                # A fused optimizer reads a gradient in the order of its parameter in memory.
                param.grad = grads[path].contiguous()
            return value
        for param in params.values():
            param.grad = None
        value = loss(*args)
        value.backward(inputs=[*params.values()])
        return value.detach()

    return run


WAYS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {"array": hfta.Ensemble.from_modules, "loop": Loop}


class Agent:
    """TD3 whose target is the least of two critics, drawn anew for each update from all of them.

    Args:
        way: ``"array"`` or ``"loop"``; both compute the same.
        observations: Numbers in an observation.
        actions: Numbers in an action.
        count: Number of critics.
        width: Units of each hidden layer.
        lr: Learning rate of actor and critics.
        seed: Of weights and noise.
        dtype: Of the weights.
        compile: Whether both losses are compiled, with their gradients.

    References:
        Fujimoto et al., "Addressing function approximation error in actor-critic methods", ICML 2018 (TD3).
        Chen et al., "Randomized ensembled double Q-learning: learning fast without a model", ICLR 2021 (REDQ: ten critics).
    """

    tau, smoothing, delay = 0.005, 0.2, 2

    def __init__(
        self,
        way: str,
        observations: int,
        actions: int,
        *,
        count: int = 10,
        width: int = 64,
        lr: float = 1e-3,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
    ):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.actor = Actor(observations, actions, width).to(dtype)
            critics: list[nn.Module] = [Critic(observations, actions, width).to(dtype) for _ in range(count)]
        self.critics, self.count = WAYS[way](critics), count
        # Critics draw no noise and have no statistics.
        self.critics.eval()
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        # The fastest that PyTorch has.
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=lr, fused=True)
        self.noise = torch.Generator().manual_seed(seed)
        self.updates = 0
        critic_loss = CriticLoss(self.critics, self.target_actor, self.target_critics)
        self._critic_loss = differentiated(critic_loss, "critics", compile)
        self._actor_loss = differentiated(ActorLoss(self.actor, self.critics), "actor", compile)

    @torch.no_grad()
    def act(self, obs: Tensor, noise: float = 0.0) -> Tensor:
        """The actor's action, with normal noise to explore."""
        action = self.actor(obs)
        return (action + noise * torch.randn(action.shape, generator=self.noise)).clamp(-1, 1)

    def update(self, batch: Batch) -> Tensor:
        """One update of the critics, and of the actor after every second; returns the critics' loss."""
        loss = self.update_critics(batch)
        self.updates += 1
        if self.updates % self.delay == 0:
            self.update_actor(batch)
        return loss

    def update_critics(self, batch: Batch) -> Tensor:
        """All critics towards one target."""
        noise = torch.randn(batch.action.shape, generator=self.noise, dtype=batch.action.dtype) * self.smoothing
        chosen = torch.randperm(self.count, generator=self.noise)[:2]
        loss = self._critic_loss(batch, noise.clamp(-0.5, 0.5), chosen)
        self.critic_optimizer.step()
        return loss / self.count

    def update_actor(self, batch: Batch) -> None:
        """The actor towards what the critics value, and all targets towards their networks."""
        self._actor_loss(batch)
        self.actor_optimizer.step()
        with torch.no_grad():
            for target, trained in ((self.target_actor, self.actor), (self.target_critics, self.critics)):
                torch._foreach_lerp_([*target.parameters()], [*trained.parameters()], self.tau)
