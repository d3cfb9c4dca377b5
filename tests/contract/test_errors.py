"""Bad input: each gets an error that names the member, the path, both values and the cure, and changes nothing."""

import contextlib
import pathlib

import numpy as np
import optree
import pytest
import torch
from torch import nn

import hfta_func as hfta
from hfta_func import schedules

NAN = float("nan")


@contextlib.contextmanager
def refused(error, *fragments, spared=()):
    """The block raises exactly ``error``, its message holds every fragment, and no tensor of ``spared`` was written."""
    tensors = [leaf for leaf in optree.tree_leaves(spared) if isinstance(leaf, torch.Tensor)]
    before = [(tensor._version, tensor.detach().clone()) for tensor in tensors]
    with pytest.raises(hfta.HFTAError) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is error, message
    for fragment in fragments:
        assert fragment in message
    for tensor, (version, value) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert tensor.is_meta or torch.equal(tensor, value)


def tensors_of(models):
    return [dict(model.state_dict(keep_vars=True)) for model in models]


class Net(nn.Module):
    def __init__(self, *, width=2, activation=torch.relu):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Dropout(), nn.Conv2d(width, 2, 1))
        self.activation = activation

    def forward(self, x):
        return self.activation(self.body(x))


def net_with(change):
    def make():
        net = Net()
        change(net)
        return net

    return make


def tie(net):
    net.body[3].bias = net.body[0].bias


HOOKED = net_with(lambda net: net.body[2].register_forward_hook(lambda module, args, output: None))
FROZEN = net_with(lambda net: net.body[3].requires_grad_(False))
DIFFERENT = [
    (lambda: nn.Linear(2, 2), "the model is a Linear but in model 0 it is a Net"),
    (net_with(lambda net: net.body.append(nn.Tanh())), "model 0 has no module 'body.4' but model 2 has one"),
    (net_with(lambda net: net.double()), "'body.0.weight' is torch.float64 but model 0 has torch.float32"),
    (FROZEN, "the requires_grad of 'body.3.weight' is False but model 0 has True"),
    (lambda: Net(width=3), "'body.0.out_channels' is 3 but in model 0 it is 2"),
    (lambda: Net(activation=torch.tanh), "'activation' is tanh but in model 0 it is relu"),
    (net_with(tie), "model 2 ties 'body.3.bias' to 'body.0.bias' but model 0 does not"),
    (HOOKED, "'body.2._forward_hooks' is 1 but in model 0 it is 0"),
]


@pytest.mark.parametrize(("other", "difference"), DIFFERENT)
def test_models_that_differ(other, difference):
    models = [Net(), Net(), other()]
    with refused(hfta.errors.StackError, "model 2", difference, spared=tensors_of(models)):
        hfta.stack_params(models)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hfta.stack_params([]), "no models to stack; pass at least one"),
        (lambda: hfta.stack_params(Net()), "expected a list of models but got one Net; pass [model]"),
        (lambda: hfta.stack_params([Net(), {}]), "model 1: dict is not a torch.nn.Module; pass a model"),
        (lambda: hfta.num_models({}), "no tensors, so it has no members"),
        (lambda: hfta.num_models([torch.zeros(3), torch.zeros(2)]), "tree[1] has 2 members but tree[0] has 3"),
        (lambda: hfta.num_models({"a": torch.tensor(3.0)}), "tree['a'] has no axes"),
        (lambda: hfta.concat([]), "nothing to join; pass at least one array"),
    ],
)
def test_what_is_no_array(call, message):
    with refused(hfta.errors.StackError, message):
        call()


@pytest.mark.parametrize("index", [[0, 3], [], torch.zeros(3, dtype=torch.bool), [[True, False, True]]], ids=str)
def test_selecting_members_that_are_not_there(index):
    stacked = hfta.stack_params([Net() for _ in range(3)])
    with refused(hfta.errors.StackError, "selects no ", spared=stacked):
        hfta.take(stacked, index)


def test_joining_what_does_not_fit():
    first, wide = (hfta.stack_params([nn.Linear(4, size) for _ in range(2)]) for size in (2, 3))
    named = hfta.stack_params([nn.Sequential(nn.Linear(4, 2))])
    size = "['bias'] is torch.float32[3] per member but array 0 has torch.float32[2]"
    for arrays, fragments in (
        ([first, named], ["array 1 has tree.params['0.bias'] but array 0 does not", "same model"]),
        ([first, first, wide], ["array 2", size, "join arrays of the same model and dtype"]),
    ):
        with refused(hfta.errors.StackError, *fragments, spared=arrays):
            hfta.concat(arrays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hfta.sgd(lr=[0.1, 0.2, NAN]), "model 2: lr is nan; it must be at least 0"),
        (lambda: hfta.sgd(momentum=0.9, dampening=NAN), "dampening is nan; it must be a finite number"),
        (lambda: hfta.adam(betas=(0.9, [0.9, 1.5, 0.9])), "model 1: beta2 is 1.5; it must be at least 0 and below 1"),
        (lambda: hfta.optim.clip_grad_norm([1.0, 0.0, 1.0]), "model 1: max_norm is 0.0; it must be positive"),
        (lambda: hfta.sgd(lr=schedules.step_lr(0.1, [5, 0, 5])), "model 1: step_size is 0.0; it must be positive"),
        (lambda: hfta.sgd(lr=schedules.cosine([0.1, -0.1, 0.1], 5)), "model 1: lr is -0.1; it must"),
    ],
)
def test_hyperparameter_out_of_range(make, message):
    with refused(hfta.errors.HyperparameterError, message):
        make()


@pytest.mark.parametrize(
    ("new", "fragments"),
    [
        ({"lr": -0.1}, ["lr is -0.1; it must be at least 0"]),
        ({"lr": [0.1, 0.2]}, ["lr has 2 values but the array has 3 models", "one per model"]),
        ({"max_norm": [1.0, 1.0, 0.0]}, ["model 2: max_norm is 0.0; it must be positive"]),
        ({"weight_decay": 0.1}, ["unknown hyperparameter 'weight_decay'", "plain number 0", "one number per model"]),
        ({"smoothing": [0.1, NAN, 0.3]}, ["model 1: smoothing is nan; it must be a finite number"]),
    ],
)
def test_replacing_hyperparameters(new, fragments):
    optimizer = hfta.chain(hfta.optim.clip_grad_norm(1.0), hfta.adam(lr=[0.1, 0.2, 0.3]))
    step = hfta.make_train_step(nn.Linear(4, 2), lambda model, batch, hparams: square(model, batch), optimizer)
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    state = step.init(*stacked, seeds=[2, 0, 1], hparams={"smoothing": [0.0, 0.1, 0.2]})
    with refused(hfta.errors.HyperparameterError, *fragments, spared=state):
        hfta.with_hyperparams(state, **new)


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        (
            {"hparams": {"smoothing": 0.1}},
            [
                "'smoothing' is no number of the model, and the loss takes only (model, batch)",
                "give it a third argument",
            ],
        ),
        ({"seeds": torch.tensor([1, 2])}, ["got 2 seeds but the array has 3 models", "one per model"]),
        ({"seeds": [1, 2, "3"]}, ["model 2: seed '3' is not a 64-bit integer", "one int per model"]),
        ({"seeds": [1, 2, 2**63]}, [f"model 2: seed {2**63} is not a 64-bit integer", "one int per model"]),
    ],
)
def test_numbers_that_a_state_does_not_take(given, fragments):
    step = hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd())
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(hfta.errors.HyperparameterError, *fragments, spared=stacked):
        step.init(*stacked, **{"seeds": [2, 0, 1], **given})


def square(model, batch):
    return model(batch).square().mean()


def linear_step(loss_fn=square, optimizer=None, model=None, **options):
    """A step for three linear models, and its first state."""
    model = model or nn.Linear(4, 2)
    step = hfta.make_train_step(model, loss_fn, optimizer or hfta.sgd(lr=[0.1, 0.2, 0.3]), **options)
    stacked = hfta.init_params(lambda: rebuilt(model), seeds=[0, 1, 2])
    return step, step.init(*stacked, seeds=[2, 0, 1])


def rebuilt(model):
    """A module of the same architecture with new parameters."""
    (copy,) = hfta.unstack_params(model, *hfta.stack_params([model]))
    for parameter in copy.parameters():
        nn.init.normal_(parameter)
    return copy


@pytest.mark.parametrize(
    ("batch", "leaf"),
    [
        (torch.randn(8, 4), "batch is [8, 4]"),
        ({"x": (torch.randn(3, 8, 4), torch.randn(8, 4))}, "batch['x'][1] is [8, 4]"),
        ({"x": (torch.randn(3, 8, 4), torch.tensor(1.0))}, "batch['x'][1] is []"),
    ],
)
def test_batch_without_the_model_axis(batch, leaf):
    step, state = linear_step()
    evaluate = hfta.make_eval_step(nn.Linear(4, 2), square, batch_dims=0)
    for run in (step, evaluate):
        cure = ["give every model its own part [3, N, ...]", "batch_dims=None"]
        with refused(hfta.errors.BatchError, f"{leaf} but the array has 3 models", *cure, spared=(state, batch)):
            run(state, batch)


def test_batch_leaf_that_is_no_tensor():
    step, state = linear_step(lambda model, batch: square(model, batch[0]))
    for value, name in ((0.5, "float"), (np.ones((3, 8)), "ndarray")):
        batch = [torch.randn(3, 8, 4), value]
        fragments = f"batch[1] is a {name}", "leaves of a batch must be tensors"
        with refused(hfta.errors.BatchError, *fragments, spared=(state, batch)):
            step(state, batch)


BAD_LOSS = {
    "outputs beside the loss": (
        lambda model, batch: (square(model, batch), model(batch)),
        ["returned Tensor, Tensor", "the loss and a dict of metrics"],
    ),
    "output of a model from a package": (
        lambda model, batch: {"loss": square(model, batch)},
        ["returned dict", "return the loss"],
    ),
    "metrics in a dict": (
        lambda model, batch: (square(model, batch), {"parts": {"a": square(model, batch)}}),
        ["metric 'parts' of one model is a dict", "each metric as one tensor or number"],
    ),
    "vector": (lambda model, batch: model(batch).mean(1), ["has shape [8]", "reduce it to a scalar", ".mean()"]),
    "metric with the name of the loss": (
        lambda model, batch: (square(model, batch), {"loss": model(batch).mean()}),
        ["metric 'loss' hides what the step reports", "none of loss, finite, failure, loss_scale"],
    ),
}


@pytest.mark.parametrize("name", BAD_LOSS)
def test_loss(name):
    loss_fn, fragments = BAD_LOSS[name]
    step, state = linear_step(loss_fn)
    batch = torch.randn(3, 8, 4)
    with refused(hfta.errors.LossError, *fragments, spared=(state, batch)):
        step(state, batch)


def test_metric():
    _, state = linear_step()
    evaluate = hfta.make_eval_step(nn.Linear(4, 2), lambda model, batch: (square(model, batch),) * 2, batch_dims=0)
    with refused(hfta.errors.LossError, "metric '<lambda>' of one model is a", "as one tensor", spared=(state,)):
        evaluate(state, torch.randn(3, 8, 4))


def test_nothing_to_train():
    with refused(hfta.errors.LossError, "no parameter of the model requires grad", "nothing to train"):
        hfta.make_train_step(nn.Linear(4, 2).requires_grad_(False), square, hfta.sgd())


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.draw = draw

    def forward(self, x):
        return self.linear(x) + self.draw(x[:, :1].abs())


SHARED_GENERATOR = torch.Generator()
WITH_GENERATOR = {
    "torch.normal": lambda x: torch.normal(x, 1.0, generator=SHARED_GENERATOR),
    "torch.Tensor.uniform_": lambda x: torch.empty_like(x).uniform_(generator=SHARED_GENERATOR),
}


@pytest.mark.parametrize("name", WITH_GENERATOR)
def test_generator_of_the_users_own(name):
    step, state = linear_step(model=Noisy(WITH_GENERATOR[name]))
    batch, before = torch.randn(3, 8, 4), SHARED_GENERATOR.get_state()
    fragments = f"{name} got a generator", "leave it out", "own key"
    with refused(hfta.errors.RandomnessError, *fragments, spared=(state, batch)):
        step(state, batch)
    assert torch.equal(SHARED_GENERATOR.get_state(), before)


@contextlib.contextmanager
def apart(*texts):
    """A block in which members run one after another, with a warning that holds all ``texts``."""
    with pytest.warns(hfta.errors.LoopWarning, match="members run one after another") as caught:
        yield
    assert all(text in str(caught[0].message) for text in texts), str(caught[0].message)


ADVICE = ["compute with tensors instead", "torch.where", "return the value as a metric"]


def line_of(name):
    """The number of the line of this file that ends in a comment with ``name``."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# at fault: {name}")]
    return number


class Nested(nn.Module):
    """Reads a value in a function inside of ``forward``, or in a method that it calls."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.kind = kind

    def forward(self, x):
        def helper(y):
            z = y * self.scale
            return z if z.sum().item() > 0 else y  # at fault: helper

        y = self.linear(x)
        return helper(y) if self.kind == "helper" else self.shrunk(y)

    def shrunk(self, y):
        while y.sum().item() > 1:  # at fault: method
            y = y / 2
        return y


NESTED = {
    "helper": "module '1.0' (Nested), helper",
    "method": "module '1.0' (Nested), shrunk",
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("way", ["step", "checkpointed", "evaluated", "functional_call"])
@pytest.mark.parametrize("name", NESTED)
def test_the_line_below_a_module_that_reads_a_value(name, way):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Nested(name)))
    params = hfta.stack_params([model] * 3).params
    x, place = torch.randn(3, 8, 4), f"({__file__}:{line_of(name)})"
    if way != "functional_call":
        step, state = linear_step(model=model, checkpoint=way == "checkpointed")
        run = hfta.make_eval_step(model, square, batch_dims=0) if way == "evaluated" else step
        with apart(f"{NESTED[name]} {place}, asks for the value of a tensor", *ADVICE):
            run(state, x)
        return

    def call(params, x):
        return torch.func.functional_call(model, params, (x,))

    run = hfta.vmap(call)
    with refused(hfta.errors.TraceError, place, "value of a tensor", *ADVICE):
        run(params, x)


def test_state_of_another_model():
    step, state = linear_step()
    batch = torch.randn(3, 8, 4)
    for other, difference in (
        (linear_step(model=nn.Linear(4, 3))[1], "'weight' is [3, 4] per member but [2, 4] in the model"),
        (linear_step(model=nn.Sequential(nn.Linear(4, 2)))[1], "'weight' is in the model but not in the array"),
        (state._replace(buffers={"seen": torch.zeros(3)}), "'seen' is in the array but not in the model"),
    ):
        cure = "the state and the step must be of the same model"
        with refused(hfta.errors.StateError, difference, cure, spared=(other, batch)):
            step(other, batch)
        with refused(hfta.errors.StateError, difference, cure, spared=other):
            step.init(other.params, other.buffers, seeds=[2, 0, 1])


def test_chunk_size():
    for size in (0, -1, True, 1.0):
        with pytest.raises(ValueError, match=f"chunk_size is {size}; it must be at least 1, 'auto', or None"):
            hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd(), chunk_size=size)


def _loss(model, batch):
    return model(batch).mean()


MISUSES = {
    "a factory for a model": (
        lambda: hfta.make_train_step(Net, _loss, hfta.sgd(lr=0.1)),
        "Net is not a torch.nn.Module; pass a model, such as a factory makes when it is called",
    ),
    "a factory made functional": (lambda: hfta.functional(Net), "Net is not a torch.nn.Module"),
    "a model for a factory": (lambda: hfta.init_params(Net(), [0]), "factory is a module (Net); pass a function"),
    "an optimizer of PyTorch": (
        lambda: hfta.make_train_step(Net(), _loss, torch.optim.SGD(Net().parameters())),
        "optimizer is SGD, not a GradientTransformation",
    ),
    "words for a number": (lambda: hfta.sgd(lr="0.1"), "lr is '0.1'; give one number, or one per model"),
    "words for a loss scale": (lambda: hfta.step.LossScale("auto"), "init_scale is 'auto'; give one number"),
    "a model for a tree": (lambda: hfta.num_models(Net()), "tree is a Net; every leaf must be a tensor [M, ...]"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_something_else_than_what_is_asked_for(name):
    call, message = MISUSES[name]
    with pytest.raises((hfta.HFTAError, TypeError)) as caught:
        call()
    assert message in str(caught.value)


def test_integers_of_numpy_are_seeds():
    assert hfta.random.keys(np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_name_that_the_model_does_not_know(is_compiled):
    apply = hfta.functional(nn.Linear(2, 2))
    with pytest.raises(Exception, match="no parameter or buffer 'wieght'"):
        (torch.compile(apply, backend="eager") if is_compiled else apply)(
            {"wieght": torch.zeros(2, 2)}, {}, torch.zeros(2)
        )
