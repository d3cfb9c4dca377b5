"""Recurrent layers as modules: settings, lowerings, dropout, packed sequences, precisions, training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import hfta_func as hfta
from hfta_func import random
from hfta_func._kernels import native
from hfta_func._kernels import recurrent as kernels
from ways import assert_as_alone, start

# What PyTorch has to say about a projection on the CPU is not this package's concern.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

M, T, N, I, H = 3, 5, 4, 3, 6  # noqa: E741
LENGTHS = torch.tensor([5, 3, 3, 1])

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": functools.partial(nn.RNN, nonlinearity="relu")}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.RNNCell}
CELLS["rnn_relu"] = functools.partial(nn.RNNCell, nonlinearity="relu")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep, both directions": {"num_layers": 2, "bidirectional": True},
    "batch first, no biases": {"batch_first": True, "bias": False, "num_layers": 2},
}
ROWS = [*itertools.product(KINDS, SETTINGS), ("lstm", "projected"), ("lstm", "projected, deep, both directions")]
SETTINGS["projected"] = {"proj_size": 2}
SETTINGS["projected, deep, both directions"] = {"proj_size": 2, "num_layers": 2, "bidirectional": True}


def layers(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> list[nn.Module]:
    return [KINDS[kind](I, H, **settings).to(dtype) for _ in range(M)]


def array_of(modules: list[nn.Module]) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """What one member computes, and the members' parameters."""
    params, _ = hfta.stack_params(modules)
    apply = hfta.functional(modules[0])

    def member(params: dict[str, Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        output = apply(params, {}, *args, **kwargs)[0]
        return optree.tree_leaves(output)

    return member, {path: param.detach().requires_grad_() for path, param in params.items()}


def loop(member: Callable[..., Any], params: dict[str, Tensor], *args: Tensor) -> list[Tensor]:
    # A single member would run by the program, too.
    with hfta.rules.override(recurrent="loop"):
        members = [member({path: p[i] for path, p in params.items()}, *(x[i] for x in args)) for i in range(M)]
    return [torch.stack(column) for column in zip(*members, strict=True)]


def gradients(outputs: list[Tensor], wanted: list[Tensor]) -> tuple[Tensor, ...]:
    weights = [torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape) for y in outputs]
    total = sum(((y * y * w).sum().double() for y, w in zip(outputs, weights, strict=True)), torch.zeros(()))
    return torch.autograd.grad(total, wanted)


def compare(member: Callable[..., Any], params: dict[str, Tensor], *args: Tensor, tolerance: float = 1e-11) -> None:
    """Outputs and gradients of the array are those of the members one by one."""
    args = tuple(x.detach().requires_grad_() for x in args)
    wanted = [*args, *params.values()]
    got, expected = hfta.vmap(member)(params, *args), loop(member, params, *args)
    assert [y.dtype for y in got] == [y.dtype for y in expected]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    found = gradients(got, wanted), gradients(expected, wanted)
    torch.testing.assert_close(*found, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("lowering", ["batched", "loop", "batched, without a compiler"])
@pytest.mark.parametrize(("kind", "setting"), ROWS)
def test_modules(kind: str, setting: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering, _, without = lowering.partition(", ")
    if without:
        monkeypatch.setattr(kernels, "program", lambda dtype: None)
    member, params = array_of(layers(kind, **SETTINGS[setting]))
    with hfta.rules.override(recurrent=lowering):
        compare(member, params, torch.randn(M, T, N, I).double())


@pytest.mark.parametrize("kind", KINDS)
def test_states_given_and_single_samples(kind: str) -> None:
    member, params = array_of(layers(kind, num_layers=2))

    def from_states(params: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        return member(params, x, (h, c) if kind == "lstm" else h + 0 * c)

    compare(from_states, params, torch.randn(M, T, N, I).double(), *torch.randn(2, M, 2, N, H).double())
    compare(from_states, params, torch.randn(M, T, I).double(), *torch.randn(2, M, 2, H).double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, N, I), (T, 1, I), (1, 1, I), (T, 0, I)])
def test_extreme_shapes(kind: str, shape: tuple[int, ...]) -> None:
    member, params = array_of(layers(kind, bidirectional=True))
    compare(member, params, torch.randn(M, *shape).double())


def packed_member(module: nn.Module, lengths: Tensor, **options: Any) -> Callable[..., Any]:
    apply = hfta.functional(module)

    def member(params: dict[str, Tensor], x: Tensor, key: Tensor | None = None) -> list[Tensor]:
        packed = pack_padded_sequence(x, lengths, **options)
        (output, state), _ = apply(params, {}, packed, key=key)
        assert isinstance(output, PackedSequence)
        padded, _ = pad_packed_sequence(output, options.get("batch_first", False), padding_value=0.5)
        return [padded, *(state if isinstance(state, tuple) else (state,))]

    return member


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("lowering", ["batched", "loop"])
@pytest.mark.parametrize(("kind", "setting"), ROWS)
def test_packed_sequences(kind: str, setting: str, lowering: str) -> None:
    modules = layers(kind, **SETTINGS[setting])
    batch_first = {"batch_first": True} if SETTINGS[setting].get("batch_first") else {}
    _, params = array_of(modules)
    x = torch.randn(M, *((N, T, I) if batch_first else (T, N, I))).double()
    with hfta.rules.override(recurrent=lowering):
        compare(packed_member(modules[0], LENGTHS, **batch_first), params, x)
        unsorted = packed_member(modules[0], LENGTHS[[2, 0, 3, 1]], enforce_sorted=False, **batch_first)
        compare(unsorted, params, x)


def test_many_gradients_of_packed_data() -> None:
    x = torch.randn(T, N, 2).double().requires_grad_()
    data, sizes = pack_padded_sequence(x, LENGTHS)[:2]
    along = torch.randn(M, *data.shape).double()
    grads = hfta.vmap(lambda v: torch.autograd.grad(data, x, v, retain_graph=True)[0])(along)
    expected = [pad_packed_sequence(PackedSequence(v, sizes))[0] for v in along]
    torch.testing.assert_close(grads, torch.stack(expected), rtol=0, atol=0)


def test_lengths_per_member_are_refused() -> None:
    def packed(x: Tensor, lengths: Tensor) -> Tensor:
        return torch._VF._pack_padded_sequence(x, lengths, False)[0]

    with pytest.raises(hfta.errors.TraceError, match="each member has its own lengths of packed sequences"):
        hfta.vmap(packed)(torch.randn(M, T, N, I), LENGTHS.expand(M, N))


class Deep(nn.Module):
    """A recurrent layer with dropout, as a function of its input alone."""

    def __init__(self, kind: str, p: float = 0.5, **settings: Any):
        super().__init__()
        self.layer = KINDS[kind](I, H, num_layers=3, dropout=p, **settings)

    def forward(self, x: Any) -> list[Tensor]:
        output, state = self.layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return [output.data if isinstance(output, PackedSequence) else output, *states]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_the_members_own(kind: str, bidirectional: bool, packed: bool) -> None:
    modules = [Deep(kind, bidirectional=bidirectional).double() for _ in range(M)]
    params, _ = hfta.stack_params(modules)
    apply, keys, x = hfta.functional(modules[0]), random.keys([1, 2, 1]), torch.randn(M, T, N, I).double()
    x[2] = x[0]
    params = {path: torch.stack((p[0], p[1], p[0])) for path, p in params.items()}

    def member(params: dict[str, Tensor], key: Tensor, x: Tensor) -> list[Tensor]:
        return apply(params, {}, pack_padded_sequence(x, LENGTHS) if packed else x, key=key)[0]

    got = hfta.vmap(member)(params, keys, x)
    for i in range(M):
        own = {path: p[i : i + 1] for path, p in params.items()}
        alone = hfta.vmap(member)(own, keys[i : i + 1], x[i : i + 1])
        torch.testing.assert_close([y[0] for y in alone], [y[i] for y in got], rtol=1e-11, atol=1e-11)
        solo = member({path: p[i] for path, p in params.items()}, keys[i], x[i])
        torch.testing.assert_close(solo, [y[i] for y in got], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close([y[0] for y in got], [y[2] for y in got], rtol=1e-11, atol=1e-11)
    other = hfta.vmap(member)(params, random.keys([5, 6, 7]), x)
    assert (other[0] - got[0]).abs().max() > 1e-3


def test_dropout_between_layers_has_rate_and_scale_of_torch() -> None:
    # With weights that pass on what they get, outputs show the masks of both gaps.
    module = nn.RNN(64, 64, num_layers=3, dropout=0.25, nonlinearity="relu", bias=False)
    for path, param in module.named_parameters():
        nn.init.eye_(param) if "weight_ih" in path else nn.init.zeros_(param)
    module.requires_grad_(False)
    params, _ = hfta.stack_params([module] * M)
    apply = hfta.functional(module)
    keys, x = random.keys([1, 2, 3]), torch.ones(20, 10, 64)
    output = hfta.vmap(lambda p, key: apply(p, {}, x, key=key)[0][0])(params, keys)
    assert output.unique().tolist() == pytest.approx([0.0, 0.75**-2])
    rates = (output > 0).double().mean((1, 2, 3))
    torch.testing.assert_close(rates, torch.full((M,), 0.75**2).double(), atol=0.02, rtol=0)
    for i in range(M):
        solo = apply({path: p[i] for path, p in params.items()}, {}, x, key=keys[i])[0][0]
        assert torch.equal(solo > 0, output[i] > 0)


def test_dropout_without_a_key_is_refused() -> None:
    member, params = array_of([Deep("gru") for _ in range(M)])
    with pytest.raises(hfta.errors.RandomnessError, match=r"torch\.gru draws the dropout between its layers"):
        hfta.vmap(member)(params, torch.randn(M, T, N, I))


def total(outputs: list[Tensor]) -> Tensor:
    return sum((y.sin().sum() for y in outputs), torch.zeros(()).double())


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ["plain", "deep, both directions"])
def test_second_derivatives(kind: str, setting: str) -> None:
    """Forward over reverse, reverse over reverse, and autograd twice agree with autograd on the members."""
    if kind == "rnn_relu":
        torch.manual_seed(5)
    member, params = array_of(layers(kind, **SETTINGS[setting]))
    x = torch.randn(M, T, N, I).double()
    along = {path: torch.randn_like(p) for path, p in params.items()}

    def slope(run: Callable[..., Any]) -> Tensor:
        grads = torch.autograd.grad(total(run(params, x)), list(params.values()), create_graph=True)
        return sum((g * v).sum() for g, v in zip(grads, along.values(), strict=True))  # type: ignore[return-value]

    expected = torch.autograd.grad(slope(functools.partial(loop, member)), list(params.values()))
    array = hfta.vmap(member)
    twice = torch.autograd.grad(slope(array), list(params.values()))
    torch.testing.assert_close(twice, expected, rtol=1e-10, atol=1e-10)
    grad = torch.func.grad(lambda p: total(array(p, x)))
    plain = {path: p.detach() for path, p in params.items()}
    forward = torch.func.jvp(grad, (plain,), (along,))[1]
    torch.testing.assert_close(tuple(forward.values()), expected, rtol=1e-10, atol=1e-10)
    inner = torch.func.grad(lambda p: sum((grad(p)[path] * along[path]).sum() for path in p))(plain)
    torch.testing.assert_close(tuple(inner.values()), expected, rtol=1e-10, atol=1e-10)


def test_jvp_of_the_layer_with_a_fused_kernel() -> None:
    member, params = array_of(layers("lstm", torch.float32, num_layers=2))
    x, along = torch.randn(2, M, T, N, I)
    tangents = torch.func.jvp(lambda x: hfta.vmap(member)(params, x), (x,), (along,))[1]
    double = {path: p.detach().double() for path, p in params.items()}
    exact = torch.func.jvp(lambda x: hfta.vmap(member)(double, x), (x.double(),), (along.double(),))[1]
    torch.testing.assert_close(tangents, [y.float() for y in exact], rtol=1e-4, atol=1e-5)


by_program = pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler")


@by_program
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("steps", "batch", "ins", "size"),
    # Sizes that fill vectors, or do not; several parts of a batch, and several spans of steps.
    [(5, 4, 3, 6), (9, 40, 12, 50), (2, 33, 1, 17), (1, 2, 40, 32), (150, 1, 2, 20), (4, 70, 5, 16), (7, 19, 33, 8)],
)
def test_programs_compute_what_pytorch_does(kind: str, steps: int, batch: int, ins: int, size: int) -> None:
    modules = [KINDS[kind](ins, size, bidirectional=True, batch_first=True).double() for _ in range(M)]
    member, params = array_of(modules)

    def from_states(params: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        return member(params, x, (h, c) if kind == "lstm" else h + 0 * c)

    x, states = torch.randn(M, batch, steps, ins).double(), torch.randn(2, M, 2, batch, size).double()
    compare(from_states, params, x, *states, tolerance=1e-12)
    single = {path: p.detach().float() for path, p in params.items()}
    got, exact = hfta.vmap(member)(single, x.float()), loop(member, params, x)
    torch.testing.assert_close(got, [y.float() for y in exact], rtol=1e-5, atol=1e-5)


@by_program
@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_neither_on_other_members_nor_on_threads(kind: str, set_threads: Any) -> None:
    member, params = array_of(layers(kind, torch.float32, num_layers=2, bidirectional=True))
    x = torch.randn(M, T, 50, I)

    def passes(start: int) -> list[Tensor]:
        part = {path: p.detach()[start:].requires_grad_() for path, p in params.items()}
        outputs = hfta.vmap(member)(part, x[start:])
        # The sum of one member does not depend on the others.
        grads = torch.autograd.grad(sum((y.sum() for y in outputs), torch.zeros(())), list(part.values()))
        return [*outputs, *grads]

    set_threads(1)
    expected = passes(0)
    set_threads(3)
    assert all(map(torch.equal, passes(0), expected))
    assert all(torch.equal(y[0], z[-1]) for y, z in zip(passes(M - 1), expected, strict=True))


@by_program
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_and_huge_numbers_and_none(kind: str, dtype: torch.dtype) -> None:
    """Results are exact relative to small ones, gates saturate, and what is no number stays in its member and sample."""
    member, params = array_of(layers(kind, dtype, bias=False))
    params = {path: p.detach() for path, p in params.items()}
    scale = torch.tensor([1e-10, 1e-3, 1e5], dtype=dtype)
    x = torch.randn(M, 1, N, I, dtype=dtype) * scale[:, None, None, None]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13

    def check() -> None:
        for got, expected in zip(hfta.vmap(member)(params, x), loop(member, params, x), strict=True):
            for i, size in enumerate(scale.clamp(max=1).tolist()):
                absolute = tolerance * size
                torch.testing.assert_close(got[i], expected[i], rtol=tolerance, atol=absolute, equal_nan=True)

    check()
    for bad in (float("nan"), float("inf")):
        x[1, 0, 2, 0] = bad
        check()


@pytest.mark.parametrize("kind", KINDS)
def test_cells_and_their_second_derivatives(kind: str) -> None:
    member, params = array_of([CELLS[kind](I, H).double() for _ in range(M)])
    leaves = [torch.randn(M, N, size).double().requires_grad_() for size in (I, *(H,) * (1 + (kind == "lstm")))]

    def twice(params: dict[str, Tensor], x: Tensor, *states: Tensor) -> list[Tensor]:
        for _ in range(2):
            states = tuple(member(params, x, states if kind == "lstm" else states[0]))
        return [*states]

    compare(twice, params, *leaves, tolerance=1e-12)

    wanted = [*params.values(), *leaves]

    def seconds(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(total(run(params, *leaves)), wanted, create_graph=True)
        return torch.autograd.grad(sum((g.cos().sum() for g in grads), torch.zeros(()).double()), wanted)

    found, expected = seconds(hfta.vmap(twice)), seconds(functools.partial(loop, twice))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Reader(nn.Module):
    """A layer over a sequence, cells over the same, and a loss whose gradient has a gradient."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer = KINDS[kind](I, H, num_layers=2, bidirectional=True, batch_first=True)
        self.cell = CELLS[kind](I, H)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            result = self.cell(step, state)
            state = result
        last = result[0] if isinstance(result, tuple) else result
        return self.layer(x)[0].sum(-1).mean(-1) + last.sum(-1)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("num_models", [1, M])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_models_alone(kind: str, num_models: int) -> None:
    """With a penalty on the gradient of the inputs, which takes a second derivative."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().sum()

    x = torch.randn(num_models, N, T, I).double()
    assert_as_alone(lambda: Reader(kind).double(), x, "together", num_models, loss_fn=loss)


def test_what_does_not_fit_is_refused_in_the_words_of_pytorch() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, torch.zeros(N, H + 1)).sum()

    models = [nn.GRUCell(I, H) for _ in range(M)]
    for num_models in (1, M):
        step, state = start(models[:num_models], loss, hfta.sgd(lr=0.01))
        with pytest.raises(RuntimeError, match=r"hidden0 has inconsistent hidden_size: got 7, expected 6"):
            step(state, torch.randn(num_models, N, I))
