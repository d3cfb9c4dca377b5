"""Parameters that all members share and train: one copy, the sum of the members' gradients, one update."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from hfta_func.errors import LossError, StackError, StateError
from hfta_func.run.memory import peak_bytes
from member_runs import mse

pytestmark = pytest.mark.usefixtures("one_thread")
M, LR, NAMES = 3, [0.1, 0.03, 0.01], ["trunk"]
TRUNK = {"trunk.0.weight", "trunk.0.bias"}


class Heads(nn.Module):
    """A trunk for all tasks and a head for each, with noise and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, x):
        return self.head(self.norm(self.trunk(x)))


def make_models():
    models = []
    for seed in range(M):
        torch.manual_seed(seed)
        models.append(Heads())
        models[-1].trunk.load_state_dict(models[0].trunk.state_dict())
    return models


def make_batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(M, 7, size, generator=generator, dtype=torch.float64) for size in (5, 2))
        for _ in range(count)
    ]


def array(models, loss=mse, shared=None, **options):
    shared = hfta.sgd(lr=0.05, momentum=0.9, weight_decay=0.01) if shared is None else shared
    step = hfta.make_train_step(
        models[0], loss, hfta.adam(lr=LR), shared_params=NAMES, shared_optimizer=shared, **options
    )
    return step, step.init(*hfta.stack_params(models, shared_params=NAMES), seeds=range(M))


class Loop:
    """The same in PyTorch's own words: one trunk in M models, and an optimizer for it and for each head."""

    def __init__(self, models):
        self.trunk = copy.deepcopy(models[0].trunk)
        self.models = [copy.deepcopy(model) for model in models]
        for model in self.models:
            model.trunk = self.trunk
        own = [[*model.norm.parameters(), *model.head.parameters()] for model in self.models]
        self.heads = [torch.optim.Adam(params, lr) for params, lr in zip(own, LR, strict=True)]
        self.shared = torch.optim.SGD(self.trunk.parameters(), 0.05, momentum=0.9, weight_decay=0.01)

    def __call__(self, batch, members=range(M)):
        for optimizer in (*self.heads, self.shared):
            optimizer.zero_grad()
        for member in members:
            mse(self.models[member], tuple(x[member] for x in batch)).backward()
            self.heads[member].step()
        self.shared.step()


def check(state, loop, members=range(M)):
    for path, param in loop.trunk.named_parameters():
        torch.testing.assert_close(state.shared.params[f"trunk.{path}"], param.detach(), rtol=1e-10, atol=1e-12)
    for place, member in enumerate(members):
        tensors = {**state.params, **state.buffers}
        for path, tensor in loop.models[member].state_dict().items():
            if not path.startswith("trunk"):
                torch.testing.assert_close(tensors[path][place], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(every=7)
@pytest.mark.exhaustive(ids="^True.*donate")
@pytest.mark.parametrize(
    ("compile", "options"),
    [
        *((False, option) for option in ({}, {"chunk_size": 1}, {"chunk_size": 2}, {"donate": True}, {"save": "less"})),
        (False, {"checkpoint": ["trunk"]}),
        *((True, option) for option in ({}, {"chunk_size": 2, "donate": True})),
    ],
    ids=str,
)
def test_heads_over_a_trunk_are_the_loop(compile, options):
    models = make_models()
    before = copy.deepcopy(models[0].state_dict())
    step, state = array(models, **options)
    run, loop = torch.compile(step, fullgraph=True, backend="aot_eager") if compile else step, Loop(models)
    for batch in make_batches():
        state, _ = run(state, batch)
        loop(batch)
    check(state, loop)
    assert state.params.keys() & TRUNK == set() and state.shared.params.keys() == TRUNK
    assert state.shared.params["trunk.0.weight"].shape == (6, 5)
    assert all(torch.equal(models[0].state_dict()[path], value) for path, value in before.items())


def bad(kind):
    """A loss that fails for member 1 at the second batch, in its value, in its head or in the trunk alone."""

    def loss(model, batch):
        x, y = batch
        hit = (x[0, 0] > 50).double()
        value = F.mse_loss(model(x.clamp(-5, 5)), y)
        if kind == "loss":
            return value + torch.where(hit > 0, math.nan, 0.0)
        param = model.head.weight if kind == "head" else model.trunk[0].weight
        # The root of zero is finite and has no finite gradient; that of one is constant here.
        return value + ((param - param.detach()).sum() * hit + 1 - hit).sqrt()

    return loss


@pytest.mark.exhaustive(ids="trunk-True")
@pytest.mark.parametrize(("kind", "compile"), [("loss", False), ("head", False), ("trunk", False), ("trunk", True)])
def test_a_member_that_fails_contributes_nothing(kind, compile):
    models = make_models()
    step, state = array(models, bad(kind))
    run, loop = torch.compile(step, fullgraph=True, backend="aot_eager") if compile else step, Loop(models)
    for number, batch in enumerate(make_batches()):
        if number == 1:
            batch[0][1] = 100
        state, metrics = run(state, batch)
        assert metrics["finite"].tolist() == [True, number != 1, True]
        loop(batch, [0, 2] if number == 1 else range(M))
    check(state, loop)


def test_nothing_is_updated_where_all_fail():
    models = make_models()
    step, state = array(models, shared=hfta.adam(lr=0.1))
    state, _ = step(state, make_batches()[0])
    x, y = make_batches()[1]
    after, metrics = step(state, (x * math.nan, y))
    assert not metrics["finite"].any()
    for path in TRUNK:
        assert torch.equal(after.shared.params[path], state.shared.params[path])
    assert after.shared.opt_state.step.tolist() == [1]


def test_inactive_and_dropped_members_contribute_nothing():
    models = make_models()
    step, state = array(models)
    loop = Loop(models)
    first, second, third, _ = make_batches()
    state, _ = step(state, first)
    loop(first)
    state = state._replace(active=torch.tensor([True, False, True]))
    before = state.params["head.weight"][1].clone()
    state, _ = step(state, second)
    loop(second, [0, 2])
    assert torch.equal(state.params["head.weight"][1], before)
    state = hfta.concat([hfta.take(state, [2]), hfta.take(state, [0])])
    assert hfta.num_models(state) == 2 and state.shared.params["trunk.0.bias"].shape == (6,)
    state, _ = step(state, tuple(x[[2, 0]] for x in third))
    loop(third, [0, 2])
    check(state, loop, [2, 0])


def test_a_run_packs_the_members_that_are_left():
    models = make_models()
    step, state = array(models)
    state = state._replace(active=torch.tensor([True, False, False]))

    def run(**options):
        loader = hfta.ArrayLoader(tuple(x[0] for x in make_batches()[0]), 4, seeds=range(M))
        return hfta.fit(step, state, loader, epochs=3, progress=False, **options).state

    whole, packed = run(), run(compact=True)
    for path in TRUNK:
        torch.testing.assert_close(packed.shared.params[path], whole.shared.params[path], rtol=1e-10, atol=0)
        assert not torch.equal(packed.shared.params[path], state.shared.params[path])
    torch.testing.assert_close(packed.params["head.weight"], whole.params["head.weight"], rtol=1e-10, atol=0)


def test_members_taken_from_a_state_do_not_write_its_trunk():
    step, state = array(make_models(), donate=True)
    part = hfta.take(state, [0, 1])
    batch = make_batches(1)[0]
    before = state.shared.params["trunk.0.weight"].clone()
    part, _ = step(part, tuple(x[:2] for x in batch))
    assert torch.equal(state.shared.params["trunk.0.weight"], before)
    assert not torch.equal(part.shared.params["trunk.0.weight"], before)
    with pytest.raises(StackError, match=r"array 1: tree.shared.params\['trunk.0.bias'\].* not been trained apart"):
        hfta.concat([state, part])


@pytest.mark.exhaustive
def test_files_modules_evaluation_and_predictions_have_the_trunk(tmp_path):
    models = make_models()
    step, state = array(models)
    straight, _ = hfta.fit(step, state, make_batches(), epochs=2, progress=False)
    for epochs in (1, 2):
        resumed, _ = hfta.fit(
            step, state, make_batches(), epochs=epochs, progress=False, resume=tmp_path / "run.safetensors"
        )
    assert all(torch.equal(resumed.shared.params[path], straight.shared.params[path]) for path in TRUNK)
    hfta.save(straight, tmp_path / "state.safetensors")
    header = hfta.files.read_metadata(tmp_path / "state.safetensors")
    assert header["shapes"]["state.shared.params['trunk.0.weight']"] == [6, 5] and header["num_models"] == M
    loaded = hfta.load(tmp_path / "state.safetensors", like=state, members=[2, 0])
    assert torch.equal(loaded.shared.params["trunk.0.weight"], straight.shared.params["trunk.0.weight"])
    assert torch.equal(loaded.params["head.bias"], straight.params["head.bias"][[2, 0]])

    made = hfta.unstack_params(models[0], straight.params, straight.buffers, shared=straight.shared.params)
    assert made[0].trunk[0].weight is made[2].trunk[0].weight and made[0].head.weight is not made[2].head.weight
    alone = hfta.export_model(models[0], straight, 1)
    x, y = make_batches(1)[0]
    expected = torch.stack([model.eval()(x[0]) for model in made]).detach()
    torch.testing.assert_close(alone.eval()(x[0]).detach(), expected[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(hfta.predict(models[0], straight, x[0]).outputs, expected, rtol=1e-10, atol=1e-12)
    for options in ({}, {"chunk_size": 2}):
        evaluate = hfta.make_eval_step(models[0], mse, shared_params=NAMES, batch_dims=0, **options)
        losses = [mse(model, (a, b)) for model, a, b in zip(made, x, y, strict=True)]
        for run in (evaluate, torch.compile(evaluate, fullgraph=True, backend="aot_eager")):
            torch.testing.assert_close(run(straight, (x, y))["mse"], torch.stack(losses).detach(), rtol=1e-10, atol=0)


def test_an_eager_step_holds_one_gradient_of_the_trunk():
    models = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)) for _ in range(8)]
    for model in models:
        model[0] = models[0][0]
    step = hfta.make_train_step(
        models[0], lambda model, x: model(x).square().mean(), hfta.sgd(lr=0.1), shared_params=["0"], donate=True
    )
    state = step.init(*hfta.stack_params(models, shared_params=["0"]), seeds=range(8))
    x = torch.ones(8, 2, 512)
    state, _ = step(state, x)
    # The gradient and what the update makes of it; eight gradients would be twice as much and more.
    assert peak_bytes(lambda: step(state, x), torch.device("cpu")) < 3.5 * models[0][0].weight.nbytes


def test_hyperparameters_of_the_trunk_have_names_of_their_own():
    _, state = array(make_models())
    changed = hfta.with_hyperparams(state, lr=[1.0, 2.0, 3.0], **{"shared.lr": 0.5})
    assert changed.opt_state.hyperparams["lr"].tolist() == [1, 2, 3]
    assert changed.shared.opt_state.hyperparams["lr"].tolist() == [0.5]
    with pytest.raises(hfta.errors.HyperparameterError, match=r"shared\.momentum"):
        hfta.with_hyperparams(state, nothing=1.0)


def test_bad_uses_are_refused_with_the_cure():
    models = make_models()
    frozen = copy.deepcopy(models[0])
    frozen.trunk.requires_grad_(False)
    for model, names, error, words in (
        (models[0], ["body"], StackError, "shared_params names 'body', which is no parameter"),
        (models[0], ["trunk", "norm", "head"], LossError, "there is nothing to train"),
        (frozen, NAMES, StackError, r"'trunk', which .* require grad; share_frozen=True"),
    ):
        with pytest.raises(error, match=words):
            hfta.make_train_step(model, mse, hfta.sgd(lr=0.1), shared_params=names)
    step = hfta.make_train_step(models[0], mse, hfta.sgd(lr=LR), shared_params=NAMES)
    stacked = hfta.stack_params(models, shared_params=NAMES)
    with pytest.raises(hfta.errors.HyperparameterError, match=r"lr has 3 values but the array has 1 models"):
        step.init(*stacked, seeds=range(M))
    with pytest.raises(StateError, match=r"trunk.0.weight' is in the array but members share it.*shared_params"):
        step.init(*hfta.stack_params(models), seeds=range(M))
    with torch.no_grad():
        models[2].trunk[0].bias[1] += 0.5
    words = r"model 2: 1 entries of the shared 'trunk.0.bias' are not .* of model 0.*leave out shared_params"
    with pytest.raises(StackError, match=words):
        hfta.stack_params(models, shared_params=NAMES)
    step, state = array(make_models())
    batch = make_batches(1)[0]
    keeping = {"callbacks": [hfta.callbacks.keep_best("best.safetensors", "loss")]}
    for options in (keeping, {"restore_best": "loss"}, {"workers": 2}):
        with pytest.raises(StateError, match=r"share 'trunk.0.weight'.*leave out"):
            hfta.fit(step, state, [batch], epochs=1, progress=False, **options)
