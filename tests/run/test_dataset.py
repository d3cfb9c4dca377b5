"""Batches of data sets: items and noise of each member are those of a plain loop, and streams train as lists do."""

import gc
import itertools
import multiprocessing
import pickle
import random
import signal

import numpy
import optree
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import hfta_func as hfta
from hfta_func.run.dataset import seed_all

ROWS = 10
SEEDS = [4, 9, 2]
INPUTS = torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Noisy(Dataset):
    """Items with noise of three generators, as of random transforms; the noise stands apart from the data."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        assert type(row) is int
        # More calls for some items than for others must not move the noise of the next one.
        noise = [[torch.rand(()).item(), random.random(), numpy.random.rand()] for _ in range(1 + row % 3)]
        return {"x": INPUTS[row], "row": row, "noise": torch.tensor(noise[-1], dtype=torch.float64)}


def loader(seeds=SEEDS, **options):
    return hfta.DatasetLoader(Noisy(), 4, seeds=seeds, **options)


def same(a, b):
    a, b = list(a), list(b)
    return len(a) == len(b) > 0 and all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


def of_member(batches, member):
    return [hfta.take(batch, member) for batch in batches]


def noise_by_row(batches):
    """The noise of each item in an epoch of loaders that draw none twice, ``[M, n, 3]``."""
    rows, noise = (torch.cat([batch[name] for batch in batches], 1) for name in ("row", "noise"))
    return noise.gather(1, rows.argsort(1)[..., None].expand(-1, -1, 3))


DEALS = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "full batches": {"drop_last": True},
    "rows": {"rows": [[0, 1, 2, 3, 4, 5, 6], [3, 1], [9, 8, 7, 6]]},
    "short epochs": {"rows": [[0, 1, 2, 3, 4, 5, 6], [3, 1], [9, 8, 7, 6]], "batches_per_epoch": 1},
    "bootstrap": {"bootstrap": True},
    "folds": {"folds": 3},
    "weights": {"weights": torch.arange(ROWS)},
}


@pytest.mark.parametrize("deal", DEALS)
def test_items_are_dealt_as_rows_of_tensors(deal):
    batches, rows = loader(**DEALS[deal]), hfta.ArrayLoader(torch.arange(ROWS), 4, seeds=SEEDS, **DEALS[deal])
    assert len(batches) == len(rows)
    for _ in range(2):
        for batch, expected in itertools.zip_longest(batches, rows):
            assert torch.equal(batch["row"], expected) and torch.equal(batch["x"], INPUTS[expected])
    assert batches.state_dict() == rows.state_dict()


def test_noise_belongs_to_member_epoch_and_item():
    shuffled, ordered, small = loader(), loader(shuffle=False), hfta.DatasetLoader(Noisy(), 3, seeds=SEEDS)
    epochs = [noise_by_row([*shuffled.batches(epoch)]) for epoch in range(2)]
    for epoch, noise in enumerate(epochs):
        assert torch.equal(noise, noise_by_row([*ordered.batches(epoch)]))
        assert torch.equal(noise, noise_by_row([*small.batches(epoch, 0)]))
    # Three generators, three members, ten items, two epochs: no number twice.
    assert len(torch.stack(epochs).unique()) == 3 * 3 * ROWS * 2
    assert torch.equal(*noise_by_row([*loader([7, 7]).batches(0)]))


@pytest.mark.parametrize("deal", ["rows", "bootstrap", "folds", "weights"])
def test_an_item_drawn_again_has_other_noise(deal):
    batches = [*loader(**DEALS[deal]).batches(0)]
    noise = torch.cat([batch["noise"] for batch in batches], 1)
    rows = torch.cat([batch["row"] for batch in batches], 1)
    assert any(len(each.unique()) < len(each) for each in rows)
    assert len(noise.unique()) == noise.numel()


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def noisy_collate(items):
    batch = default_collate(items)
    return {**batch, "mask": torch.rand(len(items)) + random.random() + numpy.random.rand()}


LOADING = {"here": {}, "workers": {"num_workers": 2}, "lasting": {"num_workers": 1, "persistent_workers": True}}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", LOADING)
def test_the_caller_s_generators_stay_whoever_loads(name):
    options = {**LOADING[name], "collate_fn": noisy_collate}
    before = generators()
    array = loader(**options)
    batches = [*array]
    processes = multiprocessing.active_children()
    assert generators() == before and len(processes) == (name == "lasting")
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    before = generators()
    assert same(loader(collate_fn=noisy_collate), batches)
    # Others load while an iteration is under way, and after one that was broken off.
    first = array.batches(0)
    assert same([next(first)], batches[:1])
    assert same(array.take([2, 0]).batches(0, 1), of_member(batches[1:], [2, 0])) and same(first, batches[1:])
    assert {*processes} <= {*multiprocessing.active_children()}, "the same process loads in all epochs"
    stopped = array.batches(1)
    next(stopped), stopped.close()
    assert same(array.batches(0, 2), batches[2:])
    loading = {*multiprocessing.active_children()}
    stopped = array.batches(1)
    next(stopped), stopped.close()
    assert same(array.batches(0, 2), batches[2:])
    assert loading == {*multiprocessing.active_children()}, "the same process, also after what was broken off"
    assert same(pickle.loads(pickle.dumps(array)).batches(0, 2), batches[2:])
    assert generators() == before
    gc.disable()
    del array, stopped
    gc.enable()
    assert not loading & {*multiprocessing.active_children()}, "processes end with their loader"


def test_noise_of_collating_belongs_to_member_epoch_and_batch():
    array = loader(collate_fn=noisy_collate, drop_last=True)
    epochs = [list(array.batches(epoch)) for epoch in range(2)]
    assert len(torch.stack([batch["mask"] for batch in epochs[0] + epochs[1]]).unique()) == 3 * 4 * 2 * 2
    for member, seed in enumerate(SEEDS):
        alone = loader([seed], collate_fn=noisy_collate, drop_last=True)
        assert same(alone.batches(1), of_member(epochs[1], member))


def test_shared_batches_are_loaded_once():
    loads = []

    class Counted(Noisy):
        def __getitem__(self, row):
            loads.append(row)
            return super().__getitem__(row)

    shared = hfta.DatasetLoader(Counted(), 4, shared=True, seeds=9, collate_fn=noisy_collate)
    batches = [*shared.batches(1)]
    assert sorted(loads) == [*range(ROWS)]
    assert same(
        [optree.tree_map(lambda leaf: leaf[None], batch) for batch in batches],
        loader([9], collate_fn=noisy_collate).batches(1),
    )
    assert same(shared.take([1, 0]).batches(1), batches)
    # What collate_fn returns is passed on as it is: a step that shares batches may take more than tensors.
    names = hfta.DatasetLoader(["a", "b"], 2, shared=True, shuffle=False)
    assert [*names] == [["a", "b"]]


def test_members_are_taken_and_followed():
    array = loader()
    first, second = list(array), list(array)
    array.load_state_dict({"epoch": 1, "batches": 2})
    assert same(array.take([2, 0]), of_member(second[2:], [2, 0]))
    followed = array.follow([2, -1], hfta.random.keys([2, 9]), [0, 1])
    followed.load_state_dict({"epoch": 1, "batches": 0})
    joined = [hfta.concat([a, b]) for a, b in zip(of_member(second, 2), of_member(first, 1), strict=True)]
    assert same(followed, joined)
    assert same(pickle.loads(pickle.dumps(array)).batches(1), second)


def test_parts_held_out():
    array = loader(folds=3)
    held_out, again = array.held_out(), array.held_out()
    assert torch.equal(held_out["x"], INPUTS[held_out["row"]]) and same([held_out], [again])
    assert torch.equal(held_out["row"], hfta.ArrayLoader(torch.arange(ROWS), 4, seeds=SEEDS, folds=3).held_out())
    assert not torch.isin(held_out["noise"], torch.cat([batch["noise"] for batch in array], 1)).any()
    with pytest.raises(hfta.errors.HyperparameterError, match="only folds hold rows out"):
        loader().held_out()


def metric(model, batch):
    return {"val": loss_fn(model, batch)}


@pytest.mark.parametrize("deal", ["rows", "folds", "shared", "shuffled"])
def test_evaluation_sees_the_items_once(deal):
    array, (step, state) = loader(**(DEALS | {"shared": {"seeds": 9, "shared": True}})[deal]), arrayed()
    result = hfta.fit(step, state, loader(), epochs=2, evaluate=(metric, array), progress=False)
    expected = {"rows": DEALS["rows"]["rows"]}.get(deal, [[*range(ROWS)]] * 3)
    expected = array.held_out()["row"].tolist() if deal == "folds" else expected
    for member, model in enumerate(hfta.unstack_params(make(), *result.state[:2])):
        batches = [batch for _, batch in array.take(member).once()]
        if deal != "shared":
            batches = [optree.tree_map(lambda leaf: leaf[0], batch) for batch in batches]
        rows = [row for batch in batches for row in batch["row"].tolist()]
        assert sorted(rows) == sorted(expected[member])
        loss = sum(loss_fn(model, batch) * len(batch["row"]) for batch in batches) / len(rows)
        torch.testing.assert_close(result.history["val"][-1, member], loss.detach(), rtol=1e-12, atol=1e-12)


class Table:
    """As a data set of Hugging Face: rows by number or slice, as dicts, and several at once as a dict of columns."""

    column_names = ("input", "label")

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"input": INPUTS[index].tolist(), "label": [1, 0][index % 2]}

    def __getitems__(self, indices):
        raise AssertionError("items that are loaded together share their noise")


def pad(items):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(item) for item in items], batch_first=True)


def test_containers_of_items_and_batches():
    (batch,) = hfta.DatasetLoader(Table(), ROWS, seeds=[1], shuffle=False)
    assert torch.equal(torch.stack(batch["input"], -1)[0], INPUTS) and batch["label"].shape == (1, ROWS)
    ragged = [[1.0] * (1 + row % 3) for row in range(6)]
    (batch,) = hfta.DatasetLoader(ragged, 6, seeds=SEEDS, collate_fn=pad)
    assert batch.shape == (3, 6, 3) and batch.sum((1, 2)).tolist() == [12.0] * 3
    pairs = TensorDataset(INPUTS, INPUTS.sum(1))
    packed = hfta.DatasetLoader(
        pairs, 4, seeds=SEEDS, collate_fn=lambda items: torch.nn.utils.rnn.pack_sequence([x for x, _ in items])
    )
    assert isinstance(batch := next(iter(packed)), torch.nn.utils.rnn.PackedSequence) and batch.data.shape == (3, 12)
    moved = next(iter(hfta.DatasetLoader(pairs, 4, seeds=SEEDS, device="meta")))
    assert [leaf.device.type for leaf in moved] == ["meta", "meta"]


def make():
    return torch.nn.Linear(3, 1).double()


def loss_fn(model, batch):
    return mse_loss(model(batch["x"] + batch["noise"]).squeeze(-1), batch["x"].sum(-1))


LRS = [0.1, 0.05, 0.02]


def arrayed(**options):
    step = hfta.make_train_step(make(), loss_fn, hfta.sgd(lr=LRS, momentum=0.5), **options)
    return step, step.init(*hfta.init_params(make, SEEDS), seeds=SEEDS)


def looped(member, batches):
    """One ordinary model, trained by torch.optim on batches ``[1, N, ...]``."""
    torch.manual_seed(SEEDS[member])
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LRS[member], momentum=0.5)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, optree.tree_map(lambda leaf: leaf[0], batch)).backward()
        optimizer.step()
    return model.weight.detach()


def trained(after=None, data=None, batch_dims=0, seed=0, **options):
    """A run of three epochs, broken off after some steps if their number is given."""
    step, state = arrayed(batch_dims=batch_dims)
    steps = itertools.count()

    def some(state, batch):
        if next(steps) == after:
            raise KeyboardInterrupt
        return step(state, batch)

    seed_all(seed)
    return hfta.fit(some, state, loader() if data is None else data, epochs=3, **{"progress": False, **options})


def test_training_is_that_of_a_loop():
    result = trained()
    for member, seed in enumerate(SEEDS):
        alone = loader([seed])
        weight = looped(member, [batch for epoch in range(3) for batch in alone.batches(epoch)])
        torch.testing.assert_close(result.state.params["weight"][member], weight, rtol=1e-12, atol=1e-12)


def test_inactive_members_are_not_loaded():
    class Counted(Noisy):
        def __getitem__(self, row):
            loads.append(row)
            return super().__getitem__(row)

    def change(state, history):
        counts.append(len(loads))
        return state._replace(active=torch.tensor([False, True, False])) if len(history) == 1 else None

    loads, counts = [], []
    data = hfta.DatasetLoader(Counted(), 4, seeds=SEEDS)
    result = trained(data=data, callbacks=[change], compact=True)
    assert counts == [3 * ROWS, 4 * ROWS, 5 * ROWS] and data.state_dict() == {"epoch": 3, "batches": 0}
    torch.testing.assert_close(
        result.state.params["weight"][1], trained().state.params["weight"][1], rtol=1e-12, atol=1e-12
    )


@pytest.mark.exhaustive
def test_workers_of_a_run_load_for_their_members():
    data, (step, state) = loader(num_workers=1), arrayed()
    result, expected = hfta.fit(step, state, data, epochs=3, workers=2, progress=False), trained()
    torch.testing.assert_close(result.state.params["weight"], expected.state.params["weight"], rtol=1e-12, atol=1e-12)


class Interrupted(Noisy):
    """Items that are loaded while Ctrl-C is pressed, which reaches all processes of a terminal."""

    def __getitem__(self, row):
        signal.raise_signal(signal.SIGINT)
        return super().__getitem__(row)


@pytest.mark.exhaustive
def test_ctrl_c_is_for_the_process_that_trains():
    data = hfta.DatasetLoader(Interrupted(), 4, seeds=SEEDS, num_workers=1, multiprocessing_context="spawn")
    assert same(data.batches(0), loader().batches(0))


class Stream(IterableDataset):
    """Items one after another, with no length."""

    def __iter__(self):
        for row in range(ROWS):
            yield Noisy()[row]


class Pipeline:
    """As a pipeline of WebDataset: batches one after another, and a length that it does not know."""

    def __iter__(self):
        return iter(DataLoader(Stream(), 4))

    def __len__(self):
        raise TypeError("the length of the pipeline is not known")


@pytest.mark.parametrize("make_stream", [lambda: DataLoader(Stream(), 4), Pipeline], ids=["DataLoader", "pipeline"])
def test_streams_without_a_length_train_and_go_on(make_stream, tmp_path, capsys):
    seed_all(0)
    batches = [*make_stream(), *make_stream(), *make_stream()]
    expected = trained(None, make_stream(), batch_dims=None, progress=True)
    shown = capsys.readouterr().err
    assert "epoch 3/3" in shown and "9step" in shown
    for member in range(3):
        weight = looped(member, [optree.tree_map(lambda leaf: leaf[None], batch) for batch in batches])
        torch.testing.assert_close(expected.state.params["weight"][member], weight, rtol=1e-12, atol=1e-12)
    options = {"batch_dims": None, "resume": tmp_path / "run", "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        trained(4, make_stream(), **options)
    result = trained(None, make_stream(), seed=1, **options)
    assert torch.equal(result.state.params["weight"], expected.state.params["weight"])
