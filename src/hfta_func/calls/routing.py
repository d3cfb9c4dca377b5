"""Routes the random calls of a model to its member's key.

Each random call of a forward pass is a call site, numbered in program order; its noise comes from the key folded with
that number. Functions whose Python body draws are entered with the mode in force; a random operator without a handler
is an error of ``vmap``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func import _torch, random
from hfta_func.calls.body import Mode
from hfta_func.calls.draws import NAMES, NUMBERED, ROUTED, precision, spellings, without_generator
from hfta_func.calls.rewrites import LOWERED
from hfta_func.errors import RandomnessError

_STAND_IN = 0.5
_ATTENTION = [*inspect.signature(F.multi_head_attention_forward).parameters]  # which a compiler cannot ask for
_SITES = 16  # call sites whose streams are computed together, at the cost of one


class _Keyed(Mode):
    """A mode that numbers the call sites that draw from a key, or from the keys of all members."""

    def __init__(self, key: Any, site: int = 0):
        if torch.compiler.is_compiling():
            _tell_compiler()
        super().__init__()
        self.key, self.site = key, site


class routed(_Keyed):
    """Draw every random number inside the ``with`` block from ``key``.

    Args:
        key: One key, ``int64[]``; under ``vmap`` the member's. With None, random calls draw from PyTorch's generator.
        site: Number of call sites before this block, for a block inside another one.
        numbers: Tensors that stand for Python numbers of the model, in which members differ.

    Raises:
        RandomnessError: from a call that is given a generator.

    Example:
        >>> x, keys = torch.ones(3, 4), random.keys([5, 6, 5])
        >>> def noisy(x, key):
        ...     with routed(key):
        ...         return torch.nn.functional.dropout(x)
        >>> first, second, third = torch.vmap(noisy)(x, keys)
        >>> torch.equal(first, third), torch.equal(first, second)
        (True, False)
    """

    # Whether noise is drawn again in the backward pass, also where it is faster to keep it.
    redraws = False
    # What replaces functions that draw nothing.
    replacements: Mapping[Any, Callable[..., Any]] = LOWERED

    def __init__(self, key: Tensor | None, site: int = 0, numbers: Sequence[Tensor] = ()):
        super().__init__(key, site)
        # Those given, and results computed from these alone. Other tensors without axes are the model's.
        self.numbers = [*numbers]
        self._rate: Tensor | None = None
        # Whether a part of the block runs, in a mode of its own.
        self.is_quiet = False
        self.depth = _torch.depth()
        # Call sites before this one at which a member has drawn nothing, because the rate was 0.
        self.skipped: Tensor | None = None
        # What computes the results of a padded model for the member's own size.
        self.padding: Any = None
        self._blocks: dict[int, list[random.Stream]] = {}

    def next_key(self, rate: Any = None) -> random.Stream:
        """The stream of the next call site, which a member with a ``rate`` of 0, in a tensor, does not count."""
        self.site += 1
        if self.skipped is None:
            block, index = divmod(self.site, _SITES)
            if block not in self._blocks:
                self._blocks[block] = random.streams(self.key, block * _SITES, _SITES)
            stream = self._blocks[block][index]
        else:
            stream = random.stream(random.fold_in(self.key, self.site - self.skipped))
        skips = rate == 0 if isinstance(rate, Tensor) else None
        if self.padding is not None:
            stream = stream._replace(padding=self.padding)
            if (absent := self.padding.draw("site", ())) is not None:
                skips = absent if skips is None else skips | absent
        if skips is not None:
            self.skipped = skips.long() + (0 if self.skipped is None else self.skipped)
        if _torch.depth() > self.depth:
            for level in _torch.levels_above(self.depth):
                stream = self._inside(stream, *level)
        return stream

    def again(self, key: Tensor | None, site: int, numbers: Sequence[Tensor] = ()) -> routed:
        """A mode of this class for a later part of the block: from ``site`` on, with further tensors for numbers."""
        return routed(key, site, [*self.numbers, *numbers])

    def is_number(self, value: Any) -> bool:
        """Whether this tensor stands for a Python number of the model."""
        return isinstance(value, Tensor) and value.dim() == 0 and any(value is number for number in self.numbers)

    def dropped(self, func: Callable[..., Tensor], *args: Any) -> Tensor:
        """Dropout, ``func(*args)``."""
        return func(*args)

    def _inside(
        self, stream: random.Stream, level: int, size: int, randomness: str, derivatives: tuple[int, ...]
    ) -> random.Stream:
        """The stream inside a level of ``vmap`` that was entered within this block, as its ``randomness`` has it."""
        if randomness == "same":
            return stream
        if randomness == "error":
            raise RandomnessError(
                "vmap: called random operation while in randomness error mode; pass randomness='different' or 'same' to the "
                "inner vmap, as for torch.func.vmap"
            )
        indices = torch.arange(size, device=stream.start.device)
        for inner in derivatives:
            indices = _torch.unwrap_for_grad(indices, inner)
        return random.stream(random.fold_in(stream.start, _torch.traced_add_batch_dim(indices, 0, level)))

    def _call(self, site: int, part: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An iteration of the loop at a call site, which has streams of its own."""
        if self.key is None:
            return func(*args, **kwargs)
        before = self.key, self.site, self.skipped, self._blocks
        self.key = random.fold_in(random.fold_in(self.key, site if self.skipped is None else site - self.skipped), part)
        self.site, self.skipped, self._blocks = 0, None, {}
        result = func(*args, **kwargs)
        self.key, self.site, self.skipped, self._blocks = before
        return result

    def next_loop(self) -> Callable[..., Any]:
        """``call(part, func, *args)``, which calls a function with noise of the next call site and a part of its own."""
        self.site += 1
        return functools.partial(self._call, self.site)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace one call of a torch function."""
        if self.is_quiet:
            return func(*args, **kwargs)
        if self.padding is not None:
            return self.padding(func, args, kwargs, functools.partial(self._replaced, func))
        if not self.numbers:
            return self._replaced(func, *args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        met = [value for value in tensors if not self.is_number(value)]
        if len(met) == len(tensors):
            return self._replaced(func, *args, **kwargs)
        result = self._of_numbers(func, args, kwargs, met)
        if not met and isinstance(result, Tensor):
            self.numbers.append(result)
        return result

    def _of_numbers(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], met: Any) -> Any:
        """Call a function some of whose arguments are numbers, and others the tensors ``met``."""
        if func is F.multi_head_attention_forward:
            # It compares its rate with numbers; the functions that it calls get the rate.
            bound = dict(zip(_ATTENTION, args, strict=False)) | kwargs
            self._rate, bound["dropout_p"] = bound["dropout_p"], _STAND_IN
            try:
                return self._replaced(func, **bound)
            finally:
                self._rate = None
        if func in HANDLERS:
            # Noise depends on every bit of a rate.
            return HANDLERS[func](self, func, *args, **kwargs)
        # Python numbers have no precision: they take that of the tensors they meet.
        if met:
            kind = precision(met)
            args = tuple([self._cast(value, kind) for value in args])
            kwargs = {name: self._cast(value, kind) for name, value in kwargs.items()}
        return NUMBERED[func](*args, **kwargs) if func in NUMBERED else self._replaced(func, *args, **kwargs)

    def _rated(self, value: Any) -> Any:
        return self._rate if isinstance(value, float) and value == _STAND_IN else value

    def _cast(self, value: Any, kind: torch.dtype) -> Any:
        return value.to(kind) if self.is_number(value) and value.dtype == torch.float64 else value

    def _replaced(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if func is torch.Tensor.unflatten:
            # torch.compile cannot enter its Python body while a mode is in force.
            return torch.unflatten(*args, **kwargs)
        handler, func = HANDLERS.get(func), self.replacements.get(func, func)
        if self.key is not None and handler is not None:
            if self._rate is not None:
                args = tuple([self._rated(value) for value in args])
                kwargs = {name: self._rated(value) for name, value in kwargs.items()}
            return handler(self, func, *args, **kwargs)
        if func in _ENTERED and (self.key is not None or self.padding is not None):
            with self:
                return _ENTERED[func](*args, **kwargs)
        return func(*args, **kwargs)


class routed_by_member(_Keyed):
    """Draw every random tensor ``[M, ...]`` inside the ``with`` block from the keys ``[M]`` of its members.

    The block sees all members at once, as the update of an optimizer does.

    Raises:
        RandomnessError: from a random call without a part for each member.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace one call of a torch function."""
        if func not in HANDLERS:
            return func(*args, **kwargs)
        count = self.key.shape[0]
        dims = [0 if isinstance(arg, Tensor) and arg.shape[:1] == (count,) else None for arg in args]
        if 0 not in dims:
            raise RandomnessError(
                f"the optimizer calls {NAMES.get(func, func)} for numbers that are not one part per model, "
                f"[{count}, ...], so that models would share them; draw in the shape of a gradient, torch.randn_like(grad)"
            )
        self.site += 1

        def draw(key: Tensor, *args: Any) -> Any:
            with routed(key):
                return func(*args, **kwargs)

        return torch.vmap(draw, (0, *dims))(random.fold_in(self.key, self.site), *args)


def _entered(func: types.FunctionType) -> types.FunctionType:
    """A copy of a function without its check for modes: its body runs, and the mode sees the calls in it."""
    checks = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    names = func.__globals__ | dict.fromkeys(checks, lambda *args: False)
    # Its message reads a tensor, which it has no way to compile.
    names["_check_key_padding_mask"] = lambda *args: None
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_ENTERED = {func: _entered(func) for func in (F.gumbel_softmax, F.multi_head_attention_forward)}
"""Functions of ``torch.nn.functional`` whose Python body draws."""

HANDLERS: dict[Any, Callable[..., Any]] = {
    func: without_generator(handler) for name, handler in ROUTED.items() for func, _ in spellings(name)
}
"""Handlers by function, for calls with a key."""


@_torch.constant_to_compiler
def _tell_compiler() -> bool:
    _torch.tell_compiler_of_overrides(HANDLERS)
    return True
