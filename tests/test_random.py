"""Keys and noise: the bits themselves, their statistics, and the random calls of a model that are routed to them."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import hfta_func as hfta
from hfta_func import random
from hfta_func._kernels import noise
from hfta_func.calls import routing
from hfta_func.calls.routing import ROUTED, routed
from processes import output

SEEDS = [0, 1, 2, 3, -1, 12345678901234567, 2**63 - 1, -(2**63)]

# The reference: SplitMix64's finaliser over Python's integers, which have no size.
WORD = 2**64
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(z):
    z %= WORD
    z = (z ^ (z >> 30)) * MIX1 % WORD
    z = (z ^ (z >> 27)) * MIX2 % WORD
    return z ^ (z >> 31)


def signed(z):
    return z - WORD if z >= WORD // 2 else z


def reference_bits(key, count):
    start = mix(key + GOLDEN)
    stride = mix(start + GOLDEN) | 1
    return [signed(mix(start + stride * i)) for i in range(1, count + 1)]


def reference_fold_in(key, data):
    return signed(mix(mix(key + GOLDEN) ^ (data * MIX2 % WORD)))


def test_splitmix64_itself():
    # The first outputs of SplitMix64 from state 1234567, as its authors' C program prints them.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567 + i * GOLDEN) for i in range(1, 5)] == expected


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (257,), (3, 4, 5), (2, 1, 3, 2)])
def test_bits_are_those_of_the_reference(shape, fast, monkeypatch):
    if not fast:
        # As without a compiler of C.
        monkeypatch.setattr(noise, "is_fast", lambda start: False)
    drawn = random.bits(random.keys(SEEDS), shape)
    assert drawn.shape == (len(SEEDS), *shape)
    for member, seed in zip(drawn, SEEDS, strict=True):
        words = iter(reference_bits(seed, math.prod(shape)))
        # The last axis runs fastest.
        for place in itertools.product(*map(range, shape)):
            assert member[place].item() == next(words)


@pytest.mark.parametrize("data", [0, 1, 2, -1, 10**6, 2**62, -(2**61)])
def test_fold_in_is_that_of_the_reference(data):
    expected = [reference_fold_in(seed, data) for seed in SEEDS]
    keys = random.keys(SEEDS)
    assert random.fold_in(keys, data).tolist() == expected
    assert random.fold_in(keys, torch.full_like(keys, data)).tolist() == expected


def test_draws_follow_from_the_bits():
    count = 100
    for seed in SEEDS:
        key, words = random.keys([seed])[0], reference_bits(seed, count)
        assert random.uniform(key, (count,)).tolist() == [(word % WORD >> 40) / 2**24 for word in words]
        assert random.uniform(key, (count,), dtype=torch.float64).tolist() == [
            (word % WORD >> 11) / 2**53 for word in words
        ]
        assert random.randint(key, -3, 7, (count,)).tolist() == [(word % WORD >> 1) % 10 - 3 for word in words]
        assert random.bernoulli(key, 0.3, (count,)).tolist() == [
            (word >> 11) < round(0.3 * 2**53) - 2**52 for word in words
        ]
        assert random.permutation(key, count).tolist() == sorted(range(count), key=words.__getitem__)


def test_normal_draws_never_change():
    # In units of 2^-41, of which all are multiples: runs of earlier releases can be repeated to the bit.
    drawn = random.normal(random.keys([3, -5]), (4,), dtype=torch.float64) * 2.0**41
    first = [-1300639167081, -2523771845708, -2731660043048, 449915946448]
    second = [-819132781246, 694714897138, -729015390825, 664722362016]
    assert drawn.tolist() == drawn.round().tolist() == [first, second]


DRAWS = {
    "bits": lambda key: random.bits(key, (7, 3)),
    "uniform": lambda key: random.uniform(key, (7, 3)),
    "uniform float64": lambda key: random.uniform(key, (7, 3), dtype=torch.float64),
    "uniform float16": lambda key: random.uniform(key, (7, 3), dtype=torch.float16),
    "uniform bfloat16": lambda key: random.uniform(key, (7, 3), dtype=torch.bfloat16),
    "normal": lambda key: random.normal(key, (7, 3)),
    "normal float64": lambda key: random.normal(key, (7, 3), dtype=torch.float64),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (7, 3)),
    "bernoulli of a tensor": lambda key: random.bernoulli(key, torch.linspace(0, 1, 3), (7, 3)),
    "randint": lambda key: random.randint(key, -5, 100, (7, 3)),
    "categorical": lambda key: random.categorical(key, torch.arange(90.0), (7, 3)),
    "permutation": lambda key: random.permutation(key, 21),
    "fold_in": lambda key: random.fold_in(key, 3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_member_draws_alone_what_it_draws_in_an_array(name):
    draw, keys = DRAWS[name], random.keys(SEEDS)
    array = draw(keys)
    assert torch.equal(torch.vmap(draw)(keys), array)
    assert torch.equal(draw(keys.flip(0)), array.flip(0))
    assert torch.equal(draw(keys.reshape(2, -1)).flatten(0, 1), array)
    for i in range(len(SEEDS)):
        assert torch.equal(draw(keys[i]), array[i])
        assert torch.equal(draw(keys[i : i + 3])[0], array[i])
    assert len({str(member.tolist()) for member in array}) == len(SEEDS)


# The compiler's own code meets this one.
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_draws_are_the_eager_ones():
    def everything(keys, data):
        folded = random.fold_in(random.fold_in(keys, data), 7)
        # A range whose products with the multiplier exceed 64 bits.
        sites = random.fold_in(folded.unsqueeze(-1), torch.arange(16, 48))
        part = random.fold_in(keys[1:], data[1:])
        return [sites, part, *(draw(folded) for draw in DRAWS.values())]

    compiled = torch.compile(everything, backend="inductor", fullgraph=True)
    for seeds in (SEEDS, SEEDS[::-1]):
        keys, data = random.keys(seeds), torch.arange(len(seeds))
        for found, expected in zip(compiled(keys, data), everything(keys, data), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@pytest.mark.parametrize("dtype", DIGITS, ids=str)
def test_uniforms_lie_on_the_grid_of_their_dtype(dtype):
    digits = DIGITS[dtype]
    drawn = random.uniform(random.keys([1, 2, 3]), (1 << 16,), dtype=dtype)
    assert drawn.dtype == dtype
    cells = drawn.double() * 2.0**digits
    assert torch.equal(cells, cells.round())
    assert cells.min() >= 0 and cells.max() <= 2**digits - 1
    assert drawn.max() < 1
    assert bool((cells.to(torch.int64) % 2 == 1).any())
    if digits <= 11:
        for member in cells:
            assert stats.chisquare(member.to(torch.int64).bincount(minlength=2**digits)).pvalue > 1e-3


# Seeds are often consecutive, and so are steps and call sites.
NEIGHBOURS = {
    "seeds": lambda: random.keys(range(64)),
    "steps": lambda: random.fold_in(random.keys([0])[0], torch.arange(64)),
    "negative steps": lambda: random.fold_in(random.keys([0])[0], ~torch.arange(64)),
    "steps of consecutive seeds": lambda: random.fold_in(random.keys(range(8))[:, None], torch.arange(8)).flatten(),
    "call sites": lambda: torch.stack([random.fold_in(random.fold_in(random.keys([7])[0], 1), i) for i in range(64)]),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_streams_are_independent(name):
    keys, count = NEIGHBOURS[name](), 1 << 13
    assert keys.unique().numel() == len(keys)
    words = random.bits(keys, (count,))
    # No two of the 2^19 words of 64 bits are equal, as they would be if streams were shifted copies of each other.
    assert words.unique().numel() == words.numel()
    noise = (random.uniform(keys, (count,), dtype=torch.float64) - 0.5) * math.sqrt(12)
    correlation = noise @ noise.T / count
    assert correlation.fill_diagonal_(0).abs().max() < 6 / math.sqrt(count)
    # At any lag, neighbours against each other and the first against all.
    spectrum = torch.fft.rfft(noise)
    for other in (spectrum.roll(1, 0), spectrum[:1]):
        lagged = torch.fft.irfft(spectrum * other.conj(), count) / count
        if len(other) == 1:
            # The first against itself.
            lagged = lagged[1:]
        assert lagged.abs().max() < 6.5 / math.sqrt(count)


def test_normal_is_the_quantile_of_its_uniform(monkeypatch):
    # All codes of 24 bits near both ends and around zero, and a sample of the others.
    ends = torch.arange(1 << 14)
    codes = torch.cat(
        [ends - (1 << 23), ends - (1 << 13), (1 << 23) - 1 - ends, torch.arange(-(1 << 23), 1 << 23, 101)]
    )
    monkeypatch.setattr(random, "bits", lambda key, shape: codes << 40)
    drawn = random.normal(random.keys([0])[0], codes.shape, dtype=torch.float64)
    exact = torch.special.ndtri((codes.double() + 0.5) * 2.0**-24 + 0.5)
    assert (drawn - exact).abs().max() < 1e-6
    assert 5.41 < drawn.max() < 5.42
    single = random.normal(random.keys([0])[0], codes.shape)
    assert single.dtype == torch.float32
    assert (single - exact).abs().max() < 1.3e-6
    order = codes.argsort()
    assert (drawn[order].diff() >= 0).all()
    # As without a compiler of C.
    monkeypatch.setattr(noise, "is_fast", lambda words: False)
    assert torch.equal(random.normal(random.keys([0])[0], codes.shape, dtype=torch.float64), drawn)


# One call of every operator that is routed, for an input [N, C, L] with values in (0, 1).
CALLS = {
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.5, True),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rrelu": lambda x: torch.rrelu(-x, training=True),
    "rand": lambda x: torch.rand(4, 3),
    "randn": lambda x: torch.randn((4, 3)),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(1000, (4, 3)),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randperm": lambda x: torch.randperm(20),
    "bernoulli": torch.bernoulli,
    "normal": lambda x: torch.normal(x, 2.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.flatten(0, -2), 9, True),
}

# Calls of the Python layer, and other ways to write those above.
FURTHER_CALLS = {
    "F.dropout": F.dropout,
    "F.dropout in place": lambda x: F.dropout(x.clone(), inplace=True),
    "F.dropout of a tensor p": lambda x: F.dropout(x, torch.tensor(0.5)),
    "F.dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1)),
    "F.rrelu in place": lambda x: F.rrelu(-x, training=True, inplace=True),
    "F.rrelu": lambda x: F.rrelu(-x, training=True),
    "F.gumbel_softmax": F.gumbel_softmax,
    "nn.Dropout": nn.Dropout(),
    "torch.rand size=": lambda x: torch.rand(size=(4, 3), dtype=torch.float64),
    "torch.randint low high": lambda x: torch.randint(10, 1000, (4, 3)),
    "torch.randint_like bounds": lambda x: torch.randint_like(x, 10, 1000),
    "torch.normal of numbers": lambda x: torch.normal(1.0, 2.0, (4, 3)),
    "torch.normal of tensors": lambda x: torch.normal(x, x),
    "torch.bernoulli p": lambda x: torch.bernoulli(x, 0.5),
    "torch.multinomial without replacement": lambda x: x.flatten(0, -2).multinomial(2),
    "torch.multinomial of one": lambda x: torch.multinomial(torch.ones(100), 1),
    "torch.empty": lambda x: torch.empty(4, 3).normal_(),
    "Tensor.new": lambda x: x.new(torch.Size([4, 3])).normal_(),
    "Tensor.new_empty": lambda x: x.new_empty(4, 3).normal_(),
    "Tensor.bernoulli": lambda x: x.bernoulli(),
    "Tensor.bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "Bernoulli": lambda x: torch.distributions.Bernoulli(x, validate_args=False).sample((5,)),
    "Uniform": lambda x: torch.distributions.Uniform(x - 1, x + 1, validate_args=False).rsample(),
    "Gumbel": lambda x: torch.distributions.Gumbel(x, x, validate_args=False).rsample(),
}  # fmt: skip


def keyed(call):
    """``call(x)`` whose noise is drawn by a key, as a function of both."""

    def draw(x, key):
        with routed(key):
            return call(x)

    return draw


# What writes noise into a tensor made from the input.
IN_PLACE = {
    *(name for name in CALLS if name.endswith("_")),
    *(name for name in FURTHER_CALLS if "in place" in name),
    *("F.gumbel_softmax", "Tensor.bernoulli_ of a tensor"),
}


def test_every_routed_operator_is_called_here():
    # Recurrent layers draw only between layers, see test_recurrent.py.
    assert {*CALLS, "dropout1d", "dropout2d", "dropout3d", "lstm", "gru", "rnn_tanh", "rnn_relu"} == set(ROUTED)


# One tensor that all members share cannot hold noise of each member's own.
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        (name, shared)
        for name in (*CALLS, *FURTHER_CALLS)
        for shared in (False, True)
        if not (shared and name in IN_PLACE)
    ],
)
def test_noise_comes_from_the_member_s_key(name, shared):
    call = {**CALLS, **FURTHER_CALLS}[name]
    x, twice = torch.rand(6, 5, 4) * 0.8 + 0.1, keyed(lambda x: (call(x), call(x)))
    before = torch.get_rng_state()
    keys = random.keys([5, 6, 5, 7])
    # All members see the same values, so that only their noise can tell them apart.
    inputs = x if shared else x.expand(4, *x.shape).contiguous()
    first, second = hfta.vmap(twice, in_dims=(None if shared else 0, 0))(inputs, keys)
    for i in range(4):
        for drawn, expected in zip((first, second), twice(x, keys[i]), strict=True):
            assert drawn.dtype == expected.dtype
            torch.testing.assert_close(drawn[i], expected, rtol=1e-6, atol=1e-7)
            assert torch.equal(drawn[i] == 0, expected == 0)
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[3])
    assert all(not torch.equal(first[i], second[i]) for i in range(4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.exhaustive(unless="nn.Dropout$")
@pytest.mark.parametrize("name", [*CALLS, *FURTHER_CALLS])
def test_compiled_noise_comes_from_the_member_s_key(name):
    noisy = keyed({**CALLS, **FURTHER_CALLS}[name])
    torch._dynamo.reset()
    x, keys = torch.rand(2, 6, 5, 4) * 0.8 + 0.1, random.keys([5, 6])
    before = torch.get_rng_state()
    for func, inputs in ((hfta.vmap(noisy), (x, keys)), (noisy, (x[0], keys[0]))):
        # An eager call finds out which tensors the members' noise is written into.
        expected = func(*inputs)
        assert torch.equal(torch.compile(func, fullgraph=True, backend="eager")(*inputs), expected)
    assert torch.equal(torch.get_rng_state(), before)


def sample(call, seeds=(5, 6), count=1 << 14):
    """``[members, count]`` values of a call on ones."""
    return hfta.vmap(keyed(call))(torch.ones(len(seeds), count), random.keys(seeds))


DISTRIBUTIONS = {
    "rand": (lambda x: torch.rand(x.shape), stats.uniform()),
    "rand_like": (torch.rand_like, stats.uniform()),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), stats.uniform(-1, 4)),
    "uniform_ from to": (lambda x: torch.empty_like(x).uniform_(**{"from": -1, "to": 3}), stats.uniform(-1, 4)),
    "randn": (lambda x: torch.randn(x.shape), stats.norm()),
    "randn_like": (torch.randn_like, stats.norm()),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), stats.norm(2, 3)),
    "normal": (lambda x: torch.normal(2 * x, 3.0), stats.norm(2, 3)),
    "normal size": (lambda x: torch.normal(2.0, 3.0, x.shape), stats.norm(2, 3)),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), stats.expon(scale=0.5)),
    "rrelu": (lambda x: -F.rrelu(-x, 0.1, 0.5, training=True), stats.uniform(0.1, 0.4)),
    "Uniform": (lambda x: torch.distributions.Uniform(-x, x, validate_args=False).sample(), stats.uniform(-1, 2)),
    "gumbel_softmax": (
        # The log odds of two Gumbel variables have a logistic distribution.
        lambda x: torch.logit(F.gumbel_softmax(torch.stack([x, x], -1).double())[:, 0]),
        stats.logistic(),
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name):
    call, expected = DISTRIBUTIONS[name]
    for member in sample(call):
        assert stats.kstest(member, expected.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda x: torch.randint(5, x.shape), range(5)),
        (lambda x: torch.randint(high=5, size=x.shape), range(5)),
        (lambda x: torch.randint(-2, high=5, size=x.shape), range(-2, 5)),
        (lambda x: torch.randint_like(x, -2, 5), range(-2, 5)),
        (lambda x: torch.randint_like(x, low=-2, high=5), range(-2, 5)),
    ],
)
def test_distribution_of_integers(call, values):
    for member in sample(call):
        found, counts = member.unique(return_counts=True)
        assert found.tolist() == list(values)
        assert stats.chisquare(counts).pvalue > 1e-3


BERNOULLI = {
    "bernoulli": lambda x: torch.bernoulli(0.3 * x),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(0.3 * x),
    "Bernoulli": lambda x: torch.distributions.Bernoulli(0.3 * x, validate_args=False).sample(),
}


@pytest.mark.parametrize("name", BERNOULLI)
def test_distribution_of_flags(name):
    for member in sample(BERNOULLI[name]):
        assert set(member.tolist()) == {0.0, 1.0}
        assert abs(member.mean() - 0.3) < 5 * math.sqrt(0.21 / len(member))


DROPOUTS = {
    "torch.dropout": lambda x, p: torch.dropout(x, p, True),
    "F.dropout": F.dropout,
    "F.dropout of a tensor": lambda x, p: F.dropout(x, torch.tensor(p)),
    "F.dropout2d": lambda x, p: F.dropout2d(x.reshape(1, -1, 1, 1), p),
    "nn.Dropout": lambda x, p: nn.Dropout(p)(x),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_dropout_keeps_a_fraction_and_scales_it(name, p):
    for member in sample(lambda x: DROPOUTS[name](x, p).flatten()):
        kept = member != 0
        assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / len(member))
        torch.testing.assert_close(member[kept], torch.full_like(member[kept], 1 / (1 - p)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_of_nothing_and_of_everything(name):
    assert torch.equal(sample(lambda x: DROPOUTS[name](x, 0.0).flatten(), count=50), torch.ones(2, 50))
    assert torch.equal(sample(lambda x: DROPOUTS[name](x, 1.0).flatten(), count=50), torch.zeros(2, 50))


@pytest.mark.parametrize("layout", ["", "transposed", "expanded"])
@pytest.mark.parametrize("rate", [0.4, "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_kernel_drops_what_several_operators_drop(dtype, rate, layout, monkeypatch):
    if not noise.is_fast(random.keys([1])):
        pytest.skip("needs a C compiler")
    x = torch.randn(3, 5, 6, 7, dtype=dtype)
    x = x.transpose(1, 3) if layout == "transposed" else x[:, :1].expand(-1, 2, -1, -1) if layout == "expanded" else x
    rates, calls, run = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64), [], noise.drop
    monkeypatch.setattr(noise, "drop", lambda *args: calls.append(1) or run(*args))

    def draw(x, p, key):
        with routed(key):
            return F.dropout(x, p if rate == "each" else rate)

    def drawn(few):
        monkeypatch.setattr(noise, "_FEW", few)
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        weights = torch.ones_like(x).requires_grad_()
        output = torch.vmap(draw)(given, rates, random.keys([1, 2, 3]))
        (grad,) = torch.autograd.grad(output, given, weights, create_graph=True)
        tangent = torch.func.jvp(lambda x: torch.vmap(draw)(x, rates, random.keys([1, 2, 3])), (x,), (x,))[1]
        sums = torch.func.grad(lambda x: torch.vmap(draw)(x, rates, random.keys([1, 2, 3])).square().sum())(x)
        return output, grad, *torch.autograd.grad(grad.square().sum(), weights), tangent, sums

    together, apart = drawn(0), drawn(1 << 40)
    assert len(calls) == 2
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    assert 0 < (together[0] != 0).sum() < x.numel()


def test_channels_are_dropped_as_a_whole():
    x = torch.rand(4, 50, 3, 2) + 1
    for module in (nn.Dropout2d(0.4), nn.FeatureAlphaDropout(0.4)):
        with routed(random.keys([3])[0]):
            dropped = module(x).flatten(2)
        # A dropped channel has one value throughout, and the others keep their order.
        flat = dropped.std(2) < 1e-6
        assert 40 < int(flat.sum()) < 120
        assert torch.equal(dropped[~flat].argsort(1), x.flatten(2)[~flat].argsort(1))
    with routed(random.keys([3])[0]):
        rows = nn.Dropout1d(0.4)(x[..., 0]).flatten(2)
    assert torch.equal((rows == 0).any(2), (rows == 0).all(2))


@pytest.mark.parametrize("module", [nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)])
def test_alpha_dropout_keeps_mean_and_variance(module):
    x, draw = torch.randn(1, 1 << 16, 1, dtype=torch.float64), keyed(lambda x: module(x).flatten())
    for member in hfta.vmap(draw, (None, 0))(x, random.keys([5, 6])):
        assert abs(member.mean()) < 0.03
        assert abs(member.var() - 1) < 0.03
        dropped = member == member.mode().values
        assert abs(dropped.double().mean() - 0.3) < 0.02


def test_attention_drops_weights():
    # Every weight is 1/1000 and every value 1: an output is the kept fraction, scaled.
    query, value = torch.zeros(1, 1, 64, 8, dtype=torch.float64), torch.ones(1, 1, 1000, 8, dtype=torch.float64)
    with routed(random.keys([3])[0]):
        outputs = F.scaled_dot_product_attention(query, torch.zeros_like(value), value, dropout_p=0.25)[..., 0]
    kept = outputs * 0.75
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.1875 / 64_000)
    assert abs(kept.std() - math.sqrt(0.1875 / 1000)) < 0.5 * math.sqrt(0.1875 / 1000)


def test_without_a_key_torch_draws():
    x = torch.ones(100)
    torch.manual_seed(3)
    expected = F.dropout(x), torch.rand(3), torch.multinomial(x, 5)
    torch.manual_seed(3)
    with routed(None):
        found = F.dropout(x), torch.rand(3), torch.multinomial(x, 5)
    assert all(map(torch.equal, found, expected))


# Operators that draw but that no code of a model calls by name, and those that vmap refuses.
INTERNAL = {
    # Refused by vmap.
    *("_sample_dirichlet", "_standard_gamma", "binomial", "poisson", "native_dropout", "rrelu_with_noise", "cauchy_"),
    *("geometric_", "log_normal_", "random_", "dropout_", "feature_dropout_", "alpha_dropout_", "rrelu_"),
    "feature_alpha_dropout_",
    # Kernels of scaled_dot_product_attention, which hands them no dropout, and what chooses among them.
    *(f"_scaled_dot_product_{kind}_attention{back}" for kind in ("cudnn", "efficient") for back in ("", "_backward")),
    *(f"_scaled_dot_product_{kind}" for kind in ("flash_attention", "flash_attention_for_cpu", "attention_math")),
    *(f"_scaled_dot_product_{kind}" for kind in ("fused_attention_overrideable", "attention_math_for_mps")),
    *(f"_{kind}_attention_forward_no_dropout_inplace" for kind in ("flash", "cudnn")),
    *(f"_{kind}_attention_forward" for kind in ("efficient", "flash", "cudnn")),
    *("_cudnn_attention_backward", "_triton_scaled_dot_attention", "_fill_mem_eff_dropout_mask_"),
    *("_nested_tensor_softmax_with_shape", "_fused_sdp_choice"),
    # Kernels of lstm, gru and rnn, which hand them no dropout, and of native_dropout on CUDA.
    *("_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn", "_lstm_mps", "_fused_dropout"),
    # What the compiler makes of rrelu and of the in-place spelling; torch has no public function of that name.
    *("rrelu_with_noise_", "rrelu_with_noise_functional", "cauchy", "exponential", "geometric", "log_normal"),
    *("normal_functional", "random", "uniform"),
}


def seeded_operators():
    """Names of all aten operators that take from a generator."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
            if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
                yield name


def test_every_operator_that_draws_is_routed_or_refused():
    seeded = set(seeded_operators())
    assert len(seeded) > 50
    assert not seeded - {*ROUTED, *INTERNAL}
    assert not INTERNAL & {*ROUTED}


@pytest.mark.parametrize(
    "draw",
    [
        torch.poisson,
        torch._sample_dirichlet,
        torch._standard_gamma,
        lambda x: torch.binomial(x, x),
        lambda x: torch.native_dropout(x, 0.5, True),
        *(lambda x, name=name: getattr(x.clone(), name)() for name in ("cauchy_", "log_normal_", "random_")),
        lambda x: x.clone().geometric_(0.5),
        lambda x: torch.dropout_(x.clone(), 0.5, True),
    ],
)
def test_noise_that_no_key_gives_is_refused(draw):
    x, before = torch.rand(3, 4), torch.get_rng_state()
    with pytest.raises(hfta.errors.RandomnessError, match="draws from PyTorch's global generator"):
        hfta.vmap(keyed(draw))(x, random.keys([1, 2, 3]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.exhaustive(ids="True")
@pytest.mark.parametrize("compiled", [False, True])
def test_call_sites_go_on_after_a_gradient_inside_the_loss(compiled, monkeypatch):
    def factory():
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss_fn(model, batch):
        inner = torch.func.grad(lambda x: model(x).sum())(batch)
        return inner.square().mean() + model(batch).square().mean()

    def losses(sites):
        # Streams are made inside the inner gradient and used outside of it, unless each site makes its own.
        monkeypatch.setattr(routing, "_SITES", sites)
        step = hfta.make_train_step(factory(), loss_fn, hfta.sgd(lr=0.1))
        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        state = step.init(*hfta.init_params(factory, seeds=range(3)), seeds=range(3))
        return run(state, torch.ones(3, 5, 4))[1]["loss"]

    assert torch.equal(losses(16), losses(1))


@pytest.mark.exhaustive(ids="-aot_eager")
@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize("num_models", [1, 3])
def test_an_inner_vmap_has_its_own_randomness(num_models, backend):
    """As in torch.func: one draw for each sample, one for all, or an error."""
    x, keys = torch.ones(num_models, 4, 16), random.keys([1, 2, 1][:num_models])

    def draw(randomness, inner=torch.func.vmap):
        def member(x, key):
            with hfta.calls.routed(key):
                return inner(lambda row: F.dropout(row, 0.5), randomness=randomness)(x), F.dropout(x[0], 0.5)

        mapped = lambda x, keys: hfta.vmap(member)(x, keys)  # noqa: E731
        torch._dynamo.reset()
        return torch.compile(mapped, backend=backend, fullgraph=True) if backend else mapped

    for inner in (torch.func.vmap, hfta.vmap):
        rows, after = draw("different", inner)(x, keys)
        for member in range(num_models):
            assert len({tuple(row) for row in [*rows[member].tolist(), after[member].tolist()]}) == 5
        same, after_same = draw("same", inner)(x, keys)
        assert torch.equal(same, same[:, :1].expand_as(same)) and torch.equal(after, after_same)
        for one, other in ((rows, after), (same, after_same)):
            # Members 0 and 2 have the same seed.
            assert all(torch.equal(y[0], y[-1]) for y in (one, other))
            assert num_models == 1 or not torch.equal(one[0], one[1])
    with pytest.raises(Exception, match="randomness error mode"):
        draw("error")(x, keys)


FORKED = """
import os
from hfta_func import random
with random.one_thread():
    child = os.fork()
if child:
    print(os.waitpid(child, 0)[1])
else:
    with random.one_thread():
        pass
"""


def test_a_process_may_be_forked_while_models_are_made():
    assert output(FORKED) == "0\n"
