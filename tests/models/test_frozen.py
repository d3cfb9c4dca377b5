"""Frozen parameters that all members share are held once: by the step, not by the state, and never copied."""

import copy

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfta_func as hfta
from hfta_func.run.memory import peak_bytes
from ways import start

pytestmark = pytest.mark.usefixtures("one_thread")
M, LR = 3, [0.1, 0.03, 0.01]


class Gained(nn.Linear):
    """A buffer beside a trained parameter is a member's own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("gain", torch.rand((), dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) * self.gain


class Adapted(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float64)
        self.up = Gained(rank, base.out_features, dtype=torch.float64)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """Everything that a base may hold: tables, norms, convolution, attention, buffers; tied weights."""

    def __init__(self, width=8, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.batch = nn.BatchNorm1d(width).eval()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.fc = nn.Linear(width, width)
        self.register_buffer("mask", torch.rand(width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.batch(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.norm(x)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(torch.tanh(self.fc(x)) * self.mask)


def over(base):
    return copy.deepcopy(base, {id(t): t for t in (*base.parameters(), *base.buffers())})


def make_models(count=M, shared=True, base=None):
    torch.manual_seed(0)
    base = Net() if base is None else base
    base.requires_grad_(False)
    models = []
    for seed in range(count):
        model = over(base) if shared else copy.deepcopy(base)
        torch.manual_seed(seed)
        model.fc = Adapted(model.fc, 2)
        models.append(model)
    return models


def loss_fn(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def make_batches(count, members=M):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(11, (members, 2, 5), generator=generator) for _ in "xy") for _ in range(count)]


def array(models, optimizer=None, **options):
    return start(models, loss_fn, optimizer or hfta.adamw(lr=LR), share_frozen=True, **options)


OWN = {"fc.down.weight", "fc.up.weight", "fc.up.bias"}


def test_only_what_is_trained_is_stacked():
    params, buffers = hfta.stack_params(make_models(), share_frozen=True)
    assert params.keys() == OWN and buffers.keys() == {"fc.up.gain"} and len({*buffers["fc.up.gain"].tolist()}) == M


WAYS = {
    **{"plain": {}, "one by one": {"chunk_size": 1}, "in groups": {"chunk_size": 2}, "auto": {"chunk_size": "auto"}},
    **{"donate": {"donate": True}, "save": {"save": "less"}, "checkpoint": {"checkpoint": ["attend", "fc"]}},
    "accumulate": {"optimizer": hfta.accumulate(hfta.adamw(lr=LR), 2)},
}


@pytest.mark.sampled(every=2)
@pytest.mark.exhaustive(ids="auto|accumulate")
@pytest.mark.parametrize("way", WAYS)
def test_members_are_the_solo_runs(way):
    models, options = make_models(), WAYS[way]
    before = {path: tensor.clone() for path, tensor in models[0].state_dict().items() if path not in OWN}
    step, state = array(models, **options)
    solos = [copy.deepcopy(model) for model in models]
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr) for m, lr in zip(solos, LR, strict=True)
    ]
    batches = make_batches(6)
    every = 2 if "optimizer" in options else 1
    for number, batch in enumerate(batches, start=1):
        state, _ = step(state, batch)
        for member, (solo, optimizer) in enumerate(zip(solos, optimizers, strict=True)):
            (loss_fn(solo, tuple(x[member] for x in batch)) / every).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    for member, solo in enumerate(solos):
        for path, param in solo.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(state.params[path][member], param.detach(), rtol=1e-10, atol=1e-12)
    after = models[0].state_dict()
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items())
    assert state.params.keys() == OWN


def test_no_step_copies_the_base():
    torch.manual_seed(0)
    base = nn.Linear(512, 512).requires_grad_(False)
    models = [nn.Sequential(over(base), nn.Linear(512, 1)) for _ in range(M)]
    step = None

    def work():
        nonlocal step
        step, state = start(models, lambda m, x: m(x).square().mean(), hfta.adam(lr=1e-3), share_frozen=True)
        step(state, torch.ones(M, 2, 512))

    # Both weights of the first layer: 1 MB; everything else is some kilobytes.
    assert peak_bytes(work, torch.device("cpu")) < base.weight.nbytes / 4
    assert step.base["0.weight"].data_ptr() == base.weight.data_ptr()
    again = cloudpickle.loads(cloudpickle.dumps(step))
    assert torch.equal(again.base["0.weight"], base.weight)


def test_states_files_and_exports_hold_the_adapters_alone(tmp_path):
    models = make_models()
    step, state = array(models)
    batches = make_batches(3)
    resumed, _ = hfta.fit(step, state, batches, epochs=1, progress=False, resume=tmp_path / "run.safetensors")
    resumed, _ = hfta.fit(step, state, batches, epochs=2, progress=False, resume=tmp_path / "run.safetensors")
    straight, _ = hfta.fit(step, state, batches, epochs=2, progress=False)
    assert all(torch.equal(resumed.params[path], straight.params[path]) for path in OWN)
    assert "state.params['embed.weight']" not in hfta.files.read_metadata(tmp_path / "run.safetensors")["shapes"]
    swapped = hfta.concat([hfta.take(straight, [2]), hfta.take(straight, [0])])
    hfta.save(swapped, tmp_path / "two.safetensors")
    loaded = hfta.load(tmp_path / "two.safetensors", like=state)
    made = hfta.unstack_params(models[0], loaded.params, loaded.buffers, share_frozen=True)
    assert len(made) == 2 and torch.equal(made[0].fc.up.bias, straight.params["fc.up.bias"][2])
    assert made[0].embed.weight is models[0].embed.weight and made[0].head.weight is made[0].embed.weight
    exported = hfta.export_model(models[0], straight, 1, share_frozen=True)
    assert exported.attend.in_proj_weight is models[0].attend.in_proj_weight
    tokens = make_batches(1)[0][0]
    evaluate = hfta.make_eval_step(models[0], lambda m, x: m(x).sum(), share_frozen=True, batch_dims=0)
    torch.testing.assert_close(
        next(iter(evaluate(straight, tokens).values()))[1], exported.eval()(tokens[1]).sum().detach()
    )
    apply = hfta.functional(models[0].eval(), share_frozen=True)
    output, _ = hfta.vmap(apply)(straight.params, straight.buffers, tokens)
    torch.testing.assert_close(output[1], exported(tokens[1]).detach())


@pytest.mark.parametrize("path", ["conv.weight", "mask"])
def test_bases_that_differ_are_refused_with_the_difference(path):
    models = make_models(shared=False)
    models[2].state_dict()[path].view(-1)[3].add_(0.5)
    message = f"model 2: 1 entries of the frozen '{path}' are not those of model 0.*share_frozen"
    with pytest.raises(hfta.errors.StackError, match=message):
        hfta.stack_params(models, share_frozen=True)


def test_states_with_and_without_the_base_are_told_apart():
    models = make_models()
    step, state = array(models)
    whole = hfta.stack_params(models)
    with pytest.raises(hfta.errors.StateError, match="members share it; stack them with share_frozen=True"):
        step.init(*whole, seeds=range(M))
    plain = hfta.make_train_step(models[0], loss_fn, hfta.sgd(lr=0.1))
    with pytest.raises(hfta.errors.StateError, match="made with the same share_frozen and shared_params"):
        plain.init(state.params, state.buffers, seeds=range(M))
    with pytest.raises(hfta.errors.StackError, match="the same share_frozen"):
        hfta.export_model(models[0], state, 0)


@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, track_running_stats=True)])
@pytest.mark.parametrize("first", [(), (nn.Linear(2, 2),)])
def test_statistics_of_the_base_in_train_mode_are_refused(kind, first):
    model = nn.Sequential(*first, kind(4).requires_grad_(False), nn.Flatten(), nn.Linear(8, 1))
    step, state = start([model], lambda m, x: m(x).mean(), hfta.sgd(lr=0.1), share_frozen=True)
    for count in (1, 3):
        many = hfta.take(state, [0] * count)
        with pytest.raises(
            hfta.errors.StateError,
            match=r"writes '.\.(running_mean|num_batches_tracked)', which all members share.*eval mode",
        ):
            step(many, torch.randn(count, 5, 4, 2))
    model[len(first)].eval()
    step = hfta.make_train_step(model, lambda m, x: m(x).mean(), hfta.sgd(lr=0.1), share_frozen=True)
    step(state, torch.randn(1, 5, 4, 2))


class Writes(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.inner = nn.Module()
        self.inner.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        if self.how == "parameter":
            self.frozen.mul_(2)
        elif self.how == "view":
            self.frozen[:2].zero_()
        elif self.how == "buffer":
            self.inner.count += 1
        elif self.how == "replaced":
            self.inner.count = self.inner.count + 1
        elif self.how == "hidden":
            F.batch_norm(x, self.inner.count, self.inner.count.clone(), training=True)
        return self.fc(x * self.frozen) + self.inner.count


# Batch normalisation with statistics that all members share does not run under vmap.
@pytest.mark.filterwarnings("ignore::hfta_func.errors.LoopWarning")
@pytest.mark.parametrize("members", [1, M])
@pytest.mark.parametrize("how", ["parameter", "view", "buffer", "replaced", "hidden"])
def test_a_forward_that_writes_the_base_is_refused(how, members):
    step, state = start([Writes(how)] * members, lambda m, x: m(x).mean(), hfta.sgd(lr=0.1), share_frozen=True)
    kinds = hfta.errors.StateError, hfta.errors.TraceError, hfta.errors.VerifyError
    with pytest.raises(kinds, match=r"share|in the array|of all members"):
        step(state, torch.randn(members, 5, 4))


def test_a_forward_that_writes_the_base_later_is_noticed():
    model = Writes("not at all")
    step, state = start([model] * M, lambda m, x: m(x).mean(), hfta.sgd(lr=0.1), share_frozen=True)
    state, _ = step(state, torch.randn(M, 5, 4))
    with torch.no_grad():
        # Whoever holds the model may write its base between steps.
        model.frozen.mul_(3)
    state, _ = step(state, torch.randn(M, 5, 4))

    def writing(m, x):
        if x.shape[0] == 2:
            m.frozen.mul_(2)
        return m(x).mean()

    step = hfta.make_train_step(model, writing, hfta.sgd(lr=0.1), share_frozen=True)
    state, _ = step(state, torch.randn(M, 5, 4))
    with pytest.raises(hfta.errors.StateError, match=r"writes 'frozen', which all members share"):
        step(state, torch.randn(M, 2, 4))


class Addmm(nn.Linear):
    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight.t())


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


SHARED = {
    "linear": (nn.Linear(6, 5), (4, 7, 6)),
    "addmm": (Addmm(6, 5), (4, 6)),
    "conv": (nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "layer norm": (nn.LayerNorm(6), (4, 7, 6)),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 5)),
    "batch norm": (nn.BatchNorm1d(4).eval(), (3, 4, 5)),
    "attention": (Attention(6, 2, batch_first=True), (3, 4, 6)),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_weights_are_used_by_one_kernel_and_get_no_gradient(name):
    func, shape = SHARED[name]
    func.double().requires_grad_(False)
    x = torch.randn(M, *shape, dtype=torch.float64, requires_grad=True)
    with torch.profiler.profile(record_shapes=True) as recorded:
        y = hfta.vmap(func)(x)
        (grad,) = torch.autograd.grad(y.sin().sum(), x)
    alone = torch.stack([func(one) for one in x])
    torch.testing.assert_close(y, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(alone.sin().sum(), x)[0], rtol=1e-10, atol=1e-12)
    names = [event.name for event in recorded.events()]
    if name in ("linear", "addmm"):
        # One product each way: none for the weights.
        assert (
            names.count("aten::mm") + names.count("aten::addmm") == 2 + (name == "addmm") and "aten::bmm" not in names
        )
    if name in ("conv", "layer norm", "group norm", "batch norm"):
        kernel = {"conv": "aten::mkldnn_convolution"}.get(name, f"aten::native_{name.replace(' ', '_')}")
        assert sum(one in (kernel, "aten::_slow_conv2d_forward") for one in names) == 1
