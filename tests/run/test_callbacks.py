"""What is done after every epoch, also by a run that goes on from a file."""

import os

import pytest
import torch

import hfta_func as hfta

SEEDS = [5, 3, 8, 1]
NAN, INF = float("nan"), float("inf")


def factory():
    return torch.nn.Linear(3, 2)


@pytest.fixture
def run():
    """``run(table, epochs=..., ...)``: training in which a metric takes given values, ``table[epoch][member]``."""
    step = hfta.make_train_step(factory(), lambda model, batch: model(batch).square().mean(), hfta.sgd(lr=0.1))
    first = step.init(*hfta.init_params(factory, SEEDS), seeds=SEEDS)
    batches = list(hfta.ArrayLoader(torch.randn(6, 3), 3, seeds=SEEDS))

    def fit(table, **options):
        values = torch.tensor(table)
        states = []

        def evaluate(state):
            states.append(state)
            return {"score": values[int(state.step.max()) // 2 - 1], "pair": torch.zeros(4, 2)}

        options = {"epochs": len(table), "progress": False, **options}
        return *hfta.fit(step, first, batches, evaluate=evaluate, **options), states

    return fit


def stopped_after(values, patience, min_delta=0.0):
    """The epoch after which one member stops, or None: the rule in plain Python."""
    best, waited = INF, 0
    for epoch, value in enumerate(values, start=1):
        if value < best - min_delta:
            best, waited = value, 0
        else:
            waited += 1
        if waited == patience:
            return epoch
    return None


CURVES = [
    [5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1],  # always better
    [5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3],  # better by little
    [5.0, 6.0, 4.0, 4.0, NAN, 3.9, 7.0, 8.0],  # up and down
    [NAN, INF, INF, 2.0, 2.0, 2.0, 2.0, 1.0],  # no number at first
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("patience", [1, 2, 3, 4])
@pytest.mark.parametrize("min_delta", [0.0, 0.25])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping(run, tmp_path, patience, min_delta, mode):
    sign = 1 if mode == "min" else -1
    table = [[sign * value for value in row] for row in zip(*CURVES, strict=True)]
    callbacks = [hfta.callbacks.early_stopping("score", patience, min_delta, mode)]
    expected = [stopped_after(curve, patience, min_delta) for curve in CURVES]
    state, _, states = run(table, callbacks=callbacks)
    assert state.step.tolist() == [2 * (stop or len(table)) for stop in expected]
    assert state.active.tolist() == [stop is None for stop in expected]
    for member, stop in enumerate(expected):
        if stop is not None:
            assert torch.equal(state.params["weight"][member], states[stop - 1].params["weight"][member])
    # Nothing is lost where a run is broken off: a new callback sees the old history.
    for epochs in range(1, len(table) + 1):
        callbacks = [hfta.callbacks.early_stopping("score", patience, min_delta, mode)]
        resumed, *_ = run(table, epochs=epochs, callbacks=callbacks, resume=tmp_path / "run.safetensors")
    assert torch.equal(resumed.params["weight"], state.params["weight"])
    assert torch.equal(resumed.active, state.active)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_members_leave_once_they_are_good_enough(run, mode):
    sign = 1 if mode == "min" else -1
    table = [[sign * value for value in row] for row in zip(*CURVES, strict=True)]
    table[5][3] = sign * 0.95
    state, history, states = run(table, callbacks=[hfta.callbacks.stop_at("score", sign * 0.95, mode)])
    # The first epoch at or beyond the value, of which float32 has no exact form; never without one.
    stops = [6, None, None, 6]
    assert state.step.tolist() == [2 * (stop or len(table)) for stop in stops]
    assert state.active.tolist() == [stop is None for stop in stops]
    for member in (0, 3):
        assert torch.equal(state.params["weight"][member], states[5].params["weight"][member])
    assert not history.interrupted


def test_callbacks_that_stop_keep_nothing():
    hfta.testing.assert_callback(lambda: hfta.callbacks.stop_at("loss", 0.5))
    hfta.testing.assert_callback(lambda: hfta.callbacks.stop_after(1e6))


def test_a_run_whose_time_is_over_goes_on_from_its_file(run, tmp_path):
    path, seen = tmp_path / "run.safetensors", []

    def clock(state, history):
        seen.append(history.seconds)
        history.seconds += 100.0 * (len(history) % 2 == 0)

    table = [[float(epoch)] * 4 for epoch in range(5)]
    options = {"callbacks": [clock, hfta.callbacks.stop_after(90.0)], "resume": path}
    lengths = []
    for _ in range(3):
        state, history, _ = run(table, **options)
        lengths.append((len(history), history.interrupted))
        assert state.active.all()
        assert history.seconds < 90.0
    assert lengths == [(2, True), (4, True), (5, False)]
    assert all(0.0 < seconds < 90.0 for seconds in seen)
    expected, *_ = run(table)
    assert torch.equal(state.params["weight"], expected.params["weight"])


def test_keep_checkpoints(run, tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    others = ["epoch-000001-best.safetensors", "epoch-0000002.safetensors", "epoch-1.safetensors", "notes.txt"]
    for other in [*others, "epoch-000077.safetensors"]:
        (folder / other).touch()
    (folder / "epoch-000001.safetensors").symlink_to("notes.txt")
    names = []

    def look(state, history):
        names.append([n for n in range(1, 77) if (folder / f"epoch-{n:06d}.safetensors").is_file() and n > 1])

    callbacks = [hfta.callbacks.keep_checkpoints(folder, keep=2, every=2), look]
    state, _, states = run([[1.0] * 4] * 7, callbacks=callbacks)
    assert names == [[], [2], [2], [2, 4], [2, 4], [4, 6], [4, 6]]
    own = [f"epoch-0000{n}.safetensors" for n in ("01", "04", "06", "77")]
    assert sorted(os.listdir(folder)) == sorted([*others, *own])
    for epoch in (4, 6):
        path = folder / f"epoch-{epoch:06d}.safetensors"
        loaded = hfta.load(path, like=state)
        assert torch.equal(loaded.params["weight"], states[epoch - 1].params["weight"])
        assert hfta.files.read_metadata(path)["metadata"] == {"epoch": epoch}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("broken_off", [False, True])
def test_keep_best(run, tmp_path, mode, broken_off):
    sign = 1 if mode == "min" else -1
    curves = [[3, 2, 1, 1], [0.1, 2, 3, 4], [NAN, 5, NAN, 4], [NAN, NAN, NAN, NAN]]
    table = [[sign * float(value) for value in row] for row in zip(*curves, strict=True)]
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"of another run")
    states = []
    for epochs in range(1, 5) if broken_off else [4]:
        callbacks = [hfta.callbacks.keep_best(path, "score", mode)]
        state, _, new = run(table, epochs=epochs, callbacks=callbacks, resume=tmp_path / "run")
        states += new
        # What is there may be ahead of the run: a process that ends here does the epoch once more.
        if broken_off and epochs == 3:
            held = path.read_bytes()
            (tmp_path / "copy").write_bytes((tmp_path / "run").read_bytes())
    best = [3, 1, 4, 1]
    loaded = hfta.load(path, like=state)
    for member, epoch in enumerate(best):
        for path_, param in loaded.params.items():
            assert torch.equal(param[member], states[epoch - 1].params[path_][member])
        assert int(loaded.step[member]) == 2 * epoch
    record = hfta.files.read_metadata(path)["metadata"]
    assert record["epoch"] == best and (record["metric"], record["mode"]) == ("score", mode)
    assert record["value"][:3] == pytest.approx([sign * 1.0, sign * 0.1, sign * 4.0]) and record["value"][3] == "nan"
    if broken_off:
        written = path.read_bytes()
        assert held != written
        os.replace(tmp_path / "copy", tmp_path / "run")
        run(table, callbacks=[hfta.callbacks.keep_best(path, "score", mode)], resume=tmp_path / "run")
        assert path.read_bytes() == written


def test_tensorboard(run, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    table = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    run(table, callbacks=[hfta.callbacks.tensorboard(tmp_path)])
    events = events.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {tag.split("/")[0] for tag in events.Tags()["scalars"]} == {"loss", "finite", "score"}
    for member in range(4):
        scalars = events.Scalars(f"score/{member}")
        assert [(event.step, event.value) for event in scalars] == [(1, table[0][member]), (2, table[1][member])]


@pytest.mark.parametrize("shape", [(), (2,), (4, 2), (4, 4)])
def test_a_metric_that_is_not_one_number_per_model(run, tmp_path, shape):
    history = hfta.run.History(torch.tensor(SEEDS))
    history.epochs = [{"m": torch.zeros(shape)}]
    _, _, (state,) = run([[1.0, 2.0, 3.0, 4.0]])
    path = tmp_path / "best.safetensors"
    for callback in (hfta.callbacks.early_stopping("m", 1), hfta.callbacks.keep_best(path, "m")):
        with pytest.raises(ValueError, match=r"'m' has shape \[.*\] per epoch; a callback needs one number per model"):
            callback(state, history)
    assert not path.exists()
