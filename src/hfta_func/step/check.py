"""Whether a state and a batch belong to a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch

from hfta_func._torch import can_look, writes
from hfta_func._types import Params, Tree
from hfta_func.errors import HyperparameterError, StateError
from hfta_func.models.scalar_attributes import filled, numbers_text
from hfta_func.models.stack import Shapes, check_state
from hfta_func.step.batch import check_batch, plain
from hfta_func.step.options import Options
from hfta_func.step.state import TrainState, check_optimizer, without_memory
from hfta_func.verify import WRITES


def require(state: Any, *others: type) -> None:
    """Raise a StateError unless ``state`` is a TrainState, or of one of the ``others``."""
    if not isinstance(state, (TrainState, *others)):
        kinds = " or ".join(kind.__qualname__ for kind in (TrainState, *others))
        raise StateError(f"expected a {kinds} but got {type(state).__qualname__}; make one with step.init(...)")


@contextlib.contextmanager
def _unwritten(params: Params) -> Iterator[None]:
    before = {path: writes(param) for path, param in params.items()}
    yield
    for path, count in before.items():
        if writes(params[path]) != count:
            raise StateError(WRITES.format(path))


def unwritten(params: Params) -> contextlib.AbstractContextManager[None]:
    """A block that raises a StateError if it writes parameters, where that can be seen: a compiler makes copies."""
    looks = params and can_look(next(iter(params.values())))
    return _unwritten(params) if looks else contextlib.nullcontext()


def check_hparams(names: Iterable[str], known: Set[str], takes_hparams: bool) -> None:
    """Raise a HyperparameterError unless a loss function that ``takes_hparams``, or the model, has numbers of these names."""
    unused = sorted({*names} - known)
    if unused and not takes_hparams:
        raise HyperparameterError(
            f"hparams {unused} would not be used: the loss function takes only (model, batch); give it a third argument, "
            f"or name a number of the model by its path: {numbers_text(known, unused[0])}"
        )
    wrong = [name for name in unused if "." in name]
    if wrong:
        raise HyperparameterError(f"'{wrong[0]}' is no number of the model; {numbers_text(known, wrong[0])}")


@dataclasses.dataclass(eq=False)
class Check:
    """``check(state, batch)`` raises unless both fit the step; see :meth:`TrainStep.__call__`."""

    _shapes: Shapes
    _trainable: frozenset[str]
    _init: Callable[[Params, Params], Tree]
    _options: Options
    _check_shared: Callable[[TrainState], None]
    _expected: Any = None

    def __call__(self, state: TrainState, batch: Tree) -> None:
        """Raise a StateError or a BatchError that names what does not fit."""
        require(state)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            raise StateError(
                "a training step needs gradients, and inside torch.inference_mode() there are none; leave it"
            )
        check_state((state.params, filled(state.buffers, state.hparams)), self._shapes)
        # A graph is compiled for the structure of its inputs, so the compiler checks it by itself.
        if not torch.compiler.is_compiling():
            self._check_opt_state(state)
            self._check_shared(state)
        check_batch(self._options.batch_dims, plain(batch), state.keys.shape[0])

    def _check_opt_state(self, state: TrainState) -> None:
        if bool(state.loss_scale) != (self._options.scaling is not None):
            raise StateError("the state has a loss scale and the step has none, or the other way round; use step.init")
        if self._expected is None:
            trained = {path: param for path, param in state.params.items() if path in self._trainable}
            self._expected = without_memory(lambda params: self._init(params, state.buffers), trained)
        check_optimizer(state.opt_state, self._expected, "state.opt_state", "optimizer")
