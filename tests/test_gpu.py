"""The contract on a CUDA device: rules, modules, trajectories, updates, noise, compiled and captured steps, mixed precision,
memory, an example.
"""

from __future__ import annotations

import csv
import gc
import time

import optree
import pytest
import torch
from examples.resnet.main import main as train_resnet
from torch import nn
from torch._dynamo.utils import counters

import hfta_func as hfta
import test_many
import test_optim
from cases import OPTIMIZERS, WORKLOADS, batches, loss_fn, models, ours
from hfta_func.run import background, kept
from hfta_func.testing import assert_matches_solo
from rule_cases import RULE_CASES
from rule_checks import check_against_loop
from test_composition import check_autocast
from test_modules import ROWS, check_every_sample
from test_modules import pytestmark as of_modules
from test_save import MODELS, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What PyTorch says of float32 products, of reductions, and of members whose weights are rows of a stack.
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor.*"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk of memory"),
    *of_modules,
]
SEEDS = [11, 7, 1002]


@pytest.fixture(autouse=True)
def float32():
    """Convolutions as exact as everything else is by default; in TF32 they keep three digits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def _on(device, tree):
    return optree.tree_map(lambda leaf: leaf.to(device), tree)


def _start(name="mlp", dtype=torch.float64, device="cuda", **options):
    """A step of three members, and its first state."""
    members = models(name, 3, dropout=0.3, dtype=dtype)
    step = hfta.make_train_step(members[0], loss_fn, ours(OPTIMIZERS[1]), **options)
    return step, step.init(*_on(device, hfta.stack_params(members)), seeds=SEEDS)


ALL_BATCHED = [pytest.param(case, id=case.name) for case in RULE_CASES]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_rules_match_the_loop_forward_and_backward(case, shared):
    with torch.device("cuda"):
        count = len(case.make())
        if shared and count == 1:
            pytest.skip("has one input")
        # PyTorch's kernel of weight normalisation takes the root in float32, whatever the dtype.
        tolerance = 1e-6 if case.name == "weight_norm" else 1e-11
        check_against_loop(case, (not shared,) + (True,) * (count - 1), tolerance)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ALL_BATCHED)
def test_autocast_is_that_of_a_member_alone(case, dtype):
    with torch.device("cuda"):
        check_autocast(case, dtype, "cuda")


@pytest.mark.parametrize(("info", "training", "dtype"), ROWS)
def test_modules(info, training, dtype):
    # A member alone has no gradients in evaluation if its recurrent layers are cuDNN's.
    recurrent = info.module_cls in (nn.RNN, nn.LSTM, nn.GRU)
    with torch.backends.cudnn.flags(enabled=training or not recurrent, allow_tf32=False):
        check_every_sample(info, training, dtype, "cuda")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WORKLOADS)
def test_members_are_arrays_of_one(name, compiled):
    torch._dynamo.reset()
    step, state = _start(name)
    run = torch.compile(step, fullgraph=True) if compiled else None
    assert_matches_solo(step, state, _on("cuda", batches(3, 5 if compiled else 50)), run=run, rtol=1e-10)


@pytest.mark.parametrize("name", WORKLOADS)
def test_trajectories_are_those_of_the_cpu(name):
    step, here = _start(name, device="cpu")
    there = _on("cuda", here)
    for batch in batches(3, 20):
        here, _ = step(here, batch)
        there, _ = step(there, _on("cuda", batch))
    for mine, theirs in zip(optree.tree_leaves(_on("cpu", there)), optree.tree_leaves(here), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_in_place_is_captured_as_it_is(name):
    """Nothing in it waits for the device, or asks it for a value."""
    step, state = _start(name, donate=True)
    given = _on("cuda", batches(3, 5))
    expected = optree.tree_map(torch.clone, state)
    for batch in given:
        expected, _ = step(expected, batch)
    before, inputs = optree.tree_map(torch.clone, (state, given[0]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(state, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(state, inputs)
    optree.tree_map(torch.Tensor.copy_, (state, inputs), (before, given[0]))
    for batch in given:
        optree.tree_map(torch.Tensor.copy_, inputs, batch)
        graph.replay()
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), state, expected)


@pytest.fixture
def waiting_is_an_error():
    """What waits for the device raises an error, from when it is called."""
    before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_does_not_wait_for_the_device(name, donate, autocast, waiting_is_an_error):
    step, state = _start(name, torch.float32, donate=donate, autocast=autocast)
    first, *given = _on("cuda", batches(3, 3, dtype=torch.float32))
    # What is made once, such as workspaces of libraries, may wait.
    state, _ = step(state, first)
    waiting_is_an_error()
    with pytest.raises(RuntimeError, match="synchronizing"):
        state.step.tolist()
    for batch in given:
        state, _ = step(state, batch)


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_goes_over_to_a_graph(donate, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("_COMPILING", "_COMPILING_A_LEAF"):
        monkeypatch.setattr(background, name, 0)
    monkeypatch.setattr(background, "_FIRST", 1)
    monkeypatch.setattr(background, "_TRIAL", 1_000_000)
    torch.compiler.reset()
    step, state = _start(donate=donate)
    other, quick = optree.tree_map(torch.clone, state), hfta.compile(step)
    given, end = _on("cuda", batches(3, 4)), time.monotonic() + 120
    while not quick.is_compiled and time.monotonic() < end:
        for batch in given:
            (state, found), (other, expected) = quick(state, batch), step(other, batch)
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-8, atol=1e-10)
        time.sleep(0.1)
    assert quick.is_compiled

    def go_on(state, other):
        earlier = []
        for batch in given:
            (state, found), (other, expected) = quick(state, batch), step(other, batch)
            earlier.append((found, expected))
        # What a call returned is not written by the next one.
        for found, expected in earlier:
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-8, atol=1e-10)
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10), state, other)
        return state, other

    state, other = go_on(state, other)
    # A state that lies elsewhere is no other graph.
    go_on(*optree.tree_map(torch.clone, (state, other)))
    state, other = go_on(state, other)
    assert quick.is_compiled


def test_a_compiled_step_in_place_is_replayed():
    torch.compiler.reset()
    step, state = _start(donate=True)
    run = kept.graph(step, kept.options(step, state, "cuda")[0])
    (batch,) = _on("cuda", batches(3, 1))
    for _ in range(3):
        run(state, batch)
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_updates_are_those_of_torch(case):
    with torch.device("cuda"):
        test_optim.test_members_are_separate_optimizers(case, False)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("keep", [None, [True, False, True]])
def test_updates_in_place_are_the_same(keep):
    with torch.device("cuda"):
        test_optim.test_an_optimizer_that_only_makes_new_tensors_updates_in_place(keep)


@pytest.mark.parametrize("dims", [0, None])
def test_many_steps_in_a_call(dims):
    with torch.device("cuda"):
        step, state = test_many.start(batch_dims=dims, donate=True)
        _, own = test_many.start(batch_dims=dims, donate=True)
        given = test_many.batches(dims)
    expected, found = test_many.one_by_one(step, own, given), step.many(state, given)
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b), found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_again_in_the_backward_pass(name):
    # Which a device runs in a thread of its own.
    with torch.device("cuda"):
        expected, found = (train(MODELS[name], 3, save=save) for save in ("all", "less"))
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), found, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_noise_is_that_of_the_cpu(compiled):
    def draws(key):
        return (
            hfta.random.uniform(key, (1001,)),
            hfta.random.normal(key, (1001,)),
            hfta.random.bernoulli(key, 0.3, (1001,)),
            hfta.random.randint(key, -3, 11, (1001,)),
            hfta.random.permutation(key, 101),
        )

    func = torch.compile(hfta.vmap(draws), fullgraph=True) if compiled else hfta.vmap(draws)
    keys = hfta.random.keys(SEEDS)
    for mine, theirs in zip(func(keys.cuda()), draws(keys), strict=True):
        assert torch.equal(mine.cpu(), theirs)


def _wide(count, device="cuda"):
    """A step, a state and a batch of models whose memory is that of their parameters, 8 MiB each, above all."""

    def factory():
        return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))

    step = hfta.make_train_step(factory(), lambda model, batch: model(batch).square().mean(), hfta.adam(lr=1e-3))
    state = step.init(*_on(device, hfta.init_params(factory, seeds=range(count))), seeds=range(count))
    batch = torch.randn(count, 16, 1024, device=device)
    # Libraries take their workspaces at the first call.
    step(state, batch)
    return step, state, batch


def _clean():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.fixture
def one_gib():
    """This process may take one GiB of the device."""
    _clean()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**30 / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_largest_array_that_runs(one_gib):
    step, state, batch = _wide(2)
    before = _clean()
    # Without a budget that it knows of, it has to find out.
    most = hfta.run.max_models(step, state, batch, limit=256, free=2**60)
    assert _clean() == before
    # A state alone is 24 MiB, a step takes its gradients, updates and the new state beside it.
    assert 4 <= most <= 42
    members = torch.arange(most, device="cuda") % 2
    _, metrics = step(hfta.take(state, members), batch[members])
    assert metrics["finite"].all()


def test_a_plan_where_large_sizes_run_out_of_memory(one_gib):
    step, state, batch = _wide(2)
    before = _clean()
    found = hfta.plan(step, state, batch, sizes=[1, 2, 4, 128, 256])
    assert _clean() == before
    assert found.sizes == (1, 2, 4) and 4 <= found.num_models <= 42
    assert found.memory(found.num_models) <= found.free <= 2**30
    # Blocks of the allocator that are too small for what is asked lie idle, which no prediction knows.
    assert found.num_models / 2 <= hfta.run.max_models(step, state, batch) <= found.num_models + 2
    with pytest.raises(MemoryError, match="with M = 128, the smallest of sizes"):
        hfta.plan(step, state, batch, sizes=[128, 256])
    assert _clean() == before


def test_memory_is_predicted():
    step, state, batch = _wide(2)
    before = _clean()
    found = hfta.plan(step, state, batch, sizes=[2, 4])
    assert _clean() == before
    for count in (6, 12):
        members = torch.arange(count, device="cuda") % 2
        larger, data = hfta.take(state, members), batch[members]
        larger, _ = step(larger, data)
        held = sum(leaf.nbytes for leaf in optree.tree_leaves(larger))
        _clean()
        torch.cuda.reset_peak_memory_stats()
        beside = torch.cuda.memory_allocated() - held
        step(larger, data)
        torch.cuda.synchronize()
        assert found.memory(count) == pytest.approx(torch.cuda.max_memory_allocated() - beside, rel=0.15)


def test_an_example(tmp_path, capsys):
    argv = "--size small --limit 64 --batch-size 16 --epochs 2 --lr 0.1 0.3 1.0 --device cuda --hfta --amp".split()
    assert train_resnet([*argv, "--out", str(tmp_path), "--data", str(tmp_path / "data")]) == 0
    out, err = capsys.readouterr()
    assert not err and "Final " in out.splitlines()[-1]
    with open(tmp_path / "resnet.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and all(0 < float(row["loss"]) < 100 for row in rows)
