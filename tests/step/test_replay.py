"""Replayed steps: the bits of eager ones, whatever Python the user's functions read."""

from __future__ import annotations

import functools
import gc
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

import hfta_func as hfta
from hfta_func._torch import Recorder, Tape, storage_number
from hfta_func.step import replay

pytestmark = [
    pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning"),
    pytest.mark.filterwarnings("ignore:called:UserWarning"),
]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are made at the second call, whatever they cost."""
    monkeypatch.setattr(replay, "_STEPS", 0)


class Settings:
    """What functions read."""

    scale = 1.0

    def __init__(self) -> None:
        self.value = 1.0
        self.on = False

    def __bool__(self) -> bool:
        return self.on


GLOBAL = 1.0
TENSOR = torch.tensor(1.0)
SETTINGS = Settings()


def with_default(value: float = 1.0) -> float:
    return value


def _caught() -> float:
    try:
        return TABLE["a"]
    except KeyError:
        return 2.0


TABLE = {"a": 1.0, "b": 1.0}


def _set(name: str, value: Any) -> None:
    globals()[name] = value


class Way:
    """One way to read Python: ``read()`` is part of the loss, ``change()`` changes what it reads."""

    def __init__(self, read: Callable[[], Any], change: Callable[[], Any], replays: bool | None = True):
        self.read, self.change, self.replays = read, change, replays


def _ways() -> dict[str, Callable[[], Way]]:
    """Functions that make a way anew."""

    def closure() -> Way:
        value = 1.0

        def change() -> None:
            nonlocal value
            value = 2.0

        return Way(lambda: value, change)

    def counter() -> Way:
        calls: list[int] = []
        return Way(lambda: calls.append(0) or float(len(calls)), lambda: None, replays=False)

    def replaced_function() -> Way:
        holder = types.SimpleNamespace(function=lambda: 1.0)
        return Way(lambda: holder.function(), lambda: setattr(holder, "function", lambda: 2.0))

    def cached() -> Way:
        @functools.lru_cache
        def compute() -> float:
            return GLOBAL

        return Way(lambda: compute(), lambda: (_set("GLOBAL", 2.0), compute.cache_clear()))

    def numpy_array() -> Way:
        holder = {"weight": numpy.ones(())}
        return Way(lambda: torch.from_numpy(holder["weight"]), lambda: holder.update(weight=numpy.full((), 2.0)), False)

    def attribute(name: str, value: Any, read: Callable[[Settings], Any]) -> Callable[[], Way]:
        def make() -> Way:
            settings = Settings()
            return Way(lambda: read(settings), lambda: setattr(settings, name, value))

        return make

    def both(read: Callable[[], Any], change: Callable[[], Any], replays: bool | None = True) -> Callable[[], Way]:
        return lambda: Way(read, change, replays)

    return {
        "a global": both(lambda: GLOBAL, lambda: _set("GLOBAL", 2.0)),
        "a global tensor, written": both(lambda: TENSOR, lambda: TENSOR.fill_(2.0)),
        "an array of NumPy": numpy_array,
        "an error that is caught": both(lambda: _caught(), lambda: TABLE.pop("a", None)),
        "a closure": closure,
        "a counter": counter,
        "an attribute": attribute("value", 2.0, lambda settings: settings.value),
        "an attribute of a class": both(lambda: Settings.scale, lambda: setattr(Settings, "scale", 2.0)),
        "a flag": attribute("on", True, lambda settings: 2.0 if settings.on else 1.0),
        "a default of an argument": both(lambda: with_default(), lambda: setattr(with_default, "__defaults__", (2.0,))),
        "a function in an object": replaced_function,
        "a cache": cached,
        "a print": both(lambda: print(end="") or 1.0, lambda: None, False),
        "the default dtype": both(
            lambda: 2.0 if torch.get_default_dtype() == torch.float64 else 1.0,
            lambda: torch.set_default_dtype(torch.float64),
        ),
        "whether gradients are on": both(lambda: 1.0 if torch.is_grad_enabled() else 2.0, lambda: None),
        "the number of threads": both(
            lambda: float(torch.get_num_threads()), lambda: torch.set_num_threads(3 - torch.get_num_threads()), None
        ),
        "whether a compiler traces": both(lambda: 2.0 if torch.compiler.is_compiling() else 1.0, lambda: None),
    }


WAYS = _ways()


@pytest.fixture
def restored() -> Iterator[None]:
    """What ways change is as before afterwards."""
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    _set("GLOBAL", 1.0)
    Settings.scale = 1.0
    TABLE.update(a=1.0, b=1.0)
    with_default.__defaults__ = (1.0,)
    TENSOR.fill_(1.0)
    torch.set_default_dtype(default)
    torch.set_num_threads(threads)


M = 2


def _line() -> nn.Module:
    return nn.Linear(3, 2)


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _state(step: hfta.step.TrainStep, make: Callable[[], nn.Module] = _line, count: int = M) -> hfta.step.TrainState:
    return step.init(*hfta.init_params(make, range(count)), seeds=range(count))


def _pair(
    loss_fn: Any = _square, make: Callable[[], nn.Module] = _line, optimizer: Any = None, count: int = M, **options: Any
) -> tuple[hfta.step.TrainStep, hfta.step.TrainStep, hfta.step.TrainState]:
    """A step that is replayed, one that is not, and a state of both."""
    optimizer = optimizer or hfta.adam(lr=[0.01 * (i + 1) for i in range(count)])
    step, plain = (hfta.make_train_step(make(), loss_fn, optimizer, replay=on, **options) for on in (True, None))
    return step, plain, _state(step, make, count)


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan()) for x, y in pairs)


def _alike(step: Any, plain: Any, state: hfta.step.TrainState, batches: Iterable[Any]) -> list[str]:
    """Both steps come to the same bits with every batch; how the calls of the first one ran."""
    a, b = (optree.tree_map(torch.clone, state) for _ in range(2))
    seen = []
    for x in batches:
        (a, reported), (b, expected) = step(a, x), plain(b, x)
        seen.append(step.status)
        assert _equal((a, reported), (b, expected)), seen
    return seen


@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("name", WAYS)
def test_what_functions_read_from_python(name: str, restored: None) -> None:
    # What two loss functions read in turn must be the same, so each array has a way of its own.
    way, other = WAYS[name](), WAYS[name]()
    model = nn.Linear(3, 1, dtype=torch.float64)

    def loss_of(way: Way) -> Callable[[nn.Module, Tensor], Tensor]:
        read = way.read
        return lambda model, x: (model(x) * read()).square().mean()

    def batches() -> Iterator[Tensor]:
        for number in range(12):
            if number == 7:
                way.change()
                if other.change.__closure__:
                    other.change()
            yield torch.randn(M, 4, 3, dtype=torch.float64)

    step = hfta.make_train_step(model, loss_of(way), hfta.sgd(lr=0.01), replay=True)
    plain = hfta.make_train_step(model, loss_of(other), hfta.sgd(lr=0.01))
    seen = _alike(step, plain, _state(step, lambda: nn.Linear(3, 1, dtype=torch.float64)), batches())
    if way.replays is not None:
        assert any(status.startswith("replayed") for status in seen) == way.replays, seen


class Net(nn.Module):
    """Convolution, norm, dropout, and a tensor that is made and written."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.cell = nn.LSTM(4, 4, batch_first=True) if recurrent else None
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.conv(x)))
        if self.cell is not None:
            y = self.cell(y.transpose(1, 2))[0].transpose(1, 2)
        total = torch.zeros(x.shape[0], 4)
        total += y.mean(-1) * torch.rand(())
        return self.head(self.drop(total))


def net_loss(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y), {"accuracy": (out.argmax(-1) == y).float().mean()}


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one by one": {"chunk_size": 1},
    "in pairs": {"chunk_size": 2},
    "written in place": {"donate": True},
    "in bfloat16": {"autocast": torch.bfloat16},
    "with loss scales": {"loss_scale": hfta.step.LossScale(growth_interval=3)},
    "with less kept": {"save": "less"},
    "with checkpoints": {"checkpoint": ["conv"]},
    "failures freeze": {"nonfinite": "freeze"},
    "of one batch": {"batch_dims": None},
    "with a recurrent layer": {},
}


@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_the_eager_step(name: str, count: int) -> None:
    options, make = OPTIONS[name], functools.partial(Net, "recurrent" in name)
    members = () if "batch_dims" in options else (count,)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(14):
            torch.manual_seed(number)
            # Every fourth batch is shorter, and one member of the eleventh has failed.
            rows = 3 if number % 4 == 3 else 5
            batch = torch.randn(*members, rows, 3, 6), torch.randint(0, 2, (*members, rows))
            if number == 11:
                batch[0][0] = torch.nan
            yield batch

    step, plain, state = _pair(net_loss, make, hfta.adamw(lr=[0.01] * count), count, **options)
    seen = _alike(step, plain, state, batches())
    assert seen[-1].startswith("replayed"), seen
    assert plain.status == "eager: not asked to be replayed"


class Viewed(nn.Module):
    """PyTorch's recurrent layers turn their output in place, if they run for a single member."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        y = y * 2
        return y.unsqueeze_(0).transpose_(0, 2).squeeze_(2)


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_that_become_other_views_in_place(count: int) -> None:
    seen = _alike(*_pair(make=Viewed, count=count), (torch.randn(count, 2, 5, 3) for _ in range(8)))
    assert seen[-1].startswith("replayed")


def test_a_variable_of_a_script_may_have_the_name_of_an_attribute_or_a_key() -> None:
    script: dict[str, Any] = {"step": 0, "x": 0}
    exec("def loss_fn(model, batch):\n    return (model.step(batch['x']) ** 2).mean()", script)
    model = nn.ModuleDict({"step": nn.Linear(3, 1)})
    make = hfta.make_train_step(model, script["loss_fn"], hfta.sgd(lr=0.1), replay=True)
    state = make.init(*hfta.stack_params([model] * M), seeds=range(M))
    for number in range(8):
        script["step"], script["x"] = number, torch.randn(M, 2, 3)
        state, _ = make(state, {"x": script["x"]})
    assert make.status.startswith("replayed")


def test_tensors_made_of_numbers_are_made_once_unless_someone_writes_them() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        total = torch.zeros(()).add_(y.mean())
        kept, given, chosen = torch.zeros(2), torch.ones(2), y[torch.tensor([0, 0, 2])]
        kept[0] = total + chosen.sum()
        view = given.unsqueeze(0)
        return (y - torch.full((3,), 0.5)).pow(2).mean() + kept.sum(), {"given": view, "twice": y.t().t().detach()}

    step, eager, state = _pair(loss_fn, lambda: nn.Linear(4, 3))
    batch, expected = torch.arange(24.0).reshape(2, 3, 4) / 24, state
    for _ in range(8):
        (expected, right), (state, metrics) = eager(expected, batch), step(state, batch)
        assert _equal((expected, right), (state, metrics))
        metrics["given"].zero_()
        metrics["twice"].zero_()
    assert "replayed" in step._replay.status
    assert {"aten.full.default", "aten.ones_like.default"}.isdisjoint(str(call.operator) for call in _tape(step).calls)


def test_what_is_made_where_a_written_tensor_was_is_not_written() -> None:
    sizes, x, again = torch.ones(4), torch.ones(4), 0
    with Recorder([sizes, x], fixed=[0]) as recorder:
        for _ in range(50):
            written = (x * 2).add_(1)
            place = storage_number(written)
            assert not recorder.is_fixed(written)
            del written
            made = sizes.clone()
            again += storage_number(made) == place
            assert recorder.is_fixed(made.view(2, 2))
    assert again


def test_a_record_holds_no_state() -> None:
    step, _, state = _pair(optimizer=hfta.sgd(lr=0.1))
    held = []
    for _ in range(5):
        state, _ = step(state, torch.ones(M, 4, 3))
        held.append(weakref.ref(state.params["weight"]))
    assert step.status.startswith("replayed")
    del state
    gc.collect()
    assert [one() for one in held] == [None] * 5


def _tape(step: Any) -> Any:
    """The tape of what a step decides."""
    (shape,) = step._replay._shapes.values()
    return shape.records[0]._first


def _by_global() -> hfta.schedules.Schedule:
    return hfta.schedules.Schedule({"value": 0.1}, lambda count, value: value * SETTINGS.value)


UPDATES: dict[str, tuple[Callable[[], Any], bool]] = {
    "a schedule": (lambda: hfta.adamw(lr=hfta.schedules.cosine([0.1, 0.2], T_max=9), weight_decay=0.1), True),
    "a chain": (lambda: hfta.chain(hfta.clip_grad_norm([0.1, 1.0]), hfta.sgd(lr=0.1, momentum=0.9)), True),
    "a schedule that reads a global": (lambda: hfta.sgd(lr=_by_global()), False),
    "one in a chain": (lambda: hfta.chain(hfta.clip_grad_norm(1.0), hfta.adam(lr=_by_global())), False),
}
"""Optimizers, and whether their updates are replayed, too."""


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, is_replayed = UPDATES[name]
    step, plain, a = _pair(optimizer=make())
    b, calls, finish = a, [], step.finish
    monkeypatch.setattr(step, "finish", lambda *args, **options: calls.append(0) or finish(*args, **options))
    for number in range(14):
        monkeypatch.setattr(SETTINGS, "value", 1.0 if number < 8 else 3.0)
        if number == 12:
            a, b = (state._replace(active=torch.tensor([True, False])) for state in (a, b))
        x = torch.randn(M, 4, 3)
        before = len(calls)
        (a, reported), (b, expected) = step(a, x), plain(b, x)
        assert _equal((a, reported), (b, expected)), (number, step.status)
        if 6 <= number < 12:
            assert (len(calls) == before) == is_replayed, number
    assert step.status.startswith("replayed"), step.status


def _reporting(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean(), {"weight": model.weight, "mean": model.weight.mean()}


OWNED: dict[str, tuple[Callable[[], Any], Any, bool]] = {
    "sgd": (lambda: hfta.sgd(lr=[0.1, 0.2]), _square, True),
    "adam": (lambda: hfta.adam(lr=[0.1, 0.2]), _square, True),
    "a chain": (lambda: hfta.chain(hfta.clip_grad_norm([0.1, 1.0]), hfta.sgd(lr=0.1, momentum=0.9)), _square, True),
    "not the last part": (lambda: hfta.chain(hfta.sgd(lr=0.1), hfta.add_decayed_weights(0.1)), _square, False),
    "updates now and then": (lambda: hfta.accumulate(hfta.sgd(lr=0.1, momentum=0.9), 2), _square, False),
    "a metric that is a parameter": (lambda: hfta.sgd(lr=[0.1, 0.2]), _reporting, False),
}
"""Optimizers, the loss, and whether the parameters of a state are overwritten that nobody else holds."""


@pytest.mark.parametrize("name", OWNED)
def test_what_nobody_else_holds_is_overwritten_and_nothing_else(name: str) -> None:
    make, loss_fn, is_overwritten = OWNED[name]
    batches = [torch.randn(M, 4, 3, dtype=torch.float64) for _ in range(6)]
    step, plain = (
        hfta.make_train_step(nn.Linear(3, 2, dtype=torch.float64), loss_fn, make(), replay=on) for on in (None, False)
    )
    start = _state(step, lambda: nn.Linear(3, 2, dtype=torch.float64))
    seen = [(start, optree.tree_map(torch.clone, start))]
    results = [
        hfta.fit(
            one, start, batches, epochs=3, progress=False,
            callbacks=[lambda state, history: seen.append((state, optree.tree_map(torch.clone, state)))],
        )
        for one in (step, plain)
    ]  # fmt: skip
    assert step.status.startswith("replayed")
    assert _equal(results[0].state, results[1].state)
    assert all(_equal(a, b) for a, b in zip(*(result.history.epochs for result in results), strict=True))
    assert len(seen) == 7 and all(_equal(state, copy) for state, copy in seen)
    # A call that owns its state overwrites it, and any other leaves it as it is.
    state = optree.tree_map(torch.clone, start)
    for owned in (False, True):
        after, reported = step(state, batches[0], owned=owned)
        expected = plain(start, batches[0])
        assert _equal((after, reported), expected)
        assert (after.params["weight"].data_ptr() == state.params["weight"].data_ptr()) == (owned and is_overwritten)
        assert _equal(state, start) != (owned and is_overwritten)


def test_what_the_step_runs_in() -> None:
    step, _, state = _pair()
    x = torch.randn(M, 4, 3)
    for _ in range(6):
        state, _ = step(state, x)
    assert step.status.startswith("replayed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            step(state, x)
    assert step.status == "eager: a context around the step observes or changes operators"
    hfta.rules.explain(step, state, x)
    assert step.status == "eager: a context around the step observes or changes operators"
    with hfta.rules.override(linear="loop"):
        step(state, x)
        assert step.status == "eager: a record has not paid yet"
    step(state, x)
    assert step.status.startswith("replayed")
    for context in (BaseTorchFunctionMode(), BaseTorchDispatchMode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            step(state, x)
            assert step.status == "eager: a context around the step observes or changes operators"
    with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
        step(state, x)
    step(state, x)
    assert step.status.startswith("replayed")


def test_what_tensors_are_like() -> None:
    """Whatever a tensor is like but its values leads to another record, after calls with tensors of the first kind."""
    step, eager, state = _pair()
    x = torch.randn(M, 4, 3)
    for _ in range(6):
        state, _ = step(state, x)
    weight = state.params["weight"]
    others = {
        "strides": (state, x.transpose(1, 2).contiguous().transpose(1, 2)),
        "a shape": (state, x[:, :2]),
        "an order of weights": (_with_weight(state, weight.transpose(1, 2).contiguous().transpose(1, 2)), x),
        "requires_grad": (_with_weight(state, weight.clone().requires_grad_()), x),
        "a parameter": (_with_weight(state, nn.Parameter(weight.clone())), x),
    }
    for name, inputs in others.items():
        step(state, x)
        assert step.status.startswith("replayed"), name
        assert _equal(step(*inputs), eager(*inputs)), name
        assert step.status == "eager: a record has not paid yet", name


def _with_weight(state: Any, weight: Tensor) -> Any:
    return state._replace(params={**state.params, "weight": weight})


def test_refusals_say_why() -> None:
    def statuses(loss_fn: Any, batches: Any, **options: Any) -> str:
        step, _, state = _pair(loss_fn, **options)
        for batch in batches:
            state, _ = step(state, batch)
        return step.status

    x = torch.randn(M, 4, 3)
    total = torch.zeros(())

    def writing(model: nn.Module, x: Tensor) -> Tensor:
        total.add_(1)
        return model(x).square().mean() * total

    def reading(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2 if float(x.sum()) > 0 else 1)

    assert statuses(writing, [x] * 6).startswith("eager: aten.")
    assert statuses(reading, [x] * 6, chunk_size=1).startswith("eager: ")
    shapes = [torch.randn(M, rows, 3) for rows in range(1, 12)]
    assert "more than 8 shapes" in statuses(_square, shapes)
    with pytest.raises(ValueError, match="replay is 'yes'; it must be None, True or False"):
        hfta.make_train_step(_line(), reading, hfta.sgd(lr=0.1), replay="yes")  # type: ignore[arg-type]


READS: dict[str, Callable[[Tensor], float]] = {
    "numpy": lambda x: float(x.numpy()[0, 0]),
    "tolist": lambda x: x.tolist()[0][0],
    "asarray": lambda x: float(numpy.asarray(x)[0, 0]),
}


@pytest.mark.parametrize("name", READS)
def test_values_that_are_read_past_operators(name: str) -> None:
    pair = _pair(lambda model, x: (model(x) * READS[name](x)).square().mean(), batch_dims=None)
    # The first batches begin with the same number.
    batches = (torch.cat([torch.full((1, 3), float(number > 3)), torch.randn(3, 3)]) for number in range(6))
    assert _alike(*pair, batches)[-1] == "eager: it reads the values of a tensor"


@pytest.mark.parametrize("rows", [(4, 4, 4, 4, 4, 4), (4, 2, 4, 2, 4, 2)])
@pytest.mark.parametrize("memory", ["its own", "the same"])
def test_records_are_checked_against_calls_of_their_kind(rows: tuple[int, ...], memory: str) -> None:
    whole = torch.zeros(M, 4, 3)

    def batches() -> Iterator[Tensor]:
        for count in rows:
            # A loader may fill one buffer again and again: then the call before cannot be repeated.
            x = whole[:, :count] if memory == "the same" else torch.zeros(M, count, 3)
            yield x.copy_(torch.randn(M, count, 3))

    replayed = [status.startswith("replayed") for status in _alike(*_pair(), batches())]
    # One call more where the record is compared with the next one.
    first = 3 if memory == "the same" else 2
    assert replayed == [call >= (first if rows[1] == 4 else 6) for call in range(6)]


def test_what_gives_other_values_at_each_call_is_noticed() -> None:
    step, _, state = _pair(lambda model, x: (model(x) * (time.perf_counter() % 1.0)).square().mean(), verify=False)
    for _ in range(4):
        state, _ = step(state, torch.randn(M, 4, 3))
    assert step.status.startswith("eager: its record gives other values than the functions")


def test_a_value_that_changes_every_epoch_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(replay, "_STEPS", 4)
    weight = [1.0]

    def batches() -> Iterator[Tensor]:
        for epoch in range(3):
            weight[0] = 1.0 / (1 + epoch)
            yield from (torch.randn(M, 4, 3) for _ in range(20))

    seen = _alike(*_pair(lambda model, x: weight[0] * model(x).square().mean()), batches())
    assert all(status.startswith("replayed") for status in seen[19::20]), seen


def test_whatever_keeps_a_step_from_being_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise KeyError("unknown")

    monkeypatch.setattr(replay, "reached_by", failing)
    assert _alike(*_pair(), (torch.randn(M, 4, 3) for _ in range(6)))[-1] == "eager: KeyError"


def test_fit_replays_and_goes_on_to_the_same_bits(tmp_path: Any) -> None:
    data = torch.randn(40, 3), torch.randint(0, 2, (40,))

    def run(replay: bool | None, epochs: int, resume: Any = None) -> tuple[Any, str]:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))

        step = hfta.make_train_step(make(), net_loss, hfta.adam(lr=[0.1, 0.2]), replay=replay)
        loader = hfta.ArrayLoader(data, 4, seeds=[0, 1])
        state, history = hfta.fit(step, _state(step, make), loader, epochs=epochs, progress=False, resume=resume)
        assert history.status == step.replayed().status
        return (state, history["loss"]), history.status

    whole, status = run(None, 3)
    assert status.startswith("replayed")
    plain, status = run(False, 3)
    assert status == "eager: not asked to be replayed"
    assert _equal(whole, plain)
    run(None, 1, tmp_path / "run")
    assert _equal(run(None, 3, tmp_path / "run")[0], plain)


def test_what_inputs_of_fixed_values_make_is_made_once_while_it_is_not_large() -> None:
    x, size = torch.ones(8), torch.tensor([3])
    for length, names in ((8, ["mul"]), (2**17, ["arange", "lt", "where", "sum", "mul"])):
        with Recorder([x, size], fixed=[1]) as recorder:
            result = x * torch.where(torch.arange(length) < size, 1.0, 0.0).sum()
        tape = Tape(recorder, 2, [result])
        assert [str(call.operator).split(".")[1] for call in tape.calls if "scalar_tensor" not in str(call)] == names
        for _ in range(2):
            assert tape.rehearse([x, size])[0].tolist() == [3.0] * 8 == tape([x, size])[0].tolist()


def test_fixed_values_that_an_operator_writes_or_draws_from_are_not_made_once() -> None:
    x, size = torch.ones(4), torch.tensor([0.5, 0.5, 0.5, 0.5])
    with Recorder([x, size], fixed=[1]) as recorder:
        before = size + 1
        first = before * 1
        before.add_(x)
        result = first + before * 1 + torch.bernoulli(size) * 0
    tape = Tape(recorder, 2, [result])
    assert {"add_", "bernoulli"} <= {str(call.operator).split(".")[1] for call in tape.calls}
    for value in (x, x + 1):
        assert (
            tape.rehearse([value, size])[0].tolist() == (1.5 + 1.5 + value).tolist() == tape([value, size])[0].tolist()
        )
