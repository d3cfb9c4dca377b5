"""What scripts keep around a model: logs, counters, criteria and features, each beside the loop of a script."""

import copy
import functools
import os
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from scripts import BATCHES, X, Y, array, assert_same, assert_trained, fitted, loop, make, mse

members = pytest.mark.parametrize("members", [1, 3])
chunks = pytest.mark.parametrize("chunk_size", [None, 2, 1, "auto"])


# --- What a loss or a hook leaves in Python.


def logging(way):
    """A loss that keeps its value, and what it has kept."""
    log, box = [], types.SimpleNamespace(latest=None)

    def loss(model, batch):
        value = mse(model, batch)
        log.append({"tensor": value.detach(), "tuple": (value.detach(), 2), "number": 0.0}[way])
        box.latest = value.detach()
        return value

    return loss, log, box


@chunks
@pytest.mark.parametrize("way", ["tensor", "tuple"])
def test_a_log_has_the_value_of_each_member_for_each_step(chunk_size, way):
    # A log of one member is that of a script.
    (loss, log, _), (script, expected, _) = logging("tensor"), logging("tensor")
    array(loss, members=1, chunk_size=chunk_size), loop(script, 0)
    torch.testing.assert_close(torch.stack(log), torch.stack(expected), rtol=1e-10, atol=0)
    loss, log, box = logging(way)
    state = array(loss, chunk_size=chunk_size)
    alone = [logging("tensor") for _ in range(3)]
    assert_same(state, [loop(loss, seed) for seed, (loss, *_) in enumerate(alone)])
    values = torch.stack([entry[0] if way == "tuple" else entry for entry in log])
    torch.testing.assert_close(values, torch.stack([torch.stack(log) for _, log, _ in alone], 1), rtol=1e-10, atol=0)
    assert torch.equal(box.latest + 0, values[-1]) and type(values) is torch.Tensor and not values.requires_grad


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_numbers_that_a_loss_reads_are_logged_for_each_member():
    def make_loss(log):
        def loss(model, batch):
            value = mse(model, batch)
            log.append(value.item())
            return value

        return loss

    log, alone = [], [[] for _ in range(3)]
    array(make_loss(log))
    for seed in range(3):
        loop(make_loss(alone[seed]), seed)
    torch.testing.assert_close(torch.stack(log).T, torch.tensor(alone, dtype=torch.float64), rtol=1e-10, atol=0)


@chunks
def test_features_of_a_forward_hook_are_read_in_the_loss_and_later(chunk_size):
    def make_loss(features):
        return lambda model, batch: mse(model, batch) + features["hidden"].square().mean()

    def make_hooked(features):
        model = make()
        model[0].register_forward_hook(lambda layer, args, output: features.__setitem__("hidden", output))
        return model

    features = {}
    hooked = functools.partial(make_hooked, features)
    state = array(make_loss(features), make=hooked, chunk_size=chunk_size)
    assert_same(state, [loop(make_loss(features), seed, hooked) for seed in range(3)])
    array(make_loss(features), make=hooked, chunk_size=chunk_size, epochs=1)
    assert (features["hidden"] * 2).shape == (3, 6, 8)


@pytest.mark.parametrize("options", [{}, {"replay": True}, {"chunk_size": 2}], ids=str)
def test_features_that_only_the_script_reads_are_those_of_the_latest_call(options):
    features = {}

    def make_hooked():
        model = make()
        model[0].register_forward_hook(lambda layer, args, output: features.__setitem__("hidden", output.detach()))
        return model

    step = hfta.make_train_step(make_hooked(), mse, hfta.sgd(lr=0.1), batch_dims=None, **options)
    state = step.init(*hfta.init_params(make_hooked, range(3)), seeds=range(3))
    for batch in BATCHES:
        members = hfta.unstack_params(make(), state.params, state.buffers)
        state, _ = step(state, batch)
        expected = torch.stack([member[0](batch[0]) for member in members])
        torch.testing.assert_close(torch.as_tensor(features["hidden"]).as_subclass(torch.Tensor), expected)


class Centred:
    """DINO's loss: a centre that moves from call to call."""

    def __init__(self):
        self.center = torch.zeros(1, dtype=torch.float64)

    def __call__(self, model, batch):
        output = model(batch[0])
        loss = (output - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return loss


@chunks
def test_what_a_call_left_for_the_next_one_belongs_into_a_buffer(chunk_size):
    with pytest.raises(hfta.errors.StateError, match=r"left in Python.* keep it in a buffer of the model"):
        array(Centred(), chunk_size=chunk_size)
    assert_same(array(Centred(), members=1), [loop(Centred(), 0)])


# --- A call for each step.


class WarmUp:
    """A loss that counts its calls, and looks at its value."""

    def __init__(self, branches):
        self.branches, self.calls, self.seen = branches, 0, torch.zeros((), dtype=torch.int64)

    def __call__(self, model, batch):
        self.calls += 1
        self.seen += 1
        loss = mse(model, batch) * min(1, self.calls / 6)
        return loss * 2 if self.branches and loss > 0.5 else loss


@chunks
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_a_warm_up_counts_steps(chunk_size, branches):
    loss = WarmUp(branches)
    assert_same(array(loss, chunk_size=chunk_size), [loop(WarmUp(branches), seed) for seed in range(3)])
    assert loss.calls == loss.seen == 12


# --- What a step does not see is said.


class Weighted(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        return F.mse_loss(output, target) * torch.exp(-self.scale) + self.scale


CRITERION = Weighted()


def named_global(model, batch):
    return CRITERION(model(batch[0]), batch[1])


@pytest.mark.parametrize("way", ["closure", "partial", "attribute", "global"])
@members
def test_a_criterion_whose_parameter_is_not_trained(way, members):
    def loss(criterion, model, batch):
        return criterion(model(batch[0]), batch[1])

    owner, held = types.SimpleNamespace(criterion=Weighted()), Weighted()
    losses = {
        "closure": lambda model, batch: held(model(batch[0]), batch[1]),
        "partial": functools.partial(loss, Weighted()),
        "attribute": lambda model, batch: owner.criterion(model(batch[0]), batch[1]),
        "global": named_global,
    }
    with pytest.warns(
        UserWarning, match=r"depends on 'scale' of a Weighted,.* a submodule of the model, or call"
    ) as said:
        array(losses[way], members)
    assert len(said) == 1


def test_a_criterion_that_is_part_of_the_model_is_trained_and_a_frozen_one_is_silent():
    def make_both():
        return nn.ModuleDict({"model": make(), "criterion": Weighted()})

    def loss(both, batch):
        return both["criterion"](both["model"](batch[0]), batch[1])

    assert_same(array(loss, make=make_both), [loop(loss, seed, make_both) for seed in range(3)])
    teacher = make().requires_grad_(False)
    array(lambda model, batch: F.mse_loss(model(batch[0]), teacher(batch[0])))


CHANGES = {
    r"requires_grad of '0\.weight'": lambda model: model[0].weight.requires_grad_(False),
    r"train or eval mode, or hooks, of 'Sequential'": lambda model: model.eval(),
    r"train or eval mode, or hooks, of '2'": lambda model: model[2].register_forward_hook(print),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_is_changed_while_its_step_trains(what, compiled):
    template, told = make(), []

    def change(state, history):
        if len(history) == 1:
            told.append(CHANGES[what](template))

    with pytest.warns(UserWarning, match=rf"changed after make_train_step \({what}\).* make another step") as said:
        state = array(mse, template=template, fit={"callbacks": [change], "compile": compiled})
    assert len(said) == len(told) == 1
    assert_same(state, [loop(mse, seed) for seed in range(3)])


@pytest.mark.parametrize("copied", [False, True])
def test_an_average_begins_after_the_first_update_or_with_a_copy(copied):
    step = hfta.make_train_step(make(), mse, hfta.chain(hfta.sgd(lr=0.1), hfta.ema([0.9, 0.5])), batch_dims=None)
    state = step.init(*hfta.init_params(make, [0, 1]), seeds=[0, 1])
    if copied:
        *others, ema = state.opt_state
        state = state._replace(opt_state=(*others, ema._replace(step=ema.step + 1)))
    state, _ = hfta.fit(step, state, BATCHES, epochs=1, progress=False)
    averages = []
    for seed, decay in enumerate([0.9, 0.5]):
        torch.manual_seed(seed)
        model = make()
        average = copy.deepcopy(model) if copied else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in BATCHES:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
            average = average or copy.deepcopy(model)
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.data.lerp_(new.data, 1 - decay)
        averages.append(average)
    found = hfta.unstack_params(make(), state.opt_state[-1].average, state.buffers)
    assert_same(found, averages)


def test_a_step_without_fit_says_it_when_the_oracle_looks():
    template = make()
    step = hfta.make_train_step(template, mse, hfta.sgd(lr=0.1), batch_dims=None)
    state = step.init(*hfta.init_params(make, range(3)), seeds=range(3))
    state, _ = step(state, BATCHES[0])
    template.eval()
    with pytest.warns(UserWarning, match="changed after make_train_step") as said:
        for _ in range(100):
            state, _ = step(state, BATCHES[0])
    assert len(said) == 1


# --- Metrics, batches, files and buffers as scripts have them.


def input_gradient(model, x):
    return torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0].square().mean()


def gradient_norm(model, x):
    grads = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    return sum(grad.square().sum() for grad in grads)


@pytest.mark.parametrize("metric", [input_gradient, gradient_norm])
@pytest.mark.parametrize("chunk_size", [None, 2])
@members
def test_metrics_that_take_a_gradient(metric, chunk_size, members):
    stacked = hfta.init_params(make, range(members))
    evaluate = hfta.make_eval_step(make(), metric, chunk_size=chunk_size)
    expected = torch.stack([metric(model, X.clone()) for model in hfta.unstack_params(make(), *stacked)])
    for _ in range(2):
        found = evaluate(stacked, X.clone())[metric.__name__]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=0)
        assert not found.requires_grad


def test_a_callback_that_changes_the_folder(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    array(mse, fit={"resume": "run.safetensors", "callbacks": [lambda state, history: os.chdir(tmp_path / "other")]})
    assert sorted(os.listdir(tmp_path)) == ["other", "run.safetensors"] and not os.listdir(tmp_path / "other")


class Graph(nn.Module):
    """A layer of a graph network, whose adjacency is a buffer."""

    def __init__(self, layout=torch.sparse_coo, factor=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, dtype=torch.float64))
        dense = factor * torch.eye(6, dtype=torch.float64).roll(1, 0)
        self.register_buffer("adjacency", dense.to_sparse(layout=layout))

    def forward(self, x):
        return torch.sparse.mm(self.adjacency, x @ self.weight)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("chunk_size", [None, 2])
@members
def test_a_sparse_buffer_is_shared(layout, chunk_size, members):
    graph = functools.partial(Graph, layout)
    state, _ = fitted(mse, members, graph, chunk_size=chunk_size)
    models = [loop(mse, seed, graph) for seed in range(members)]
    assert_trained(state, models)
    assert "adjacency" not in state.buffers
    ensemble = hfta.Ensemble(graph(), *hfta.step.stacked(state))
    expected = torch.stack([model(X[:6]) for model in models])
    torch.testing.assert_close(ensemble(X[:6]), expected, rtol=1e-10, atol=1e-12)
    exported = hfta.export_model(graph(), state, members - 1)
    torch.testing.assert_close(exported(X[:6]), expected[-1], rtol=1e-10, atol=1e-12)


def test_sparse_buffers_that_differ_are_refused():
    with pytest.raises(
        hfta.errors.StackError, match="model 1: 6 entries of the sparse 'adjacency' are not those of model 0"
    ):
        hfta.stack_params([Graph(), Graph(factor=2.0)])


class ActNorm(nn.Module):
    """A normalisation that takes its scale from its first batch."""

    def __init__(self, has_buffer):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(4).double()), nn.Linear(4, 1).double()
        self.ready = False
        if has_buffer:
            del self.ready
            self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if not self.ready:
            self.scale.data.copy_(1 / x.std(0))
            self.ready = torch.ones_like(self.ready) if isinstance(self.ready, torch.Tensor) else True
        return self.out(x * self.scale)


@pytest.mark.parametrize("has_buffer", [False, True])
def test_a_layer_that_sets_itself_in_its_first_call_is_called_before(has_buffer):
    def make_called():
        model = ActNorm(has_buffer)
        model(X[:6])
        return model

    fresh = functools.partial(ActNorm, has_buffer)
    if has_buffer:
        assert_same(array(mse, make=fresh), [loop(mse, seed, fresh) for seed in range(3)])
    else:
        with pytest.raises(hfta.errors.StateError, match="calling each model once on a batch before stacking"):
            array(mse, make=fresh)
    state = array(mse, make=make_called, template=make_called())
    assert_same(state, [loop(mse, seed, make_called) for seed in range(3)])


class Sized(nn.Module):
    """Notes the size of its batch, as layers of graph networks do."""

    def __init__(self):
        super().__init__()
        self.layers = make()

    def forward(self, x):
        self.size = len(x) * 1000
        return self.layers(x) * (self.size / 6000)


@members
def test_a_size_that_each_call_notes_keeps_no_step_from_being_replayed(members):
    given = {"make": Sized, "data": [*BATCHES, (X, Y)], "epochs": 60}
    state, history = fitted(mse, members, **given)
    assert history.status.startswith("replayed")
    assert_trained(state, [loop(mse, seed, **given) for seed in range(members)], rtol=1e-9, atol=1e-10)
