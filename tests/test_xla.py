"""The contract on an XLA device, operation by operation (lazily) and through ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from cases import OPTIMIZERS, WORKLOADS, OptimizerCase, batches, loss_fn, models, ours, theirs
from hfta_func.testing import assert_matches_solo
from rule_cases import NORM, RULE_CASES, RuleCase
from rule_checks import M, as_tuple, member_inputs, outputs_of_loop

torch_xla = pytest.importorskip("torch_xla", reason="needs torch_xla; `make test-xla` sets it up")

# The first backward pass of a process settles for which devices there are gradients.
torch_xla.device()

pytestmark = [
    pytest.mark.xla,
    # What stays on the CPU, as the lengths of sequences and the table of normal quantiles do, is moved inside the graph.
    pytest.mark.filterwarnings("ignore:Found tensor with shape:UserWarning"),
]
SEEDS = [11, 7, 1002]
MODES = ["lazy", "compiled"]
CHOSEN = [case for case in OPTIMIZERS if case.name in ("sgd", "adam")]

NOT_ON_XLA = {
    **dict.fromkeys(
        ["batch_norm in evaluation", "instance_norm in evaluation"], "no gradient where running statistics are used"
    ),
    "kl_div": "no kernel for gradients of kl_div",
    **dict.fromkeys(
        ["scatter_reduce mean", "scatter_reduce amax"],
        "no gradient without the row itself if there are more numbers than rows",
    ),
}
"""Rows of RULE_CASES that torch_xla does not compute for one model either, and why."""

NOT_COMPILED_ON_XLA = {
    "attention with a mask of booleans": "no graph capture of masks of booleans",
    **dict.fromkeys(
        ["soft_margin_loss", "cdist", "cdist of differences", "pdist"],
        "no graph with operators that XLA leaves to the CPU",
    ),
}
"""Rows that backend openxla does not compile for one model or under PyTorch's own vmap, and why."""

# XLA rounds eps to float32 and keeps running variances without Bessel's correction, and its singular vectors have seven
# digits; the loop over members runs there too.
_LOOP_ON_XLA = {"pinv", *(case.name for case in NORM)}


def _on(device: str, tree: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.to(device), tree)


def _compiled(func: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(func, backend="openxla", fullgraph=True)


def _runner(mode: str, step: hfta.step.TrainStep) -> Callable[..., Any]:
    """The step, followed by the execution of what it recorded."""
    run = _compiled(step) if mode == "compiled" else step

    def synced(state: hfta.step.TrainState, batch: Any) -> Any:
        result = run(state, batch)
        torch_xla.sync()
        return result

    synced.batch_dims = step.batch_dims  # type: ignore[attr-defined]
    return synced


def _array(name: str, case: OptimizerCase, dropout: float = 0.0) -> tuple[list[nn.Module], Any, hfta.step.TrainState]:
    members = models(name, M, dropout)
    step = hfta.make_train_step(members[0], loss_fn, ours(case))
    return members, step, step.init(*_on("xla", hfta.stack_params(members)), seeds=SEEDS)


def _identical(a: Any, b: Any) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


def _rows() -> Iterator[Any]:
    """Every rule lazily, and every third one compiled or with a shared input; the others take long."""
    for number, case in enumerate(RULE_CASES):
        count = len(case.make())
        turn = [() if number % 3 == chosen else pytest.mark.soak for chosen in (0, 1)]
        yield pytest.param(case, (True,) * count, "lazy", id=f"{case.name}-all")
        yield pytest.param(case, (True,) * count, "compiled", id=f"{case.name}-compiled", marks=turn[0])
        if count > 1:
            mask = (False,) + (True,) * (count - 1)
            yield pytest.param(case, mask, "lazy", id=f"{case.name}-first shared", marks=turn[1])


@pytest.mark.parametrize(("case", "mask", "mode"), list(_rows()))
def test_rules_match_the_loop_forward_and_backward(case: RuleCase, mask: tuple[bool, ...], mode: str) -> None:
    reason = NOT_ON_XLA.get(case.name) or (NOT_COMPILED_ON_XLA.get(case.name) if mode == "compiled" else None)
    if reason:
        pytest.skip(f"torch_xla: {reason}")
    inputs = member_inputs(case, mask)
    func = hfta.vmap(case.func, in_dims=tuple(0 if batched else None for batched in mask))

    def loop(*inputs: Tensor) -> tuple[Tensor, ...]:
        return outputs_of_loop(case, inputs, mask)

    expected = _run(loop, inputs, "xla" if case.name in _LOOP_ON_XLA else "cpu")
    got = _run(_compiled(func) if mode == "compiled" else func, inputs, "xla")
    for mine, alone in zip(got, expected, strict=True):
        # Compiled graphs return the integers that XLA computed with, which may be narrower.
        torch.testing.assert_close(mine.to(alone.dtype), alone, rtol=1e-11, atol=1e-11)


def _run(func: Callable[..., Any], inputs: list[Tensor], device: str) -> list[Tensor]:
    """Outputs, and gradients of a sum of squares in which every entry of every output has another weight."""
    leaves = [x.clone().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = as_tuple(func(*leaves))
    smooth = [output for output in outputs if output.requires_grad]
    weights = [torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape).to(device) for x in smooth]
    grads = torch.autograd.grad(
        smooth,
        [x for x in leaves if x.requires_grad],
        [2 * x.detach() * weight for x, weight in zip(smooth, weights, strict=True)],
        materialize_grads=True,
        allow_unused=True,
    )
    return [result.detach().cpu() for result in (*outputs, *grads)]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CHOSEN])
def test_members_are_the_runs_of_torch(name: str, case: OptimizerCase) -> None:
    members, step, state = _array(name, case)
    steps = _on("xla", batches(M, 50))
    ends = []
    for mode in MODES:
        run, end = _runner(mode, step), state
        for batch in steps:
            end, _ = run(end, batch)
        ends.append(_on("cpu", end))
    members = [member.to("xla") for member in members]
    for i, member in enumerate(members):
        optimizer = theirs(case, i, member.parameters())
        for inputs, targets in steps:
            optimizer.zero_grad()
            loss_fn(member, (inputs[i], targets[i])).backward()
            optimizer.step()
            torch_xla.sync()
    # Adam scales up the rounding noise of gradients that are zero, as that of a key's bias in attention.
    limit = 1e-9 if (name, case.name) == ("transformer", "adam") else 1e-10
    for end in ends:
        for mine, alone in zip(hfta.unstack_params(members[0].cpu(), end.params, end.buffers), members, strict=True):
            for (path, x), y in zip(mine.state_dict().items(), alone.cpu().state_dict().values(), strict=True):
                difference = float((x - y).abs().max() / y.abs().max())
                assert difference <= limit, f"{path} differs by {difference:.3g} of its magnitude"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_members_with_dropout_are_arrays_of_one(name: str, mode: str) -> None:
    _, step, state = _array(name, CHOSEN[0], dropout=0.3)
    run = _runner(mode, step)
    after = assert_matches_solo(_runner("lazy", step), state, _on("xla", batches(M, 5)), run=run, rtol=1e-10)  # type: ignore[arg-type]
    assert not _identical(after.params, state.params)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_member_that_fails_leaves_the_others_bit_identical(name: str, mode: str) -> None:
    _, step, state = _array(name, CHOSEN[1], dropout=0.3)
    run, healthy, sick = _runner(mode, step), state, state
    for number, (inputs, targets) in enumerate(batches(M, 3)):
        spoilt = inputs.clone()
        if number == 1:
            spoilt[1] = float("nan")
        before = sick
        healthy, _ = run(healthy, _on("xla", (inputs, targets)))
        sick, metrics = run(sick, _on("xla", (spoilt, targets)))
        assert metrics["finite"].tolist() == [True, number != 1, True]
        if number == 1:
            assert _identical(hfta.take(sick.params, [1]), hfta.take(before.params, [1]))
    assert _identical(hfta.take(sick, [0, 2]), hfta.take(healthy, [0, 2]))


@pytest.mark.parametrize("conv", [F.conv2d, F.conv_transpose2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 4), (4, 1), (2, 2)])
def test_a_nan_in_a_convolution_stays_with_its_member(conv: Any, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    channels = (inputs, outputs) if conv is F.conv_transpose2d else (outputs, inputs)
    weights = torch.randn(M, *channels, 3, 3, dtype=dtype)
    for place in range(2):
        x, grad = torch.randn(M, 2, inputs, 5, 5, dtype=dtype), torch.randn(M, 2, outputs, 5, 5, dtype=dtype)
        (x, grad)[place][1] = float("nan")
        there = [tensor.to("xla").requires_grad_() for tensor in (x, weights)]
        output = hfta.vmap(lambda x, weight: conv(x, weight, padding=1))(*there)
        for value in (output, *torch.autograd.grad(output, there, grad.to("xla"))):
            assert hfta.take(value.detach(), [0, 2]).isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_compiled_after_the_first_steps(mode: str) -> None:
    metrics = pytest.importorskip("torch_xla.debug.metrics")
    _, step, state = _array("mlp", CHOSEN[1], dropout=0.3)
    run = _runner(mode, step)
    first, *rest = _on("xla", batches(M, 5))
    for _ in range(3):
        state, _ = run(state, first)
    compiled = []
    for lr in (0.1, 0.2, 0.3):
        opt_state = _on("xla", hfta.with_hyperparams(_on("cpu", state.opt_state), lr=[2 * lr, lr, 3 * lr]))
        torch_xla.sync(wait=True)
        state, count = state._replace(opt_state=opt_state), metrics.counter_value("UncachedCompile")
        for batch in rest:
            state, _ = run(state, batch)
        torch_xla.sync(wait=True)
        compiled.append(metrics.counter_value("UncachedCompile") - count)
    # The counter is one for the whole process, in which something of another test may be compiled once.
    assert 0 in compiled, compiled


def _draws(x: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    with hfta.calls.routed(key):
        dropped = F.dropout(x, 0.3), F.dropout2d(x.reshape(4, 25, 2, 5), 0.5)
    return (
        *(drawn == 0 for drawn in dropped),
        hfta.random.bits(key, (1001,)),
        hfta.random.fold_in(key, 12),
        hfta.random.uniform(key, (1001,)),
        hfta.random.uniform(key, (1001,), dtype=torch.float64),
        hfta.random.normal(key, (1001,)),
        hfta.random.bernoulli(key, 0.3, (1001,)),
        hfta.random.randint(key, -3, 11, (1001,)),
        hfta.random.permutation(key, 101),
    )


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_that_of_the_cpu(mode: str) -> None:
    func = hfta.vmap(_draws)
    x, keys = torch.randn(M, 1000), hfta.random.keys(SEEDS)
    mine = (_compiled(func) if mode == "compiled" else func)(x.to("xla"), keys.to("xla"))
    assert _identical(mine, func(x, keys))


def test_loader_and_fit() -> None:
    _, step, state = _array("mlp", CHOSEN[0], dropout=0.3)
    data = torch.randn(10, 4, 3, dtype=torch.float64), torch.randint(5, (10,))
    here, there = (hfta.ArrayLoader(data, 4, seeds=SEEDS, drop_last=True, device=device) for device in ("cpu", "xla"))
    assert _identical(list(there.batches(3)), list(here.batches(3)))
    expected = hfta.fit(step, _on("cpu", state), here, epochs=2, progress=False)
    result = hfta.fit(step, state, there, epochs=2, progress=False)
    torch.testing.assert_close(result.history["loss"], expected.history["loss"], rtol=1e-9, atol=0)
