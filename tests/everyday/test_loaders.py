"""Loaders, samplers and counts of rows as scripts have them, each beside the loop of a script."""

import concurrent.futures
import io
import queue
import random as python_random
import threading
import time

import numpy
import optree
import pytest
import torch
import tqdm
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import hfta_func as hfta
import scripts
from hfta_func._torch import num_dispatch_modes
from hfta_func.errors import BatchError, HyperparameterError
from scripts import assert_trained

X = torch.randn(26, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(1) + X[:, 0] * X[:, 1]
LABELS = torch.arange(26) % 4
LRS = [0.1, 0.05, 0.02]


def make():
    return nn.Linear(3, 1).double()


def loss_fn(model, batch):
    return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()


def array(loss=loss_fn, lrs=LRS, optimizer=None, **options):
    step = hfta.make_train_step(make(), loss, optimizer or hfta.sgd(lr=lrs), **options)
    return step, step.init(*hfta.init_params(make, range(len(lrs))), seeds=range(len(lrs)))


def loop(seed, batches):
    """A script: one model trained on batches."""
    return scripts.loop(loss_fn, seed, make, epochs=1, data=batches, lr=LRS[seed])


@pytest.mark.parametrize("members", [1, 3])
def test_samplers_that_shuffle_by_epoch(members):
    def make_loader():
        data = TensorDataset(X, Y)
        return DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3))

    def batches():
        loader = make_loader()
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            yield from loader

    step, state = array(lrs=LRS[:members], batch_dims=None)
    state, _ = hfta.fit(step, state, make_loader(), epochs=3, progress=False)
    assert_trained(state, [loop(seed, batches()) for seed in range(members)])


def test_a_run_broken_off_goes_on_in_its_epoch_of_a_sampler(tmp_path):
    def trained(epochs, **options):
        data = TensorDataset(X, Y)
        step, state = array(batch_dims=None)
        loader = DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=0))
        return hfta.fit(step, state, loader, epochs=epochs, progress=False, **options).state.params

    trained(1, resume=tmp_path / "run")
    torch.testing.assert_close(trained(3, resume=tmp_path / "run"), trained(3), rtol=0, atol=0)


def classes(seed, epoch):
    """Batches of two classes with four rows each, as metric learning needs."""
    draw = numpy.random.default_rng([seed, epoch])
    batches = []
    for _ in range(3):
        chosen = draw.choice(4, 2, replace=False)
        batches += [row for label in chosen for row in draw.choice(torch.nonzero(LABELS == label)[:, 0], 4).tolist()]
    return batches


def batch_sampler(seed, epoch):
    generator = torch.Generator().manual_seed(100 * seed + epoch)
    return list(BatchSampler(RandomSampler(range(26), generator=generator), 8, drop_last=True))


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("sampler", [classes, batch_sampler])
@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_batches_that_a_script_s_own_sampler_draws_for_each_member(sampler, items, workers):
    seeds = [7, 1, 4]
    given = (TensorDataset(X, Y), 8) if items else ((X, Y), 8)
    loader = (hfta.DatasetLoader if items else hfta.ArrayLoader)(*given, seeds=seeds, sampler=sampler)
    assert len(loader) == 3
    step, state = array()
    state, _ = hfta.fit(step, state, loader, epochs=2, progress=False, workers=workers)
    for member, seed in enumerate(seeds):
        rows = torch.cat([torch.as_tensor(sampler(seed, epoch)).flatten() for epoch in range(2)]).split(8)
        assert_trained(hfta.take(state, [member]), [loop(member, [(X[each], Y[each]) for each in rows])])


def test_samplers_of_unequal_length_are_refused():
    loader = hfta.ArrayLoader((X, Y), 4, seeds=[0, 1], sampler=lambda seed, epoch: range(8 + 4 * seed))
    with pytest.raises(HyperparameterError, match=r"model 0: sampler\(0, 0\) returned 8 rows, but others have 12"):
        next(iter(loader))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_that_ends_early_is_named(drop_last):
    rows = {(4, 0): 12, (7, 0): 12, (4, 1): 10, (7, 1): 10, (4, 2): 8, (7, 2): 8}
    options = {"seeds": [4, 7], "drop_last": drop_last, "sampler": lambda *pair: range(rows[pair])}
    loader = hfta.ArrayLoader((X, Y), 4, **options)
    assert [len(batch[0][0]) for batch in loader] == [4, 4, 4]
    if drop_last:
        with pytest.raises(HyperparameterError, match=r"model 0: sampler\(4, 1\) returned 10 rows.* need 12"):
            next(iter(loader))
    else:
        assert [len(batch[0][0]) for batch in loader] == [4, 4, 2]
        with pytest.raises(HyperparameterError, match=r"model 0: sampler\(4, 2\) returned 8 rows.* need 9"):
            next(iter(loader))


def test_a_data_loader_with_as_many_rows_as_members_is_no_loader_of_members():
    step, state = array()
    with pytest.raises(BatchError, match=r"batches of 3 rows, as many as models, .* with batch_dims=None"):
        hfta.fit(step, state, DataLoader(TensorDataset(X, Y), 3), epochs=1, progress=False)
    # Items that are the batches of all members have no batch size.
    parts = TensorDataset(X[:24].view(4, 3, 2, 3), Y[:24].view(4, 3, 2))
    assert hfta.fit(step, state, DataLoader(parts, None), epochs=1, progress=False).state.step.tolist() == [4] * 3


def test_the_strength_of_augmentation_and_weights_of_classes_are_each_member_s_own():
    strengths, weights = [0.0, 0.5, 2.0], torch.tensor([[1.0, 4.0], [1.0, 1.0], [3.0, 0.5]], dtype=X.dtype)

    def loss_fn(model, batch, hparams):
        inputs, targets = batch
        rare = torch.where(targets > 0, hparams["positive"], hparams["negative"])
        return (rare * (model(inputs * (1 + hparams["strength"])).squeeze(-1) - targets).square()).mean()

    hparams = {"strength": strengths, "negative": weights[:, 0], "positive": weights[:, 1]}
    models = [nn.Linear(3, 1).to(X.dtype) for _ in strengths]
    step = hfta.make_train_step(models[0], loss_fn, hfta.sgd(lr=0.1))
    state = step.init(*hfta.stack_params(models), seeds=range(3), hparams=hparams)
    loader = hfta.ArrayLoader((X, Y), 8, seeds=range(3), sampler=classes)
    state, _ = hfta.fit(step, state, loader, epochs=2, progress=False)
    for member, model in enumerate(hfta.unstack_params(models[0], state.params, state.buffers)):
        plain, own = models[member], {name: column[member] for name, column in hparams.items()}
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for rows in torch.cat([torch.as_tensor(classes(member, epoch)).flatten() for epoch in range(2)]).split(8):
            optimizer.zero_grad()
            loss_fn(plain, (X[rows], Y[rows]), own).backward()
            optimizer.step()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def metrics(model, batch):
    errors = (model(batch[0]).squeeze(-1) - batch[1]).abs()
    return {"mean": errors.mean(), "sum": errors.sum(), "wrong": (errors > 1).sum()}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", ["parts", "loader", "rows", "whole"])
def test_sums_over_a_test_set_beside_means(kind, members):
    rows = [[0, 3, 5], range(26), range(4, 15)][:members]
    data = {
        "parts": [(X[low : low + 8], Y[low : low + 8]) for low in range(0, 26, 8)],
        "loader": hfta.ArrayLoader((X, Y), 8, shared=True),
        "rows": hfta.ArrayLoader((X, Y), 4, seeds=range(members), rows=rows),
        "whole": (X, Y),
    }[kind]
    step, state = array(
        lambda model, batch: (loss_fn(model, batch), {"seen": torch.tensor(len(batch[0]))}), LRS[:members]
    )
    loader = hfta.ArrayLoader((X, Y), 4, seeds=range(members))
    sums = "sum", "wrong", "seen"
    state, history = hfta.fit(step, state, loader, epochs=2, evaluate=(metrics, data), sums=sums, progress=False)
    assert history["seen"].dtype == torch.int64 and history["seen"].tolist() == [[26] * members] * 2
    for member, model in enumerate(hfta.unstack_params(make(), *state[:2])):
        own = torch.tensor(rows[member]) if kind == "rows" else torch.arange(26)
        for name, value in metrics(model, (X[own], Y[own])).items():
            torch.testing.assert_close(history[name][-1, member].double(), value.double().detach(), rtol=1e-10, atol=0)


class Graphs:
    """As a batch of graphs: nodes of all of them, and which graph each belongs to."""

    def __init__(self, sizes):
        self.x, self.num_graphs = X[: sum(sizes)], len(sizes)
        self.graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def test_means_are_weighted_by_graphs():
    def pooled(model, graphs):
        return torch.zeros(graphs.num_graphs).double().index_add(0, graphs.graph, model(graphs.x)[:, 0]).mean()

    batches = [Graphs([3, 9, 2]), Graphs([1])]
    step, state = array(batch_dims=None)
    loader = [(X, Y)]
    state, history = hfta.fit(step, state, loader, epochs=1, evaluate=(pooled, batches), progress=False)
    for member, model in enumerate(hfta.unstack_params(make(), *state[:2])):
        expected = sum(pooled(model, each) * each.num_graphs for each in batches) / 4
        torch.testing.assert_close(history["pooled"][-1, member], expected.detach(), rtol=1e-10, atol=0)


def test_batches_whose_tensors_differ_in_length():
    """Boxes of images: what a row is, the metric says."""
    batches = [{"images": X[:4], "boxes": X[4:13]}, {"images": X[13:14], "boxes": X[14:26]}]

    def box(model, batch):
        return {"box": model(batch["boxes"]).mean()}

    def counted(model, batch):
        return {**box(model, batch), "rows": torch.tensor(len(batch["boxes"]))}

    step, state = array()
    loader = hfta.ArrayLoader((X, Y), 26, seeds=range(3))
    with pytest.raises(BatchError, match=r"lengths \[1, 12\], .* have the metric return .* as 'rows'"):
        hfta.fit(step, state, loader, epochs=1, evaluate=(box, batches), progress=False)
    state, history = hfta.fit(step, state, loader, epochs=1, evaluate=(counted, batches), progress=False)
    assert "rows" not in history
    for member, model in enumerate(hfta.unstack_params(make(), *state[:2])):
        expected = model(torch.cat([each["boxes"] for each in batches])).mean()
        torch.testing.assert_close(history["box"][-1, member], expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("where", ["step", "evaluate"])
def test_a_value_for_each_row_has_no_mean_over_batches(where):
    def each(model, batch):
        return {"each": model(batch[0]).squeeze(-1)}

    loss = (lambda model, batch: (loss_fn(model, batch), each(model, batch))) if where == "step" else loss_fn
    step, state = array(loss)
    parts = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    loader = hfta.ArrayLoader((X, Y), 8, seeds=range(3))
    evaluate = (each, parts) if where == "evaluate" else None
    with pytest.raises(BatchError, match=r"metric 'each' is \[3, 8\] in one batch and .* call hfta.predict"):
        hfta.fit(step, state, loader, epochs=1, evaluate=evaluate, progress=False)


def test_predictions_for_the_loader_of_training():
    step, state = array(batch_dims=None)
    loader = DataLoader(TensorDataset(X, Y), 8)
    state, _ = hfta.fit(step, state, loader, epochs=1, progress=False)
    with pytest.raises(BatchError, match=r"2 positional arguments.* pass inputs=lambda batch: batch\[0\]"):
        hfta.predict(make(), state, loader)
    found = hfta.predict(make(), state, loader, inputs=lambda batch: batch[0]).outputs
    ensemble = hfta.Ensemble(make(), *hfta.step.stacked(state))
    assert torch.equal(ensemble.predict(loader, inputs=lambda batch: batch[0]).outputs, found)
    for member, model in enumerate(hfta.unstack_params(make(), *state[:2])):
        expected = torch.cat([model(inputs) for inputs, _ in loader])
        torch.testing.assert_close(found[member], expected.detach(), rtol=1e-12, atol=0)


class Items(Dataset):
    """As many items as are asked for, each made by a function of its row."""

    def __init__(self, count, make):
        self.count, self.make = count, make

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return self.make(row)


def noisy(row):
    first = X[row] + torch.randn(3).double()
    # As reading a file, which lets other threads run.
    time.sleep(1e-4)
    return first, torch.randn(3) + numpy.random.rand()


def slowly():
    first = nn.Linear(3, 3)
    time.sleep(1e-4)
    return nn.Sequential(first, nn.Linear(3, 3))


def test_threads_draw_what_one_alone_draws():
    def job(seed):
        seeds = [seed, seed + 1]
        return [*hfta.DatasetLoader(Items(12, noisy), 4, seeds=seeds)], hfta.init_params(slowly, seeds)

    expected = [job(seed) for seed in range(12)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = [*threads.map(job, range(12))]
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(expected)))


def named(row):
    """An item with a name, such as the path of a picture."""
    return {"x": X[row], "name": f"row {row}"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_names_of_items_are_shared_or_left_out(num_workers):
    shared = next(iter(hfta.DatasetLoader(Items(6, named), 3, shared=True, shuffle=False, device="cpu")))
    assert shared["name"] == ["row 0", "row 1", "row 2"]
    with pytest.raises(BatchError, match=r"batch\['name'\]\[0\] is a str, .* drop it in collate_fn"):
        next(iter(hfta.DatasetLoader(Items(6, named), 3, seeds=[0, 1], num_workers=num_workers)))


def test_a_progress_bar_does_not_slow_loading_down(monkeypatch):
    def modes(*others):
        """Of how many items a dispatch mode slows the operators down."""
        monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), *others])
        items = Items(4, lambda row: num_dispatch_modes())
        return next(iter(hfta.DatasetLoader(items, 4, seeds=[0]))).sum().item()

    with tqdm.tqdm(total=1, file=io.StringIO()) as bar:
        assert modes(bar.monitor) == 0
        # Of any other thread nobody knows whether it draws.
        assert modes(bar.monitor, threading.Thread(target=prefetched)) == 4


def seeded_anew():
    first = slowly()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        shared = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    return nn.Sequential(first, shared, nn.Dropout(), slowly(), nn.LSTM(3, 3), nn.Bilinear(3, 3, 3))


def augmented(row):
    return nn.functional.dropout(noisy(row)[0]), torch.distributions.Gamma(2.0, 1.0).sample()


def prefetched(batches):
    """Batches that a thread loads ahead, which draws while the array trains."""
    held, end = queue.Queue(2), object()

    def work():
        for batch in [*batches, end]:
            held.put(batch)
            for _ in range(50):
                time.sleep(1e-4)
                python_random.random(), numpy.random.rand(), torch.rand(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield from iter(held.get, end)
    thread.join()


@pytest.mark.parametrize("members", [1, 3])
def test_a_thread_that_loads_batches_draws_from_the_generators_of_the_process(members):
    batches = [(X[i : i + 5], Y[i : i + 5]) for i in range(0, 26, 5)]
    step, state = array(lrs=LRS[:members], batch_dims=None)
    for _ in range(3):
        state, _ = hfta.fit(step, state, prefetched(batches), epochs=1, progress=False)
    assert_trained(state, [loop(seed, batches * 3) for seed in range(members)])


def test_another_thread_draws_from_the_generator_of_the_process():
    def models(seed):
        torch.manual_seed(seed)
        return seeded_anew()

    def drawn():
        loader = hfta.DatasetLoader(Items(12, augmented), 4, seeds=[0, 1])
        return [*loader], hfta.init_params(seeded_anew, range(3)).params

    def draw():
        torch.manual_seed(3)
        while not ended.is_set():
            stream.append(torch.rand(1))
            time.sleep(1e-5)

    ended, stream, alone = threading.Event(), [], hfta.stack_params(map(models, range(3))).params
    expected = drawn()
    thread = threading.Thread(target=draw)
    thread.start()
    found = [drawn() for _ in range(3)]
    ended.set()
    thread.join()
    for each in (*found, (expected[0], alone)):
        assert all(map(torch.equal, optree.tree_leaves(each), optree.tree_leaves(expected)))
    torch.manual_seed(3)
    assert all(torch.equal(torch.rand(1), number) for number in stream) and len(stream) > 9


@pytest.mark.parametrize("name", ["epoch", "member", "seed", "lr"])
def test_a_metric_with_the_name_of_a_column(name):
    step, state = array(lambda model, batch: (loss_fn(model, batch), {name: torch.tensor(2.5)}))
    loader = hfta.ArrayLoader((X, Y), 8, seeds=range(3))
    _, history = hfta.fit(step, state, loader, epochs=2, progress=False)
    frame = history.frame(lr=LRS)
    assert (
        frame["epoch"].tolist() == [1] * 3 + [2] * 3
        and frame["member"].tolist() == frame["seed"].tolist() == [0, 1, 2] * 2
    )
    assert frame["lr"].tolist() == LRS * 2 and frame[f"{name}_metric"].tolist() == [2.5] * 6
    assert history.best(name, lr=LRS)[f"{name}_metric"].tolist() == [2.5] * 3
    assert history.last(lr=LRS).epoch.tolist() == [2] * 3


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("every", ["epoch", "update"])
def test_schedulers_count_updates_where_gradients_accumulate(every, members):
    """The script accumulates two batches, and its scheduler steps once an epoch, or after each update."""
    batches, epochs = [(X[low : low + 4], Y[low : low + 4]) for low in range(0, 24, 4)], 3

    def script(seed):
        torch.manual_seed(seed)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), LRS[seed])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for _ in range(epochs):
            for number, batch in enumerate(batches):
                (loss_fn(model, batch) / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    if every == "update":
                        scheduler.step()
            if every == "epoch":
                scheduler.step()
        return model

    models = [make() for _ in range(members)]
    optimizers = [torch.optim.SGD(model.parameters(), lr) for model, lr in zip(models, LRS, strict=False)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in optimizers]
    steps, gap = (epochs, len(batches) // 2) if every == "epoch" else (epochs * len(batches) // 2, 1)
    optimizer = hfta.from_torch(optimizers, schedulers, models=models, steps=steps, every=gap)
    step, state = array(lrs=LRS[:members], optimizer=hfta.accumulate(optimizer, 2), batch_dims=None)
    state, _ = hfta.fit(step, state, batches, epochs=epochs, progress=False)
    assert_trained(state, [script(seed) for seed in range(members)])


def test_schedulers_that_would_step_less_than_once_an_epoch():
    batches = [(X[low : low + 4], Y[low : low + 4]) for low in range(0, 24, 4)]
    models = [make() for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in optimizers]
    optimizer = hfta.from_torch(optimizers, schedulers, models=models, steps=3, every=len(batches))
    step, state = array(optimizer=hfta.accumulate(optimizer, 2), batch_dims=None)
    with pytest.warns(UserWarning, match=r"step every 6 updates.* pass from_torch every=len\(loader\) // 2"):
        hfta.fit(step, state, batches, epochs=1, progress=False)
    step, state = array(optimizer=optimizer, batch_dims=None)
    hfta.fit(step, state, batches, epochs=1, progress=False)


class Stream(IterableDataset):
    """Rows in an order of the epoch, as a streamed data set of Hugging Face has them."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(
            [(X[row], Y[row]) for row in torch.randperm(26, generator=torch.Generator().manual_seed(self.epoch))]
        )


@pytest.mark.parametrize("members", [1, 3])
def test_streams_that_shuffle_by_epoch(members):
    step, state = array(lrs=LRS[:members], batch_dims=None)
    state, _ = hfta.fit(step, state, DataLoader(Stream(), 5), epochs=3, progress=False)
    stream, batches = Stream(), []
    for epoch in range(3):
        stream.set_epoch(epoch)
        batches += [*DataLoader(stream, 5)]
    assert_trained(state, [loop(seed, batches) for seed in range(members)])


@pytest.mark.parametrize("data", [None, (X, Y), [(X, Y)]], ids=["none", "batch", "list"])
def test_a_sum_of_a_metric_that_nobody_reports(data):
    taken = []

    def batches():
        for _ in range(3):
            taken.append(1)
            yield X, Y

    step, state = array(batch_dims=None)
    evaluate = data and (lambda model, batch: {"correct": (model(batch[0]) > 0).sum()}, data)
    names = "finite, loss" if data is None else "correct, finite, loss"
    with pytest.raises(ValueError, match=f"sums names 'corect', but step and evaluate report {names}"):
        hfta.fit(step, state, batches(), epochs=1, evaluate=evaluate, sums=["corect"], progress=False)
    assert len(taken) == 3


def measured(model, batch):
    """Metrics as scripts have them: numbers of Python and NumPy beside tensors."""
    errors = (model(batch[0]).squeeze(-1) - batch[1]).abs().detach()
    worst = numpy.float32(errors.numpy().max())
    return {"rows": len(batch[1]), "share": 0.1, "worst": worst, "mean": errors.mean().item(), "error": errors.mean()}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_metrics_that_are_numbers(members):
    def loss(model, batch):
        named = measured(model, batch)
        return loss_fn(model, batch), named | {"seen": named.pop("rows")}

    def last(model, batch):
        return measured(model, batch)["mean"]

    step, state = array(loss, LRS[:members], batch_dims=None)
    batches = [*DataLoader(TensorDataset(X, Y), 8)]
    test = {"evaluate": (last, (X, Y)), "sums": ["seen"]}
    state, history = hfta.fit(step, state, batches, epochs=2, progress=False, **test)
    models = [loop(seed, batches * 2) for seed in range(members)]
    assert_trained(state, models)
    assert history["seen"].tolist() == [[26] * members] * 2
    torch.testing.assert_close(history["mean"], history["error"], rtol=1e-12, atol=0)
    torch.testing.assert_close(history["share"], torch.full((2, members), 0.1, dtype=torch.float64), rtol=1e-15, atol=0)
    assert history["last"][-1].tolist() == pytest.approx([last(model, (X, Y)) for model in models], rel=1e-10)


def test_a_data_set_in_place_of_batches():
    data = TensorDataset(X, Y)
    ensemble = hfta.Ensemble.from_modules([make() for _ in range(3)])
    predictions = [
        lambda data: ensemble.predict(data, inputs=lambda item: item[0]),
        lambda data: hfta.predict(make(), ensemble.stacked(), data, inputs=lambda item: item[0]),
    ]
    for predict in predictions:
        with pytest.raises(BatchError, match="a TensorDataset has no batches; pass a DataLoader of it"):
            predict(data)
        torch.testing.assert_close(predict(DataLoader(data, 8)).outputs, ensemble(X))
