"""A mode that replaces calls of PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    """A ``TorchFunctionMode`` whose subclasses write :meth:`call`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call PyTorch's function."""
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace one call of a torch function."""
        return func(*args, **kwargs)
