"""Members of several networks: a step for each network in turn, as in a loop over ordinary modules."""

from __future__ import annotations

import copy
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfta_func as hfta
from comparisons import identical
from hfta_func.errors import NonFiniteError, StackError
from hfta_func.step import replay
from hfta_func.testing import assert_matches_solo

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS, LR = [5, 6, 7], [0.05, 0.02, 0.01]


class GAN(nn.Module):
    """A discriminator and a generator, both with running statistics."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.d = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(rate), nn.Linear(6, 1))
        self.g = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.double()


def loss_d(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
    real, latent = batch
    return F.softplus(-model.d(real)).mean() + F.softplus(model.d(model.g(latent))).mean()


def loss_g(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
    return F.softplus(-model.d(model.g(batch[1]))).mean()


def with_noise(loss: Any) -> Any:
    def noisy(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        draw = torch.randn((), dtype=torch.float64)
        return loss(model, (batch[0], batch[1] + torch.randn_like(batch[1]))), {"draw": draw}

    return noisy


def make_joint(
    losses: Any = (loss_d, loss_g), model: nn.Module | None = None, every: Any = None, **options: Any
) -> Any:
    optimizers = hfta.adam(lr=LR, betas=(0.5, 0.9)), hfta.sgd(lr=LR[::-1], momentum=0.9)
    d, g = (hfta.make_train_step(model or GAN(), *pair, **options) for pair in zip(losses, optimizers, strict=True))
    return hfta.joint(d=d, g=g, every=every)


def start(step: Any, make: Any = GAN, **given: Any) -> Any:
    return step.init(*hfta.init_params(make, SEEDS), seeds=SEEDS, **given)


def make_batches(count: int = 3, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(count, len(SEEDS), rows, 5, generator=generator, dtype=torch.float64)
    return [tuple(pair.split([2, 3], -1)) for pair in pairs]


def copied(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def run(step: Any, state: Any, batches: Any) -> tuple[Any, Any]:
    reports = []
    for batch in batches:
        state, metrics = step(state, batch)
        reports.append(metrics)
    return state, reports


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("every", [{}, {"g": 2}, {"d": 3, "g": 2}])
def test_members_are_loops_over_ordinary_modules(every, donate):
    step = make_joint(every=every, donate=donate)
    begin, parts = start(step), {0: 1, 1: 2, 2: 6}[len(every)]
    after, reports = run(step, copied(begin), make_batches())
    assert after.step.tolist() == [3] * 3
    for i in range(len(SEEDS)):
        torch.manual_seed(SEEDS[i])
        model: Any = GAN()
        adam = torch.optim.Adam(model.d.parameters(), lr=LR[i], betas=(0.5, 0.9))
        sgd = torch.optim.SGD(model.g.parameters(), lr=LR[::-1][i], momentum=0.9)
        for batch, metrics in zip(make_batches(), reports, strict=True):
            losses: Any = {"d": [], "g": []}
            for part, rows in enumerate(zip(*(leaf[i].chunk(parts) for leaf in batch), strict=True)):
                for name, loss_fn, optimizer in (("d", loss_d, adam), ("g", loss_g, sgd)):
                    if (part + 1) % every.get(name, 1) == 0:
                        model.zero_grad()
                        loss = loss_fn(model, rows)
                        loss.backward()
                        optimizer.step()
                        losses[name].append(loss.detach())
            for name, values in losses.items():
                torch.testing.assert_close(metrics[f"{name}.loss"][i], torch.stack(values).mean(), rtol=1e-10, atol=0)
        exported = hfta.export_model(GAN(), after, i).state_dict()
        torch.testing.assert_close(exported, model.state_dict(), rtol=1e-10, atol=1e-12)


def test_noise_is_that_of_seed_name_and_update():
    step = make_joint([with_noise(loss_d), with_noise(loss_g)], GAN(0.3), every={"g": 2})
    state = start(step)
    assert_matches_solo(step, state, make_batches(), rtol=1e-12)
    _, reports = run(step, state, make_batches())
    _, solo = run(step, hfta.take(state, [1]), [tuple(leaf[1:2] for leaf in b) for b in make_batches()])
    draws = torch.stack([torch.stack([report["d.draw"], report["g.draw"]]) for report in reports])
    assert torch.equal(draws[:, :, 1:2], torch.stack([torch.stack([r["d.draw"], r["g.draw"]]) for r in solo]))
    assert len(set(draws.flatten().tolist())) == draws.numel()
    # Neither the other networks nor how often they are updated matter.
    both = make_joint([with_noise(loss_d), with_noise(loss_g)], GAN(0.3))
    _, one_by_one = run(both, start(both), make_batches(2))
    first, second = ({name: report[f"{name}.draw"] for name in "dg"} for report in one_by_one)
    assert torch.equal(draws[0, 0], (first["d"] + second["d"]) / 2) and torch.equal(draws[0, 1], second["g"])
    d = hfta.make_train_step(GAN(0.3), with_noise(loss_d), hfta.sgd(lr=0.1))
    alone = hfta.joint(d=d)
    assert torch.equal(alone(start(alone), make_batches()[0])[1]["d.draw"], first["d"])
    plain = d(start(d), make_batches()[0])[1]["draw"]
    assert len({*plain.tolist(), *first["d"].tolist(), *first["g"].tolist()}) == 9


def failing(loss: Any) -> Any:
    """A loss that is infinite for one member whose batch begins with a large number."""

    def fails(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) + torch.where(batch[0][0, 0] > 1e6, torch.inf, 0.0)

    return fails


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("which", ["d", "g"])
@pytest.mark.parametrize("every", [{}, {"d": 1, "g": 2}, {"d": 2}])
def test_a_member_fails_as_a_whole(which, every, donate):
    losses = [failing(loss_d), loss_g] if which == "d" else [loss_d, failing(loss_g)]
    step, plain = (make_joint(losses, every=every, donate=donate) for _ in range(2))
    state = run(plain, start(plain), make_batches(1))[0]
    bad = copied(make_batches()[1])
    # In the last part of the rows, which both networks see; earlier updates are taken back.
    bad[0][1, 6 if every else 0, 0] = 1e9
    before, (healthy, _) = copied(state), plain(copied(state), make_batches()[1])
    after, metrics = step(copied(state), bad)
    assert metrics["failure"].tolist() == [0, 1, 0] and metrics["finite"].tolist() == [True, False, True]
    # It has seen the batch.
    kept = hfta.take(before, [1])._replace(step=before.step[1:2] + 1)
    assert identical(hfta.take(after, [1]), kept)
    assert identical(hfta.take(after, [0, 2]), hfta.take(healthy, [0, 2]))
    assert not identical(hfta.take(after, [0]), hfta.take(before, [0]))
    assert not any(leaf.isnan().any() for leaf in optree.tree_leaves(after))


def test_failures_that_freeze_or_raise():
    bad = make_batches()[1]
    bad[0][1, 0, 0] = 1e9
    step = make_joint([loss_d, failing(loss_g)], nonfinite="freeze")
    after, _ = step(start(step), bad)
    assert after.active.tolist() == [True, False, True]
    kept, _ = step(after, make_batches()[0])
    assert identical(hfta.take(kept, [1]), hfta.take(after, [1])) and kept.step.tolist() == [2, 1, 2]
    step = make_joint([loss_d, failing(loss_g)], nonfinite="raise", donate=True)
    state = start(step)
    before = copied(state)
    with pytest.raises(NonFiniteError, match="model 1: the loss of its 'g' is not finite at step 0; lower"):
        step(state, bad)
    assert identical(state, before)


def test_an_overflow_only_skips_the_update_of_its_network():
    scale = hfta.step.LossScale(init_scale=[1.0, 2.0**100, 2.0])
    steps = {}
    for name, loss, more in (("d", loss_d, {}), ("g", lambda *given: 1e280 * loss_g(*given), {"loss_scale": scale})):
        steps[name] = hfta.make_train_step(GAN(), loss, hfta.sgd(lr=LR), **more)
    step = hfta.joint(**steps)
    state = start(step)
    after, metrics = step(state, make_batches()[0])
    assert metrics["failure"].tolist() == [0, hfta.step.Failure.OVERFLOW, 0]
    assert metrics["finite"].tolist() == [True, False, True]
    assert metrics["g.loss_scale"].tolist() == [1.0, 2.0**100, 2.0] and after.loss_scale["g"].scale[1] < 2.0**100
    changed = {path[0]: (leaf != after.params[path]).flatten(1).any(1).tolist() for path, leaf in state.params.items()}
    assert changed == {"d": [True] * 3, "g": [True, False, True]}


def test_target_networks_numbers_and_the_members_own_hyperparameters():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Linear(2, 1)
            self.target = copy.deepcopy(self.critic)
            self.log_alpha = nn.Parameter(torch.tensor(0.5))
            self.double()

    def loss(model, batch, hparams):
        return (model.critic(batch) - hparams["gamma"] * model.target(batch)).square().mean() * model.log_alpha.exp()

    def follow(model, batch):
        pairs = zip(model.target.parameters(), model.critic.parameters(), strict=True)
        return sum((target - param).square().sum() / 2 for target, param in pairs)

    step = hfta.joint(
        critic=hfta.make_train_step(Agent(), loss, hfta.sgd(lr=LR)),
        target=hfta.make_train_step(Agent(), follow, hfta.sgd(lr=0.1)),
        log_alpha=hfta.make_train_step(Agent(), lambda model, batch: model.log_alpha.square(), hfta.sgd(lr=LR)),
    )
    gamma, batches = [0.9, 0.5, 0.1], torch.randn(3, 3, 8, 2, dtype=torch.float64)
    after, _ = run(step, start(step, Agent, hparams={"gamma": gamma}), batches)
    for i in range(3):
        torch.manual_seed(SEEDS[i])
        agent = Agent()
        for batch in batches[:, i]:
            critic = torch.optim.SGD(agent.critic.parameters(), lr=LR[i])
            agent.zero_grad()
            loss(agent, batch, {"gamma": gamma[i]}).backward()
            critic.step()
            with torch.no_grad():
                for target, param in zip(agent.target.parameters(), agent.critic.parameters(), strict=True):
                    target.lerp_(param, 0.1)
                agent.log_alpha.mul_(1 - 2 * LR[i])
        torch.testing.assert_close(
            hfta.export_model(Agent(), after, i).state_dict(), agent.state_dict(), rtol=1e-10, atol=1e-12
        )


def test_what_all_members_share_is_held_once():
    shared = GAN()
    shared.teacher = nn.Linear(2, 2).double().requires_grad_(False)

    def make():
        model = GAN()
        model.teacher = shared.teacher
        return model

    def taught(model, batch):
        return loss_g(model, batch) + F.mse_loss(model.g(batch[1]), model.teacher(batch[0]))

    whole, held = (make_joint([loss_d, taught], shared, share_frozen=once) for once in (False, True))
    models = [make() for _ in SEEDS]
    states = [
        step.init(*hfta.stack_params(models, share_frozen=once), seeds=SEEDS)
        for step, once in ((whole, False), (held, True))
    ]
    assert "teacher.weight" not in states[1].params and {*held.base} == {"teacher.weight", "teacher.bias"}
    first, second = (run(step, state, make_batches())[0] for step, state in zip((whole, held), states, strict=True))
    for path, leaf in second.params.items():
        torch.testing.assert_close(leaf, first.params[path], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_whole_runs_resume_stop_and_shrink(workers, tmp_path):
    data = tuple(torch.cat([leaf.flatten(0, 1) for leaf in column]) for column in zip(*make_batches(1), strict=True))

    def distance(model, batch):
        return {"distance": (model.g(batch[1]) - batch[0]).norm(dim=1).mean()}

    def stop(state, history):
        active = state.active.clone()
        active[1] &= len(history) < 2
        return state._replace(active=active)

    def fit(epochs, keep=None, **more):
        step = make_joint([with_noise(loss_d), with_noise(loss_g)], GAN(0.3), every={"g": 2})
        state = start(step)
        loader = hfta.ArrayLoader(data, 12, seeds=SEEDS, drop_last=True)
        options = {"callbacks": [stop], "evaluate": (distance, data), "restore_best": "d.loss", **more}
        return hfta.fit(step, state, loader, epochs=epochs, progress=False, resume=keep, **options)

    whole, history = fit(4)
    assert history["g.loss"].shape == history["distance"].shape == (4, 3) and not history.failures
    assert whole.step[0] > whole.step[1]
    keep = tmp_path / "run.safetensors"
    fit(2, keep=keep, save_every=2)
    resumed, again = fit(4, keep=keep, compact=True, workers=workers, compile=workers is None)
    torch.testing.assert_close(resumed, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(again["d.loss"][:, 0], history["d.loss"][:, 0], rtol=1e-10, atol=0)
    assert hfta.load(keep, like=whole).step.tolist() == [12, 6, 12]
    assert workers is not None or "d replayed: " in again.status


@pytest.mark.exhaustive
@pytest.mark.soak(ids="False")
@pytest.mark.parametrize(("donate", "every"), [(True, {}), (False, {"g": 2})])
def test_in_one_graph(donate, every):
    losses = [with_noise(loss_d), with_noise(loss_g)]
    step = make_joint(losses, GAN(0.3), every=every, donate=donate, nonfinite="raise")
    state, compiled = start(step), torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = run(step, copied(state), make_batches())
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = run(compiled, copied(state), make_batches())
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    bad = make_batches()[0]
    bad[0][2] = torch.nan
    with pytest.raises(NonFiniteError, match="model 2: the loss of its 'd'"):
        compiled(copied(state), bad)


def make(model: Any = None, **options: Any) -> Any:
    return hfta.make_train_step(model or GAN(), loss_d, hfta.sgd(lr=0.1), **options)


class Tied(GAN):
    def __init__(self):
        super().__init__()
        self.g[0] = nn.Linear(2, 6)
        self.g[0].weight = self.d[0].weight


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [
        (lambda: hfta.joint(x=make()), hfta.errors.LossError, "no parameter of x requires grad"),
        (lambda: hfta.joint(d=make(), g=make(batch_dims=None)), ValueError, "batch_dims is None for 'g'.* must be 0"),
        (lambda: hfta.joint(d=make(), g=make(donate=True)), ValueError, "donate is True for 'g'.* must be False"),
        (lambda: hfta.joint(d=make(shared_params=["g"])), ValueError, r"shared_params is \('g',\) for 'd'"),
        (lambda: hfta.joint(d=make(), every={"h": 2}), ValueError, "every has 'h': 2; give d integers"),
        (lambda: hfta.joint(d=make(), every={"d": 0}), ValueError, "every has 'd': 0"),
        (lambda: hfta.joint(d=make(Tied()), g=make(Tied())), StackError, "'g.0.weight' is 'd.0.weight', too"),
    ],
)
def test_what_is_refused(build, kind, words):
    with pytest.raises(kind, match=words):
        build()


def test_batches_that_do_not_fit():
    step = make_joint(every={"g": 5})
    with pytest.raises(
        RuntimeError, match=r"unflatten: Provided sizes \[5, -1\] don't multiply up to the size of dim 1"
    ):
        step(start(step), make_batches()[0])
    with pytest.raises(hfta.errors.HyperparameterError, match=r"'gamma' is no number of the model"):
        start(step, hparams={"gamma": 1.0})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("every", [{}, {"g": 2}])
def test_networks_are_replayed_to_the_same_bits(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_STEPS", 0)
    plain, other = (make_joint((with_noise(loss_d), with_noise(loss_g)), every=every) for _ in range(2))
    step, batches = other.replayed(), make_batches(8)
    # A member that fails goes back to where it was, also in a step that is replayed.
    batches[7][0][1] = torch.nan
    expected, after = run(plain, start(plain), batches), run(step, start(step), batches)
    assert expected[1][7]["failure"].tolist() == [0, 1, 0]
    assert identical(*(optree.tree_map(torch.nan_to_num, results) for results in (expected, after)))
    assert step.status.startswith("replayed: d replayed: ") and "; g replayed: " in step.status
    assert plain.status.startswith("eager: d eager: ") and "; g eager: " in plain.status
