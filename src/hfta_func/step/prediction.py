"""What the members of an array predict, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfta_func._types import BatchError


class Prediction:
    """The members' outputs on N samples, and what they say together.

    Args:
        outputs: ``[M, N, ...]``; for classifiers, scores (logits) ``[M, N, C]``.

    Example:
        >>> found = Prediction(torch.tensor([[[0.0, 9.0], [9.0, 0.0]], [[0.0, 9.0], [0.0, 9.0]]]))
        >>> found.probabilities.argmax(-1), found.disagreement
        (tensor([1, 0]), tensor([0., 1.]))
    """

    def __init__(self, outputs: Tensor):
        self.outputs = outputs

    def __repr__(self) -> str:
        return f"Prediction(outputs={list(self.outputs.shape)})"

    @property
    def mean(self) -> Tensor:
        """The mean over members, ``[N, ...]``."""
        return self.outputs.mean(0)

    @property
    def std(self) -> Tensor:
        """The standard deviation over members, ``[N, ...]``, with M - 1 in its denominator; 0 for one member."""
        return self.outputs.std(0, correction=min(1, len(self.outputs) - 1))

    def quantiles(self, levels: float | Sequence[float]) -> Tensor:
        """Quantiles over members, interpolated linearly.

        Args:
            levels: One number from 0 to 1, or several.

        Returns:
            ``[N, ...]``, or ``[levels, N, ...]`` for several.
        """
        at = torch.as_tensor(levels, dtype=self.outputs.dtype, device=self.outputs.device)
        if not bool(((at >= 0) & (at <= 1)).all()):
            raise ValueError(f"levels is {levels!r}; quantiles are at levels from 0 to 1")
        # Not torch.quantile, which refuses large tensors.
        order, place = self.outputs.sort(0).values, at.reshape(-1) * (len(self.outputs) - 1)
        low, part = place.floor().long(), place.frac().reshape(-1, *[1] * (order.dim() - 1))
        found = torch.lerp(order[low], order[(low + 1).clamp(max=len(order) - 1)], part)
        return found.reshape(*at.shape, *order.shape[1:])

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities ``[N, C]``: the mean over members of the softmax over the last axis."""
        return self._scores().softmax(-1).mean(0)

    @property
    def disagreement(self) -> Tensor:
        """The share of pairs of different members that put a sample into different classes, ``[N]``; 0 for one member."""
        scores = self._scores()
        count = len(scores)
        votes = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).sum(0)
        same = (votes * (votes - 1)).sum(-1).to(scores.dtype)
        return 1 - same / (count * (count - 1)) if count > 1 else torch.zeros_like(same)

    def _scores(self) -> Tensor:
        if self.outputs.dim() < 3 or self.outputs.shape[-1] < 2:
            raise ValueError(
                f"the members' outputs are {list(self.outputs.shape)}; classes need scores [M, N, C], and two or more of them"
            )
        return self.outputs


def gather(run: Callable[..., Any], batches: Any) -> Prediction:
    """Call ``run`` on each batch and join the outputs ``[M, N, ...]``; see :meth:`Ensemble.predict` for ``batches``."""
    if isinstance(batches, Tensor | Mapping):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise BatchError(f"batches is a {type(batches).__qualname__}; pass one tensor or an iterable of batches")
    parts = []
    for batch in batches:
        if isinstance(batch, Mapping):
            output = run(**batch)
        else:
            output = run(*batch) if isinstance(batch, tuple | list) else run(batch)
        if not isinstance(output, Tensor) or output.dim() < 2:
            what = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__qualname__}"
            raise BatchError(
                f"the members' output is {what}; a prediction needs one tensor [M, N, ...], so call the ensemble itself and "
                f"pass what you need of its output to Prediction"
            )
        parts.append(output)
    if not parts:
        raise BatchError("there are no batches; pass a tensor, or at least one")
    return Prediction(torch.cat(parts, dim=1))
