"""Members that differ in numbers of their modules: each is the run that its own model makes alone."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import assert_as_arrays_of_one, seeded, start, train_array

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = [3, 14, 15]


class Own(nn.Module):
    """A function of the module, whose number is to differ, and of features."""

    def __init__(self, func, number):
        super().__init__()
        self.body, self.func, self.number = nn.Linear(4, 4), func, number

    def forward(self, x):
        return self.func(self, self.body(x))


def features(module):
    return nn.Sequential(nn.Linear(4, 6), module, nn.Linear(6, 3)).double()


def channels(module):
    return nn.Sequential(nn.Unflatten(-1, (2, 2)), nn.Conv1d(2, 6, 1), module, nn.Flatten(), nn.LazyLinear(3)).double()


class Compared(nn.Module):
    """A loss of PyTorch's inside the model, of features against others."""

    def __init__(self, loss, kind):
        super().__init__()
        self.body = nn.Linear(4, 6, dtype=torch.float64)
        self.loss = loss
        self.kind = kind

    def forward(self, x):
        x, other, third = self.body(x), self.body(x.flip(0)), self.body(x.roll(1, 0))
        if self.kind == "classes":
            return self.loss(x, torch.arange(len(x)).remainder(6))
        return self.loss(x, other, third.square())


class Attends(nn.Module):
    def __init__(self, rate, weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=rate, batch_first=True, dtype=torch.float64)
        self.weights = weights

    def forward(self, x):
        x = x.unflatten(0, (2, -1))
        return self.attention(x, x, x, need_weights=self.weights)[0]


class Recurs(nn.Module):
    def __init__(self, kind, rate):
        super().__init__()
        self.layers = kind(4, 5, num_layers=3, dropout=rate, batch_first=True, dtype=torch.float64)

    def forward(self, x):
        return self.layers(x.unflatten(0, (2, -1)))[0]


def case(make, *numbers):
    return make, numbers


def activation(module, *numbers, **options):
    return case(lambda number: features(module(number, **options)), *numbers)


def norm(module, *numbers):
    return case(lambda number: channels(module(number)), *numbers)


def loss(make, *numbers, kind):
    return case(lambda number: Compared(make(number), kind), *numbers)


def call(func, *numbers):
    return case(lambda number: Own(lambda module, x: func(x, module.number), number).double(), *numbers)


CASES = {
    "leaky_relu": activation(nn.LeakyReLU, 0.01, 0.2, 0),
    "leaky_relu in place": activation(nn.LeakyReLU, 0.01, 0.2, 0.5, inplace=True),
    "elu": activation(nn.ELU, 1.0, 0.3, 2.0),
    "rrelu": case(lambda number: features(nn.RReLU(0.1, number)), 0.2, 0.3, 0.5),
    "dropout": activation(nn.Dropout, 0.1, 0.0, 1.0),
    "dropout in place": activation(nn.Dropout, 0.1, 0.7, 0.5, inplace=True),
    "feature alpha dropout": norm(nn.FeatureAlphaDropout, 0.1, 0.0, 0.4),
    "dropout1d": norm(nn.Dropout1d, 0.1, 0.0, 0.4),
    "attention": case(lambda number: Attends(number, False), 0.1, 0.0, 0.4),
    "attention with weights": case(lambda number: Attends(number, True), 0.1, 0.0, 0.4),
    "attention scale": call(lambda x, number: F.scaled_dot_product_attention(x, x, x, scale=number), 0.1, 0.5, 1.0),
    "lstm": case(lambda number: Recurs(nn.LSTM, number), 0.1, 0.0, 0.4),
    "transformer": case(
        lambda number: nn.TransformerEncoderLayer(4, 2, 8, dropout=number, dtype=torch.float64, batch_first=True),
        *(0.1, 0.0, 0.4),
    ),
    "gumbel": call(lambda x, tau: F.gumbel_softmax(x, tau), 0.5, 1.0, 2.0),
    "group norm": norm(lambda eps: nn.GroupNorm(3, 6, eps), 1e-5, 0.1, 1.0),
    "batch norm momentum": norm(lambda momentum: nn.BatchNorm1d(6, momentum=momentum), 0.1, 0.01, 1.0),
    "local response": norm(
        lambda number: nn.LocalResponseNorm(3, alpha=number, beta=number, k=1 + number), 0.1, 0.5, 1.0
    ),
    "label smoothing": loss(lambda rate: nn.CrossEntropyLoss(label_smoothing=rate), 0.0, 0.1, 0.5, kind="classes"),
    "gaussian": loss(lambda eps: nn.GaussianNLLLoss(eps=eps), 1e-6, 0.1, 1.0, kind="variances"),
    "clamp": call(lambda x, number: x.clamp(-1.0, number), 0.1, 0.3, 0.5),
    "clamp below": call(lambda x, number: torch.clamp(x, min=number), 0.1, 0.3, 0.5),
    "arithmetic": call(lambda x, number: (x * number + 1 / (1 + number)) ** 2 - number**2, 0.1, 0.3, 0.5),
    "a branch that all take": call(lambda x, number: x * number if number > 0 else x, 0.1, 0.3, 0.5),
}


def models(make, numbers):
    made = []
    for seed, number in zip(SEEDS, numbers, strict=True):
        torch.manual_seed(seed)
        made.append(make(number))
        made[-1](torch.zeros(8, 4, dtype=torch.float64))
    return made


def batches(count=3, size=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, size, 4, generator=generator, dtype=torch.float64) * 2


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return (output * torch.linspace(0.5, 1.5, output.numel(), dtype=x.dtype).reshape(output.shape)).square().sum()


train = functools.partial(train_array, loss_fn)


def assert_members_are_solo_runs(members, xs, **options):
    assert_as_arrays_of_one(loss_fn, members, SEEDS, xs, 1e-10, **options)


APART = {"elu", "group norm", "batch norm momentum", "clamp"}
"""Functions that take Python numbers only, for which members run one after another."""
# A graph holds one side of a branch, and no value.
NOT_COMPILED = {"a branch that all take", *APART}


@pytest.mark.filterwarnings("ignore:members run one after another:hfta_func.errors.LoopWarning")
@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", CASES)
def test_members_are_the_runs_of_their_own_models(name):
    assert_members_are_solo_runs(models(*CASES[name]), batches())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_COMPILED])
def test_compiled_they_are_so_too(name):
    assert_members_are_solo_runs(models(*CASES[name]), batches(2), compiled=True)


def classifier(rate, slope=0.1):
    """Noise after the first dropout layer shows whether it counts its draws as it does alone."""
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.LeakyReLU(slope), nn.Dropout(rate), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))),
        *(nn.Dropout(0.2), nn.Linear(8, 3)),
    ).double()


def three():
    return seeded(classifier, SEEDS, (0.0, 0.3, 1.0), (0.01, 0.2, 0.0))


def assert_same(one, other, tolerance=0.0):
    assert_trees_close({**other}, {**one}, tolerance)


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.parametrize(
    "options",
    [
        *({"chunk_size": 1}, {"chunk_size": 2}, {"checkpoint": True}, {"checkpoint": ["1", "2", "3", "4"]}),
        *({"save": "less"}, {"donate": True}, {"share_frozen": False}, {"compiled": True, "chunk_size": 2}),
    ],
    ids=str,
)
def test_every_way_to_run_a_step(options):
    assert_members_are_solo_runs(three(), batches(), **options)


def test_noise_is_that_of_a_solo_run_to_the_bit():
    """In float32, too, where a rate of fewer bits would drop others."""

    class Noise(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100_000))
            self.first, self.second = nn.Dropout(rate), nn.Dropout(0.4)

        def forward(self, x):
            return torch.stack([self.first(self.weight * x), self.second(self.weight * x)])

    rates = [0.1, 0.0, 0.9999, 1.0]
    keys = hfta.random.keys([5, 6, 5, 7])
    members = [Noise(rate) for rate in rates]
    params, buffers = hfta.stack_params(members)
    apply = hfta.functional(members[0])
    found, new = hfta.vmap(lambda params, buffers, x, key: apply(params, buffers, x, key=key))(
        params, buffers, torch.ones(4, 1), keys
    )
    assert_same(new, buffers)
    assert found.dtype == torch.float32
    for i, member in enumerate(members):
        alone = hfta.functional(member)
        own, _ = alone({"weight": member.weight.detach()}, {}, torch.ones(1), key=keys[i])
        assert torch.equal(found[i] == 0, own == 0)
        scale = 0 if rates[i] == 1 else 1 / (1 - rates[i])
        kept = found[i][0][found[i][0] != 0]
        assert torch.equal(kept, torch.full_like(kept, scale))
        assert len(kept) == pytest.approx(1e5 * (1 - rates[i]), abs=4 * math.sqrt(1e5 * rates[i] * (1 - rates[i])))


def test_the_state_carries_them_as_hparams():
    members = three()
    stacked = hfta.stack_params(members)
    assert stacked.buffers["1.negative_slope"].tolist() == [0.01, 0.2, 0.0]
    step = hfta.make_train_step(members[2], loss_fn, hfta.adam(lr=[0.01, 0.02, 0.03]))
    state = step.init(*stacked, seeds=SEEDS)
    assert {path: leaf.tolist() for path, leaf in state.hparams.items()} == {
        "1.negative_slope": [0.01, 0.2, 0.0],
        "2.p": [0.0, 0.3, 1.0],
    }
    assert {leaf.dtype for leaf in state.hparams.values()} == {torch.float64}
    after, _ = step(state, batches()[0])
    assert_same(state.hparams, after.hparams)
    assert after.buffers.keys() == state.buffers.keys() == stacked.buffers.keys()
    assert after.buffers["2.p"].shape == state.buffers["2.p"].shape == (3, 0)


def test_models_go_back_with_their_own_numbers():
    members = three()
    state, _ = train(members, SEEDS, batches())
    first = copy.deepcopy(members[0]).eval()
    for i, member in enumerate(hfta.unstack_params(first, *hfta.step.stacked(state))):
        exported = hfta.export_model(first, state, i)
        assert_same(member.state_dict(), exported.state_dict())
        for model in (member, exported):
            assert (model[1].negative_slope, model[2].p) == (members[i][1].negative_slope, members[i][2].p)
            assert type(model[2].p) is float
    assert (first[1].negative_slope, first[2].p) == (0.01, 0.0)
    again = hfta.stack_params([hfta.export_model(members[0], state, i) for i in range(3)])
    assert_same(again.buffers, hfta.step.stacked(state).buffers)


def test_models_without_the_state_are_refused_without_their_numbers():
    members = three()
    state, _ = train(members, SEEDS, batches(1))
    message = (
        r"'1.negative_slope' is a number of each member's own, .* state's hparams.* pass \*hfta.step.stacked\(state\)"
    )
    evaluate = hfta.make_eval_step(members[0], loss_fn)
    step = hfta.make_train_step(members[0], loss_fn, hfta.sgd(lr=0.02, momentum=0.5))
    for use in (
        lambda: hfta.unstack_params(members[0], state.params, state.buffers),
        lambda: hfta.Ensemble(members[0], state.params, state.buffers),
        lambda: hfta.predict(members[0], hfta.models.Stacked(state.params, state.buffers), batches()[0, 0]),
        lambda: evaluate(hfta.models.Stacked(state.params, state.buffers), batches()[0, 0]),
        lambda: step(state._replace(hparams={}), batches()[0]),
        lambda: step.init(state.params, state.buffers, seeds=SEEDS),
    ):
        with pytest.raises(hfta.errors.StateError, match=message):
            use()
    afresh = step.init(state.params, state.buffers, seeds=SEEDS, hparams=state.hparams)
    assert_same(afresh.hparams, state.hparams)


def test_a_loss_and_a_metric_see_them_besides_their_own():
    members = three()

    def penalized(model, x, hparams):
        return model(x).square().sum() + hparams["l2"] * hparams["2.p"], {"rate": hparams["2.p"]}

    step, state = start(members, penalized, hfta.sgd(lr=0.01), SEEDS, {"l2": 2.0})
    _, metrics = step(state, batches()[0])
    assert metrics["rate"].tolist() == [0.0, 0.3, 1.0]
    rate = hfta.make_eval_step(members[0], lambda model, x, hparams: hparams["2.p"])(state, batches()[0, 0])
    assert rate["<lambda>"].tolist() == [0.0, 0.3, 1.0]


def test_numbers_are_given_by_name_to_models_that_are_alike():
    members = three()
    expected, _ = train(members, SEEDS, batches())
    step = hfta.make_train_step(classifier(0, 0.5), loss_fn, hfta.sgd(lr=0.02, momentum=0.5))
    named = {"2.p": [0.0, 0.3, 1.0], "1.negative_slope": torch.tensor([0.01, 0.2, 0.0], dtype=torch.float64)}
    params, buffers = hfta.init_params(lambda: classifier(0, 0.5), SEEDS)
    state = step.init(params, buffers, seeds=SEEDS, hparams=named)
    for x in batches():
        state, _ = step(state, x)
    assert_same(state.params, expected.params)
    # They count more than those of the models.
    other = step.init(*hfta.stack_params(members), seeds=SEEDS, hparams={"2.p": 0.5})
    assert other.hparams["2.p"].tolist() == [0.5] * 3
    assert other.hparams["1.negative_slope"].tolist() == [0.01, 0.2, 0.0]


def test_members_are_taken_and_joined(tmp_path):
    step, state = start(three(), loss_fn, hfta.sgd(lr=0.02, momentum=0.5), SEEDS)
    xs = batches()
    middle, _ = step(state, xs[0])
    joined = hfta.concat([hfta.take(middle, [2, 1]), hfta.take(middle, 0)])
    order = [2, 1, 0]
    hfta.save(joined, tmp_path / "state.safetensors")
    loaded = hfta.load(tmp_path / "state.safetensors", like=state)
    assert loaded.hparams["2.p"].tolist() == [1.0, 0.3, 0.0]
    after, _ = step(loaded, xs[1][order])
    expected, _ = step(middle, xs[1])
    assert_same(hfta.take(expected, order).params, after.params, 1e-12)
    averaged = hfta.step.average(expected)
    assert_same(averaged.hparams, state.hparams)
    assert_same(averaged.buffers, step(averaged, xs[2])[0].buffers | averaged.buffers)


@pytest.mark.exhaustive
def test_they_change_between_steps_without_a_new_graph():
    members = three()
    torch._dynamo.reset()
    step, state = start(members, loss_fn, hfta.sgd(lr=0.02, momentum=0.5), SEEDS)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    state, _ = compiled(state, batches()[0])
    changed = hfta.with_hyperparams(state, **{"2.p": [0.5, 0.0, 0.25]})
    with torch.compiler.set_stance("fail_on_recompile"):
        found, _ = compiled(changed, batches()[1])
    for member, rate in zip(members, (0.5, 0.0, 0.25), strict=True):
        member[2].p = rate
    fresh = step.init(*hfta.stack_params(members), seeds=SEEDS)._replace(
        **{name: getattr(state, name) for name in ("params", "buffers", "opt_state", "step")}
    )
    expected, _ = step(fresh, batches()[1])
    assert_same(expected.params, found.params, 1e-10)


def test_fit_resumes_and_keeps_them(tmp_path):
    members = three()
    data = (batches(1, 32)[0, 0], torch.zeros(32, dtype=torch.int64))

    def cross_entropy(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    step = hfta.make_train_step(members[0], cross_entropy, hfta.adam(lr=0.01))

    def run(epochs, **options):
        state = step.init(*hfta.stack_params(members), seeds=SEEDS)
        loader = hfta.ArrayLoader(data, 8, seeds=SEEDS)
        return hfta.fit(step, state, loader, epochs=epochs, progress=False, **options).state

    expected = run(2)
    run(1, resume=tmp_path / "run")
    resumed = run(2, resume=tmp_path / "run")
    assert_same(expected.params, resumed.params)
    assert resumed.hparams["2.p"].tolist() == [0.0, 0.3, 1.0]
    best = run(2, restore_best="loss")
    assert best.hparams["2.p"].tolist() == [0.0, 0.3, 1.0]


def test_an_ensemble_of_models_that_differ():
    members = three()
    ensemble = hfta.Ensemble.from_modules(members, seeds=SEEDS)
    x = batches()[0, 0]
    first = ensemble(x)
    for i, member in enumerate(members):
        alone = hfta.Ensemble.from_modules([member], seeds=SEEDS[i : i + 1])
        torch.testing.assert_close(first[i : i + 1], alone(x), rtol=1e-10, atol=1e-10)
    assert [member[2].p for member in ensemble.members()] == [0.0, 0.3, 1.0]
    assert [member[1].negative_slope for member in ensemble.take([2, 0]).members()] == [0.0, 0.01]
    other = hfta.Ensemble.from_modules([classifier(0.1, 0.2), classifier(0.2, 0.3), classifier(0.3, 0.4)])
    other.load_state_dict(ensemble.state_dict())
    assert [member[2].p for member in copy.deepcopy(other).eval().members()] == [0.0, 0.3, 1.0]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if name not in APART])
def test_numbers_have_the_precision_of_what_they_meet(name, dtype):
    def outputs(members, x, seeds):
        apply = hfta.functional(members[0])
        run = hfta.vmap(lambda params, buffers, x, key: apply(params, buffers, x, key=key)[0])
        return run(*hfta.stack_params(members), x, hfta.random.keys(seeds))

    members, x = [member.to(dtype) for member in models(*CASES[name])], batches()[0].to(dtype)
    found, tolerance = outputs(members, x, SEEDS), 1e-4 if dtype == torch.float32 else 0.1
    for i, one in enumerate(members):
        expected = outputs([one], x[i : i + 1], SEEDS[i : i + 1])
        torch.testing.assert_close(found[i : i + 1], expected, rtol=tolerance, atol=tolerance)


def step_of(func, numbers, compiled=False):
    members = [Own(func, number) for number in numbers]
    step, state = start(members, lambda model, x: model(x).sum(), hfta.sgd(lr=0.1), compiled=compiled)
    return step(state, torch.ones(len(members), 3, 4))


def anneals(module, x):
    module.number = module.number * 0.9
    return x * module.number


def anneals_in_place(module, x):
    module.number *= 0.9
    return x * module.number


READS = {
    "int": lambda module, x: x[:, : int(module.number)],
    "math": lambda module, x: x * math.sqrt(module.number),
    "full": lambda module, x: x + torch.full((4,), module.number),
}


REFUSED = {
    "interpolate": lambda module, x: F.interpolate(x[:, None], scale_factor=module.number),
    "range": lambda module, x: sum(x for _ in range(module.number)),
}


@pytest.mark.parametrize("read", READS)
def test_members_run_alone_where_a_number_must_be_one_of_pythons(read):
    with pytest.warns(hfta.errors.LoopWarning, match="run one after another"):
        step_of(READS[read], (1.0, 2.0))


@pytest.mark.parametrize("read", REFUSED)
def test_a_number_that_must_be_one_of_pythons_fails_loudly(read):
    with pytest.raises(TypeError, match=r"Tensor|tensors"):
        step_of(REFUSED[read], (1.0, 2.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [anneals, anneals_in_place])
def test_a_model_that_changes_its_number_is_refused(change, compiled):
    with pytest.raises(Exception, match=r"the model changes its number 'number' in a call.*register_buffer"):
        step_of(change, (1.0, 2.0), compiled)


def test_integers_may_be_sizes():
    def scaled(module, x):
        return x * module.number

    with pytest.raises(hfta.errors.StackError, match=r"model 1: 'number' is 2 but .* other numbers must be floats"):
        step_of(scaled, (1, 2))
    state, _ = step_of(scaled, (0, 0.5, 1))
    assert state.hparams["number"].tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(hfta.errors.StackError, match=r"model 1: 'number' is True but in model 0 it is 0.5"):
        step_of(scaled, (0.5, True))
    with pytest.raises(hfta.errors.StackError, match=r"model 1: 'number' is None but in model 0 it is 0.5"):
        step_of(scaled, (0.5, None))


def test_one_name_for_several_paths():
    def make(p=0.1, *, slope=0.2):
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.LeakyReLU(slope), nn.Dropout(0.4))

    columns = {"p": torch.tensor([0.0, 0.25, 0.5]), "slope": [0.1, 0.2, 0.4]}
    stacked = hfta.init_params(make, SEEDS, **columns)
    for member, seed in enumerate(SEEDS):
        torch.manual_seed(seed)
        model = make(columns["p"][member].item(), slope=columns["slope"][member])
        assert torch.equal(stacked.params["0.weight"][member], model[0].weight)
        assert (
            stacked.buffers["1.p"][member] == model[1].p
            and stacked.buffers["2.negative_slope"][member] == model[2].negative_slope
        )
    step = hfta.make_train_step(make(), lambda model, x: model(x).sum(), hfta.sgd(lr=0.1))
    state = step.init(*stacked, seeds=SEEDS, hparams={"3.p": 0.9, "*.p": [0.1, 0.2, 0.3], "2.neg*": 0.7})
    assert state.hparams["1.p"].tolist() == [0.1, 0.2, 0.3] and state.hparams["3.p"].tolist() == [0.9] * 3
    assert state.hparams["2.negative_slope"].tolist() == [0.7] * 3
    with pytest.raises(
        hfta.errors.HyperparameterError, match=r"'\*.q' matches no number of the model; it has 0.in_features, .*3.p"
    ):
        step.init(*stacked, seeds=SEEDS, hparams={"*.q": 0.1})
    takes = hfta.make_train_step(make(), lambda model, x, hparams: model(x).sum(), hfta.sgd(lr=0.1))
    with pytest.raises(
        hfta.errors.HyperparameterError, match=r"'2.p' is no number of the model; it has 1.p, 3.p, 0.in_features"
    ):
        takes.init(*stacked, seeds=SEEDS, hparams={"2.p": 0.1, "scale": 1.0})
    for wrong in ([0.1, 0.2], 0.1, "abc"):
        with pytest.raises(hfta.errors.HyperparameterError, match="for 3 models; give one value per model, or bind it"):
            hfta.init_params(make, SEEDS, p=wrong)


def test_members_may_branch_on_them_in_groups():
    def halves(module, x):
        return x * module.number if module.number > 1 else x - module.number

    torch.manual_seed(0)
    with pytest.warns(hfta.errors.LoopWarning, match="branches on the value"):
        _, found = step_of(halves, (0.5, 2.0, 3.0))
    torch.manual_seed(0)
    members = [Own(halves, number) for number in (0.5, 2.0, 3.0)]
    expected = [member(torch.ones(3, 4)).sum() for member in members]
    torch.testing.assert_close(found["loss"], torch.stack(expected).detach())
