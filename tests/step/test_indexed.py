"""Batches of rows of different members: each member is the run that sees its rows alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from comparisons import identical

M, LR, SEEDS = 4, [0.1, 0.01, 0.05, 0.02], [7, 8, 9, 10]


def make_models(rate=0.0, count=M):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).requires_grad_(False)
    return [nn.Sequential(trunk, nn.Dropout(rate), nn.Linear(8, 3)).double() for _ in range(count)]


def loss_fn(model, batch, hparams):
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"], label_smoothing=0.1) + hparams["l2"] * model[2].weight.square().sum()
    return loss, {"correct": (logits.argmax(-1) == batch["y"]).sum(), "logits": logits.mean()}


def make_step(models, lr=LR, seeds=SEEDS, **options):
    made = hfta.make_train_step(models[0], loss_fn, hfta.adamw(lr=lr), share_frozen=True, **options)
    step = hfta.step.by_index(made)
    l2 = [0.01 * (1 + seed - SEEDS[0]) for seed in seeds]
    return step, step.init(*hfta.stack_params(models, share_frozen=True), seeds=seeds, hparams={"l2": l2})


def make_batches(count, members=(0, 1, 3), rows=7):
    """Batches without a row of member 2."""
    torch.manual_seed(1)
    for _ in range(count):
        batch = {"x": torch.randn(rows, 4).double(), "y": torch.randint(3, (rows,))}
        yield batch, torch.tensor(members)[torch.randint(len(members), (rows,))]


def part(batch, rows):
    return {name: leaf[rows] for name, leaf in batch.items()}


@pytest.mark.parametrize("way", ["eager", "donate", "chunks", "replay", "compiled"])
def test_members_are_runs_on_their_rows_alone(way):
    models, l2 = make_models(), [0.01, 0.02, 0.03, 0.04]
    alone = copy.deepcopy(models)
    optimizers = [torch.optim.AdamW(model[2].parameters(), lr) for model, lr in zip(alone, LR, strict=True)]
    step, state = make_step(
        models, donate=way == "donate", chunk_size=3 if way == "chunks" else None, replay=way == "replay"
    )
    run = torch.compile(step, backend="aot_eager", fullgraph=True) if way == "compiled" else step
    start, steps = copy.deepcopy(hfta.take(state, [2])), [0] * M
    for batch, index in make_batches(40):
        state, metrics = run(state, (batch, index))
        assert metrics["rows"].tolist() == index.bincount(minlength=M).tolist()
        for member in range(M):
            if (rows := index == member).any():
                optimizers[member].zero_grad()
                loss, reported = loss_fn(alone[member], part(batch, rows), {"l2": l2[member]})
                loss.backward()
                optimizers[member].step()
                steps[member] += 1
                for name, value in {"loss": loss.detach(), **reported}.items():
                    torch.testing.assert_close(metrics[name][member], value.detach(), rtol=1e-10, atol=1e-12)
            else:
                assert metrics["loss"][member].isnan() and metrics["correct"][member] == 0
                assert metrics["failure"][member] == 0
    for member, model in enumerate(alone):
        for name in ("weight", "bias"):
            expected = getattr(model[2], name).detach()
            torch.testing.assert_close(state.params[f"2.{name}"][member], expected, rtol=1e-10, atol=1e-12)
    assert state.step.tolist() == steps and steps[2] == 0 and all(steps[i] for i in (0, 1, 3))
    assert state.active.all()
    assert identical(hfta.take(state, [2]), start)
    if way == "replay":
        assert step.status.startswith("replayed")


def test_noise_is_that_of_an_array_of_the_member_alone():
    models = make_models(0.5)
    step, state = make_step(models)
    one, single = make_step([copy.deepcopy(models[3])], [LR[3]], [SEEDS[3]])
    for batch, index in make_batches(8):
        state, metrics = step(state, (batch, index))
        rows = index == 3
        if not rows.any():
            continue
        single, expected = one(single, (part(batch, rows), torch.zeros(int(rows.sum()), dtype=torch.long)))
        torch.testing.assert_close(metrics["loss"][3], expected["loss"][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(state.params["2.weight"][3:], single.params["2.weight"], rtol=1e-12, atol=1e-14)
    # Each row draws its own mask.
    (batch, _), *_ = make_batches(1)
    alike, index = {name: leaf[[0, 0]] for name, leaf in batch.items()}, torch.zeros(2, dtype=torch.long)
    losses = [step(state, (part(alike, slice(n)), index[:n]))[1]["loss"][0] for n in (1, 2)]
    assert losses[0] != losses[1]


def test_rows_have_weights():
    step, state = make_step(make_models())
    (batch, index), *_ = make_batches(1)
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0, 1.0, 5.0])
    index = torch.tensor([0, 0, 1, 3, 3, 3, 3])
    _, metrics = step(state, [batch, (index, weights)])
    for member in (0, 3):
        rows = (index == member).nonzero().flatten()
        each = torch.stack([step(state, (part(batch, row[None]), index[row][None]))[1]["loss"][member] for row in rows])
        mean = (each * weights[rows]).sum() / weights[rows].sum()
        torch.testing.assert_close(metrics["loss"][member], mean, rtol=1e-12, atol=0)
    assert metrics["loss"][[1, 2]].isnan().all() and metrics["rows"].tolist() == [2, 1, 0, 4]


def test_a_row_that_is_not_finite_is_its_members_failure():
    step, state = make_step(make_models())
    (batch, _), *_ = make_batches(1)
    batch["x"][1, 0] = torch.nan
    index = torch.tensor([0, 1, 1, 3, 3, 0, 0])
    after, metrics = step(state, (batch, index))
    assert metrics["failure"].tolist() == [0, hfta.step.Failure.LOSS, 0, 0]
    kept = (index != 1).nonzero().flatten()
    others, _ = step(state, (part(batch, kept), index[kept]))
    torch.testing.assert_close(after.params, others.params, rtol=1e-12, atol=1e-14)


def test_fit_takes_loaders_of_rows():
    (batch, index), *_ = make_batches(1, rows=60)
    step, state = make_step(make_models())
    loader = hfta.ArrayLoader((batch, index), 6, shared=True, shuffle=False)
    after, history = hfta.fit(step, state, loader, epochs=2, progress=False)
    losses = []
    for epoch in range(2):
        for at in range(0, 60, 6):
            rows = slice(at, at + 6)
            state, metrics = step(state, (part(batch, rows), index[rows]))
            losses += [metrics["loss"]] if epoch else []
    torch.testing.assert_close(after.params, state.params, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(history["loss"][-1], torch.stack(losses).nanmean(0), rtol=1e-10, atol=0, equal_nan=True)
    assert history["loss"][-1].isnan().tolist() == [False, False, True, False]
    assert history["rows"][-1].nansum() > 6 and not history.failures
    for option in ({"workers": 2}, {"compact": True}):
        with pytest.raises(hfta.errors.BatchError, match="by_index has one batch for all; leave them out"):
            hfta.fit(step, state, loader, epochs=1, progress=False, **option)


def test_what_is_no_batch_of_rows_is_refused():
    step, state = make_step(make_models())
    (batch, index), *_ = make_batches(1)

    def refused(message, *given):
        with pytest.raises(hfta.errors.BatchError, match=message):
            step(state, given)

    index[5] = 4
    refused(r"^index\[5\] is 4, but the array has 4 models; give numbers from 0 to 3$", batch, index)
    index[5], index[2] = 0, -1
    refused(r"^index\[2\] is -1, but the array has 4 models; give numbers from 0 to 3$", batch, index)
    refused(r"^a part of the batch is \[7, 4\], but the index is of 6 rows$", batch, index[:2].repeat(3).abs())
    for given in ([batch], [batch["x"], batch["y"], index]):
        refused(r"^a batch of a step by_index is \(rows, index\), such as \(\(inputs, targets\), index\)$", *given)


def test_what_rows_cannot_have_is_refused():
    step = hfta.make_train_step(
        nn.Linear(2, 1), lambda model, x, c: (model(x).sum(), c), hfta.sgd(lr=0.1), carry=torch.zeros(1)
    )
    with pytest.raises(ValueError, match="by_index takes no step with shared_params, carry, collect, lbfgs"):
        hfta.step.by_index(step)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm2d(3))
    loss = lambda model, x: model[1](model[0](x).movedim(-1, 1)).sum()  # noqa: E731
    step = hfta.step.by_index(hfta.make_train_step(model, loss, hfta.sgd(lr=0.1)))
    state = step.init(*hfta.stack_params([model, model]), seeds=[0, 1])
    with pytest.raises(hfta.errors.StateError, match=r"^a row writes '1.running_mean', which belongs to a member; put"):
        step(state, (torch.randn(5, 2, 2, 4), torch.tensor([0, 1, 1, 0, 0])))
    step = hfta.step.by_index(
        hfta.make_train_step(model[0], lambda model, x: (model(x).sum(), {"rows": 1}), hfta.sgd(lr=0.1))
    )
    state = step.init(*hfta.stack_params([model[0]] * 2), seeds=[0, 1])
    with pytest.raises(hfta.errors.LossError, match=r"^metric 'rows' hides what a step by_index reports; give"):
        step(state, (torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 0])))
