"""A check that the members of an array train as they would alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hfta_func._tree import leaves, num_models, paths, take, tree_map
from hfta_func.step.batch import take_batch
from hfta_func.step.state import TrainState
from hfta_func.step.train import TrainStep
from hfta_func.testing._laws import difference

Run = Callable[[TrainState, Any], tuple[TrainState, Any]]


def assert_matches_solo(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[Any],
    *,
    members: Sequence[int] | None = None,
    rtol: float = 1e-10,
    run: Run | None = None,
) -> TrainState:
    """Train an array, then train each member alone from the same state on the same batches, and compare the final states.

    First the oracle compares a step with each member in ordinary PyTorch, without this package's rules.

    Args:
        step: The step. It also trains each member as an array of one, for which a compiled step compiles once more.
        state: The initial state. It is not written, even if the step was made with ``donate=True``.
        batches: The batches of the array; a member alone is trained on its part of them.
        members: The members to compare; all by default.
        rtol: Largest difference allowed, relative to the largest magnitude in each leaf. 1e-10 suits float64; float32
            needs about 1e-3 after tens of steps, because kernels round differently and training amplifies it.
        run: Trains the array, for example ``torch.compile(step)``; ``step`` by default.

    Returns:
        The state of the array after all batches.

    Raises:
        AssertionError: if a leaf differs by more; it names the member, the leaf and the difference.
        VerifyError: if a member computes something else in ordinary PyTorch.

    Example:
        >>> models = [torch.nn.Linear(4, 1).double() for _ in range(3)]
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> step = make_train_step(models[0], loss_fn, sgd(lr=[0.1, 0.2, 0.3]))
        >>> state = step.init(*stack_params(models), seeds=[0, 1, 2])
        >>> state = assert_matches_solo(step, state, [torch.randn(3, 8, 4).double() for _ in range(5)])
    """
    # A wrapped step, such as one that waits for a device, has no batch_dims of its own.
    batches, dims = list(batches), getattr(inspect.unwrap(step), "batch_dims", 0)
    after = tree_map(torch.clone, state)
    chosen = range(num_models(state)) if members is None else members
    if isinstance(plain := inspect.unwrap(step), TrainStep) and batches:
        plain._gradients.verify(plain._gradients.tensors(state), batches[0], {}, chosen)
    for batch in batches:
        after, _ = (run or step)(after, batch)
    for member in chosen:
        solo = take(state, [member])
        for batch in batches:
            solo, _ = step(solo, take_batch(dims, batch, slice(member, member + 1)))
        for path, leaf, alone in zip(paths(solo, "state"), leaves(take(after, [member])), leaves(solo), strict=True):
            error = difference(leaf, alone)
            assert error <= rtol, (
                f"model {member}: {path} differs from the solo run by {error:.3g} of its magnitude, more than {rtol:g}"
            )
    return after
