"""Operators of a computation that does not run: its tensors have shapes, strides and dtypes, and no values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hfta_func._torch import levels, recorded
from hfta_func._torch._release import private, replaced

_Mode = private("torch.utils._python_dispatch", "TorchDispatchMode")
_aten = torch.ops.aten
_UNSEEN = (_aten.detach.default, torch.ops.prim.device.default, _aten.lift_fresh.default)
"""They tell autograd or a program something and take no time on a device."""


class NotWalkableError(Exception):
    """A value is read; no RuntimeError, after which members would run one by one."""


class Walker(_Mode):
    """A context that lists the operators of a computation and the memory of their results, and runs none.

    Truth values are true: all members train on. Nothing else can be read.

    Args:
        note: Called with every operator, its arguments, its result, and what results took before it.
    """

    def __init__(self, note: Callable[[Any, Any, Any, Any, int], None]):
        super().__init__()
        self._note = note
        self._fake = private("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)
        self._held: dict[int, weakref.ref[Any]] = {}
        self.bytes = self.peak = 0
        """What results take now, and the most so far."""

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor without values for a tensor of the caller's, which takes no memory here."""
        made = self._fake.from_tensor(tensor.detach(), static_shapes=True)
        self._held[made.untyped_storage()._cdata] = weakref.ref(made.untyped_storage())
        return made

    @contextlib.contextmanager
    def walking(self, device: str) -> Iterator[None]:
        """A block whose computation is for a type of device, such as ``"cuda"``; its tensors are on the CPU."""
        # The kernels of this package are for a CPU, and run below one dispatch mode.
        modes = recorded._recorders + (device == "cpu")
        with replaced(levels, "walked_device", device), replaced(recorded, "_recorders", modes), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten._local_scalar_dense.default, _aten.is_nonzero.default):
            if args[0].dtype != torch.bool:
                raise NotWalkableError("it reads the value of a tensor")
            return True
        if func.namespace != "prim":
            with self:
                # An operator that consists of others.
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        before = self.bytes
        with self._fake:
            result = func(*args, **kwargs)
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
