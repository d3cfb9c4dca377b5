"""Kernels in C of convolutions, pooling and tables: against PyTorch on many sizes, and to the same bits in every array."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import hfta_func as hfta
from hfta_func._kernels import native
from processes import output
from rule_cases import RuleCase
from rule_checks import check_against_loop
from ways import loss, start

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler")


def _passes(func: Any, *inputs: Tensor, compiled: bool = False) -> list[Tensor]:
    """The output of members, and all gradients."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    run = hfta.vmap(func)
    output = (torch.compile(run, fullgraph=True) if compiled else run)(*inputs)
    torch.manual_seed(0)
    weights = torch.randn(output.shape[1:], dtype=torch.float64).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


SIZES = [
    # Bands of rows as lanes: few samples, and images that are larger than a cache.
    *(((1, 5, 37, 6), (7, 5, 3, 3), {"padding": 1}), ((3, 3, 40, 40), (5, 3, 5, 5), {"padding": (0, 4)})),
    *(((2, 6, 70, 70), (9, 6, 3, 3), {}), ((1, 4, 300), (13, 4, 5), {"padding": 2, "dilation": 3})),
    ((2, 3, 9, 5, 6), (2, 3, 3, 1, 2), {"stride": (2, 1, 3), "padding": (1, 0, 1)}),
    # More samples than lanes.
    *(((35, 2, 6, 5), (3, 2, 2, 3), {"stride": 2}), ((17, 4, 3, 3), (6, 2, 3, 3), {"padding": 2, "groups": 2})),
    # Rows with fewer taps, of inputs and, behind much padding, of outputs.
    *(((20, 3, 9, 8), (4, 3, 5, 5), {}), ((18, 2, 4, 4), (3, 2, 3, 3), {"padding": 3, "groups": 1})),
    ((17, 2, 5, 4, 3), (3, 2, 4, 2, 2), {"dilation": (1, 2, 1)}),
    # Rows and columns of the input that no filter sees.
    *(((20, 2, 8, 8), (3, 2, 2, 2), {"stride": 5}), ((2, 1, 30, 30), (1, 1, 1, 1), {"stride": 4, "padding": 3})),
    # Runs of rows as vectors: rows that fill them or nearly do, filters wider than the padding, neighbours apart.
    *(((1, 5, 9, 32), (7, 5, 3, 3), {"padding": 1}), ((2, 8, 6, 48), (16, 1, 3, 3), {"padding": (0, 3), "groups": 8})),
    *(((1, 4, 7, 62), (6, 2, 3, 5), {"stride": (1, 2), "groups": 2}), ((3, 3, 120), (8, 3, 5), {"dilation": 3})),
    ((1, 2, 3, 4, 30), (3, 2, 2, 2, 3), {"stride": (2, 1, 3), "padding": 1}),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("transposed", "x", "weight", "options"),
    [
        *((False, *size) for size in SIZES),
        (True, (2, 3, 40, 33), (3, 5, 4, 4), {"stride": 2, "padding": 1}),
        (True, (1, 3, 50), (3, 2, 3), {"stride": 3, "output_padding": 2}),
        (True, (33, 4, 4, 4), (4, 3, 2, 2), {"stride": 3, "groups": 2}),
        (True, (2, 2, 7, 5, 4), (2, 3, 3, 2, 1), {"stride": (2, 3, 1), "padding": (1, 0, 0), "dilation": (1, 2, 1)}),
    ],
)
def test_against_convolutions_of_pytorch(
    transposed: bool, x: Any, weight: Any, options: Any, dtype: torch.dtype
) -> None:
    func = getattr(F, f"conv_transpose{len(x) - 2}d" if transposed else f"conv{len(x) - 2}d")
    bias = (weight[1] * options.get("groups", 1) if transposed else weight[0],)

    def member(*args: Tensor) -> Tensor:
        return func(*args, **options)

    with hfta.rules.override(conv="direct"):
        if dtype is torch.float64:
            alone = tuple(torch.randn(shape, dtype=dtype) for shape in (x, weight, bias))
            check_against_loop(RuleCase("convolution", member, lambda: alone), (True,) * 3)
        inputs = [torch.randn(3, *shape, dtype=dtype) for shape in (x, weight, bias)]
        results = _passes(member, *inputs)
        assert "direct" in str(hfta.rules.explain(hfta.vmap(member), *inputs))
    with hfta.rules.override(conv="loop"):
        expected = _passes(member, *(x.double() for x in inputs))
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), other, rtol=0, atol=float(other.abs().max()) * 1e-5)


CASES = [
    ((40, 6, 9, 7), (10, 6, 3, 3), {"padding": 1}),
    ((2, 3, 33, 20), (5, 3, 5, 5), {"stride": 2}),
    ((150, 2, 5, 5), (3, 2, 2, 2), {}),
    ((3, 8, 6, 32), (8, 1, 3, 3), {"padding": 1, "groups": 8}),
    ((3, 2, 6, 30), (9, 2, 3, 3), {"padding": 1}),
]


@pytest.mark.parametrize(("x", "weight", "options"), CASES)
def test_bits_depend_neither_on_other_members_nor_on_threads(
    x: Any, weight: Any, options: Any, set_threads: Any
) -> None:
    def func(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, **options)

    inputs = [torch.randn(5, *shape, dtype=torch.float32) for shape in (x, weight, (weight[0],))]
    with hfta.rules.override(conv="direct"):
        # Members whose results are not numbers are nobody else's business.
        broken = [torch.cat([x[:2], torch.full_like(x[2:3], bad), x[3:]]) for x, bad in zip(inputs, _BAD, strict=True)]
        beside = _passes(func, *broken)
        set_threads(1)
        together = _passes(func, *inputs)
        set_threads(3)
        threaded = _passes(func, *inputs)
        for i in range(5):
            alone = _passes(func, *(x[i : i + 1] for x in inputs))
            for one, all_of_them, other, several in zip(alone, together, beside, threaded, strict=True):
                assert torch.equal(one[0], all_of_them[i]) and torch.equal(one[0], several[i])
                assert i == 2 or torch.equal(one[0], other[i])


_BAD = float("nan"), float("inf"), float("-inf")


def test_images_may_be_anywhere_in_memory() -> None:
    weight = torch.randn(3, 5, 4, 3, 3).double()
    images = torch.randn(3, 2, 4, 6, 6).double()
    with hfta.rules.override(conv="direct"):
        expected = _passes(F.conv2d, images, weight)
        for axes in itertools.permutations(range(5)):
            x = images.permute(axes).contiguous().permute([axes.index(axis) for axis in range(5)])
            assert all(map(torch.equal, _passes(F.conv2d, x, weight), expected))
        assert torch.equal(hfta.vmap(F.conv2d, (None, 0))(images[0], weight)[0], expected[0][0])
        nested = hfta.vmap(hfta.vmap(F.conv2d), (2, None), 1)(images.unsqueeze(2), weight)
        assert torch.equal(nested[:, 0], expected[0])


def test_compiled_convolutions_are_operators_of_the_kernel() -> None:
    inputs = torch.randn(3, 2, 5, 9, 9).double(), torch.randn(3, 7, 5, 3, 3).double(), torch.randn(3, 7).double()

    def func(*args: Tensor) -> Tensor:
        return F.conv2d(*args, padding=1).relu()

    with hfta.rules.override(conv="direct"):
        torch._dynamo.reset()
        results, codes = run_and_get_code(_passes, func, *inputs, compiled=True)
        assert "direct_sums" in str(codes) and "direct_products" in str(codes) and "aten.convolution" not in str(codes)
        for result, other in zip(results, _passes(func, *inputs), strict=True):
            torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-12)


class Convolutions(torch.nn.Module):
    """Calls of convolutions in all of their spellings."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (5, 3, 3, 3), (6, 5, 3, 3), (6, 7, 2, 2), (7, 1, 1, 3)
        self.weights = torch.nn.ParameterList([torch.randn(shape, dtype=torch.float64) for shape in shapes])
        self.bias = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.weights
        x = F.conv2d(F.conv2d(x, one, None, 1, (1, 0)).tanh(), two, padding="same", dilation=2).tanh()
        x = F.conv_transpose2d(x, three, self.bias, 2, 0, (1, 0), dilation=[1, 1]).tanh()
        return F.conv2d(x, four, self.bias, stride=(2, 1), groups=7).tanh() + F.conv2d(x[0], four, groups=7)[:, ::2]


def test_an_array_of_one_runs_by_lowerings_too() -> None:
    model, x = Convolutions(), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    step, state = start([model], loss, hfta.sgd(lr=1.0))
    grads = torch.autograd.grad(loss(model, x), [*model.parameters()])
    with hfta.rules.override(conv="direct"):
        after, _ = step(state, x.unsqueeze(0))
        chosen = [(one.num_models, one.lowering) for one in hfta.rules.explain(step, state, x.unsqueeze(0))]
    # Not the one whose padding has a name, and the one without samples.
    assert chosen == [(1, "direct")] * 9
    for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(param - after.params[name][0], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        *(((5, 3, 3, 3), {}), ((5, 4, 3, 3), {"groups": 3}), ((5, 4, 9, 9), {}), ((5, 4, 3, 3), {"stride": 0})),
        *(((5, 4, 3, 3), {"padding": -1}), ((5, 4, 3, 3), {"dilation": 0})),
    ],
)
def test_what_pytorch_refuses_is_refused_in_its_words(weight: Any, options: Any) -> None:
    x, weight = torch.randn(2, 3, 4, 6, 6), torch.randn(2, *weight)
    messages = []
    for lowering in ("direct", "grouped"):
        with hfta.rules.override(conv=lowering), pytest.raises(RuntimeError) as error:
            hfta.vmap(lambda *args: F.conv2d(*args, **options))(x, weight)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_without_a_compiler_the_table_chooses_others() -> None:
    code = (
        "import torch, hfta_func as hfta\n"
        "x, weight = torch.randn(2, 4, 5, 9, 9), torch.randn(2, 7, 5, 3, 3)\n"
        "print({c.lowering for c in hfta.rules.explain(hfta.vmap(torch.conv2d), x, weight)})\n"
    )
    for native_kernels, is_direct in (("0", False), ("1", True)):
        assert ("direct" in output(code, HFTA_FUNC_NATIVE=native_kernels)) is is_direct


# Allocations fail from the n-th on that `fail_after(n)` counts.
_FAILING = """
#include <stdlib.h>
static long left = -1;
void fail_after(long n) { left = n; }
static int fails(void) { return left >= 0 && left-- <= 0 ? (left = 0, 1) : 0; }
#define malloc(n) (fails() ? NULL : malloc(n))
#define calloc(n, m) (fails() ? NULL : calloc(n, m))
#define aligned_alloc(a, n) (fails() ? NULL : aligned_alloc(a, n))
"""
_SANITIZED = """
import sys, torch
import torch.nn.functional as F
from hfta_func._kernels import convolution, native, programs, recurrent
native._FLAGS += ("-O1", "-fsanitize=address", "-include", sys.argv[1])
torch.set_num_threads(1)
def result(library, call, least):
    # What a call returns that has failed for want of memory before, at its first allocation and at later ones.
    allocations, found = 0, None
    while found is None:
        library.fail_after(allocations)
        try:
            found = call()
        except MemoryError:
            allocations += 1 + allocations // 16
        finally:
            library.fail_after(-1)
    assert allocations >= least, allocations
    return found
library = convolution.program(torch.float32)
for x, weight, stride, pad, dilation in (
    ((1, 5, 37, 6), (7, 5, 3, 3), 1, 1, 1), ((35, 2, 6, 5), (3, 2, 2, 3), 2, 0, 1), ((2, 4, 70, 70), (9, 4, 3, 3), 1, 2, 2),
    ((20, 2, 8, 8), (3, 2, 2, 2), 5, 0, 1), ((2, 1, 30, 30), (1, 1, 1, 1), 4, 3, 1), ((3, 3, 9, 40), (5, 3, 5, 2), 3, 4, 1),
    ((20, 3, 9, 8), (4, 3, 5, 5), 1, 0, 1),
    ((1, 3, 5, 32), (4, 3, 3, 3), 1, 1, 1), ((1, 2, 6, 61), (7, 2, 3, 3), (1, 2), 1, 2),
    ((2, 3, 4, 27), (8, 3, 1, 5), 1, (0, 1), 1),
    # Rows behind the last filter, more than buffers are longer than needed.
    ((16, 1, 3, 40, 40), (2, 1, 3, 3, 3), (1, 20, 1), 0, 1),
):
    images, filters = torch.randn(2, *x), torch.randn(2, *weight)
    axes, conv = len(x) - 2, F.conv2d if len(x) == 4 else F.conv3d
    window = [[*each] if isinstance(each, tuple) else [each] * axes for each in (stride, pad, dilation)]
    with torch.enable_grad():
        pairs = [(one.clone().requires_grad_(), other.clone().requires_grad_()) for one, other in zip(images, filters)]
        expected = torch.stack([conv(*pair, None, stride, pad, dilation) for pair in pairs])
    torch.manual_seed(0)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    calls = (
        (lambda: convolution.convolve(images, filters, None, expected.shape[3:], window, 1, False), expected.detach()),
        (lambda: convolution.convolve(grad, filters, None, x[2:], window, 1, True), torch.stack([a.grad for a, _ in pairs])),
        (lambda: convolution.correlate(grad, images, weight[2:], window, 1)[0], torch.stack([b.grad for _, b in pairs])),
    )
    for call, expected in calls:
        torch.testing.assert_close(result(library, call, 9), expected, rtol=1e-4, atol=1e-3)
library, x = programs.pooling(torch.float32), torch.randn(2, 3, 7, 9)
values, places = result(library, lambda: programs.max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1]), 3)
programs.max_pool_backward(values, places, [7, 9])
index = torch.randint(5, (3, 20))
moved = programs.move_rows(torch.randn(3, 20, 7), torch.randn(3, 5, 7), None, index, torch.rand(3, 20), 5, -9)
programs.move_rows(moved, None, index, None, None, 20, -9)
library = recurrent.program(torch.float32)
for kind, gates in enumerate((4, 3, 1, 1)):
    x, h, c = torch.randn(2, 5, 35, 3), torch.randn(2, 35, 18), torch.randn(2, 35, 18) if kind == 0 else None
    weights = [torch.randn(2, gates * 18, size) for size in (3, 18)]
    biases = [torch.randn(2, gates * 18) for _ in range(2)]
    states, *last, kept = result(library, lambda: recurrent.forward(x, *weights, *biases, h, c, kind, True), 1)
    given = x, *weights, h, c, states, kept, states, *last[:1], None, kind, True, True, True
    result(library, lambda: recurrent.backward(*given), 2)
print("as expected")
"""


@pytest.mark.exhaustive
def test_memory_that_is_missing_or_not_the_kernels(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    order = [str(gcc), "-print-file-name=libasan.so"]
    sanitizer = "" if gcc is None else subprocess.run(order, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(sanitizer):
        pytest.skip("there is no gcc with an address sanitizer")
    (tmp_path / "failing.h").write_text(_FAILING)
    variables = {"CC": "gcc", "HFTA_FUNC_CACHE": str(tmp_path), "LD_PRELOAD": sanitizer, "PYTHONMALLOC": "malloc"}
    variables["ASAN_OPTIONS"] = "detect_leaks=0"
    assert output(_SANITIZED, str(tmp_path / "failing.h"), **variables) == "as expected\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [(2,), (3, 2, 1), (3, 1, 1), ((3, 2), 3, (1, 0), 2), ((1, 5), (1, 2), (0, 2)), (2, 2, 0, 1, True), (4, 3, 2, 2)],
)
def test_maxima_are_those_of_pytorch_to_the_bit(options: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5, 13, 11, dtype=dtype)
    # Ties, and what is no number.
    x = torch.where(x.abs() < 0.3, 0.25, x)
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.where(torch.rand_like(x) < 0.1, bad, x)
    x[0, 0, 0] = float("-inf")

    def func(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d_with_indices(x, *options)

    values, places = hfta.vmap(func)(x)
    (grad,) = torch.func.vjp(lambda x: hfta.vmap(func)(x)[0], x)[1](torch.ones_like(values))
    for i in range(3):
        expected, where = func(x[i])
        assert torch.equal(places[i], where) and torch.equal(values[i].nan_to_num(7.0), expected.nan_to_num(7.0))
        (of_one,) = torch.func.vjp(lambda x: func(x)[0], x[i])[1](torch.ones_like(expected))
        assert torch.equal(grad[i], of_one)


def test_gradients_of_the_gradient_of_maxima() -> None:
    x = torch.randn(2, 3, 6, 6).double().requires_grad_()

    def func(x: Tensor) -> Tensor:
        return hfta.vmap(lambda x: F.max_pool2d((x * x)[None], 3, 2))(x)

    assert torch.autograd.gradgradcheck(func, (x,))
    pull = torch.func.vjp(func, x.detach())[1]
    grad = torch.randn_like(func(x))
    (gradient, tangent) = torch.func.jvp(lambda grad: pull(grad)[0], (grad,), (grad,))
    torch.testing.assert_close(tangent, gradient)


M, V, K = 3, 30, 70
_OF_ALL = torch.randint(V, (K,), generator=torch.Generator().manual_seed(0))
TABLES = {
    "index_add": lambda x, index, source: x.index_add(0, index, source, alpha=2),
    "index_add_": lambda x, index, source: x.clone().index_add_(0, index, source),
    "index_select": lambda x, index, source: x.index_select(0, index),
    "rows of columns": lambda x, index, source: x.index_select(-1, index),
    "index": lambda x, index, source: x[index - V],
    "scatter_add": lambda x, index, source: x.scatter_add(0, index[:, None].expand_as(source), source),
    "embedding": lambda x, index, source: F.embedding(index.view(7, -1), x, padding_idx=int(_OF_ALL[3])),
    "bags of sums": lambda x, index, source: F.embedding_bag(index.view(7, -1), x, mode="sum"),
    "bags of means": lambda x, index, source: F.embedding_bag(index, x, torch.tensor([0, 3, 3, 50])),
}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_rows_of_tables(name: str, is_shared: bool) -> None:
    table, source = torch.randn(M, V, 2 * V).double(), torch.randn(M, K, 2 * V).double()
    index = _OF_ALL if is_shared else torch.stack([_OF_ALL.roll(m) for m in range(M)])

    def func(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return TABLES[name](x * x, index, source * source)

    def passes(func: Any) -> list[Any]:
        """The output, its gradients, and theirs if there are any."""
        inputs = [one.clone().requires_grad_() for one in (table, source)]
        output = func(inputs[0], index, inputs[1])
        grads = torch.autograd.grad(output.cos().sum(), inputs, create_graph=True, materialize_grads=True)
        if name.startswith("bags"):
            # PyTorch has no further derivative.
            return [output, *grads]
        seconds = torch.autograd.grad(sum(map(torch.sum, map(torch.sin, grads))), inputs, materialize_grads=True)
        return [output, *grads, *seconds]

    def loop(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        indices = [index] * M if is_shared else index.unbind()
        return torch.stack([func(*one) for one in zip(x, indices, source, strict=True)])

    results = passes(hfta.vmap(func, (0, None if is_shared else 0, 0)))
    for result, expected in zip(results, passes(loop), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_rows_that_are_missing_are_refused_as_for_a_member_alone() -> None:
    for index in (torch.tensor([[V]]), torch.tensor([[-1 - V]])):
        with pytest.raises(IndexError, match="out of range"):
            hfta.vmap(lambda x, index: x.index_select(0, index))(torch.randn(1, V, 2 * V * V), index)
    for number in (-1, V):
        with pytest.raises(IndexError, match="out of range"):
            index, source = torch.tensor([[number, 0]]), torch.randn(1, 2, 4 * V * V)
            hfta.vmap(lambda *args: torch.index_add(args[0], 0, *args[1:]))(torch.randn(1, V, 4 * V * V), index, source)
