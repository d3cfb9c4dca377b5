"""Bad input: each gets an error that names the member, the path, both values and the cure, and changes nothing."""

import contextlib
import inspect
import pathlib
import subprocess
import sys

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
    def __init__(self, *, p=0.5, stride=1, bias=True, activation=torch.relu, constant=1.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 3, stride=stride, bias=bias),
            nn.BatchNorm2d(2),
            nn.Dropout(p),
            nn.Conv2d(2, 2, 1, bias=bias),
        )
        self.activation = activation
        self.constant = constant

    def forward(self, x):
        return self.activation(self.body(x)) * self.constant


class Scale(nn.Module):
    def __init__(self, size, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("seen", torch.zeros(2, dtype=dtype))


class Sized(Scale):
    """A module that is false as a condition, because it has a length of zero."""

    def __init__(self, rate):
        super().__init__(2)
        self.rate = rate

    def __len__(self):
        return 0


def closure(slope):
    return lambda x: x * slope


def scaling(by):
    return lambda module, args, output: output * by


def with_default(slope):
    return lambda x, *, by=slope: x * by


def changed(**settings):
    return lambda: Net(**settings)


def net_with(change):
    def make():
        net = Net()
        change(net)
        return net

    return make


def tie(net):
    net.body[3].bias = net.body[0].bias


DIFFERENT = {
    "class": (Net, lambda: nn.Linear(2, 2), ["the model is a Linear", "in model 0 it is a Net", "of one class"]),
    "number of submodules": (
        Net,
        net_with(lambda net: net.body.append(nn.Tanh())),
        ["model 0 has no module 'body.4' but model 2 has one", "same modules, parameters and buffers"],
    ),
    "shape that a setting gives": (
        lambda: nn.Sequential(nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3)),
        ["'0.out_features' is 3 but in model 0 it is 2", "share every setting"],
    ),
    "dtype": (
        Net,
        net_with(lambda net: net.double()),
        ["the dtype of 'body.0.weight' is torch.float64 but model 0 has torch.float32", "share every dtype"],
    ),
    "device": (
        Net,
        net_with(lambda net: net.to("meta")),
        ["the device of 'body.0.weight' is meta but model 0 has cpu", "share every device"],
    ),
    "requires_grad": (
        Net,
        net_with(lambda net: net.body[3].requires_grad_(False)),
        ["the requires_grad of 'body.3.weight' is False but model 0 has True", "share every requires_grad"],
    ),
    "function": (
        Net,
        changed(activation=torch.tanh),
        ["'activation' is tanh but in model 0 it is relu", "models in one array must share every setting"],
    ),
    "keyword default": (
        changed(activation=with_default(0.5)),
        changed(activation=with_default(0.25)),
        ["'activation.__kwdefaults__['by']' is 0.25 but in model 0 it is 0.5", "share every setting"],
    ),
    "code of a function": (
        changed(activation=lambda x: x),
        changed(activation=lambda x: -x),
        [
            "'activation' is <lambda> (line ",
            "but in model 0 it is <lambda> (line ",
            "every setting",
        ],
    ),
    "plain tensor in a container": (
        changed(constant={"shift": [torch.ones(2), torch.zeros(2)]}),
        changed(constant={"shift": [torch.ones(2), torch.ones(2)]}),
        [
            "'constant['shift'][1]' is tensor([1., 1.]) but in model 0 it is tensor([0., 0.])",
            "register it as a parameter or a buffer",
        ],
    ),
    "plain tensor of another dtype": (
        changed(constant=torch.ones(2)),
        changed(constant=torch.ones(2).double()),
        [
            "'constant' is tensor([1., 1.], dtype=torch.float64) but in model 0 it is tensor([1., 1.])",
            "every setting",
        ],
    ),
    "ties": (
        Net,
        net_with(tie),
        ["model 2 ties 'body.3.bias' to 'body.0.bias' but model 0 does not", "tie the same parameters in all models"],
    ),
    "hooks": (
        Net,
        net_with(lambda net: net.body[2].register_forward_hook(lambda module, args, output: None)),
        ["'body.2._forward_hooks' is 1 but in model 0 it is 0", "share every setting"],
    ),
    "setting of a model of length zero": (
        lambda: Sized(1),
        lambda: Sized(2),
        ["'rate' is 2 but in model 0 it is 1", "share every setting"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_that_differ(name):
    usual, other, fragments = DIFFERENT[name]
    models = [usual(), usual(), other()]
    with refused(hfta.errors.StackError, "model 2", *fragments, spared=tensors_of(models)):
        hfta.stack_params(models)


def test_no_models():
    with refused(hfta.errors.StackError, "no models to stack; pass at least one"):
        hfta.stack_params([])
    with refused(hfta.errors.StackError, "no models to stack; pass at least one"):
        hfta.init_params(Net, seeds=[])


def test_one_model_instead_of_a_list():
    with refused(hfta.errors.StackError, "expected a list of models but got one Net; pass [model]"):
        hfta.stack_params(Net())


def test_something_else_in_the_list():
    models = [Net(), Net().state_dict()]
    with refused(hfta.errors.StackError, "model 1 is a OrderedDict; every model must be a torch.nn.Module"):
        hfta.stack_params(models)


def test_lazy_module():
    models = [nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2)) for _ in range(2)]
    models[0](torch.randn(5, 4))
    with refused(
        hfta.errors.StackError,
        "model 1",
        "'1.weight' is lazy and has no shape yet",
        "run the model once on an example input first",
        spared=[dict(models[0].named_parameters())],
    ):
        hfta.stack_params(models)
    assert nn.parameter.is_lazy(models[1][1].weight)


@pytest.mark.parametrize("index", [[0, 3], [], torch.zeros(3, dtype=torch.bool), [[True, False, True]]], ids=str)
def test_selecting_members_that_are_not_there(index):
    stacked = hfta.stack_params([Net() for _ in range(3)])
    with refused(hfta.errors.StackError, "selects no ", spared=stacked):
        hfta.take(stacked, index)


def test_trees_without_a_model_axis():
    with refused(hfta.errors.StackError, "no tensors, so it has no members", "stack_params"):
        hfta.num_models({})
    with refused(hfta.errors.StackError, "tree['b'] has 2 members but tree['a'] has 3", "axis 0 of every leaf"):
        hfta.num_models({"a": torch.zeros(3), "b": torch.zeros(2)})
    with refused(hfta.errors.StackError, "tree['a'] has no axes", "axis 0 of every leaf"):
        hfta.num_models({"a": torch.tensor(3.0)})


def test_joining_what_does_not_fit():
    first, wide = (hfta.stack_params([nn.Linear(4, size) for _ in range(2)]) for size in (2, 3))
    named = hfta.stack_params([nn.Sequential(nn.Linear(4, 2))])
    with refused(hfta.errors.StackError, "nothing to join; pass at least one array"):
        hfta.concat([])
    with refused(
        hfta.errors.StackError,
        "array 1 has tree.params['0.bias'] but array 0 does not",
        "same model",
        spared=(first, named),
    ):
        hfta.concat([first, named])
    with refused(
        hfta.errors.StackError,
        "array 2",
        "['bias'] is torch.float32[3] per member but array 0 has torch.float32[2]",
        "join arrays of the same model and dtype",
        spared=(first, wide),
    ):
        hfta.concat([first, first, wide])
    double = optree.tree_map(torch.Tensor.double, first)
    with refused(
        hfta.errors.StackError, "array 1", "torch.float64[2]", "torch.float32[2]", "dtype", spared=(first, double)
    ):
        hfta.concat([first, double])


ONE = {"w": torch.zeros(3, 2)}

OUT_OF_RANGE = {
    "sgd lr": (lambda: hfta.sgd(lr=-0.1), "lr is -0.1; it must be at least 0"),
    "sgd lr NaN": (lambda: hfta.sgd(lr=[0.1, 0.2, NAN]), "model 2: lr is nan; it must be at least 0"),
    "sgd lr tensor": (
        lambda: hfta.sgd(lr=torch.tensor([-1.0, 1.0, 1.0])),
        "model 0: lr is -1.0; it must be at least 0",
    ),
    "sgd dampening": (lambda: hfta.sgd(momentum=0.9, dampening=NAN), "dampening is nan; it must be a finite number"),
    "sgd weight_decay": (
        lambda: hfta.sgd(weight_decay=[0.0, -0.01, 0.0]),
        "model 1: weight_decay is -0.01; it must be",
    ),
    "adam lr": (lambda: hfta.adam(lr=[0.1, -0.1, 0.1]), "model 1: lr is -0.1; it must be at least 0"),
    "adam beta2": (
        lambda: hfta.adam(betas=(0.9, [0.9, 1.5, 0.9])),
        "model 1: beta2 is 1.5; it must be at least 0 and below 1",
    ),
    "adam weight_decay": (lambda: hfta.adam(weight_decay=[NAN, 0.0, 0.0]), "model 0: weight_decay is nan; it must be"),
    "adamw beta1": (
        lambda: hfta.adamw(betas=([0.9, 0.9, -0.1], 0.9)),
        "model 2: beta1 is -0.1; it must be at least 0 and below 1",
    ),
    "clip_grad_norm": (
        lambda: hfta.optim.clip_grad_norm([1.0, 0.0, 1.0]),
        "model 1: max_norm is 0.0; it must be positive",
    ),
    "clip_grad_norm NaN": (lambda: hfta.optim.clip_grad_norm(NAN), "max_norm is nan; it must be positive"),
    "step_lr": (lambda: hfta.sgd(lr=schedules.step_lr(-0.1, 5)), "lr is -0.1; it must be at least 0"),
    "step_lr step_size": (
        lambda: hfta.sgd(lr=schedules.step_lr(0.1, [5, 0, 5])),
        "model 1: step_size is 0.0; it must be positive",
    ),
    "cosine T_max": (lambda: hfta.adam(lr=schedules.cosine(0.1, T_max=-5)), "T_max is -5.0; it must be positive"),
    "warmup": (lambda: hfta.sgd(lr=schedules.warmup(-0.1, 5)), "lr is -0.1; it must be at least 0"),
    "schedule in a schedule": (
        lambda: hfta.sgd(lr=schedules.warmup(schedules.cosine([0.1, -0.1, 0.1], 5), 5)),
        "model 1: lr is -0.1; it must be at least 0",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_hyperparameter_out_of_range(name):
    make, fragment = OUT_OF_RANGE[name]
    with refused(hfta.errors.HyperparameterError, fragment):
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


def test_hyperparameters_that_the_loss_does_not_take():
    step = hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd())
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(
        hfta.errors.HyperparameterError,
        "hparams ['smoothing'] would not be used",
        "give it a third argument",
        spared=stacked,
    ):
        step.init(*stacked, seeds=[2, 0, 1], hparams={"smoothing": 0.1})


@pytest.mark.parametrize(
    ("seeds", "fragments"),
    [
        ([1, 2], ["got 2 seeds but the array has 3 models", "one integer per model"]),
        (torch.tensor([1, 2]), ["got 2 seeds but the array has 3 models", "one integer per model"]),
        ([1, 2, "3"], ["model 2: seed '3' is not a 64-bit integer", "one int per model"]),
        ([1, 2, 2**63], [f"model 2: seed {2**63} is not a 64-bit integer", "one int per model"]),
    ],
)
def test_seeds(seeds, fragments):
    step = hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd())
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(hfta.errors.HyperparameterError, *fragments, spared=stacked):
        step.init(*stacked, seeds=seeds)


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


def test_batch_without_the_model_axis():
    step, state = linear_step()
    batch = torch.randn(8, 4)
    cure = ["give every model its own part [3, N, ...]", "batch_dims=None"]
    with refused(hfta.errors.BatchError, "batch is [8, 4] but the array has 3 models", *cure, spared=(state, batch)):
        step(state, batch)
    step, state = linear_step(lambda model, batch: square(model, batch["x"][0]))
    batch = {"x": (torch.randn(3, 8, 4), torch.randn(8, 4))}
    with refused(
        hfta.errors.BatchError, "batch['x'][1] is [8, 4] but the array has 3 models", *cure, spared=(state, batch)
    ):
        step(state, batch)
    batch = {"x": (torch.randn(3, 8, 4), torch.tensor(1.0))}
    with refused(
        hfta.errors.BatchError, "batch['x'][1] is [] but the array has 3 models", *cure, spared=(state, batch)
    ):
        step(state, batch)
    evaluate = hfta.make_eval_step(nn.Linear(4, 2), square, batch_dims=0)
    with refused(hfta.errors.BatchError, "batch is [8, 4] but the array has 3 models", *cure, spared=state):
        evaluate(state, torch.randn(8, 4))


def test_batch_leaf_that_is_no_tensor():
    step, state = linear_step(lambda model, batch: square(model, batch[0]))
    for value, name in ((0.5, "float"), (np.ones((3, 8)), "ndarray")):
        batch = [torch.randn(3, 8, 4), value]
        with refused(
            hfta.errors.BatchError, f"batch[1] is a {name}", "leaves of a batch must be tensors", spared=(state, batch)
        ):
            step(state, batch)


BAD_LOSS = {
    "vector": (lambda model, batch: model(batch).mean(1), ["has shape [8]", "reduce it to a scalar", ".mean()"]),
    "integer": (
        lambda model, batch: model(batch).argmax(),
        ["the loss does not depend on any parameter that requires grad"],
    ),
    "nothing": (lambda model, batch: None, ["the loss is a NoneType", "return a scalar tensor"]),
    "metrics that are a list": (
        lambda model, batch: (square(model, batch), [model(batch).mean()]),
        ["returned (Tensor, list)", "dict of metrics"],
    ),
    "metric with the name of the loss": (
        lambda model, batch: (square(model, batch), {"loss": model(batch).mean()}),
        ["metric 'loss' hides what the step reports", "none of loss, finite, failure, loss_scale"],
    ),
    "three results": (lambda model, batch: (square(model, batch), {}, {}), ["(loss, dict of metrics)"]),
}


@pytest.mark.parametrize("name", BAD_LOSS)
def test_loss(name):
    loss_fn, fragments = BAD_LOSS[name]
    step, state = linear_step(loss_fn)
    batch = torch.randn(3, 8, 4)
    with refused(hfta.errors.LossError, *fragments, spared=(state, batch)):
        step(state, batch)


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


@pytest.mark.parametrize("draw", [torch.poisson, torch._sample_dirichlet, lambda x: torch.empty_like(x).random_(3)])
def test_random_operator_that_is_not_routed(draw):
    step, state = linear_step(model=Noisy(draw))
    batch = torch.randn(3, 8, 4)
    before = torch.get_rng_state()
    fragments = "the model (Noisy)", "draws from PyTorch's global generator", "draw with torch.rand"
    with refused(hfta.errors.RandomnessError, *fragments, spared=(state, batch)):
        step(state, batch)
    assert torch.equal(torch.get_rng_state(), before)


SHARED_GENERATOR = torch.Generator()
WITH_GENERATOR = {
    "torch.rand": lambda x: torch.rand(2, generator=SHARED_GENERATOR),
    "torch.randint": lambda x: torch.randint(3, (2,), generator=SHARED_GENERATOR),
    "torch.normal": lambda x: torch.normal(x, 1.0, generator=SHARED_GENERATOR),
    "torch.Tensor.uniform_": lambda x: torch.empty_like(x).uniform_(generator=SHARED_GENERATOR),
    "torch.Tensor.bernoulli_": lambda x: torch.empty_like(x).bernoulli_(generator=SHARED_GENERATOR),
}


@pytest.mark.parametrize("name", WITH_GENERATOR)
def test_generator_of_the_users_own(name):
    step, state = linear_step(model=Noisy(WITH_GENERATOR[name]))
    batch = torch.randn(3, 8, 4)
    before = SHARED_GENERATOR.get_state()
    with refused(
        hfta.errors.RandomnessError, f"{name} got a generator", "leave it out", "own key", spared=(state, batch)
    ):
        step(state, batch)
    assert torch.equal(SHARED_GENERATOR.get_state(), before)


class Gate(nn.Module):
    """Asks for a value of its input, in the line after ``forward``."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Item(Gate):
    def forward(self, x):
        return x * self.scale * x.sum().item()


@contextlib.contextmanager
def apart(*texts):
    """A block in which members run one after another, with a warning that holds all ``texts``."""
    with pytest.warns(hfta.errors.LoopWarning, match="members run one after another") as caught:
        yield
    assert all(text in str(caught[0].message) for text in texts), str(caught[0].message)


ADVICE = ["compute with tensors instead", "torch.where", "return the value as a metric"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Item, "asks for the value of a tensor (.item()"),
    ],
)
def test_model_that_reads_a_value(kind, what):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), kind()))
    step, state = linear_step(model=model)
    batch = torch.randn(3, 8, 4)
    line = inspect.getsourcelines(kind.forward)[1] + 1
    where = f"module '1.1' ({kind.__name__}), forward ({__file__}:{line})"
    with apart(where, what, *ADVICE):
        step(state, batch)
    evaluate = hfta.make_eval_step(model, square)
    with apart(where, what, *ADVICE):
        evaluate(state, batch[0])


def line_of(name):
    """The number of the line of this file that ends in a comment with ``name``."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# at fault: {name}")]
    return number


class Nested(Gate):
    """Reads a value in a function inside of ``forward``, or in a method that it calls, or in a hook."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind
        if kind == "hook":
            self.linear.register_forward_pre_hook(positive)

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


def positive(module, args):
    (x,) = args
    return (x if x.sum().item() > 0 else -x,)  # at fault: hook


NESTED = {
    "helper": "module '1.0' (Nested), helper",
    "method": "module '1.0' (Nested), shrunk",
    "hook": "module '1.0.linear' (Linear), positive",
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("way", ["step", "checkpointed", "functional_call"])
@pytest.mark.parametrize("name", NESTED)
def test_the_line_below_a_module_that_reads_a_value(name, way):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Nested(name)))
    params = hfta.stack_params([model] * 3).params
    x, place = torch.randn(3, 8, 4), f"({__file__}:{line_of(name)})"
    if way in ("step", "checkpointed"):
        step, state = linear_step(model=model, checkpoint=way == "checkpointed")
        with apart(f"{NESTED[name]} {place}, asks for the value of a tensor", *ADVICE):
            step(state, x)
        return

    def call(params, x):
        return torch.func.functional_call(model, params, (x,))

    run = hfta.vmap(call)
    with refused(hfta.errors.TraceError, place, "value of a tensor", *ADVICE):
        run(params, x)


def test_a_module_where_a_factory_is_expected():
    with pytest.raises(hfta.errors.StackError, match=r"factory is a module \(Linear\); pass a function that makes one"):
        hfta.init_params(nn.Linear(2, 1), [0, 1])


def test_an_output_that_is_no_tensor():
    with pytest.raises(ValueError, match=r"must return tensors only, but one output is of type int$"):
        hfta.vmap(lambda x: (x, 1))(torch.zeros(2))


def test_other_errors_of_the_model_stay_what_they_are():
    def loss_fn(model, batch):
        raise RuntimeError("the user's own")

    step, state = linear_step(loss_fn)
    with pytest.raises(RuntimeError, match=r"^the user's own$"):
        step(state, torch.randn(3, 8, 4))


def test_state_of_another_model():
    step, state = linear_step()
    batch = torch.randn(3, 8, 4)
    cure = "the state and the step must be of the same model"
    _, wide = linear_step(model=nn.Linear(4, 3))
    with refused(
        hfta.errors.StateError, "'weight' is [3, 4] per member but [2, 4] in the model", cure, spared=(wide, batch)
    ):
        step(wide, batch)
    _, named = linear_step(model=nn.Sequential(nn.Linear(4, 2)))
    with refused(hfta.errors.StateError, "'weight' is in the model but not in the array", cure, spared=(named, batch)):
        step(named, batch)
    buffered = state._replace(buffers={"seen": torch.zeros(3)})
    with refused(hfta.errors.StateError, "'seen' is in the array but not in the model", cure, spared=(buffered, batch)):
        step(buffered, batch)
    with refused(hfta.errors.StateError, "'weight' is [3, 4] per member but [2, 4] in the model", cure, spared=wide):
        step.init(wide.params, wide.buffers, seeds=[2, 0, 1])
    with refused(hfta.errors.StateError, "'weight' is in the model but not in the array", cure, spared=named):
        step.init(named.params, named.buffers, seeds=[2, 0, 1])


def test_something_that_is_no_state():
    step, state = linear_step()
    stacked = hfta.models.Stacked(state.params, state.buffers)
    with refused(hfta.errors.StateError, "expected a TrainState but got Stacked", "step.init", spared=stacked):
        step(stacked, torch.randn(3, 8, 4))


def test_chunk_size():
    for size in (0, -1, True, 1.0):
        with pytest.raises(ValueError, match=f"chunk_size is {size}; it must be at least 1, 'auto', or None"):
            hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd(), chunk_size=size)


def _loss(model, batch):
    return model(batch).mean()


def _init(**options):
    step = hfta.make_train_step(Net(), _loss, hfta.sgd(lr=0.1))
    return step.init(**{**hfta.stack_params([Net(), Net()])._asdict(), "seeds": [0, 1], **options})


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
    "params that hold buffers too": (
        lambda: _init(params=hfta.stack_params([Net()])),
        "params is a Stacked; unpack what stack_params returns: step.init(*stacked, seeds=seeds)",
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


@pytest.mark.exhaustive
def test_modules_are_reached_from_one_import():
    code = "import hfta_func as hfta; print(hfta.plot.bands.__name__, hfta.testing.assert_matches_solo.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bands", "assert_matches_solo"]


def test_integers_of_numpy_are_seeds():
    assert hfta.random.keys(np.arange(3)).tolist() == [0, 1, 2]
