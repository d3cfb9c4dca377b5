"""Calls of a padded model's code whose results depend on how many units a member really has.

What most functions make of units that a member lacks meets weights of zero later. Reductions, norms, attention and draws of
noise are different. Each is an *event*: a :class:`Recorder` notes those of each true size, and with them :class:`Padded`
computes every member's results from its own units.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfta_func._torch import known_values
from hfta_func.calls.body import module_path
from hfta_func.calls.draws import affine, spellings
from hfta_func.errors import StackError


class Event(NamedTuple):
    """A function that was called, the sizes that it depends on, and the path of the module whose code called it."""

    name: str
    sizes: tuple[int, ...]
    path: str


class Sizes(NamedTuple):
    """An event of a padded model: by axis where members differ, the size ``int64[K]`` for each of K true sizes.

    ``absent`` is ``bool[K]``: whether models of that size have no such call; None if all have. ``whole`` are the sizes of the
    padded model.
    """

    name: str
    axes: Mapping[int, Tensor]
    absent: Tensor | None
    whole: tuple[int, ...]


class Recorder:
    """Notes the events of a call."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.size, self.position = None, 0

    def again(self, size: None, position: int) -> Recorder:
        """What notes the events of a second run."""
        return self

    def draw(self, name: str, shape: Sequence[int]) -> None:
        """A draw of noise, or the beginning of one."""
        self.events.append(Event(name, tuple(shape), module_path()))

    def row(self, shape: Sequence[int]) -> None:
        """No draw is made by rows, so that each is noted."""

    def __call__(self, func: Any, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """Note a function and call it."""
        if func in WATCHED:
            name, _, sizes = WATCHED[func]
            self.events.append(Event(name, sizes(*args, **kwargs), module_path()))
        return call(*args, **kwargs)


class Padded:
    """Computes one member's results where they depend on its size.

    Args:
        size: Which true size the member has, ``int64[]``.
        events: Those of the padded model, in order.
        position: How many of them have been called.
    """

    def __init__(self, size: Tensor, events: Sequence[Sizes], position: int = 0):
        self.size, self.events, self.position = size, events, position

    def again(self, size: Tensor, position: int) -> Padded:
        """What computes the results of a second run from an event on."""
        return type(self)(size, self.events, position)

    def _next(self, name: str, sizes: Sequence[int]) -> Sizes:
        event = self.events[self.position] if self.position < len(self.events) else None
        # A compiler may trace inputs of other shapes than those of the latest call.
        is_known = event is not None and event.name == name and len(sizes) == len(event.whole)
        if event is None or not is_known or any(sizes[axis] != event.whole[axis] for axis in event.axes):
            raise StackError(
                f"the model calls {name} as no model of the members' true sizes did; members of different size must run the "
                f"same code, and a function must be called with inputs of this shape once before it is compiled"
            )
        self.position += 1
        return event

    def of_member(self, table: Tensor) -> Tensor:
        """The member's own entry of a table ``[K, ...]``."""
        return table.to(self.size.device).index_select(0, self.size.reshape(1)).squeeze(0)

    def has(self, event: Sizes, axis: int, length: int) -> Tensor:
        """Which units of an axis the member has, ``bool[length]``."""
        return torch.arange(length, device=self.size.device) < self.of_member(event.axes[axis])

    def mask(self, event: Sizes, x: Tensor, axes: Sequence[int]) -> Tensor | None:
        """Which units the member has along some axes, broadcasting against ``x``; None if all have all."""
        return in_all({axis: self.has(event, axis, x.shape[axis]) for axis in axes if axis in event.axes}, x)

    def draw(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """For a draw, the position ``int64[*shape]`` that each unit has in the member's own; None if they are in order.

        For the beginning of one, called ``"site"``, whether the member lacks it.
        """
        event = self._next(name, shape)
        if name == "site":
            if event.absent is None:
                return None
            absent = self.of_member(event.absent)
            return absent if any(known_values(absent) or [True]) else None
        # The first axis has no influence on positions.
        if not [axis for axis in event.axes if axis]:
            return None
        position: Any = 0
        for axis, length in enumerate(shape):
            true_length = self.of_member(event.axes[axis]) if axis in event.axes else length
            index = torch.arange(length, device=self.size.device).reshape([-1] + [1] * (len(shape) - axis - 1))
            position = position * true_length + index
        return position

    def row(self, shape: Sequence[int]) -> tuple[Tensor | None, int] | None:
        """For a draw, how many elements of each of its rows the member has, None for all, and the length of a row.

        None if positions are not in order row by row; the draw is then still to be made.
        """
        axes = [axis for axis in self._next("draw", shape).axes if axis]
        if not axes:
            return None, math.prod(shape)
        if len(axes) > 1:
            self.position -= 1
            return None
        width = self.of_member(self.events[self.position - 1].axes[axes[0]])
        inner = math.prod(shape[axes[0] + 1 :])
        return width * inner, shape[axes[0]] * inner

    def __call__(self, func: Any, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """Call a function for the member."""
        if func not in WATCHED:
            return call(*args, **kwargs)
        name, handler, sizes = WATCHED[func]
        event = self._next(name, sizes(*args, **kwargs))
        return handler(self, event, call, *args, **kwargs) if event.axes else call(*args, **kwargs)


def in_all(parts: Mapping[int, Tensor], x: Tensor) -> Tensor | None:
    """A mask of the entries of ``x`` that are in all parts, one along each of some axes; None if there are no parts."""
    masks = [part.reshape([-1, *[1] * (x.dim() - axis - 1)][: x.dim()]) for axis, part in parts.items()]
    return functools.reduce(operator.and_, masks) if masks else None


def _dims(x: Tensor, dim: Any) -> list[int]:
    dims = range(x.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return [dim % x.dim() for dim in dims]


def _reduction(neutral: float, keeps: bool = False) -> Callable[..., Any]:
    """A reduction along axes to which missing units bring a neutral value; ``keeps`` if it keeps the axes."""

    def run(padded: Padded, event: Sizes, call: Any, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = () if dim is None else (dim, *args)
        mask = None if isinstance(dim, Tensor) else padded.mask(event, input, _dims(input, dim))
        if mask is None:
            return call(input, *given, **kwargs)
        value = neutral if input.is_floating_point() else 0
        output = call(torch.where(mask, input, value), *given, **kwargs)
        return torch.where(mask, output, 0.0) if keeps else output

    return run


def _mean(padded: Padded, event: Sizes, call: Any, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    mean = _reduction(0.0)(padded, event, call, input, dim, *args, **kwargs)
    for axis in _dims(input, dim):
        if axis in event.axes:
            mean = mean * input.shape[axis] / padded.of_member(event.axes[axis])
    return mean


def _variance(
    padded: Padded, event: Sizes, call: Any, input: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False,
    *, correction: int | None = None, root: bool = False,
) -> Tensor:  # fmt: skip
    dims = _dims(input, dim)
    _, var, count = _moments(padded, event, input, dims)
    var = var * count / (count - (int(unbiased) if correction is None else correction))
    var = var if keepdim else var.squeeze(tuple(dims))
    return var.sqrt() if root else var


def _moments(padded: Padded, event: Sizes, x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor, Any]:
    """The difference from the mean along some axes, the variance, and how many units both are of."""
    dims = [*dims]
    mask = padded.mask(event, x, dims)
    mask = torch.ones((), dtype=torch.bool, device=x.device) if mask is None else mask
    counts: list[Any] = [padded.of_member(event.axes[axis]) if axis in event.axes else x.shape[axis] for axis in dims]
    count = functools.reduce(operator.mul, counts, 1)
    centered = torch.where(mask, x - torch.where(mask, x, 0.0).sum(dims, keepdim=True) / count, 0.0)
    return centered, centered.square().sum(dims, keepdim=True) / count, count


def _layer_norm(
    padded: Padded, event: Sizes, call: Any, input: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    centered, var, _ = _moments(padded, event, input, range(input.dim() - len(shape), input.dim()))
    return affine(centered * (var + eps).rsqrt(), weight, bias)


def _rms_norm(
    padded: Padded, event: Sizes, call: Any, input: Tensor, shape: Sequence[int], weight: Any = None, eps: Any = None
) -> Tensor:
    dims = range(input.dim() - len(shape), input.dim())
    mask = padded.mask(event, input, dims)
    x = input if mask is None else torch.where(mask, input, 0.0)
    square = _mean(padded, event, torch.mean, x.square(), [*dims], True)
    return affine(x * (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt(), weight, None)


def _group_norm(
    padded: Padded, event: Sizes, call: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    # Channels of the member's own groups: [N, C, S] x [C, G] -> [N, G] -> [N, C]
    x, channels = input.unsqueeze(-1).flatten(2), input.shape[1]
    true_channels = padded.of_member(event.axes[1]) if 1 in event.axes else channels
    groups = padded.of_member(event.axes[input.dim()]) if input.dim() in event.axes else num_groups
    index = torch.arange(channels, device=x.device)
    has, each = (index < true_channels)[:, None], true_channels // groups
    belongs = ((index // each)[:, None] == torch.arange(num_groups, device=x.device)) & has
    weights = belongs.to(x.dtype)
    x = torch.where(has, x, 0.0)
    centered = torch.where(has, x - ((x.mean(-1) @ weights / each) @ weights.T)[..., None], 0.0)
    var = ((centered.square().mean(-1) @ weights / each) @ weights.T)[..., None]
    shape = [channels] + [1] * (input.dim() - 2)
    weight, bias = (value if value is None else value.reshape(shape) for value in (weight, bias))
    return affine((centered * (var + eps).rsqrt()).reshape(input.shape), weight, bias)


def _attention(padded: Padded, event: Sizes, call: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    if query.dim() - 1 in event.axes and kwargs.get("scale") is None:
        true_length = padded.of_member(event.axes[query.dim() - 1]).double()
        query = query * (query.shape[-1] / true_length).sqrt().to(query.dtype)
    return call(query, *args, **kwargs)


def _multi_head_attention(padded: Padded, event: Sizes, call: Any, *args: Any, **kwargs: Any) -> Any:
    """With weights asked for, attention scales queries itself, by the padded size of a head."""
    if not kwargs.get("need_weights", True):
        return call(*args, **kwargs)
    size, heads = args[3:5]
    true = [padded.of_member(event.axes[axis]) if axis in event.axes else args[3 + axis] for axis in (0, 1)]
    head = torch.as_tensor(true[0] // true[1], dtype=torch.float64, device=padded.size.device)
    factor, given = (size // heads / head).sqrt(), [*args]
    # Rows of queries come first.
    for position in (5, 6):
        if isinstance(packed := given[position], Tensor):
            given[position] = torch.cat([packed[:size] * factor.to(packed.dtype), packed[size:]])
    return call(*given, **kwargs)


def _precise(handler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in float32 where precision is low, as kernels of norms sum, and return what they return."""

    def compute(padded: Padded, event: Sizes, call: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_low = input.itemsize < 4 or torch.is_autocast_enabled(input.device.type)
        if not (is_low and input.is_floating_point()):
            return handler(padded, event, call, input, *args, **kwargs)
        with torch.autocast(input.device.type, enabled=False):
            wide = input.to(torch.promote_types(input.dtype, torch.float32))
            return handler(padded, event, call, wide, *args, **kwargs).to(input.dtype)

    return compute


def _shape(input: Tensor, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    return tuple(input.shape)


_OF_SHAPE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("sum", "count_nonzero"), _reduction(0.0)),
    **dict.fromkeys(("amax", "max", "argmax", "logsumexp"), _reduction(-math.inf)),
    **dict.fromkeys(("amin", "min", "argmin"), _reduction(math.inf)),
    **dict.fromkeys(("softmax", "log_softmax"), _reduction(-math.inf, True)),
    **{"prod": _reduction(1.0), "softmin": _reduction(math.inf, True), "mean": _mean},
    **{"var": _precise(_variance), "std": _precise(functools.partial(_variance, root=True))},
    **{"layer_norm": _precise(_layer_norm), "rms_norm": _precise(_rms_norm)},
    "scaled_dot_product_attention": _attention,
}
_OF_GROUPS = "group_norm", _precise(_group_norm), lambda x, groups, *args, **_: (*x.shape, groups)
WATCHED: dict[Any, tuple[str, Callable[..., Any], Callable[..., tuple[int, ...]]]] = {
    **{func: (name, handler, _shape) for name, handler in _OF_SHAPE.items() for func, _ in spellings(name)},
    **dict.fromkeys((torch.group_norm, F.group_norm), _OF_GROUPS),
    F.multi_head_attention_forward: ("multi_head_attention", _multi_head_attention, lambda *args, **_: args[3:5]),
}
"""By function: its name, what computes a member's results, and the sizes on which these depend."""
