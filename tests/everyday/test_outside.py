"""What scripts keep and change outside of the model while they train, in one process and in two, beside the loop."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import hfta_func as hfta
from hfta_func.errors import BatchError, RandomnessError, StateError
from scripts import BATCHES, X, Y, array, assert_same, fitted, loop, make, mse

processes = pytest.mark.parametrize("workers", [None, 2])
members = pytest.mark.parametrize("members", [1, 3])


def outside(kind):
    """A loss that is weighted by a value in a dict, a class or a tensor, and what sets that value."""
    holder = {
        "dict": {"weight": 1.0},
        "class": type("Settings", (), {"weight": 1.0}),
        "tensor": torch.ones(()).double(),
    }[kind]

    def change(weight):
        if kind == "dict":
            holder["weight"] = weight
        elif kind == "class":
            holder.weight = weight
        else:
            holder.fill_(weight)

    def loss(model, batch):
        weight = {"dict": lambda: holder["weight"], "class": lambda: holder.weight, "tensor": lambda: holder}[kind]()
        return mse(model, batch) * weight

    return loss, change


@processes
@pytest.mark.parametrize("kind", ["dict", "class", "tensor"])
def test_a_callback_changes_what_the_loss_reads(kind, workers):
    weights = [0.3, 0.1, 0.5]
    loss, change = outside(kind)
    fit = {"workers": workers, "callbacks": [lambda state, history: change(weights[len(history) - 1])]}
    models = array(loss, fit=fit)
    expected = []
    for seed in range(3):
        change(1.0)
        expected.append(loop(loss, seed, end_epoch=lambda epoch, _: change(weights[epoch - 1])))
    assert_same(models, expected)


@processes
def test_a_callback_changes_the_transform_of_a_loader(workers):
    class Scale:
        factor = 1.0

        def __call__(self, batch):
            return batch[0] * self.factor, batch[1]

    def halve(scale):
        scale.factor /= 2

    scale = Scale()
    loader = hfta.ArrayLoader((X, Y), 6, seeds=range(3), shuffle=False, transform=scale)
    fit = {"workers": workers, "callbacks": [lambda state, history: halve(scale)]}
    models = array(mse, data=loader, fit=fit, batch_dims=0)
    expected = []
    for seed in range(3):
        alone = Scale()
        expected.append(loop(mse, seed, end_epoch=lambda *_, one=alone: halve(one), batch=alone))
    assert_same(models, expected)


@processes
def test_a_callback_moves_a_teacher(workers):
    torch.manual_seed(9)
    teacher = nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 1)).double().requires_grad_(False)
    start = copy.deepcopy(teacher.state_dict())

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), teacher(batch[0]))

    def shrink(*_):
        for parameter in teacher.parameters():
            parameter.mul_(0.5)

    models = array(loss, fit={"workers": workers, "callbacks": [shrink]})
    expected = []
    for seed in range(3):
        teacher.load_state_dict(start)
        expected.append(loop(loss, seed, end_epoch=shrink))
    assert_same(models, expected)


@processes
def test_autocast_around_fit(workers):
    def seen(model, batch):
        return mse(model, batch) * (2 if torch.is_autocast_enabled("cpu") else 1)

    with torch.autocast("cpu", torch.bfloat16):
        models = array(seen, epochs=1, fit={"workers": workers})
        expected = [loop(seen, seed, epochs=1) for seed in range(3)]
    assert_same(models, expected)


@pytest.mark.parametrize("fit", [{"workers": 2}, {"compact": True}], ids=str)
def test_a_function_around_the_step_says_whether_members_share_batches(fit):
    def around(step):
        def function(state, batch):
            return step(state, batch)

        return function

    def told(step):
        function = around(step)
        function.batch_dims = step.batch_dims
        return function

    with pytest.raises(BatchError, match=r"does not say .* set its attribute: function\.batch_dims"):
        array(mse, around=around, fit=fit)
    assert_same(array(mse, around=told, fit=fit), [loop(mse, seed) for seed in range(3)])
    assert_same(array(mse, around=around), [loop(mse, seed) for seed in range(3)])


@processes
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_models(name, workers):
    def make_parametrized():
        return nn.Sequential(getattr(parametrizations, name)(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)).double()

    models = array(mse, make=make_parametrized, fit={"workers": workers})
    assert_same(models, [loop(mse, seed, make_parametrized) for seed in range(3)])


class Centre(nn.Module):
    """A criterion with a running centre that it writes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, dtype=torch.float64))

    def forward(self, output, target):
        loss = (output - self.centre - target).square().mean()
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return loss


def centred():
    criterion = Centre()
    return lambda model, batch: criterion(model(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_a_criterion_that_writes_its_buffer_in_place():
    with pytest.raises(StateError, match="writes a tensor in place for a later call"):
        array(centred())
    assert_same(array(centred(), members=1), [loop(centred(), 0)])

    def make_both():
        return nn.ModuleDict({"model": make(), "criterion": Centre()})

    def loss(both, batch):
        return both["criterion"](both["model"](batch[0]), batch[1])

    assert_same(array(loss, make=make_both), [loop(loss, seed, make_both) for seed in range(3)])


class Constrained(nn.Linear):
    """A layer of EEGNet, whose weights are shortened before each use."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


@members
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_weights_that_a_forward_pass_assigns(members):
    with pytest.raises(StateError, match=r"writes its parameter 'weight' in place.* change it between steps"):
        array(mse, members, lambda: Constrained(4, 1).double())


@members
def test_seeds_that_a_loss_sets(members):
    def loss(model, batch):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return mse(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    torch.manual_seed(5)
    with pytest.raises(RandomnessError, match=r"calls torch\.manual_seed.* leave it out, or draw"):
        array(loss, members=members)
    noise = torch.randn(6, 4, dtype=torch.float64)

    def fixed(model, batch):
        return mse(model, (batch[0] + noise, batch[1]))

    assert_same(array(fixed, members=members), [loop(fixed, seed) for seed in range(members)])


def test_numbers_that_are_changed_in_what_was_handed_over():
    models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)).double() for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1) for model in models]
    step = hfta.make_train_step(models[0], mse, hfta.from_torch(optimizers, models=models), batch_dims=None)
    state = step.init(*hfta.stack_params(models), seeds=range(3))

    def change(state, history):
        optimizers[2].param_groups[0]["weight_decay"] = 0.0
        models[0][1].p = 0.5

    with pytest.warns(UserWarning) as said:
        hfta.fit(step, state, BATCHES, epochs=3, callbacks=[change], progress=False)
    texts = [str(one.message) for one in said]
    assert len(texts) == 2 and "the weight_decay of an optimizer" in texts[0] and "('1.p')" in texts[1]


class Tempered(nn.Linear):
    """It has a temperature of its own, and counts its calls."""

    def __init__(self):
        super().__init__(4, 1, dtype=torch.float64)
        self.tau, self.calls = 1.0, 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.tau


def test_a_temperature_that_a_script_lowers():
    def lower(epoch, model):
        model.tau = 1 / (1 + epoch)

    def trained(callback, **options):
        return array(mse, make=Tempered, fit={"callbacks": [callback]}, **options)

    message = r"\('tau'\), which has no effect .* step\.init\(\.\.\., hparams={'tau': \.\.\.}\) .* with_hyperparams"
    template = Tempered()
    with pytest.warns(UserWarning, match=message):
        trained(lambda state, history: lower(len(history), template), template=template)
    expected = [loop(mse, seed, Tempered, end_epoch=lower) for seed in range(3)]
    cured = trained(
        lambda state, history: hfta.with_hyperparams(state, tau=1 / (1 + len(history))), hparams={"tau": 1.0}
    )
    assert_same(cured, expected)
    assert [model.tau for model in cured] == [model.tau for model in expected]


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_a_teacher_that_is_left_in_train_mode(chunk_size):
    def distil(teacher):
        def loss(model, batch):
            with torch.no_grad():
                target = teacher(batch[0])[:, :1]
            return F.mse_loss(model(batch[0]), target)

        return loss

    teachers = [nn.BatchNorm1d(4, affine=False).double() for _ in range(4)]
    models = array(distil(teachers[3]), chunk_size=chunk_size)
    assert_same(models, [loop(distil(teachers[seed]), seed) for seed in range(3)])
    assert_same(teachers[:3], [teachers[3]] * 3)


class Counts(nn.Linear):
    """It counts rows, and follows the mean of its outputs, in eval mode, too."""

    def __init__(self):
        super().__init__(4, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        y = super().forward(x)
        self.seen += len(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Cached(nn.Linear):
    """It computes what it caches in its first call, and again for longer inputs."""

    def __init__(self):
        super().__init__(4, 1, dtype=torch.float64)
        self.register_buffer("waves", torch.zeros(0, dtype=torch.float64), persistent=False)
        self.register_buffer("scale", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        if len(self.waves) < len(x):
            self.waves = torch.arange(len(x)).double().cos()
        self.scale.fill_(2.0)
        return super().forward(x) * self.scale + self.waves[: len(x), None]


ROWS = [range(0, 9), range(4, 20), range(13, 24)]


def held(member, data):
    """The batches on which a script evaluates a member."""
    if data == "rows":
        return [(X[[*ROWS[member]]][i : i + 6], Y[[*ROWS[member]]][i : i + 6]) for i in range(0, len(ROWS[member]), 6)]
    return BATCHES if data == "batches" else [(X, Y)]


def evaluated(seed, make, batches):
    """A model trained alone, and its loss on batches in eval mode after every epoch."""
    losses = []

    def evaluate(_, model):
        values = [mse(model.eval(), batch).item() * len(batch[0]) for batch in batches]
        losses.append(sum(values) / sum(len(batch[0]) for batch in batches))
        model.train()

    return loop(mse, seed, make, end_epoch=evaluate), losses


@members
@pytest.mark.parametrize("data", ["batch", "batches", "rows"])
def test_an_evaluation_keeps_the_buffers_that_a_model_writes(members, data):
    own = hfta.ArrayLoader((X, Y), 6, seeds=range(members), rows=ROWS[:members]) if data == "rows" else None
    evaluate = lambda model, batch: {"val": mse(model, batch)}, own or {"batch": (X, Y)}.get(data, BATCHES)
    state, history = fitted(mse, members, Counts, fit={"evaluate": evaluate})
    for member in range(members):
        model, losses = evaluated(member, Counts, held(member, data))
        found = {path: leaf[member] for path, leaf in {**state.params, **state.buffers}.items()}
        torch.testing.assert_close(found, model.state_dict(), rtol=1e-10, atol=1e-12)
        assert history["val"][:, member].tolist() == pytest.approx(losses, rel=1e-6)


@members
@pytest.mark.parametrize(
    ("make", "way"),
    [(Counts, "exported"), *itertools.product([Counts, Cached], ["call", "predict", "inference", "compiled"])],
)
def test_an_ensemble_in_eval_mode_keeps_the_buffers_that_its_models_write(make, way, members):
    models = [make() for _ in range(members)]
    ensemble = hfta.Ensemble.from_modules(models).eval()
    expected = torch.stack([torch.cat([model.eval()(x) for x, _ in BATCHES]) for model in models]).detach()
    call = {"compiled": lambda: torch.compile(ensemble, backend="eager"), "exported": lambda: exported(ensemble)}
    run, xs = call.get(way, lambda: ensemble)(), [x for x, _ in BATCHES]
    with torch.inference_mode(way == "inference"):
        found = ensemble.predict(xs).outputs if way == "predict" else torch.cat([run(x) for x in xs], 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for member, model in zip(ensemble.members() if way != "exported" else (), models, strict=False):
        torch.testing.assert_close(dict(member.named_buffers()), dict(model.named_buffers()), rtol=1e-10, atol=1e-12)


def exported(ensemble):
    return torch.export.export(ensemble, (BATCHES[0][0],)).module()


@pytest.mark.parametrize("use", ["evaluate", "predict"])
def test_buffers_that_a_pure_function_cannot_keep(use):
    def run(make):
        state = hfta.init_params(make, range(3))
        if use == "predict":
            return hfta.predict(make(), state, X)
        return hfta.make_eval_step(make(), mse)(state, (X, Y))

    with pytest.raises(StateError, match=r"writes its buffer 'seen' in eval mode.* an Ensemble, which keep it"):
        run(Counts)
    with pytest.warns(
        UserWarning, match="writes its buffer 'waves' in eval mode, where an array drops it; .* train mode"
    ):
        run(Cached)


class Adapted(nn.Sequential):
    """Its batch norm stays in train mode, to follow the data that it is tested on."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.double()

    def train(self, mode=True):
        super().train(mode)
        self[0].train()
        return self


@members
def test_batch_norms_that_stay_in_train_mode_follow_an_evaluation(members):
    batches = [(X[i : i + 8] + 1, Y[i : i + 8]) for i in range(0, 24, 8)]
    state, history = fitted(mse, members, Adapted, fit={"evaluate": (mse, batches)})
    expected, means = zip(*(evaluated(seed, Adapted, batches) for seed in range(members)), strict=True)
    assert_same(hfta.unstack_params(Adapted(), state.params, state.buffers), expected)
    torch.testing.assert_close(history["mse"], torch.tensor(means, dtype=torch.float64).T)
    with pytest.raises(StateError, match=r"its buffer '0\.running_mean' in eval mode, .* or an Ensemble, which"):
        hfta.predict(Adapted(), state, X)
    ensemble = hfta.Ensemble(Adapted(), state.params, state.buffers).eval()
    torch.testing.assert_close(ensemble(X), torch.stack([model.eval()(X) for model in expected]))
    assert_same(ensemble.members(), expected)
