"""Optimizers and schedulers of ``torch.optim`` go on as an array, and back, as in a loop that never leaves PyTorch."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hfta_func as hfta
from cases import MATRIX_OPTIMIZERS, OPTIMIZERS, OptimizerCase, theirs
from member_runs import mse
from ways import train_solo

pytestmark = pytest.mark.usefixtures("double")
M = 3
CASES = [case for case in OPTIMIZERS if getattr(torch.optim, case.theirs.__name__, None) is case.theirs]
CASES += [
    case._replace(name=f"{case.name}, maximized", options={**case.options, "maximize": True}) for case in CASES[:3]
]
CASES.append(
    MATRIX_OPTIMIZERS[0]._replace(
        theirs=torch.optim.Muon, options={"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}
    )
)


class Tree(nn.Module):
    """Parameters of some shapes, of which one is tied and one has a path like the beginning of another's."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.again = next(self.parameters())


def _models(shapes: dict[str, tuple[int, ...]]) -> list[Tree]:
    return [Tree(shapes) for _ in range(M)]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, generator: torch.Generator) -> None:
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator) if param.requires_grad else None
        optimizer.step()


def _train_array(
    optimizer: hfta.GradientTransformation, state: Any, params: Any, steps: int, generators: list[torch.Generator]
) -> tuple[Any, Any]:
    for _ in range(steps):
        drawn = {path: [torch.randn(leaf.shape[1:], generator=g) for g in generators] for path, leaf in params.items()}
        updates, state = optimizer.update({path: torch.stack(row) for path, row in drawn.items()}, state, params)
        params = hfta.apply_updates(params, updates)
    return state, params


def _copies(generators: list[torch.Generator]) -> list[torch.Generator]:
    return [torch.Generator().set_state(generator.get_state()) for generator in generators]


def _generators(seed: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(M)]


def _assert_same(models: list[Any], others: list[Any], tolerance: float = 1e-12) -> None:
    for pair in zip(models, others, strict=True):
        found, expected = (dict(model.named_parameters()) for model in pair)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.exhaustive(ids="-0$|muon")
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_optimizers_go_on_as_an_array_and_back(case: OptimizerCase, before: int) -> None:
    models = _models(case.shapes)
    optimizers = [theirs(case, i, model.parameters()) for i, model in enumerate(models)]
    generators = _generators(1)
    # Members have made different numbers of updates.
    for i, member in enumerate(zip(models, optimizers, strict=True)):
        _train(*member, before and before + i, generators[i])
    optimizer = pickle.loads(pickle.dumps(hfta.from_torch(optimizers, models=models)))
    params, buffers = hfta.stack_params(models)
    state = optimizer.init(params)
    copies = _copies(generators)
    for i, member in enumerate(zip(models, optimizers, strict=True)):
        _train(*member, 3, generators[i])
    state, params = _train_array(optimizer, state, params, 3, copies)
    back = hfta.unstack_params(models[0], params, buffers)
    # Products in bfloat16 add up in another order.
    tolerance = 2e-2 if case.ours is hfta.muon else 1e-12
    _assert_same(back, models, tolerance)
    returned = hfta.to_torch(optimizer, state, back)
    assert {type(each) for each in returned} == {case.theirs}
    for i in range(M):
        given, got = ({**each.param_groups[0], "params": ()} for each in (optimizers[i], returned[i]))
        assert given == got
        for param, copied in zip(models[i].parameters(), back[i].parameters(), strict=True):
            entry, expected = returned[i].state.get(copied, {}), optimizers[i].state.get(param, {})
            for name, value in expected.items():
                torch.testing.assert_close(entry[name], value, rtol=1e-12, atol=1e-12)
            # A member without momentum has buffers beside those that have some.
            assert entry.keys() - expected.keys() <= {"momentum_buffer"}
        _train(models[i], optimizers[i], 2, generators[i])
        _train(back[i], returned[i], 2, copies[i])
    _assert_same(back, models, tolerance)


def _onecycle(optimizer: Any, i: int, **options: Any) -> Any:
    return lr_scheduler.OneCycleLR(
        *(optimizer, [0.1, 0.02, 0.3][i]),
        total_steps=40,
        pct_start=[0.3, 0.5, 0.1][i],
        base_momentum=0.2 + i / 10,
        **options,
    )


class HalvesDecay(lr_scheduler.LRScheduler):
    """One of a user's own, which changes another number."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        return [group["lr"] * 1.01 for group in self.optimizer.param_groups]


def _rise(optimizer: Any, i: int) -> Any:
    return lr_scheduler.LinearLR(optimizer, 0.1 + i / 10, total_iters=4 + i)


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "StepLR": lambda o, i: lr_scheduler.StepLR(o, 2 + i, 0.5 + i / 10),
    "MultiStepLR": lambda o, i: lr_scheduler.MultiStepLR(o, [2, 4 + i, 4 + i], 0.5 + i / 10),
    "ConstantLR": lambda o, i: lr_scheduler.ConstantLR(o, 0.2 + i / 10, total_iters=3 + i),
    "LinearLR": _rise,
    "ExponentialLR": lambda o, i: lr_scheduler.ExponentialLR(o, 0.9 + i / 20),
    "PolynomialLR": lambda o, i: lr_scheduler.PolynomialLR(o, 6 + i, 1.0 + i),
    "CosineAnnealingLR": lambda o, i: lr_scheduler.CosineAnnealingLR(o, 4 + i, 0.01 * i),
    "CosineAnnealingWarmRestarts": lambda o, i: lr_scheduler.CosineAnnealingWarmRestarts(o, 2 + i, 2),
    "OneCycleLR": _onecycle,
    "OneCycleLR, three phases": lambda o, i: _onecycle(o, i, three_phase=True, anneal_strategy="linear"),
    "CyclicLR": lambda o, i: lr_scheduler.CyclicLR(o, 0.0, 0.1 + i / 10, 2 + i, mode="triangular2", max_momentum=0.8),
    "CyclicLR, scaled": lambda o, i: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.9 ** (x + i)),
    "LambdaLR": lambda o, i: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, epoch / (3 + i))),
    "LambdaLR of groups": lambda o, i: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n + i)]),
    "MultiplicativeLR": lambda o, i: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8 + i / 10),
    "SequentialLR": lambda o, i: lr_scheduler.SequentialLR(
        o, [_rise(o, i), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[4 + i]
    ),
    "ChainedScheduler": lambda o, i: lr_scheduler.ChainedScheduler(
        [_rise(o, i), lr_scheduler.ExponentialLR(o, 0.9 + i / 20), lr_scheduler.CosineAnnealingLR(o, 9, 0.01)]
    ),
    "SWALR": lambda o, i: torch.optim.swa_utils.SWALR(o, swa_lr=0.01 + i / 100, anneal_epochs=4),
    "of a user": lambda o, i: HalvesDecay(o),
}
KINDS = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adam": (torch.optim.AdamW, {"betas": (0.8, 0.99)})}


@pytest.mark.sampled(every=3)
@pytest.mark.exhaustive(unless="sgd-3-2|OneCycleLR-adam")
@pytest.mark.parametrize(("kind", "before", "every"), [("sgd", 0, 1), ("sgd", 3, 2), ("adam", 2, 1)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_an_array(name: str, kind: str, before: int, every: int) -> None:
    """From their start to the end and midway, once per batch and per epoch; a number of the second group is a tensor."""
    make, options = KINDS[kind]
    models, generators = _models({"first": (3, 2), "second": (4,)}), _generators(2)
    groups = [
        [{"params": [m.first], "lr": 0.1 + i}, {"params": [m.second], "lr": torch.tensor(0.02)}]
        for i, m in enumerate(models)
    ]
    optimizers = [make(two, **options, weight_decay=0.01) for two in groups]
    schedulers = [SCHEDULERS[name](optimizer, i) for i, optimizer in enumerate(optimizers)]

    def epochs(models: Any, optimizers: Any, schedulers: Any, generators: Any, count: int) -> None:
        for model, optimizer, scheduler, generator in zip(models, optimizers, schedulers, generators, strict=True):
            for _ in range(count):
                _train(model, optimizer, every, generator)
                scheduler.step()

    epochs(models, optimizers, schedulers, generators, before)
    kept = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    ahead = {"steps": 7 + before, "every": every}
    optimizer = pickle.loads(pickle.dumps(hfta.from_torch(optimizers, schedulers, models=models, **ahead)))
    # Nothing that was passed in has changed.
    assert str(kept) == str([each.state_dict() for each in optimizers])
    params, buffers = hfta.stack_params(models)
    copies = _copies(generators)
    epochs(models, optimizers, schedulers, generators, 7)
    state, params = _train_array(optimizer, optimizer.init(params), params, 7 * every, copies)
    back = hfta.unstack_params(models[0], params, buffers)
    _assert_same(back, models)
    for other, trained in zip(hfta.to_torch(optimizer, state, back), optimizers, strict=True):
        for group, expected in zip(other.param_groups, trained.param_groups, strict=True):
            assert float(group["lr"]) == pytest.approx(float(expected["lr"]), rel=1e-12)


def _make() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[3].weight = model[2].weight
    model[4].bias.requires_grad_(False)
    return model


def _groups(model: Any) -> list[dict[str, Any]]:
    """Without the first bias; with a tied and a frozen parameter, and a group of frozen ones alone."""
    first = {"params": [model[0].weight, *model[3].parameters()], "weight_decay": 0.1}
    return [first, {"params": [model[4].weight, model[2].bias], "maximize": True}, {"params": [model[4].bias]}]


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(True, marks=[pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore::DeprecationWarning")]),
    ],
)
def test_a_run_goes_on_as_the_scripts(compiled: bool, tmp_path: Any) -> None:
    """With groups, after a file, as a compiled step, and in an array of some of the members in another order."""
    models = [_make() for _ in range(M)]
    optimizers = [torch.optim.Adam(_groups(model), lr=0.01 * (i + 1)) for i, model in enumerate(models)]
    schedulers = [lr_scheduler.ExponentialLR(each, 0.9 - i / 10) for i, each in enumerate(optimizers)]
    batches = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]

    def train() -> None:
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            train_solo(model, mse, optimizer, batches)
            scheduler.step()

    train()
    optimizer = hfta.from_torch(iter(optimizers), iter(schedulers), models=iter(models), steps=8, every=4)
    step = hfta.make_train_step(models[0], mse, optimizer, batch_dims=None, donate=True)
    start = step.init(*hfta.stack_params(models), seeds=range(M))
    held = hfta.take(start, slice(None)).opt_state
    for _ in range(3):
        train()
    run: Any = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    path = tmp_path / "run.safetensors"
    hfta.fit(run, start, batches, epochs=2, progress=False, resume=path)
    # Neither a state that was written nor optimizers that go on change what another state starts from.
    start = step.init(*hfta.stack_params(models), seeds=range(M))
    assert start.opt_state.groups["group0"].step.tolist() == [4, 4, 4]
    assert all(map(torch.equal, optree.tree_leaves(start.opt_state), optree.tree_leaves(held)))
    state, _ = hfta.fit(run, start, batches, epochs=3, progress=False, resume=path)
    _assert_same(hfta.unstack_params(models[0], *hfta.step.stacked(state)), models, 1e-11)
    assert [*state.opt_state.groups] == ["group0", "group1"]
    rates = hfta.with_hyperparams(state, **{"group1.lr": 1.0}).opt_state.groups["group1"].hyperparams["lr"]["value"]
    assert rates.tolist() == [1.0] * M
    state = hfta.take(state, [2, 0])
    train()
    for batch in batches:
        state, _ = step(state, batch)
    back = hfta.unstack_params(models[0], *hfta.step.stacked(state))
    _assert_same(back, [models[2], models[0]], 1e-11)
    returned = hfta.to_torch(optimizer, state, back)
    assert [group["maximize"] for group in returned[0].param_groups] == [False, True]
    assert [len(each.state) for each in returned] == [5, 5]


def test_epochs_of_unequal_length() -> None:
    models = _models({"w": (2,)})
    lengths = [1 + i for i in range(M)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    optimizer = hfta.from_torch(optimizers, schedulers, models=models, steps=3, every=lengths)
    params, _ = hfta.stack_params(models)
    state = optimizer.init(params)
    for number in range(4):
        updates, state = optimizer.update({"w": torch.ones(M, 2)}, state, params)
        assert (-updates["w"][:, 0]).tolist() == [0.5 ** min(number // length, 3) for length in lengths]
    with pytest.raises(hfta.errors.StackError, match=r"every is \[0, 1.*\]; give"):
        hfta.from_torch(optimizers, schedulers, models=models, steps=3, every=[0, *[1] * (M - 1)])
    with pytest.raises(hfta.errors.HyperparameterError, match="every"):
        hfta.from_torch(optimizers, schedulers, models=models, steps=3, every=[1] * (M + 1)).init(params)


class Unknown(torch.optim.SGD):
    pass


def _linear(count: int = 3) -> list[Any]:
    return [nn.Linear(2, 1) for _ in range(count)]


def _refused(
    change: Callable[..., Any] = lambda models, optimizers: None, make: Any = torch.optim.SGD, **options: Any
) -> Any:
    """``from_torch`` of three optimizers after a change that returns other arguments."""
    models = _linear()
    optimizers = [make(model.parameters(), lr=0.1) for model in models]
    arguments = {"models": models, "optimizers": optimizers, **(change(models, optimizers) or {}), **options}
    return hfta.from_torch(arguments.pop("optimizers"), arguments.pop("schedulers", None), **arguments)


def _step(model: Any, optimizer: Any, *names: str) -> None:
    for name in names:
        param = model.get_parameter(name)
        param.grad = torch.ones_like(param)
    optimizer.step()


def _schedulers(optimizers: Any, make: Any = lr_scheduler.ExponentialLR, *arguments: Any) -> dict[str, Any]:
    return {"schedulers": [make(optimizer, *arguments) for optimizer in optimizers]}


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: _refused(make=torch.optim.SparseAdam),
        r"model 0: torch.optim.*\.SparseAdam has no counterpart .* use one of SGD, .*Adafactor.*extend",
    ),
    (lambda: _refused(make=Unknown), r"test_exchange.Unknown has no counterpart"),
    (
        lambda: _refused(lambda m, o: {"optimizers": [*o[:2], torch.optim.Adam(m[2].parameters())]}),
        r"model 2: the optimizer is Adam \(groups: 1\) but in model 0 it is SGD \(groups: 1\)",
    ),
    (lambda: _refused(lambda m, o: {"models": m[::-1]}), r"model 0: .* a parameter that is not .* same order"),
    (
        lambda: _refused(lambda m, o: {"optimizers": [*o[:2], torch.optim.SGD([m[2].weight], lr=0.1)]}),
        r"model 2: what not all hold in group 0 is \[\] but in model 0 it is \['bias'\]",
    ),
    (
        lambda: _refused(lambda m, o: o[1].param_groups[0].update(nesterov=True)),
        "model 1: nesterov of group 0 is True but",
    ),
    (lambda: _refused(lambda m, o: [each.requires_grad_(False) for each in m] and {}), "nothing to train"),
    (
        lambda: _refused(lambda m, o: _step(m[1], o[1], "weight"), make=torch.optim.Adam),
        r"model 1: the state of 'bias' is from 0 updates but that of 'weight' from 1; give .* group of their own",
    ),
    (
        lambda: _refused(lambda m, o: _schedulers(o, lr_scheduler.ReduceLROnPlateau), steps=3),
        "model 0: ReduceLROnPlateau follows a metric; .*schedules.plateau",
    ),
    (
        lambda: _refused(lambda m, o: _schedulers(o[::-1], lr_scheduler.ExponentialLR, 0.9), steps=3),
        "model 0: its scheduler follows another",
    ),
    (lambda: _refused(lambda m, o: _schedulers(o, lr_scheduler.ExponentialLR, 0.9)), "steps is 0 and every is 1; give"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_is_refused_and_why(refused: Callable[[], Any], message: str) -> None:
    with pytest.raises(hfta.errors.StackError, match=message):
        refused()


def test_optimizers_of_several_networks_go_on_and_back() -> None:
    def make(member: int) -> nn.ModuleDict:
        torch.manual_seed(member)
        return nn.ModuleDict({"d": nn.Linear(2, 1), "g": nn.Linear(3, 2)}).double()

    def loss(name: str) -> Any:
        return lambda model, batch: (SIGNS[name] * model["d"](model["g"](batch))).tanh().mean()

    SIGNS, batches = {"d": 1, "g": -1}, torch.randn(4, 5, 3, dtype=torch.float64)
    models = [make(member) for member in range(3)]
    optimizers = {name: [torch.optim.Adam(model[name].parameters(), lr=0.01) for model in models] for name in SIGNS}

    def train(models: Any, optimizers: Any, batches: Any) -> None:
        for member, model in enumerate(models):
            for batch, name in itertools.product(batches, SIGNS):
                model.zero_grad()
                loss(name)(model, batch).backward()
                optimizers[name][member].step()

    train(models, optimizers, batches[:1])
    made = {name: hfta.from_torch(each, models=models) for name, each in optimizers.items()}
    steps = {name: hfta.make_train_step(models[0], loss(name), made[name], batch_dims=None) for name in SIGNS}
    step = hfta.joint(**steps)
    state = step.init(*hfta.stack_params(models), seeds=range(3))
    for batch in batches[1:3]:
        state, _ = step(state, batch)
    trained = hfta.unstack_params(models[0], *hfta.step.stacked(state))
    train(trained, {n: hfta.to_torch(made[n], state.opt_state.groups[n], trained) for n in SIGNS}, batches[3:])
    train(models, optimizers, batches[1:])
    for model, solo in zip(trained, models, strict=True):
        torch.testing.assert_close(model.state_dict(), solo.state_dict(), rtol=0, atol=1e-12)


def test_what_does_not_go_back() -> None:
    models = _linear()
    params, _ = hfta.stack_params(models)
    adam, sgd = hfta.adam(lr=[0.1, 0.2, 0.3]), hfta.sgd()
    for optimizer, message in (
        (hfta.lion(), "takes one of SGD"),
        (hfta.chain(hfta.clip_grad_norm(1.0), sgd), "of a chain, pass that part"),
        (hfta.partition({"weight": "a", "bias": "b"}, {"a": adam, "b": sgd}), "groups of one of them"),
        (hfta.optim.GradientTransformation(sgd.init, lambda *_: _), "takes one of SGD"),
    ):
        with pytest.raises(hfta.errors.StackError, match=message):
            hfta.to_torch(optimizer, optimizer.init(params), models)
    matrices = hfta.muon(maximize=True)
    with pytest.raises(hfta.errors.StackError, match="Muon has no maximize, which is True"):
        hfta.to_torch(
            matrices, matrices.init({"weight": params["weight"]}), [nn.Linear(2, 1, bias=False) for _ in models]
        )


def test_what_has_not_stepped_goes_back_as_it_was() -> None:
    """The first gradient is the buffer of SGD."""
    models = _linear()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, dampening=0.5) for model in models]
    optimizer = hfta.from_torch(optimizers, models=models)
    params, _ = hfta.stack_params(models)
    solo, *_ = hfta.to_torch(optimizer, optimizer.init(params), models)
    _step(models[0], solo, "weight", "bias")
    assert solo.state[models[0].bias]["momentum_buffer"].tolist() == [1.0]


def test_none_of_adafactor_becomes_the_resolution_of_its_parameters() -> None:
    models = [nn.Linear(3, 2) for _ in range(M)]
    optimizers = [torch.optim.Adafactor(model.parameters(), lr=0.1 * (i + 1)) for i, model in enumerate(models)]
    optimizer = hfta.from_torch(optimizers, models=models)
    params, _ = hfta.stack_params(models)
    state = optimizer.init(params)
    assert state.hyperparams["eps1"].tolist() == [torch.finfo(torch.float64).eps] * M
    assert hfta.to_torch(optimizer, state, models)[2].param_groups[0]["eps"] == (torch.finfo(torch.float64).eps, 1e-3)
    plain = hfta.adafactor(lr=0.1)
    assert hfta.to_torch(plain, plain.init(params), models)[0].param_groups[0]["eps"] == (None, 1e-3)


def test_rprop_before_its_first_update_goes_back_as_a_new_one() -> None:
    models = [nn.Linear(3, 2) for _ in range(M)]
    optimizer = hfta.rprop(lr=[0.1, 0.2, 0.3])
    back = hfta.to_torch(optimizer, optimizer.init(hfta.stack_params(models)[0]), models)
    before = models[2].weight.detach().clone()
    models[2].weight.grad = torch.ones_like(before)
    back[2].step()
    torch.testing.assert_close(models[2].weight, before - 0.3)
