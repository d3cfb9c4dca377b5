"""Operators of a computation that does not run: its tensors have shapes, strides and dtypes, and no values."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import levels, recorded
from hfta_func._torch._release import private

_Mode = private("torch.utils._python_dispatch", "TorchDispatchMode")
_aten = torch.ops.aten
_FAKE = "torch._subclasses.fake_tensor"
_UNSEEN = (_aten.detach.default, torch.ops.prim.device.default, _aten.lift_fresh.default)
"""They tell autograd or a program something and take no time on a device."""


_running_task = private("torch._C", "_current_graph_task_id")


def is_backward() -> bool:
    """Whether autograd's engine is running."""
    return _running_task() != -1


def _is_heard(_: Any) -> bool:
    return levels.walked_device is None


class NotWalkableError(Exception):
    """Why a computation cannot go on without values."""


class Walker(_Mode):
    """A context that lists the operators of a computation and the memory of their results, and runs none.

    Truth values are true: all members train on. Nothing else can be read.

    Args:
        device: The type of the device that the computation is for, such as ``"cuda"``; its tensors are on the CPU.
        note: Called with every operator, its arguments, its result, and what results took before it.
    """

    def __init__(self, device: str, note: Callable[[Any, Any, Any, Any, int], None]):
        super().__init__()
        self._device, self._note = device, note
        self._before: list[str | None] = []
        self._fake = private(_FAKE, "FakeTensorMode")(allow_non_fake_inputs=True)
        self._held: dict[int, weakref.ref[Any]] = {}
        # The error says what went wrong, and PyTorch would print where, in a hundred lines.
        logging.getLogger(_FAKE).addFilter(_is_heard)
        self.bytes = self.peak = 0
        """What results take now, and the most so far."""

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor without values for a tensor of the caller's, which takes no memory here."""
        made = self._fake.from_tensor(tensor.detach(), static_shapes=True)
        self._held[made.untyped_storage()._cdata] = weakref.ref(made.untyped_storage())
        return made

    def __enter__(self) -> Any:
        self._before.append(levels.walked_device)
        levels.walked_device = self._device
        # The kernels of this package are for a CPU, and run below one dispatch mode.
        recorded._recorders += self._device == "cpu"
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        levels.walked_device = self._before.pop()
        recorded._recorders -= self._device == "cpu"
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten._local_scalar_dense.default, _aten.is_nonzero.default):
            if args[0].dtype == torch.bool:
                return True
            raise NotWalkableError("it reads the value of a tensor")
        if func.namespace != "prim":
            with self:
                # An operator that consists of others.
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        before = self.bytes
        try:
            with self._fake:
                result = func(*args, **kwargs)
        except private(_FAKE, "DynamicOutputShapeException") as error:
            raise NotWalkableError(f"it makes a tensor whose shape depends on values, by {error}") from None
        if func not in _UNSEEN:
            for leaf in levels.pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._hold(leaf.untyped_storage())
            self._note(func, args, kwargs, result, before)
        return result

    def _hold(self, storage: Any) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number in self._held:
            return

        def free(_: Any) -> None:
            del self._held[number]
            self.bytes -= size

        self._held[number] = weakref.ref(storage, free)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
