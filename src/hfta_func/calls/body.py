"""Whose code is running while an array runs: modes that see its calls, the module that holds the model, paths and lines."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode

from hfta_func._torch import dotted_path


class Diverged(RuntimeError):
    """Members cannot run as one: ``sides[i]`` is the side of a branch that member ``i`` takes; None if each runs alone."""

    def __init__(self, sides: list[bool] | None):
        # PyTorch's message, from which :mod:`hfta_func.rules.vmap` makes a TraceError if members cannot run in groups.
        super().__init__("data-dependent control flow")
        self.sides = sides


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


class Reference:
    """What a module holds under a name."""

    def __init__(self, held: dict[str, Any], name: str):
        self.held, self.name = held, name


class Body(nn.Module):
    """A function of a model, as a module whose only child is ``model``."""

    def __init__(self, model: nn.Module, func: Callable[..., Any]):
        super().__init__()
        self.model = model
        self.func = func
        self.training = model.training
        self.places: dict[str, Any] = {}
        self.fixed: frozenset[tuple[int, str]] = frozenset()
        # Where plain attributes hold parameters, too: a holder, a key there, and a reference or a tuple with some.
        self.aliases: list[tuple[Any, Any, Any]] = []
        self.differentiates_shared = False
        """Whether a call has taken gradients by tensors that members share."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if not self.aliases:
            return self.func(self.model, *args, **kwargs)
        before = [get(holder, key) for holder, key, _ in self.aliases]
        for holder, key, source in self.aliases:
            put(holder, key, _current(source))
        try:
            return self.func(self.model, *args, **kwargs)
        finally:
            for (holder, key, _), value in zip(reversed(self.aliases), reversed(before), strict=True):
                put(holder, key, value)

    def set_requires_grad(self, tensor: Any, requires_grad: bool) -> Any:
        """Freeze a parameter until the end of the call, or train it again; frozen, modules hold it without its history."""
        trained = getattr(tensor, "trained", tensor)
        current = trained if requires_grad else trained.detach()
        if not requires_grad:
            current.trained = trained
        for held, name in self.places.values():
            if getattr(held.get(name), "trained", held.get(name)) is trained:
                held[name] = current
        return current

    # Hooks of all modules, and what replaces nn.Module.__call__, are for the modules of the model alone.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.forward(*args, **kwargs)


def _current(source: Any) -> Any:
    """A value with what references in it, or in a tuple, stand for."""
    if isinstance(source, Reference):
        return source.held[source.name]
    return getattr(source, "_make", tuple)(map(_current, source)) if isinstance(source, tuple) else source


def get(holder: Any, key: Any) -> Any:
    """What a container, or a variable of a closure, holds."""
    return holder.cell_contents if isinstance(holder, types.CellType) else holder[key]


def put(holder: Any, key: Any, value: Any) -> None:
    """Put a value into a container or a variable of a closure."""
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


def contents(cell: types.CellType) -> tuple[Any, ...]:
    """What a variable of a closure holds; nothing if it has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def module_path() -> str:
    """The path of the module whose code is running, inside the model of the array."""
    stack = get_current_meta().get("nn_module_stack")
    if stack:
        # A compiler runs a graph, which holds the modules of each operator as Python expressions, outermost first.
        paths = [dotted_path(path) for path, _ in stack.values()]
        names = [getattr(kind, "__name__", str(kind)) for _, kind in stack.values()]
        outer = next((path for path, name in zip(paths, names, strict=True) if name.endswith(Body.__name__)), paths[0])
        return paths[-1].removeprefix(outer).removeprefix(".model").lstrip(".")
    body = running_body()
    return "" if body is None else path_in(body, next(_running()))


def running_body() -> Body | None:
    """The body of the model whose code is running."""
    return next((owner for owner in _running() if isinstance(owner, Body)), None)


def _running() -> Iterator[nn.Module]:
    """The modules whose methods are running, innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


def path_in(body: nn.Module, module: nn.Module) -> str:
    """The path of a module inside the model that ``body`` holds, or inside ``body`` if it holds none."""
    path = next((path for path, child in body.named_modules() if child is module), "")
    return path.removeprefix("model").lstrip(".") if isinstance(body, Body) else path


def user_code_location(error: BaseException) -> str:
    """The innermost line of the user's code that the error came through, and the module whose code was running."""
    location, trace, root, owner = "this function", error.__traceback__, None, None
    while trace is not None:
        frame = trace.tb_frame
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module):
            owner, root = holder, holder if root is None else root
        if _is_users(frame):
            location = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{trace.tb_lineno})"
            if root is not None and owner is not None and not isinstance(owner, Body):
                path = path_in(root, owner)
                where = f"module '{path}'" if path else "the model"
                location = f"{where} ({type(owner).__qualname__}), {location},"
        trace = trace.tb_next
    return location


_PACKAGES = tuple(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), torch.__file__))


def is_users_file(name: str) -> bool:
    """Whether a file of code belongs neither to PyTorch nor to this package."""
    return not name.startswith(_PACKAGES)


def warn(message: str, category: type[Warning]) -> None:
    """Warn of the latest line of the user's code."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, level)


def _is_users(frame: types.FrameType) -> bool:
    """Whether code belongs neither to PyTorch, this package or Python's library, nor was generated as by ``dataclass``."""
    package, code = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code
    generated = code.co_filename == "<string>" and code.co_name.startswith("__")
    return package not in ("torch", "hfta_func", *sys.stdlib_module_names) and not generated
