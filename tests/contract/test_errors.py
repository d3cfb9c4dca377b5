"""Bad input: each gets an error that names the member, the path, both values and the cure, and changes nothing."""

import contextlib
import functools
import inspect
import pathlib
import subprocess
import sys

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
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
    "class of a submodule": (
        Net,
        net_with(lambda net: net.body.__setitem__(2, nn.Dropout2d(0.5))),
        ["'body.2' is a Dropout2d", "in model 0 it is a Dropout;", "of one class"],
    ),
    "number of submodules": (
        Net,
        net_with(lambda net: net.body.append(nn.Tanh())),
        ["model 0 has no module 'body.4' but model 2 has one", "same modules, parameters and buffers"],
    ),
    "shape": (
        lambda: Scale(3),
        lambda: Scale(5),
        ["'weight' is [5] but model 0 has [3]", "models in one array must share every shape"],
    ),
    "shape that a setting gives": (
        lambda: nn.Sequential(nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3)),
        ["'0.out_features' is 3 but in model 0 it is 2", "share every setting"],
    ),
    "missing parameter": (
        Net,
        changed(bias=False),
        ["model 2 has no 'body.0.bias' but model 0 has one", "same modules, parameters and buffers"],
    ),
    "dtype": (
        Net,
        net_with(lambda net: net.double()),
        ["the dtype of 'body.0.weight' is torch.float64 but model 0 has torch.float32", "share every dtype"],
    ),
    "dtype of a buffer": (
        lambda: Scale(3),
        lambda: Scale(3, torch.float64),
        ["the dtype of 'seen' is torch.float64 but model 0 has torch.float32", "share every dtype"],
    ),
    "device": (
        Net,
        net_with(lambda net: net.to("meta")),
        ["the device of 'body.0.weight' is meta but model 0 has cpu", "share every device"],
    ),
    "mode": (
        Net,
        net_with(lambda net: net.body[1].eval()),
        ["'body.1' is in eval mode but in model 0 it is in train mode", "call .train() or .eval() on all of them"],
    ),
    "requires_grad": (
        Net,
        net_with(lambda net: net.body[3].requires_grad_(False)),
        ["the requires_grad of 'body.3.weight' is False but model 0 has True", "share every requires_grad"],
    ),
    "stride": (
        Net,
        changed(stride=2),
        ["'body.0.stride' is (2, 2) but in model 0 it is (1, 1)", "share every setting"],
    ),
    "function": (
        Net,
        changed(activation=torch.tanh),
        ["'activation' is tanh but in model 0 it is relu", "models in one array must share every setting"],
    ),
    "closure": (
        changed(activation=closure(0.5)),
        changed(activation=closure(0.25)),
        ["'activation.slope' is 0.25 but in model 0 it is 0.5", "share every setting"],
    ),
    "keyword default": (
        changed(activation=with_default(0.5)),
        changed(activation=with_default(0.25)),
        ["'activation.__kwdefaults__['by']' is 0.25 but in model 0 it is 0.5", "share every setting"],
    ),
    "partial": (
        changed(activation=functools.partial(F.leaky_relu, negative_slope=0.5)),
        changed(activation=functools.partial(F.leaky_relu, negative_slope=0.25)),
        ["'activation.keywords['negative_slope']' is 0.25 but in model 0 it is 0.5", "share every setting"],
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
    "plain tensor": (
        changed(constant=torch.ones(2)),
        changed(constant=torch.zeros(2)),
        ["([0., 0.]) but in model 0 it is ", "register it as a parameter or a buffer"],
    ),
    "plain tensor in a container": (
        changed(constant={"shift": [torch.ones(2), torch.zeros(2)]}),
        changed(constant={"shift": [torch.ones(2), torch.ones(2)]}),
        [
            "'constant['shift'][1]' is tensor([1., 1.]) but in model 0 it is tensor([0., 0.])",
            "register it as a parameter or a buffer",
        ],
    ),
    "module that is not registered": (
        changed(constant=[nn.Linear(1, 1)]),
        changed(constant=[nn.Linear(1, 1)]),
        ["'constant[0].weight' is ", " but in model 0 it is ", "modules in an nn.ModuleList"],
    ),
    "plain tensor of another dtype": (
        changed(constant=torch.ones(2)),
        changed(constant=torch.ones(2).double()),
        [
            "'constant' is tensor([1., 1.], dtype=torch.float64) but in model 0 it is tensor([1., 1.])",
            "every setting",
        ],
    ),
    "NumPy array": (
        changed(constant=np.ones(2)),
        changed(constant=np.zeros(2)),
        ["([0., 0.]) but in model 0 it is ", "share every setting"],
    ),
    "ties": (
        Net,
        net_with(tie),
        ["model 2 ties 'body.3.bias' to 'body.0.bias' but model 0 does not", "tie the same parameters in all models"],
    ),
    "ties of model 0": (
        net_with(tie),
        Net,
        ["model 0 ties 'body.3.bias' to 'body.0.bias' but model 2 does not", "tie the same parameters in all models"],
    ),
    "hooks": (
        Net,
        net_with(lambda net: net.body[2].register_forward_hook(lambda module, args, output: None)),
        ["'body.2._forward_hooks' is 1 but in model 0 it is 0", "share every setting"],
    ),
    "value in a hook": (
        net_with(lambda net: net.body[2].register_forward_hook(scaling(0.5))),
        net_with(lambda net: net.body[2].register_forward_hook(scaling(0.25))),
        ["'body.2._forward_hooks[0].by' is 0.25 but in model 0 it is 0.5", "share every setting"],
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


@pytest.mark.parametrize("name", DIFFERENT)
def test_factory_whose_models_differ(name):
    usual, other, fragments = DIFFERENT[name]
    makers = iter([usual, usual, other])
    with refused(hfta.errors.StackError, "model 2", *fragments):
        hfta.init_params(lambda: next(makers)(), seeds=[3, 1, 2])


@pytest.mark.parametrize(
    "make",
    [
        Net,
        changed(activation=closure(0.5)),
        changed(activation=with_default(0.5)),
        changed(constant=np.array([1.0, NAN])),
    ],
)
def test_models_that_only_look_different_stack(make):
    models = [make() for _ in range(3)]
    assert hfta.num_models(hfta.stack_params(models)) == 3


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


@pytest.mark.parametrize(
    "call",
    [
        hfta.functional,
        lambda model: hfta.make_train_step(model, square, hfta.sgd()),
        lambda model: hfta.make_eval_step(model, square),
        lambda model: hfta.unstack_params(model, *hfta.stack_params([nn.Linear(4, 2)])),
        lambda model: hfta.export_model(model, hfta.stack_params([nn.Linear(4, 2)]), 0),
    ],
)
def test_lazy_module_of_a_step(call):
    with refused(
        hfta.errors.StackError, "'weight' is lazy and has no shape yet", "run the model once on an example input first"
    ):
        call(nn.LazyLinear(2))


def test_unstacking_with_another_model():
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(hfta.errors.StackError, "'weight' is [2, 4] per member but [3, 4] in the model", spared=stacked):
        hfta.unstack_params(nn.Linear(4, 3), *stacked)
    with refused(
        hfta.errors.StackError, "'bias' is in the array but not in the model; pass the model that", spared=stacked
    ):
        hfta.unstack_params(nn.Linear(4, 2, bias=False), *stacked)
    with refused(
        hfta.errors.StackError, "'0.weight' is in the model but not in the array; pass the model", spared=stacked
    ):
        hfta.unstack_params(nn.Sequential(nn.Linear(4, 2)), *stacked)
    tied = Net()
    tie(tied)
    stacked = hfta.stack_params([Net()])
    with refused(
        hfta.errors.StackError, "'body.3.bias' is in the array but the model ties it to 'body.0.bias'; pass the model"
    ):
        hfta.unstack_params(tied, *stacked)


@pytest.mark.parametrize(
    ("index", "fragments"),
    [
        ([0, 3], ["member 3 does not exist", "members 0 to 2"]),
        (-4, ["member -4 does not exist", "members 0 to 2"]),
        ([], ["no member selected", "at least one"]),
        (None, ["index is None", "pass an integer, a list of integers"]),
        ("a", ["index is 'a'", "pass an integer, a list of integers"]),
        (slice(2, 2), ["no member selected", "at least one"]),
        (torch.zeros(3, dtype=torch.bool), ["no member selected", "at least one"]),
        (torch.tensor([True, False]), ["mask has shape [2]", "the array has 3 members", "pass [3]"]),
        ([[True, False, True]], ["mask has shape [1, 3]", "the array has 3 members", "pass [3]"]),
    ],
)
def test_selecting_members_that_are_not_there(index, fragments):
    stacked = hfta.stack_params([Net() for _ in range(3)])
    with refused(hfta.errors.StackError, *fragments, spared=stacked):
        hfta.take(stacked, index)


@pytest.mark.parametrize("index", [[0.7, 1.2], [[0, 1]]])
def test_selecting_by_something_that_is_no_list_of_members(index):
    stacked = hfta.stack_params([Net() for _ in range(3)])
    with refused(hfta.errors.StackError, spared=stacked):
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


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (hfta.sgd(), hfta.adam(), "array 1 has tree.opt_state.hyperparams['beta1'] but array 0 does not"),
        (hfta.adam(), hfta.sgd(), "array 0 has tree.opt_state.hyperparams['beta1'] but array 1 does not"),
        (
            hfta.sgd(lr=0.1),
            hfta.sgd(lr=schedules.step_lr(0.1, 5)),
            "array 1 has tree.opt_state.hyperparams['lr']['gamma'] but array 0 does not",
        ),
        (
            hfta.sgd(lr=schedules.step_lr(0.1, 5)),
            hfta.sgd(lr=0.1),
            "array 0 has tree.opt_state.hyperparams['lr']['gamma'] but array 1 does not",
        ),
    ],
)
def test_joining_states_of_different_optimizers(first, second, found):
    states = [linear_step(optimizer=optimizer)[1] for optimizer in (first, second)]
    cure = "join arrays of the same model, optimizer and step options"
    with refused(hfta.errors.StackError, f"{found}; {cure}", spared=states):
        hfta.concat(states)


def test_joining_containers_of_different_types():
    one = torch.zeros(2)
    with refused(hfta.errors.StackError, "tree[0] is a tuple in array 1 but a list in array 0"):
        hfta.concat([[[one]], [(one,)]])
    with refused(hfta.errors.StackError, "tree has other empty containers in array 1 than in array 0"):
        hfta.concat([[one, []], [one, ()]])


ONE = {"w": torch.zeros(3, 2)}

OUT_OF_RANGE = {
    "sgd lr": (lambda: hfta.sgd(lr=-0.1), "lr is -0.1; it must be at least 0"),
    "sgd lr of one member": (lambda: hfta.sgd(lr=[0.1, -0.1, 0.2]), "model 1: lr is -0.1; it must be at least 0"),
    "sgd lr NaN": (lambda: hfta.sgd(lr=[0.1, 0.2, NAN]), "model 2: lr is nan; it must be at least 0"),
    "sgd lr infinite": (lambda: hfta.sgd(lr=float("inf")), "lr is inf; it must be at least 0 and finite"),
    "sgd lr tensor": (
        lambda: hfta.sgd(lr=torch.tensor([-1.0, 1.0, 1.0])),
        "model 0: lr is -1.0; it must be at least 0",
    ),
    "sgd momentum": (lambda: hfta.sgd(momentum=[0.9, 0.9, -0.9]), "model 2: momentum is -0.9; it must be at least 0"),
    "sgd dampening": (lambda: hfta.sgd(momentum=0.9, dampening=NAN), "dampening is nan; it must be a finite number"),
    "sgd dampening infinite": (
        lambda: hfta.sgd(momentum=0.9, dampening=-float("inf")),
        "dampening is -inf; it must be a finite number",
    ),
    "sgd weight_decay": (
        lambda: hfta.sgd(weight_decay=[0.0, -0.01, 0.0]),
        "model 1: weight_decay is -0.01; it must be",
    ),
    "sgd matrix": (
        lambda: hfta.sgd(lr=[[0.1], [0.2], [0.3]]),
        "lr has shape [3, 1]; give one number, or one per model",
    ),
    "adam lr": (lambda: hfta.adam(lr=[0.1, -0.1, 0.1]), "model 1: lr is -0.1; it must be at least 0"),
    "adam beta1": (lambda: hfta.adam(betas=(1.0, 0.9)), "beta1 is 1.0; it must be at least 0 and below 1"),
    "adam beta2": (
        lambda: hfta.adam(betas=(0.9, [0.9, 1.5, 0.9])),
        "model 1: beta2 is 1.5; it must be at least 0 and below 1",
    ),
    "adam eps": (lambda: hfta.adam(eps=-1e-8), "eps is -1e-08; it must be at least 0"),
    "adam weight_decay": (lambda: hfta.adam(weight_decay=[NAN, 0.0, 0.0]), "model 0: weight_decay is nan; it must be"),
    "adamw lr": (lambda: hfta.adamw(lr=NAN), "lr is nan; it must be at least 0"),
    "adamw beta1": (
        lambda: hfta.adamw(betas=([0.9, 0.9, -0.1], 0.9)),
        "model 2: beta1 is -0.1; it must be at least 0 and below 1",
    ),
    "adamw weight_decay": (lambda: hfta.adamw(weight_decay=-1), "weight_decay is -1.0; it must be at least 0"),
    "clip_grad_norm": (
        lambda: hfta.optim.clip_grad_norm([1.0, 0.0, 1.0]),
        "model 1: max_norm is 0.0; it must be positive",
    ),
    "clip_grad_norm negative": (lambda: hfta.optim.clip_grad_norm(-1.0), "max_norm is -1.0; it must be positive"),
    "clip_grad_norm NaN": (lambda: hfta.optim.clip_grad_norm(NAN), "max_norm is nan; it must be positive"),
    "constant": (
        lambda: hfta.sgd(lr=schedules.constant([0.1, -0.1, 0.1])),
        "model 1: lr is -0.1; it must be at least 0",
    ),
    "step_lr": (lambda: hfta.sgd(lr=schedules.step_lr(-0.1, 5)), "lr is -0.1; it must be at least 0"),
    "step_lr gamma": (lambda: hfta.sgd(lr=schedules.step_lr(0.1, 5, NAN)), "gamma is nan; it must be a finite number"),
    "step_lr step_size": (
        lambda: hfta.sgd(lr=schedules.step_lr(0.1, [5, 0, 5])),
        "model 1: step_size is 0.0; it must be positive",
    ),
    "cosine": (lambda: hfta.adam(lr=schedules.cosine([0.1, 0.1, NAN], 5)), "model 2: lr is nan; it must be at least 0"),
    "cosine T_max": (lambda: hfta.adam(lr=schedules.cosine(0.1, T_max=-5)), "T_max is -5.0; it must be positive"),
    "cosine eta_min": (
        lambda: hfta.adam(lr=schedules.cosine(0.1, 5, [0.0, NAN, 0.0])),
        "model 1: eta_min is nan; it must be",
    ),
    "warmup": (lambda: hfta.sgd(lr=schedules.warmup(-0.1, 5)), "lr is -0.1; it must be at least 0"),
    "warmup steps": (
        lambda: hfta.sgd(lr=schedules.warmup(0.1, [0, 5, 5])),
        "model 0: steps is 0.0; it must be positive",
    ),
    "schedule in a schedule": (
        lambda: hfta.sgd(lr=schedules.warmup(schedules.cosine([0.1, -0.1, 0.1], 5), 5)),
        "model 1: lr is -0.1; it must be at least 0",
    ),
    "schedule of betas": (
        lambda: hfta.adam(betas=(schedules.constant(1.0), 0.9)),
        "beta1 is 1.0; it must be at least 0 and below 1",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_hyperparameter_out_of_range(name):
    make, fragment = OUT_OF_RANGE[name]
    with refused(hfta.errors.HyperparameterError, fragment):
        make()


WRONG_LENGTH = {
    "sgd": (lambda: hfta.sgd(lr=[0.1, 0.2]), "lr has 2 values"),
    "sgd momentum": (lambda: hfta.sgd(momentum=[0.1] * 4), "momentum has 4 values"),
    "adam": (lambda: hfta.adam(betas=(0.9, [0.99, 0.999])), "beta2 has 2 values"),
    "adamw": (lambda: hfta.adamw(weight_decay=torch.zeros(2)), "weight_decay has 2 values"),
    "no values": (lambda: hfta.sgd(lr=[]), "lr has 0 values"),
    "clip_grad_norm": (lambda: hfta.optim.clip_grad_norm([1.0]), "max_norm has 1 values"),
    "chain": (lambda: hfta.chain(hfta.optim.clip_grad_norm(1.0), hfta.adam(lr=[1.0] * 4)), "lr has 4 values"),
    "schedule": (lambda: hfta.sgd(lr=schedules.cosine([0.1, 0.2], 5)), "lr has 2 values"),
    "hyperparameter of a schedule": (lambda: hfta.sgd(lr=schedules.step_lr(0.1, [5, 6])), "step_size has 2 values"),
    "schedule in a schedule": (
        lambda: hfta.sgd(lr=schedules.warmup(schedules.cosine(0.1, [5, 6]), 5)),
        "T_max has 2 values",
    ),
}


@pytest.mark.parametrize("name", WRONG_LENGTH)
def test_hyperparameters_for_another_number_of_models(name):
    make, fragment = WRONG_LENGTH[name]
    cure = ["the array has 3 models", "give one number, or one per model"]
    with refused(hfta.errors.HyperparameterError, fragment, *cure, spared=ONE):
        make().init(ONE)
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(hfta.errors.HyperparameterError, fragment, *cure, spared=stacked):
        hfta.make_train_step(nn.Linear(4, 2), square, make()).init(*stacked, seeds=[2, 0, 1])


@pytest.mark.parametrize(
    ("new", "fragments"),
    [
        ({"lr": -0.1}, ["lr is -0.1; it must be at least 0"]),
        ({"lr": [0.1, NAN, 0.1]}, ["model 1: lr is nan; it must be at least 0"]),
        ({"lr": [0.1, 0.2]}, ["lr has 2 values but the array has 3 models", "one per model"]),
        ({"beta1": 1.0}, ["beta1 is 1.0; it must be at least 0 and below 1"]),
        ({"max_norm": [1.0, 1.0, 0.0]}, ["model 2: max_norm is 0.0; it must be positive"]),
        ({"momentum": 0.9}, ["unknown hyperparameter 'momentum'", "beta1, beta2, eps, lr, max_norm"]),
        ({"weight_decay": 0.1}, ["unknown hyperparameter 'weight_decay'", "plain number 0", "one number per model"]),
        ({"lr": 0.2, "betas": (0.8, 0.9)}, ["unknown hyperparameter 'betas'", "beta1, beta2"]),
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
    ("new", "fragments"),
    [
        (-0.1, ["lr is -0.1; it must be at least 0"]),
        ([0.1, 0.2], ["lr has 2 values but the array has 3 models"]),
        ({"value": [0.1, 0.1, -0.1]}, ["model 2: lr is -0.1; it must be at least 0"]),
        ({"gamma": NAN}, ["gamma is nan; it must be a finite number"]),
        ({"T_max": 5}, ["unknown hyperparameter 'T_max' of the schedule of lr", "value, step_size, gamma"]),
    ],
)
def test_replacing_hyperparameters_of_a_schedule(new, fragments):
    state = hfta.sgd(lr=schedules.step_lr([0.1, 0.2, 0.3], 5)).init(ONE)
    with refused(hfta.errors.HyperparameterError, *fragments, spared=state):
        hfta.with_hyperparams(state, lr=new)


@pytest.mark.parametrize(
    ("hparams", "fragments"),
    [
        ({"smoothing": [0.1, 0.2]}, ["smoothing has 2 values but the array has 3 models", "one per model"]),
        ({"smoothing": [0.1, 0.2, NAN]}, ["model 2: smoothing is nan; it must be a finite number"]),
        # Names of the optimizer's mean nothing here.
        ({"weight_decay": [0.1, -float("inf"), 0.1]}, ["model 1: weight_decay is -inf; it must be a finite number"]),
    ],
)
def test_hyperparameters_of_the_loss(hparams, fragments):
    step = hfta.make_train_step(nn.Linear(4, 2), lambda model, batch, hparams: square(model, batch), hfta.sgd())
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(hfta.errors.HyperparameterError, *fragments, spared=stacked):
        step.init(*stacked, seeds=[2, 0, 1], hparams=hparams)


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
        ([1, 2, 3, 4], ["got 4 seeds but the array has 3 models", "one integer per model"]),
        (torch.tensor([1, 2]), ["got 2 seeds but the array has 3 models", "one integer per model"]),
        ([1, 2.0, 3], ["model 1: seed 2.0 is not a 64-bit integer", "one int per model"]),
        ([1, 2, "3"], ["model 2: seed '3' is not a 64-bit integer", "one int per model"]),
        ([True, 2, 3], ["model 0: seed True is not a 64-bit integer", "one int per model"]),
        ([1, 2, 2**63], [f"model 2: seed {2**63} is not a 64-bit integer", "one int per model"]),
        (torch.tensor([1.0, 2.0, 3.0]), ["seeds are torch.float32; seeds must be integers"]),
    ],
)
def test_seeds(seeds, fragments):
    step = hfta.make_train_step(nn.Linear(4, 2), square, hfta.sgd())
    stacked = hfta.stack_params([nn.Linear(4, 2) for _ in range(3)])
    with refused(hfta.errors.HyperparameterError, *fragments, spared=stacked):
        step.init(*stacked, seeds=seeds)


@pytest.mark.parametrize("seeds", [[0, 1.5], torch.tensor([0.0, 1.0])])
def test_seeds_of_new_models(seeds):
    before = torch.get_rng_state()
    with refused(hfta.errors.HyperparameterError, "integer"):
        hfta.init_params(Net, seeds)
    assert torch.equal(torch.get_rng_state(), before)


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


def test_batch_of_another_structure_than_batch_dims():
    step, state = linear_step(lambda model, batch: square(model, batch[0]), batch_dims=(0, None))
    batch = (torch.randn(3, 8, 4), torch.randn(8), torch.randn(8))
    with refused(
        hfta.errors.BatchError, "batch has 3 parts but batch_dims has 2", "one entry per part", spared=(state, batch)
    ):
        step(state, batch)
    step, state = linear_step(lambda model, batch: square(model, batch["x"]), batch_dims={"x": 0})
    batch = {"x": torch.randn(3, 8, 4), "weight": torch.randn(3, 8)}
    with refused(hfta.errors.BatchError, "'weight'", "batch_dims", spared=(state, batch)):
        step(state, batch)


BAD_LOSS = {
    "vector": (lambda model, batch: model(batch).mean(1), ["has shape [8]", "reduce it to a scalar", ".mean()"]),
    "one element": (lambda model, batch: model(batch).mean().reshape(1), ["has shape [1]", "reduce it to a scalar"]),
    "integer": (lambda model, batch: model(batch).argmax(), ["the loss is torch.int64", "floating point"]),
    "float": (lambda model, batch: 0.5, ["the loss is a float", "return a scalar tensor"]),
    "nothing": (lambda model, batch: None, ["the loss is a NoneType", "return a scalar tensor"]),
    "metrics that are a tensor": (
        lambda model, batch: (square(model, batch), model(batch).mean()),
        ["returned (loss, Tensor)", "metrics must be a dict"],
    ),
    "metrics that are a list": (
        lambda model, batch: (square(model, batch), [model(batch).mean()]),
        ["returned (loss, list)", "metrics must be a dict"],
    ),
    "metric that is a float": (
        lambda model, batch: (square(model, batch), {"accuracy": 0.5}),
        ["metric 'accuracy' is a float", "metrics must be tensors"],
    ),
    "metric with the name of the loss": (
        lambda model, batch: (square(model, batch), {"loss": model(batch).mean()}),
        ["metric 'loss' hides what the step reports", "none of loss, finite, failure, loss_scale"],
    ),
    "independent of the parameters": (
        lambda model, batch: batch.mean(),
        ["does not depend on any parameter that requires grad", "return what model(...) computed"],
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


UNROUTED = {
    "torch.poisson": (torch.poisson, "outside the model and pass them in the batch"),
    "torch.binomial": (lambda x: torch.binomial(x, x.sigmoid()), "sum draws of torch.bernoulli"),
    "torch.Tensor.random_": (lambda x: torch.empty_like(x).random_(3), "draw with torch.randint"),
    "torch._standard_gamma": (torch._standard_gamma, "outside the model and pass them in the batch"),
    "torch._sample_dirichlet": (torch._sample_dirichlet, "outside the model and pass them in the batch"),
}


@pytest.mark.parametrize("name", UNROUTED)
def test_random_operator_that_is_not_routed(name):
    draw, cure = UNROUTED[name]
    step, state = linear_step(model=Noisy(draw))
    batch = torch.randn(3, 8, 4)
    before = torch.get_rng_state()
    with refused(
        hfta.errors.RandomnessError, f"{name} draws from PyTorch's global generator", cure, spared=(state, batch)
    ):
        step(state, batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "draw", [lambda x: torch.ops.aten.rand([1]), lambda x: nn.init.normal_(torch.empty_like(x))], ids=["aten", "init"]
)
def test_random_operator_that_the_mode_does_not_see(draw):
    step, state = linear_step(model=Noisy(draw))
    batch = torch.randn(3, 8, 4)
    before = torch.get_rng_state()
    with refused(hfta.errors.RandomnessError, __file__, "global generator", "torch.rand", spared=(state, batch)):
        step(state, batch)
    assert torch.equal(torch.get_rng_state(), before)


SHARED_GENERATOR = torch.Generator()
WITH_GENERATOR = {
    "torch.rand": lambda x: torch.rand(2, generator=SHARED_GENERATOR),
    "torch.randn": lambda x: torch.randn(2, generator=SHARED_GENERATOR),
    "torch.randint": lambda x: torch.randint(3, (2,), generator=SHARED_GENERATOR),
    "torch.randperm": lambda x: torch.randperm(2, generator=SHARED_GENERATOR),
    "torch.normal": lambda x: torch.normal(x, 1.0, generator=SHARED_GENERATOR),
    "torch.bernoulli": lambda x: torch.bernoulli(x.sigmoid(), generator=SHARED_GENERATOR),
    "torch.Tensor.uniform_": lambda x: torch.empty_like(x).uniform_(generator=SHARED_GENERATOR),
    "torch.Tensor.normal_": lambda x: torch.empty_like(x).normal_(generator=SHARED_GENERATOR),
    "torch.Tensor.bernoulli_": lambda x: torch.empty_like(x).bernoulli_(generator=SHARED_GENERATOR),
    "torch.Tensor.exponential_": lambda x: torch.empty_like(x).exponential_(generator=SHARED_GENERATOR),
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


class Float(Gate):
    # Without detach PyTorch warns, of members that run one after another as of one alone.
    def forward(self, x):
        return x * self.scale * float(x.detach().sum())


class Int(Gate):
    def forward(self, x):
        return x * self.scale * int(x.sum())


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
        (Float, "asks for the value of a tensor (.item()"),
        (Int, "asks for the value of a tensor (.item()"),
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


def test_loss_that_reads_a_value():
    def loss_fn(model, batch):
        return model(batch).mean() * int(batch.sum())

    step, state = linear_step(loss_fn)
    batch = torch.randn(3, 8, 4)
    line = inspect.getsourcelines(loss_fn)[1] + 1
    with apart(f"loss_fn ({__file__}:{line}) asks for", *ADVICE):
        step(state, batch)


def line_of(name):
    """The number of the line of this file that ends in a comment with ``name``."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# at fault: {name}")]
    return number


def logged(func):
    @functools.wraps(func)
    def inner(*args):
        return func(*args)

    return inner


@logged
@logged
def decorated(model, batch):
    y = model(batch)
    if y.sum().item() > 0:  # at fault: decorated
        return y.mean()
    return y.sum()


def spread_over_lines(model, batch):
    return torch.where(
        batch[:, :2] > 0,
        model(batch),
        float(batch.sum()),  # at fault: spread over lines
    ).mean()


def of_a_generator(model, batch):
    y = model(batch)
    return sum(float(row.detach().sum()) for row in y.unbind()) + y.mean()  # at fault: of a generator


LOSSES = {
    "lambda": (
        "<lambda>",
        lambda model, batch: (
            model(batch).mean()
            if batch.sum().item() > 0  # at fault: lambda
            else model(batch).sum()
        ),
    ),
    "decorated": ("decorated", decorated),
    "spread over lines": ("spread_over_lines", spread_over_lines),
    "of a generator": ("<genexpr>", of_a_generator),
    "numpy": ("<lambda>", lambda model, x: model(x).mean() * x.detach().numpy().sum()),  # at fault: numpy
    "tolist": ("<lambda>", lambda model, x: model(x).mean() * x.sum(1).tolist()[0]),  # at fault: tolist
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_line_of_a_loss_that_reads_a_value(name):
    where, loss_fn = LOSSES[name]
    step, state = linear_step(loss_fn)
    batch = torch.randn(3, 8, 4)
    with apart(f"{where} ({__file__}:{line_of(name)})", *ADVICE):
        step(state, batch)


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
@pytest.mark.parametrize("way", ["step", "checkpointed", "one vmap inside another", "functional_call", "compiled"])
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
    if way == "one vmap inside another":
        run = hfta.vmap(lambda params, x: hfta.vmap(call, (None, 0))(params, x))
    if way == "compiled":
        torch._dynamo.reset()
        # The compiler itself names the line.
        errors = torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError
        with pytest.raises(errors, match=f'File "{__file__}", line {line_of(name)}, in'):
            torch.compile(run, fullgraph=True, backend="eager")(params, x)
        return
    with refused(hfta.errors.TraceError, place, "value of a tensor", *ADVICE):
        run(params, x)


def test_an_inner_vmap_names_the_line():
    def inner(row):
        return row * row.sum().item()  # at fault: inner vmap

    with refused(hfta.errors.TraceError, f"inner ({__file__}:{line_of('inner vmap')}) asks for the value"):
        hfta.vmap(lambda rows: hfta.vmap(inner)(rows))(torch.randn(3, 2, 4))


def test_a_backward_pass_that_reads_a_value():
    class Doubled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 if grad.sum() > 0 else grad  # at fault: backward

    gradient = torch.func.grad(lambda x: Doubled.apply(x).sum())
    with refused(hfta.errors.TraceError, f"backward ({__file__}:{line_of('backward')})", *ADVICE):
        hfta.vmap(gradient)(torch.randn(3, 4))


def drawn(model, batch):
    chosen = torch.poisson(model(batch).abs())  # at fault: drawn
    return chosen.sum()


def generated(model, batch):
    noise = torch.rand(4, generator=SHARED_GENERATOR)  # at fault: generated
    return (model(batch) * noise).mean()


@pytest.mark.parametrize(
    ("loss_fn", "error", "what"),
    [
        (drawn, hfta.errors.RandomnessError, "torch.poisson draws from PyTorch's global generator"),
        (generated, hfta.errors.RandomnessError, "torch.rand got a generator"),
    ],
)
# bincount has no rule and runs member by member before it is refused.
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
def test_the_line_that_cannot_run_as_an_array(loss_fn, error, what):
    step, state = linear_step(loss_fn, model=nn.Linear(4, 4))
    place = f"{loss_fn.__name__} ({__file__}:{line_of(loss_fn.__name__)})"
    with refused(error, place, what, spared=state):
        step(state, torch.randn(3, 8, 4))


@pytest.mark.filterwarnings("ignore:hfta_func_test..doubled. an autograd kernel was not registered")
def test_an_operator_of_another_library_without_a_rule():
    library = torch.library.Library("hfta_func_test", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x + x, "CompositeExplicitAutograd")

    def loss_fn(model, batch):
        return torch.ops.hfta_func_test.doubled(model(batch)).mean()

    step, state = linear_step(loss_fn, model=nn.Linear(4, 4))
    plain, _ = linear_step(lambda model, batch: 2 * model(batch).mean(), model=nn.Linear(4, 4))
    batch = torch.randn(3, 8, 4)
    with pytest.warns(
        hfta.errors.LoopWarning, match="hfta_func_test::doubled has no batching rule and runs one member after"
    ):
        _, found = step(state, batch)
    torch.testing.assert_close(found["loss"], plain(state, batch)[1]["loss"])


def test_a_module_where_a_factory_is_expected():
    with pytest.raises(hfta.errors.StackError, match=r"factory is a module \(Linear\); pass a function that makes one"):
        hfta.init_params(nn.Linear(2, 1), [0, 1])


def test_parameters_where_stacked_ones_or_a_state_are_expected():
    stacked = hfta.init_params(lambda: nn.Linear(4, 4), [0, 1, 2])
    step, _ = linear_step(lambda model, batch: model(batch).mean(), model=nn.Linear(4, 4))
    with pytest.raises(
        hfta.errors.StateError, match=r"params is a Stacked; unpack .*: step.init\(\*stacked, seeds=seeds\)"
    ):
        step.init(stacked, seeds=[0, 1, 2])
    evaluate = hfta.make_eval_step(nn.Linear(4, 4), lambda model, batch: model(batch).mean())
    with pytest.raises(hfta.errors.StateError, match=r"expected a TrainState or Stacked but got dict; make one with"):
        evaluate(stacked.params, torch.randn(8, 4))


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


class Grows(nn.Module):
    """A table that the first call makes as large as its input, as ConViT of timm does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        if len(self.table) != len(x):
            self.table = torch.arange(len(x)).to(x)
        return self.layer(x) + self.table[:, None]


def test_a_buffer_that_the_first_call_resizes():
    batch = torch.randn(3, 8, 4)
    step, state = linear_step(model=Grows())
    state, _ = step(state, batch)
    cure = "call every model once before stacking"
    with refused(hfta.errors.StateError, "'table' is [8] per member but [1] in the model", cure, spared=(state, batch)):
        step(state, batch)
    model = Grows()
    model(batch[0])
    step, state = linear_step(model=model)
    for _ in range(2):
        state, _ = step(state, batch)


def test_evaluating_the_state_of_another_model():
    evaluate = hfta.make_eval_step(nn.Linear(4, 2), square)
    batch = torch.randn(8, 4)
    for model, path in (
        (nn.Linear(4, 3), "'weight'"),
        (nn.Sequential(nn.Linear(4, 2)), "'weight'"),
        (nn.Linear(4, 2, bias=False), "'bias'"),
    ):
        _, state = linear_step(model=model)
        with refused(hfta.errors.StateError, path, "in the model", spared=(state, batch)):
            evaluate(state, batch)


def test_state_of_another_optimizer():
    step, _ = linear_step()
    batch = torch.randn(3, 8, 4)
    for optimizer, held in (
        (hfta.adam(lr=0.1), ".hyperparams['beta1']"),
        (hfta.sgd(lr=0.1, momentum=0.9), ".hyperparams['momentum']"),
        (hfta.sgd(lr=schedules.step_lr(0.1, 5)), ".hyperparams['lr']['gamma']"),
        (hfta.chain(hfta.optim.clip_grad_norm(1.0), hfta.sgd(lr=0.1)), "[0].step"),
    ):
        _, other = linear_step(optimizer=optimizer)
        fragments = ["belongs to another optimizer", f"the state has state.opt_state{held} but", "step.init"]
        with refused(hfta.errors.StateError, *fragments, spared=(other, batch)):
            step(other, batch)


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
    "evaluating a factory": (lambda: hfta.make_eval_step(Net, _loss), "Net is not a torch.nn.Module"),
    "a factory made functional": (lambda: hfta.functional(Net), "Net is not a torch.nn.Module"),
    "a factory to import into": (lambda: hfta.files.import_models(Net, [{}]), "Net is not a torch.nn.Module"),
    "a model for a factory": (lambda: hfta.init_params(Net(), [0]), "factory is a module (Net); pass a function"),
    "an optimizer that was not called": (
        lambda: hfta.make_train_step(Net(), _loss, hfta.sgd),
        "optimizer is sgd, not a GradientTransformation; call one of hfta_func, e.g. hfta.sgd(lr=0.1)",
    ),
    "an optimizer of PyTorch": (
        lambda: hfta.make_train_step(Net(), _loss, torch.optim.SGD(Net().parameters())),
        "optimizer is SGD, not a GradientTransformation",
    ),
    "a list for a chain": (lambda: hfta.chain([hfta.sgd(lr=0.1)]), "part 0 of the chain is list"),
    "accumulating for none": (lambda: hfta.accumulate(hfta.sgd, 2), "accumulate's optimizer is sgd"),
    "a group without optimizer": (lambda: hfta.partition({"": "a"}, {"a": hfta.sgd}), "group 'a' is sgd"),
    "params that hold buffers too": (
        lambda: _init(params=hfta.stack_params([Net()])),
        "params is a Stacked; unpack what stack_params returns: step.init(*stacked, seeds=seeds)",
    ),
    "one seed": (lambda: _init(seeds=3), "seeds is 3; pass a list with one integer per model"),
    "words for a number": (lambda: hfta.sgd(lr="0.1"), "lr is '0.1'; give one number, or one per model"),
    "None among numbers": (lambda: hfta.sgd(lr=[0.1, None]), "lr is [0.1, None]; give one number, or one per model"),
    "words for a loss scale": (lambda: hfta.step.LossScale("auto"), "init_scale is 'auto'; give one number"),
    "a schedule in the state": (
        lambda: hfta.with_hyperparams(_init(), lr=schedules.constant(0.1)),
        "lr is a schedule, which goes into an optimizer when it is made; here give one number, or one per model",
    ),
    "a model for a tree": (lambda: hfta.num_models(Net()), "tree is a Net; every leaf must be a tensor [M, ...]"),
    "a data set for data": (
        lambda: hfta.ArrayLoader(torch.utils.data.TensorDataset(torch.zeros(3, 2)), 1, seeds=[0]),
        "pass tensors with one row per sample, such as (inputs, targets), or make a DatasetLoader of a data set",
    ),
    "part of a row": (
        lambda: hfta.ArrayLoader(torch.zeros(3), 1.5, seeds=[0]),
        "batch_size is 1.5; it must be at least 1, and an integer",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_something_else_than_what_is_asked_for(name):
    call, message = MISUSES[name]
    with pytest.raises((hfta.HFTAError, TypeError)) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("checkpoint", value) for value in (None, 5, ["0", 1])),
        *((name, value) for name in ("donate", "stochastic_rounding") for value in ("no", None, 1)),
        *(("batch_dims", value) for value in (0.0, False, torch.tensor(0))),
    ],
)
def test_option_of_another_type(option, value):
    with pytest.raises(ValueError, match=rf"^{option} (is|has) .*; it must be "):
        hfta.make_train_step(Net(), _loss, hfta.sgd(lr=0.1), **{option: value})


@pytest.mark.exhaustive
def test_modules_are_reached_from_one_import():
    code = "import hfta_func as hfta; print(hfta.plot.bands.__name__, hfta.testing.assert_matches_solo.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bands", "assert_matches_solo"]


def test_integers_of_numpy_are_seeds():
    assert hfta.random.keys(np.arange(3)).tolist() == [0, 1, 2]
