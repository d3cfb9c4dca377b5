"""Jobs that somebody new to the package writes first, each beside the loop of a script."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from scripts import BATCHES, X, Y, array, assert_same, loop, make, mse

as_one = pytest.mark.filterwarnings("error::hfta_func.errors.LoopWarning")

NODES = 12
EDGES = torch.randint(NODES, (2, 40), generator=torch.Generator().manual_seed(1))
FEATURES = torch.randn(NODES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
KNOWN = torch.arange(NODES) % 3 > 0


class Passing(nn.Module):
    """A layer that sends messages along edges, into sums that it makes."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, edges):
        source, target = edges
        sent = self.inner(x)[source]
        sums = torch.zeros(len(x), 8, dtype=x.dtype).index_add_(0, target, sent)
        return self.outer(sums.relu())


def passing():
    return Passing().double()


def known_loss(model, batch):
    x, edges, known = batch
    return (model(x, edges) - x.sum(1, keepdim=True))[known].square().mean()


@as_one
def test_a_mask_of_nodes_stays_one_beside_sums_that_a_layer_makes():
    given = {"make": passing, "data": [(FEATURES, EDGES, KNOWN)], "epochs": 4}
    assert_same(array(known_loss, **given), [loop(known_loss, seed, **given) for seed in range(3)])


def shifted(model, batch):
    """A loss that writes members' values into its batch, beside a tensor that it makes."""
    x, y = batch
    found = torch.zeros(len(x), 1, dtype=x.dtype)
    found += model(x)
    y -= found
    return y.square().mean()


@as_one
def test_a_batch_that_members_write_is_each_ones_own():
    expected = [loop(shifted, seed, batch=lambda batch: tuple(map(torch.clone, batch))) for seed in range(3)]
    assert_same(array(shifted), expected)


def grouped(first):
    rest = {"rest": hfta.adamw(lr=0.01), "first": hfta.adamw(lr=0.01)}
    return hfta.partition({"": "rest", "0": first}, rest if first else {"rest": rest["rest"]})


def test_a_layer_that_trains_from_the_third_epoch_on():
    seeds, data = range(3), [(X, Y)]
    step = hfta.make_train_step(make(), mse, grouped(None), batch_dims=None)
    state = step.init(*hfta.init_params(make, seeds), seeds=seeds)
    state, _ = hfta.fit(step, state, data, epochs=2, progress=False)
    whole = hfta.make_train_step(make(), mse, grouped("first"), batch_dims=None)
    fresh = whole.init(state.params, state.buffers, seeds=seeds).opt_state
    state = state._replace(opt_state=fresh._replace(groups=fresh.groups | state.opt_state.groups))
    state, _ = hfta.fit(whole, state, data, epochs=3, progress=False)
    expected = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for epoch in range(5):
            model[0].requires_grad_(epoch >= 2)
            optimizer.zero_grad()
            F.mse_loss(model(X), Y).backward()
            optimizer.step()
        expected.append(model)
    assert_same(hfta.unstack_params(make(), *hfta.step.stacked(state)), expected)


def frozen():
    model = make()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((frozen, hfta.adam(lr=0.1)), (make, hfta.adam(lr=0.1)), r"optimizer has opt_state.exp_avg\['0.bias'\] but"),
        ((make, hfta.adam(lr=0.1)), (make, hfta.sgd(lr=0.1)), r"the state has opt_state.hyperparams\['beta1'\] but"),
        (
            (make, hfta.adam(lr=0.1)),
            (make, hfta.chain(hfta.clip_grad_norm(1.0), hfta.adam(lr=0.1))),
            r"the state has opt_state.step but",
        ),
    ],
    ids=["frozen", "class", "chain"],
)
def test_a_state_of_another_optimizer(before, after, message):
    step, other = (hfta.make_train_step(made(), mse, optimizer, batch_dims=None) for made, optimizer in (before, after))
    state = step.init(*hfta.init_params(make, range(2)), seeds=range(2))
    with pytest.raises(hfta.errors.StateError, match=message + r".*; begin anew by step.init"):
        other(state, (X, Y))


class Teacher(nn.Module):
    """A student, and an average of it that teaches, moved in each call as scripts of MoCo and BYOL do."""

    def __init__(self, way):
        super().__init__()
        self.student, self.teacher, self.way = make(), make(), way
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.way == "data":
                    mine.data = mine.data * 0.9 + its.data * 0.1
                else:
                    mine.lerp_(its, 0.1)
            goal = self.teacher(x)
        return self.student(x), goal


def taught(model, batch):
    found, goal = model(batch[0])
    return F.mse_loss(found, batch[1]) + F.mse_loss(found, goal)


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("way", ["data", "in place"])
def test_a_teacher_that_a_call_moves_is_refused_at_once(way, chunk_size):
    with pytest.raises(hfta.errors.StateError, match=r"writes its parameter 'teacher.0.weight'.*hfta.joint"):
        array(taught, make=lambda: Teacher(way), chunk_size=chunk_size, data=BATCHES[:1], epochs=1)
