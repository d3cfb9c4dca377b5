"""The loop: what it records, what it shows, and what callbacks may change."""

import functools
import itertools
import os
import signal

import optree
import pytest
import torch
import torch.nn.functional as F

import hfta_func as hfta

SEEDS = [5, 3, 8]
NAN = float("nan")


def loss_fn(model, batch):
    output = model(batch[0])
    return F.mse_loss(output, batch[1]), {"size": output.abs().mean(), "output": output.mean(0)}


def arrayed(loss=loss_fn, size=(4, 2), seeds=SEEDS, optimizer=None, **options):
    """A step and its first state."""
    step = hfta.make_train_step(torch.nn.Linear(*size), loss, optimizer or hfta.sgd(lr=0.01), **options)
    return step, step.init(*hfta.init_params(lambda: torch.nn.Linear(*size), seeds), seeds=seeds)


@pytest.fixture
def setting():
    """A step, its first state, and a loader of three batches."""
    loader = hfta.ArrayLoader((torch.randn(12, 4), torch.randn(12, 2)), 4, seeds=SEEDS)
    return *arrayed(optimizer=hfta.sgd(lr=[0.1, 0.2, 0.3])), loader


def by_hand(step, state, loader, epochs):
    """The same training without the loop: the last state, and the step's metrics in every epoch."""
    history = []
    for epoch in range(epochs):
        history.append([])
        for batch in loader.batches(epoch):
            state, metrics = step(state, batch)
            history[-1].append(metrics)
    return state, history


def test_state_and_history(setting):
    step, state, loader = setting
    before = {path: param.clone() for path, param in state.params.items()}
    result = hfta.fit(step, state, loader, epochs=3, progress=False)
    expected, metrics = by_hand(step, state, loader, 3)
    for path, param in expected.params.items():
        assert torch.equal(result.state.params[path], param)
        assert torch.equal(state.params[path], before[path])
    assert result.state.step.tolist() == [9, 9, 9]
    assert len(result.history) == 3
    for name, shape in (("loss", (3, 3)), ("size", (3, 3)), ("finite", (3, 3)), ("output", (3, 3, 2))):
        means = torch.stack([torch.stack([one[name].float() for one in epoch]).mean(0) for epoch in metrics])
        assert result.history[name].shape == shape
        torch.testing.assert_close(result.history[name], means)
    assert len(set(result.history["loss"].flatten().tolist())) == 9


def test_frame(setting):
    step, state, loader = setting
    _, history = hfta.fit(step, state, loader, epochs=2, progress=False)
    frame = history.frame(lr=[0.1, 0.2, 0.3], name=["a", "b", "c"], width=torch.tensor([1, 2, 3]))
    expected = {"member": [0, 1, 2] * 2, "seed": SEEDS * 2, "lr": [0.1, 0.2, 0.3] * 2, "name": ["a", "b", "c"] * 2}
    expected |= {"width": [1, 2, 3] * 2, "epoch": [1] * 3 + [2] * 3, "loss": history["loss"].flatten().tolist()}
    expected |= {"finite": [1.0] * 6, "size": history["size"].flatten().tolist()}
    assert {name: column.tolist() for name, column in frame.items()} == expected
    assert list(frame.columns) == [*expected] and frame.index.tolist() == list(range(6))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_evaluate_takes_data(setting, compiled):
    step, state, loader = setting
    data = torch.randn(10, 4), torch.randn(10, 2)
    parts = [tuple(leaf[start : start + 4] for leaf in data) for start in (0, 4, 8)]

    def error(model, batch):
        return F.l1_loss(model(batch[0]), batch[1])

    def of_full_batches(model, batch):
        return {"full": error(model, batch)} if len(batch[0]) == 4 else {"other": error(model, batch)}

    def check(run, metric, given, name="error", rows=10):
        result = hfta.fit(run, state, [next(iter(loader))], epochs=1, evaluate=(metric, given), progress=False)
        expected = hfta.make_eval_step(torch.nn.Linear(4, 2), error)(result.state, tuple(leaf[:rows] for leaf in data))
        torch.testing.assert_close(result.history[name][-1], expected["error"], rtol=1e-6, atol=0)

    ways = data, parts, hfta.ArrayLoader(data, 4, shared=True), hfta.ArrayLoader(data, 4, seeds=SEEDS), list(data)
    if compiled:
        # Without its own ``__call__`` a compiled step is a function.
        return check(torch.compile(step, backend="eager"), error, data)
    for given in ways:
        check(step, error, given)
    # A metric that some batches lack is a mean over the rows of the others.
    check(step, of_full_batches, parts, "full", 8)
    # A step for evaluation serves as well, also where the training step is a function of one's own.
    for run, dims, given in itertools.product((step, lambda *args: step(*args)), (None, 0), ways[::3]):
        check(run, hfta.make_eval_step(torch.nn.Linear(4, 2), error, batch_dims=dims), given)
    options = {"epochs": 2, "progress": False}
    with pytest.raises(hfta.errors.BatchError, match="there is no row to evaluate; pass data with rows, or a loader"):
        hfta.fit(step, state, loader, evaluate=(error, iter([data])), **options)
    for wrong in ([error, data], (error,)):
        with pytest.raises(ValueError, match=r"evaluate is a (list|tuple).*pass .metric, data. or"):
            hfta.fit(step, state, loader, evaluate=wrong, **options)
    with pytest.raises(ValueError, match=r"step a function; pass .metric, data. or"):
        hfta.fit(lambda *args: step(*args), state, loader, evaluate=(error, data), **options)


@pytest.mark.parametrize(
    "loader",
    [(torch.ones(6, 4), torch.ones(6)), {"x": torch.ones(6, 4)}, torch.utils.data.TensorDataset(torch.ones(6, 4))],
)
def test_data_is_no_loader(setting, loader):
    with pytest.raises(hfta.errors.BatchError, match=r"the loader is a \w+, which does not yield batches; pass .*Arr"):
        hfta.fit(*setting[:2], loader, epochs=1, progress=False)


def test_one_row_per_member():
    history = hfta.run.History(torch.tensor([7, 8, 9]))
    history.columns = {"lr": [0.1, 0.2, 0.3]}
    assert history.last().empty and list(history.last().columns) == ["member", "seed", "lr", "epoch"]
    rows = ([0.5, 0.4, NAN], [0.5, 0.7, NAN], [0.6, NAN, NAN])
    history.epochs = [{"acc": torch.tensor(row), "size": torch.ones(3, 2)} for row in rows]
    last, best, highest = history.last(kind=["a", "b", "c"]), history.best("acc"), history.best("acc", "max")
    assert list(last.columns) == ["member", "seed", "lr", "kind", "epoch", "acc"]
    assert last.epoch.tolist() == [3, 2, 3] and last.lr.tolist() == [0.1, 0.2, 0.3]
    assert best.epoch.tolist() == [1, 1, 1] and highest.epoch.tolist() == [3, 2, 1]
    assert best.seed.tolist() == [7, 8, 9] and highest.acc[:2].tolist() == torch.tensor([0.6, 0.7]).tolist()
    with pytest.raises(KeyError, match="has no metric 'loss'; it has acc"):
        history.best("loss")
    with pytest.raises(ValueError, match=r"metric 'size' has shape \[3, 2\] per epoch"):
        history.best("size")
    with pytest.raises(hfta.errors.HyperparameterError, match="mode is 'least'"):
        history.best("acc", "least")


def test_progress_shows_mean_and_spread(setting, capsys):
    step, state, loader = setting
    _, history = hfta.fit(step, state, loader, epochs=2)
    shown = capsys.readouterr().err
    assert "epoch 2/2" in shown
    assert "6/6" in shown
    for name in ("loss", "size"):
        mean, spread = history[name][-1].mean(), history[name][-1].std(correction=0)
        assert spread > 0
        assert f"{name} {mean:.4f} ± {spread:.4f}" in shown
    assert "output" not in shown and "finite" not in shown


@pytest.mark.parametrize("make", [list, lambda: iter(())])
def test_loader_without_batches(setting, make):
    message = "the loader has no batch; pass an iterable that yields its batches in every ep"
    with pytest.raises(ValueError, match=message):
        hfta.fit(*setting[:2], make(), epochs=1, progress=False)


def test_it_ends_when_no_member_is_active(setting):
    step, state, loader = setting

    def stop(state, history):
        return state._replace(active=torch.tensor([len(history) < stop_after for stop_after in (1, 2, 2)]))

    state, history = hfta.fit(step, state, loader, epochs=9, callbacks=[stop], progress=False)
    assert len(history) == 2 and state.step.tolist() == [3, 6, 6]
    again = hfta.fit(step, state, loader, epochs=9, progress=False)
    assert again.state is state and len(again.history) == 0


def failing_batches():
    """Three batches: in the second and third the loss of member 1 is NaN, in the third the gradient of member 2."""
    batches = [(torch.randn(3, 4, 4), torch.randn(3, 4, 2), torch.ones(3, 2, 4)) for _ in range(3)]
    for batch in batches[1:]:
        batch[0][1, 0] = NAN
    batches[2][2][2] = 0.0
    return batches


def with_penalty(model, batch):
    inputs, targets, weights = batch
    return F.mse_loss(model(inputs), targets) + (model.weight * weights).square().sum().sqrt()


def test_failures():
    step, state = arrayed(with_penalty)
    batches = failing_batches()
    _, history = hfta.fit(step, state, batches, epochs=2, progress=False)
    once = [(1, 3, 1, 1, "loss"), (2, 8, 1, 2, "gradient")]
    assert history.failures == [*once, (1, 3, 2, 4, "loss"), (2, 8, 2, 5, "gradient")]
    assert history.failures[0]._fields == ("member", "seed", "epoch", "step", "cause")
    assert sorted(history.epochs[0]) == ["finite", "loss"]
    state = state._replace(active=torch.tensor([True, False, True]))
    _, history = hfta.fit(step, state, batches, epochs=1, progress=False)
    assert history.failures == [(2, 8, 1, 2, "gradient")]
    # The step at which a member is frozen counts, those after it do not; the new state may be in the old one's place.
    step, state = arrayed(with_penalty, nonfinite="freeze", donate=True)
    state, history = hfta.fit(step, state, batches, epochs=2, progress=False)
    assert history.failures == once
    assert state.active.tolist() == [True, False, False]


def test_a_loss_scale_that_overflows_is_a_failure():
    step, state = arrayed(loss_scale=hfta.step.LossScale(init_scale=[1.0, 3e38, 1.0]), batch_dims=None)
    _, history = hfta.fit(step, state, [(10 * torch.randn(4, 4), torch.randn(4, 2))], epochs=1, progress=False)
    assert history.failures == [(1, 3, 1, 0, "overflow")]


def broken(step, calls, action):
    """A step that does something at its ``n``-th call."""
    numbers = itertools.count(1)

    def run(state, batch):
        if next(numbers) == calls:
            action()
        return step(state, batch)

    return run


def press():
    signal.raise_signal(signal.SIGINT)


def same(a, b):
    """Whether two results are the same to the bit."""
    assert [list(metrics) for metrics in a.history.epochs] == [list(metrics) for metrics in b.history.epochs]

    def bits(leaf):
        # Bytes, so that one NaN is another.
        return leaf.dtype, leaf.view(torch.uint8).tolist()

    first, second = (optree.tree_map(bits, (result.state, result.history.epochs)) for result in (a, b))
    return first == second and a.history.failures == b.history.failures


def anew(loader):
    return hfta.ArrayLoader(loader.data, 4, seeds=SEEDS)


@pytest.mark.parametrize("calls", range(1, 7))
def test_ctrl_c_ends_the_run_after_the_step_and_it_resumes(setting, tmp_path, calls):
    step, state, loader = setting
    path = tmp_path / "run.safetensors"
    handler = signal.getsignal(signal.SIGINT)
    options = {"epochs": 2, "progress": False}
    result = hfta.fit(broken(step, calls, press), state, loader, resume=path, **options)
    assert signal.getsignal(signal.SIGINT) is handler
    assert result.state.step.tolist() == [calls] * 3
    assert len(result.history) == (calls - 1) // 3
    assert same(result, hfta.fit(None, state, loader, epochs=len(result.history), resume=path, progress=False))
    result = hfta.fit(step, state, anew(loader), resume=path, **options)
    assert not result.history.interrupted
    assert same(result, hfta.fit(step, state, anew(loader), **options))
    assert os.listdir(tmp_path) == ["run.safetensors"]


def test_a_second_ctrl_c_interrupts_at_once(setting):
    step, state, loader = setting
    handler = signal.getsignal(signal.SIGINT)

    def twice():
        press()
        press()

    with pytest.raises(KeyboardInterrupt):
        hfta.fit(broken(step, 4, twice), state, loader, epochs=9, progress=False)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_finished_run_returns_at_once_and_more_epochs_go_on(setting, tmp_path, capsys):
    step, state, loader = setting
    path = tmp_path / "run.safetensors"
    first = hfta.fit(step, state, loader, epochs=2, resume=path, progress=False)
    for epochs in (2, 1):
        assert same(first, hfta.fit(None, state, anew(loader), epochs=epochs, resume=path, progress=False))
    assert not same(
        first, hfta.fit(step, state, anew(loader), epochs=3, progress=False)._replace(history=first.history)
    )
    longer = hfta.fit(step, state, anew(loader), epochs=3, resume=path)
    assert same(longer, hfta.fit(step, state, anew(loader), epochs=3, progress=False))
    assert "9/9" in capsys.readouterr().err


def test_the_file_is_written_every_so_many_steps(setting, tmp_path):
    step, state, loader = setting
    path = tmp_path / "run.safetensors"
    held = []

    class Watched:
        def __iter__(self):
            for batch in loader.batches(0):
                yield batch
                held.append(int(hfta.load(path, like=state).step[0]) if path.exists() else 0)

    hfta.fit(step, state, Watched(), epochs=2, resume=path, save_every=2, progress=False)
    assert held == [0, 2, 2, 3, 5, 5]


@pytest.mark.parametrize("calls", range(2, 8))
@pytest.mark.parametrize("tells", [False, True])
def test_loaders_of_others_go_on_to_the_same_bits(setting, tmp_path, tells, calls):
    """From a position that they tell, which may hold tensors, or past the batches that were trained on."""
    step, state, loader = setting
    batches = [*loader.batches(0), *loader.batches(1)]
    make = functools.partial(Shuffled, batches) if tells else lambda seed: batches
    options = {"epochs": 2, "resume": tmp_path / "run.safetensors", "save_every": 1, "progress": False}
    with pytest.raises(ZeroDivisionError):
        hfta.fit(broken(step, calls, lambda: 1 / 0), state, make(1), **options)
    result = hfta.fit(step, state, make(2), **options)
    assert same(result, hfta.fit(step, state, make(1), epochs=2, progress=False))


class Shuffled:
    """As torchdata's StatefulDataLoader: its position holds the state of a generator."""

    def __init__(self, batches, seed):
        self.batches, self.order, self.given = batches, torch.Generator().manual_seed(seed), 0

    def __iter__(self):
        self.start = self.order.get_state()
        order = torch.randperm(len(self.batches), generator=self.order).tolist()
        for number in order[self.given :]:
            self.given += 1
            yield self.batches[number]
        self.start, self.given = self.order.get_state(), 0

    def state_dict(self):
        return {"generator": self.start, "given": self.given, "worker": None}

    def load_state_dict(self, state_dict):
        self.order.set_state(state_dict["generator"])
        self.given = state_dict["given"]


def test_failures_and_uneven_metrics_survive(tmp_path):
    step, state = arrayed(with_penalty)
    batches = failing_batches()

    def evaluate(state):
        # Some epochs have a metric that others have not.
        return {"every other": state.step.double()} if int(state.step[0]) % 2 else {}

    options = {"evaluate": evaluate, "progress": False}
    path = tmp_path / "run.safetensors"
    for epochs, calls in itertools.product(range(1, 4), (1, 2, 3)):
        hfta.fit(broken(step, calls, press), state, batches, epochs=epochs, resume=path, save_every=2, **options)
    result = hfta.fit(step, state, batches, epochs=5, resume=path, **options)
    assert same(result, hfta.fit(step, state, batches, epochs=5, **options))
    assert [failure.epoch for failure in result.history.failures] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    with pytest.raises(KeyError, match="epoch 2 has no metric 'every other'; it has loss, finite"):
        result.history["every other"]


def test_files_that_hold_no_such_run(setting, tmp_path):
    step, state, loader = setting
    path = tmp_path / "run.safetensors"

    def refused(error, message, step=step, state=state):
        with pytest.raises(error, match=message):
            hfta.fit(step, state, loader, epochs=1, resume=path, progress=False)

    hfta.save(state, path)
    refused(hfta.errors.CheckpointError, "run.safetensors holds a state but no run; start from it with fit")
    path.unlink()
    hfta.fit(step, state, loader, epochs=1, resume=path, progress=False)
    other = arrayed(optimizer=hfta.sgd(lr=0.1, momentum=0.9))
    refused(hfta.errors.StateError, r"does not fit like: 3 paths differ(.|\n)*momentum", *other)
    another = state._replace(keys=hfta.random.keys([5, 3, 9]))
    message = r"a run with seeds \[5, 3, 8\] but the state has \[5, 3, 9\]; use a file of its own"
    refused(hfta.errors.StateError, message, state=another)
    path.write_bytes(path.read_bytes()[:-1])
    refused(hfta.errors.CheckpointError, r"run\.safetensors is damaged")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("after", [3, 4, 6])
def test_a_shuffling_loader_goes_on_to_the_same_bits(after, generator, tmp_path):
    step, first = arrayed(optimizer=hfta.sgd(lr=[0.1, 0.2, 0.3]), batch_dims=None)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randn(12, 2))

    def train(seed, run=step, **options):
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(seed) if generator else None
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=own)
        return hfta.fit(run, first, loader, epochs=4, progress=False, **options)

    expected = train(1)
    with pytest.raises(ZeroDivisionError):
        train(1, broken(step, after + 1, lambda: 1 / 0), resume=tmp_path / "run", save_every=1)
    assert same(train(2, resume=tmp_path / "run", save_every=2), expected)


@pytest.mark.parametrize("moment", ["load", "close", "evaluate"])
def test_ctrl_c_before_the_first_step_and_after_the_last(setting, moment, monkeypatch, tmp_path):
    step, state, loader = setting
    hfta.fit(step, state, loader, epochs=1, progress=False, resume=tmp_path / "run")
    options = {"evaluate": lambda state: press() or {}} if moment == "evaluate" else {}
    if not options:
        owner, name = {"load": (hfta.run.run.Run, "load"), "close": (hfta.run.trainer.LocalTrainer, "close")}[moment]
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: press() or before(*args))
    result = hfta.fit(step, state, loader, epochs=2, progress=False, resume=tmp_path / "run", **options)
    epochs = 1 if moment == "load" else 2
    assert result.history.interrupted and len(result.history) == epochs
    assert hfta.load(tmp_path / "run", like=state).step.tolist() == [3 * epochs] * 3


def test_batches_that_lack_a_metric_do_not_count_for_it():
    def loss_fn(model, batch):
        value = model(batch).square().mean()
        return value, {"mean": batch.mean()} if len(batch) == 4 else {}

    step, state = arrayed(loss_fn, (2, 1), [0, 1], batch_dims=None)
    batches = [torch.full((rows, 2), value) for rows, value in ((4, 1.0), (2, 9.0), (4, 2.0))]
    _, history = hfta.fit(step, state, batches, epochs=2, progress=False)
    assert [epoch["mean"].tolist() for epoch in history.epochs] == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.int64])
def test_means_over_many_batches_are_those_of_the_values(kind, tmp_path):
    """Sums of halves come to a stop or overflow, and floats hold no integers above 2 ** 24."""
    batches = 600
    value = 2**24 + 1 if kind == torch.int64 else 200.0
    batch = torch.ones(1, 2, 1)

    def loss_fn(model, x):
        loss = model(x).mean() * 0 + torch.tensor(value if kind != torch.int64 else 1.0)
        return loss, {"seen": torch.tensor(value).to(kind)}

    step, state = arrayed(loss_fn, (1, 1), [0])
    _, history = hfta.fit(
        step, state, [batch] * batches, epochs=1, progress=False, resume=tmp_path / "run", save_every=250
    )
    assert history["seen"].dtype == torch.float32
    assert history["seen"].item() == torch.tensor(float(value), dtype=torch.float32).item()
