"""Models of different size as one array: every member is the run of its own model alone."""

import copy
import math
import pickle
import random

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from comparisons import assert_trees_close
from ways import seeded, start

TOLERANCE = 1e-10


class Layer(nn.Module):
    """A function of the units of a layer, or of what it reduces them to."""

    def __init__(self, width, func, outputs=None):
        super().__init__()
        self.inner, self.outer, self.func = nn.Linear(5, width), nn.Linear(outputs or width, 2), func

    def forward(self, x):
        return self.outer(self.func(self.inner(x)))


class Block(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(rate)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    def __init__(self, width, depth, rate):
        super().__init__()
        self.depth, self.width = depth, width
        self.first, self.head = nn.Linear(5, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList([Block(width, rate) for _ in range(depth)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(x):
    return x[:, None] + torch.arange(3.0, dtype=x.dtype)[:, None]


class Attention(nn.Module):
    """Attention written out, with heads of one size."""

    def __init__(self, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v = (nn.Linear(5, 2 * heads) for _ in range(3))
        self.out = nn.Linear(2 * heads, 2)

    def forward(self, x):
        q, k, v = (each(tokens(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        else:
            y = F.dropout((q @ k.transpose(-1, -2) / math.sqrt(2)).softmax(-1), 0.2, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2)).mean(1)


class Heads(nn.Module):
    def __init__(self, width, heads, needs_weights, **options):
        super().__init__()
        self.embed, self.needs_weights = nn.Linear(5, width), needs_weights
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, **options)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        x = self.embed(tokens(x))
        return self.out(self.attention(x, x, x, need_weights=self.needs_weights)[0][:, 0])


class Encoder(nn.Module):
    def __init__(self, width, heads, depth, wide, norm_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, wide, 0.1, batch_first=True, norm_first=norm_first)
        self.embed, self.out = nn.Linear(5, width), nn.Linear(width, 2)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x):
        return self.out(self.layers(self.embed(tokens(x)))[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind, width, **options):
        super().__init__()
        self.rnn, self.out = kind(5, width, batch_first=True, **options), nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.rnn(tokens(x))[0][:, -1])


class Images(nn.Module):
    """Convolutions with a middle of their own; f(0) of their activation is not 0."""

    def __init__(self, channels, *middle):
        super().__init__()
        last = nn.Sequential(nn.Softplus(), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten())
        self.body = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ELU(), *middle, last)
        self.out = nn.Linear(4 * channels, 2)

    def forward(self, x):
        return self.out(self.body(x[:, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]].reshape(-1, 1, 4, 4)))


class Words(nn.Module):
    def __init__(self, width, tied):
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(7, width), nn.RMSNorm(width), nn.Linear(width, 7, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.norm(self.embed((x.abs() * 3).long() % 7).mean(1)))[:, :2]


def mlp(width, depth, rate, norm=nn.BatchNorm1d, activation=nn.Softplus):
    hidden = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), norm(width), activation(), nn.Dropout(rate))
    ]
    return nn.Sequential(nn.Linear(5, width), nn.Sigmoid(), nn.Dropout(rate), *hidden, nn.Linear(width, 2))


def noisy(h):
    return F.rrelu(h + torch.randn_like(h) + torch.rand(h.shape), training=True)


def normed(h):
    return (h - h.mean(-1, keepdim=True)) / h.var(-1, unbiased=False, keepdim=True).sqrt()


def image_middle(kind, c):
    return {
        "batch norm": lambda: (nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)),
        "two groups": lambda: (nn.GroupNorm(2, c),),
        "groups of two": lambda: (nn.GroupNorm(c // 2, c),),
        "instance norm": lambda: (nn.InstanceNorm2d(c, affine=True), nn.LocalResponseNorm(2)),
        "depthwise": lambda: (nn.Conv2d(c, c, 3, padding=1, groups=c), nn.Conv2d(c, c, 1)),
        "transposed": lambda: (nn.ConvTranspose2d(c, c, 3, padding=1), nn.PReLU(c)),
    }[kind]()


CASES = {
    "mlp": (mlp, (3, 0, 0.1), (8, 2, 0.2), (6, 1, 0.0)),
    "layer norms": (lambda *a: mlp(*a, norm=nn.LayerNorm, activation=nn.Sigmoid), (3, 1, 0.3), (8, 0, 0.1), (6, 3, 0.2)),
    "blocks": (Residual, (3, 2, 0.1), (8, 1, 0.1), (6, 3, 0.1)),
    "noise": (lambda w: Layer(w, noisy), (3,), (5,)),
    "normed by hand": (lambda w: Layer(w, normed), (3,), (5,)),
    "log_softmax": (lambda w: Layer(w, lambda h: h.log_softmax(-1)), (3,), (5,)),
    **{
        name: (lambda w, func=func: Layer(w, lambda h: func(h.sigmoid().cos() - 0.9).unsqueeze(-1), 1), (3,), (5,))
        for name, func in {
            "mean": lambda h: h.mean(-1), "sum": lambda h: h.sum(dim=1), "max": lambda h: h.max(-1).values,
            "amin": lambda h: h.amin(-1) + h.min(-1)[0], "std": lambda h: h.std(-1) + h.var(1, correction=0),
            "logsumexp": lambda h: h.logsumexp((1,)), "prod": lambda h: h.prod(-1),
        }.items()
    },
    "attention": (lambda h: Attention(h, False), (1,), (3,), (2,)),
    "fused attention": (lambda h: Attention(h, True), (1,), (3,), (2,)),
    "heads with weights": (lambda *a: Heads(*a, True), (4, 2), (8, 2), (6, 2)),
    "heads": (lambda *a: Heads(*a, False, dropout=0.2, bias=False), (4, 2), (8, 4), (6, 3)),
    "encoder": (lambda *a: Encoder(*a, True), (4, 2, 1, 6), (8, 2, 3, 5), (6, 2, 2, 9)),
    "encoder of heads": (lambda *a: Encoder(*a, False), (4, 2, 1, 6), (8, 4, 2, 5)),
    "lstm": (lambda w: Recurrent(nn.LSTM, w, num_layers=2, dropout=0.2), (3,), (5,)),
    "gru": (lambda w: Recurrent(nn.GRU, w, num_layers=2), (3,), (5,)),
    **{f"images, {kind}": (lambda c, kind=kind: Images(c, *image_middle(kind, c)), (2,), (6,), (4,)) for kind in (
        "batch norm", "two groups", "groups of two", "instance norm", "depthwise", "transposed"
    )},
    "words": (lambda w: Words(w, False), (2,), (6,)),
    "tied words": (lambda w: Words(w, True), (2,), (6,)),
    "some biases": (lambda w: nn.Sequential(nn.Linear(5, w, bias=w > 3), nn.Tanh(), nn.Linear(w, 2)), (3,), (4,)),
}  # fmt: skip


def models_of(name):
    make, *sizes = CASES[name]
    return seeded(lambda size: make(*size).double(), range(len(sizes)), sizes)


def batches(count, steps):
    draws = torch.Generator().manual_seed(0)
    shapes = (steps, count, 6, 5), (steps, count, 6, 2)
    return [*zip(*(torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes), strict=True)]


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def clipped_sgd(lr):
    return hfta.chain(hfta.clip_grad_norm(0.5), hfta.sgd(lr=lr, momentum=0.9, weight_decay=0.1))


def assert_alone(models, optimizer=clipped_sgd, steps=2, compiled=False, **options):
    """Losses and exports of a padded array against every model alone, as an array of one."""
    before = copy.deepcopy([model.state_dict() for model in models])
    model, rates = hfta.padded(models), [0.05 * (i + 1) for i in range(len(models))]
    step = hfta.make_train_step(model, loss, optimizer(rates), **options)
    state = step.init(*hfta.stack_params(models, pad=model), seeds=range(len(models)))
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    losses, data = [], batches(len(models), steps)
    for batch in data:
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    found = hfta.unstack_params(model, *hfta.step.stacked(state))
    for i, alone in enumerate(models):
        one, own = start([alone], loss, optimizer(rates[i : i + 1]), [i])
        for number, batch in enumerate(data):
            own, metrics = one(own, optree.tree_map(lambda leaf: leaf[i : i + 1], batch))  # noqa: B023
            assert_trees_close({"loss": losses[number][i]}, {"loss": metrics["loss"][0]}, TOLERANCE)
        (expected,) = hfta.unstack_params(alone, *hfta.step.stacked(own))
        assert type(found[i]) is type(alone)
        assert_trees_close({**found[i].state_dict()}, {**expected.state_dict()}, TOLERANCE, f"model {i}")
        assert_trees_close({**alone.state_dict()}, {**before[i]}, 0.0)
    return step, state, found


@pytest.mark.sampled(every=5)
@pytest.mark.exhaustive(unless="^(mlp|blocks|noise|mean|images, two groups|some biases)$")
@pytest.mark.parametrize("name", CASES)
def test_members_are_their_models_alone(name):
    assert_alone(models_of(name))


WAYS = {
    "one by one": {"chunk_size": 1},
    "in pairs": {"chunk_size": 2},
    "replayed": {"replay": True},
    "checkpointed": {"checkpoint": True},
    "saving less": {"save": "less"},
    "donated": {"donate": True},
}


@pytest.mark.sampled(every=3)
@pytest.mark.exhaustive(unless="replayed|one by one|checkpointed")
@pytest.mark.parametrize("way", WAYS)
def test_in_every_way(way):
    assert_alone(models_of("layer norms"), steps=5 if way == "replayed" else 2, **WAYS[way])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["layer norms", "encoder", "images, two groups", "lstm"])
def test_compiled(name):
    torch._dynamo.reset()
    assert_alone(models_of(name), compiled=True)


class Flattened(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner, self.outer = nn.Conv1d(2, channels, 3, padding=1), nn.Linear(1, 1)

    def forward(self, x):
        return self.outer(F.dropout(self.inner(x).flatten(1), 0.5).logsumexp(1, keepdim=True))


def test_compiled_evaluation_and_exports_need_no_call_before():
    torch._dynamo.reset()
    models = [each.eval() for each in models_of("layer norms")]
    model, x = hfta.padded(models), torch.randn(3, 5, dtype=torch.float64)
    stacked, expected = hfta.stack_params(models, pad=model), torch.stack([each(x) for each in models]).detach()
    evaluate = hfta.make_eval_step(model, lambda model, x: {"y": model(x)})
    compiled = torch.compile(evaluate, fullgraph=True, backend="aot_eager")(stacked, x)
    assert_trees_close({**compiled}, {"y": expected}, TOLERANCE)
    mean, _ = hfta.Ensemble(model, *stacked).deploy().export(x).module()(x)
    assert_trees_close({"y": mean}, {"y": expected.mean(0)}, TOLERANCE)
    with pytest.raises(
        hfta.errors.StackError, match=r"a function must be called with inputs of this shape once before"
    ):
        torch.export.export(hfta.Ensemble(hfta.padded(models), *stacked), (x,))
    # Its true sizes were those of another length.
    models = [Flattened(channels).eval() for channels in (2, 4)]
    ensemble = hfta.Ensemble(hfta.padded(models), *hfta.stack_params(models, pad=True)).eval()
    ensemble(torch.randn(3, 2, 4))
    with pytest.raises(
        hfta.errors.StackError, match=r"calls draw as no model .* called with inputs of this shape once"
    ):
        torch.export.export(ensemble, (torch.randn(3, 2, 7),))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda width: nn.GroupNorm(2, width)])
def test_autocast(norm):
    models = [nn.Sequential(nn.Linear(5, w), norm(w), nn.Tanh(), nn.Linear(w, 2)) for w in (6, 10)]
    step = hfta.make_train_step(hfta.padded(models), loss, hfta.sgd(lr=0.1), autocast=torch.bfloat16)
    state = step.init(*hfta.stack_params(models, pad=True), seeds=[0, 1])
    batch = [leaf.float() for leaf in batches(2, 1)[0]]
    _, metrics = step(state, batch)
    for i, alone in enumerate(models):
        one = hfta.make_train_step(alone, loss, hfta.sgd(lr=0.1), autocast=torch.bfloat16)
        _, expected = one(one.init(*hfta.stack_params([alone]), seeds=[i]), [leaf[i : i + 1] for leaf in batch])
        torch.testing.assert_close(metrics["loss"][i : i + 1], expected["loss"], rtol=1e-3, atol=0)


@pytest.mark.exhaustive(unless="lamb")
@pytest.mark.parametrize("name", ["adam", "lamb", "lion", "adagrad", "adadelta", "radam", "rmsprop"])
def test_optimizers(name):
    assert_alone(models_of("log_softmax"), getattr(hfta, name))


@pytest.mark.parametrize(
    ("of_matrices", "why"),
    [
        (hfta.muon(), r"scales the update of '.*weight' by its shape"),
        (hfta.adafactor(), r"adafactor needs real, unpadded parameters, not '.*weight'; use another"),
    ],
)
def test_optimizers_that_look_at_the_shape_are_refused(of_matrices, why):
    model = hfta.padded(models := models_of("mlp"))
    groups = {"matrices": of_matrices, "rest": hfta.sgd(lr=0.1)}
    optimizer = hfta.partition(lambda path, shape: "matrices" if len(shape) == 2 else "rest", groups)
    step = hfta.make_train_step(model, loss, optimizer)
    with pytest.raises(hfta.errors.HyperparameterError, match=why):
        step.init(*hfta.stack_params(models, pad=model), seeds=range(len(models)))


def test_evaluation_prediction_and_files(tmp_path):
    models = models_of("mlp")
    step, state, found = assert_alone(models)
    model, (batch,) = hfta.padded(models), batches(3, 1)
    expected = torch.stack([loss(each.eval(), [leaf[i] for leaf in batch]) for i, each in enumerate(found)])
    for way in (None, 1):
        metrics = hfta.make_eval_step(model, loss, batch_dims=0, chunk_size=way)(state, batch)
        assert_trees_close({"loss": metrics["loss"]}, {"loss": expected.detach()}, TOLERANCE)
    outputs = torch.stack([each.eval()(batch[0][0]) for each in found])
    ensemble = hfta.Ensemble(model, *hfta.step.stacked(state)).eval()
    assert_trees_close({"y": ensemble(batch[0][0])}, {"y": outputs}, TOLERANCE)
    hfta.save(state, tmp_path / "state.safetensors")
    loaded = hfta.load(tmp_path / "state.safetensors", like=state)
    again, _ = pickle.loads(pickle.dumps(step))(loaded, batch)
    now, _ = step(state, batch)
    assert_trees_close(again, now, 0.0)
    exported = hfta.export_model(model, loaded, 1)
    assert_trees_close({**exported.state_dict()}, {**found[1].state_dict()}, 0.0)
    swapped = hfta.concat([hfta.take(state, [2]), hfta.take(state, [0])])
    both, _ = step(swapped, optree.tree_map(lambda leaf: leaf[[2, 0]], batch))
    assert_trees_close(both, hfta.take(now, [2, 0]), 1e-12)


def test_seeds_make_the_members():
    def make(width, depth):
        return mlp(width, depth, 0.1)

    model = hfta.padded([make(width, depth) for width in (3, 7) for depth in (0, 2)])
    parts = [
        hfta.init_params(make, [seed], pad=model, width=[width], depth=[depth])
        for seed, width, depth in ((4, 3, 2), (5, 7, 0))
    ]
    for seed, found in zip((4, 5), hfta.unstack_params(model, *hfta.concat(parts)), strict=True):
        torch.manual_seed(seed)
        expected = make(*((3, 2) if seed == 4 else (7, 0)))
        assert str(found) == str(expected)
        assert_trees_close({**found.state_dict()}, {**expected.state_dict()}, 0.0)
    # Rates that are equal in one array and not in another remain the members' own.
    rates = [mlp(3, 1, rate) for rate in (0.1, 0.4)]
    varied = hfta.padded(rates)
    stacked = [hfta.stack_params([each], pad=varied) for each in rates]
    assert [back[2].p for back in hfta.unstack_params(varied, *hfta.concat(stacked))] == [0.1, 0.4]


def drawn(draws):
    """A random program of layers, and models of it in drawn sizes."""
    layers = [
        *(lambda w: nn.LayerNorm(w), lambda w: nn.BatchNorm1d(w), lambda w: nn.Softmax(-1)),
        *(lambda w: nn.Softplus(), lambda w: nn.Sigmoid(), lambda w: nn.Dropout(0.3), lambda w: nn.RMSNorm(w, 0.1)),
        *(lambda w: nn.Linear(w, w), lambda w: Block(w, 0.2), lambda w: nn.PReLU(w), lambda w: nn.AlphaDropout(0.2)),
    ]  # fmt: skip
    chosen = [draws.choice(layers) for _ in range(draws.randint(2, 5))]
    repeated, first = [draws.choice(layers) for _ in range(draws.randint(1, 2))], draws.random() < 0.5

    def make(width, depth):
        parts = [[layer(width) for layer in chosen], [layer(width) for _ in range(depth) for layer in repeated]]
        body = nn.Sequential(*parts[1 - first]), nn.Sequential(*parts[first])
        return nn.Sequential(nn.Linear(5, width), *body, nn.Linear(width, 2)).double()

    return [make(draws.randint(2, 9), draws.randint(0, 3)) for _ in range(3)]


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(unless="^[01]$")
@pytest.mark.parametrize("seed", range(24))
def test_random_programs_of_drawn_sizes(seed):
    torch.manual_seed(seed)
    assert_alone(drawn(random.Random(seed)), lambda lr: hfta.sgd(lr=lr, weight_decay=0.1))


REFUSED = {
    "kernels": (lambda k: Images(3, nn.Conv2d(3, 3, k, padding=k // 2)), (3, 5), r"'body\.2' \(Conv2d\);"),
    "groups": (lambda c: Images(c, nn.Conv2d(c, c, 3, padding=1, groups=2)), (2, 4), r"'body\.2' \(Conv2d\);"),
    "both directions": (
        lambda w: nn.Sequential(Recurrent(nn.LSTM, w, bidirectional=True).rnn, nn.Identity()),
        *((2, 3), r"'0' \(LSTM\);"),
    ),
    "positions": (lambda w: Layer(w, lambda h: h.flip(-1)), (3, 5), r"'outer' \(Linear\);"),
    "chunks": (lambda w: Layer(w, lambda h: h[..., ::2].repeat_interleave(2, -1)), (4, 6), None),
    "median": (lambda w: Layer(w, lambda h: h.median(-1, True)[0], 1), (3, 5), r"'outer' \(Linear\);"),
    "size in code": (
        lambda w: Layer(w, lambda h: h / h.shape[-1]),
        *((3, 5), r"'outer' \(Linear\);"),
    ),
    "batch norm over units": (
        lambda w: nn.Sequential(nn.Linear(5, w), nn.Unflatten(1, (1, w)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(w, 2)),
        *((3, 5), r"'2' \(BatchNorm1d\);"),
    ),
    "sorted": (lambda w: Layer(w, lambda h: h.sort(-1)[0]), (3, 5), r"'outer' \(Linear\);"),
    "outputs": (lambda w: nn.Linear(5, w), (2, 3), None),
    "code": (lambda w: Layer(w, lambda h: h.softmax(-1) if h.shape[-1] > 4 else h), (3, 5), "does not call the same"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_padded_is_named(name):
    make, sizes, message = REFUSED[name]
    models = [make(size).double() for size in sizes]

    def first(model, x):
        outputs = model(x)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean()

    step = hfta.make_train_step(model := hfta.padded(models), first, hfta.sgd(lr=0.1))
    state = step.init(*hfta.stack_params(models, pad=model), seeds=range(len(sizes)))
    x = torch.randn(len(sizes), 6, 5, dtype=torch.float64)
    if message is None:
        assert step(state, x)[1]["loss"].isfinite().all()
        return
    kind = hfta.errors.StackError if name == "code" else hfta.errors.VerifyError
    with pytest.raises(kind, match=message):
        step(state, x)


BAD = {
    "sizes without padding": (
        lambda: hfta.stack_params([nn.Linear(5, 2), nn.Linear(5, 3)]),
        r"model 1: 'out_features' is 3 but in model 0 it is 2; .*pad=True pads sizes",
    ),
    "another size": (
        lambda: hfta.stack_params([mlp(3, 1, 0.1), mlp(9, 1, 0.1)], pad=hfta.padded([mlp(3, 1, 0.1), mlp(4, 2, 0.1)])),
        "model 1 has a size that the padded model was not made of",
    ),
    "classes": (
        lambda: hfta.padded([nn.Sequential(nn.Linear(2, w), act()) for w, act in ((2, nn.ReLU), (3, nn.Tanh))]),
        "model 1: '1' is a Tanh but in model 0 it is a ReLU",
    ),
    "settings": (
        lambda: hfta.padded([nn.Conv1d(2, w, 3, padding_mode=mode) for w, mode in ((2, "zeros"), (3, "circular"))]),
        "model 1: 'padding_mode' is 'circular' but in model 0 it is 'zeros'",
    ),
    "modules": (
        lambda: hfta.padded([nn.ModuleDict({"a": nn.ReLU()}), nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()})]),
        "model 0: the model has the modules",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(hfta.errors.StackError, match=message):
        call()
