"""Autograd functions in models: old and new style, with and without rules, against the loop over models alone."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import WAYS, assert_as_alone

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore::hfta_func.LoopWarning")]

M = 3


class Straight(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class StraightInTwo(Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class StraightGenerated(StraightInTwo):
    generate_vmap_rule = True


class StraightBatched(StraightInTwo):
    @staticmethod
    def vmap(info, in_dims, x):
        return StraightBatched.apply(x), in_dims[0]


# As many models do: a method that was bound before the rules are installed.
straight = Straight.apply


class Reversed(Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Spike(Function):
    """A spike with a surrogate gradient."""

    @staticmethod
    def forward(ctx, x, slope=25.0):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.clone() / (ctx.slope * x.abs() + 1) ** 2, None


class Sparsemax(Function):
    @staticmethod
    def forward(ctx, x, dim=-1):
        ctx.dim = dim
        x = x - x.max(dim=dim, keepdim=True)[0]
        ordered, _ = torch.sort(x, dim=dim, descending=True)
        sums = ordered.cumsum(dim) - 1
        ranks = torch.arange(1, x.shape[dim] + 1, device=x.device, dtype=x.dtype)
        support = ranks * ordered > sums
        size = support.sum(dim=dim).unsqueeze(dim)
        threshold = sums.gather(dim, size - 1) / size.to(x.dtype)
        output = torch.clamp(x - threshold, min=0)
        ctx.save_for_backward(size, output)
        return output

    @staticmethod
    def backward(ctx, grad):
        size, output = ctx.saved_tensors
        grad = grad.clone()
        grad[output == 0] = 0
        mean = (grad.sum(dim=ctx.dim) / size.to(output.dtype).squeeze(ctx.dim)).unsqueeze(ctx.dim)
        return torch.where(output != 0, grad - mean, grad), None


class Linear(Function):
    """The example of PyTorch's documentation, with ``needs_input_grad``."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight, bias)
        output = x.mm(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        grads = [None, None, None]
        if ctx.needs_input_grad[0]:
            grads[0] = grad.mm(weight)
        if ctx.needs_input_grad[1]:
            grads[1] = grad.t().mm(x)
        if bias is not None and ctx.needs_input_grad[2]:
            grads[2] = grad.sum(0)
        return tuple(grads)


class LinearInTwo(Linear):
    @staticmethod
    def forward(x, weight, bias=None):
        output = x.mm(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Several(Function):
    """Several outputs, some of which are no tensors or have no gradient."""

    @staticmethod
    def forward(ctx, x, name, scales):
        ctx.set_materialize_grads(False)
        values, order = x.sort(dim=-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        ctx.scale = scales["a"][0]
        return values * ctx.scale, None, order, name, x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, none, of_order, of_name, of_exp):
        assert none is of_order is of_name is of_exp is None
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter_(-1, order, grad * ctx.scale), None, None


class Materialised(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return 2 * first + 3 * second + 0.5


class Inplace(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad, None


class InplaceInTwo(Inplace):
    @staticmethod
    def forward(x, factor):
        return x.mul_(factor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])


class Reading(Function):
    """Reads values in both passes."""

    @staticmethod
    def forward(ctx, x):
        ctx.largest = x.abs().max().item()
        return torch.from_numpy(x.detach().numpy() / ctx.largest)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.largest if float(grad.sum()) > 0 else grad * 2


class Outer(Function):
    """Applies another function in both passes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Reversed.apply(Straight.apply(x), 2.0) + x

    @staticmethod
    def backward(ctx, grad):
        return Reversed.apply(grad, 0.5) * ctx.saved_tensors[0]


class Cube(Function):
    """Differentiable twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return CubeBackward.apply(grad, ctx.saved_tensors[0])


class CubeBackward(Function):
    @staticmethod
    def forward(ctx, grad, x):
        ctx.save_for_backward(grad, x)
        return grad * 3 * x**2

    @staticmethod
    def backward(ctx, outer):
        grad, x = ctx.saved_tensors
        return outer * 3 * x**2, outer * grad * 6 * x


class Picked(Function):
    """An integer tensor as an argument."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.gather(1, index)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.shape).scatter_add(1, ctx.saved_tensors[0], grad), None


class FixedPoint(Function):
    """A deep equilibrium: its backward pass differentiates a function that it was given."""

    @staticmethod
    def forward(ctx, func, x, *params):
        z = torch.zeros_like(x)
        for _ in range(60):
            z = func(z, x)
        ctx.func = func
        ctx.save_for_backward(z, x, *params)
        return z

    @staticmethod
    def backward(ctx, grad):
        z, x, *params = ctx.saved_tensors
        with torch.enable_grad():
            z, x = z.detach().requires_grad_(), x.detach().requires_grad_()
            y = ctx.func(z, x)
            solved = grad
            for _ in range(60):
                solved = grad + torch.autograd.grad(y, z, solved, retain_graph=True)[0]
            grads = torch.autograd.grad(y, (x, *params), solved)
        return None, *grads


class Adjoint(Function):
    """Euler's method, differentiated backward in time from its last state alone, as ODE solvers do."""

    @staticmethod
    def forward(ctx, func, steps, x, *params):
        for _ in range(steps):
            x = x + func(x) / steps
        ctx.func, ctx.steps = func, steps
        ctx.save_for_backward(x, *params)
        return x

    @staticmethod
    def backward(ctx, grad):
        y, *params = ctx.saved_tensors
        total = [torch.zeros_like(param) for param in params]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                change = ctx.func(y)
                slope, *grads = torch.autograd.grad(change, (y, *params), grad / ctx.steps, allow_unused=True)
            total = [one + more for one, more in zip(total, grads)]
            grad, y = grad + slope, y.detach() - change.detach() / ctx.steps
        return None, None, grad, *total


class Invertible(Function):
    """Reversible residual blocks, which keep no activations and add to ``.grad`` of parameters."""

    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks = blocks
        a, b = x.chunk(2, dim=-1)
        for f, g in blocks:
            a = a + f(b)
            b = b + g(a)
        output = torch.cat([a, b], dim=-1)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors[0].chunk(2, dim=-1)
        for_a, for_b = grad.chunk(2, dim=-1)
        for f, g in reversed(ctx.blocks):
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                change = g(a)
                change.backward(for_b)
            b = b - change.detach()
            for_a = for_a + a.grad
            with torch.enable_grad():
                b = b.detach().requires_grad_()
                change = f(b)
                change.backward(for_a)
            a = a.detach() - change.detach()
            for_b = for_b + b.grad
        return torch.cat([for_a, for_b], dim=-1), None


class Model(nn.Module):
    """A layer, and a function of it."""

    def __init__(self, func, width=4):
        super().__init__()
        self.layer, self.inner, self.func = nn.Linear(3, width), nn.Linear(width, width), func

    def forward(self, x):
        return self.func(self, self.layer(x))


def after(func):
    """Models that apply a function to a layer, in whose result another layer follows."""
    return lambda: Model(lambda model, y: model.inner(func(y)))


def inplace(function):
    def func(model, y):
        z = y * 2
        w = function.apply(z, 3.0)
        assert torch.compiler.is_compiling() or w is z
        return w * y + z

    return lambda: Model(func)


def several(model, y):
    values, nothing, order, name, unused = Several.apply(y, "name", {"a": [2.0]})
    assert nothing is None and name == "name" and not order.requires_grad
    return values * order


def penalised(model, y):
    (slope,) = torch.autograd.grad(Cube.apply(y).sum(), y, create_graph=True)
    return slope.square()


def fixed_point(model, y):
    with torch.no_grad():
        weight = model.inner.weight
    return FixedPoint.apply(lambda z, x: torch.tanh(model.inner(z) / 2 + x), y, *model.inner.parameters()) + weight.sum()


def reversible():
    model = Model(lambda model, y: Invertible.apply(y, model.blocks), width=6)
    model.inner = nn.Identity()
    model.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())]) for _ in range(2))
    return model


MODELS = {
    "old": after(straight),
    "new": after(StraightInTwo.apply),
    "generated": after(StraightGenerated.apply),
    "own vmap": after(StraightBatched.apply),
    "reversal": after(lambda y: Reversed.apply(y, 0.5)),
    "spike": after(Spike.apply),
    "sparsemax": after(lambda y: Sparsemax.apply(y, -1)),
    "linear": lambda: Model(lambda model, y: Linear.apply(y, model.inner.weight, model.inner.bias)),
    "linear, one argument None": lambda: Model(lambda model, y: Linear.apply(y, model.inner.weight)),
    "linear, named": lambda: Model(lambda model, y: LinearInTwo.apply(y, weight=model.inner.weight)),
    "of the batch": lambda: BatchModel(),
    "several": lambda: Model(several),
    "materialised": after(lambda y: Materialised.apply(y)[0]),
    "in place": inplace(Inplace),
    "in place, new": inplace(InplaceInTwo),
    "reading": after(Reading.apply),
    "nested": after(Outer.apply),
    "twice": lambda: Model(penalised),
    "integers": after(lambda y: Picked.apply(y, (y > 0).long())),
    "fixed point": lambda: Model(fixed_point),
    "adjoint": lambda: Model(lambda model, y: Adjoint.apply(model.inner, 4, y, *model.inner.parameters())),
    "adjoint, method": lambda: Model(lambda model, y: Adjoint.apply(model.inner.forward, 4, y, *model.inner.parameters())),
    "reversible": reversible,
}


class BatchModel(nn.Module):
    """Functions of the batch and of parameters alone."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return LinearInTwo.apply(Spike.apply(x), Cube.apply(self.weight), self.bias) + Outer.apply(x).sum()


ONLY_EAGER = {"reading", "twice", "fixed point", "adjoint", "adjoint, method", "reversible"}
NEEDS_GRADIENTS = {"twice"}


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_as_alone(name, way, shared):
    if way == "compiled" and name in ONLY_EAGER or way in WAYS[4:] and name in NEEDS_GRADIENTS:
        pytest.skip("not to be had")
    batch = torch.randn(5, 3) if shared else torch.randn(M, 5, 3)
    assert_as_alone(MODELS[name], batch, way, M, shared)
