"""What one model alone refuses, members that run as one refuse in the same words; and the dtypes of results are its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from ways import loss

pytestmark = pytest.mark.usefixtures("one_thread")

Func = Callable[[nn.Linear, Tensor], Tensor]
SHORT, EYE = torch.ones(4), torch.eye(4, dtype=torch.float64)
"""In float32, and in float64 as the model."""

REFUSED: dict[str, Func] = {
    "addmm": lambda fc, x: torch.addmm(fc(x)[0].float(), fc(x), EYE),
    "addmm_": lambda fc, x: fc(x).float().addmm_(fc(x), fc.weight),
    "addmv": lambda fc, x: torch.addmv(fc(x)[:, 0].float(), fc(x), EYE[0]),
    "addbmm": lambda fc, x: torch.addbmm(SHORT.expand(5, 4), fc(x).expand(2, 5, 4), EYE.expand(2, 4, 4)),
    "baddbmm": lambda fc, x: fc(x).float().expand(2, 5, 4).baddbmm(fc(x).expand(2, 5, 4), EYE.expand(2, 4, 4)),
    "linear": lambda fc, x: F.linear(fc(x), fc.weight, SHORT),
    "linear of rows": lambda fc, x: F.linear(fc(x)[None], fc.weight, SHORT),
    "linear of a vector": lambda fc, x: F.linear(fc(x), fc.bias, SHORT[0]),
    "complex": lambda fc, x: torch.complex(fc(x), x.float()).abs(),
    "heaviside": lambda fc, x: torch.heaviside(fc(x).detach(), SHORT) * fc(x),
    "layer norm": lambda fc, x: F.layer_norm(fc(x).float(), [4], SHORT, EYE[0]),
    "batch norm": lambda fc, x: F.batch_norm(fc(x).float(), None, None, SHORT, EYE[0], training=True),
    "nll loss": lambda fc, x: F.nll_loss(fc(x).log_softmax(1), torch.tensor([0, 1, 2, 3, 0]), SHORT),
    "fill_": lambda fc, x: fc(x) * x.clone().fill_(fc(x)[0]),
    "fill_ of what the model makes": lambda fc, x: fc(x) * torch.zeros(5, 4).fill_(fc(x)[0, :1]),
    "masked_fill": lambda fc, x: fc(x).masked_fill(x > 0, fc(x)[0]),
    "masked_fill by names": lambda fc, x: torch.masked_fill(input=fc(x), mask=x > 0, value=fc(x)[0]),
    "masked_fill_ by a constant": lambda fc, x: fc(x).masked_fill_(x > 0, EYE[0]),
}

PROMOTED: dict[str, Func] = {
    "where": lambda fc, x: torch.where(x > 0, fc(x).float(), fc.bias[0]),
    "where of whole numbers": lambda fc, x: fc(x) * torch.where(x > 0, torch.arange(4), torch.tensor(2.5)),
    "where as a method": lambda fc, x: fc(x).float().where(x > 0, other=torch.tensor(2.0, dtype=torch.float64)),
    "clamp": lambda fc, x: fc(x).float().clamp(fc.bias[0] - 0.2, max=torch.tensor(0.3, dtype=torch.float64)),
    "addcmul": lambda fc, x: torch.addcmul(fc(x).float(), fc.bias[0], tensor2=fc.bias[1], value=2),
    "addcdiv": lambda fc, x: torch.addcdiv(fc(x).float(), fc.bias[0], fc.bias[1] + 2),
    "slice_scatter": lambda fc, x: torch.slice_scatter(fc(x), fc(x)[:2].float(), 0, 1, 3),
}


class Applies(nn.Module):
    """A function of a linear layer."""

    def __init__(self, func: Func) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.func = func

    def forward(self, x: Tensor) -> Tensor:
        return self.func(self.fc, x)


def calls(func: Func, count: int) -> dict[str, Callable[[], Any]]:
    """A step and an evaluation of the first of three models, and of all."""
    torch.manual_seed(0)
    models, x = [Applies(func) for _ in range(count)], torch.randn(count, 5, 4, dtype=torch.float64)
    step = hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1))
    evaluate = hfta.make_eval_step(models[0], loss, batch_dims=0)
    stacked = hfta.stack_params(models)
    return {
        "alone": lambda: loss(models[0], x[0].clone()),
        "train": lambda: step(step.init(*stacked, seeds=range(count)), x),
        "evaluate": lambda: evaluate(stacked, x),
    }


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_model_refuses_an_array_refuses(name, count):
    ways = calls(REFUSED[name], count)
    texts = []
    for call in ways.values():
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    assert texts[1:] == texts[:1] * 2


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", PROMOTED)
def test_numbers_count_less_than_tensors_with_axes(name, count):
    ways = calls(PROMOTED[name], count)
    ways["train"]()
    alone, metrics = ways["alone"](), ways["evaluate"]()
    assert metrics["loss"].dtype == alone.dtype
    torch.testing.assert_close(metrics["loss"][0], alone.detach())


def test_a_loss_of_two_dtypes_is_refused_where_its_dtype_would_differ():
    ways = calls(lambda fc, x: F.binary_cross_entropy_with_logits(fc(x), (x > 0).float(), reduction="none"), 3)
    for way in ("train", "evaluate"):
        with pytest.raises(hfta.errors.TraceError, match="cast them to one dtype"):
            ways[way]()


class Table(nn.Module):
    """Its class holds parts of it in one of several ways; ``uses`` computes with what is held."""

    held: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, uses: Callable[[dict[str, Any], Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.cell = nn.Linear(4, 4), nn.LSTM(4, 4)
        self.register_buffer("mean", torch.randn(4))
        self.uses = uses
        weight = self.fc.weight
        self.held.update(fc=self.fc, cell=[self.cell], bias=self.fc.bias, mean=self.mean, call=lambda x: x @ weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.uses(self.held, x)


HELD: dict[str, tuple[Callable[[dict[str, Any], Tensor], Tensor], str]] = {
    "parameter": (lambda held, x: held["bias"] * 2, "fc.bias"),
    "detached": (lambda held, x: held["bias"].detach(), "fc.bias"),
    "module": (lambda held, x: held["fc"](x), "fc.weight"),
    "recurrent layer": (lambda held, x: held["cell"][0](x)[0], "cell.weight_ih_l0"),
    "closure": (lambda held, x: held["call"](x), "fc.weight"),
    "written buffer": (lambda held, x: held["mean"].add_(1), "mean"),
}


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", HELD)
def test_parameters_that_a_class_holds_are_refused(name, count, chunk_size):
    uses, path = HELD[name]
    models, x = [Table(uses) for _ in range(count)], torch.randn(5, 4)
    before = models[-1].mean.clone()
    stacked = hfta.stack_params(models)
    step = hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1), batch_dims=None, chunk_size=chunk_size)
    evaluate = hfta.make_eval_step(models[0], loss, chunk_size=chunk_size)
    for call in (lambda: step(step.init(*stacked, seeds=range(count)), x), lambda: evaluate(stacked, x)):
        with pytest.raises(hfta.errors.TraceError, match=f"uses '{path}' of a model itself"):
            call()
    assert torch.equal(before, models[-1].mean)


class Resetting(nn.Module):
    """A layer whose class resets all instances, as neurons of snntorch do."""

    instances: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.linear = nn.Linear(4, 4)
        self.instances.append(self)

    def forward(self, x: Tensor) -> Tensor:
        for instance in self.instances:
            instance.total = torch.zeros_like(instance.total)
        self.total = self.total + self.linear(x).mean(0)
        return self.total


@pytest.mark.parametrize("count", [1, 3])
def test_assigning_buffers_of_what_a_class_holds_is_refused(count):
    models, x = [nn.Sequential(Resetting()) for _ in range(count)], torch.randn(5, 4)
    stacked = hfta.stack_params(models)
    step = hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1), batch_dims=None)
    evaluate = hfta.make_eval_step(models[0], loss)
    for call in (lambda: step(step.init(*stacked, seeds=range(count)), x), lambda: evaluate(stacked, x)):
        with pytest.raises(
            hfta.errors.TraceError, match=r"assigns 'total' of a module \(Resetting\).*in self.modules\(\)"
        ):
            call()


def test_another_thread_may_train_a_model_alone_meanwhile():
    class Totals(Resetting):
        instances: ClassVar[list[nn.Module]] = []

    alone, x = Totals(), torch.randn(5, 4)
    hfta.stack_params([alone])

    def meanwhile(model: nn.Module, rows: Tensor) -> Tensor:
        thread = threading.Thread(target=alone, args=(x,))
        thread.start()
        thread.join()
        return loss(model, rows)

    before, model = alone.total, nn.Linear(4, 4)
    hfta.make_eval_step(model, meanwhile)(hfta.stack_params([model]), x)
    assert alone.total is not before


def test_what_a_class_holds_may_be_asked_for_its_shape_and_be_a_constant():
    def uses(held: dict[str, Any], x: Tensor) -> Tensor:
        assert held["bias"].shape == (4,) and held["bias"].requires_grad
        return held["mean"] + torch.zeros_like(held["bias"]) + x.new_ones(held["bias"].numel()).to(held["bias"].device)

    models, x = [Table(uses) for _ in range(3)], torch.randn(5, 4)
    expected = torch.stack([loss(model, x) for model in models]).detach()
    found = hfta.make_eval_step(models[0], loss)(hfta.stack_params(models), x)["loss"]
    torch.testing.assert_close(found, expected)


def test_a_loss_that_calls_another_model_than_it_is_given_is_refused():
    net = nn.Linear(4, 4)
    step = hfta.make_train_step(net, lambda model, x: loss(net, x), hfta.sgd(lr=0.1), batch_dims=None)
    with pytest.raises(
        hfta.errors.TraceError, match=r"take it from the model that is called \(self.weight, model.weight\)"
    ):
        step(step.init(*hfta.init_params(lambda: nn.Linear(4, 4), [0, 1]), seeds=[0, 1]), torch.randn(5, 4))


def test_parameters_that_are_passed_as_they_are_are_no_constants():
    net, x = nn.Linear(4, 4), torch.randn(3, 5, 4)
    hfta.stack_params([net])
    run = hfta.vmap(hfta.functional(net), (None, None, 0))
    assert torch.equal(run(dict(net.named_parameters()), {}, x)[0], net(x))


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_a_write_into_a_parameter_that_trains_is_refused_by_its_line(count, chunk_size):
    models = [Applies(lambda fc, x: fc(x) * fc.weight.mul_(2).sum()) for _ in range(count)]
    step = hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1), batch_dims=None, chunk_size=chunk_size)
    with pytest.raises(hfta.errors.TraceError, match=r"test_as_alone.*writes a parameter in place"):
        step(step.init(*hfta.stack_params(models), seeds=range(count)), torch.randn(5, 4, dtype=torch.float64))
