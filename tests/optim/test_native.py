"""Kernels in C: what they compute, where they are kept, and what happens where there are none."""

from __future__ import annotations

import pathlib
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import hfta_func as hfta
from cases import OPTIMIZERS, SHAPES, OptimizerCase, ours
from hfta_func import random
from hfta_func._kernels import native, noise
from hfta_func.optim import _kernel
from processes import output
from ways import loss

SOURCE = native.shared_out(
    "", "double *x", "for (int64_t i = low; i < high; i++) x[model * sizes[0] + i] = 10 * model + i"
)

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache."""
    monkeypatch.setenv("HFTA_FUNC_CACHE", str(tmp_path / "cache"))
    native.load.cache_clear()
    native.program.cache_clear()
    return tmp_path / "cache"


def _fill() -> list[list[float]]:
    x = torch.zeros(2, 3, dtype=torch.float64)
    run = native.program(SOURCE)
    assert run is not None
    run([3], 2, [x])
    return x.tolist()


RIGHT = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


def _again() -> list[list[float]]:
    native.load.cache_clear()
    native.program.cache_clear()
    return _fill()


def test_a_kernel_is_compiled_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fill() == RIGHT
    (kept,) = folder.iterdir()
    monkeypatch.setattr(native, "_build", lambda *args: pytest.fail("compiled again"))
    assert _again() == RIGHT
    assert [*folder.iterdir()] == [kept]


@pytest.mark.parametrize("harm", ["half", "empty", "other", "writable"])
def test_a_kernel_that_is_damaged_or_somebody_else_s_is_made_again(folder: pathlib.Path, harm: str) -> None:
    assert _fill() == RIGHT
    (kept,) = folder.iterdir()
    content = kept.read_bytes()
    # A new file, as the old one is in use.
    kept.unlink()
    kept.write_bytes({"half": content[: len(content) // 2], "empty": b"", "other": b"x" * 500}.get(harm, content))
    kept.chmod(0o666 if harm == "writable" else 0o700)
    before = kept.stat().st_ino
    assert _again() == RIGHT
    assert kept.read_bytes()[:-32] and kept.stat().st_ino != before and not kept.stat().st_mode & 0o022


def test_a_cache_that_cannot_be_written_costs_only_time(folder: pathlib.Path) -> None:
    folder.write_text("not a folder")
    assert _fill() == RIGHT


def test_a_full_disk_costs_only_time(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    assert _fill() == RIGHT
    assert not [path for path in folder.iterdir() if path.suffix == ".so"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_without_a_compiler_operators_do_the_work(compiler: str, tmp_path: pathlib.Path) -> None:
    program = """
import torch, hfta_func as hfta
from hfta_func._kernels import native, noise
models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)) for _ in range(2)]
step = hfta.make_train_step(models[0], lambda model, x: model(x).square().mean(), hfta.adam(lr=[0.1, 0.2]), batch_dims=None)
state = step.init(*hfta.stack_params(models), seeds=[1, 2])
state, metrics = step(state, torch.ones(3, 4))
print(bool(metrics["finite"].all()), native.program(noise._WORDS))
"""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    own = {"HFTA_FUNC_NATIVE": "0"} if compiler == "none" else {"CC": str(broken), "HFTA_FUNC_CACHE": str(tmp_path)}
    assert output(program, **own) == "True None\n"


def test_threads_share_members_and_leaves(folder: pathlib.Path, set_threads: Any) -> None:
    source = native.shared_out(
        "", "int64_t **out", "for (int64_t i = low; i < high; i++) out[leaf][model * sizes[leaf] + i] += 1"
    )
    run = native.program(source)
    assert run is not None
    for threads in (1, 2, 3, 7):
        set_threads(threads)
        # Odd sizes, one of them nothing, more than one thread does alone.
        leaves = [torch.zeros(5, size, dtype=torch.int64) for size in (1, 0, 9973, 3)]
        run([leaf.shape[1] for leaf in leaves], 5, [leaves])
        assert all((leaf == 1).all() for leaf in leaves)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OPTIMIZERS])
def test_every_rule_for_single_elements_has_a_kernel(case: OptimizerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(_kernel, "_run", lambda *args: ran.append(args[0]))
    optimizer, params = ours(case), {name: torch.ones(3, *shape) for name, shape in SHAPES.items()}
    optimizer.update(params, optimizer.init(params), params)
    assert len(ran) == (0 if case.name in ("lamb", "adafactor") else 1)


def test_what_a_kernel_cannot_take_operators_do() -> None:
    def found(params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer = hfta.adamw(lr=[0.1, 0.2], weight_decay=[0.0, 0.5])
        held = optree.tree_map(torch.clone, (params, optimizer.init(params)))
        for _ in range(3):
            hfta.update_(optimizer, {path: grad.clone() for path, grad in grads.items()}, held[1], held[0])
        return held[0]

    plain = {"a": torch.randn(2, 3, 4), "b": torch.randn(2, 3)}
    grads = {"a": torch.randn(2, 4, 3).mT, "b": torch.randn(2, 3)}
    other = {"a": plain["a"].mT.contiguous().mT, "b": plain["b"]}
    assert not other["a"].is_contiguous()
    for one, two in zip(found(plain, grads).values(), found(other, grads).values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_numbers_may_be_narrow() -> None:
    params = {"w": torch.ones(2, 3)}
    optimizer = hfta.adam(lr=[0.5, 0.25])
    state = optimizer.init(params)
    narrow = optree.tree_map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, state)
    found, expected = (optimizer.update({"w": torch.ones(2, 3)}, held, params)[0]["w"] for held in (narrow, state))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_autograd_notices_what_a_kernel_writes() -> None:
    params = {"w": torch.ones(2, 3)}
    weight = torch.ones(2, 3, requires_grad=True)
    product = (weight * params["w"]).sum()
    optimizer = hfta.sgd(lr=0.1)
    hfta.update_(optimizer, {"w": torch.ones(2, 3)}, optimizer.init(params), params)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_derivatives_through_an_update() -> None:
    grads, params = {"w": torch.ones(2, 3, requires_grad=True)}, {"w": torch.ones(2, 3)}
    optimizer = hfta.sgd(lr=[0.1, 0.2])
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    (found,) = torch.autograd.grad(updates["w"].sum(), [grads["w"]])
    torch.testing.assert_close(found, torch.tensor([-0.1, -0.2]).reshape(2, 1).expand(2, 3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_an_update_of_many_leaves_is_one_operator_of_a_graph(donate: bool, chained: bool) -> None:
    torch._dynamo.reset()
    # More leaves than a compiler gets one by one.
    models = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(_kernel.MAX_INLINE_LEAVES))).double() for _ in range(3)]
    optimizer = hfta.adamw(lr=[1e-3, 1e-2, 1e-1], weight_decay=[0.0, 0.1, 0.2])
    optimizer = hfta.chain(hfta.clip_grad_norm(1.0), optimizer) if chained else optimizer
    targets: list[str] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    step = hfta.make_train_step(models[0], loss, optimizer, donate=donate)
    run = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    eager, compiled = (step.init(*hfta.stack_params(models), seeds=[1, 2, 3]) for _ in range(2))
    for number in range(4):
        x = torch.randn(3, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        if number == 2:
            x[1, 0, 0] = torch.nan
        eager, reported = step(eager, x)
        compiled, other = run(compiled, x)
        assert reported["failure"].tolist() == other["failure"].tolist() == [0, 2 * (number == 2) and 1, 0]
        for one, two in zip(optree.tree_leaves(eager), optree.tree_leaves(compiled), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert "hfta_func.diagnose.default" in targets
    assert any(target.startswith("hfta_func.update") or "auto_functionalized" in target for target in targets)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (40_000,)])
def test_noise_is_that_of_operators(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = random.keys([0, 1, -(2**63), 2**63 - 1, 12345])

    def drawn() -> list[torch.Tensor]:
        each = torch.vmap(lambda key: random.bits(key, shape))(keys)
        streams = [part for one in random.streams(keys, 14, 5) for part in one[:2]]
        return [
            *(random.bits(keys, shape), random.bernoulli(keys, 0.3, shape), random.bernoulli(keys, 0.0, shape)),
            *(random.bernoulli(keys, 1.0, shape), random.normal(keys, shape), random.fold_in(keys, 7), each, *streams),
        ]

    assert noise.is_fast(keys)
    fast = drawn()
    monkeypatch.setattr(noise, "is_fast", lambda key: False)
    assert all(torch.equal(one, two) for one, two in zip(fast, drawn(), strict=True))
