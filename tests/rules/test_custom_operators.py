"""Operators of ``torch.library`` with derivatives, with and without batching rules, against the loop over models alone."""

import functools

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from test_autograd_functions import Model
from ways import WAYS, assert_as_alone

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")]


@torch.library.custom_op("hfta_test_custom::cube", mutates_args=())
def cube(x: Tensor, factor: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3 * factor)


@torch.library.custom_op("hfta_test_custom::batched_cube", mutates_args=())
def batched_cube(x: Tensor, factor: float) -> Tensor:
    return x**3 * factor


@torch.library.triton_op("hfta_test_custom::traced_cube", mutates_args=())
def traced_cube(x: Tensor, factor: float) -> Tensor:
    return x**3 * factor


@torch.library.custom_op("hfta_test_custom::products", mutates_args=())
def products(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x @ weight, (x @ weight).relu()


@torch.library.custom_op("hfta_test_custom::scale_", mutates_args=("x",))
def scale_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def keep_cube(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def cube_backward(ctx, grad):
    return grad * 3 * ctx.saved_tensors[0] ** 2 * ctx.factor, None


for operator in (cube, batched_cube, traced_cube):
    operator.register_fake(lambda x, factor: torch.empty_like(x))
    operator.register_autograd(cube_backward, setup_context=keep_cube)


def keep_products(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def products_backward(ctx, grad, of_relu):
    x, weight, y = ctx.saved_tensors
    grad = grad + of_relu * (y > 0)
    return grad @ weight.t(), x.t() @ grad


products.register_fake(lambda x, weight: (x @ weight, x @ weight))
products.register_autograd(products_backward, setup_context=keep_products)


class Sine(Function):
    """The derivative of an operator, written as libraries write it that register kernels themselves."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.hfta_test_custom.sine(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


library = torch.library.Library("hfta_test_custom", "FRAGMENT")
library.define("sine(Tensor x) -> Tensor")
library.impl("sine", torch.sin, "CompositeExplicitAutograd")
library.impl("sine", Sine.apply, "Autograd")


def scaled(model, y):
    z = y.detach().clone()
    scale_(z, 2.0)
    return y * z


OPERATORS = {
    "without a rule": lambda model, y: cube(y, 2.0),
    "with a rule": lambda model, y: batched_cube(y, 2.0),
    "of operators": lambda model, y: traced_cube(y, 2.0),
    "two results": lambda model, y: sum(products(y, model.inner.weight)),
    "in place": scaled,
    "with kernels": lambda model, y: torch.ops.hfta_test_custom.sine(y),
}


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_act_as_in_a_model_alone(name, shared, way):
    batch = torch.randn(5, 3) if shared else torch.randn(3, 5, 3)
    make = functools.partial(Model, lambda model, y: model.inner(OPERATORS[name](model, y)))
    assert_as_alone(make, batch, way, 3, shared)
