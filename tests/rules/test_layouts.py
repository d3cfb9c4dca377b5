"""What a model is told of the memory of its tensors: as alone, where the tensors of an array lie apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ways import WAYS, assert_as_alone

pytestmark = pytest.mark.usefixtures("one_thread", "double")


class Model(nn.Module):
    def __init__(self, ask: Callable[[Any], Any]):
        super().__init__()
        self.conv, self.ask = nn.Conv2d(1, 3, 2), ask

    def forward(self, x: Tensor) -> Tensor:
        # An array puts its members between samples and channels.
        return self.ask(self.conv(x[None, None].expand(2, 1, 5, 4)))


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "stride": lambda y: y * y.stride()[0] * y.stride(1),
    "is_contiguous": lambda y: y * (2.0 if y.is_contiguous() else 3.0),
    "storage_offset": lambda y: y * y[1].storage_offset(),
    "as_strided": lambda y: y.as_strided((2, 3), (36, 12)),
    "view": lambda y: y.view(2, -1) * y.relu().view(-1)[0],
    "stride of a transpose": lambda y: y * (y.permute(0, 2, 3, 1) + 1).stride()[1],
}


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("question", QUESTIONS)
def test_as_alone(question: str, count: int, way: str) -> None:
    if (question, way) == ("storage_offset", "compiled"):
        pytest.skip("Dynamo does not trace it, alone neither")
    if way == "mapped" and count > 1 and question != "view":
        pytest.skip("a vmap of a user's own does not compare")
    assert_as_alone(lambda: Model(QUESTIONS[question]), torch.randn(3, 5, 4), way, count)


@pytest.mark.parametrize("count", [1, 3])
def test_behind_a_view_that_fails_no_model_goes_on(count: int) -> None:
    def ask(y: Tensor) -> Any:
        try:
            return y.permute(0, 2, 3, 1).view(-1)
        except RuntimeError:
            return y * 2

    with pytest.raises(RuntimeError, match=r"view size is not compatible .* Use \.reshape"):
        assert_as_alone(lambda: Model(ask), torch.randn(3, 5, 4), "together", count)
    assert_as_alone(lambda: Model(ask), torch.randn(3, 5, 4), "one by one", count)
