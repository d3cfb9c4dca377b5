"""What a model passes from batch to batch: hidden states, with gradients that end at the batch."""

import functools

import pytest
import torch
from torch import nn

import hfta_func as hfta

WORDS, COLUMNS, WIDTH = 9, 4, 6
SEEDS = [3, 1, 2]
LR = [0.5, 0.1, 1.0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def start(self):
        return tuple(torch.zeros(2, COLUMNS, WIDTH, dtype=torch.float64) for _ in range(2))


def loss_fn(model, batch, carry):
    words, targets = batch
    output, carry = model(words, carry)
    return nn.functional.cross_entropy(output, targets.flatten()), carry


def batches(count=5, length=3):
    words = torch.randint(WORDS, (count * length + 1, COLUMNS), generator=torch.Generator().manual_seed(0))
    return [(words[at : at + length], words[at + 1 : at + 1 + length]) for at in range(0, count * length, length)]


def array(count=3, loss=loss_fn, **options):
    options = {"batch_dims": None, "carry": Model().start(), **options}
    step = hfta.make_train_step(Model(), loss, hfta.sgd(lr=LR[:count], momentum=0.9), **options)
    return step, step.init(*hfta.init_params(Model, SEEDS[:count]), seeds=SEEDS[:count])


def alone(member, epochs=1, loss_fn=loss_fn):
    """One member in ordinary PyTorch, as a script trains it: model, losses, last hidden state, and what is reported."""
    torch.manual_seed(SEEDS[member])
    model, losses = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR[member], momentum=0.9)
    for _ in range(epochs):
        hidden = model.start()
        for batch in batches():
            loss, hidden, *reported = loss_fn(model, batch, carry=tuple(part.detach() for part in hidden))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return model, torch.stack(losses).reshape(epochs, -1), hidden, *reported


def assert_alone(state, history, epochs=3):
    for member in range(len(state.keys)):
        model, losses, hidden = alone(member, epochs)
        torch.testing.assert_close(history["loss"][:, member], losses.mean(1), rtol=1e-10, atol=1e-12)
        trained = hfta.export_model(Model(), state, member)
        torch.testing.assert_close(trained.state_dict(), model.state_dict(), rtol=1e-10, atol=1e-12)
        carry = tuple(part[member] for part in state.carry.now)
        torch.testing.assert_close(carry, hidden, rtol=1e-10, atol=1e-12)


WAYS = {
    "plain": {},
    "one by one": {"chunk_size": 1},
    "pairs": {"chunk_size": 2},
    "in place": {"donate": True},
    "eager": {"replay": False},
    "replayed": {"replay": True},
    "replayed in place": {"replay": True, "donate": True},
}


@pytest.mark.exhaustive(ids="(one by one|pairs|in place|eager)-1")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_members_are_those_that_a_script_trains(way, count):
    step, state = array(count, **WAYS[way])
    state, history = hfta.fit(step, state, batches(), epochs=3, progress=False)
    assert_alone(state, history)


def test_replays_are_used():
    results = []
    for replay in (False, True):
        step, state = array(replay=replay)
        for batch in batches(20) * 4:
            state, metrics = step(state, batch)
        results.append((state.carry.now, metrics))
    assert step.status.startswith("replayed"), step.status
    assert sorted(metrics) == ["failure", "finite", "loss"]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_compiled_steps_carry_too():
    step, state = array()
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    state, history = hfta.fit(compiled, state, batches(), epochs=3, progress=False)
    assert_alone(state, history)


def test_many_steps_in_one_call_carry_too():
    step, state = array()
    single = state
    state, metrics = step.many(state, tuple(torch.stack(parts) for parts in zip(*batches(), strict=True)))
    for number, batch in enumerate(batches()):
        single, expected = step(single, batch)
        torch.testing.assert_close(metrics["loss"][number], expected["loss"], rtol=1e-12, atol=0)
    torch.testing.assert_close(state.carry, single.carry, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("save_every", [None, 2])
def test_a_run_that_was_broken_off_goes_on_with_what_it_carried(tmp_path, save_every):
    path = tmp_path / "run.safetensors"
    calls = []

    def breaking(state, batch):
        calls.append(0)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return step(state, batch)

    step, first = array()
    with pytest.raises(KeyboardInterrupt):
        hfta.fit(breaking, first, batches(), epochs=3, progress=False, resume=path, save_every=save_every)
    state, history = hfta.fit(step, first, batches(), epochs=3, progress=False, resume=path, save_every=save_every)
    assert_alone(state, history)


def test_workers_and_smaller_arrays_carry_too():
    step, first = array()
    state, history = hfta.fit(step, first, batches(), epochs=3, progress=False, workers=2)
    assert_alone(state, history)
    stopped = first._replace(active=torch.tensor([True, False, True]))
    state, history = hfta.fit(step, stopped, batches(), epochs=3, progress=False, compact=True)
    assert not state.carry.now[0][1].any()
    assert_alone(hfta.take(state, [0]), {"loss": history["loss"][:, :1]})


def test_numbers_of_the_members_and_further_metrics():
    def scaled(model, batch, hparams, carry):
        loss, after = loss_fn(model, batch, tuple(hparams["keep"] * part for part in carry))
        return loss, after, {"size": after[0].square().mean()}

    step, state = array(loss=scaled)
    keep = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    state = step.init(state.params, seeds=SEEDS, hparams={"keep": keep})
    for batch in batches():
        state, metrics = step(state, batch)
    assert sorted(metrics) == ["failure", "finite", "loss", "size"]
    for member in range(3):
        *_, reported = alone(member, loss_fn=functools.partial(scaled, hparams={"keep": keep[member]}))
        torch.testing.assert_close(metrics["size"][member], reported["size"].detach(), rtol=1e-10, atol=0)


def test_a_member_that_fails_keeps_what_it_carried():
    def spoiled(model, batch, carry):
        loss, after = loss_fn(model, batch[:2], carry)
        return loss * batch[2], after

    step, state = array(loss=spoiled, batch_dims=(None, None, 0))
    words, targets = batches()[0]
    state, _ = step(state, (words, targets, torch.ones(3)))
    after, metrics = step(state, (words, targets, torch.tensor([1.0, float("nan"), 1.0])))
    assert metrics["finite"].tolist() == [True, False, True]
    changed = [not torch.equal(a, b) for a, b in zip(after.carry.now[0], state.carry.now[0], strict=True)]
    assert changed == [True, False, True]


def test_less_precision_is_not_carried():
    def half(model, x, carry):
        carry = torch.tanh(model(x + carry))
        return carry.float().square().mean(), carry

    step = hfta.make_train_step(
        nn.Linear(4, 4), half, hfta.sgd(lr=0.1), autocast=torch.bfloat16, carry=torch.zeros(8, 4), batch_dims=None
    )
    state = step.init(*hfta.init_params(lambda: nn.Linear(4, 4), [0, 1]), seeds=[0, 1])
    for _ in range(2):
        state, _ = step(state, torch.randn(8, 4))
    assert state.carry.now.dtype == torch.float32
    assert torch.equal(state.carry.now, state.carry.now.bfloat16().float())


def test_an_epoch_of_ones_own_begins_by_restart():
    step, state = array(donate=True)
    first = step.init(state.params, seeds=SEEDS)
    losses = []
    for _ in range(2):
        first = hfta.step.restart(first)
        for batch in batches():
            first, metrics = step(first, batch)
            losses.append(metrics["loss"])
    expected = torch.stack([alone(member, 2)[1].flatten() for member in range(3)], 1)
    torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-10, atol=0)
    assert hfta.step.restart(state._replace(carry=())).carry == ()


def test_members_may_start_with_values_of_their_own():
    step, state = array()
    start = tuple(torch.randn(3, 2, COLUMNS, WIDTH, dtype=torch.float64) for _ in range(2))
    state = step.init(state.params, seeds=SEEDS, carry=start)
    after, metrics = step(state, batches()[0])
    for member in range(3):
        torch.manual_seed(SEEDS[member])
        loss, _ = loss_fn(Model(), batches()[0], tuple(part[member] for part in start))
        torch.testing.assert_close(metrics["loss"][member], loss.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(hfta.step.restart(after).carry.now, start, rtol=0, atol=0)


def refused(loss):
    step, state = array(loss=loss)
    step(state, batches()[0])


def test_what_cannot_be_carried_is_refused():
    with pytest.raises(TypeError, match="0-d tensor"):
        refused(lambda model, batch, carry: loss_fn(model, batch, carry)[0])
    with pytest.raises(
        hfta.errors.LossError, match=r"carry\[0\] is torch.float64\[2, 4, 6\] in the state but .*\[1, 4, 6\]"
    ):
        refused(lambda model, batch, carry: (loss_fn(model, batch, carry)[0], (carry[0][:1], carry[1])))
    with pytest.raises(hfta.errors.LossError, match=r"what the loss returns does not"):
        refused(lambda model, batch, carry: (loss_fn(model, batch, carry)[0], carry[:1]))
    step, _ = array()
    with pytest.raises(ValueError, match=r"^'rnn' has carry=, which a joint step does not pass on; keep it in buffers"):
        hfta.joint(rnn=step)
