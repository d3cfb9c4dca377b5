"""Rules against a Python loop over members: every mix of shared and per-member inputs, every composition."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hfta_func as hfta
from oracle import KEYS, assert_array_is_loop
from processes import output
from rule_cases import RULE_CASES, RuleCase
from rule_checks import M, as_tuple, assert_close, check_against_loop, member_inputs, outputs_of_loop


def _masks(case: RuleCase) -> list[tuple[bool, ...]]:
    count = len(case.make())
    return [mask for mask in itertools.product((True, False), repeat=count) if any(mask)]


CASES = [
    pytest.param(case, mask, id=f"{case.name}-{''.join('b' if batched else 's' for batched in mask)}")
    for case in RULE_CASES
    for mask in _masks(case)
]
ALL_BATCHED = [pytest.param(case, id=case.name) for case in RULE_CASES]


@pytest.mark.sampled(every=8)
@pytest.mark.exhaustive(unless="-(b+|sb+|b+s)$")
@pytest.mark.parametrize(("case", "mask"), CASES)
def test_matches_the_loop_forward_and_backward(case: RuleCase, mask: tuple[bool, ...]) -> None:
    check_against_loop(case, mask)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_model_axis_anywhere(case: RuleCase) -> None:
    inputs = member_inputs(case)
    last = [x.movedim(0, -1) for x in inputs]
    assert_close(as_tuple(hfta.vmap(case.func, in_dims=-1)(*last)), outputs_of_loop(case, inputs))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_gradient_inside_vmap(case: RuleCase) -> None:
    inputs = member_inputs(case)
    argnums = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())

    def objective(*args: Tensor) -> Tensor:
        return sum(output.square().sum() for output in as_tuple(case.func(*args)) if output.is_floating_point())  # type: ignore[return-value]

    grad = torch.func.grad(objective, argnums)
    expected = [torch.stack(column) for column in zip(*(grad(*(x[i] for x in inputs)) for i in range(M)), strict=True)]
    assert_close(list(hfta.vmap(grad)(*inputs)), expected)


# PyTorch says once that a search copies what is not contiguous.
@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_array_of_arrays(case: RuleCase) -> None:
    arrays = [member_inputs(case) for _ in range(2)]
    nested = hfta.vmap(hfta.vmap(case.func))(*(torch.stack(column) for column in zip(*arrays, strict=True)))
    for i, inputs in enumerate(arrays):
        assert_close(tuple(output[i] for output in as_tuple(nested)), outputs_of_loop(case, inputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_under_compile(case: RuleCase) -> None:
    inputs = member_inputs(case)
    torch._dynamo.reset()
    compiled = torch.compile(hfta.vmap(case.func), fullgraph=True, backend="aot_eager")
    assert_close(as_tuple(compiled(*inputs)), outputs_of_loop(case, inputs))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_an_array_of_one(case: RuleCase) -> None:
    inputs = [x[:1] for x in member_inputs(case)]
    expected = tuple(output.unsqueeze(0) for output in as_tuple(case.func(*(x[0] for x in inputs))))
    assert_close(as_tuple(hfta.vmap(case.func)(*inputs)), expected)


def test_a_shared_input_is_not_repeated() -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(16, 4, 3, 3, 3)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            if func is torch.ops.aten.convolution.default:
                largest = max(largest, args[0].numel())
            return func(*args, **(kwargs or {}))

    with Watch():
        hfta.vmap(torch.nn.functional.conv2d, in_dims=(None, 0))(x, weight)
    assert largest == x.numel()


def test_running_statistics_shared_by_members_are_refused() -> None:
    mean, var = torch.zeros(3), torch.ones(3)

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=True)

    with pytest.raises(hfta.errors.TraceError, match="running statistics that all members share"):
        hfta.vmap(norm)(torch.randn(M, 4, 3))


_PROCESS = """
import sys, torch, hfta_func as hfta
from hfta_func.rules import _install, _registry
factor = float(sys.argv[1])
entry = _registry.RULES["mm"]
def scaled(call, x, weight):
    output, dim = entry.rule(call, x, weight)
    return output * factor, dim
_registry.RULES["mm"] = entry._replace(rule=scaled)
_install.fingerprint = lambda: sys.argv[1]
f = torch.compile(hfta.vmap(torch.mm), fullgraph=True)
print(f(torch.ones(2, 1, 1), torch.ones(2, 1, 1)).flatten().tolist())
"""


@pytest.mark.soak
def test_processes_with_different_rules_do_not_share_compiled_graphs(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for factor in ("1", "3", "1"):
        found = output(_PROCESS, factor, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert found == f"[{factor}.0, {factor}.0]\n"


def test_pooling_to_one_pixel_of_channels_last_images():
    # PyTorch then sets the strides of axes of length one.
    pooled = nn.AdaptiveAvgPool2d(1)
    images = torch.randn(24, 16, 2, 2).to(memory_format=torch.channels_last).unflatten(0, (3, 8))
    torch.testing.assert_close(hfta.vmap(pooled)(images), torch.stack([pooled(x) for x in images]))
    with pytest.raises(hfta.errors.TraceError, match="as_strided_ reads memory outside of one member's tensor"):
        hfta.vmap(lambda x: x.clone().as_strided_((2, 2), (1, 2)))(torch.randn(3, 2, 2))


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    # Products of groups know no float64.
    return torch._grouped_mm(x.float(), weight.float().transpose(-2, -1), ends).double()


GROUPS = {
    "rows": ((6, 4), (3, 8, 4), [[2, 2, 6], [0, 5, 6], [1, 2, 6]]),
    "columns": ((8, 8), (4, 8), [[8], [8], [8]]),
    "matrices": ((3, 8, 4), (3, 8, 4), None),
}


@pytest.mark.parametrize("mask", [(0, 0, 0), (0, None, 0), (None, 0, None), (None, None, 0)], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
def test_products_of_groups(groups: str, mask: tuple[int | None, ...]) -> None:
    *shapes, ends = GROUPS[groups]
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    inputs = [torch.randn(3, *shape, dtype=torch.float64) for shape in shapes]
    if groups == "rows":
        inputs.append(offs)
    inputs = [x if dim == 0 else x[0] for x, dim in zip(inputs, mask, strict=False)]
    inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    rest = () if groups == "rows" else (None if offs is None else offs[0],)

    def array(key: Tensor, *tensors: Tensor) -> Tensor:
        return _grouped(*tensors, *rest)

    assert_array_is_loop(array, lambda i, *tensors: array(KEYS, *tensors), inputs, 1e-6, mask[: len(inputs)])


def test_rows_behind_a_members_groups_are_nobodys() -> None:
    x, weight = torch.randn(3, 6, 4, dtype=torch.float64), torch.randn(3, 2, 8, 4, dtype=torch.float64)
    x[0, 4:] = float("nan")
    ends = torch.tensor([[1, 4], [2, 6], [0, 6]], dtype=torch.int32)
    x.requires_grad_(), weight.requires_grad_()
    y = hfta.vmap(_grouped)(x, weight, ends)
    for i in (1, 2):
        found = torch.autograd.grad(y[i].square().sum(), (x, weight), retain_graph=True)
        own = x[i].detach().requires_grad_(), weight[i].detach().requires_grad_()
        expected = torch.autograd.grad(_grouped(*own, ends[i]).square().sum(), own)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[i], other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "func",
    [
        lambda x, i: x.index_add(0, i, x[:50]),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x[i],
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 40), x[:50]),
        lambda x, i: x.scatter_reduce(0, i[:, None].expand(-1, 40), x[:50], "amax"),
    ],
)
@pytest.mark.parametrize("number", [60, 61, -61])
def test_rows_of_other_members_are_out_of_reach(func: Any, number: int) -> None:
    x, index = torch.randn(3, 60, 40), torch.arange(50)
    index[7] = number
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        hfta.vmap(func, (0, None))(x, index)


@pytest.mark.parametrize("product", [torch.sparse.mm, torch.mm, torch.matmul])
def test_a_sparse_matrix_that_members_share(product: Any) -> None:
    links = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 3.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    # Sparse tensors cannot be compared with those of other members, so the laws of rules do not apply.
    with warnings.catch_warnings():
        warnings.simplefilter("error", hfta.errors.LoopWarning)
        grad = hfta.vmap(torch.func.grad(lambda x: product(links.to_sparse(), x).square().sum()))(x)
    torch.testing.assert_close(grad, 2 * links.T @ links @ x)
