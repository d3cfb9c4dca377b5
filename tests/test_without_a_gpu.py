"""What can be known of CUDA without a device: the lowerings that its table chooses, where rules put their tensors, and that a
step neither waits for a device nor copies to it.

Tensors on the meta device take its place: they have no values to be read, and the code for CPUs does not run on them.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hfta_func as hfta
from cases import OPTIMIZERS, WORKLOADS, batches, loss_fn, models, ours
from hfta_func.rules import _choice, _lowering
from hfta_func.run import trainer, trainers
from hfta_func.run.evaluation import make_evaluation
from rule_cases import RULE_CASES, RuleCase
from rule_checks import as_tuple, check_against_loop
from ways import start

SEEDS = [11, 7, 1002]


# The table


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[_lowering.Case]:
    """The table takes every call for one on CUDA; the calls."""
    case, seen = _lowering.Case, []

    def as_on_cuda(op: str, num_models: int, device: str, *rest: Any) -> _lowering.Case:
        seen.append(case(op, num_models, "cuda", *rest))
        return seen[-1]

    monkeypatch.setattr(_lowering, "Case", as_on_cuda)
    return seen


IMPLEMENTED = {
    "convolution": {"folded", "wide", "grouped", "matmul", "sample_matmul", "direct", "loop"},
    "convolution_input_grad": {"grouped", "matmul", "sample_matmul", "direct", "loop"},
    "convolution_weight_grad": {"grouped", "matmul", "sample_matmul", "direct", "loop"},
}
"""The lowerings that code of rules asks for by name. An unknown one would run as another."""


def implemented(op: str) -> set[str]:
    if op.partition(".")[0] in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return {"batched", "loop"}
    return IMPLEMENTED.get(op, {"folded", "loop"})


CHOOSING = ("conv", "view after conv", "lstm")
"""How the names of cases begin whose operators have several lowerings to choose from."""


def test_tables_name_what_rules_have() -> None:
    for op, rows in _lowering.TABLE.items():
        assert {row.lowering for row in rows} <= implemented(op), op


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name)
        for case in RULE_CASES
        if case.name.startswith(CHOOSING) and "packed" not in case.name and "cell" not in case.name
    ],
)
def test_what_cuda_runs_is_the_loop(case: RuleCase, on_cuda: list[_lowering.Case]) -> None:
    check_against_loop(case, (True,) * len(case.make()))
    assert on_cuda
    directions = [one._replace(op=f"{one.op}_{of}_grad") for one in on_cuda for of in ("input", "weight")]
    for one in (*on_cuda, *(one for one in directions if one.op in _lowering.TABLE)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            chosen = {_choice.choose(one._replace(dtype=dtype, num_models=count)).lowering for count in (1, 4, 16, 64)}
            # Neither decides on CUDA, so what was compared with the loop is what runs.
            assert chosen == {_choice.choose(one).lowering} <= implemented(one.op), one


def _conv(x: tuple[int, ...], weight: tuple[int, ...], transposed: bool = False, **options: Any) -> RuleCase:
    name = f"conv{'_transpose' * transposed}{len(x) - 2}d"
    return RuleCase(
        f"{name} {list(x)} {list(weight)}",
        lambda *inputs: getattr(torch, name)(*inputs, **options),
        lambda: (torch.randn(x, dtype=torch.float64), torch.randn(weight, dtype=torch.float64) / 2**6),
    )


ROWS = [
    (_conv((2, 32, 3, 3), (32, 32, 3, 3)), ("matmul", "matmul", "matmul")),
    (_conv((2, 32, 1, 1), (32, 32, 3, 3), transposed=True), ("matmul", "grouped", "matmul")),
    (_conv((2, 3, 9), (4, 3, 1)), ("sample_matmul", "grouped", "grouped")),
    (_conv((2, 3, 64), (4, 3, 1)), ("sample_matmul", "sample_matmul", "sample_matmul")),
    (_conv((2, 3, 8, 8), (4, 3, 1, 1)), ("grouped", "sample_matmul", "sample_matmul")),
    (_conv((2, 3, 8, 8), (4, 3, 2, 2), stride=2), ("grouped", "matmul", "matmul")),
    (_conv((1, 256, 21), (256, 256, 16)), ("grouped", "loop", "grouped")),
    (_conv((1, 256, 2), (256, 256, 16), transposed=True), ("loop", "grouped", "grouped")),
    (_conv((1, 1, 256, 256), (32, 1, 2, 2), stride=16), ("grouped", "loop", "grouped")),
    (_conv((1, 32, 256, 256), (32, 1, 1, 1), transposed=True), ("loop", "sample_matmul", "sample_matmul")),
    (_conv((2, 1, 256, 256), (32, 1, 2, 2), stride=16), ("grouped", "loop", "loop")),
    (_conv((2, 3, 8, 8), (4, 3, 3, 3)), ("grouped",) * 3),
]
"""Convolutions for each row that only CUDA has, and their lowerings: forward, and of the gradients of input and filters."""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("case", "expected"), [pytest.param(*row, id=row[0].name) for row in ROWS])
@pytest.mark.usefixtures("on_cuda")
def test_what_cuda_runs_of_a_convolution_is_the_loop(case: RuleCase, expected: tuple[str, str, str]) -> None:
    inputs = [torch.stack([x] * 2) for x in case.make()]
    choices = hfta.rules.explain(hfta.vmap(case.func), *inputs)
    assert tuple(choice.lowering for choice in choices) == expected
    check_against_loop(case, (True, True))


# Where tensors are


PACKED = [case for case in RULE_CASES if "packed" in case.name]
"""PyTorch wants the lengths of packed sequences on the CPU, so what is made of them starts there."""
WITHOUT_META_BACKWARD = ("fractional_max_pool3d", "multi_margin_loss")
"""Operators of PyTorch whose gradients no fake tensor can take."""
WAITING = ("embedding of bounded norm", "index_put by a mask, rows")
"""Cases that wait for a device if a member is alone, too: for rows without repetitions, or for how many a mask selects."""
UNPACKED = [pytest.param(case, id=case.name) for case in RULE_CASES if case not in PACKED]


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch, on_cuda: list[_lowering.Case]) -> None:
    """Lowerings are those of CUDA, and the meta device may be asked about autocast, which it does not know."""
    hfta.rules.install()  # which looks at the class that is replaced here
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def autocast_or_nothing(kind: str, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if kind == "meta" else autocast(kind, *args, **kwargs)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": kind != "meta" and enabled(kind))
    monkeypatch.setattr(torch, "autocast", autocast_or_nothing)


READING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere"),
    *("masked_select", "masked_scatter", "unique_dim", "unique_consecutive", "_unique", "_unique2", "bincount"),
    *("_linalg_check_errors", "linalg_eig", "linalg_eigvals", "linalg_lstsq", "embedding_renorm_", "_pin_memory"),
}
"""Operators that wait for values of a device, most of them for the size of their result."""


class Watch(TorchDispatchMode):
    """Refuses what a device would have to be waited for, and what copies to it or from it.

    Args:
        device: What stands for the device.
        reads: Whether values may be waited for.
    """

    def __init__(self, device: str = "meta", reads: bool = False):
        super().__init__()
        self._device, self._reads = device, reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in optree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._reads:
            assert name not in READING, f"{func} reads values"
            counted = name == "repeat_interleave" and kwargs.get("output_size") is None
            assert not counted, f"{func} reads how often"
            masks = name.strip("_").removeprefix("unsafe_") in ("index", "index_put", "index_put_impl") and any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
            assert not masks, f"{func} by a mask reads how much is in it"
        made = func(*args, **kwargs)
        results = [leaf for leaf in optree.tree_leaves(made) if isinstance(leaf, Tensor)]
        # What Python's numbers were made into; PyTorch makes none of them on the meta device, see ``no_numbers``.
        assert name != "lift_fresh" or self._is_a_number(results[0]), f"{func} copies to the device"
        places = {leaf.device for leaf in (*given, *results)}
        assert name not in ("copy_", "_to_copy") or len(places) == 1, f"{func} copies to the device or from it"
        for leaf in (*given, *results):
            assert leaf.device.type == self._device or self._is_a_number(leaf), (
                f"{func} makes or gets a tensor elsewhere"
            )
        return made

    def _is_a_number(self, tensor: Tensor) -> bool:
        """A number on the CPU, which kernels get as an argument."""
        return self._device != "cpu" and tensor.device.type == "cpu" and tensor.dim() == 0


@pytest.mark.sampled(every=5)
@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("case", UNPACKED)
def test_rules_and_gradients_stay_on_the_device(case: RuleCase) -> None:
    inputs = [torch.stack([x] * 3) for x in case.make()]
    expected = [(3, *output.shape) for output in as_tuple(case.func(*(x[0] for x in inputs)))]
    inputs = [x.to("meta").requires_grad_(x.is_floating_point()) for x in inputs]
    with Watch(reads=case.name in WAITING), torch.device("meta"):
        outputs = as_tuple(hfta.vmap(case.func)(*inputs))
        assert [output.shape for output in outputs] == expected
        assert {output.device.type for output in outputs} == {"meta"}
        wanted = [x for x in inputs if x.requires_grad]
        totals = [output.sum() for output in outputs if output.requires_grad]
        if case.name.startswith(WITHOUT_META_BACKWARD):
            with pytest.raises(NotImplementedError, match="_backward"):
                torch.autograd.grad(totals, wanted, allow_unused=True)
            return
        grads = torch.autograd.grad(totals, wanted, allow_unused=True, materialize_grads=True)
    assert [(x.shape, x.device) for x in grads] == [(x.shape, x.device) for x in wanted]


# Steps


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "freeze": {"nonfinite": "freeze"},
    "loss scale": {"loss_scale": hfta.step.LossScale(init_scale=8.0)},
    "in groups": {"chunk_size": 2},
    "one by one": {"chunk_size": 1},
    "checkpoint": {"checkpoint": True},
    "save less": {"save": "less"},
    "clip": {"optimizer": hfta.chain(hfta.clip_grad_norm([1.0, 2.0, 3.0]), hfta.adam(lr=1e-3))},
    "accumulate": {"optimizer": hfta.accumulate(hfta.adam(lr=1e-3), every=[1, 2, 3])},
    "ema": {"optimizer": hfta.chain(hfta.sgd(lr=0.1), hfta.ema(0.9))},
    "schedule": {"optimizer": hfta.sgd(lr=hfta.schedules.cosine(0.1, [5, 6, 7]))},
    "warm-up": {"optimizer": hfta.adamw(lr=hfta.schedules.warmup(hfta.schedules.step_lr(0.1, 2), 3))},
    **{case.name: {"optimizer": ours(case)} for case in OPTIMIZERS},
}
CASES = [(name, "plain", donate) for name in WORKLOADS for donate in (True, False)]
CASES += [("mlp", option, True) for option in OPTIONS if option != "plain"]
CASES += [(name, each, True) for name in ("cnn", "transformer") for each in ("in groups", "checkpoint", "save less")]


def _step(name: str, donate: bool, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
    members = models(name, 3, dropout=0.3, dtype=torch.float32)
    return start(members, loss_fn, optimizer or ours(OPTIMIZERS[1]), SEEDS, donate=donate, **options)


@pytest.fixture
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's numbers do not become tensors on the device, to which they would be copied."""

    def refusing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            found = make(data, *args, **kwargs)
            assert isinstance(data, Tensor) or found.device.type == "cpu", f"{data} is copied to the device"
            return found

        return made

    for name in ("tensor", "as_tensor", "asarray"):
        monkeypatch.setattr(torch, name, refusing(getattr(torch, name)))


@pytest.mark.sampled(every=16)
@pytest.mark.exhaustive(ids="^(cnn|transformer)", unless="-plain-True")
@pytest.mark.usefixtures("meta", "no_numbers")
@pytest.mark.parametrize(("name", "option", "donate"), CASES)
def test_a_step_waits_for_nothing(name: str, option: str, donate: bool) -> None:
    step, state = _step(name, donate, **OPTIONS[option])
    state, *given = optree.tree_map(lambda leaf: leaf.to("meta"), (state, *batches(3, 2, dtype=torch.float32)))
    state, _ = step(state, given[0])
    with Watch():
        after, metrics = step(state, given[1])
    assert {leaf.device.type for leaf in optree.tree_leaves((after, metrics))} == {"meta"}
    assert (after is state) == donate


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch, on_cuda: list[_lowering.Case]) -> None:
    """Tensors on the CPU are no reason to look at their values."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("hfta_func.") and hasattr(module, "can_look"):
            monkeypatch.setattr(module, "can_look", lambda flags: False)


MIXED = {
    "bfloat16": {"autocast": torch.bfloat16},
    "float16": {"autocast": torch.float16, "loss_scale": hfta.step.LossScale(growth_interval=1)},
}


@pytest.mark.exhaustive(ids="^(cnn|transformer)", unless="bfloat16")
@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("option", MIXED)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_in_mixed_precision_waits_for_nothing(name: str, option: str) -> None:
    step, state = _step(name, True, **MIXED[option])
    first, second = batches(3, 2, dtype=torch.float32)
    step(state, first)
    with Watch("cpu"):
        _, metrics = step(state, second)
    assert metrics["finite"].all()


# What users do on machines with several GPUs


def test_models_are_made_without_a_word_on_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.zeros(1), torch.zeros(1)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states[device].copy_(state))

    def factory() -> torch.nn.Module:
        for state in states:
            state.add_(1)
        return torch.nn.Linear(2, 1)

    hfta.init_params(factory, seeds=[0, 1])
    # What was drawn does not change the devices' generators.
    assert [state.item() for state in states] == [0, 0]


def test_a_history_is_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        history = hfta.run.History(torch.tensor([7, 8], device="cpu"))
        history.epochs = [{"loss": torch.tensor([1.0, 2.0], device="cpu")}]
        history.follow(torch.tensor([8, 9], device="cpu"))
    assert history.members.tolist() == [1, 2] and history.since.tolist() == [0, 0, 1]
    assert history.seeds.tolist() == [7, 8, 9] and history["loss"].isnan().tolist() == [[False, False, True]]


@pytest.mark.parametrize("count", [1, 2])
def test_auto_is_no_more_processes_than_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = _step("mlp", False, hfta.sgd(lr=0.1))
    given, crews = hfta.ArrayLoader(torch.zeros(4, 2), 2, seeds=range(3)), []

    def interrupted(workers: Any, auto: int, on_gpu: bool) -> Any:
        crews.append(auto)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(trainers, "processes", interrupted)
    monkeypatch.setattr(trainers, "AutoTrainer", lambda local, crew, steps: crew())
    with FakeTensorMode():
        state = state._replace(keys=torch.empty(3, dtype=torch.int64, device="cuda"))
    history = types.SimpleNamespace(seeds=range(3))
    run: Any = types.SimpleNamespace(state=state, loader=given, history=history)
    with pytest.raises(InterruptedError) if count > 1 else contextlib.nullcontext():
        assert isinstance(trainers.make_trainer(step, run, "auto", False, None, None), trainer.LocalTrainer)
    assert crews == [count] * (count > 1)


def test_data_of_an_evaluation_follow_the_members() -> None:
    """One batch and batches of a loader; the members' states are elsewhere."""
    step = hfta.make_train_step(torch.nn.Linear(4, 1), lambda model, batch: model(batch).mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(lambda: torch.nn.Linear(4, 1), SEEDS), seeds=SEEDS)
    state = optree.tree_map(lambda leaf: leaf.to("meta"), state)
    for data in (torch.randn(5, 4), torch.utils.data.DataLoader(torch.randn(5, 4), 5)):
        evaluate = make_evaluation(step, (lambda model, batch: model(batch).mean(), data), state)
        assert evaluate is not None
        assert {value.device.type for value in evaluate(state).values()} == {"meta"}
