"""Batches: every member's own order, the same alone as in an array."""

import json

import optree
import pandas
import pytest
import torch
import torch.nn.functional as F

import hfta_func as hfta

ROWS = 10
DATA = {"x": torch.arange(ROWS * 3.0).reshape(ROWS, 3), "row": torch.arange(ROWS)}
SEEDS = [4, 9, 2]


def rows(batches):
    """``[M, rows seen]``, in order."""
    return torch.cat([batch["row"] for batch in batches], dim=-1)


def same(a, b):
    a, b = list(a), list(b)
    return len(a) == len(b) and all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


def test_shapes_and_structure():
    loader = hfta.ArrayLoader(DATA, 4, seeds=SEEDS)
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    assert [batch["x"].shape for batch in batches] == [(3, 4, 3), (3, 4, 3), (3, 2, 3)]
    for batch in batches:
        assert torch.equal(batch["x"], DATA["x"][batch["row"]])


def test_order_depends_on_seed_and_epoch_alone():
    loader = hfta.ArrayLoader(DATA, 4, seeds=SEEDS)
    epochs = [rows(loader) for _ in range(3)]
    torch.rand(7)
    for batch_size in (1, 4, ROWS, 100):
        other = hfta.ArrayLoader(DATA, batch_size, seeds=torch.tensor(SEEDS))
        for epoch, expected in enumerate(epochs):
            assert torch.equal(rows(other.batches(epoch)), expected)
            assert torch.equal(rows(other), expected)


def test_a_member_s_batches_alone_are_those_in_the_array():
    array = hfta.ArrayLoader(DATA, 4, seeds=SEEDS, transform=jitter)
    for i, seed in enumerate(SEEDS):
        alone = hfta.ArrayLoader(DATA, 4, seeds=[seed], transform=jitter)
        for epoch in range(2):
            for batch, own in zip(array.batches(epoch), alone.batches(epoch), strict=True):
                assert same([hfta.take(batch, i)], [own])


def test_drop_last():
    loader = hfta.ArrayLoader(DATA, 4, seeds=SEEDS, drop_last=True)
    batches = list(loader.batches(0))
    assert len(loader) == len(batches) == 2
    assert {batch["row"].shape for batch in batches} == {(3, 4)}
    assert same(batches, list(hfta.ArrayLoader(DATA, 4, seeds=SEEDS).batches(0))[:2])
    assert len(hfta.ArrayLoader(DATA, 5, seeds=SEEDS, drop_last=True)) == 2
    assert list(hfta.ArrayLoader(DATA, 11, seeds=SEEDS, drop_last=True)) == []


def test_shared_batches():
    loader = hfta.ArrayLoader(DATA, 4, shared=True, seeds=5)
    first, second = list(loader.batches(0)), list(loader.batches(1))
    assert [batch["x"].shape for batch in first] == [(4, 3), (4, 3), (2, 3)]
    assert torch.equal(rows(first).sort().values, torch.arange(ROWS))
    assert not torch.equal(rows(first), rows(second))
    # The same order as a member of that seed has, so that shared and own batches can be compared.
    assert torch.equal(rows(first), rows(hfta.ArrayLoader(DATA, 4, seeds=[5]).batches(0))[0])
    assert torch.equal(
        rows(hfta.ArrayLoader(DATA, 4, shared=True)), rows(hfta.ArrayLoader(DATA, 4, shared=True, seeds=0))
    )
    assert not torch.equal(rows(first), rows(hfta.ArrayLoader(DATA, 4, shared=True)))


def jitter(batch):
    return {**batch, "x": F.dropout(batch["x"], 0.3) + torch.randn(batch["x"].shape)}


def test_transform_of_shared_batches():
    loader = hfta.ArrayLoader(DATA, 5, shared=True, seeds=7, shuffle=False, transform=jitter)
    own = hfta.ArrayLoader(DATA, 5, seeds=[7], shuffle=False, transform=jitter)
    for batch, expected in zip(loader.batches(0), own.batches(0), strict=True):
        assert same([batch], [optree.tree_map(lambda leaf: leaf[0], expected)])


@pytest.mark.parametrize("given", range(5))
def test_position_saved_and_loaded(given):
    def make():
        return hfta.ArrayLoader(DATA, 3, seeds=SEEDS, transform=jitter)

    loader = make()
    list(loader)
    running = iter(loader)
    for _ in range(given):
        next(running)
    position = json.loads(json.dumps(loader.state_dict()))
    assert position == {"epoch": 1, "batches": given}
    other = make()
    other.load_state_dict(position)
    assert other.state_dict() == position
    # The rest of the epoch, then the epochs after it; and the loader asked is not disturbed.
    for goes_on, rest in ((other, iter(other)), (loader, running)):
        assert same(rest, list(make().batches(1))[given:])
        assert goes_on.state_dict() == {"epoch": 2, "batches": 0}
        assert same(goes_on, make().batches(2))


def test_data_that_is_not_a_tensor_yet():
    pair = ([[1.0, 2.0], [3.0, 4.0]], DATA["x"].numpy()[:2])
    with pytest.raises(hfta.errors.BatchError, match="every leaf needs one row per sample"):
        hfta.ArrayLoader((1.0, pair[1]), 1, seeds=SEEDS)
    x = next(iter(hfta.ArrayLoader(pair[1], 1, seeds=SEEDS, shuffle=False)))
    assert torch.equal(x, DATA["x"][:1].expand(3, 1, 3))
    # A column whose numbers of rows start elsewhere, as after a split.
    column = pandas.Series([5.0, 6.0], index=[7, 3])
    x = next(iter(hfta.ArrayLoader((pandas.DataFrame(pair[1]), column), 2, seeds=SEEDS, shuffle=False)))
    assert torch.equal(x[0], DATA["x"][:2].expand(3, 2, 3)) and x[1].tolist() == [[5.0, 6.0]] * 3


SEEDED = {"seeds": SEEDS}
BAD_SEEDS, BAD_DATA = hfta.errors.HyperparameterError, hfta.errors.BatchError


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (DATA, {}, BAD_SEEDS, r"pass seeds=\[...\], one integer per model, or shared=True"),
        (DATA, {"seeds": [1, 2], "shared": True}, BAD_SEEDS, "with one integer or none"),
        (DATA, {"seeds": [1, 2.5]}, BAD_SEEDS, r"model 1: seed 2\.5 is not a 64-bit integer"),
        ({}, SEEDED, BAD_DATA, r"leaves of shapes \[\]; every leaf needs"),
        (torch.zeros(0, 3), SEEDED, BAD_DATA, r"\[\[0, 3\]\]; every leaf needs"),
        ((torch.zeros(4, 3), torch.zeros(5)), SEEDED, BAD_DATA, r"\[\[4, 3\], \[5\]\]; .* one row per sample"),
        ((torch.zeros(4), torch.tensor(1.0)), SEEDED, BAD_DATA, r"\[\[4\], \[\]\]; every leaf needs"),
        ([torch.zeros(3, 50, 2), torch.zeros(3, 50)], SEEDED, BAD_DATA, "seems to have a model axis.*your own batches"),
    ],
)
def test_bad_input(data, options, error, message):
    with pytest.raises(error, match=message):
        hfta.ArrayLoader(data, 4, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_transform_draws_anew_for_every_member_batch_and_epoch(shuffle):
    loader = hfta.ArrayLoader(
        DATA, 2, seeds=SEEDS, shuffle=shuffle, transform=lambda batch: {"noise": torch.randn(4), "row": batch["row"]}
    )
    noise = [tuple(member) for _ in range(3) for batch in loader for member in batch["noise"].tolist()]
    assert len(noise) == len(set(noise)) == 3 * 5 * len(SEEDS)
    # Nor is it the noise of training or evaluation, at any step of the epoch.
    for data in [*range(15), *(~step for step in range(15))]:
        for key in hfta.random.fold_in(hfta.random.keys(SEEDS), data):
            with hfta.calls.routed(key):
                assert tuple(torch.randn(4).tolist()) not in noise
