"""Optimizers against ``torch.optim``, where it has them, and against the equations of their papers elsewhere."""

from __future__ import annotations

import inspect
from collections import namedtuple
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from cases import MATRIX_OPTIMIZERS, OPTIMIZERS, SHAPES, OptimizerCase, ours, theirs
from hfta_func.errors import HyperparameterError
from hfta_func.optim._leafwise import PAIRS
from hfta_func.optim.extend import FIELDS, Hyperparams, Range, leafwise, restrict

M, STEPS = 3, 100
Shapes, Params = dict[str, tuple[int, ...]], dict[str, Tensor]
CASES = [pytest.param(case, id=case.name) for case in OPTIMIZERS + MATRIX_OPTIMIZERS]
pytestmark = pytest.mark.usefixtures("double")


def test_every_optimizer_has_a_row() -> None:
    exported = {name: make for name, make in vars(hfta.optim).items() if inspect.isfunction(make)}
    optimizers = {name: make for name, make in exported.items() if "lr" in inspect.signature(make).parameters}
    # It evaluates the loss itself: test_lbfgs.py.
    assert optimizers.pop("lbfgs") is hfta.lbfgs
    rows = {case.ours for case in OPTIMIZERS + MATRIX_OPTIMIZERS}
    missing = [name for name, make in optimizers.items() if make not in rows]
    assert len(optimizers) >= 12 and not missing, f"add a row to tests/helpers/cases.py for {missing}"
    for name, make in optimizers.items():
        # Every number of every optimizer is tested with one value per member, all of which differ.
        tables = [case.knobs for case in OPTIMIZERS + MATRIX_OPTIMIZERS if case.ours is make]
        knobs = {knob for knob, given in inspect.signature(make).parameters.items() if "PerModel" in given.annotation}
        assert knobs == set().union(*tables), name
        assert all(len(set(values)) == M for table in tables for values in table.values()), name


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_checked(case: OptimizerCase) -> None:
    for knob, values in case.knobs.items():
        bad = [(*values[1][:-1], float("nan"))] if isinstance(values[0], tuple) else [float("nan")]
        names = rf"({'|'.join(PAIRS[knob])})" if isinstance(values[0], tuple) else knob
        with pytest.raises(HyperparameterError, match=rf"model 1: {names} is nan"):
            ours(case._replace(knobs={**case.knobs, knob: [values[0], *bad, values[2]]}))


def test_ranges_belong_to_the_optimizer() -> None:
    first, second = (namedtuple(name, [*FIELDS, "average"]) for name in ("First", "Second"))
    restrict(first, alpha=Range.POSITIVE, lr=Range.DECAY)
    states = []
    for owner in (first, second):
        knobs = Hyperparams(owner, lr=0.5, alpha=1.0)
        states.append(leafwise(owner, knobs, lambda grad, param, k, average: grad).init({"w": torch.ones(M, 2)}))
    message = "alpha is -1.0; it must be positive"
    with pytest.raises(HyperparameterError, match=message):
        Hyperparams(first, alpha=-1.0)
    with pytest.raises(HyperparameterError, match=message):
        hfta.with_hyperparams(states[0], alpha=-1.0)
    with pytest.raises(HyperparameterError, match=r"lr is 2\.0; it must be at least 0 and below 1"):
        hfta.with_hyperparams(states[0], lr=2.0)
    found = hfta.with_hyperparams(states[1], alpha=-1.0, lr=2.0).hyperparams
    assert found["alpha"].tolist() == [-1.0] * M and found["lr"].tolist() == [2.0] * M


@pytest.mark.parametrize(
    "rule",
    [
        lambda grad, param, k, average: torch.tanh(grad),
        lambda grad, param, k, average: torch.add(grad, param, alpha=2),
        lambda grad, param, k, average: torch.addcmul(grad, grad, param),
    ],
)
def test_operators_run_a_rule_without_a_form_in_c(rule: Any) -> None:
    owner = namedtuple("Owner", [*FIELDS, "average"])
    params, grads = {"w": torch.randn(M, 2)}, {"w": torch.randn(M, 2)}
    optimizer = leafwise(owner, Hyperparams(owner, lr=[0.1, 0.2, 0.3]), rule)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    expected = rule(grads["w"], params["w"], {}, None) * -torch.tensor([[0.1], [0.2], [0.3]])
    torch.testing.assert_close(updates["w"], expected, rtol=1e-14, atol=0)


def _gradients(steps: int, shapes: Shapes = SHAPES) -> list[Params]:
    """Of very different sizes, and some of them zero."""
    return [
        {
            name: torch.randn(M, *shape) * 10.0 ** torch.randint(-3, 2, (M, *shape)) * (torch.rand(M, *shape) > 0.1)
            for name, shape in shapes.items()
        }
        for _ in range(steps)
    ]


def _start(shapes: Shapes = SHAPES) -> Params:
    return {name: torch.randn(M, *shape) for name, shape in shapes.items()}


def _walk(optimizer: hfta.GradientTransformation, params: Params, gradients: list[Params]) -> tuple[Params, Any]:
    state = optimizer.init(params)
    for grads in gradients:
        updates, state = optimizer.update(grads, state, params)
        params = hfta.apply_updates(params, updates)
    return params, state


def _member(tree: Params, i: int) -> list[nn.Parameter]:
    return [nn.Parameter(leaf[i].clone()) for leaf in tree.values()]


def _alone(start: Params, gradients: list[Params], make: Any) -> list[list[nn.Parameter]]:
    """Parameters of each member in the end; ``make(i, parameters)`` is what updates those of member i."""
    members = [_member(start, i) for i in range(M)]
    for i, parameters in enumerate(members):
        step = make(i, parameters)
        for grads in gradients:
            for parameter, grad in zip(parameters, grads.values(), strict=True):
                parameter.grad = grad[i].clone()
            step()
    return members


def _assert_members(found: Params, expected: list[list[nn.Parameter]], tolerance: float = 1e-12) -> None:
    for name, column in zip(found, zip(*expected, strict=True), strict=True):
        stacked = torch.stack([x.detach() for x in column])
        torch.testing.assert_close(found[name], stacked, rtol=tolerance, atol=tolerance)


def _check_against(optimizer: Any, make: Any, tolerance: float = 1e-12, shapes: Shapes = SHAPES) -> None:
    params, gradients = _start(shapes), _gradients(STEPS, shapes)
    expected, state = _alone(params, gradients, lambda *member: make(*member).step), optimizer.init(params)
    for grads in gradients:
        held = optree.tree_map(torch.clone, (grads, state, params))
        updates, after = optimizer.update(grads, state, params)
        assert all(map(torch.equal, optree.tree_leaves((grads, state, params)), optree.tree_leaves(held)))
        state, params = after, hfta.apply_updates(params, updates)
    _assert_members(params, expected, tolerance)


@pytest.fixture(params=["kernel", "operators"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates by a kernel, and by operators."""
    if request.param != "kernel":
        monkeypatch.setenv("HFTA_FUNC_NATIVE", "0")


@pytest.mark.sampled(every=6)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_members_are_separate_optimizers(case: OptimizerCase, maximize: bool) -> None:
    case = case._replace(options={**case.options, "maximize": maximize})
    _check_against(ours(case), lambda i, parameters: theirs(case, i, parameters), shapes=case.shapes)


def test_adam_with_decoupled_weight_decay_is_adamw() -> None:
    knobs, start, gradients = {"lr": [0.1, 0.2, 0.3], "weight_decay": [0.0, 0.1, 0.5]}, _start(), _gradients(5)
    adam, adamw = hfta.adam(**knobs, decoupled_weight_decay=True), hfta.adamw(**knobs)
    found, expected = (_walk(optimizer, start, gradients)[0] for optimizer in (adam, adamw))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_corrections_for_bias_are_computed_in_float64() -> None:
    # The nearest float32 to this beta2 is 1 - 1.19e-7.
    betas, lr = (0.9, 1 - 1e-7), 1.0
    grads = {"w": torch.full((M, 2), 0.5, dtype=torch.float32)}
    for make in (hfta.adam, hfta.adamw, hfta.nadam, hfta.lamb):
        optimizer = make(lr=lr, betas=betas, eps=0.0, weight_decay=0.0)
        exact, narrow = (
            optimizer.update(tree, optimizer.init(tree), tree)[0]["w"] for tree in ({"w": grads["w"].double()}, grads)
        )
        torch.testing.assert_close(narrow.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(6, 4), (3, 5), (4, 4)])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}])
def test_muon(shape: tuple[int, int], options: dict[str, Any]) -> None:
    knobs = {"lr": [0.01, 0.1, 0.02], "weight_decay": [0.1, 0.0, 0.5], "momentum": [0.95, 0.9, 0.5]}

    def make(i: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, **{name: values[i] for name, values in knobs.items()}, **options)

    # In bfloat16, batched products may be rounded differently from products of single matrices.
    _check_against(hfta.muon(**knobs, **options), make, 1e-3, {"matrix": shape})


def test_muon_is_for_matrices() -> None:
    with pytest.raises(HyperparameterError, match=r"'bias' of one model is \[5\]; use partition\(\.\.\.\)"):
        hfta.muon().init({"weight": torch.zeros(M, 5, 4), "bias": torch.zeros(M, 5)})
    with pytest.raises(HyperparameterError, match="adjust_lr_fn is 'rms'; it must be 'original' or 'match_"):
        hfta.muon(adjust_lr_fn="rms")


CHAINS = {
    "clipped": lambda: hfta.chain(hfta.clip_grad_norm([0.1, 1.0, 5.0]), hfta.adamw(lr=0.1, weight_decay=0.5)),
    "averaged": lambda: hfta.chain(hfta.sgd(lr=0.1, momentum=0.9), hfta.ema([0.9, 0.5, 0.99])),
    "accumulated": lambda: hfta.accumulate(hfta.adam(lr=0.1), every=[1, 2, 3]),
    "groups": lambda: hfta.partition(_label, {"matrices": hfta.muon(ns_dtype=torch.float64), "others": hfta.lion()}),
}
TRANSFORMATIONS = [
    *(pytest.param(lambda case=case: ours(case), case.shapes, id=case.name) for case in OPTIMIZERS + MATRIX_OPTIMIZERS),
    *(pytest.param(make, SHAPES, id=name) for name, make in CHAINS.items()),
]


@pytest.mark.sampled(every=5)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("make", "shapes"), TRANSFORMATIONS)
def test_in_place_of_some_members(make: Any, shapes: Any) -> None:
    """And of all members, whose tensors stay where they are."""
    optimizer, gradients, start = make(), _gradients(6, shapes), _start(shapes)
    expected, first = _walk(optimizer, start, gradients), (start, optimizer.init(start))
    every, some = (optree.tree_map(torch.clone, first) for _ in range(2))
    addresses = [leaf.data_ptr() for leaf in optree.tree_leaves(every)]
    keep = torch.tensor([True, False, True])
    for grads in gradients:
        hfta.update_(optimizer, optree.tree_map(torch.clone, grads), every[1], every[0])
        poisoned = {name: grad.index_fill(0, torch.tensor([1]), float("nan")) for name, grad in grads.items()}
        hfta.update_(optimizer, poisoned, some[1], some[0], keep)
    assert [leaf.data_ptr() for leaf in optree.tree_leaves(every)] == addresses
    for kept, before, other, new in zip(*map(optree.tree_leaves, (some, first, every, expected)), strict=True):
        torch.testing.assert_close(other, new, rtol=1e-12, atol=1e-12)
        assert torch.equal(kept[1], before[1])
        torch.testing.assert_close(kept[[0, 2]], other[[0, 2]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("make", "shapes"), TRANSFORMATIONS)
def test_an_array_of_arrays(make: Any, shapes: Any) -> None:
    optimizer, (first, second) = make(), _gradients(2, shapes)
    starts = [_start(shapes) for _ in range(2)]
    trees = [(grads, optimizer.init(start), start) for grads, start in zip((first, second), starts, strict=True)]
    nested = hfta.vmap(optimizer.update)(*optree.tree_map(lambda a, b: torch.stack([a, b]), *trees))
    for i, tree in enumerate(trees):
        got = optree.tree_map(lambda leaf, i=i: leaf[i], nested)
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(optimizer.update(*tree)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("either_way")
def test_numbers_are_not_rounded_to_the_parameters_type() -> None:
    # In bfloat16, 0.999 is 1.
    params = {"w": torch.ones(M, 4, dtype=torch.bfloat16)}
    optimizer = hfta.sgd(lr=0.999)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    torch.testing.assert_close(updates["w"], torch.full((M, 4), -0.999, dtype=torch.float32), rtol=1e-6, atol=0)
    assert hfta.apply_updates(params, updates)["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("clip", "alone"),
    [(hfta.clip_grad_norm, nn.utils.clip_grad_norm_), (hfta.clip_grad_value, nn.utils.clip_grad_value_)],
)
def test_clipping(clip: Any, alone: Any) -> None:
    limits, (grads,) = [0.1, 1.0, 500.0], _gradients(1)
    found, _ = clip(limits).update(grads, clip(limits).init(grads), grads)
    for i, limit in enumerate(limits):
        parameters = _member(grads, i)
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        alone(parameters, limit)
        for name, parameter in zip(grads, parameters, strict=True):
            torch.testing.assert_close(found[name][i], parameter.grad, rtol=1e-12, atol=0)


def test_decayed_weights_before_an_optimizer_are_an_l2_penalty() -> None:
    decay, start, gradients = [0.0, 0.1, 0.5], _start(), _gradients(20)
    chained = hfta.chain(hfta.add_decayed_weights(decay), hfta.sgd(lr=0.1, momentum=0.9))
    found, _ = _walk(chained, start, gradients)
    expected, _ = _walk(hfta.sgd(lr=0.1, momentum=0.9, weight_decay=decay), start, gradients)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", [False, True])
def test_accumulated_gradients_are_those_of_larger_batches(compiled: bool) -> None:
    torch._dynamo.reset()
    every, lr, start, gradients = [1, 2, 5], [0.1, 0.2, 0.3], _start(), _gradients(20)
    optimizer = hfta.accumulate(hfta.adam(lr=lr), every=every)
    if compiled:
        compiled_update = torch.compile(optimizer.update, fullgraph=True, backend="aot_eager")
        optimizer = optimizer._replace(update=compiled_update)
    found, state = _walk(optimizer, start, gradients)
    expected = []
    for i, count in enumerate(every):
        parts = [gradients[at : at + count] for at in range(0, 20, count)]
        means = [{name: sum(grads[name] for grads in part) / count for name in start} for part in parts]
        expected.append(_alone(start, means, lambda i, own: torch.optim.Adam(own, lr=lr[i]).step)[i])
    _assert_members(found, expected)
    assert state.inner.step.tolist() == [20, 10, 4] and state.seen.tolist() == [0, 0, 0]
    assert not any(mean.any() for mean in state.grads.values())


def test_between_updates_nothing_moves() -> None:
    start, (grads,) = _start(), _gradients(1)
    optimizer = hfta.accumulate(hfta.adamw(lr=0.1, weight_decay=0.5), every=3)
    before = optimizer.init(start)
    updates, after = optimizer.update(grads, before, start)
    assert not any(update.any() for update in updates.values())
    assert after.inner is before.inner and after.seen.tolist() == [1] * M


def test_ema_is_the_averaged_model_of_torch() -> None:
    decay, start, gradients = [0.9, 0.5, 0.99], _start(), _gradients(20)
    found, state = _walk(hfta.chain(hfta.sgd(lr=0.1), hfta.ema(decay)), start, gradients)
    plain, _ = _walk(hfta.sgd(lr=0.1), start, gradients)
    assert all(torch.equal(found[name], plain[name]) for name in found)
    averages = []

    def make(i: int, parameters: list[nn.Parameter]) -> Any:
        model, average = nn.ParameterList(parameters), torch.optim.swa_utils.get_ema_multi_avg_fn(decay[i])
        averages.append(torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average))
        other = torch.optim.SGD(parameters, lr=0.1)
        return lambda: (other.step(), averages[i].update_parameters(model))

    _alone(start, gradients, make)
    _assert_members(state[-1].average, [list(average.module) for average in averages])


def _label(path: str, shape: torch.Size) -> str | None:
    return {2: "matrices", 1: "others", 0: None}[len(shape)]


@pytest.mark.parametrize(
    "label", [_label, {"": None, "matrix": "matrices", "vector": "others"}], ids=["call", "mapping"]
)
def test_groups_have_optimizers_of_their_own(label: Any) -> None:
    rates, start, gradients = [0.1, 0.2, 0.3], _start(), _gradients(20)
    groups = {"matrices": hfta.adam(lr=rates), "others": hfta.sgd(lr=0.5, momentum=0.9)}
    found, state = _walk(hfta.partition(label, groups), start, gradients)

    def make(i: int, parameters: list[nn.Parameter]) -> Any:
        matrix, vector, _ = parameters
        others = torch.optim.Adam([matrix], lr=rates[i]), torch.optim.SGD([vector], lr=0.5, momentum=0.9)
        return lambda: [other.step() for other in others]

    _assert_members(found, _alone(start, gradients, make))
    assert state.groups["others"].momentum.keys() == {"vector"}


def test_the_longest_path_names_the_group() -> None:
    label = {"": "rest", "net": "body", "net.head": "head", "net.head.bias": None}
    rates = {"rest": 1.0, "body": 2.0, "head": 3.0}
    optimizer = hfta.partition(label, {name: hfta.sgd(lr=rate) for name, rate in rates.items()})
    expected = {
        **{"net.header.weight": 2.0, "net.head.weight": 3.0, "net.head.bias": 0.0, "network.weight": 1.0},
        **{"net.weight": 2.0, "other": 1.0, "net.head.bias2": 3.0},
    }
    params = {path: torch.zeros(M, 2) for path in expected}
    updates, _ = optimizer.update({path: -torch.ones(M, 2) for path in params}, optimizer.init(params), params)
    assert [*updates] == [*expected]
    assert {path: update.unique().tolist() for path, update in updates.items()} == {
        path: [rate] for path, rate in expected.items()
    }


def test_hyperparameters_of_one_group_and_of_all() -> None:
    optimizer = hfta.partition(_label, {"matrices": hfta.adam(), "others": hfta.sgd(momentum=0.9)})
    state = optimizer.init(_start())
    changed = hfta.with_hyperparams(state, lr=0.5, **{"others.lr": [1.0, 2.0, 3.0]})
    assert changed.groups["matrices"].hyperparams["lr"].tolist() == [0.5] * M
    assert changed.groups["others"].hyperparams["lr"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(HyperparameterError, match=r"unknown hyperparameter 'matrices.momentum'.*others.momentum"):
        hfta.with_hyperparams(state, **{"matrices.momentum": 0.5})


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"matrix": "body", "vector": "rest"}, "'number' is in no group; name it, or label all others with ''"),
        (
            {"": "body", "matrx": "rest"},
            r"'matrx' is not the path of a module or parameter that is trained; use one of \['matrix'",
        ),
        ({"": "body", "matri": None}, "'matri' is not the path of a module or parameter that is trained"),
    ],
)
def test_groups_that_do_not_fit(label: Any, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        hfta.partition(label, {"body": hfta.sgd(), "rest": hfta.sgd()}).init(_start())


def test_a_link_of_a_chain_may_drop_parameters() -> None:
    """Only the last link's updates are applied, so that the others may return any."""
    start = _start()
    dropped = next(iter(start))

    def update(grads: Params, state: Any, params: Params) -> Any:
        return {name: grad for name, grad in grads.items() if name != dropped}, state

    chained = hfta.chain(hfta.GradientTransformation(lambda params: (), update), hfta.sgd(lr=0.1))
    updates, _ = chained.update(start, chained.init(start), start)
    assert updates.keys() == start.keys() - {dropped}


def test_averages_follow_a_schedule_of_their_own() -> None:
    decay = hfta.schedules.step_lr([0.5, 0.8, 0.9], step_size=2, gamma=0.5)
    optimizer = hfta.chain(hfta.sgd(lr=0.1), hfta.ema(decay))
    params = _start()
    state, average = optimizer.init(params), None
    for number, grads in enumerate(_gradients(6)):
        updates, state = optimizer.update(grads, state, params)
        params = hfta.apply_updates(params, updates)
        weight = torch.tensor([0.5, 0.8, 0.9]) * 0.5 ** (number // 2)
        name, value = next(iter(params.items()))
        weight = weight.reshape(-1, *[1] * (value.dim() - 1))
        average = value if average is None else weight * average + (1 - weight) * value
        torch.testing.assert_close(state[-1].average[name], average, rtol=1e-12, atol=1e-12)
        assert state[-1].step.tolist() == [number + 1] * M


@pytest.mark.parametrize("keep", [None, [True, False, True]])
def test_an_optimizer_that_only_makes_new_tensors_updates_in_place(keep: list[bool] | None) -> None:
    inner = hfta.sgd(lr=[0.1, 0.2, 0.3], momentum=0.9)
    optimizer, params = hfta.GradientTransformation(inner.init, inner.update), _start()
    mask, state = None if keep is None else torch.tensor(keep), inner.init(params)
    ours_, theirs_ = (optree.tree_map(torch.clone, (params, state)) for _ in range(2))
    for grads in _gradients(6):
        hfta.update_(optimizer, optree.tree_map(torch.clone, grads), ours_[1], ours_[0], mask)
        hfta.update_(inner, grads, theirs_[1], theirs_[0], mask)
        for a, b in zip(optree.tree_leaves(ours_), optree.tree_leaves(theirs_), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert all(not torch.equal(ours_[0][path][0], param[0]) for path, param in params.items())


@pytest.mark.parametrize("d", [1.0, 2.0])
def test_adafactor_with_the_resolution_of_the_dtype_and_stacks_of_matrices(d: float) -> None:
    # Gradients are zero in whole rows, so that the lower bounds matter.
    _check_against(
        hfta.adafactor(lr=[0.1, 0.2, 0.3], d=d),
        lambda i, parameters: torch.optim.Adafactor(parameters, lr=[0.1, 0.2, 0.3][i], d=d),
        shapes={"kernel": (5, 4, 3, 3), "column": (6, 1), "one": (1,), "row": (1, 4)},
    )


def test_adafactor_holds_rows_and_columns_and_no_matrix() -> None:
    state = hfta.adafactor().init({"matrix": torch.zeros(M, 50, 40), "vector": torch.zeros(M, 7)})
    slots = state.row_var, state.col_var, state.variance
    assert [{path: leaf[0].numel() for path, leaf in slot.items()} for slot in slots] == [
        {"matrix": 50, "vector": 0},
        {"matrix": 40, "vector": 0},
        {"matrix": 0, "vector": 7},
    ]
    with pytest.raises(HyperparameterError, match=r"adafactor needs real, unpadded parameters, not 'w'; use"):
        hfta.adafactor().init({"w": torch.zeros(M, 2, dtype=torch.complex64)})


def test_rprop_starts_with_the_learning_rate_of_the_first_update() -> None:
    optimizer, ones = hfta.rprop(lr=0.1, etas=(0.5, 2.0)), {"w": torch.ones(2, 1)}
    state = hfta.with_hyperparams(optimizer.init(ones), lr=[0.3, 0.4])
    first, state = optimizer.update(ones, state, ones)
    second, _ = optimizer.update(ones, hfta.with_hyperparams(state, lr=9.0), ones)
    torch.testing.assert_close(first["w"], torch.tensor([[-0.3], [-0.4]]))
    torch.testing.assert_close(second["w"], torch.tensor([[-0.6], [-0.8]]))


def test_the_average_of_asgd_is_that_of_the_parameters_from_t0_on() -> None:
    optimizer, params = hfta.asgd(lr=[0.1, 0.2], lambd=0.0, t0=1), {"w": torch.zeros(2, 1)}
    state, seen = optimizer.init(params), []
    for _ in range(4):
        updates, state = optimizer.update({"w": torch.ones(2, 1)}, state, params)
        params = hfta.apply_updates(params, updates)
        seen.append(params["w"])
    torch.testing.assert_close(state.ax["w"], torch.stack(seen[2:]).mean(0))


@pytest.mark.usefixtures("either_way")
def test_rprop_forgets_a_gradient_that_was_not_finite() -> None:
    rates, start = [0.1, 0.2, 0.3], {"w": torch.ones(M, 4)}
    gradients = [{"w": 1.0 + t + torch.arange(M).unsqueeze(1).repeat(1, 4)} for t in range(4)]
    gradients[1] = {"w": torch.tensor([2.0, float("nan"), float("inf"), -1.0]).repeat(M, 1)}
    found, _ = _walk(hfta.rprop(lr=rates), start, gradients)
    _assert_members(found, _alone(start, gradients, lambda i, own: torch.optim.Rprop(own, lr=rates[i]).step))
