"""The loop: what it records, what it shows, and what callbacks may change."""

import pytest
import torch
import torch.nn.functional as F

import hfta_func as hfta

SEEDS = [5, 3, 8]


def loss_fn(model, batch):
    output = model(batch[0])
    return F.mse_loss(output, batch[1]), {"size": output.abs().mean(), "output": output.mean(0)}


@pytest.fixture
def setting():
    """A step, its first state, and a loader of three batches."""

    def factory():
        return torch.nn.Linear(4, 2)

    step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=[0.1, 0.2, 0.3]))
    state = step.init(*hfta.init_params(factory, SEEDS), seeds=SEEDS)
    loader = hfta.ArrayLoader((torch.randn(12, 4), torch.randn(12, 2)), 4, seeds=SEEDS)
    return step, state, loader


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


def test_a_second_call_goes_on(setting):
    step, state, loader = setting
    expected, _ = by_hand(step, state, loader, 3)
    state, _ = hfta.fit(step, state, loader, epochs=1, progress=False)
    state, history = hfta.fit(step, state, loader, epochs=2, progress=False)
    assert all(torch.equal(state.params[path], param) for path, param in expected.params.items())
    assert len(history) == 2


def test_frame(setting):
    step, state, loader = setting
    _, history = hfta.fit(step, state, loader, epochs=2, progress=False)
    frame = history.frame(lr=[0.1, 0.2, 0.3], name=["a", "b", "c"], width=torch.tensor([1, 2, 3]))
    assert list(frame.columns) == ["member", "seed", "lr", "name", "width", "epoch", "loss", "finite", "size"]
    assert frame["member"].tolist() == [0, 1, 2] * 2
    assert frame["seed"].tolist() == SEEDS * 2
    assert frame["lr"].tolist() == [0.1, 0.2, 0.3] * 2
    assert frame["name"].tolist() == ["a", "b", "c"] * 2
    assert frame["width"].tolist() == [1, 2, 3] * 2
    assert frame["epoch"].tolist() == [1] * 3 + [2] * 3
    assert frame["loss"].tolist() == history["loss"].flatten().tolist()
    assert frame["finite"].tolist() == [1.0] * 6
    assert frame.index.tolist() == list(range(6))


def test_frame_with_a_column_of_another_length(setting):
    step, state, loader = setting
    _, history = hfta.fit(step, state, loader, epochs=1, progress=False)
    with pytest.raises(ValueError, match="column lr has 2 values but the array has 3 models"):
        history.frame(lr=[0.1, 0.2])


def test_frame_before_the_first_epoch(setting):
    step, state, loader = setting
    result = hfta.fit(step, state, loader, epochs=0, progress=False)
    assert len(result.history) == 0
    assert result.history.frame().empty
    assert result.state is state


def test_evaluate(setting):
    step, state, loader = setting
    test = torch.randn(6, 4), torch.randn(6, 2)
    evaluate = hfta.make_eval_step(
        torch.nn.Linear(4, 2), lambda model, batch: {"error": F.l1_loss(model(batch[0]), batch[1])}
    )
    states = []
    result = hfta.fit(
        step,
        state,
        loader,
        epochs=2,
        evaluate=lambda state: evaluate(state, test),
        callbacks=[lambda epoch, state, metrics: states.append(state)],
        progress=False,
    )
    assert result.history["error"].shape == (2, 3)
    for errors, state in zip(result.history["error"], states, strict=True):
        assert torch.equal(errors, evaluate(state, test)["error"])
    assert "error" in result.history.frame().columns


def test_callbacks(setting):
    step, state, loader = setting
    calls = []

    def record(epoch, state, metrics):
        calls.append((epoch, state.step.tolist(), sorted(metrics)))

    def stop_the_second(epoch, state, metrics):
        if epoch == 1:
            return state._replace(active=torch.tensor([True, False, True]))

    result = hfta.fit(step, state, loader, epochs=3, callbacks=[stop_the_second, record], progress=False)
    names = ["finite", "loss", "output", "size"]
    assert calls == [(1, [3, 3, 3], names), (2, [6, 3, 6], names), (3, [9, 3, 9], names)]
    once, _ = by_hand(step, state, loader, 1)
    thrice, _ = by_hand(step, state, loader, 3)
    for path, param in result.state.params.items():
        assert torch.equal(param[1], once.params[path][1])
        assert torch.equal(param[::2], thrice.params[path][::2])


def test_callbacks_see_what_earlier_ones_returned(setting):
    step, state, loader = setting
    seen = []
    hfta.fit(
        step,
        state,
        loader,
        epochs=1,
        callbacks=[
            lambda epoch, state, metrics: hfta.with_hyperparams(state, lr=[1.0, 2.0, 3.0]),
            lambda epoch, state, metrics: seen.append(state.opt_state.hyperparams["lr"].tolist()),
        ],
        progress=False,
    )
    assert seen == [[1.0, 2.0, 3.0]]


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


def test_progress_names_members_that_are_not_finite(setting, capsys):
    step, state, _ = setting
    inputs, targets = torch.randn(3, 4, 4), torch.randn(3, 4, 2)
    inputs[1, 0, 0] = float("nan")
    result = hfta.fit(step, state, [(inputs, targets)], epochs=1)
    assert "1 not finite" in capsys.readouterr().err
    assert result.history["finite"].tolist() == [[1.0, 0.0, 1.0]]
    for path, param in result.state.params.items():
        assert torch.equal(param[1], state.params[path][1])
        assert not torch.equal(param[0], state.params[path][0])


def test_no_progress(setting, capsys):
    step, state, loader = setting
    hfta.fit(step, state, loader, epochs=1, progress=False)
    assert capsys.readouterr() == ("", "")


def test_loaders_without_a_length(setting):
    step, state, loader = setting

    class Stream:
        def __iter__(self):
            return loader.batches(0)

    result = hfta.fit(step, state, Stream(), epochs=2, progress=False)
    assert result.state.step.tolist() == [6, 6, 6]


@pytest.mark.parametrize("make", [list, lambda: iter(())])
def test_loader_without_batches(setting, make):
    step, state, _ = setting
    with pytest.raises(
        ValueError, match="the loader gave no batch; pass an iterable that can be gone through once per"
    ):
        hfta.fit(step, state, make(), epochs=1, progress=False)


def test_loader_that_can_be_gone_through_only_once(setting):
    step, state, loader = setting
    with pytest.raises(ValueError, match="the loader gave no batch"):
        hfta.fit(step, state, loader.batches(0), epochs=2, progress=False)
