"""Random programs as arrays: each member against the same program alone, in training and evaluation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import optree
import pytest
import torch
from hypothesis import HealthCheck, given, reject, seed, settings
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.step import replay
from programs import FAMILIES, NAMES, Spec, in_python, inputs, loss, models, weighed

# What PyTorch says about some layers, to a model alone as well.
pytestmark = pytest.mark.filterwarnings("ignore")

M, STEPS, LRS = 3, 2, [0.1, 0.05, 0.2]
HOW = ("axes", "inside", "nested", "nested inside")
"""Other calls of ``hfta.vmap``: any model axes, gradients inside, arrays of arrays."""
REFUSED = (
    "into a tensor that all members share",
    "writes its input, and into a view that is a copy",
    "which one compiled program cannot",
    "branches on the value of a tensor",
    "has no setup_context, which PyTorch needs under",
)
"""What an array refuses that a model alone does: a tensor that all members share has no place for a value per member.

One compiled program and ``hfta.vmap`` alone have no place for members that part, and an array runs both sides of
``torch.cond``.
"""

Trace = dict[str, Tensor]
"""What is compared, by name."""


class Discarded(Exception):
    """A program that tests nothing: PyTorch refuses it for one model, an array by design, or rounding decides its result."""


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Records are made at the fourth call, whatever they cost.
    monkeypatch.setattr(replay, "_STEPS", 0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def alone(model: nn.Module, spec: Spec, member: int, nudge: float = 0.0, autocast: torch.dtype | None = None) -> Trace:
    """One model trained and evaluated by PyTorch; ``nudge`` changes its inputs a little."""
    model, trace, held = copy.deepcopy(model), {}, {}
    optimizer = torch.optim.SGD(model.parameters(), lr=LRS[member])
    for step in range(STEPS + 1):
        if step == STEPS:
            # Evaluation leaves an array as it is.
            held = {name: y.clone() for name, y in (*model.named_parameters(), *model.named_buffers())}
        model.train(step < STEPS)
        lower = torch.autocast("cpu", autocast, enabled=autocast is not None)
        with torch.set_grad_enabled(step < STEPS), lower, in_python():
            value, outputs = loss(model, dict(zip(NAMES, inputs(spec, member, step, nudge), strict=True)))
        if step < STEPS:
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        trace |= {f"{name} {step}": y for name, y in (outputs | {"loss": value}).items()}
    return {name: y.detach() for name, y in (trace | held).items()}


def array(
    made: Sequence[nn.Module],
    spec: Spec,
    members: Sequence[int],
    chunk_size: int | None = None,
    compiled: bool = False,
    nudge: float = 0.0,
    **options: Any,
) -> Trace:
    """Some members trained and evaluated as an array."""
    dims = dict(zip(NAMES, spec.dims, strict=True))

    def metrics(model: Any, batch: Any) -> dict[str, Tensor]:
        value, outputs = loss(model, batch)
        return outputs | {"loss": value}

    optimizer = hfta.sgd(lr=[LRS[member] for member in members])
    options |= {"batch_dims": dims, "chunk_size": chunk_size}
    train: Any = hfta.make_train_step(made[0], loss, optimizer, **options)
    # Buffers that are written in eval mode are dropped here.
    evaluate: Any = hfta.make_eval_step(made[0], metrics, **options).that_keeps(dims)
    state = train.init(*hfta.stack_params([made[member] for member in members]), seeds=list(members))
    if compiled:
        torch._dynamo.reset()
        train, evaluate = (torch.compile(one, fullgraph=True, backend="aot_eager") for one in (train, evaluate))
    trace: Trace = {}
    for step in range(STEPS + 1):
        columns = zip(*(inputs(spec, member, step, nudge) for member in members), strict=True)
        parts = [own[0] if dim is None else torch.stack(own) for dim, own in zip(spec.dims, columns, strict=True)]
        batch = dict(zip(NAMES, parts, strict=True))
        given = copy.deepcopy((state, batch))
        if step < STEPS:
            after, found = train(state, batch)
        else:
            after, found = state, evaluate(state, batch)
        torch.testing.assert_close((state, batch), given, rtol=0, atol=0, msg="a step wrote what it was given")
        state = after
        trace |= {f"{name} {step}": y for name, y in found.items()}
    return trace | state.params | state.buffers


def differences(got: Trace, expected: Trace) -> dict[str, float]:
    """How far what is expected is missed, in units of its size; empty if nothing is."""
    found = {}
    for name, y in expected.items():
        if got[name].shape != y.shape or got[name].dtype != y.dtype:
            found[name] = float("inf")
        elif not torch.allclose(got[name], y, rtol=1e-9, atol=1e-10):
            found[name] = float((got[name].double() - y.double()).abs().max() / (1 + y.double().abs().max()))
    return found


def stacked(traces: Sequence[Trace]) -> Trace:
    return {name: torch.stack([trace[name] for trace in traces]) for name in traces[0]}


def oracle(run: Callable[[], Trace]) -> Trace:
    """What PyTorch makes of a program, or that it makes nothing of it."""
    try:
        with in_python():
            trace = run()
    except (RuntimeError, ValueError, IndexError) as error:
        raise Discarded(f"alone: {error}") from error
    if not all(y.isfinite().all() and y.abs().max() < 1e6 for y in trace.values() if y.numel()):
        raise Discarded("not finite")
    return trace


def accepted(run: Callable[[], Trace]) -> Trace:
    """What an array makes of a program, unless it is refused by design."""
    try:
        return run()
    except RuntimeError as error:
        if any(text in str(error) for text in REFUSED):
            raise Discarded(f"refused: {error}") from error
        raise


def compare(run: Callable[[], Trace], expected: Trace, nudged: Callable[[], Trace]) -> None:
    """An array against what is expected."""
    found = differences(accepted(run), expected)
    # Rounding may decide, for example, which of two numbers is larger.
    if found and differences(nudged(), expected):
        raise Discarded("ill-conditioned")
    assert not found, f"{found}"


def check(spec: Spec, autocast: torch.dtype | None = None) -> None:
    """Without noise, against PyTorch."""
    made = models(spec, M)

    def expected(nudge: float = 0.0) -> Trace:
        return stacked([alone(model, spec, member, nudge, autocast) for member, model in enumerate(made)])

    compare(lambda: array(made, spec, range(M), autocast=autocast), oracle(expected), lambda: expected(1e-13))


def runs_alone(made: Sequence[nn.Module], spec: Spec) -> None:
    """Whether PyTorch makes something of a program for every member: they may take other branches."""
    for member, model in enumerate(made):
        oracle(lambda: alone(model, spec, member))  # noqa: B023


def check_noise(spec: Spec) -> None:
    """Arrays of one, groups, and all members."""
    made = models(spec, M)
    runs_alone(made, spec)

    def expected(nudge: float = 0.0) -> Trace:
        alone = [array(made, spec, [member], nudge=nudge) for member in range(M)]
        return {name: torch.cat([trace[name] for trace in alone]) for name in alone[0]}

    trace = accepted(expected)
    for chunk_size in (None, 2, 1):
        compare(lambda size=chunk_size: array(made, spec, range(M), size), trace, lambda: expected(1e-13))


def check_compiled(spec: Spec) -> None:
    """One graph, noise included, against the array as it is."""
    made = models(spec, M)
    runs_alone(made, spec)
    try:
        trace = array(made, spec, range(M))
    except RuntimeError as error:
        raise Discarded(f"refused: {error}") from error
    compare(lambda: array(made, spec, range(M), compiled=True), trace, lambda: array(made, spec, range(M), nudge=1e-13))


def check_replayed(spec: Spec) -> None:
    """Recorded operators on other batches, to the bit; noise included."""
    made = models(spec, M)
    runs_alone(made, spec)
    dims = dict(zip(NAMES, spec.dims, strict=True))
    make = functools.partial(hfta.make_train_step, made[0], loss, hfta.sgd(lr=LRS), batch_dims=dims)
    eager, replayed = make(replay=False), make(replay=True)
    a = b = eager.init(*hfta.stack_params(made), seeds=range(M))
    statuses = []
    for step in range(9):
        columns = zip(*(inputs(spec, member, step) for member in range(M)), strict=True)
        parts = [own[0] if dim is None else torch.stack(own) for dim, own in zip(spec.dims, columns, strict=True)]
        batch = dict(zip(NAMES, parts, strict=True))
        (a, expected), (b, found) = accepted(lambda: eager(a, batch)), replayed(b, batch)  # noqa: B023
        statuses.append(replayed.status)
        for one, other in zip(optree.tree_leaves((a, expected)), optree.tree_leaves((b, found)), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7)), (step, statuses)
    if not statuses[-1].startswith("replayed"):
        raise Discarded(statuses[-1])


class Leaf:
    """A tensor of members in one or two model axes, which are anywhere; some are shared by all members of one axis."""

    def __init__(self, members: Sequence[Tensor], own: tuple[bool, ...], number: int):
        self.grid = torch.arange(len(members)).reshape(2, 2) if len(own) == 2 else torch.arange(len(members))
        # A member's value is that of the first that shares it.
        self.first = self.grid[tuple(slice(None) if one else slice(0, 1) for one in own)]
        value = torch.stack([members[i] for i in self.first.flatten()]).unflatten(0, self.first.shape)
        self.dims: list[int | None] = []
        for level, one in reversed(list(enumerate(own))):
            rank = value.dim() - level
            place = (number + level) % rank if one else None
            value = value.squeeze(level) if place is None else value.movedim(level, level + place)
            self.dims.insert(0, place)
        self.value = value.detach().clone(memory_format=torch.preserve_format)

    def member(self, members: Sequence[Tensor], index: int) -> Tensor:
        return members[int(self.first.expand(self.grid.shape).flatten()[index])]

    def back(self, x: Tensor) -> Tensor:
        """The members that differ, in front."""
        for level, place in enumerate(self.dims):
            x = x.unsqueeze(level) if place is None else x.movedim(level + place, level)
        return x.flatten(0, len(self.dims) - 1)

    def summed(self, grads: Sequence[Tensor]) -> Tensor:
        """The gradients of members, added where they share the value."""
        first = self.first.flatten().tolist()
        owners = self.first.expand(self.grid.shape).flatten().tolist()
        return torch.stack(
            [sum((g for g, i in zip(grads, owners, strict=True) if i == own), torch.zeros(())) for own in first]
        )


def check_vmap(spec: Spec, how: str) -> None:
    """``hfta.vmap`` of the program: outputs, buffers, gradients, and what it writes into its inputs."""
    nested, inside = "nested" in how, "inside" in how
    count, shape = (4, (2, 2)) if nested else (M, (M,))
    made = models(spec, count)
    apply = hfta.functional(made[0])
    trees = [({**dict(model.named_parameters())}, dict(model.named_buffers())) for model in made]
    names = [*trees[0][0], *trees[0][1], *NAMES]
    num_params = len(trees[0][0])
    columns: list[list[Tensor]] = [[tree[i][name].detach() for tree in trees] for i in range(2) for name in trees[0][i]]
    columns += list(map(list, zip(*(inputs(spec, member) for member in range(count)), strict=True)))
    shared = [False] * (len(names) - 3) + [dim is None for dim in spec.dims]
    leaves = []
    for number, (column, one) in enumerate(zip(columns, shared, strict=True)):
        own = (True,) * len(shape)
        if one:
            own = (False,) * len(shape)
        elif nested and number < num_params and number % 3:
            # Some parameters differ in one of the two levels only.
            own = (number % 3 == 1, number % 3 == 2)
        leaves.append(Leaf(column, own, number))

    def member(params: Sequence[Tensor], rest: Sequence[Tensor]) -> tuple[Tensor, Any]:
        tensors = dict(zip(names, (*params, *rest), strict=True))
        own = {name: tensors[name] for name in trees[0][0]}, {name: tensors[name] for name in trees[0][1]}
        (x, kept), new = apply(*own, *(tensors[name] for name in NAMES))
        last = own[0]["last"]
        # What has no model axis gets one in front: elsewhere PyTorch puts it wrongly.
        outputs = [y + 0 * last for y in (x, *kept)]
        return last * weighed(outputs), (outputs, [new[name] for name in trees[0][1]])

    ranks: list[list[int]] = []

    def alone(nudge: float = 0.0) -> Trace:
        traces = []
        for index in range(count):
            values = [leaf.member(column, index).clone() for leaf, column in zip(leaves, columns, strict=True)]
            values = [v * (1 + nudge) if name in ("x", "z") else v for name, v in zip(names, values, strict=True)]
            params, rest = [v.requires_grad_() for v in values[:num_params]], values[num_params:]
            if inside:
                grads, aux = torch.func.grad(member, has_aux=True)([p.detach() for p in params], rest)
            else:
                value, aux = member(params, rest)
                grads = torch.autograd.grad(value, params, materialize_grads=True)
            traces.append((grads, aux, rest[-3:]))
        ranks[:] = [[x.dim() for x in part] for part in traces[0][1]]
        trace: Trace = {}
        for i in range(num_params):
            column = [grads[i] for grads, _, _ in traces]
            trace[f"grad {names[i]}"] = torch.stack(column) if inside else leaves[i].summed(column)
        for kind, name in enumerate(("output", "buffer")):
            for i in range(len(traces[0][1][kind])):
                trace[f"{name} {i}"] = torch.stack([aux[kind][i].detach() for _, aux, _ in traces])
        for i in range(3):
            column = [written[i] for _, _, written in traces]
            trace[f"written {NAMES[i]}"] = torch.stack([column[int(j)] for j in leaves[i - 3].first.flatten()])
        return trace

    def array() -> Trace:
        params, rest = ([leaf.value for leaf in part] for part in (leaves[:num_params], leaves[num_params:]))
        rest = [v.clone() for v in rest]
        func: Any = torch.func.grad(member, has_aux=True) if inside else member
        for level in reversed(range(len(shape))):
            dims = [leaf.dims[level] for leaf in leaves]
            out_dims = [[number % (rank + 1) for number, rank in enumerate(part)] for part in ranks]
            first_out = [0] * num_params if inside else 0
            func = hfta.vmap(func, (dims[:num_params], dims[num_params:]), (first_out, tuple(out_dims)))
        leafs = [p.requires_grad_() for p in params]
        first, aux = func(leafs, rest)

        def front(x: Tensor, place: int = 0) -> Tensor:
            return (x.movedim(place, 0).movedim(place + 1, 1).flatten(0, 1) if nested else x.movedim(place, 0)).detach()

        if inside:
            grads = [front(g) for g in first]
        else:
            grads = torch.autograd.grad(first.sum(), leafs, materialize_grads=True)
            grads = [leaf.back(g) for leaf, g in zip(leaves, grads, strict=False)]
        trace = {f"grad {name}": g for name, g in zip(names, grads, strict=False)}
        for kind, name in enumerate(("output", "buffer")):
            trace |= {f"{name} {i}": front(y, i % (ranks[kind][i] + 1)) for i, y in enumerate(aux[kind])}
        return trace | {
            f"written {name}": leaf.back(v) for name, leaf, v in zip(NAMES, leaves[-3:], rest[-3:], strict=True)
        }

    compare(array, oracle(alone), lambda: alone(1e-13))


def words(*without: str) -> st.SearchStrategy[Spec]:
    """Specs of words of all families but some; writes, views and state come twice as often as the others."""
    families = [name for name in (*FAMILIES, "writes", "views", "state") if name not in without]
    word = st.sampled_from(families).flatmap(
        lambda family: st.tuples(st.sampled_from(list(FAMILIES[family])), st.integers(0, 63).map(str)).map(".".join)
    )
    dims = st.sampled_from([0, None])
    # Mapped, not built, so that a failure prints the spec.
    return st.tuples(
        st.lists(word, min_size=1, max_size=10).map(" ".join),
        st.sampled_from([(4,), (2, 3), (4, 3), (2, 3, 4), (6,), (2, 2, 3, 2), (1, 4), (3, 1, 2)]),
        st.tuples(dims, dims, dims),
    ).map(Spec._make)


def run_many(judge: Callable[[Spec], None], specs: st.SearchStrategy[Spec], count: int, start: int) -> None:
    """Judge ``count`` programs, and some more for those that are discarded."""
    judged = 0

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @seed(start)
    @given(specs)
    def run(spec: Spec) -> None:
        nonlocal judged
        try:
            judge(spec)
        except Discarded:
            reject()
        judged += 1

    run()
    assert judged >= count


NOISY = ("noise", "branches of noise")
PARTING = ("branches", "branches of noise")
JUDGES: dict[str, tuple[Callable[[Spec], None], tuple[str, ...]]] = {
    "alone": (check, NOISY),
    "autocast": (functools.partial(check, autocast=torch.bfloat16), NOISY),
    "noise": (check_noise, ()),
    # Functions are applied member by member, which reads values.
    "replayed": (check_replayed, (*PARTING, "functions")),
    "compiled": (check_compiled, PARTING),
    # PyTorch differentiates functions of old style outside of its transforms only, and the gradient of what members share is
    # added up before or after it is rounded to lower precision.
    **{how: (functools.partial(check_vmap, how=how), (*NOISY, *PARTING, "functions", "autocast")) for how in HOW},
}
MANY = [
    *(("alone", 240, part) for part in range(4)),
    ("autocast", 100, 0),
    *(("noise", 80, part) for part in range(3)),
    *(("replayed", 75, part) for part in range(4)),
    ("compiled", 10, 0),
    *((how, 120, 0) for how in HOW),
]
"""Which judge, how many programs, and where their generator starts."""
SOME = [
    ("alone", 12, 100),
    ("autocast", 2, 100),
    ("noise", 3, 100),
    ("replayed", 4, 100),
    *((how, 3, 100) for how in HOW),
]


@pytest.mark.exhaustive
@pytest.mark.soak(ids="alone-240-[123]|noise-80-[12]|compiled")
@pytest.mark.parametrize(("judge", "count", "start"), MANY)
def test_many_programs(judge: str, count: int, start: int) -> None:
    func, without = JUDGES[judge]
    run_many(func, words(*without), count, start)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(("judge", "count", "start"), SOME)
def test_some_programs(judge: str, count: int, start: int) -> None:
    func, without = JUDGES[judge]
    run_many(func, words(*without), count, start)


FOUND = [
    # A model writes the output of a recurrent layer, which the backward pass needs.
    *(
        ("alone", Spec(f"{kind} relu_.0"))
        for kind in ("rnn.2", "gru.2", "lstm.2", "lstm.35", "grucell.1", "lstmcell.1")
    ),
    ("compiled", Spec("lstm.32 relu_.29")),
    ("alone", Spec("grucell.38 unfold.3 put_.15")),
    ("alone", Spec("rnn.2 part.54 mul_.7")),
    # The same of attention without heads.
    ("alone", Spec("scale.1 sdpa.1 mul_.1")),
    # Gradients of tables with a padding index, inside two levels.
    ("nested", Spec("bias_.16 embedding.15")),
    # Operators that look at values, in gradients inside vmap.
    ("inside", Spec("onehot_ids.1")),
    # Gradients that nobody asked for, where members must lie apart.
    ("nested inside", Spec("ln.34 view_.63")),
    ("nested inside", Spec("bn0d.32 part_.57")),
    # Distances between rows that some members share.
    ("nested inside", Spec("mask_.37 cdist.6", dims=(None, 0, 0))),
]
"""Programs that once came out wrong, as small as they get."""


@pytest.mark.exhaustive(ids="compiled")
@pytest.mark.parametrize(("judge", "spec"), FOUND, ids=lambda value: getattr(value, "words", value))
def test_found(judge: str, spec: Spec) -> None:
    assert models(spec, 1)[0].words == spec.words.split(), "a word is left out"
    JUDGES[judge][0](spec)


def test_there_are_thousands() -> None:
    assert sum(count for _, count, _ in MANY) >= 2000
