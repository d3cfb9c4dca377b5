"""Schedules against ``torch.optim.lr_scheduler``, step by step, with knobs of each member's own."""

import pytest
import torch
from torch.optim import lr_scheduler

import hfta_func as hfta
from hfta_func import schedules
from schedule_cases import LR, SCHEDULES
from ways import seeded, start

COUNT = 40


def descent(lr, params, count=COUNT, change=None):
    """The learning rates that sgd used: with gradients of one, each update is minus its rate."""
    optimizer = hfta.sgd(lr=lr)
    state, rates = optimizer.init(params), []
    for number in range(count):
        if change is not None and number in change:
            state = hfta.with_hyperparams(state, lr=change[number])
        updates, state = optimizer.update({"w": torch.ones_like(params["w"])}, state, params)
        rates.append(-updates["w"][:, 0])
    return torch.stack(rates)


def torch_rates(make, metrics=((),) * (COUNT - 1)):
    """``[1 + steps, M]`` learning rates of torch's schedulers, one optimizer for each member."""
    columns = []
    for i, lr in enumerate(LR):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        scheduler = make(i, optimizer)
        column = [optimizer.param_groups[0]["lr"]]
        for metric in metrics:
            optimizer.step()
            scheduler.step(*metric[i : i + 1])
            column.append(optimizer.param_groups[0]["lr"])
        columns.append(column)
    return torch.tensor(columns, dtype=torch.float64).T


PARAMS, ONES = ({"w": make(3, 2, dtype=torch.float64)} for make in (torch.zeros, torch.ones))


# SequentialLR itself calls scheduler.step(epoch), which torch deprecates.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_optimizers_and_values_are_as_in_torch(name):
    schedule, make = SCHEDULES[name]
    rates, expected = descent(schedule, PARAMS), torch_rates(make)
    assert len({tuple(column) for column in expected.T.tolist()}) == len(LR)
    torch.testing.assert_close(rates, expected, rtol=1e-12, atol=1e-12)
    for counts in ([0, 1, 2], [3, 10, 39], [20, 7, 5]):
        assert torch.equal(schedules.values(schedule, counts), rates[counts, [0, 1, 2]])


def test_plain_numbers_stand_for_all_members():
    rates = descent(schedules.warmup(schedules.cosine(0.5, 20), 4), PARAMS)
    assert torch.equal(rates, rates[:, :1].expand(-1, 3))
    assert rates[4, 0] == 0.5


def test_members_count_their_own_updates():
    optimizer = hfta.sgd(lr=schedules.step_lr(LR, step_size=10, gamma=0.5))
    state = optimizer.init(PARAMS)._replace(step=torch.tensor([0, 10, 25]))
    updates, _ = optimizer.update(ONES, state, PARAMS)
    torch.testing.assert_close(-updates["w"][:, 0], torch.tensor([0.1, 0.15, 0.25]).double(), rtol=1e-7, atol=0)


def test_schedules_of_other_knobs():
    optimizer = hfta.adam(lr=0.1, betas=(schedules.constant([0.5, 0.6, 0.7]), 0.9))
    fixed = hfta.adam(lr=0.1, betas=([0.5, 0.6, 0.7], 0.9))
    states = [optimizer.init(PARAMS), fixed.init(PARAMS)]
    for _ in range(3):
        grads = {"w": torch.randn(3, 2, dtype=torch.float64)}
        (updates, states[0]), (expected, states[1]) = (
            part.update(grads, state, PARAMS) for part, state in zip((optimizer, fixed), states, strict=True)
        )
        assert torch.equal(updates["w"], expected["w"])


def test_a_number_replaces_the_value_that_a_schedule_starts_from():
    schedule = schedules.step_lr(LR, step_size=[3, 7, 10], gamma=[0.1, 0.5, 0.9])
    changed = schedules.step_lr([0.2, 0.4, 0.6], step_size=[3, 7, 10], gamma=[0.1, 0.5, 0.9])
    rates = descent(schedule, PARAMS, change={5: [0.2, 0.4, 0.6]})
    assert torch.equal(rates[:5], descent(schedule, PARAMS)[:5])
    assert torch.equal(rates[5:], descent(changed, PARAMS)[5:])
    same = schedules.step_lr(2.0, step_size=[3, 7, 10], gamma=[0.1, 0.5, 0.9])
    assert torch.equal(descent(schedule, PARAMS, change={0: 2.0}), descent(same, PARAMS))


def test_a_dict_replaces_knobs_by_name():
    schedule = schedules.step_lr(LR, step_size=[3, 7, 10], gamma=[0.1, 0.5, 0.9])
    changed = schedules.step_lr(LR, step_size=[2, 4, 6], gamma=0.25)
    rates = descent(schedule, PARAMS, change={5: {"step_size": [2, 4, 6], "gamma": 0.25}})
    assert torch.equal(rates[:5], descent(schedule, PARAMS)[:5])
    assert torch.equal(rates[5:], descent(changed, PARAMS)[5:])


def test_a_number_reaches_the_schedule_within_a_schedule():
    def schedule(lr, T_max=(20, 25, 30), steps=4):
        return schedules.warmup(schedules.cosine(lr, list(T_max)), steps)

    rates = descent(schedule(LR), PARAMS, change={0: [0.2, 0.4, 0.6]})
    assert torch.equal(rates, descent(schedule([0.2, 0.4, 0.6]), PARAMS))
    rates = descent(schedule(LR), PARAMS, change={0: {"after": {"T_max": [10, 11, 12]}, "steps": 6}})
    assert torch.equal(rates, descent(schedule(LR, (10, 11, 12), 6), PARAMS))


@pytest.mark.parametrize("restart", range(1, 30))
def test_restarts_fall_on_their_counts(restart):
    lengths = torch.tensor([[1, 7, 13, 1000, 3, 10][i % 6] for i in range(3)])
    for growth in (1, 2, 3):
        begin = lengths * (restart if growth == 1 else (growth**restart - 1) // (growth - 1))
        if begin.max() > 2**40:
            continue
        optimizer = hfta.sgd(lr=schedules.cosine_restarts(LR, lengths, growth))
        updates, _ = optimizer.update(ONES, optimizer.init(PARAMS)._replace(step=begin), PARAMS)
        torch.testing.assert_close(-updates["w"][:, 0], torch.tensor(LR).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_one_cycle_keeps_its_last_value(strategy, three_phase):
    steps = [10, 17, 30]
    schedule = schedules.one_cycle(LR, steps, 0.4, strategy, [25, 10, 3], [1e4, 100, 7], three_phase)
    last = torch.tensor([lr / div / final for lr, div, final in zip(LR, [25, 10, 3], [1e4, 100, 7], strict=True)])
    for beyond in (-1, 0, 1, 2, 5, 1000):
        found = schedules.values(schedule, [count + beyond for count in steps])
        torch.testing.assert_close(found, last.double(), rtol=1e-6, atol=0)
    assert (schedules.values(schedule, [count - 2 for count in steps]) > last * (1 + 1e-6)).all()


NUMBERS = {
    "factor": [0.5, 0.1, 0.9],
    "patience": [0, 2, 1],
    "threshold": [0.05, 0.2, 0.01],
    "cooldown": [1, 0, 3],
    "min_lr": [0.01, 0.0, 0.2],
    "eps": [1e-8, 1e-3, 0.02],
}


def torch_plateaus(metrics, **options):
    """``[1 + epochs, M]``: the learning rates before and after each epoch, of one scheduler of torch per member."""

    def make(i, optimizer):
        own = {name: values[i] for name, values in NUMBERS.items()}
        return lr_scheduler.ReduceLROnPlateau(optimizer, **options, **own)

    return torch_rates(make, metrics.tolist())


def noisy_metrics(epochs):
    """Better and worse by turns, with ties, NaN, infinities and changes of sign."""
    metrics = torch.randn(epochs, 3).double().round(decimals=1) + 1 - torch.arange(epochs)[:, None] / 20
    metrics[torch.rand(epochs, 3) < 0.1] = float("nan")
    metrics[torch.rand(epochs, 3) < 0.05] = float("inf")
    return metrics


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_is_that_of_torch(mode, threshold_mode):
    options, metrics = {"mode": mode, "threshold_mode": threshold_mode}, noisy_metrics(60)
    if mode == "max":
        metrics = -metrics
    expected = torch_plateaus(metrics, **options)[1:]
    assert all(len(column.unique()) > 2 for column in expected.T)
    state, callback = hfta.sgd(lr=LR).init(PARAMS), schedules.plateau("loss", **options, **NUMBERS)
    for epoch in range(60):
        state = callback(state, {"loss": metrics[: epoch + 1], "other": torch.zeros(epoch + 1, 3)})
        torch.testing.assert_close(state.hyperparams["lr"], expected[epoch], rtol=1e-14, atol=0)


def plateau_run(epochs, metrics, callback, optimizer, resume=None):
    """The learning rates that were in force in each epoch, and the last state, of a run whose metric is given."""
    models = seeded(lambda: torch.nn.Linear(3, 1, bias=False, dtype=torch.float64), range(3))
    step, state = start(models, lambda model, batch: model(batch).sum(), optimizer)
    rates, batches = [], [torch.ones(3, 1, 3, dtype=torch.float64)]
    before = [state.params["weight"]]

    def evaluate(state):
        # With gradients of one, each update is minus its rate.
        rates.append((before[-1] - state.params["weight"])[:, 0, 0])
        before.append(state.params["weight"])
        return {"score": metrics[int(state.step[0]) - 1]}

    options = {"evaluate": evaluate, "callbacks": [callback], "progress": False, "resume": resume}
    run = hfta.fit(step, state, batches, epochs=epochs, **options)
    return torch.stack(rates), run.state


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_in_fit(mode, tmp_path):
    metrics = noisy_metrics(24)
    expected = torch_plateaus(metrics, mode=mode)
    assert (expected[-1] < expected[0]).all()
    rates, state = plateau_run(24, metrics, schedules.plateau("score", mode=mode, **NUMBERS), hfta.sgd(lr=LR))
    torch.testing.assert_close(rates, expected[:-1], rtol=1e-9, atol=0)
    # Nothing is lost where a run is broken off: a new callback sees the old history.
    for epochs in range(1, 25):
        callback = schedules.plateau("score", mode=mode, **NUMBERS)
        _, resumed = plateau_run(epochs, metrics, callback, hfta.sgd(lr=LR), tmp_path / "run")
        torch.testing.assert_close(resumed.opt_state.hyperparams["lr"], expected[epochs], rtol=1e-14, atol=0)
    assert torch.equal(resumed.params["weight"], state.params["weight"])


def test_plateau_of_any_hyperparameter():
    metrics = {"loss": torch.ones(2, 3)}
    callback = schedules.plateau("loss", patience=[0, 1, 0], factor=0.5)
    schedule = schedules.step_lr(LR, step_size=[3, 7, 10], gamma=[0.1, 0.5, 0.9])
    state = callback(hfta.sgd(lr=schedule).init(PARAMS), metrics)
    assert state.hyperparams["lr"]["value"].tolist() == [0.05, 0.3, 0.5]
    assert state.hyperparams["lr"]["step_size"].tolist() == [3, 7, 10]
    groups = {"body": hfta.sgd(lr=LR), "head": hfta.sgd(lr=LR)}
    optimizer = hfta.partition({"": "body", "head": "head"}, groups)
    state = optimizer.init({"w": PARAMS["w"], "head": PARAMS["w"]})
    state = schedules.plateau("loss", "head.lr", patience=0, factor=0.5)(state, metrics)
    assert state.groups["head"].hyperparams["lr"].tolist() == [0.05, 0.15, 0.5]
    assert state.groups["body"].hyperparams["lr"].tolist() == LR


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.plateau("loss", mode="low"), "mode is 'low'; it must be 'min' or 'max'"),
        (lambda: schedules.plateau("loss", threshold_mode="r"), "threshold_mode is 'r'; it must be 'rel' or 'abs'"),
        (lambda: schedules.plateau("loss", factor=1.0), "factor is 1.0; it must be at least 0 and below 1"),
        (
            lambda: schedules.plateau("loss", patience=[1, float("nan")]),
            "model 1: patience is nan; it must be a finite",
        ),
        (
            lambda: schedules.plateau("loss", patience=[1, 2])(hfta.sgd().init(PARAMS), {"loss": torch.ones(1, 3)}),
            "patience has 2 values but the array has 3 models; give one number, or one per model",
        ),
        (
            lambda: schedules.plateau("loss", "momentum")(hfta.sgd().init(PARAMS), {"loss": torch.ones(1, 3)}),
            "unknown hyperparameter 'momentum'; this state has lr",
        ),
    ],
)
def test_plateau_that_does_not_fit(make, message):
    with pytest.raises(hfta.errors.HyperparameterError, match=message):
        make()
