"""L-BFGS beside the loop with closures: one ``torch.optim.LBFGS`` per member."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from hfta_func.errors import HyperparameterError
from hfta_func.step import Failure
from ways import seeded, start

pytestmark = pytest.mark.usefixtures("double")
M = 3
WOLFE = {"line_search_fn": "strong_wolfe"}
ROUGH = {**WOLFE, "tolerance_grad": [1e-2, 0, 0], "tolerance_change": [0, 1e-2, 1e-4]}


class Valley(nn.Module):
    """Rosenbrock's function, along which line searches bracket and zoom."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, target: Tensor) -> Tensor:
        steep = 20 * (self.x[1:] - self.x[:-1] ** 2) ** 2
        return (steep + (target - self.x[:-1]) ** 2).sum() + (self.scale - 2) ** 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def regression(model: nn.Module, batch: Any) -> Tensor:
    penalty = sum(param.square().sum() for param in model.parameters())
    return nn.functional.mse_loss(model(batch[0]), batch[1]) + 0.1 * penalty


def valley(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[2])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("noise", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def data(seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(30, 3, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True), torch.ones(())


def array(make: Any, loss_fn: Any, options: dict[str, Any], count: int = M, **how: Any) -> tuple[Any, Any]:
    return start(seeded(make, range(count)), loss_fn, hfta.lbfgs(**options), batch_dims=None, **how)


def closed(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, batch: Any) -> float:
    """A step of the loop, with its closure; returns the loss that it started from."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def per_member(options: dict[str, Any], member: int) -> dict[str, Any]:
    return {name: value[member] if isinstance(value, list) else value for name, value in options.items()}


def assert_alike(state: Any, models: list[nn.Module]) -> None:
    for member, model in enumerate(models):
        for path, value in [*model.named_parameters(), *model.named_buffers()]:
            held = {**state.params, **state.buffers}[path][member]
            torch.testing.assert_close(held, value.detach(), rtol=1e-10, atol=1e-10)


CASES: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "strong wolfe": (mlp, regression, WOLFE, 6),
    "long first steps": (mlp, regression, {**WOLFE, "lr": [30.0, 5.0, 100.0], "max_iter": 5}, 8),
    "few evaluations": (mlp, regression, {**WOLFE, "lr": [8.0, 1.0, 3.0], "max_eval": [3, 2, 5]}, 8),
    "one evaluation": (mlp, regression, {**WOLFE, "max_eval": 1}, 6),
    "short memory": (mlp, regression, {**WOLFE, "history_size": 2, "max_iter": [3, 8, 1]}, 4),
    "rough tolerances": (mlp, regression, ROUGH, 8),
    "fixed steps": (mlp, regression, {"lr": [0.3, 0.1, 0.5], "max_iter": 6}, 8),
    "fixed steps of rough tolerance": (mlp, regression, {"lr": 0.5, "tolerance_change": [1e-3, 1e-9, 1e-2]}, 8),
    "fixed steps, few evaluations": (mlp, regression, {"lr": 0.5, "max_eval": [1, 4, 9], "history_size": 1}, 4),
    "valley": (Valley, valley, WOLFE, 6),
    "valley, short memory": (Valley, valley, {**WOLFE, "history_size": 3, "lr": [1.0, 0.1, 4.0]}, 2),
    "buffers that move with every evaluation": (Noisy, regression, {**WOLFE, "lr": [1.0, 20.0, 0.1], "max_iter": 3}, 3),
}


@pytest.mark.parametrize("count", [1, M])
@pytest.mark.parametrize("case", CASES)
def test_members_are_separate_optimizers(case: str, count: int) -> None:
    make, loss_fn, options, steps = CASES[case]
    models, batch = seeded(make, range(count)), data()
    given = {name: value[:count] if isinstance(value, list) else value for name, value in options.items()}
    step, state = array(make, loss_fn, given, count)
    optimizers = [torch.optim.LBFGS(model.parameters(), **per_member(given, i)) for i, model in enumerate(models)]
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses = [closed(*each, loss_fn, batch) for each in zip(models, optimizers, strict=True)]
        torch.testing.assert_close(metrics["loss"], torch.tensor(losses), rtol=1e-11, atol=1e-11)
        assert_alike(state, models)
    kept = [optimizer.state[next(model.parameters())] for model, optimizer in zip(models, optimizers, strict=True)]
    for name in ("func_evals", "n_iter"):
        assert getattr(state.opt_state, name).tolist() == [each[name] for each in kept], name
    assert state.step.tolist() == state.opt_state.step.tolist() == [steps] * count


class Logarithm(nn.Module):
    """A loss that ends at zero, beyond which it is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(2) + 0.5)

    def forward(self) -> Tensor:
        return (3 * self.x - self.x.log()).sum()


def logarithm(model: nn.Module, batch: Any) -> Tensor:
    return model()


def test_a_line_search_steps_back_from_infinity() -> None:
    # The first lengths of members 1 and 2 leave the domain, where torch.optim ends with NaN.
    step, state = array(Logarithm, logarithm, {**WOLFE, "lr": [1.0, 50.0, 300.0]})
    for _ in range(4):
        state, metrics = step(state, data())
    assert metrics["finite"].all()
    torch.testing.assert_close(state.params["x"], torch.full((M, 2), 1 / 3), rtol=1e-4, atol=0)


def test_a_fixed_step_to_infinity_is_not_taken() -> None:
    step, state = array(Logarithm, logarithm, {"lr": [0.1, 50.0, 0.05], "max_iter": 3})
    before = state.params["x"].clone()
    after, metrics = step(state, data())
    assert metrics["failure"].tolist() == [Failure.NONE, Failure.SEARCH, Failure.NONE] and metrics["finite"].all()
    moved = (after.params["x"] != before).any(1)
    assert moved.tolist() == [True, False, True]
    # With a shorter one it goes on, and has forgotten nothing that the others know.
    after = hfta.with_hyperparams(after, lr=0.2)
    for _ in range(16):
        after, metrics = step(after, data())
    assert (metrics["failure"] == Failure.NONE).all()
    torch.testing.assert_close(after.params["x"], torch.full((M, 2), 1 / 3), rtol=1e-3, atol=0)


def test_a_search_without_a_lower_loss_says_so_and_stays() -> None:
    # Member 1 may evaluate only once, at a length that leads far uphill.
    step, state = array(Valley, valley, {**WOLFE, "lr": [1.0, 1e6, 1.0], "max_eval": [25, 1, 25]})
    after, metrics = step(state, data())
    assert metrics["failure"].tolist() == [Failure.NONE, Failure.SEARCH, Failure.NONE]
    assert torch.equal(after.params["x"][1], state.params["x"][1]) and after.opt_state.t[1] == 0
    assert after.opt_state.prev_loss[1] == metrics["loss"][1]
    _, history = hfta.fit(step, state, [data()], epochs=2, progress=False)
    assert next((one.member, one.epoch, one.cause) for one in history.failures) == (1, 1, "search")


@pytest.mark.parametrize("nonfinite", ["skip", "freeze", "raise"])
def test_a_member_that_starts_at_infinity(nonfinite: Any) -> None:
    step, state = array(Logarithm, logarithm, WOLFE, nonfinite=nonfinite)
    state.params["x"][1] = -1
    if nonfinite == "raise":
        with pytest.raises(hfta.errors.NonFiniteError, match="model 1: the loss is not finite at step 0"):
            step(state, data())
        return
    after, metrics = step(state, data())
    assert metrics["failure"].tolist() == [Failure.NONE, Failure.LOSS, Failure.NONE]
    assert (after.params["x"][1] == -1).all() and after.opt_state.step.tolist() == [1, 0, 1]
    assert after.active.tolist() == [True, nonfinite == "skip", True] and after.step.tolist() == [1, 1, 1]


def test_inactive_members_stay_as_they_are() -> None:
    step, state = array(mlp, regression, WOLFE)
    state, _ = step(state, data())
    after, _ = step(state._replace(active=torch.tensor([True, False, True])), data(1))
    assert all(
        torch.equal(a[1], b[1]) for a, b in zip(*map(tensors, (state, after)), strict=True) if a.dtype != torch.bool
    )
    expected, _ = step(state, data(1))
    assert all(torch.equal(expected.params[path][::2], leaf[::2]) for path, leaf in after.params.items())


def tensors(state: Any) -> list[Tensor]:
    return [*state.params.values(), *state.opt_state.hyperparams.values(), *state.opt_state[2:], state.step]


def test_members_go_on_apart_together_and_from_a_file(tmp_path: pathlib.Path) -> None:
    step, state = array(mlp, regression, {**WOLFE, "lr": [1.0, 5.0, 0.5], "max_iter": 4, "history_size": 3})
    state, _ = step(state, data())
    expected, _ = step(state, data(1))
    one, two = (step(hfta.take(state, part), data(1))[0] for part in ([2], [0, 1]))
    apart = hfta.take(hfta.concat([one, two]), [1, 2, 0])
    hfta.save(state, tmp_path / "state.safetensors")
    _, start = array(mlp, regression, {**WOLFE, "max_iter": 4, "history_size": 3})
    resumed, _ = step(hfta.load(tmp_path / "state.safetensors", like=start), data(1))
    for other in (apart, resumed):
        for a, b in zip(tensors(other), tensors(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", [{"donate": True}, {"chunk_size": 1}, {"chunk_size": 2}, {"replay": False}])
def test_options_of_the_step(how: dict[str, Any]) -> None:
    plain, state = array(mlp, regression, {**WOLFE, "max_iter": 5})
    step, other = array(mlp, regression, {**WOLFE, "max_iter": 5}, **how)
    for seed in range(4):
        (state, metrics), (other, others) = plain(state, data(seed)), step(other, data(seed))
        torch.testing.assert_close(others["loss"], metrics["loss"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other.params, state.params, rtol=1e-8, atol=1e-10)
    assert step.status.startswith("eager: not asked" if "replay" in how else "replayed")


def test_evaluations_of_a_step_draw_the_same_noise() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        noise = torch.rand(())
        with torch.no_grad():
            model.noise.copy_(noise)
        return regression(model, batch) + noise, {"first": noise}

    step, state = array(Noisy, loss_fn, WOLFE)
    drawn = []
    for _ in range(2):
        state, metrics = step(state, data())
        assert torch.equal(state.buffers["noise"], metrics["first"])
        drawn += metrics["first"].tolist()
    assert len({*drawn}) == 2 * M


def test_runs_replay_their_evaluations() -> None:
    step, state = array(mlp, regression, {**WOLFE, "max_iter": 6})
    expected = state
    for _ in range(6):
        expected, _ = step(expected, data())
    after, history = hfta.fit(step, state, [data()], epochs=6, progress=False)
    assert history.status.startswith("replayed") and 1 in history.verified
    torch.testing.assert_close(after.params, expected.params, rtol=1e-9, atol=1e-11)


def test_from_torch() -> None:
    models = seeded(mlp, range(M))
    options: list[Any] = [{"lr": 0.5, "max_iter": 4}, {"lr": 0.2, "max_iter": 8}, {"lr": 0.7, "tolerance_grad": 1e-2}]
    optimizers = [torch.optim.LBFGS(each.parameters(), **own) for each, own in zip(models, options, strict=True)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    optimizer = hfta.from_torch(optimizers, schedulers, models=models, steps=4)
    step, state = start(models, regression, optimizer, batch_dims=None)
    for seed in range(4):
        state, _ = step(state, data(seed))
        for model, each, scheduler in zip(models, optimizers, schedulers, strict=True):
            closed(model, each, regression, data(seed))
            scheduler.step()
        assert_alike(state, models)
    with pytest.raises(hfta.errors.StackError, match="model 0: its LBFGS has made steps"):
        hfta.from_torch(optimizers, models=models)
    with pytest.raises(hfta.errors.StackError, match="to_torch takes one of SGD"):
        hfta.to_torch(optimizer, state, models)


def test_what_is_refused() -> None:
    step, state = array(mlp, regression, WOLFE)
    for around in (hfta.accumulate(hfta.lbfgs(), 2), hfta.chain(hfta.clip_grad_norm(1.0), hfta.lbfgs())):
        outer = hfta.make_train_step(mlp(), regression, around, batch_dims=None)
        with pytest.raises(HyperparameterError, match=r"no part of a chain.*give it alone to make_train_step"):
            outer(outer(outer.init(state.params, seeds=range(M)), data())[0], data())
    with pytest.raises(ValueError, match="leave out shared_params and carry"):
        hfta.make_train_step(mlp(), regression, hfta.lbfgs(), shared_params=["0"])
    with pytest.raises(hfta.errors.TraceError, match="no transform can map or differentiate it"):
        torch.func.grad(lambda params: step(state._replace(params=params), data())[1]["loss"].sum())(state.params)
    with pytest.raises(HyperparameterError, match="line_search_fn is 'armijo'"):
        hfta.lbfgs(line_search_fn="armijo")  # type: ignore
    with pytest.raises(ValueError, match="history_size is 0; give an integer of at least 1"):
        hfta.lbfgs(history_size=0)
    for name in ("lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change"):
        with pytest.raises(HyperparameterError, match=f"model 1: {name} is nan"):
            hfta.lbfgs(**{name: [1.0, float("nan"), 1.0]})


def test_compiled_steps_go_on_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_COMPILING", "_COMPILING_A_LEAF"):
        monkeypatch.setattr(hfta.run.background, name, 0.0)
    step, state = array(mlp, regression, {**WOLFE, "max_iter": 2})
    quick, expected = hfta.compile(step), state
    with pytest.warns(hfta.errors.CompileWarning, match="not compiled and goes on eagerly"):
        for _ in range(5):
            state, _ = quick(state, data())
            expected, _ = step(expected, data())
    torch.testing.assert_close(state.params, expected.params, rtol=1e-9, atol=1e-11)
    assert not quick.is_compiled
