"""PyTorch's operators of functions in models, FlexAttention, nested and sparse tensors, and what compiled steps refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import WAYS, assert_as_alone, loss

pytestmark = [
    pytest.mark.usefixtures("one_thread", "double"),
    pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning"),
    # PyTorch's own, of models alone.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


class Model(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, func: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.layer, self.out, self.func = nn.Linear(4, 4), nn.Linear(4, 2), func
        self.dropout = nn.Dropout(0.5)
        self.adjacency = torch.eye(6).to_sparse()
        self.jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.full((3, 4), 2.0)], layout=torch.jagged)

    def forward(self, x: Tensor) -> Tensor:
        return self.func(self, x)


def of_cond(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    branches = (lambda y, z: (y.sin(), {"z": z + 1}), lambda y, z: (y.cos() * model.out.bias.sum(), {"z": -z}))
    y, other = torch.cond(y.sum() > 0, *branches, (y, x))
    return model.out(y + other["z"])


def of_cond_of_a_tree(model: Any, x: Tensor) -> Tensor:
    branches = (lambda tree, z: tree["y"][0].sin() + z, lambda tree, z: tree["y"][0] * z)
    return model.out(torch.cond(x.sum() > 0, *branches, ({"y": [model.layer(x)]}, x[:, :4])))


def of_while_loop(model: Any, x: Tensor) -> Tensor:
    count, y = while_loop(
        lambda count, y: y.square().sum() < 60,
        lambda count, y: (count + 1, y * 1.3 + x),
        (x.new_zeros(()), model.layer(x)),
    )
    return model.out(y) + count


def of_while_loop_over_zeros(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x).detach()
    _, total = while_loop(
        lambda i, total: i < 3, lambda i, total: (i + 1, total * 0.5 + y), (torch.tensor(0), torch.zeros(6, 4))
    )
    return model.out(total)


def of_while_loop_with_a_tree(model: Any, x: Tensor) -> Tensor:
    y = model.layer(x)
    _, tree = while_loop(
        lambda count, tree: tree["y"][0].square().sum() < 60,
        lambda count, tree: (count + 1, {"y": [tree["y"][0] * 1.3 + x]}),
        (x.new_zeros(()), {"y": [y]}),
    )
    return model.out(tree["y"][0])


def of_map(model: Any, x: Tensor) -> Tensor:
    rows, other = map_rows(lambda row, weight: (torch.tanh(row @ weight), row * 2), x, model.layer.weight)
    return model.out(rows + other)


def of_scan(model: Any, x: Tensor) -> Tensor:
    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(model.layer(row) + carry)
        return new, new * 2

    carry, outputs = scan(combine, torch.zeros(4), x)
    return model.out(outputs) + carry.sum()


def of_scan_backwards(model: Any, x: Tensor) -> Tensor:
    def combine(carry: Any, row: Any) -> tuple[Any, Any]:
        new = torch.tanh(model.layer(row["x"]) + carry["y"] + row["z"])
        return {"y": new}, [new * 2, new.sum()]

    carry, (outputs, sums) = scan(combine, {"y": x[0] * 2}, {"x": x, "z": x * 0.5}, reverse=True)
    return model.out(outputs) + carry["y"].sum() + sums[:, None]


def of_associative_scan(model: Any, x: Tensor) -> Tensor:
    return model.out(associative_scan(torch.add, model.layer(x), dim=0, combine_mode="generic"))


FLOWS = [
    *(of_cond, of_cond_of_a_tree, of_while_loop, of_while_loop_over_zeros, of_while_loop_with_a_tree),
    *(of_map, of_scan, of_scan_backwards, of_associative_scan),
]
# From PyTorch 2.14 on.


def rows() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(3, 6, 4)


# Alone, PyTorch compiles, which takes longer than the array.
@pytest.mark.sampled(every=7)
@pytest.mark.exhaustive(unless="(while_loop|map)-together-3|evaluated-3")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
@pytest.mark.parametrize("flow", FLOWS)
def test_flows_are_those_alone(flow: Any, way: str, count: int) -> None:
    assert_as_alone(lambda: Model(flow), rows(), way, count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("flow", [flow for flow in FLOWS if "while" not in flow.__name__])
def test_flows_in_one_program(flow: Any, count: int) -> None:
    assert_as_alone(lambda: Model(flow), rows(), "compiled", count)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_a_side_without_a_gradient_has_one_of_zero(count: int, options: Any) -> None:
    model = Model(lambda model, x: torch.cond(x.sum() > 0, model.layer, lambda x: x * 2, (x,)))
    step = hfta.make_train_step(model, loss, hfta.sgd(lr=0.1), **options)
    start, batch = step.init(*hfta.stack_params([model] * count), seeds=range(count)), -rows()[:count].abs()
    state, metrics = step(start, batch)
    assert_trees_close(state.params, start.params, 0)
    torch.testing.assert_close(metrics["loss"], torch.stack([loss(lambda x: x * 2, row) for row in batch]))


class Roots(nn.Module):
    """Takes roots until they are small, after which the next one has an infinite gradient or none."""

    def __init__(self, loop: Callable[..., Any], start: float):
        super().__init__()
        self.start, self.loop = nn.Parameter(torch.tensor([start])), loop

    def forward(self, x: Tensor) -> Tensor:
        count, y = self.loop(
            lambda count, y: (y > 1.5).all(), lambda count, y: (count + 1, (y - 1).sqrt() * x), (0, self.start * 1)
        )
        return y * count


def in_python(going_on: Any, body: Any, carried: Any) -> Any:
    while going_on(*carried):
        carried = body(*carried)
    return carried


@pytest.mark.parametrize("starts", [[9.0], [100.0, 9.0, 2.0, 9.0], [1.5, 40.0]], ids=str)
def test_members_that_are_done_wait_for_the_others(starts: list[float]) -> None:
    arrays, alone = ([Roots(loop, start) for start in starts] for loop in (while_loop, in_python))
    step = hfta.make_train_step(arrays[0], loss, hfta.sgd(lr=0.1), batch_dims=None)
    state, metrics = step(step.init(*hfta.stack_params(arrays), seeds=range(len(starts))), torch.ones(1))
    expected = [loss(model, torch.ones(1)) for model in alone]
    # PyTorch gives a loop without iterations the gradient of one, so the loop is one of Python.
    grads = [torch.autograd.grad(value, model.start)[0] for value, model in zip(expected, alone, strict=True)]
    assert_trees_close({"loss": metrics["loss"]}, {"loss": torch.stack(expected).detach()}, 1e-12)
    updated = torch.tensor(starts)[:, None] - 0.1 * torch.stack(grads)
    assert_trees_close(state.params, {"start": updated}, 1e-12)


def test_a_loop_keeps_the_shapes_of_what_it_carries() -> None:
    model = Model(lambda model, x: while_loop(lambda y: y.sum() < 9, lambda y: (y.repeat(2, 1).exp(),), (x,))[0])
    with pytest.raises(
        hfta.errors.TraceError, match=r"in the model \(Model\).*given torch.float64 \[6, 4\] and returns .*\[12, 4\]"
    ):
        hfta.make_eval_step(model, loss, batch_dims=0)(hfta.stack_params([model] * 3), rows())


def noisy(flow: str) -> Callable[[Any, Tensor], Tensor]:
    def func(model: Any, x: Tensor) -> Tensor:
        y = model.layer(x)
        if flow == "cond":
            (y,) = torch.cond(y.sum() > 0, lambda y: (model.dropout(model.dropout(y)),), lambda y: (y * 2,), (y,))
        elif flow == "while_loop":
            (y,) = while_loop(lambda y: y.square().sum() < 60, lambda y: (model.dropout(y) * 1.5 + x,), (y,))
        else:
            _, y = scan(lambda carry, row: (carry + 1, model.dropout(row)), torch.zeros(()), y)
        return model.out(model.dropout(y))

    return func


@pytest.mark.parametrize("flow", ["cond", "while_loop", "scan"])
def test_noise_is_that_of_an_array_of_one(flow: str) -> None:
    step = hfta.make_train_step(Model(noisy(flow)), loss, hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(lambda: Model(noisy(flow)), [0, 1, 2]), seeds=[0, 1, 2])
    batch = rows() * torch.tensor([0.3, 1.0, 4.0])[:, None, None]
    together = step(state, batch)[0].params
    for i in range(3):
        alone = step(hfta.take(state, [i]), batch[[i]])[0].params
        assert_trees_close(hfta.take(together, [i]), alone, 1e-12, f"member {i}")
    parted = hfta.make_train_step(Model(noisy(flow)), loss, hfta.sgd(lr=0.1), chunk_size=1)(state, batch)[0].params
    assert_trees_close(together, parted, 1e-12)


def test_operators_compile_as_before_outside_of_arrays() -> None:
    def body(y: Tensor) -> Tensor:
        return y + (1 if torch.compiler.is_compiling() else 2)

    hfta.make_eval_step(Model(of_map), loss, batch_dims=0)(hfta.stack_params([Model(of_map)] * 2), rows()[:2])
    assert torch.equal(torch.cond(torch.tensor(True), body, body, (torch.ones(2),)), torch.full((2,), 2.0))


def attends(*options: str) -> Callable[..., Tensor]:
    shared = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 6, 6, device="cpu")

    def func(model: Any, x: Tensor) -> Tensor:
        heads = model.layer(x).view(1, 6, 2, 2).transpose(1, 2)
        bias = model.out.bias
        mod = (lambda score, b, h, i, j: score + bias[h] * (i - j)) if "score" in options else None
        mask = shared if "shared mask" in options else None
        if "made mask" in options:
            mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < 2, 1, 1, 6, 6, device="cpu")
        return flex_attention(heads, heads * 2, heads, score_mod=mod, block_mask=mask)

    return func


ATTENTION = [("score",), ("shared mask",), ("score", "made mask"), ()]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["evaluated", "ensemble", "mapped"])
@pytest.mark.parametrize("options", ATTENTION, ids=" and ".join)
@pytest.mark.sampled(every=12)
def test_flex_attention(options: tuple[str, ...], way: str, count: int) -> None:
    assert_as_alone(lambda: Model(attends(*options)), rows(), way, count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ATTENTION, ids=" and ".join)
def test_flex_attention_in_one_program(options: tuple[str, ...]) -> None:
    models = [Model(attends(*options)) for _ in range(3)]
    evaluate = hfta.make_eval_step(models[0], loss, batch_dims=0)
    torch._dynamo.reset()
    found = torch.compile(evaluate, fullgraph=True, backend="aot_eager")(hfta.stack_params(models), rows())["loss"]
    with torch.no_grad():
        expected = torch.stack([loss(model, x) for model, x in zip(models, rows(), strict=True)])
    assert_trees_close({"loss": found}, {"loss": expected}, 1e-12)


def test_flex_attention_has_gradients_where_it_has_them_alone() -> None:
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        assert_as_alone(lambda: Model(attends()), rows(), "together")


def of_jagged_constant(model: Any, x: Tensor) -> Tensor:
    return model.out(model.layer(model.jagged)).values() * x.sum()


def of_jagged(model: Any, x: Tensor) -> Tensor:
    return model.out(model.layer(x).tanh()).values()


def made_jagged(model: Any, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(model.layer(x), torch.tensor([0, 2, 6])).tanh().values()


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.full((3, 4), 2.0)], layout=torch.jagged)


NESTED = {
    "a batch": (of_jagged, ragged, True),
    "a constant": (of_jagged_constant, rows, False),
    "made": (made_jagged, rows, False),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_need_members_one_by_one(name: str, count: int) -> None:
    func, batch, shared = NESTED[name]
    for way in ("together", "evaluated", "ensemble"):
        assert_as_alone(lambda: Model(func), batch(), way, count, shared)
    assert_as_alone(lambda: Model(func), batch(), "one by one", count, shared)


def of_sparse(model: Any, x: Tensor) -> Tensor:
    return model.out(torch.sparse.mm(model.adjacency, model.layer(x))) + (model.adjacency.to_dense() @ x)[:, :2]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
def test_sparse_constants(way: str, count: int) -> None:
    assert_as_alone(lambda: Model(of_sparse), rows(), way, count)


class Attention(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x, padding = x.unflatten(0, (2, 3)), torch.tensor([[False, False, True], [False, False, False]])
        if self.kind == "values":
            padding = (x[..., 0] > 1) & (torch.arange(3) > 0)
        if self.kind == "attention":
            return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return torch.where(padding[..., None], 0, self.encoder(x, src_key_padding_mask=padding))


class Wrapped(nn.Module):
    """A model one of whose layers torch.compile has wrapped."""

    def __init__(self):
        super().__init__()
        self.layer = torch.compile(nn.BatchNorm1d(4), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.layer.weight.sum()


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "make", [*(lambda kind=kind: Attention(kind) for kind in ("attention", "encoder", "values")), Wrapped]
)
def test_padding_and_wrapped_modules_in_one_program(make: Any, count: int) -> None:
    assert_as_alone(make, rows(), "compiled", count)


@pytest.mark.parametrize("way", ["together", "one by one", "ensemble", "mapped"])
def test_wrapped_modules(way: str) -> None:
    assert_as_alone(Wrapped, rows(), way)


def test_a_padding_mask_of_another_shape() -> None:
    def func(model: Any, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, 3))
        mask = torch.zeros(2, 2, dtype=torch.bool)
        return F.multi_head_attention_forward(
            *(x, x, x, 4, 2, None, None, None, None, False, 0.0, model.layer.weight, model.layer.bias),
            key_padding_mask=mask, use_separate_proj_weight=True, q_proj_weight=model.layer.weight,
            k_proj_weight=model.layer.weight, v_proj_weight=model.layer.weight,
        )[0]  # fmt: skip

    with pytest.raises(AssertionError, match=r"expected a key_padding_mask of \[3, 2\], but got \[2, 2\]"):
        assert_as_alone(lambda: Model(func), rows(), "together")


def asks(model: Any, x: Tensor) -> Tensor:
    return model.layer(x) * (2 if model.layer.weight.requires_grad else 3) * (5 if x.requires_grad else 7)


def frozen() -> nn.Module:
    model = Model(asks)
    model.layer.weight.requires_grad = False
    return model


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["together", "one by one", "in pairs", "evaluated"])
@pytest.mark.parametrize("make", [lambda: Model(asks), frozen], ids=["trained", "frozen"])
def test_parameters_require_grad_as_alone(make: Any, way: str, count: int) -> None:
    assert_as_alone(make, rows(), way, count)


REFUSED = {
    "while_loop": (of_while_loop, lambda x: x, "calls torch.while_loop, .*loop a fixed number of times and mask"),
    "to": (lambda model, x: model.layer.to(x.dtype)(x), lambda x: x, r"assigns to .data.*layer.weight.to\(x.dtype\)"),
    "sparse": (of_sparse, lambda x: x, "torch.compile does not support sparse Tensors"),
    "jagged": (of_jagged_constant, lambda x: x, "computes with a nested tensor"),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(every=4)
def test_what_one_program_cannot_hold_is_refused(name: str, count: int) -> None:
    func, contained, message = REFUSED[name]

    def measured(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch["inner"]["x"] if isinstance(batch, dict) else batch)

    evaluate = hfta.make_eval_step(Model(func), measured, batch_dims=0)
    stacked = hfta.stack_params([Model(func) for _ in range(count)])
    evaluate(stacked, contained(rows()[:count])) if name != "jagged" else None
    torch._dynamo.reset()
    with warnings.catch_warnings(), pytest.raises(Exception, match=message):
        warnings.simplefilter("ignore")
        torch.compile(evaluate, fullgraph=True, backend="aot_eager")(stacked, contained(rows()[:count]))
