"""Updates by optimizers of a user's own: their noise is the members', and they are sent as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hfta_func as hfta
from hfta_func.workers import process

SEEDS = [3, 5, 7]
DRAWS = {
    "randn_like": torch.randn_like,
    "normal_": lambda grad: torch.empty_like(grad).normal_(),
    "normal": lambda grad: torch.normal(torch.zeros_like(grad), 2.0),
    "bernoulli": lambda grad: torch.bernoulli(torch.full_like(grad, 0.5)),
    "dropout": nn.functional.dropout,
}


def factory() -> nn.Module:
    return nn.Linear(4, 3).double()


def loss_fn(model, batch):
    return model(batch).square().mean()


def langevin(draw):
    """Stochastic gradient Langevin dynamics."""

    def update(grads, opt_state, params):
        return {path: 0.01 * draw(grad) - 0.1 * grad for path, grad in grads.items()}, opt_state

    return hfta.GradientTransformation(lambda params: (), update)


def trained(optimizer, seeds, compiled=False, **options):
    torch.manual_seed(0)  # where shared parameters start
    step = hfta.make_train_step(factory(), loss_fn, optimizer, batch_dims=None, **options)
    shared = options.get("shared_params", ())
    state = step.init(*hfta.init_params(factory, seeds, shared_params=shared), seeds=seeds)
    run = torch.compile(step, fullgraph=True, backend="eager") if compiled else step
    batch = torch.arange(32, dtype=torch.float64).reshape(8, 4) / 32
    # The generator of PyTorch is at another place in every run.
    torch.manual_seed(len(seeds) + compiled)
    for _ in range(2):
        state, _ = run(state, batch)
    return state


@pytest.mark.exhaustive(ids="True")
@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["alone", "chain", "donate"])
@pytest.mark.parametrize("draw", DRAWS)
def test_noise_of_an_optimizer_is_the_members(draw, way, compiled):
    optimizer = langevin(DRAWS[draw])
    optimizer = hfta.optim.chain(hfta.clip_grad_norm(1.0), optimizer) if way == "chain" else optimizer
    options = {"donate": True} if way == "donate" else {}
    whole = trained(optimizer, SEEDS, compiled, **options).params["weight"]
    assert not torch.allclose(whole[0] - whole[1], torch.zeros(3, 4).double(), atol=1e-3)
    for member, seed in enumerate(SEEDS):
        alone = trained(optimizer, [seed], **options).params["weight"]
        torch.testing.assert_close(alone[0], whole[member], rtol=1e-12, atol=1e-12)
    without = trained(hfta.sgd(lr=0.1), SEEDS).params["weight"]
    assert not torch.allclose(whole, without, atol=1e-3)


def test_noise_for_shared_parameters_is_that_of_all_members():
    optimizer = langevin(torch.randn_like)
    runs = [trained(optimizer, seeds, shared_params=["bias"]).shared.params["bias"] for seeds in (SEEDS, SEEDS[::-1])]
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seeds", [SEEDS, [3]])
@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (lambda grad: torch.randn(()), "the optimizer calls torch.randn for numbers that are not one part"),
        (lambda grad: torch.bernoulli(grad * 0, generator=torch.Generator()), "got a generator"),
    ],
)
def test_noise_that_is_no_members_is_refused(draw, match, seeds):
    with pytest.raises(hfta.errors.RandomnessError, match=match):
        trained(langevin(draw), seeds)


def test_a_transformation_on_another_ones_functions_is_sent_as_it_is():
    sgd = hfta.sgd(lr=0.1)
    own = hfta.GradientTransformation(sgd.init, lambda grads, state, params: (grads, state))
    grads = {"w": torch.ones(2, 3)}
    for optimizer in (own, sgd, hfta.optim.chain(own)):
        sent = process.loads(process.dumps(optimizer))
        expected, _ = optimizer.update(grads, optimizer.init(grads), grads)
        assert torch.equal(sent.update(grads, sent.init(grads), grads)[0]["w"], expected["w"])
