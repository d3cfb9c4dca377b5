"""Compiled steps on disk: what their names rest on, what a later process does with them, and what is wrong with files."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func._kernels.operators import is_defined
from hfta_func._torch import Library
from hfta_func._torch import tape as tapes
from hfta_func._torch.recorded import Call, Slot
from hfta_func.run import background, kept
from hfta_func.step import replay
from hfta_func.verify import Reached, reached
from processes import output

M = 3
SCALE = 2.0
helper = types.ModuleType("helper")


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return SCALE * model(batch).square().mean()


def arrayed(
    loss: Any = loss_fn, optimizer: Any = None, factory: Any = make, **options: Any
) -> tuple[hfta.step.TrainStep, hfta.step.TrainState]:
    step = hfta.make_train_step(factory(), loss, optimizer or hfta.adam(lr=[0.01, 0.02, 0.03]), **options)
    return step, step.init(*hfta.init_params(factory, range(M)), seeds=range(M))


def batch(number: int = 0) -> Tensor:
    return torch.randn(M, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


class Settings:
    """What a loss may hold."""

    __slots__ = ("inner", "weight")

    def __init__(self) -> None:
        self.weight, self.inner = 1.0, {"list": [1.0, {"deep": 2.0}]}

    @property
    def twice(self) -> float:
        return 2 * self.weight


class Pair(NamedTuple):
    """A named tuple that a loss holds."""

    first: float
    second: float


class Way(NamedTuple):
    """A way to read a Python value, and a change of it."""

    loss: Callable[..., Any]
    change: Callable[[], Any]


def ways() -> dict[str, Way]:
    """Each reads something else."""
    held, listed = Settings(), [1.0, 0.0]
    helper.VALUE = 1.0
    weight = torch.ones(())

    def inner(value: float = 1.0, *, other: float = 1.0) -> float:
        return value * other

    def loss(read: Callable[[], Any]) -> Callable[..., Any]:
        return lambda model, batch: model(batch).square().mean() * read()

    def imports() -> float:
        import helper as here

        return here.VALUE

    def set_weight() -> None:
        nonlocal weight
        weight = torch.zeros(2)

    table, pairs = functools.partial(inner, 2.0), [Pair(1.0, 2.0)]
    return {
        "attribute": Way(loss(lambda: held.weight), lambda: setattr(held, "weight", 3.0)),
        "property": Way(loss(lambda: held.twice), lambda: setattr(Settings, "twice", property(lambda self: 9.0))),
        "deep": Way(loss(lambda: held.inner["list"][1]["deep"]), lambda: held.inner["list"][1].update(deep=3.0)),
        "named tuple": Way(loss(lambda: pairs[0].second), lambda: pairs.__setitem__(0, Pair(1.0, 3.0))),
        "sign of a zero": Way(loss(lambda: listed[1]), lambda: listed.__setitem__(1, -0.0)),
        "keyword": Way(loss(inner), lambda: inner.__kwdefaults__.update(other=5.0)),
        "partial": Way(loss(table), lambda: setattr(inner, "__code__", (lambda value=1.0, *, other=1.0: 7.0).__code__)),
        "module": Way(loss(lambda: helper.VALUE), lambda: setattr(helper, "VALUE", 6.0)),
        "import": Way(loss(imports), lambda: setattr(helper, "VALUE", 6.0)),
        "function of PyTorch": Way(loss(lambda: torch.cos(weight)), lambda: setattr(torch, "cos", torch.sin)),
        "tensor": Way(loss(lambda: weight), set_weight),
        "hook on all modules": Way(loss(lambda: 1.0), lambda: nn.modules.module.register_module_forward_hook(print)),
    }


@pytest.mark.parametrize("name", ways())
def test_a_change_is_noticed_and_has_another_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helper", helper)
    for place, attribute in ((torch, "cos"), (Settings, "twice")):
        monkeypatch.setattr(place, attribute, vars(place)[attribute])
    way, model = ways()[name], make()
    before, same = (Reached(way.loss, model=model) for _ in range(2))
    assert before.digest is not None and before.digest == same.digest and before.holds(), before.why_not
    handle = way.change()
    try:
        assert not before.holds()
        assert Reached(way.loss, model=model).digest != before.digest
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (iter([1]), "a list_iterator"),
        (torch.Generator(), "a Generator"),
        ({object}, "a set of objects"),
        ([*range(300), iter((1,))], "a tuple_iterator"),
        ([[number] for number in range(500)], "more than 400"),
    ],
)
def test_what_cannot_be_followed_is_not_kept(value: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "_MOST", 400)
    values = Reached(lambda model, batch: value, model=make())
    assert values.digest is None and why in str(values.why_not)


def test_names_differ_by_all_that_a_graph_rests_on() -> None:
    step, state = arrayed()
    digest = replay.reached_by(step).digest
    assert digest is not None

    default = batch()

    def name(step: Any = step, state: Any = state, x: Tensor = default, digest: str = digest) -> str:
        return kept.name_of(step, digest, (state, x))

    same = arrayed(optimizer=hfta.adam(lr=[0.5, 0.6, 0.7]))
    assert name() == name() == name(*same) and replay.reached_by(same[0]).digest == digest
    others = [name(digest="other"), name(x=batch()[:, :2]), name(x=batch().float()), name(x=batch().mT.contiguous().mT)]
    others += [name(*arrayed(optimizer=hfta.adam(lr=[0.5, 0.6, 0.7], weight_decay=[0.1, 0.2, 0.3])))]
    others += [name(*arrayed(optimizer=hfta.chain(hfta.clip_grad_norm([1.0] * 3), hfta.adam(lr=[0.5, 0.6, 0.7]))))]
    with hfta.rules.override(all="loop"):
        others.append(name())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        others.append(name())
    finally:
        torch.set_num_threads(threads)
    assert len({name(), *others}) == len(others) + 1
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 1)).double()
    assert Reached(loss_fn, model=model).digest != Reached(loss_fn, model=make()).digest


def test_numbers_in_the_state_are_no_part_of_a_recipe() -> None:
    def digest(optimizer: Any) -> str:
        return kept.recipe_digest(optimizer, arrayed(optimizer=optimizer)[1].opt_state)

    def falling(rate: float, steps: int) -> Any:
        return hfta.sgd(lr=hfta.schedules.step_lr(rate, steps))

    assert digest(hfta.sgd(lr=0.1, momentum=0.5)) == digest(hfta.sgd(lr=[1.0, 2.0, 3.0], momentum=0.9))
    assert digest(hfta.sgd(lr=0.1, momentum=0.5)) != digest(hfta.sgd(lr=0.1))
    assert digest(hfta.sgd(lr=0.1, momentum=0.0)) != digest(hfta.sgd(lr=0.1, momentum=0.5))
    assert digest(hfta.sgd(lr=0.1, maximize=False)) != digest(hfta.sgd(lr=0.1, maximize=True))
    assert digest(falling(0.1, 3)) == digest(falling(0.2, 3))
    assert digest(falling(0.1, 3)) != digest(hfta.sgd(lr=hfta.schedules.constant(0.1)))
    assert digest(hfta.chain(hfta.ema(0.9), hfta.sgd(lr=0.1))) != digest(hfta.chain(hfta.sgd(lr=0.1), hfta.ema(0.9)))


@pytest.mark.parametrize(
    ("outputs", "in_place"),
    [
        ([4, 5], True),
        ([5, 4], False),  # each goes where the other comes from
        ([4, 5, 4], False),  # a metric is the new value
        ([4, 5, 0], False),  # a metric is the old value
        ([4, 6], False),  # one is computed from another
        ([4], False),  # one is written nowhere
    ],
)
def test_an_update_is_written_in_place_if_nothing_else_becomes_of_it(outputs: list[int], in_place: bool) -> None:
    assert is_defined("update_")
    slots = [*map(Slot, range(7))]
    update = torch.ops.hfta_func.update.default, ([slots[2], slots[3]], slots[:2], slots[2], None, "source"), {}
    later = torch.ops.aten.neg.default, (slots[5] if outputs[-1] == 6 else slots[0],), {}
    calls = [Call(*update, slots[4:6], False, False), Call(*later, slots[6], False, False)]
    tape: Any = types.SimpleNamespace(
        inputs=slots[:4], outputs=[slots[one] for one in outputs], calls=calls, numbers={}
    )
    twins = tapes._in_place(tape, 2)
    assert twins == ({0: torch.ops.hfta_func.update_.default} if in_place else {})
    if in_place:
        nodes = [*tapes._module(tape, slots[:4], [], 2).graph.nodes]
        # What reads the old values comes first, and nothing is copied.
        assert [node.target for node in nodes if node.op == "call_function"] == [later[0], twins[0]]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries whose function runs the tape, which is there at once."""
    tapes: list[Any] = []

    def compiled(tape: Any, inputs: Any, held: Any, written: int, options: Any, path: str) -> Any:
        pathlib.Path(path).write_text(str(len(tapes)))
        tapes.append(tape)
        return Library((), (*range(len(tape.outputs)),), ())

    monkeypatch.setattr(kept, "compile_ahead", compiled)
    monkeypatch.setattr(kept, "load_ahead", lambda path: tapes[int(pathlib.Path(path).read_text())].rehearse)

    def recorded(step: Any, *inputs: Any) -> Any:
        """As the step runs eagerly, because whatever asks whether it is compiled imports the compiler."""
        with torch.no_grad():
            step.eagerly(*inputs)
            tape, result = replay.recorded(
                lambda *given: step.finish(given[0], *step.decide(*given), looks=False), *inputs
            )
        return tape, optree.tree_structure(result)

    monkeypatch.setattr(kept, "recorded_whole", recorded)


def named(step: hfta.step.TrainStep, state: hfta.step.TrainState) -> str:
    digest = replay.reached_by(step).digest
    assert digest is not None
    return kept.name_of(step, digest, (state, batch()))


@pytest.mark.exhaustive
def test_a_later_step_begins_with_the_graph_and_follows_values(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"one": 1.0}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return weights["one"] * model(batch).square().mean()

    step, state = arrayed(loss)
    kept.make(step, (state, batch()), named(step, state))
    quick, other = hfta.compile(arrayed(loss)[0]), state
    for number in range(4):
        (state, metrics), (other, expected) = quick(state, batch(number)), step(other, batch(number))
        assert quick.is_compiled and quick.status == "compiled: kept from an earlier run"
        optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), metrics, expected)
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12), state, other)
    monkeypatch.setattr(background.StepGraph, "ask", lambda *args: [])
    weights["one"] = 5.0
    torch.testing.assert_close(quick(state, batch())[1]["loss"], step(state, batch())[1]["loss"], rtol=0, atol=0)
    assert not quick.is_compiled
    # What has changed once is followed by PyTorch's compiler.
    weights["one"] = 1.0
    quick(state, batch())
    assert not quick.is_compiled


def test_a_kept_graph_is_not_called_in_a_context_that_changes_operators(interpreted: None) -> None:
    step, state = arrayed()
    kept.make(step, (state, batch()), named(step, state))
    quick = hfta.compile(arrayed()[0])
    quick(state, batch())
    assert quick.is_compiled
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = quick(state, batch())[1]["loss"]
        assert torch.equal(found, step(state, batch())[1]["loss"])


def test_an_earlier_graph_with_other_losses_is_not_used(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = arrayed()
    kept.make(step, (state, batch()), named(step, state))
    other = torch.tensor(9.0, dtype=torch.float64)
    monkeypatch.setattr(kept, "load", lambda *args: lambda state, batch: (state, {"loss": other.expand(M)}))
    quick = hfta.compile(step)
    with pytest.warns(hfta.errors.CompileWarning, match="its graph has other losses"):
        found = quick(state, batch())
    assert torch.equal(found[1]["loss"], step(state, batch())[1]["loss"]) and not quick.is_compiled
    assert kept.kept() == []


@pytest.mark.parametrize("harm", ["shortened", "writable by others", "no library", "other pickle", "none"])
def test_a_damaged_graph_costs_time_only(harm: str, interpreted: None, cache: pathlib.Path) -> None:
    step, state = arrayed()
    name = named(step, state)
    kept.make(step, (state, batch()), name)
    about, library = cache / name / "about", cache / name / "step.so"
    if harm == "shortened":
        about.write_bytes(about.read_bytes()[:-40])
    elif harm == "no library":
        library.unlink()
    elif harm == "writable by others":
        about.chmod(0o666)
    elif harm == "other pickle":
        about.write_bytes(kept.native.signed(b"no pickle"))
    assert (kept.load(name, []) is None) == (harm != "none")
    # It is replaced by the next one.
    kept.make(step, (state, batch()), name)
    assert kept.load(name, []) is not None and [one for one, _, _ in kept.kept()] == [name]


def test_what_was_not_used_for_longest_goes_first(
    interpreted: None, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, state = arrayed()
    for number, name in enumerate("abc"):
        kept.make(step, (state, batch()), name)
        os.utime(cache / name / "about", (number, number))
    assert [name for name, _, _ in kept.kept()] == ["c", "b", "a"]
    assert kept.load("a", []) is not None
    assert [name for name, _, _ in kept.kept()] == ["a", "c", "b"]
    (_, size, _), *_ = kept.kept()
    monkeypatch.setattr(kept, "MOST_BYTES", 3 * size + size // 2)
    kept.make(step, (state, batch()), "d")
    assert {name for name, _, _ in kept.kept()} == {"d", "a", "c"}


PROGRAM = """
import sys
import test_kept as t, torch, optree, hfta_func as hfta
t.SCALE = {scale}
step, state = t.{arrayed}
torch.manual_seed(0)
x = {x}
name = t.kept.name_of(step, t.replay.reached_by(step).digest, (state, x))
if {makes}:
    t.kept.make(step, (state, x), name)
quick, other = hfta.compile(step), step
mirror = optree.tree_map(torch.clone, state)
for number in range(3):
    (state, found), (mirror, expected) = quick(state, x), step.eagerly(mirror, x)
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9), (state, found), (mirror, expected))
print(quick.is_compiled, "torch._inductor" in sys.modules)
"""


def in_process(arrayed: str, x: str = "t.batch()", scale: float = 2.0, makes: bool = False) -> str:
    return output(PROGRAM.format(arrayed=arrayed, x=x, scale=scale, makes=makes)).strip()


def images() -> nn.Module:
    """With operators of this package that a library calls: convolutions, and one update of many parameters."""
    blocks = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 3)).double()


@pytest.mark.exhaustive
@pytest.mark.soak(unless=r"images\)")
@pytest.mark.parametrize(
    ("arrayed", "x"),
    [
        ("arrayed()", "t.batch()"),
        ("arrayed(donate=True)", "t.batch()"),
        ("arrayed(factory=t.images)", "torch.randn(3, 2, 2, 4, 4, dtype=torch.float64)"),
        ("arrayed(factory=t.images, donate=True)", "torch.randn(3, 2, 2, 4, 4, dtype=torch.float64)"),
    ],
)
def test_another_process_begins_compiled(arrayed: str, x: str) -> None:
    assert in_process(arrayed, x, makes=True) == "True True"
    assert in_process(arrayed, x) == "True False"
    if x == "t.batch()":
        assert in_process(arrayed, x, scale=3.0) == "False False"
