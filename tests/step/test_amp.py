"""Mixed precision: autocast in the step, a loss scale per member, and its limits."""

from __future__ import annotations

import inspect
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import hfta_func as hfta
from cases import loss_fn
from hfta_func.step import Failure

M, N = 3, 8
NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group": lambda: nn.GroupNorm(2, 8),
    "layer": lambda: nn.LayerNorm([8, 4, 4]),
    "rms": lambda: nn.RMSNorm([8, 4, 4]),
    "local response": lambda: nn.LocalResponseNorm(2),
    "none": nn.Identity,
}


def _model(norm: str = "batch") -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), NORMS[norm](), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5))


def _batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(M, N, 1, 4, 4), torch.randint(5, (M, N))) for _ in range(steps)]


def _array(
    factory: Any = _model, optimizer: Any = None, **options: Any
) -> tuple[Any, hfta.step.TrainStep, hfta.step.TrainState]:
    members = [factory() for _ in range(M)]
    step = hfta.make_train_step(members[0], options.pop("loss", loss_fn), optimizer or hfta.sgd(lr=0.1), **options)
    return members, step, step.init(*hfta.stack_params(members), seeds=[5, 6, 7])


# PyTorch says so of itself where the member runs alone.
@pytest.mark.exhaustive(ids="aot_eager")
@pytest.mark.sampled(every=3)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", NORMS)
def test_autocast_is_that_of_torch(norm: str, dtype: torch.dtype, backend: str | None) -> None:
    torch._dynamo.reset()
    # 1.0 is no loss scale.
    members, step, state = _array(lambda: _model(norm), autocast=dtype, loss_scale=1.0)
    run = step if backend is None else torch.compile(step, fullgraph=True, backend=backend)
    (batch,) = _batches(1)
    state, metrics = run(state, batch)
    for i, member in enumerate(members):
        optimizer = torch.optim.SGD(member.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_fn(member, (batch[0][i], batch[1][i]))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"][i], loss.detach().to(metrics["loss"].dtype), rtol=1e-2, atol=1e-3)
        exact = nn.utils.parameters_to_vector(member.parameters())
        mine = torch.cat([state.params[path][i].flatten() for path, _ in member.named_parameters()])
        # One update of a few hundredths, of which a relative 2^-8 is lost.
        torch.testing.assert_close(mine, exact, rtol=0, atol=2e-3)
    assert all(param.dtype == torch.float32 for param in state.params.values())


def test_defaults_of_a_loss_scale_are_those_of_torch() -> None:
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    ours = inspect.signature(hfta.step.LossScale).parameters
    assert {name: own.default for name, own in ours.items()} == {name: theirs[name].default for name in ours}


def _steep(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A loss whose slope is the batch's own."""
    return loss_fn(model, batch[:2]) * batch[2]


@pytest.mark.exhaustive(ids="^True")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_member_has_a_gradient_scaler(compiled: bool, donate: bool) -> None:
    torch._dynamo.reset()
    knobs = {
        "init_scale": [2.0**16, 2.0**10, 2.0**4],
        "growth_factor": [2.0, 4.0, 2.0],
        "backoff_factor": [0.5, 0.25, 0.5],
        "growth_interval": [2, 3, 4],
    }
    members, step, state = _array(
        lambda: _model("none"),
        loss=_steep,
        autocast=torch.float16,
        loss_scale=hfta.step.LossScale(**knobs),
        donate=donate,
    )
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    scalers = [torch.amp.GradScaler("cpu", **{name: values[i] for name, values in knobs.items()}) for i in range(M)]
    optimizers = [torch.optim.SGD(member.parameters(), lr=0.1) for member in members]
    slopes = torch.tensor([[1.0, 1.0, 1.0], [1e6, 1.0, 1.0], [1.0, 1e6, 1.0], [1.0, 1.0, 1.0], [1e4, 1.0, 1e6]])
    skipped = set()
    for number, (inputs, targets) in enumerate(_batches(15)):
        slope = slopes[number % 5]
        before = optree.tree_map(torch.clone, state)
        state, metrics = run(state, (inputs, targets, slope))
        for i, (member, scaler, optimizer) in enumerate(zip(members, scalers, optimizers, strict=True)):
            assert metrics["loss_scale"][i] == scaler.get_scale()
            old = [parameter.detach().clone() for parameter in member.parameters()]
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = _steep(member, (inputs[i], targets[i], slope[i]))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            stood_still = all(torch.equal(a, b) for a, b in zip(old, member.parameters(), strict=True))
            overflow = metrics["failure"][i] == Failure.OVERFLOW
            assert overflow == stood_still
            if overflow:
                skipped.add(i)
                assert all(torch.equal(state.params[path][i], before.params[path][i]) for path in state.params)
            # The next steps start from the same numbers, so that roundings do not grow.
            with torch.no_grad():
                for path, parameter in member.named_parameters():
                    parameter.copy_(state.params[path][i])
        assert state.loss_scale.scale.tolist() == [scaler.get_scale() for scaler in scalers]
        assert state.loss_scale.growth_tracker.tolist() == [scaler._get_growth_tracker() for scaler in scalers]
    assert skipped


def test_a_gradient_that_fails_at_a_scale_of_one_has_failed() -> None:
    (batch,) = _batches(1)
    scaled = {"autocast": torch.float16, "nonfinite": "freeze", "loss_scale": hfta.step.LossScale([1.0, 4.0, 4.0])}
    _, step, state = _array(loss=_steep, **scaled)
    state, metrics = step(state, (*batch, torch.tensor([float("inf"), float("inf"), 1.0])))
    # An infinite loss is no matter of scale.
    assert metrics["failure"].tolist() == [Failure.LOSS, Failure.LOSS, Failure.NONE]
    _, step, state = _array(loss=_root, **scaled)
    state, metrics = step(state, torch.tensor([0.0, 0.0, 1.0]))
    assert metrics["failure"].tolist() == [Failure.GRADIENT, Failure.OVERFLOW, Failure.NONE]
    assert state.active.tolist() == [False, True, True]
    assert state.loss_scale.scale.tolist() == [1.0, 2.0, 4.0]


def _root(model: nn.Module, x: Tensor) -> Tensor:
    """A finite loss whose gradient is infinite at 0."""
    weight = next(model.parameters())
    return (weight * x).abs().sum().float().sqrt()


def test_float16_has_a_loss_scale_unless_told_otherwise() -> None:
    assert _array(autocast=torch.float16)[2].loss_scale.scale.tolist() == [2.0**16] * M
    assert _array(autocast=torch.bfloat16)[2].loss_scale == ()
    assert _array()[2].loss_scale == ()


def test_scales_follow_their_members() -> None:
    _, _, state = _array(
        autocast=torch.float16, loss_scale=hfta.step.LossScale([2.0, 4.0, 8.0], growth_interval=[1, 2, 3])
    )
    chosen = hfta.take(state, [2, 0])
    assert chosen.loss_scale.scale.tolist() == [8.0, 2.0]
    assert chosen.loss_scale.hyperparams["growth_interval"].tolist() == [3.0, 1.0]
    changed = hfta.with_hyperparams(state, growth_interval=5)
    assert changed.loss_scale.hyperparams["growth_interval"].tolist() == [5.0] * M


def test_options_that_are_none() -> None:
    with pytest.raises(
        ValueError, match=r"autocast is torch.float32; it must be None, torch.bfloat16 or torch.float16"
    ):
        _array(autocast=torch.float32)
    with pytest.raises(ValueError, match="nonfinite is 'ignore'; it must be 'skip', 'freeze' or 'raise'"):
        _array(nonfinite="ignore")
