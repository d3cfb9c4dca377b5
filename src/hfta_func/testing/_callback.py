"""The laws of a callback."""

from __future__ import annotations

import copy
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hfta_func._tree import tree_map
from hfta_func.models.stack import init_params
from hfta_func.optim import adam
from hfta_func.run.data import ArrayLoader
from hfta_func.run.fit import fit
from hfta_func.run.history import Callback, History
from hfta_func.step.train import make_train_step
from hfta_func.testing._laws import assert_close, law

SEEDS = [3, 5, 8]


def assert_callback(make: Callable[[], Callback], *, epochs: int = 4) -> None:
    """Check that a callback keeps its laws, in a short run of three small models whose only metric is ``"loss"``.

    The laws: it takes ``(state, history)``; it returns None or the next state; it writes neither of them; and a run resumed
    from a file, with a new callback, gives the same bits as a run without a break.

    Args:
        make: Makes the callback. If the callback writes files, give it another folder each time.
        epochs: Number of epochs.

    Raises:
        AssertionError: if a law is broken; it names the law, the epoch, and what was written.

    Example:
        >>> from hfta_func.testing import assert_callback
        >>> assert_callback(lambda: early_stopping("loss", patience=1))
    """
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = _run(_checked(make()), epochs)
        path = pathlib.Path(folder, "run.safetensors")
        for upto in (epochs // 2, epochs):
            state, _ = _run(_checked(make()), upto, resume=path)
        with law("a run that goes on gets the same bits", f"broken off after epoch {epochs // 2}"):
            assert_close(state, whole, "state", 0.0)


def _run(callback: Callback, epochs: int, **options: Any) -> Any:
    def factory() -> nn.Module:
        return nn.Linear(4, 1)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()

    rows = torch.linspace(-1, 1, 64).reshape(16, 4)
    step = make_train_step(factory(), loss_fn, adam(lr=[1e-2, 3e-2, 1e-1]))
    state, loader = step.init(*init_params(factory, SEEDS), seeds=SEEDS), ArrayLoader(rows, 4, seeds=SEEDS)
    return fit(step, state, loader, epochs=epochs, callbacks=[callback], progress=False, **options)


def _checked(callback: Callback) -> Callback:
    def checked(state: Any, history: History) -> Any:
        about = f"epoch {len(history)}"
        before = tree_map(torch.clone, state), copy.deepcopy(history.state_dict())
        with law("it takes (state, history)", about):
            result = callback(state, history)
        with law("it returns None or the next state", about):
            assert result is None or type(result) is type(state), f"it returns {result!r}"
        with law("it writes neither state nor history", about):
            assert_close(state, before[0], "state", 0.0)
            assert_close(history.state_dict()["epochs"], before[1]["epochs"], "history.epochs", 0.0)
        return result

    return checked
