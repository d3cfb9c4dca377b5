"""What agents do in their environments, and what becomes of it: rollouts, advantages, minibatches, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hfta_func import random
from hfta_func._torch import inside_transform
from hfta_func._tree import leaves, paths, per_model, tree_map, where
from hfta_func._types import PerModel, Tree, check_counts
from hfta_func.calls.scan import scan
from hfta_func.errors import BatchError, StateError
from hfta_func.models.functional import Bound
from hfta_func.models.stack import check_state, shapes
from hfta_func.rl.environment import Environment, Running, advance, check_keys
from hfta_func.rules.vmap import vmap
from hfta_func.step.state import stacked

Policy = Callable[[Any, Any, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""``policy(state, observation, key) -> (action, more)`` for all members, from :func:`make_policy`."""

# Folded into the members' keys, as all numbers of this package negative.
_ACTING = -(2**62) - 2**57


def make_policy(model: nn.Module, act: Callable[..., Any], *, share_frozen: bool = False) -> Policy:
    """A function that all agents act by.

    Args:
        model: Any module of the architecture.
        act: ``act(model, observation) -> action`` or ``(action, more)``, with a dict of tensors to remember, of ONE agent:
            observations are ``[N, ...]``. Its random calls draw from the member's key.
        share_frozen: The array was stacked with ``share_frozen=True``, and all members share the base of ``model``.

    Returns:
        ``policy(state, observation, key) -> (action, more)``: of a training state or what :func:`stack_params` returns,
        observations ``[M, N, ...]`` and keys ``[M]``. Buffers that ``act`` writes, such as running statistics, are replaced
        in ``state.buffers``, but for agents that are not active. It raises a StateError for agents of another model.

    Example:
        >>> def act(model, observation):
        ...     return torch.distributions.Categorical(logits=model(observation)).sample()
        >>> policy = make_policy(torch.nn.Linear(4, 2), act)
        >>> agents = stack_params([torch.nn.Linear(4, 2) for _ in range(3)])
        >>> action, _ = policy(agents, torch.ones(3, 5, 4), random.keys([0, 1, 2]))
        >>> action.shape
        torch.Size([3, 5])
    """
    call, expected = Bound(model, act, share_frozen=share_frozen), shapes(model, share_frozen)

    def member(params: Any, buffers: Any, observation: Any, key: Tensor) -> Any:
        result, after = call(params, buffers, observation, key=key)
        return *cast(Any, result if isinstance(result, tuple) and len(result) == 2 else (result, {})), after

    run, writes = vmap(member), set[str]()

    def policy(state: Any, observation: Any, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        agents = stacked(state)
        check_state(agents, expected)
        action, more, after = run(*agents, observation, key)
        if not (torch.compiler.is_compiling() or inside_transform()):
            written = {name: old for name, old in agents.buffers.items() if not torch.equal(old, after.get(name, old))}
            writes.update(written)
            # An agent that is not active stays as it is.
            new = {name: after[name] for name in written}
            state.buffers.update(where(state.active, new, written) if hasattr(state, "active") else new)
        elif writes:
            raise StateError(f"the policy writes the buffer '{min(writes)}', which a graph cannot keep; do not compile")
        return action, more

    return policy


def rollout(
    environment: Environment, policy: Policy, state: Any, running: Running, steps: int
) -> tuple[Running, dict[str, Tensor]]:
    """Let M agents act in N environments each.

    An environment whose episode ends begins another one. Noise depends on the members' keys in ``running`` and the number
    of steps taken.

    Args:
        environment: The environment.
        policy: From :func:`make_policy`.
        state: The agents: a training state, or what :func:`stack_params` returns.
        running: From :func:`start`, or an earlier rollout.
        steps: Number T of steps in each environment.

    Returns:
        Where the environments are next, and what happened, ``[M, T, N, ...]`` each: ``observation``, ``action``, ``reward``,
        ``terminated``, ``truncated``, ``next_observation`` (the final one where an episode ended) and what the policy
        returned to remember.

    Raises:
        ValueError: if there is no step.
        StateError: if actions are not of the environment's action space, or the policy remembers what a step has already.

    Example:
        >>> from hfta_func import rl
        >>> environment, model = rl.CartPole(), torch.nn.Linear(4, 2)
        >>> policy = make_policy(model, lambda model, observation: model(observation).argmax(-1))
        >>> running = rl.start(environment, random.keys([0, 1, 2]), num_envs=4)
        >>> agents = stack_params([torch.nn.Linear(4, 2) for _ in range(3)])
        >>> running, steps = rollout(environment, policy, agents, running, steps=6)
        >>> steps["next_observation"].shape
        torch.Size([3, 6, 4, 4])
    """

    def step(running: Running, _: None) -> tuple[Running, dict[str, Tensor]]:
        return acted(policy, state, running, lambda *now: advance(environment, *now))

    check_counts(steps=steps)
    running, happened = scan(step, running, length=steps)
    return running, tree_map(lambda leaf: leaf.transpose(0, 1).contiguous(), happened)


def acted(policy: Policy, state: Any, running: Running, move: Callable[..., Any]) -> tuple[Running, dict[str, Tensor]]:
    """What :func:`advance`, or its like, gives after an action, with what the policy has seen, done and remembers."""
    observation = running.observation
    action, more = policy(state, observation, random.fold_in(running.keys, running.taken + _ACTING))
    running, outcome = move(running, action)
    outcome = {"observation": observation, "action": action, **outcome}
    if hidden := outcome.keys() & more.keys():
        raise StateError(f"the policy remembers '{min(hidden)}', which a step has already; give it another name")
    return running, outcome | more


def gae(
    steps: dict[str, Tensor], value: Tensor, next_value: Tensor, *, discount: PerModel = 0.99, decay: PerModel = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the returns that belong to them, each ``[M, T, N]``.

    The value of what follows counts where an episode was truncated, and does not where it terminated.

    Args:
        steps: What :func:`rollout` returned.
        value: Values of the observations, ``[M, T, N]``.
        next_value: Values of the next observations, final ones included.
        discount: Discount of rewards, a number or one per member.
        decay: The lambda of the advantages; 1 is the discounted return minus the value.

    Raises:
        BatchError: if values are not one for each step.

    References:
        Schulman et al., "High-dimensional continuous control using generalized advantage estimation", ICLR 2016.

    Example:
        >>> no = torch.zeros(1, 2, 1, dtype=torch.bool)
        >>> steps = {"reward": torch.ones(1, 2, 1), "terminated": no, "truncated": no}
        >>> gae(steps, torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), discount=0.5, decay=1.0)[0].flatten()
        tensor([1.5000, 1.0000])
    """
    terminated, done = steps["terminated"], ended(steps, value, next_value)
    # Discounts have more digits than values of few bits.
    value, next_value = (x.to(torch.promote_types(x.dtype, steps["reward"].dtype)) for x in (value, next_value))
    rate, decay = (per_member(number, value) for number in (discount, decay))
    surprise = steps["reward"] + torch.where(terminated, 0, rate * next_value) - value
    fading = torch.where(done, 0, rate * decay)

    def body(after: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        advantage = given[0] + given[1] * after
        return advantage, advantage

    backwards = tuple(leaf.expand_as(value).transpose(0, 1).flip(0) for leaf in (surprise, fading))
    _, advantages = scan(body, torch.zeros_like(value[:, 0]), backwards)
    advantage = advantages.flip(0).transpose(0, 1)
    return advantage, advantage + value


def ended(steps: dict[str, Tensor], *values: Tensor) -> Tensor:
    """Where an episode has ended in either way; raises a BatchError unless ``values`` are one for each step, as rewards."""
    for value in values:
        if value.shape != steps["reward"].shape:
            wanted = [*steps["reward"].shape]
            raise BatchError(f"values are {[*value.shape]}, but rewards are {wanted}; give one for each step")
    return steps["terminated"] | steps["truncated"]


def per_member(number: PerModel, like: Tensor) -> Tensor:
    """A number, or one per member, to multiply values ``[M, ...]`` by."""
    dtype = like.dtype if like.is_floating_point() else torch.float32
    vector = torch.as_tensor(number, dtype=dtype, device=like.device)
    if vector.dim() and vector.shape != like.shape[:1]:
        raise BatchError(f"got {vector.numel()} numbers for {len(like)} members; give one number, or one per member")
    return per_model(vector, like) if vector.dim() else vector


def minibatches(keys: Tensor, rows: Tree, count: int, *, epochs: int = 1) -> Any:
    """Rows in an order of their own for every member and epoch, in minibatches.

    Args:
        keys: One key per member.
        rows: A tree of tensors ``[M, n, ...]``.
        count: Number of minibatches of an epoch, which divides n.
        epochs: How often each row is used.

    Returns:
        The tree, ``[epochs * count, M, n / count, ...]``: batches for ``step.many``.

    Raises:
        ValueError: if there is no minibatch or epoch.
        BatchError: if rows are not ``[M, n, ...]``, or there are not as many keys as members.

    Example:
        >>> batches = minibatches(random.keys([0, 1]), torch.arange(6).expand(2, 6), 3, epochs=2)
        >>> batches.shape, batches[:3, 0].flatten().sort().values
        (torch.Size([6, 2, 2]), tensor([0, 1, 2, 3, 4, 5]))
    """
    check_counts(count=count, epochs=epochs)
    n = check_rows(rows)
    check_keys(keys, len(leaves(rows)[0]))
    shuffles = random.fold_in(keys.unsqueeze(-1), torch.arange(epochs, device=keys.device))
    order = random.permutation(shuffles, n).reshape(len(keys), epochs * n)
    return tree_map(lambda leaf: rows_at(leaf, order).unflatten(1, (epochs * count, -1)).transpose(0, 1), rows)


def check_rows(rows: Tree) -> int:
    """The number n of rows in a tree of tensors ``[M, n, ...]``; raises a BatchError that names a leaf unless it is one."""
    sizes = {path: [*leaf.shape] for path, leaf in zip(paths(rows, "rows"), leaves(rows), strict=True)}
    if len({(*size[:2],) for size in sizes.values()}) != 1:
        raise BatchError(f"rows are {sizes}; give tensors [M, n, ...] of as many members and rows")
    return leaves(rows)[0].shape[1]


def rows_at(leaf: Tensor, index: Tensor) -> Tensor:
    """The rows ``[M, k, ...]`` of a leaf ``[M, n, ...]`` at an index ``[M, k]``."""
    return leaf[torch.arange(len(leaf), device=leaf.device).unsqueeze(-1), index]


class Moments(NamedTuple):
    """Running mean and variance of each member's own values, ``[M, ...]``."""

    size: Tensor
    mean: Tensor
    variance: Tensor


def moments(num_models: int, shape: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float32) -> Moments:
    """Moments of nothing yet.

    Args:
        num_models: Number of members.
        shape: Of one value, such as an observation.
        dtype: Floating-point dtype.

    Example:
        >>> seen = observed(moments(2, (3,)), torch.randn(2, 100, 3))
        >>> normalised(seen, torch.randn(2, 5, 3)).shape
        torch.Size([2, 5, 3])
    """
    zeros = torch.zeros(num_models, *shape, dtype=dtype)
    return Moments(zeros.new_zeros(num_models), zeros, torch.ones_like(zeros))


def observed(past: Moments, values: Tensor) -> Moments:
    """The moments once more values have been seen.

    Args:
        past: The moments before.
        values: ``[M, ..., *shape]``, with any axes in between.

    Raises:
        BatchError: if values are of another shape, or there are none.

    References:
        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    _check_values(past, values)
    rows = values.reshape(values.shape[0], -1, *past.mean.shape[1:]).to(past.mean.dtype)
    n, mean, variance = rows.shape[1], rows.mean(1), rows.var(1, correction=0)
    count = past.size + n
    share, old, offset = per_model(n / count, mean), per_model(past.size / count, mean), mean - past.mean
    combined = past.variance * old + variance * share + offset.square() * share * old
    return Moments(count, past.mean + offset * share, combined)


def _check_values(seen: Moments, values: Tensor) -> None:
    count, *shape = seen.mean.shape
    shape_at_end = [*values.shape[1:]][values.dim() - 1 - len(shape) :]
    if values.shape[:1] != (count,) or shape_at_end != shape or not values.numel():
        raise BatchError(f"values are {[*values.shape]}, but the moments are of [{count}, ..., {str(shape)[1:-1]}]")


def normalised(seen: Moments, values: Tensor, *, limit: float = 10.0, center: bool = True) -> Tensor:
    """Values with a mean of 0 and a variance of 1, as seen so far.

    Args:
        seen: The moments.
        values: ``[M, ..., *shape]``.
        limit: Results beyond are cut off.
        center: Subtract the mean; rewards keep theirs.

    Raises:
        BatchError: if values are of another shape, or there are none.
    """
    _check_values(seen, values)
    between = (1,) * (values.dim() - seen.mean.dim())
    mean, variance = (leaf.reshape(leaf.shape[0], *between, *leaf.shape[1:]) for leaf in (seen.mean, seen.variance))
    return ((values - mean if center else values) * (variance + 1e-8).rsqrt()).clamp(-limit, limit)


def discounted(past: Tensor, steps: dict[str, Tensor], *, discount: PerModel = 0.99) -> tuple[Tensor, Tensor]:
    """Returns so far: the rewards of an episode up to each step, of which those long ago count less.

    Their variance is what rewards are normalised by: ``normalised(seen, reward, center=False)``.

    Args:
        past: The returns before the first step, ``[M, N]``.
        steps: What :func:`rollout` returned.
        discount: A number or one per member.

    Returns:
        Those after the last step, for the next rollout, and those at each step, ``[M, T, N]``.
    """

    def body(past: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        total = past * per_member(discount, past) + given[0]
        return torch.where(given[1], 0, total), total

    last, totals = scan(body, past, (steps["reward"].transpose(0, 1), ended(steps).transpose(0, 1)))
    return last, totals.transpose(0, 1)
