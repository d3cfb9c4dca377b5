"""Schedules against ``torch.optim.lr_scheduler``, step by step, with knobs of each member's own."""

import pytest
import torch
from torch.optim import lr_scheduler

import hfta_func as hfta
from hfta_func import schedules
from schedule_cases import LR, SCHEDULES

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


def torch_rates(make, count=COUNT):
    """``[count, M]`` learning rates of torch's schedulers, one optimizer for each member."""
    columns = []
    for i, lr in enumerate(LR):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        scheduler = make(i, optimizer)
        column = []
        for _ in range(count):
            column.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        columns.append(torch.tensor(column, dtype=torch.float64))
    return torch.stack(columns, dim=1)


PARAMS = {"w": torch.zeros(3, 2, dtype=torch.float64)}


# SequentialLR itself calls scheduler.step(epoch), which torch deprecates.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_as_in_torch(name):
    schedule, make = SCHEDULES[name]
    expected = torch_rates(make)
    assert len({tuple(column) for column in expected.T.tolist()}) == len(LR)
    torch.testing.assert_close(descent(schedule, PARAMS), expected, rtol=1e-12, atol=1e-12)


def test_plain_numbers_stand_for_all_members():
    rates = descent(schedules.warmup(schedules.cosine(0.5, 20), 4), PARAMS)
    assert torch.equal(rates, rates[:, :1].expand(-1, 3))
    assert rates[4, 0] == 0.5


def test_members_count_their_own_updates():
    optimizer = hfta.sgd(lr=schedules.step_lr(LR, step_size=10, gamma=0.5))
    state = optimizer.init(PARAMS)._replace(step=torch.tensor([0, 10, 25]))
    updates, _ = optimizer.update({"w": torch.ones(3, 2, dtype=torch.float64)}, state, PARAMS)
    torch.testing.assert_close(-updates["w"][:, 0], torch.tensor([0.1, 0.15, 0.25]).double(), rtol=1e-7, atol=0)


def test_schedule_within_a_step():
    def factory():
        return torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)

    schedule, make = SCHEDULES["step_lr"]
    step = hfta.make_train_step(factory(), lambda model, batch: model(batch).sum(), hfta.sgd(lr=schedule))
    state = step.init(*hfta.init_params(factory, [0, 1, 2]), seeds=[0, 1, 2])
    batch = torch.ones(3, 1, 3, dtype=torch.float64)
    for rate in torch_rates(make, count=12):
        new, _ = step(state, batch)
        torch.testing.assert_close(
            state.params["weight"] - new.params["weight"], rate.reshape(3, 1, 1).expand(3, 1, 3), rtol=1e-9, atol=1e-12
        )
        state = new


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


def test_replacing_leaves_the_old_state():
    state = hfta.sgd(lr=schedules.step_lr(LR, 5)).init(PARAMS)
    hfta.with_hyperparams(state, lr=[0.2, 0.4, 0.6])
    assert state.hyperparams["lr"]["value"].tolist() == LR


@pytest.mark.parametrize("restart", range(1, 30))
def test_restarts_fall_on_their_counts(restart):
    lengths = torch.tensor([[1, 7, 13, 1000, 3, 10][i % 6] for i in range(3)])
    for growth in (1, 2, 3):
        begin = lengths * (restart if growth == 1 else (growth**restart - 1) // (growth - 1))
        if begin.max() > 2**40:
            continue
        optimizer = hfta.sgd(lr=schedules.cosine_restarts(LR, lengths, growth))
        updates, _ = optimizer.update(
            {"w": torch.ones(3, 2).double()}, optimizer.init(PARAMS)._replace(step=begin), PARAMS
        )
        torch.testing.assert_close(-updates["w"][:, 0], torch.tensor(LR).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_is_that_of_torch(mode, threshold_mode):
    knobs = {"factor": [0.5, 0.1, 0.9], "patience": [0, 2, 1], "cooldown": [1, 0, 3], "min_lr": [0.01, 0.0, 0.2]}
    schedule = schedules.plateau(LR, mode, threshold=0.05, threshold_mode=threshold_mode, **knobs)
    state = schedule.init(3)
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr) for lr in LR]
    others = [
        lr_scheduler.ReduceLROnPlateau(
            optimizer,
            mode,
            threshold=0.05,
            threshold_mode=threshold_mode,
            **{name: values[i] for name, values in knobs.items()},
        )
        for i, optimizer in enumerate(optimizers)
    ]
    seen = set()
    for _ in range(60):
        metric = torch.randn(3).double().round(decimals=1) + 1
        metric[torch.rand(3) < 0.1] = float("nan")
        state = schedule.update(state, metric)
        for i, other in enumerate(others):
            other.step(metric[i].item())
        expected = torch.tensor([optimizer.param_groups[0]["lr"] for optimizer in optimizers]).double()
        torch.testing.assert_close(state.value, expected, rtol=1e-7, atol=0)
        seen.add(tuple(state.value.tolist()))
    assert len(seen) > 3


def test_plateau_of_another_number_of_members():
    with pytest.raises(hfta.HyperparameterError, match="plateau has 3 values but the array has 2 models"):
        schedules.plateau(LR).init(2)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (lambda count, start: start[0], r"\[\]"),
        (lambda count, start: start.repeat(2), r"\[6\]"),
        (lambda count, start: 0.1, "float"),
    ],
)
def test_a_schedule_of_the_wrong_shape(value, got):
    optimizer = hfta.sgd(lr=hfta.Schedule({"start": LR}, value))
    state = optimizer.init(PARAMS)
    with pytest.raises(
        hfta.HyperparameterError, match=rf"schedule of lr returned {got}, not one number per model \[3\]"
    ):
        optimizer.update(PARAMS, state, PARAMS)
