"""What PyTorch says to a model under ``vmap``, and what reaches the user instead: the same words for any M."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.step import replay

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

RAW = re.compile(
    r"functorch|[Dd]ynamo|BatchedTensor|vmap: It|vmap-ing|support vmap|rule not implemented|lvl=|bdim|file a bug|"
    r"report a bug|INTERNAL ASSERT|torch\._C|fake tensor"
)
"""What only those understand who know how PyTorch runs members as one."""
HELD = torch.zeros(4)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, 2.0)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def cached(m: Any, x: Tensor) -> Tensor:
    m.cache = x if not hasattr(m, "cache") else m.cache
    return x + m.cache


Call = Callable[[Any, Tensor], Any]
REFUSED: dict[str, tuple[str, Call]] = {
    "inner vmap": ("the value of a tensor", lambda m, x: torch.vmap(lambda row: row * row.sum().item())(x)),
    "noise in an inner vmap": ("inner vmap", lambda m, x: torch.vmap(lambda row: row + torch.rand(4))(x)),
    "noise of integers": ("draw integers with torch.randint", lambda m, x: torch.zeros(4).long().normal_() + x),
    "cache": ("make it a buffer", cached),
}
"""Models that run alone but not as an array, and what they are told."""
WRONG: dict[str, Call] = {
    "shapes": lambda m, x: x + torch.zeros(5),
    "gather": lambda m, x: x.gather(1, torch.tensor([[9]])),
    "save_for_backward": lambda m, x: Kept.apply(x),
    "out": lambda m, x: torch.add(x, 1, out=torch.empty(3, 4)),
    "unused": lambda m, x: torch.autograd.grad(x.sum(), m.unused, create_graph=True)[0] + x,
    "in_dims": lambda m, x: torch.vmap(torch.sin, in_dims=5)(x),
}
"""Models that are wrong alone, too."""


class Model(nn.Module):
    def __init__(self, func: Call):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.inner, self.func = nn.Linear(4, 4), func

    def forward(self, x: Tensor) -> Any:
        return self.func(self, self.inner(x) * self.weight)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def array(func: Call, way: str, count: int) -> Any:
    """One call of an array."""
    models, x = [Model(func) for _ in range(count)], torch.randn(count, 3, 4)
    if way == "evaluated":
        return hfta.make_eval_step(models[0], loss, batch_dims=0)(hfta.stack_params(models), x)
    if way == "ensemble":
        return hfta.Ensemble.from_modules(models).eval()(x, batch_dims=0)
    step: Any = hfta.make_train_step(models[0], loss, hfta.sgd(lr=[0.1] * count), replay=way == "replayed")
    state = step.init(*hfta.stack_params(models), seeds=range(count))
    if way == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="eager")
    for _ in range(5 if way == "replayed" else 1):
        state, _ = step(state, x)


def told(run: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    HELD.zero_()
    with pytest.raises(Exception) as caught:
        run()
    text = str(caught.value)
    assert not RAW.search(text.partition("from user code")[0]), text
    return f"{type(caught.value).__name__}: {text}"


WAYS = ("step", "evaluated", "ensemble", "replayed")


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("name", REFUSED)
def test_what_only_an_array_refuses(name: str) -> None:
    cure, func = REFUSED[name]
    texts = [told(lambda: array(func, way, count)) for way in WAYS for count in (1, 3)]  # noqa: B023
    for text in texts:
        assert cure in text and re.match("TraceError|RandomnessError|StateError", text), text
        assert __file__ in text or "StateError" in text, text
    assert len(dict.fromkeys(texts)) == 1, texts


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REFUSED)
def test_a_compiler_passes_it_on(name: str) -> None:
    cure, func = REFUSED[name]
    for count in (1, 3):
        assert cure in told(lambda: array(func, "compiled", count))  # noqa: B023


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_alone_is_told_as_alone(name: str) -> None:
    func = WRONG[name]
    alone = told(lambda: loss(Model(func), torch.randn(3, 4)).backward())
    for count in (1, 3):
        for way in ("step", "replayed"):
            assert told(lambda: array(func, way, count)) == alone  # noqa: B023


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_STEPS", 0)
