"""Experiments: the functional parts from one object, each the same as by hand."""

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from scripts import X, Y, mse

pandas = pytest.importorskip("pandas", reason="needs pandas")

SEEDS, RATES, LR = [5, 3, 8, 5], [0.0, 0.2, 0.3, 0.5], [0.1, 0.2, 0.05, 0.3]
DATA = X, Y


def make_model(p=0.1):
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(p), nn.Linear(3, 1), nn.Dropout(0.1)).double()


def smooth(model, batch, hparams):
    loss = F.smooth_l1_loss(model(batch[0]), batch[1])
    return hparams["weight"] * loss, {"plain": loss}


def same(a, b):
    assert all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


def test_parts_are_those_made_by_hand():
    generator = torch.get_rng_state()
    found = hfta.Experiment(make_model, smooth, hfta.adamw, seeds=SEEDS, p=RATES, lr=LR, weight=[1.0, 2.0, 3.0, 4.0])
    assert torch.equal(torch.get_rng_state(), generator)
    for epochs in (1, 2):
        history = found.fit(DATA, 8, epochs=epochs, evaluate=DATA, bootstrap=True, progress=False)
    step = hfta.make_train_step(make_model(), smooth, hfta.adamw(lr=LR))
    params = hfta.init_params(make_model, SEEDS, p=RATES)
    state = step.init(*params, seeds=SEEDS, hparams={"weight": [1.0, 2.0, 3.0, 4.0]})
    loader = hfta.ArrayLoader(DATA, 8, seeds=SEEDS, bootstrap=True)
    state, expected = hfta.fit(step, state, loader, epochs=3, progress=False)
    same(found.state, state)
    assert torch.equal(history["loss"], expected["loss"][1:])
    validated = hfta.make_eval_step(make_model(), lambda model, batch, hparams: smooth(model, batch, hparams)[0])
    assert torch.equal(history["val_loss"][-1], validated(state, DATA)["<lambda>"])
    assert torch.equal(history["val_plain"][-1] * state.hparams["weight"], history["val_loss"][-1])
    assert torch.equal(found.predict(X).outputs, hfta.predict(make_model(), state, X).outputs)
    assert [model[1].p for model in found.models()] == RATES
    same(hfta.stack_params(found.models()).params, state.params)
    same(found.evaluate((X.numpy(), pandas.DataFrame(DATA[1].numpy()))), found.evaluate(DATA))
    same(found.evaluate(DATA), {name: history[name][-1] for name in ("val_loss", "val_plain")})
    frame = history.last()
    assert frame.seed.tolist() == SEEDS and frame.lr.tolist() == LR and found.frame().p.tolist() == RATES * 2
    assert repr(found) == "Experiment(4 members, step 9, 4 active)" and "<svg" in found._repr_html_()


def test_members_that_go_take_their_hyperparameters_with_them():
    def halve(state, history):
        return hfta.take(state, [3, 1]) if len(history) == 1 else None

    whole = hfta.Experiment(make_model, mse, hfta.sgd, mse, seeds=SEEDS, lr=LR, **{"*.p": RATES})
    rows = [range(0, 10), range(10, 12), range(12, 23), [23]]
    held = [[0, 5], [3, 4, 6], [7], [8, 9]]
    own = {"rows": rows, "batches_per_epoch": 2}
    history = whole.fit(DATA, 4, epochs=3, evaluate=(mse, DATA, held), callbacks=[halve], progress=False, **own)
    assert whole.hyperparameters["lr"] == [LR[3], LR[1]] and whole.state.hparams["3.p"].tolist() == [0.5, 0.2]
    assert history.last().epoch.tolist() == [1, 3, 1, 3] and history.last().lr.tolist() == LR
    some = hfta.Experiment(make_model, mse, hfta.sgd, mse, seeds=SEEDS, lr=LR, **{"*.p": RATES}).take([3, 1])
    own["rows"] = [rows[3], rows[1]]
    alone = some.fit(DATA, 4, epochs=3, evaluate=(mse, DATA, [held[3], held[1]]), progress=False, **own)
    for name in ("loss", "mse"):
        torch.testing.assert_close(history[name][:, [3, 1]], alone[name], rtol=1e-12, atol=1e-12)
    assert alone.last().lr.tolist() == [LR[3], LR[1]] and alone.last().mse.tolist() == alone["mse"][-1].tolist()


def test_other_ways_to_make_one():
    shared = hfta.Experiment(
        make_model, mse, hfta.adam(lr=LR), seeds=4, init_seeds=[1] * 4, options={"batch_dims": None}
    )
    weight = shared.state.params["0.weight"]
    assert torch.equal(weight, weight[:1].expand_as(weight)) and shared.state.keys.tolist() == [0, 1, 2, 3]
    assert shared.fit(DATA, 8, epochs=1, progress=False)["loss"].shape == (1, 4)
    history = shared.fit([DATA, DATA], epochs=1, evaluate=lambda state: {"three": state.keys + 3}, progress=False)
    assert history["three"].tolist() == [[3, 4, 5, 6]]
    trunk = hfta.Experiment(make_model, mse, hfta.sgd, options={"shared_params": ["0"]}, seeds=2, lr=0.1)
    trunk.fit(DATA, 8, epochs=1, progress=False)
    first, second = trunk.models()
    assert first[0].weight is second[0].weight and torch.equal(first[0].weight, trunk.state.shared.params["0.weight"])
    outputs = torch.stack([model.eval()(DATA[0]) for model in (first, second)])
    torch.testing.assert_close(trunk.ensemble().eval()(DATA[0]), outputs, rtol=1e-12, atol=1e-12)


def test_a_grid_is_the_product():
    found = hfta.grid(lr=torch.tensor([1.0, 2.0]), p=(0.0, 0.5, 0.7), seeds=[4, 9])
    assert found["lr"] == [1.0] * 6 + [2.0] * 6 and found["p"] == [0.0, 0.0, 0.5, 0.5, 0.7, 0.7] * 2
    assert found["seeds"] == [4, 9] * 6 and hfta.grid(lr=[1]) == {"lr": [1], "seeds": [0]}
    assert hfta.grid(lr=[1], seeds=torch.tensor(2)) == hfta.grid(lr=[1], seeds=2)
    refused = ({"lr": 0.1}, "lr is 0.1"), ({"lr": []}, r"lr is \[\]"), ({"lr": [1], "seeds": 0}, "seeds is 0")
    for wrong, shown in refused:
        with pytest.raises(hfta.errors.HyperparameterError, match=f"{shown}; a grid needs a list of values"):
            hfta.grid(**wrong)


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ((0.8, 0.7), [(0.8, 0.7)] * 2),
        ([(0.8, 0.7), (0.6, 0.5)], [(0.8, 0.7), (0.6, 0.5)]),
        ([[0.8, 0.7], [0.6, 0.5]], [(0.8, 0.7), (0.6, 0.5)]),
        (([0.8, 0.6], 0.7), [(0.8, 0.7), (0.6, 0.7)]),
        (hfta.grid(betas=[(0.8, 0.7), (0.6, 0.5)])["betas"], [(0.8, 0.7), (0.6, 0.5)]),
    ],
)
def test_a_tuple_is_one_value(given, rates):
    def make(size=(3, 2)):
        return nn.Sequential(nn.Linear(4, size[0]), nn.Linear(size[0], size[1])).double()

    found = hfta.Experiment(make, mse, hfta.adam, seeds=2, betas=given, size=(5, 1), lr=(0.1, 0.2))
    numbers = found.state.opt_state.hyperparams
    assert [*zip(numbers["beta1"].tolist(), numbers["beta2"].tolist(), strict=True)] == rates
    assert found.state.params["0.weight"].shape == (2, 5, 4) and found.hyperparameters["size"] == [(5, 1)] * 2
    assert numbers["lr"].tolist() == [0.1, 0.2] == found.hyperparameters["lr"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: {"make_model": []}, "got 0 models for 4 seeds; give one each"),
        (lambda: {"make_model": [make_model()] * 4, "init_seeds": 0}, "give one each, and no init_seeds"),
        (lambda: {"init_seeds": [0, 1]}, "init_seeds has 2 values for 4 models; give one each"),
        (lambda: {"optimizer": hfta.adam, "betas": [0.9, 0.8, 0.7, 0.6]}, "betas is .*; give a pair, each of one"),
        (lambda: {"optimizer": lambda lr: hfta.adam(betas=[(lr, lr)] * 2), "lr": 0.1}, "betas is .*; give a pair, each"),
        (lambda: {"optimizer": lambda lr: hfta.lion(betas=lr), "lr": 0.1}, "betas is 0.1; give a pair, each of one"),
        (lambda: {"optimizer": hfta.adam, "decay": 0.1}, r"'decay' is no number of .*; the factory takes \['p'\] and "),
        (lambda: {"optimizer": hfta.adam(), "lr": LR}, r"'lr' is no number .* the optimizer \[\]; pass adam, not "),
        (lambda: {"3.q": 0.1}, r"'3.q' is no number.*; it has .*1.p, .*3.p"),
        (lambda: {"loss_fn": smooth, "2.q": 0.1, "weight": 1.0}, "'2.q' is no number of the model; it has .*1.p"),
        (lambda: {"*.q": 0.1}, r"'\*.q' matches no number of the model; it has "),
        (lambda: {"p": [0.1, 0.2]}, "p has 2 values for 4 models"),
        (lambda: {"seeds": []}, r"seeds is \[\]; give a number of models, or a list of one integer per model"),
        (lambda: {"seeds": 2.5}, "seeds is 2.5; give a number of models"),
        (lambda: {"seeds": ["a"]}, "model 0: seed 'a' is not a 64-bit integer"),
        (lambda: {"make_model": make_model()}, "factory is a module"),
    ],
)  # fmt: skip
def test_bad_experiments(call, message):
    parts = {"make_model": make_model, "loss_fn": mse, "optimizer": hfta.sgd, "seeds": 4, **call()}
    with pytest.raises(ValueError, match=message):
        hfta.Experiment(**parts)
    message = r"optimizer is SGD, not .*; from_torch makes one of M optimizers of torch.optim"
    with pytest.raises(TypeError, match=message):
        hfta.Experiment(make_model, mse, torch.optim.SGD, seeds=4, lr=0.1)


@pytest.mark.parametrize(
    ("given", "evaluate", "message"),
    [
        ((DATA,), None, "data needs a batch_size; or pass a loader as data"),
        ((DATA, 8), mse, r"evaluate is a function, step a TrainStep; pass \(metric, data\)"),
        ((DATA, 8), (mse, DATA, [[0], [], [1], [2]]), "model 1: rows.1. is ..; give row numbers"),
        ((DATA, 8), torch.utils.data.TensorDataset(*DATA), "is a data set, TensorDataset; pass a DataLoader"),
        ((DATA, 8), (mse, []), "there is no row to evaluate"),
        ((DATA, 8), (X[:0], X[:0, :1]), "there is no row to evaluate"),
    ],
)
def test_bad_runs(given, evaluate, message):
    experiment = hfta.Experiment(make_model, mse, hfta.sgd, seeds=4)
    with pytest.raises(ValueError, match=message):
        experiment.fit(*given, epochs=1, progress=False, evaluate=evaluate)
