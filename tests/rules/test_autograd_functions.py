"""Autograd functions in models: old and new style, with and without rules, against the loop over models alone."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import WAYS, assert_as_alone, loss, seeded, train_array

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")]

M = 3


class Straight(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class StraightInTwo(Straight):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class StraightGenerated(StraightInTwo):
    generate_vmap_rule = True


class StraightBatched(StraightInTwo):
    @staticmethod
    def vmap(info, in_dims, x):
        return StraightBatched.apply(x), in_dims[0]


# PyTorch 2.14 and later refuse old functions in C++, by a method that was kept before the rules are installed.
KEEPS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def kept(function):
    """The method of a function, bound before the rules are installed, as many models do."""
    return function.apply if KEEPS else lambda *args: function.apply(*args)


straight = kept(Straight)


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


class Padded(Function):
    """Writes, in both passes, into tensors that it makes."""

    @staticmethod
    def forward(ctx, x, order):
        out, sums = torch.zeros(x.shape[0], 6), torch.zeros_like(order, dtype=x.dtype)
        out[:, order + 1] = x
        sums += x.sum(0)
        ctx.save_for_backward(order)
        ctx.width = x.shape[1]
        return out, sums

    @staticmethod
    def backward(ctx, grad, grad_sums):
        (order,) = ctx.saved_tensors
        dx = torch.zeros(len(grad), ctx.width)
        dx[:, :] = grad.index_select(1, order + 1)
        total = torch.zeros_like(order, dtype=grad.dtype).copy_(grad_sums)
        return dx + total, None


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


class Asks(Function):
    """Computes something else for an input that needs a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * (weight.mean() if ctx.needs_input_grad[1] else 2)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight.mean(), (grad * x).sum().expand_as(weight) / weight.numel()


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


def inplace(model, y):
    z = y * 2
    w = Inplace.apply(z, 3.0)
    assert torch.compiler.is_compiling() or w is z
    return w * y + z


def several(model, y):
    values, nothing, order, name, _ = Several.apply(y, "name", {"a": [2.0]})
    assert nothing is None and name == "name" and not order.requires_grad
    return values * order


def penalised(model, y):
    (slope,) = torch.autograd.grad(Cube.apply(y).sum(), y, create_graph=True)
    return slope.square()


def padded(model, y):
    out, sums = Padded.apply(y, torch.tensor([2, 0, 1, 3]))
    return out.sum(1, keepdim=True) * sums + Into.apply(torch.zeros(()), y)


def reversible():
    model = Model(lambda model, y: Invertible.apply(y, model.blocks), width=6)
    model.inner = nn.Identity()
    model.blocks = nn.ModuleList(
        nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())]) for _ in range(2)
    )
    return model


class BatchModel(nn.Module):
    """Functions of the batch and of parameters alone."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return LinearInTwo.apply(Spike.apply(x), Cube.apply(self.weight), self.bias) + Outer.apply(x).sum()


MODELS = {
    "old": after(straight),
    "new": after(StraightInTwo.apply),
    "generated": after(StraightGenerated.apply),
    "own vmap": after(StraightBatched.apply),
    "reversal": after(lambda y: Reversed.apply(y, 0.5)),
    "spike": after(kept(Spike)),
    "linear": lambda: Model(lambda model, y: Linear.apply(y, model.inner.weight, model.inner.bias)),
    "linear, named": lambda: Model(lambda model, y: LinearInTwo.apply(y, weight=model.inner.weight)),
    "of the batch": BatchModel,
    "asking": lambda: Model(lambda model, y: Asks.apply(y, model.inner.weight)),
    "several": lambda: Model(several),
    "materialised": after(lambda y: Materialised.apply(y)[0]),
    "in place": lambda: Model(inplace),
    "reading": after(kept(Reading)),
    "nested": after(kept(Outer)),
    "twice": lambda: Model(penalised),
    "writing": lambda: Model(padded),
    "reversible": reversible,
}


ONLY_EAGER = ("reading", "twice", "reversible")
"""Those that read values, hold a module or call autograd, which graphs cannot."""

CASES = [
    (name, way, shared)
    for shared in (False, True)
    for way in WAYS
    for name in MODELS
    if not (way == "compiled" and (name in ONLY_EAGER or shared))
    # Without gradients, there is no penalty.
    if not (name == "twice" and way in ("evaluated", "ensemble", "mapped"))
    # Members that read values run one by one, in steps and ensembles only.
    if not (name == "reading" and way == "mapped")
]


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.sampled(every=24)
@pytest.mark.parametrize(("name", "way", "shared"), CASES, ids=str)
def test_functions_act_as_in_a_model_alone(name, way, shared):
    assert_as_alone(MODELS[name], torch.randn(5, 3) if shared else torch.randn(M, 5, 3), way, M, shared)


def trained(make, members, **options):
    """Parameters of some members after two steps on one batch."""
    models = seeded(make, members)
    torch.manual_seed(9)
    batches = torch.randn(5, 3).expand(2, 5, 3)
    return train_array(loss, models, members, batches, batch_dims=None, **options)[0].params


OPTIONS = {
    "in pairs": {"chunk_size": 2},
    "rematerialised": {"checkpoint": True},
    "rematerialised layer": {"checkpoint": ["inner"]},
    "less": {"save": "less"},
}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "twice"])
def test_options_that_change_no_results(name, option):
    options = OPTIONS[option]
    if "checkpoint" in options and name == "of the batch":
        options = {"checkpoint": [""]}
    elif "checkpoint" in options and name in ONLY_EAGER:
        # A module that a function gets cannot be one that runs again.
        options = {"checkpoint": ["layer"]}
    assert_trees_close(trained(MODELS[name], [0, 1, 2], **options), trained(MODELS[name], [0, 1, 2]), 1e-10)


class Noisy(Function):
    @staticmethod
    def forward(ctx, x, rate):
        mask = torch.bernoulli(torch.full_like(x, 1 - rate)) + torch.rand(1)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class NoisyGenerated(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, rate):
        mask = torch.bernoulli(torch.full_like(x, 1 - rate))
        return x * mask, mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad, of_mask):
        return grad * ctx.saved_tensors[0], None


class NoisyForSome(Function):
    """Members draw more or less often."""

    @staticmethod
    def forward(ctx, x):
        return x + sum(torch.rand(()) for _ in range(int(x[0, 0] * 100) % 3))

    @staticmethod
    def backward(ctx, grad):
        return grad


NOISY = {
    "old": lambda y: Noisy.apply(y, 0.4),
    "generated": lambda y: NoisyGenerated.apply(y, 0.4)[0],
    "members draw more or less": kept(NoisyForSome),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("option", [None, *OPTIONS])
@pytest.mark.parametrize("name", NOISY)
def test_functions_draw_from_the_key_of_their_member(name, option):
    make = after(lambda y: F.dropout(NOISY[name](F.dropout(y, 0.2)), 0.3))
    together = trained(make, [0, 1, 2], **OPTIONS.get(option, {}))
    alone = [trained(make, [member]) for member in range(3)]
    assert_trees_close(together, {path: torch.cat([one[path] for one in alone]) for path in together}, 1e-10)


def test_autocast_runs_functions_in_lower_precision():
    class Product(Function):
        @staticmethod
        @functools.partial(torch.amp.custom_fwd, device_type="cpu")
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            kinds.append(x.mm(weight).dtype)
            return x.mm(weight)

        @staticmethod
        @functools.partial(torch.amp.custom_bwd, device_type="cpu")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            kinds.append(grad.mm(weight.t()).dtype)
            return grad.mm(weight.t()), x.t().mm(grad)

    kinds = []
    torch.set_default_dtype(torch.float32)
    make = functools.partial(Model, lambda model, y: Product.apply(y, model.inner.weight).float())
    options = {"autocast": torch.bfloat16}
    together = trained(make, [0, 1, 2], **options)
    alone = [trained(make, [member], **options) for member in range(3)]
    assert set(kinds) == {torch.bfloat16}
    assert_trees_close(together, {path: torch.cat([one[path] for one in alone]) for path in together}, 1e-6)


# What is warned of and refused.


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        return x.add_(y.mean())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["reversible", "noisy"])
def test_what_graphs_cannot_hold_is_refused(name):
    make = after(NOISY["old"]) if name == "noisy" else MODELS[name]
    with pytest.raises(Exception, match=r"autograd function \w+ cannot be compiled|call Tensor.requires_grad_"):
        trained(make, [0, 1], compiled=True)


def test_new_functions_under_derivatives():
    run = hfta.vmap(torch.func.grad(lambda x: StraightInTwo.apply(x * x).sum()))
    x = torch.randn(3, 4)
    assert_trees_close([run(x)], [6 * x], 1e-12)
    assert_trees_close([hfta.vmap(hfta.vmap(straight))(x)], [x.round()], 0)


def test_uninstall_restores_pytorch():
    def method():
        method = vars(Function)["apply"]
        code = getattr(method, "__func__", None)
        return method, code and (code.__code__, code.__kwdefaults__)

    hfta.rules.uninstall()
    before = method()
    hfta.rules.install()
    assert method() != before
    hfta.rules.uninstall()
    try:
        assert method() == before
        with pytest.raises(RuntimeError, match="must override the setup_context"):
            torch.func.vmap(straight)(torch.ones(2))
    finally:
        hfta.rules.install()
    assert torch.equal(torch.func.vmap(straight)(torch.ones(2)), torch.ones(2))
