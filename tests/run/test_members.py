"""Members that a run keeps, drops or adds: each trains, is reported and is given back as it would be alone."""

import pytest
import torch

import hfta_func as hfta
from member_runs import SEEDS, Run, assert_same, stop


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_epoch_of_each_member_is_given_back(mode, donate):
    states = []
    run = Run(donate=donate)
    keep = lambda state, history: states.append(hfta.take(state, slice(None)))  # noqa: E731
    state, history = run.fit(6, keep, stop(e4=[2]), restore_best=("mse", mode))
    values = history["mse"]
    best = values.argmin(0) if mode == "min" else values.argmax(0)
    assert len(set(best.tolist())) > 1 or mode == "max"
    for member, epoch in enumerate(best.tolist()):
        assert_same(hfta.take(state.params, member), hfta.take(states[epoch].params, member))
        assert_same(hfta.take(state.buffers, member), hfta.take(states[epoch].buffers, member))
    assert_same(run.evaluate(state)["mse"], values.gather(0, best[None])[0])
    assert state.active.tolist() == [True, True, False, True]


def test_the_best_epochs_go_on_where_they_were_left(tmp_path):
    whole, _ = Run().fit(6, restore_best="mse")
    path = tmp_path / "run.safetensors"
    Run().fit(3, restore_best="mse", resume=path)
    state, _ = Run().fit(6, restore_best="mse", resume=path)
    assert_same(state.params, whole.params)
    with pytest.raises(hfta.errors.CheckpointError, match="holds a run that was begun without restore_best"):
        Run().fit(3, resume=tmp_path / "other.safetensors")
        Run().fit(6, restore_best="mse", resume=tmp_path / "other.safetensors")


@pytest.mark.exhaustive(ids="donate|batches|every")
@pytest.mark.parametrize("way", ["eager", "donate", "batches", "every step"])
def test_without_the_inactive_members_the_others_train_the_same(way, tmp_path):
    plain, run = Run(), Run(donate=way == "donate")
    if way == "batches":
        plain.loader = run.loader = [*run.loader]
    expected, reported = plain.fit(7, stop(e2=[0, 2], e5=[3]))
    options = {"resume": tmp_path / "run", "save_every": 1} if way == "every step" else {}
    sizes, seen = run.note_sizes(), []
    look = lambda state, history: seen.append(hfta.num_models(state))  # noqa: E731
    state, history = run.fit(7, stop(e2=[0, 2], e5=[3]), look, compact=True, **options)
    assert sizes == [4] * 6 + [2] * 9 + [1] * 6 and seen == [4] * 7
    assert_same(state._replace(opt_state=()), expected._replace(opt_state=()))
    assert_same(history["mse"], reported["mse"])
    loss, other = history["loss"], reported["loss"]
    trained = torch.tensor([[True] * 4] * 2 + [[False, True, False, True]] * 3 + [[False, True, False, False]] * 2)
    assert torch.equal(~loss.isnan(), trained)
    assert_same(loss[trained], other[trained])


@pytest.mark.exhaustive
def test_a_compiled_step_trains_members_that_are_left_in_few_sizes():
    seeds, epochs = [5, 3, 8, 9, 1, 4, 7], 8
    one_less = stop(**{f"e{epoch}": [[3], [0], [6], [1], [2], [5], []][epoch - 1] for epoch in range(1, epochs)})
    expected, reported = Run(seeds).fit(epochs, one_less)
    run = Run(seeds)
    plain = run.step
    sizes = run.note_sizes(torch.compile(plain, backend="eager"))
    run.step._torchdynamo_orig_callable = plain
    state, history = run.fit(epochs, one_less, compact=True)
    assert [*dict.fromkeys(sizes)] == [7, 4, 2, 1]
    assert_same(state, expected)
    trained = ~history["loss"].isnan()
    assert trained.sum(1).tolist() == [7, 7, 7, 4, 3, 2, 1, 1]
    assert_same(history["loss"][trained], reported["loss"][trained])


@pytest.mark.exhaustive
def test_a_member_that_is_active_again_trains_again():
    def back(state, history):
        active = torch.tensor([True, True, True, True] if len(history) in (1, 4) else [False, True, False, False])
        return state._replace(active=active)

    expected, _ = Run().fit(6, back)
    state, history = Run().fit(6, back, compact=True)
    assert_same(state.params, expected.params)
    assert history["loss"].isnan().sum(1).tolist() == [0, 0, 3, 3, 0, 3]


def test_failures_name_members_of_the_whole_array():
    def spoil(state, history):
        if len(history) == 2:
            state.params["0.weight"][3] = torch.nan
            return state._replace(active=torch.tensor([False, True, False, True]))

    _, history = Run().fit(4, spoil, compact=True)
    assert {failure.member for failure in history.failures} == {3}
    assert {failure.seed for failure in history.failures} == {9}


def test_a_run_follows_members_that_are_dropped():
    def drop(state, history):
        return hfta.take(state, {2: [3, 0, 1], 4: [1]}[len(history)]) if len(history) in (2, 4) else None

    state, history = Run().fit(6, drop, restore_best="mse")
    expected, reported = Run([5]).fit(6, restore_best="mse")
    assert_same(state.params, expected.params)
    assert_same(history["loss"][:, :1], reported["loss"])
    assert history["loss"].isnan().sum(0).tolist() == [0, 2, 4, 2]
    assert history.members.tolist() == [0] and history.seeds.tolist() == SEEDS
    frame = history.frame(name=list("abcd"))
    assert len(frame) == 24 and frame[frame.member == 2].loss.count() == 2


def test_a_run_follows_members_that_are_added():
    def grow(state, history):
        if len(history) == 2:
            new = [Run([seed]).state for seed in (77, 78)]
            return hfta.take(hfta.concat([new[0], state, new[1]]), [0, 4, 1, 5])
        return None

    state, history = Run().fit(5, grow, hfta.callbacks.early_stopping("mse", patience=3), restore_best="mse")
    assert history.seeds.tolist() == [*SEEDS, 77, 78] and history.members.tolist() == [4, 3, 0, 5]
    assert history.since.tolist() == [0, 0, 0, 0, 2, 2] and history["mse"].shape == (5, 6)
    for place, (seed, epochs) in enumerate([(77, 3), (9, 5), (5, 5), (78, 3)]):
        expected, reported = Run([seed]).fit(epochs, restore_best="mse")
        assert_same(hfta.take(state.params, place), expected.params)
        column = history["mse"][:, history.members[place]]
        assert column[: 5 - epochs].isnan().all()
        assert_same(column[5 - epochs :], reported["mse"][:, 0])


@pytest.mark.exhaustive
def test_a_run_whose_members_changed_goes_on_from_its_file(tmp_path):
    def change(state, history):
        if len(history) == 2:
            return hfta.concat([hfta.take(state, [3, 1]), Run([77]).state])
        return None

    whole, reported = Run().fit(6, change, restore_best="mse")
    path = tmp_path / "run.safetensors"
    for epochs in (2, 3, 6):
        state, history = Run().fit(epochs, change, restore_best="mse", resume=path, save_every=1)
    assert_same(state.params, whole.params)
    assert_same(history["mse"], reported["mse"])
    assert history.members.tolist() == [3, 1, 4]
    with pytest.raises(hfta.errors.StateError, match="holds a run with seeds"):
        Run([5, 3, 8, 10]).fit(7, resume=path)
    message = r"holds a run with seeds \[5, 3, 8, 9\] but the state has \[5, 3\]; use a file"
    with pytest.raises(hfta.errors.StateError, match=message):
        Run([5, 3]).fit(7, resume=path)


def test_plateaus_follow_members():
    def drop(state, history):
        return hfta.take(state, [2, 0]) if len(history) == 3 else None

    callback = hfta.schedules.plateau("mse", factor=0.5, patience=0)
    run, twin = Run(), Run([8, 5])
    state, _ = run.fit(6, drop, callback)
    expected, _ = twin.fit(6, callback)
    assert_same(state.params, expected.params)


def test_a_bad_member_spoils_its_own_averages_only():
    tree = {"a": torch.tensor([[1.0, 2.0], [float("nan"), 3.0], [5.0, float("inf")]])}
    assert_same(hfta.step.average(tree, [1, 0, 0])["a"], tree["a"][:1].expand(3, 2))
    found = hfta.step.average(tree, [[1, 0, 0], [1, 1, 0], [1, 0, 1]])["a"]
    nan = float("nan")
    assert_same(found, torch.tensor([[1.0, 2.0], [nan, 2.5], [3.0, nan]]))
    for bad in ([1, 2], [-1, 1, 1], [0, 0, 0], [nan, 1, 1], [[1, 0, 0], [0, 0, 0], [0, 0, 1]], 1.0):
        with pytest.raises(hfta.errors.HyperparameterError, match="weights"):
            hfta.step.average(tree, bad)


EQUAL = [7, 7, 7, 7]
MOVES = {
    "turned round": (lambda state, first: hfta.take(state, [3, 2, 1, 0]), [3, 2, 1, 0]),
    "dropped": (lambda state, first: hfta.take(state, [2, 0]), [2, 0]),
    "twice": (lambda state, first: hfta.take(hfta.take(state, [3, 1, 2]), [1, 0]), [1, 3]),
    "joined": (lambda state, first: hfta.concat([hfta.take(state, [2]), hfta.take(state, slice(2))]), [2, 0, 1]),
    "a copy": (lambda state, first: hfta.take(state, [1, 1, 0]), [1, 4, 0]),
    "a stranger": (lambda state, first: hfta.concat([hfta.take(state, [3, 2]), first]), [3, 2, 4]),
    "other values": (lambda state, first: hfta.with_hyperparams(hfta.take(state, [3, 0]), lr=[0.1, 0.2]), [3, 0]),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("move", MOVES)
def test_members_of_equal_seeds_are_followed(move):
    moved, numbers = MOVES[move]
    stranger = Run([7]).state
    seen = []

    def callback(state, history):
        # What tells the members apart, by their numbers.
        seen.append((history.members.tolist(), history.epochs[-1]["mse"]))
        return moved(state, stranger) if len(history) == 1 else None

    run = Run(EQUAL)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    run.state = run.state._replace(
        params={path: leaf * scale.reshape(-1, *[1] * (leaf.dim() - 1)) for path, leaf in run.state.params.items()}
    )
    state, history = run.fit(2, callback)
    assert history.members.tolist() == numbers == seen[1][0]
    last = run.evaluate(state)["mse"]
    torch.testing.assert_close(history["mse"][1, numbers].to(last), last)
