"""Epochs of each member's own: with rows of unequal number, a run is that of arrays of one."""

import contextlib

import pytest
import torch
from torch import nn

import hfta_func as hfta
from hfta_func.workers.pool import Inline

ROWS = 11
DATA = {
    "x": torch.randn(ROWS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "row": torch.arange(ROWS, dtype=torch.float64),
}
SEEDS = [4, 9, 4, 2]
OWN = [[0, 3, 5], [10, 9, 8, 7, 6, 5, 4], [2], range(ROWS)]
LENGTHS = [2, 4, 1, 6]
WAYS = {
    "in this process": {},
    "compact": {"compact": True},
    "workers": {"workers": 2},
    "executor": {"executor": Inline()},
    "compact executor": {"executor": Inline(), "compact": True},
}


def make():
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1)).double()


def loss_fn(model, batch):
    return (model(batch["x"]) - 1).square().mean(), {"first row": batch["row"][0]}


def error(model, batch):
    return {"error": (model(batch["x"]) - 1).square().mean()}


def stop():
    return hfta.callbacks.early_stopping("error", 1, min_delta=0.01)


def jitter(batch):
    return {**batch, "x": batch["x"] + 0.01 * torch.randn_like(batch["x"])}


def make_loader(kind, members, **rows):
    rows, seeds = rows or {"rows": [OWN[member] for member in members]}, [SEEDS[member] for member in members]
    if kind == "tensors":
        return hfta.ArrayLoader(DATA, 2, seeds=seeds, transform=jitter, **rows)
    items = [{name: leaf[row] for name, leaf in DATA.items()} for row in range(ROWS)]
    return hfta.DatasetLoader(items, 2, seeds=seeds, **rows)


class Broken(Exception):
    pass


def run(loader, members, *callbacks, epochs=5, called=None, limit=None, optimizer=None, **options):
    """Train members; ``called`` notes the size of the array in each step, and after ``limit`` steps the run breaks off."""
    seeds = [SEEDS[member] for member in members]
    made = hfta.make_train_step(make(), loss_fn, optimizer or hfta.adam(lr=0.1), donate=True)
    state = made.init(*hfta.init_params(make, seeds), seeds=seeds)
    called = [] if called is None and limit is not None else called

    def step(state, batch):
        if len(called) == limit:
            raise Broken
        called.append(len(state.keys))
        return made(state, batch)

    options = {"evaluate": (hfta.make_eval_step(make(), error), DATA), "progress": False, **options}
    return hfta.fit(made if called is None else step, state, loader, epochs=epochs, callbacks=callbacks, **options)


def assert_alone(result, member, alone, place=None):
    """One member of a result is an array of one, in its state and in the metrics of its epochs."""
    (state, history), place = result, member if place is None else place
    assert state.step[place] == alone.state.step[0]
    torch.testing.assert_close(hfta.take(state.params, [place]), alone.state.params, rtol=1e-10, atol=1e-12)
    epochs = len(alone.history)
    assert all(len(metrics) >= 3 for metrics in history.epochs)
    for name in history.epochs[0]:
        theirs, own = history[name][:epochs, member], alone.history[name][:, 0]
        torch.testing.assert_close(theirs, own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_a_run_is_that_of_arrays_of_one(kind, way):
    members = range(4)
    whole = run(make_loader(kind, members), members, stop(), **WAYS[way])
    assert whole.state.active.any() or len(set(whole.state.step.tolist())) == 4
    for member in members:
        assert_alone(whole, member, run(make_loader(kind, [member]), [member], stop()))
    steps = run(make_loader(kind, members), members, **WAYS[way]).state.step
    assert steps.tolist() == [5 * length for length in LENGTHS]


@pytest.mark.parametrize("once_per", ["epoch", "batch"])
def test_schedulers(once_per):
    def trained(members, **options):
        models = [make() for _ in members]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        loader = make_loader("tensors", members)
        totals = [5 * length if once_per == "batch" else 5 for length in loader.lengths]
        # Those of OneCycleLR that step too often fail.
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(*each)
            for each in zip(optimizers, [0.02] * len(totals), totals, strict=True)
        ]
        every = loader.lengths if once_per == "epoch" else 1
        optimizer = hfta.from_torch(optimizers, schedulers, models=models, steps=[n - 1 for n in totals], every=every)
        return run(loader, members, optimizer=optimizer, **options)

    whole = trained(range(4), compact=True)
    for member in range(4):
        assert_alone(whole, member, trained([member]))


def test_folds_of_unequal_parts():
    members = range(4)
    whole = run(make_loader("tensors", members, folds=3), members)
    assert len(set(whole.state.step.tolist())) == 1
    # 11 rows in 4 parts: 8 rows for training, or 9.
    loader = make_loader("tensors", members, folds=4)
    alone = [run(loader.take([member]), [member], stop()) for member in members]
    assert loader.lengths == [4, 4, 4, 5]
    whole = run(loader, members, stop())
    for member in members:
        assert_alone(whole, member, alone[member])


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize("way", ["in this process", "compact", "compact executor"])
@pytest.mark.parametrize("save_every", [None, 1, 2, 3])
def test_a_run_that_is_broken_off_goes_on_to_the_same_bits(kind, way, save_every, tmp_path):
    members, options = range(4), {"resume": tmp_path / "run.safetensors", "save_every": save_every, **WAYS[way]}
    expected = run(make_loader(kind, members), members, stop(), **WAYS[way])
    for limit in (3, 5, 2, 6, 9, 1, 7):
        with contextlib.suppress(Broken):
            run(make_loader(kind, members), members, stop(), limit=limit, **options)
    state, history = run(make_loader(kind, members), members, stop(), **options)
    assert all(map(torch.equal, state.params.values(), expected.state.params.values()))
    assert state.step.tolist() == expected.state.step.tolist() and len(history) == len(expected.history)
    for name in history.epochs[0]:
        assert torch.equal(history[name].nan_to_num(-1), expected.history[name].nan_to_num(-1))


@pytest.mark.parametrize("options", [{}, {"compact": True}, {"workers": 2}])
def test_an_epoch_is_as_long_as_those_need_who_are_left(options):
    def leave(state, history):
        return hfta.take(state, [2, 0]) if len(history) == 2 else None

    called = None if "workers" in options else []
    members = range(4)
    left = run(make_loader("tensors", members), members, leave, called=called, **options)
    assert left.state.step.tolist() == [5, 10]
    for place, member in enumerate((2, 0)):
        assert_alone(left, member, run(make_loader("tensors", [member]), [member]), place)
    assert called is None or len(called) == 2 * 6 + 3 * 2


def test_a_smaller_array_trains_those_who_have_a_batch():
    def freeze(state, history):
        return state._replace(active=torch.tensor([True, True, False, False])) if len(history) == 1 else None

    members, called = range(4), []
    frozen = run(make_loader("tensors", members), members, freeze, epochs=3, called=called, compact=True)
    # The first epoch ends with its longest member, the others without those that are inactive.
    assert called == [4, 3, 2, 2, 1, 1] + 2 * [2, 2, 1, 1]
    assert frozen.state.step.tolist() == [6, 12, 1, 6]
    for member in (0, 1):
        assert_alone(frozen, member, run(make_loader("tensors", [member]), [member], epochs=3))
    assert frozen.history["loss"][1:, 2:].isnan().all() and frozen.history["error"].isfinite().all()


def test_what_rests_is_neither_loaded_nor_judged():
    """A row that is not finite stops nobody before its batch, and items of those that rest are not asked for."""
    seen = []

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, row):
            seen.append(row)
            return {name: leaf[row] for name, leaf in DATA.items()}

    members = [0, 3]
    rows = [[0], range(1, ROWS)]
    loader = hfta.DatasetLoader(Items(), 2, seeds=[1, 2], rows=rows)
    run(loader, members, epochs=1)
    assert loader.lengths == [1, 5] and seen.count(0) == 2 and len(seen) == 2 + 10

    spoilt = {**DATA, "x": DATA["x"].clone()}
    spoilt["x"][0] = torch.nan
    # The second pass of the first member begins with its spoilt row only in some order; it has one batch in an epoch.
    loader = hfta.ArrayLoader(spoilt, 3, seeds=[1, 2], rows=[[4, 5, 6], range(1, ROWS)])
    assert run(loader, members, epochs=2).history.failures == []
    clean = hfta.ArrayLoader(spoilt, 2, seeds=[1, 2], rows=[[0, 4], range(1, ROWS)])
    (failure,) = run(clean, members, epochs=1).history.failures
    assert (failure.member, failure.step) == (0, 0)


def test_lengths():
    loader = make_loader("tensors", range(4))
    assert loader.lengths == LENGTHS and len(loader) == 6
    assert loader.take([1, 2]).lengths == [4, 1]
    few = make_loader("tensors", range(4), rows=OWN, batches_per_epoch=3)
    assert few.lengths == [3] * 4
    assert make_loader("tensors", range(4), bootstrap=True).lengths == [6] * 4
    # A pass goes on, so that there is no smaller last batch to drop.
    assert make_loader("tensors", range(4), rows=OWN, drop_last=True).lengths == [1, 3, 1, 5]
    assert hfta.ArrayLoader(DATA, 2, shared=True).lengths == [6]
