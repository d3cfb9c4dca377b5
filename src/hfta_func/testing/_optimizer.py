"""The laws of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from hfta_func._tree import take, tree_map, where
from hfta_func._types import Params
from hfta_func.optim import GradientTransformation, apply_updates, update_, with_hyperparams
from hfta_func.testing._laws import assert_close, law


def assert_optimizer(
    make: Callable[..., GradientTransformation],
    hyperparams: Mapping[str, Sequence[Any]],
    reference: Callable[..., torch.optim.Optimizer] | None = None,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    steps: int = 20,
    rtol: float = 1e-10,
) -> None:
    """Check that an optimizer keeps its laws, in float64.

    The laws: ``init`` makes a NamedTuple of tensors ``[M, ...]``; ``update`` keeps its structure and writes nothing; every
    hyperparameter is read from the state; member i is updated as in an array of one;
    masked members keep their bits, whatever their gradients; ``update_`` computes the same as ``update``; a changed
    hyperparameter recompiles nothing; and, with a reference, member i is updated as by the reference.

    Args:
        make: Makes the optimizer from hyperparameters by name, as ``hfta_func.adam`` does.
        hyperparams: For each name one value per member, of which at least two differ; for names such as ``betas``, one
            tuple per member.
        reference: A class like those of ``torch.optim``, called with parameters and one member's values by name.
        shapes: The shapes of one member's parameters by path: a matrix, a vector and a number by default.
        steps: Number of updates.
        rtol: Largest difference allowed, relative to the largest magnitude in each tensor.

    Raises:
        AssertionError: if a law is broken; it names the law, the tensor, the member and both values.

    Example:
        >>> from hfta_func.testing import assert_optimizer
        >>> assert_optimizer(sgd, {"lr": [0.1, 0.2], "momentum": [0.9, 0.5]}, torch.optim.SGD)
    """
    shapes = shapes or {"matrix": (4, 3), "vector": (5,), "number": ()}
    count = len(next(iter(hyperparams.values())))

    def optimizer(members: Sequence[int] = range(count)) -> GradientTransformation:
        values: dict[str, Any] = {name: [column[i] for i in members] for name, column in hyperparams.items()}
        return make(**{k: tuple(zip(*v, strict=True)) if isinstance(v[0], tuple) else v for k, v in values.items()})

    draws = torch.Generator().manual_seed(0)

    def random() -> Params:
        return {path: torch.randn(count, *shape, generator=draws).double() for path, shape in shapes.items()}

    whole, start, gradients = optimizer(), random(), [random() for _ in range(steps)]
    with law("init"):
        _check_state(whole.init(start), count)
    with law("update"):
        given = gradients[0], whole.init(start), start
        before = tree_map(torch.clone, given)
        after = whole.update(*given)
        assert_close(given, before, "(grads, opt_state, params) after update", 0.0)
        for name, got, like in zip(("updates", "opt_state"), after, (start, given[1]), strict=True):
            assert_close(tree_map(torch.zeros_like, got), tree_map(torch.zeros_like, like), name, 0.0)
    with law("hyperparameters are read from the state"):
        back = optimizer(range(count)[::-1])
        changed = with_hyperparams(whole.init(start), **back.init(start).hyperparams)
        got, expected = (one.update(gradients[0], changed, start) for one in (whole, back))
        assert_close(got, expected, "update after with_hyperparams", 1e-12)
    params, state = _walk(whole, start, gradients)
    for i in range(count):
        with law("member i is an array of one", f"i = {i}"):
            alone = _walk(optimizer([i]), take(start, [i]), [take(grads, [i]) for grads in gradients])
            assert_close((take(params, [i]), take(state, [i])), alone, "result", rtol)
    for keep in (None, torch.arange(count) != 1):
        with law("update_ is update" if keep is None else "masked members keep their bits"):
            _check_in_place(whole, gradients, start, keep, (params, state), rtol)
    with law("a hyperparameter that changes compiles nothing again"):
        _check_compiled(whole, gradients, start, rtol)
    for i in range(count) if reference is not None else ():
        with law("member i is its reference", f"i = {i}"):
            expected = _walk_reference(reference, {k: v[i] for k, v in hyperparams.items()}, start, gradients, i)
            assert_close(take(params, [i]), expected, "result", rtol)


def _walk(optimizer: GradientTransformation, params: Params, gradients: Sequence[Params]) -> tuple[Params, Any]:
    state = optimizer.init(params)
    for grads in gradients:
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
    return params, state


def _check_state(state: Any, count: int) -> None:
    assert hasattr(state, "_fields"), f"init returns a {type(state).__qualname__}; return a NamedTuple"
    for accessor, leaf in zip(*optree.tree_flatten_with_accessor(state, none_is_leaf=True)[:2], strict=True):
        path = accessor.codify("state")
        what = f"{path} is {leaf!r}; every leaf is a tensor, an empty dict where there is none"
        assert isinstance(leaf, Tensor), what
        assert leaf.shape[:1] == (count,), f"{path} has shape {list(leaf.shape)}; axis 0 is that of the {count} models"


def _check_in_place(
    optimizer: GradientTransformation, gradients: Any, start: Params, keep: Tensor | None, expected: Any, rtol: float
) -> None:
    first = start, optimizer.init(start)
    got = tree_map(torch.clone, first)
    for grads in tree_map(torch.clone, gradients):
        if keep is not None:
            grads = where(keep, grads, tree_map(lambda leaf: torch.full_like(leaf, torch.nan), grads))
        update_(optimizer, grads, got[1], got[0], keep)
    if keep is not None:
        assert_close(take(got, ~keep), take(first, ~keep), "(params, state) of model 1, which is masked,", 0.0)
        got, expected = take(got, keep), take(expected, keep)
    assert_close(got, expected, "(params, state)", rtol)


def _check_compiled(
    optimizer: GradientTransformation, gradients: Sequence[Params], params: Params, rtol: float
) -> None:
    torch.compiler.reset()
    update, state = torch.compile(optimizer.update, fullgraph=True, backend="eager"), optimizer.init(params)
    for turn, grads in enumerate(gradients[:3]):
        with torch.compiler.set_stance("fail_on_recompile" if turn else "default"):
            got = update(grads, state, params)
        expected = optimizer.update(grads, state, params)
        assert_close((got[0], tuple(got[1])), (expected[0], tuple(expected[1])), "compiled update", rtol)
        name, value = next(iter(state.hyperparams.items()))
        state = with_hyperparams(expected[1], **{name: value / 2})
    torch.compiler.reset()


def _walk_reference(make: Any, values: Any, start: Params, gradients: Sequence[Params], member: int) -> Params:
    parameters = {path: nn.Parameter(leaf[member].clone()) for path, leaf in start.items()}
    other, default = make(list(parameters.values()), **values), torch.get_default_dtype()
    # torch.optim keeps some of its numbers in the default type.
    torch.set_default_dtype(torch.float64)
    try:
        for grads in gradients:
            for path, parameter in parameters.items():
                parameter.grad = grads[path][member].clone()
            other.step()
    finally:
        torch.set_default_dtype(default)
    return {path: parameter.detach()[None] for path, parameter in parameters.items()}
