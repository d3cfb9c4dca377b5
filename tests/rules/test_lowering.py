"""The choice of lowerings: every one computes the same, overrides and explanations, and rules that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import hfta_func as hfta
from hfta_func._kernels import native
from hfta_func.rules import _choice, _lowering
from rule_cases import CONV, RULE_CASES, RuleCase
from rule_checks import check_against_loop
from ways import loss, seeded, start

CONVOLUTION = ("convolution", "convolution_input_grad", "convolution_weight_grad")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in RULE_CASES])
def test_every_operator_runs_as_a_loop(case: RuleCase) -> None:
    with hfta.rules.override(all="loop"):
        check_against_loop(case, (True,) * len(case.make()))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("lowering", ["grouped", "matmul", "direct", "loop", "wide"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CONV])
def test_every_lowering_of_a_convolution(case: RuleCase, lowering: str) -> None:
    with hfta.rules.override(conv=lowering):
        everything = (True,) * len(case.make())
        check_against_loop(case, everything)
        # The input alone is shared.
        check_against_loop(case, (False, *everything[1:]))


@pytest.mark.parametrize("lowering", ["matmul", "direct", "loop"])
@pytest.mark.parametrize("op", CONVOLUTION)
def test_directions_of_a_convolution_have_lowerings_of_their_own(op: str, lowering: str) -> None:
    def func(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight, padding=1)

    inputs = torch.randn(3, 2, 16, 5, 5), torch.randn(3, 16, 16, 3, 3)
    with hfta.rules.override(**{op: lowering}):
        choices = {choice.op: choice.lowering for choice in hfta.rules.explain(hfta.vmap(func), *inputs)}
        smaller = torch.randn(2, 4, 5, 5).double(), torch.randn(6, 4, 3, 3).double()
        check_against_loop(RuleCase("conv2d", func, lambda: smaller), (True, True))
    assert choices.pop(op) == lowering and lowering not in choices.values()


@pytest.mark.exhaustive
@pytest.mark.parametrize("lowering", ["grouped", "matmul", "direct", "loop"])
def test_second_derivatives_and_tangents_of_every_lowering(lowering: str) -> None:
    x, weight = torch.randn(2, 1, 2, 4, 4).double(), torch.randn(2, 3, 2, 3, 3).double()

    def func(x: Tensor, weight: Tensor) -> Tensor:
        return hfta.vmap(lambda x, weight: torch.conv2d(x, weight, padding=1, stride=2).tanh())(x, weight)

    with hfta.rules.override(conv=lowering):
        x.requires_grad_(), weight.requires_grad_()
        assert torch.autograd.gradgradcheck(func, (x, weight))
        _, tangent = torch.func.jvp(func, (x.detach(), weight.detach()), (x.detach(), weight.detach()))
    _, expected = torch.func.jvp(func, (x.detach(), weight.detach()), (x.detach(), weight.detach()))
    torch.testing.assert_close(tangent, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("space", "kernel", "stride", "padding", "dilation"),
    [
        *(((1, 1), 3, 1, 1, 1), ((2, 1), 7, 1, 3, 1), ((2, 2), 7, 1, 3, 1)),
        *(((1, 1), 3, 1, 2, 2), ((3, 3), 4, 2, 1, 1), ((1, 1), 3, 1, 2, 1)),
    ],
)
def test_taps_that_see_only_padding(space: Any, kernel: int, stride: int, padding: int, dilation: int) -> None:
    def func(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight, None, stride, padding, dilation)

    inputs = torch.randn(2, 3, *space).double(), torch.randn(4, 3, kernel, kernel).double()
    check_against_loop(RuleCase("cropped", func, lambda: inputs), (True, True))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.layers = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def _array() -> tuple[Any, Any, Tensor]:
    return *start([_Model().double() for _ in range(3)], loss, hfta.sgd(lr=0.1)), torch.randn(3, 4, 2, 6, 6).double()


def _paths(explanation: hfta.rules.Explanation, op: str) -> dict[str, str]:
    return {choice.module: choice.lowering for choice in explanation if choice.op == op}


def test_explain_names_modules_and_reasons() -> None:
    step, state, x = _array()
    explanation = hfta.rules.explain(step, state, x)
    assert set(_paths(explanation, "convolution")) == {"features.0", "layers.0.0", "layers.1.0"}
    assert set(_paths(explanation, "linear")) == {"head"}
    text = str(explanation).splitlines()
    assert text[0].split() == "operator module members shapes of one member (* shared) lowering reason".split()
    line = next(line for line in text if "features.0" in line)
    assert "[4, 2, 6, 6], [4, 2, 3, 3]" in line and ("kernel in C" if native.compiler() else "group") in line
    assert all(choice.num_models == 3 and choice.reason for choice in explanation)


@pytest.mark.soak
def test_overrides_of_submodules_reach_eager_and_compiled_steps() -> None:
    step, state, x = _array()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    expected, _ = step(state, x)
    compiled(state, x)
    for modules in ("layers.1", ["features", "layers.0"]):
        with hfta.rules.override(modules=modules, conv="loop"):
            eager = hfta.rules.explain(step, state, x)
            chosen = {path for path, lowering in _paths(eager, "convolution").items() if lowering == "loop"}
            assert chosen == ({"layers.1.0"} if modules == "layers.1" else {"features.0", "layers.0.0"})
            before = counter.frame_count
            recorded = _choice._recorded = _choice.Explanation()
            try:
                after, _ = compiled(state, x)
            finally:
                _choice._recorded = None
            assert counter.frame_count == before + 1
            # The compiler runs rules several times, first to find the shapes and without the modules.
            assert {c.module for c in recorded if c.lowering == "loop" and c.module} >= chosen
            for path, param in after.params.items():
                torch.testing.assert_close(param, expected.params[path], rtol=1e-11, atol=1e-12)
    before = counter.frame_count
    compiled(state, x)
    assert counter.frame_count == before


def test_the_latest_override_that_matches_decides() -> None:
    step, state, x = _array()
    with hfta.rules.override(all="loop"), hfta.rules.override(modules="layers.0", conv="matmul") as inner:
        chosen = _paths(hfta.rules.explain(step, state, x), "convolution")
        assert chosen == {"features.0": "loop", "layers.0.0": "matmul", "layers.1.0": "loop"}
        inner.remove()
        assert set(_paths(hfta.rules.explain(step, state, x), "convolution").values()) == {"loop"}
    assert "loop" not in _paths(hfta.rules.explain(step, state, x), "batch_norm").values()


@pytest.mark.parametrize(
    ("lowerings", "message"),
    [
        ({"convolve": "loop"}, "no operator or family is called 'convolve'; name an operator, .* families .*'conv'"),
        ({"conv": "fast"}, "'conv' has no lowering 'fast'; choose one of .*'grouped'.*'loop'.*'matmul'"),
    ],
)
def test_overrides_that_make_no_sense(lowerings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hfta.rules.override(**lowerings)


@pytest.mark.soak
def test_compiled_products_with_one_column_stay_within_their_results():
    # Inductor's sums for them overwrote the next block of memory.
    def factory():
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)),
            nn.Conv2d(32, 1, 4, bias=False),
        )

    def loss_fn(model, batch):
        return nn.functional.softplus(-model(batch)).mean()

    step, state = start(seeded(factory, range(4)), loss_fn, hfta.sgd(lr=0.1))
    run, other = torch.compile(step, fullgraph=True, dynamic=False), state
    for batch in torch.randn(5, 4, 8, 3, 16, 16):
        state, metrics = run(state, batch)
        other, expected = step(other, batch)
        torch.testing.assert_close(metrics["loss"], expected["loss"])


@pytest.mark.parametrize("op", CONVOLUTION)
def test_nothing_large_is_a_loop_when_compiled(op: str) -> None:
    # A thousand images and 2 MB of filters.
    shapes, options = ((1 << 10, 1 << 8, 4, 4), (1 << 8, 1 << 8, 3, 3)), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    case = _lowering.Case(op, 4, "cpu", torch.float32, shapes, (False, False), options, False, False)
    for compiling in (False, True):
        decided = next(row for row in _lowering.TABLE[op] if row.when(case._replace(compiling=compiling)))
        assert (decided.lowering == "loop") is not compiling


@pytest.mark.exhaustive
@pytest.mark.soak(ids="^dilated|sequences|volumes")
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        pytest.param(lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)], (3, 9, 8), id="strided"),
        pytest.param(lambda: [nn.Conv2d(3, 8, (3, 2), dilation=2, padding=1)], (3, 9, 8), id="dilated"),
        pytest.param(lambda: [nn.Conv2d(3, 8, 3, stride=2, dilation=2)], (3, 9, 8), id="strided and dilated"),
        pytest.param(lambda: [nn.ConvTranspose2d(3, 2, 3, 3, 1, output_padding=2)], (3, 4, 5), id="transposed"),
        pytest.param(lambda: [nn.Conv1d(3, 4, 5, padding=2), nn.ConvTranspose1d(4, 2, 5, 2)], (3, 11), id="sequences"),
        pytest.param(lambda: [nn.Conv3d(2, 4, 3, stride=(1, 2, 1), padding=1)], (2, 4, 5, 6), id="volumes"),
    ],
)
def test_small_convolutions_of_a_graph(layers: Any, shape: tuple[int, ...]) -> None:
    torch.compiler.reset()
    step = hfta.make_train_step(nn.Sequential(*layers()), lambda model, x: model(x).sin().mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(lambda: nn.Sequential(*layers()), seeds=range(3)), seeds=range(3))
    batch = torch.randn(3, 2, *shape)
    run = torch.compile(step, fullgraph=True, dynamic=False)
    found, metrics = run(state, batch)
    with hfta.rules.override(all="loop"):
        expected, other = step(state, batch)
    torch.testing.assert_close(metrics["loss"], other["loss"])
    torch.testing.assert_close(found.params, expected.params)


@pytest.mark.parametrize("space", [(1, 1), (6, 6)])
def test_exported_convolutions_take_any_batch(space: tuple[int, int]) -> None:
    class Array(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 64, 32, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return hfta.vmap(lambda x, weight: torch.conv2d(x, weight, padding=1))(x, self.weight)

    array = Array()
    sizes = ({1: torch.export.Dim("batch", min=2, max=4096)},)
    program = torch.export.export(array, (torch.randn(3, 16, 32, *space),), dynamic_shapes=sizes)
    for batch in (2, 300):
        x = torch.randn(3, batch, 32, *space)
        torch.testing.assert_close(program.module()(x), array(x))
    # What other runtimes know.
    assert not any("as_strided" in str(node.target) for node in program.graph.nodes)


@pytest.mark.exhaustive
def test_compilers_leave_the_layout_of_convolutions_alone() -> None:
    """Inductor would convert to channels-last and back around convolutions that it knows."""
    with hfta.rules.override(conv="grouped"):
        step, state = start(seeded(_images, range(3)), loss, hfta.sgd(lr=0.1))
        batch = torch.randn(3, 4, 3, 8, 8)
        run = torch.compile(step, fullgraph=True, dynamic=False)
        (found, metrics), (code, *_) = run_and_get_code(run, state, batch)
        expected, other = step(state, batch)
    assert "contiguous_convolution" in code
    assert "extern_kernels.convolution" not in code
    torch.testing.assert_close(metrics["loss"], other["loss"])
    torch.testing.assert_close(found.params, expected.params)


def _images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 1, groups=2), nn.ConvTranspose2d(4, 2, 3, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["forward", "reverse", "twice"])
def test_compiled_convolutions_have_all_derivatives(order: str) -> None:
    def value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.conv2d(x, weight, bias, padding=1).sin().sum()

    def derivative(*args: Tensor) -> Tensor:
        if order == "forward":
            return torch.func.jvp(value, args, tuple(x.cos() for x in args))[1]
        if order == "reverse":
            return torch.func.grad(value, argnums=(0, 1, 2))(*args)
        first = torch.func.grad(value, argnums=(0, 1, 2))
        return torch.func.grad(lambda *own: sum(x.square().sum() for x in first(*own)), argnums=(0, 1, 2))(*args)

    inputs = [torch.randn(3, *shape, dtype=torch.float64) for shape in ((2, 4, 5, 5), (6, 4, 3, 3), (6,))]
    found = torch.compile(hfta.vmap(derivative), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, hfta.vmap(derivative)(*inputs))
