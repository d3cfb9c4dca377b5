"""What the oracle leaves alone: programs that are right, what they hold in Python, and calls that it cannot compare."""

from __future__ import annotations

import copy
import queue
import random
import threading
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hfta_func as hfta
from comparisons import identical
from hfta_func.errors import VerifyError
from hfta_func.verify import Oracle
from hfta_func.verify.alone import Case
from test_faults import M, batch, loss_fn, model_with, operator, start

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 11


def train(step: Any, state: Any, steps: int = STEPS, count: int = M) -> Any:
    torch.manual_seed(1)
    for _ in range(steps):
        state, metrics = step(state, batch(count))
    return state, metrics


class Noisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def test_what_a_model_computes_in_coarser_numbers_than_its_own_is_held_to_these() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).double()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).float(), torch.arange(len(batch)) % 5)

    step = hfta.make_train_step(make(), loss, hfta.adam(lr=[1e-3] * M))
    state = step.init(*hfta.init_params(make, range(M)), seeds=range(M))
    for _ in range(STEPS):
        state, _ = step(state, torch.randn(M, 40, 6, dtype=torch.float64))
    assert step.oracle.verified == [1, 10]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one by one": {"chunk_size": 1},
    "in pairs": {"chunk_size": 2},
    "automatic": {"chunk_size": "auto"},
    "in place": {"donate": True},
    "bfloat16": {"autocast": torch.bfloat16},
    "loss scale": {"loss_scale": 1024.0},
    "checkpoints": {"checkpoint": True},
    "less memory": {"save": "less"},
    "shared": {"shared_params": ["4"]},
    "replayed": {"replay": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_of_a_run_changes(name: str) -> None:
    torch.manual_seed(0)
    shared = {"shared_params": OPTIONS[name].get("shared_params", ())}
    model, results = Noisy(), []
    members = hfta.init_params(Noisy, range(M), **shared)
    for verify in (True, "first", False):
        step = hfta.make_train_step(model, loss_fn, hfta.sgd(lr=0.1), verify=verify, **OPTIONS[name])
        state = step.init(*optree.tree_map(torch.clone, members), seeds=range(M))
        generators = random.getstate(), np.random.get_state()
        results.append(train(step, state))
        assert repr((random.getstate(), np.random.get_state())) == repr(generators)
        assert step.oracle.verified == {True: [1, 10], "first": [1], False: []}[verify]
        results[-1] = (*results[-1], torch.get_rng_state())
    if name == "automatic":
        # Which size is fastest, and so the last bits, is chosen by time.
        return
    assert identical(results[0], results[1]) and identical(results[0], results[2])


def test_later_calls_are_compared_with_the_first_and_the_last_member(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, alone = [], Case.alone

    def noting(case: Case, member: int, *args: Any) -> Any:
        compared.append((step.oracle.calls, member))
        return alone(case, member, *args)

    monkeypatch.setattr(Case, "alone", noting)
    step, state = start(Noisy)
    train(step, state, 100)
    assert compared == [(call, member) for call in (1, 10, 100) for member in (0, M - 1)]


def test_each_kind_of_call_is_compared() -> None:
    step, state = start(Noisy)
    for rows in (8, 8, 4, 8, 4):
        state, _ = step(state, batch()[:, :rows])
    assert step.oracle.verified == [1, 3] and step.oracle.calls == 5
    step(hfta.take(state, [0, 2]), batch(2))
    step(hfta.take(state, [0, 2]), batch(2))
    assert step.oracle.verified == [1, 3, 6]
    # Shapes that always change would be compared for ever.
    step, state = start(Noisy)
    for rows in range(2, 42):
        step(state, torch.randn(M, rows, 6))
    assert step.oracle.verified == [*range(1, 17)] and step.oracle.calls == 40


class Tracker:
    """A loss that remembers."""

    def __init__(self) -> None:
        self.calls, self.seen, self.names = 0, list[int](), dict[str, int]()
        self.total = torch.zeros(())

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.names[f"call {self.calls}"] = self.calls
        self.total.add_(1)
        return loss_fn(model, x) * (1 + 1 / self.calls)


CALLS = 0
NAMED = {"calls": 0}


def global_loss(model: nn.Module, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    NAMED["calls"] += 1
    return loss_fn(model, x) * (1 + 1 / CALLS)


@pytest.mark.parametrize("verify", [True, False])
def test_counters_of_a_loss_count_steps(verify: bool) -> None:
    global CALLS
    CALLS, NAMED["calls"] = 0, 0
    tracker, calls = Tracker(), 0

    def closure(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss_fn(model, x) * (1 + 1 / calls)

    losses = []
    for loss in (tracker, closure, global_loss):
        torch.manual_seed(0)
        step, state = start(lambda: nn.Linear(6, 2), loss, verify=verify)
        losses.append(train(step, state)[1]["loss"])
    assert (tracker.calls, calls, CALLS, NAMED) == (STEPS, STEPS, STEPS, {"calls": STEPS})
    assert tracker.seen == [*range(1, STEPS + 1)] and len(tracker.names) == STEPS and float(tracker.total) == STEPS
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def test_a_counter_of_a_loss_counts_the_steps_of_graphs() -> None:
    class Warming:
        def __init__(self) -> None:
            self.calls, self.seen = 0, list[int]()

        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            return loss_fn(model, x) * self.calls

    torch._dynamo.reset()
    tracker, alone = Warming(), Warming()
    step, state = start(lambda: nn.Linear(6, 2), tracker)
    step = torch.compile(step, backend="eager")
    eager, start_state = start(lambda: nn.Linear(6, 2), alone)
    for _ in range(3):
        x = batch()
        state, _ = step(state, x)
        start_state, _ = eager(start_state, x)
    assert tracker.calls == 3 and tracker.seen == [1, 2, 3]
    torch.testing.assert_close(state.params, start_state.params)


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_a_queue_that_another_thread_empties_is_left_alone() -> None:
    """As writers of logs have one, such as that of TensorBoard."""
    events: queue.Queue[float | None] = queue.Queue()
    written: list[float | None] = []

    def write() -> None:
        for value in iter(events.get, None):
            written.append(value)
            events.task_done()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = loss_fn(model, x)
        events.put(value.item())
        return value

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    step, state = start(Noisy, loss)
    train(step, state)
    events.put(None)
    writer.join(60)
    assert type(events.unfinished_tasks) is int and len(written) >= STEPS * M


def test_members_that_fail_or_stand_still_are_no_difference() -> None:
    step, state = start(Noisy, nonfinite="freeze")
    x = batch()
    x[0] = torch.nan
    x[2] = torch.inf
    state, metrics = step(state, x)
    assert step.oracle.verified == [1] and metrics["finite"].tolist() == [False, True, False]
    assert state.active.tolist() == [False, True, False]
    state, _ = step(state, batch()[:, :4])
    assert step.oracle.verified == [1, 2]


def test_a_metric_may_be_nan_and_a_leaf_empty() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        value = loss_fn(model, x)
        return value, {
            "nan": value.detach() * torch.nan,
            "none": x[:0],
            "flag": value.detach() > 0,
            "count": x.long().sum(),
        }

    step, state = start(Noisy, loss)
    train(step, state)
    assert step.oracle.verified == [1, 10]


def test_rounding_is_no_difference() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x)
        # What cancels is rounding alone.
        return ((value * 1e4 + value.sum()) - value * 1e4 - value.sum()).square().mean() * 1e4 + value.square().mean()

    step, state = start(Noisy, loss, loss_scale=1.0)
    train(step, state, 1)
    assert step.oracle.verified == [1]


def test_operators_are_counted_and_transforms_pass() -> None:
    step, state = start(lambda: nn.Linear(6, 2))
    evaluate = hfta.make_eval_step(nn.Linear(6, 2), loss_fn, batch_dims=0)
    members = hfta.step.stacked(state)
    with FlopCounterMode(display=False) as counter:
        evaluate(members, batch())
    assert counter.get_total_flops() == M * 2 * 8 * 6 * 2 and evaluate.oracle.verified == []
    evaluate(members, batch())
    assert evaluate.oracle.verified == [2]
    hfta.vmap(lambda x: step(state, x)[1]["loss"])(torch.stack([batch(), batch()]))
    assert step.oracle.verified == []


def test_memory_that_runs_out_ends_the_oracle_with_one_warning() -> None:
    def greedy(x: Tensor) -> Tensor:
        if x.dim() == 2 and not torch._C._functorch.is_batchedtensor(x):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 2 * x

    step, state = start(lambda: model_with(greedy))
    with pytest.warns(UserWarning, match="no memory left to run a member alone.*no longer verified"):
        state, _ = step(state, batch())
    train(step, state)
    assert step.oracle.verified == [] and step.oracle.calls == 12


def test_what_pytorch_says_of_one_member_is_said_in_its_words() -> None:
    op = operator(lambda x: 2 * x)

    def picky(x: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(x):
            raise RuntimeError("The size of tensor a must match the size of tensor b")
        return op(x)

    step, state = start(lambda: model_with(picky))
    with pytest.raises(RuntimeError, match=r"^The size of tensor a must match the size of tensor b$"):
        step(state, batch())


def test_an_error_leaves_the_state_and_a_run_can_go_on() -> None:
    wrong = operator(lambda x: 3 * x)
    step, state = start(lambda: model_with(wrong), donate=True)
    before = optree.tree_map(torch.clone, state)
    with pytest.raises(VerifyError):
        step(state, batch())
    assert identical(state, before)
    alone, _ = start(lambda: model_with(wrong), chunk_size=1)
    state, _ = alone(state, batch())
    assert alone.oracle.verified == [1] and not identical(state, before)


def test_options() -> None:
    with pytest.raises(ValueError, match="verify is 'last'; it must be 'first', True or False"):
        start(Noisy, verify="last")
    oracle = Oracle("first", loss_fn, model := Noisy())
    keys = torch.zeros(2, dtype=torch.int64)
    assert oracle(keys, batch()) is not None and oracle(keys, batch()) is None
    assert [Oracle(False, loss_fn, model)(keys, batch())] * 2 == [None, None]


def test_evaluations_and_predictions_count_their_own_calls() -> None:
    models = [Noisy() for _ in range(M)]
    evaluate = hfta.make_eval_step(models[0], loss_fn)
    for _ in range(10):
        evaluate(hfta.stack_params(models), batch()[0])
    assert evaluate.oracle.verified == [1, 10]
    ensemble = hfta.Ensemble.from_modules(models)
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        ensemble(batch()[0]).square().mean().backward()
        optimizer.step()
    assert next(iter(ensemble._runs.values()))[1].oracle.verified == [1, 10]
    copied = copy.deepcopy(ensemble).eval()
    copied(batch()[0])
    assert next(iter(copied._runs.values()))[1].oracle.verified == [1]


def test_losses_of_steps_that_take_numbers() -> None:
    def loss(model: nn.Module, x: Tensor, hparams: Any) -> Tensor:
        return F.mse_loss(model(x), torch.zeros(8, 2)) * hparams["weight"]

    models = [nn.Sequential(nn.Linear(6, 2), nn.Dropout(rate)) for rate in (0.0, 0.2, 0.4)]
    step = hfta.make_train_step(models[0], loss, hfta.sgd(lr=0.1))
    state = step.init(*hfta.stack_params(models), seeds=range(M), hparams={"weight": [1.0, 2.0, 3.0]})
    train(step, state)
    assert step.oracle.verified == [1, 10]
