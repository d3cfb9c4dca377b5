"""Finds out by calls what a padded model does for each true size, and that it is what a model of that size does."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._torch import outside_transforms, pytree, unwritten
from hfta_func._types import Params
from hfta_func.calls.padding import Event, Padded, Recorder, Sizes, Traced
from hfta_func.errors import HFTAError, StackError
from hfta_func.models.attributes import first_member
from hfta_func.models.padding import Padding
from hfta_func.models.scalar_attributes import numbers_of
from hfta_func.models.sizes import SIZE


class Events:
    """The events of a padded model's calls, by the shapes of inputs.

    ``run.alone(size, numbers)`` is the same function of a model of a true size, and ``run.watched(watch, *given)`` calls
    one after ``watch(model)``, see :class:`hfta_func.models.functional.Bound`.

    Args:
        padding: What the model knows of its sizes.
        numbers: The paths of the numbers that calls take as buffers.
    """

    def __init__(self, padding: Padding, numbers: Sequence[str]):
        self.padding, self._numbers = padding, numbers
        self._known: dict[Any, list[Sizes]] = {}
        self._latest: list[Sizes] | None = None

    def latest(self, size: Tensor) -> Padded:
        """What computes the results of a member of a size, while a compiler traces, which knows no values."""
        if self._latest is None:
            raise StackError(
                "call this function of a padded model once before it is compiled, so that its sizes are known"
            )
        return Traced(size, self._latest)

    def __call__(self, run: Any, buffers: Params, args: Any, kwargs: Any, key: Tensor | None) -> Padded:
        """What computes the results of a member of the size that its buffers tell, for inputs of these shapes.

        Raises:
            StackError: if a true size gives other results than a model of that size alone.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        known = self._known.get((shapes, str(spec), key is None))
        if known is None:
            with outside_transforms(), torch.random.fork_rng([]):
                given = [first_member(leaf).detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                device = buffers[SIZE].device
                noise = torch.zeros((), dtype=torch.int64, device=device) if key is None else first_member(key)
                known = self._learn(run, pytree.tree_unflatten(given, spec), noise)
            # Without a key nothing draws from one.
            known = [event for event in known if key is not None or event.name not in ("site", "draw")]
            self._known[shapes, str(spec), key is None] = known
        self._latest = known
        return Padded(buffers[SIZE], known)

    def _learn(self, run: Any, inputs: tuple[Any, Any], key: Tensor) -> list[Sizes]:
        recorded: list[list[Event]] = []
        alone = [run.alone(size, [*self._numbers_of(number)]) for number, size in enumerate(self.padding.sizes)]
        for number, call in [(0, run), *enumerate(alone)]:
            recorder = Recorder()
            trees = self._trees(number, _drawn(self.padding.sizes[number].model, False), call is run, key)
            try:
                call.watched(functools.partial(_tracked, recorder), *trees, inputs, key, recorder)
            except RuntimeError as error:
                if call is not run or isinstance(error, HFTAError):
                    raise
                raise StackError(
                    f"{repr(recorder.path) if recorder.path else 'the model'} cannot be padded, because it does not run in "
                    f"the largest sizes of all models ({error}); give all models one size there"
                ) from error
            recorded.append(recorder.events)
        events = _joined(self.padding, recorded[0], recorded[1:])
        for number, call in enumerate(alone):
            for negative in (False, True):
                given = run, call, events, number, negative, inputs, key
                try:
                    self._compare(*given)
                except StackError as error:
                    # Of a norm over two units, say, rounding alone may differ as much: float64 judges.
                    try:
                        self._compare(*given, torch.float64)
                    except (RuntimeError, StackError):
                        raise error from None
        return events

    def _compare(
        self, run: Any, alone: Any, events: Sequence[Sizes], number: int, negative: bool, inputs: Any, key: Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Compare a size's own model and the padded one on some values, in ``dtype`` if one is given."""
        values = _drawn(self.padding.sizes[number].model, negative)
        seen: list[dict[str, Any]] = [{}, {}]
        results = []
        for each, outputs, hook in ((alone, seen[0], None), (run, seen[1], Padded(key.new_tensor(number), events))):
            trees = self._trees(number, values, each is run, key)
            given = (
                (*trees, inputs)
                if dtype is None
                else pytree.tree_map(functools.partial(_cast, dtype), (*trees, inputs))
            )
            results.append(_results(each, functools.partial(_noted, outputs), *given, key, hook))
        _compare(self.padding, number, results, seen)

    def _trees(self, number: int, values: Params, is_padded: bool, key: Tensor) -> tuple[Params, Params]:
        """Parameters and buffers of a size for its own model, or for the padded one."""
        size, numbers = self.padding.sizes[number], self._numbers_of(number)
        names = dict(size.model.named_parameters())
        trees = [{path: leaf for path, leaf in values.items() if (path in names) is kind} for kind in (True, False)]
        if is_padded:
            whole = self.padding.enlarged(number, values)
            trained = {path for path, (alone, _) in size.leaves.items() if alone in names} | self.padding.params
            trees = [
                {path: leaf for path, leaf in whole.items() if (path in trained) is kind} for kind in (True, False)
            ]
            numbers = dict.fromkeys(self._numbers, 0.5) | {
                path: numbers[alone] for path, alone in self._numbers_alone(number)
            }
        as_tensors = {
            path: torch.tensor(value, dtype=torch.float64, device=key.device) for path, value in numbers.items()
        }
        return {path: leaf.detach().clone() for path, leaf in trees[0].items()}, trees[1] | as_tensors

    def _numbers_alone(self, number: int) -> Iterator[tuple[str, str]]:
        """The paths of numbers in the padded model and in that of a true size."""
        for path in self._numbers:
            owner, _, name = path.rpartition(".")
            if owner in self.padding.sizes[number].modules:
                yield path, f"{self.padding.sizes[number].modules[owner]}.{name}".lstrip(".")

    def _numbers_of(self, number: int) -> dict[str, float]:
        known = numbers_of(self.padding.sizes[number].model)
        return {alone: getattr(*known[alone]) for _, alone in self._numbers_alone(number)}


def _drawn(model: nn.Module, negative: bool) -> dict[str, Tensor]:
    """A model's tensors, its real parameters moved at random, so that zeros among them hide nothing, or all negative."""
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Tensor] = dict(model.named_buffers())
    for path, leaf in model.named_parameters():
        moved = leaf.detach()
        if leaf.is_floating_point():
            moved = moved + 0.1 * torch.rand(leaf.shape, generator=generator).to(leaf)
        values[path] = -moved.abs() if negative and leaf.requires_grad else moved
    return values


def _joined(padding: Padding, whole: list[Event], alone: list[list[Event]]) -> list[Sizes]:
    """The events of all sizes in one, those of the padded model."""
    sizes: list[list[tuple[int, ...] | None]] = [[] for _ in whole]
    for number, (events, size) in enumerate(zip(alone, padding.sizes, strict=True)):
        lacks = [f"{path}." for path in padding.optional if path not in size.modules]
        has = [not any(f"{event.path}.".startswith(path) for path in lacks) for event in whole]
        expected = [event for event, is_there in zip(whole, has, strict=True) if is_there]
        names = [(event.name, len(event.sizes)) for event in events]
        if names != [(event.name, len(event.sizes)) for event in expected]:
            other = next((e for e, n in zip(expected, names, strict=False) if (e.name, len(e.sizes)) != n), None)
            where = f"'{other.path}'" if other is not None and other.path else "the model"
            raise StackError(
                f"{where} does not call the same functions in a model of every size ({_shown(padding, number)}), so it "
                f"cannot be padded; give all models one size there, or stack each size as an array of its own"
            )
        rest = iter(events)
        for column, is_there in zip(sizes, has, strict=True):
            column.append(next(rest).sizes if is_there else None)
    joined = []
    for event, column in zip(whole, sizes, strict=True):
        absent = unwritten(torch.tensor([each is None for each in column]))
        filled = [event.sizes if each is None else each for each in column]
        axes = {
            axis: unwritten(torch.tensor([each[axis] for each in filled]))
            for axis, length in enumerate(event.sizes)
            if any(each[axis] != length for each in filled)
        }
        joined.append(Sizes(event.name, axes, absent if bool(absent.any()) else None, event.sizes))
    return joined


def _tracked(recorder: Recorder, model: nn.Module) -> None:
    """Make a recorder know the path of the module whose code runs."""
    paths: list[str] = []

    def leave(*_: Any) -> None:
        recorder.path = paths.pop()

    for path, module in model.named_modules():

        def enter(*_: Any, path: str = path) -> None:
            paths.append(recorder.path)
            recorder.path = path

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def _noted(seen: dict[str, Any], model: nn.Module) -> None:
    """Note the first output of each module by its path."""
    for path, module in model.named_modules():

        def note(_: Any, args: Any, output: Any, path: str = path) -> None:
            seen.setdefault(path, output)

        module.register_forward_hook(note)


def _results(run: Any, watch: Any, params: Params, buffers: Params, *given: Any) -> tuple[Any, Params]:
    """The real results, and the gradients of their sum with new buffers."""
    with torch.enable_grad():
        leaves = {path: leaf.requires_grad_(leaf.is_floating_point()) for path, leaf in params.items()}
        output, buffers = run.watched(watch, leaves, buffers, *given)
        real = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        total = sum((leaf.sum() for leaf in real if leaf.is_floating_point() and leaf.requires_grad), torch.zeros(()))
        used = [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads = torch.autograd.grad(total, used, materialize_grads=True) if total.requires_grad else ()
    paths = [path for path, leaf in leaves.items() if leaf.requires_grad]
    return real, {**dict(zip(paths, grads, strict=False)), **buffers}


def _compare(
    padding: Padding, number: int, results: Sequence[tuple[Any, Params]], seen: Sequence[dict[str, Any]]
) -> None:
    (alone, trees_alone), (padded, trees) = results
    trees = padding.true(number, {path: leaf for path, leaf in trees.items() if not path.endswith(SIZE)})
    pairs = [
        *zip(alone, padded, strict=True),
        *((leaf, trees[path]) for path, leaf in trees_alone.items() if path in trees),
    ]
    if all(a.shape == b.shape and _close(a, b) for a, b in pairs):
        return
    back = {alone: path for path, alone in padding.sizes[number].modules.items()}
    where, size = "the model's own code, or the loss function, cannot be padded", _shown(padding, number)
    for path, output in seen[0].items():
        if path and path in back and not _alike(output, seen[1].get(back[path])):
            kind = type(padding.sizes[number].model.get_submodule(path)).__qualname__
            where = f"'{path}' ({kind}) cannot be padded, or the code that computes its input"
            break
    else:
        for a, b in zip(alone, padded, strict=True):
            if a.shape != b.shape:
                raise StackError(
                    f"a model of true size ({size}) returns {[*a.shape]} but the padded one {[*b.shape]}; give all models "
                    f"one number of outputs, or stack each size as an array of its own"
                )
    raise StackError(
        f"{where}: its results for a model of true size ({size}) are not those of that model alone, because they depend on "
        f"how many units there are, or on their order; give all models one size there, or stack each size as an array of its "
        f"own"
    )


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _alike(alone: Any, padded: Any) -> bool:
    """Whether outputs of a module are the first entries along each axis of the padded one's."""
    for a, b in zip(pytree.tree_leaves(alone), pytree.tree_leaves(padded), strict=False):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.dim() != b.dim() or any(x > y for x, y in zip(a.shape, b.shape, strict=True)):
                return False
            if not _close(a, b[tuple(slice(length) for length in a.shape)]):
                return False
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b.to(a.dtype)))
    eps = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.detach().nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
    # Autocast leaves rounding that float64, to which it does not apply, has to judge.
    return a.dtype == b.dtype and bool(torch.allclose(a, b, eps, eps * max(scale, 1e-3), equal_nan=True))


def _shown(padding: Padding, number: int) -> str:
    leaves = dict(padding.sizes[number].model.named_parameters())
    return ", ".join(f"'{path}' {[*leaf.shape]}" for path, leaf in [*leaves.items()][:2])
