"""Outputs of layers of a frozen network, and members that train on them."""

import functools

import pytest
import torch
from torch import nn

import hfta_func as hfta
from ways import seeded, train_solo


class Trunk(nn.Module):
    """A small transformer; `calls` counts how often its first and its last part run."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(3)]
        self.blocks = nn.ModuleList(layers)
        self.memory = nn.LSTM(8, 4, batch_first=True)
        self.act = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.unused = nn.Linear(4, 4)
        self.calls = [0, 0]

    def forward(self, tokens, *, scale=1.0):
        self.calls[0] += 1
        hidden = scale * self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.act(self.memory(hidden)[0])
        self.calls[1] += 1
        return self.act(hidden)


@pytest.fixture
def trunk():
    torch.manual_seed(3)
    return Trunk().double()


def test_outputs_are_those_of_the_network_in_eval_mode(trunk):
    tokens = torch.randint(11, (5, 6))
    trunk.blocks[1].eval()
    modes = [module.training for module in trunk.modules()]
    outputs = hfta.models.make_feature_extractor(trunk, ["blocks.1", "memory", "act.0"])(tokens, scale=2.0)
    assert [module.training for module in trunk.modules()] == modes
    assert not any(module._forward_hooks for module in trunk.modules())
    trunk.eval()
    hidden = trunk.blocks[1](trunk.blocks[0](2.0 * trunk.embed(tokens)))
    memory = trunk.memory(trunk.blocks[2](hidden))[0]
    expected = {"blocks.1": hidden, "memory": memory, "act.0": trunk.act[0](memory)}
    assert (expected["act.0"] < 0).any()
    assert [*outputs] == [*expected]
    assert not any(output.requires_grad for output in outputs.values())
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


def test_nothing_runs_after_the_last_layer(trunk):
    outputs = hfta.models.make_feature_extractor(trunk, {"embed": "words", "blocks.0": "first"})(torch.tensor([[1, 2]]))
    assert [*outputs] == ["words", "first"]
    assert trunk.calls == [1, 0]


def test_a_network_that_fails_is_as_it_was(trunk):
    extract = hfta.models.make_feature_extractor(trunk, ["blocks.0"])
    with pytest.raises(IndexError):
        extract(torch.tensor([[11]]))
    assert trunk.training
    assert not trunk.blocks[0]._forward_hooks


def test_layers_that_are_not_there_are_refused(trunk):
    with pytest.raises(
        ValueError, match=r"^the model has no layer 'block\.1'; similar ones are 'blocks\.1', .*'blocks'"
    ):
        hfta.models.make_feature_extractor(trunk, ["block.1"])
    with pytest.raises(ValueError, match=r"^a call of the model does not call its layer 'unused'; leave it out"):
        hfta.models.make_feature_extractor(trunk, ["embed", "unused"])(torch.tensor([[1]]))
    with pytest.raises(hfta.errors.StackError, match=r"is not a torch\.nn\.Module"):
        hfta.models.make_feature_extractor(lambda tokens: tokens, ["embed"])


class Probe(nn.Module):
    """A sparse autoencoder over one of two layers."""

    def __init__(self, width):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, inputs):
        hidden = torch.relu(self.encoder(inputs - self.decoder.bias))
        return self.decoder(hidden), hidden


def loss_fn(model, batch, hparams):
    inputs = torch.stack([batch["blocks.0"], batch["blocks.2"]])[hparams["layer"].long()]
    outputs, hidden = model(inputs)
    penalty = (hidden * model.decoder.weight.norm(dim=0)).sum(-1).mean()
    return (outputs - inputs).square().sum(-1).mean() + hparams["l1"] * penalty


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_members_over_a_network_are_those_of_a_loop(trunk, tmp_path, count, cached):
    tokens, options = torch.randint(11, (24, 5)), {"shared": True, "seeds": 4}
    extract = hfta.models.make_feature_extractor(trunk, ["blocks.0", "blocks.2"])

    def rows(tokens):
        return {path: output.flatten(0, 1) for path, output in extract(tokens).items()}

    widths, l1, lr = [6, 12, 9][:count], [1e-2, 1e-1, 3e-2][:count], [1e-2, 3e-3, 1e-3][:count]
    models = seeded(lambda width: Probe(width).double(), range(count), widths)
    model = hfta.padded(models)
    step = hfta.make_train_step(model, loss_fn, hfta.adam(lr=lr), batch_dims=None)
    hparams = {"l1": l1, "layer": [number % 2 for number in range(count)]}
    state = step.init(*hfta.stack_params(models, pad=model), seeds=range(count), hparams=hparams)
    if cached:
        data = hfta.files.write_rows(tmp_path, hfta.ArrayLoader(tokens, 7, shared=True, shuffle=False, transform=rows))
        loader = hfta.ArrayLoader(data, 40, **options)
    else:
        loader = hfta.ArrayLoader(tokens, 8, transform=rows, **options)
    trunk.calls = [0, 0]
    state, _ = hfta.fit(step, state, loader, epochs=4, progress=False)
    # Once for each batch, however many members there are; from disk, not at all.
    assert trunk.calls[0] == (0 if cached else 12)

    trunk.eval()
    for number, alone in enumerate(models):
        numbers = {"l1": torch.tensor(l1[number], dtype=torch.float64), "layer": torch.tensor(number % 2)}
        optimizer = torch.optim.Adam(alone.parameters(), lr=lr[number])
        for epoch in range(4):
            for batch in hfta.ArrayLoader(data if cached else tokens, 40 if cached else 8, **options).batches(epoch):
                inputs = batch if cached else {}
                if not cached:
                    with torch.no_grad():
                        inputs["blocks.0"] = trunk.blocks[0](trunk.embed(batch))
                        inputs["blocks.2"] = trunk.blocks[2](trunk.blocks[1](inputs["blocks.0"]))
                        inputs = {path: output.flatten(0, 1) for path, output in inputs.items()}
                train_solo(alone, functools.partial(loss_fn, hparams=numbers), optimizer, [inputs])
        trained = hfta.unstack_params(model, *hfta.step.stacked(state))[number]
        torch.testing.assert_close(trained.state_dict(), alone.state_dict(), rtol=1e-10, atol=1e-12)


def test_members_with_batches_of_their_own_have_their_own_activations(trunk):
    tokens = torch.randint(11, (6, 5))
    extract = hfta.models.make_feature_extractor(trunk, ["blocks.1"])
    loader = hfta.ArrayLoader(tokens, 4, seeds=[1, 2], transform=extract)
    plain = hfta.ArrayLoader(tokens, 4, seeds=[1, 2])
    for batch, rows in zip(loader, plain, strict=True):
        assert not torch.equal(rows[0], rows[1])
        for member in range(2):
            torch.testing.assert_close(
                batch["blocks.1"][member], extract(rows[member])["blocks.1"], rtol=1e-12, atol=1e-12
            )


def test_activations_that_depend_on_the_member_are_refused():
    peft = pytest.importorskip("peft")
    trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    adapted = peft.get_peft_model(trunk, peft.LoraConfig(target_modules=["0"], r=2))
    with pytest.raises(ValueError, match=r"lora_A.* is trained.*share_frozen=True"):
        hfta.models.make_feature_extractor(adapted, ["base_model.model.0"])
    extract = hfta.models.make_feature_extractor(adapted.requires_grad_(False), ["base_model.model.0"])
    assert extract(torch.randn(3, 4))["base_model.model.0"].shape == (3, 8)
