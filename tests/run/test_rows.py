"""Rows of each member's own: lists of unequal length, bags, folds and weights, the same alone as in an array."""

import pytest
import torch
from torch import nn

import hfta_func as hfta

ROWS = 11
DATA = {"x": torch.arange(ROWS * 2.0, dtype=torch.float64).reshape(ROWS, 2), "row": torch.arange(ROWS)}
SEEDS = [4, 9, 4, 2]
OWN = [[0, 3, 5], [10, 9, 8, 7, 6, 5, 4], torch.tensor([2]), range(ROWS)]
WEIGHTS = torch.tensor([0, 1, 0, 0, 2, 0, 0, 0, 0, 1, 0.0])
WAYS = {
    "rows": {"rows": OWN},
    "bootstrap": {"bootstrap": True},
    "folds": {"folds": 3},
    "weights": {"weights": WEIGHTS},
    "weights each": {"weights": torch.arange(4 * ROWS).reshape(4, ROWS)},
    "rows and weights": {"rows": OWN, "weights": 1 + WEIGHTS},
}


def loader(way, **options):
    return hfta.ArrayLoader(DATA, 4, seeds=SEEDS, **WAYS[way], **options)


def seen(loader, epochs):
    """``[M, rows seen]``, epoch after epoch."""
    return torch.cat([batch["row"] for epoch in range(epochs) for batch in loader.batches(epoch)], dim=1)


def test_members_see_their_own_rows_pass_after_pass():
    dealt = loader("rows")
    found = seen(dealt, 7)
    assert len(dealt) == 3 and found.shape == (4, 7 * 3 * 4)
    orders = set()
    for own, rows in zip(OWN, found.tolist(), strict=True):
        for start in range(0, len(rows) - len(own) + 1, len(own)):
            assert sorted(rows[start : start + len(own)]) == sorted(torch.as_tensor(own).tolist())
            orders.add(tuple(rows[start : start + len(own)]))
    assert len(orders) > 20


@pytest.mark.parametrize("way", WAYS)
def test_a_member_alone_sees_the_same(way):
    whole = loader(way)
    found = seen(whole, 4)
    for index in ([2], [3, 0], slice(1, 3)):
        assert torch.equal(seen(whole.take(index), 4), found[index])
    assert torch.equal(seen(whole.take(slice(1, 4)), 2), found[1:, : seen(whole, 2).shape[1]])
    for member, seed in enumerate(SEEDS):
        if way in ("rows", "bootstrap", "weights"):
            own = {"rows": [OWN[member]]} if way == "rows" else WAYS[way]
            alone = seen(hfta.ArrayLoader(DATA, 4, seeds=[seed], **own), 4)[0]
            assert torch.equal(alone, found[member][: len(alone)])
    assert torch.equal(found[0], found[2]) == (way in ("bootstrap", "weights"))


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_goes_on_where_it_was_left(way):
    whole, other = loader(way), loader(way)
    batches = [batch for _ in range(3) for batch in whole]
    other.load_state_dict({"epoch": 1, "batches": 1})
    rest = [*other, *other]
    assert all(torch.equal(a["row"], b["row"]) for a, b in zip(batches[len(whole) + 1 :], rest, strict=True))


def test_a_bag_is_the_same_in_every_epoch():
    found = seen(loader("bootstrap"), 2).reshape(4, 2, ROWS).sort(-1).values
    assert torch.equal(found[:, 0], found[:, 1])
    assert all(len(set(bag)) < ROWS for bag in found[:, 0].tolist())
    many = hfta.ArrayLoader(torch.arange(200), 200, seeds=range(50), bootstrap=True)
    share = torch.stack([torch.tensor(len(set(bag)) / 200) for bag in next(iter(many)).tolist()]).mean()
    assert abs(share - 0.632) < 0.02
    # Other members have bags of their own.
    assert torch.equal(seen(loader("bootstrap").of_members(torch.tensor([9])), 2), seen(loader("bootstrap"), 2)[1:2])


def test_folds_part_the_data():
    whole = loader("folds")
    held_out = whole.held_out()["row"]
    assert held_out.shape == (4, ROWS // 3)
    for member in range(4):
        trained = set(seen(whole, 3)[member].tolist())
        assert trained.isdisjoint(held_out[member].tolist()) and len(trained) in (7, 8)
    assert torch.equal(held_out[0], held_out[3]) and len(set(held_out[:3].flatten().tolist())) == 9
    assert torch.equal(whole.take([2, 1]).held_out()["row"], held_out[[2, 1]])
    # Whatever the seeds.
    assert torch.equal(hfta.ArrayLoader(DATA, 4, seeds=[1, 1, 1, 1], folds=3).held_out()["row"], held_out)


@pytest.mark.exhaustive
def test_weights_are_proportions():
    rows = torch.arange(5)
    weights = torch.tensor([[0, 1, 2, 0, 1], [1, 0, 0, 0, 0.0]])
    found = seen(hfta.ArrayLoader({"row": rows}, 5, seeds=[1, 2], weights=weights), 2000)
    shares = torch.stack([(found == row).double().mean(1) for row in rows], 1)
    torch.testing.assert_close(shares, (weights / weights.sum(1, keepdim=True)).double(), atol=0.02, rtol=0)
    assert shares[0, 0] == shares[0, 3] == 0 and shares[1, 0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [[0], [1]]}, "rows is 2 lists for 4 models"),
        ({"rows": [[0], [1], [], [2]]}, r"model 2: rows\[2\] is \[\]; give row numbers from 0 to 10"),
        ({"rows": [[0], [1], [2], [11]]}, r"model 3: rows\[3\] is \[11\]; give row numbers from 0 to 10"),
        ({"rows": [[0], [1.5], [-1], [2]]}, r"model 1: rows\[1\] is \[1.5\]; give"),
        ({"rows": torch.ones(4, 11, dtype=torch.bool)}, "such as mask.nonzero"),
        ({"folds": 12}, "folds is 12 for 11 rows; pass 2 to 11, so that every part has a row"),
        ({"folds": 3, "bootstrap": True}, "bootstrap and folds both say which rows a model has"),
        ({"weights": [1.0, 2.0]}, r"weights is \[2\] for 4 models; give \[11\] or \[4, 11\]"),
        ({"weights": WEIGHTS.log()}, "finite and not negative"),
        ({"weights": WEIGHTS, "rows": [[1], [0, 2], [4], [9]]}, "model 1: weights must be .* not 0 for all rows"),
        ({"folds": 3, "shuffle": False}, "leave out shuffle=False"),
        ({"batches_per_epoch": 2, "shuffle": False}, "batches_per_epoch deals rows .* leave out shuffle=False"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(hfta.errors.HyperparameterError, match=message):
        hfta.ArrayLoader(DATA, 4, seeds=SEEDS, **options)


def test_members_are_evaluated_on_their_own_rows_as_alone():
    """Each row once, in batches of a loader or in one, with a metric that is no mean over rows."""

    def make():
        return nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5)).double()

    def spread(model, batch):
        noise = torch.rand_like(batch["x"])
        return {"spread": model(batch["x"]).std(correction=0), "both": (model(batch["x"] + noise) - batch["x"]).mean(0)}

    def jitter(batch):
        return {**batch, "x": batch["x"] + torch.rand(1).double()}

    step = hfta.make_train_step(make(), lambda model, batch: model(batch["x"]).mean(), hfta.sgd(lr=0.1))
    state = step.init(*hfta.init_params(make, SEEDS), seeds=SEEDS)
    train, single, each = loader("rows"), *(hfta.make_eval_step(make(), spread, batch_dims=dims) for dims in (None, 0))
    dealt = hfta.ArrayLoader(DATA, 4, seeds=SEEDS, rows=OWN, transform=jitter)
    found = {}
    ways = {"whole": (spread, DATA, OWN), "batches": (spread, dealt), "folds": (spread, loader("folds"))}
    for name, evaluate in ways.items():
        after, history = hfta.fit(step, state, train, epochs=1, evaluate=evaluate, progress=False)
        found[name] = history.epochs[-1]
        for member, seed in enumerate(SEEDS):
            alone, rows = hfta.take(after, member), torch.as_tensor(OWN[member])
            if name == "whole":
                parts = [(1, single(alone, {key: leaf[rows] for key, leaf in DATA.items()}))]
            elif name == "batches":
                only = hfta.ArrayLoader(DATA, 4, seeds=[seed], rows=[rows], transform=jitter)
                parts = [(batch["x"].shape[1], each(alone, batch)) for _, batch in only.once()]
                assert sorted(size for size, _ in parts) == sorted(len(part) for part in rows.split(4))
            else:
                held_out = loader("folds").held_out()["row"][member].split(4)
                parts = [
                    (len(part), single(alone, {key: leaf[part] for key, leaf in DATA.items()})) for part in held_out
                ]
            for key in ("spread", "both"):
                value = sum(size * part[key][0] for size, part in parts) / sum(size for size, _ in parts)
                torch.testing.assert_close(found[name][key][member], value, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found["whole"]["spread"], found["batches"]["spread"])


@pytest.mark.parametrize("way", ["rows", "bootstrap", "weights", "plain", "shared"])
def test_epochs_of_a_length_of_their_own_are_one_stream(way):
    given = {"shared": True} if way == "shared" else {"seeds": SEEDS, **WAYS.get(way, {})}
    first, second = (hfta.ArrayLoader(DATA, 4, batches_per_epoch=count, **given) for count in (2, 5))
    assert len(first) == 2 and [*next(iter(first))["x"].shape][-2:] == [4, 2]
    epochs = {first: 5, second: 2}
    rows = [torch.cat([b["row"] for epoch in range(epochs[each]) for b in each.batches(epoch)], -1) for each in epochs]
    assert torch.equal(*rows)
    if way in ("plain", "shared"):
        passes = rows[0].reshape(-1, 40)[:, :33].unflatten(1, (3, ROWS))
        assert torch.equal(passes.sort(-1).values, torch.arange(ROWS).expand_as(passes))
    if way == "plain":
        later = torch.cat([batch["row"] for batch in first.of_members(torch.tensor([9]), epochs=[3])], -1)
        assert torch.equal(later[0], rows[0][1, 24:32])
