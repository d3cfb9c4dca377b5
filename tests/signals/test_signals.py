"""Signals with gaps: pandas, SciPy and NumPy by hand give the same, chunks give the same as the whole, bad input is named."""

import numpy
import pandas
import pytest
import scipy.signal
import torch

import hfta_func as hfta
from hfta_func import signals
from hfta_func.signals import Signal

RATES = [500.0, 125.0, 60.0, 7.0]


def made(rate, seconds, start=0.0, channels=2, gaps=0.2, seed=0, length=6):
    """A noisy signal with an offset and gaps of many lengths, and its samples with NaN, as a frame by time."""
    noise = numpy.random.default_rng(seed)
    count = round(seconds * rate)
    values = noise.standard_normal((channels, count)).cumsum(1) + 50
    lengths = noise.geometric(1 / length, count)
    known = numpy.repeat(noise.random(count) >= gaps, lengths)[:count]
    values[:, ~known] = numpy.nan
    index = pandas.to_timedelta(numpy.arange(count) / rate, unit="s")
    return Signal(torch.tensor(values), rate, start), pandas.DataFrame(values.T, index=index)


def plain(signal):
    """The samples, with NaN in gaps, ``[T, C]``."""
    values = signal.values.clone()
    return (values if signal.valid is None else values.masked_fill(~signal.valid, torch.nan)).T.numpy()


def close(signal, expected, atol=1e-9):
    assert signal.valid is None or not signal.values[:, ~signal.valid].any()
    numpy.testing.assert_allclose(plain(signal), numpy.asarray(expected), rtol=1e-9, atol=atol)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("target", [125.0, 50.0, 4.0, 90.0])
def test_resampling_is_that_of_pandas(rate, target):
    signal, frame = made(rate, 12.6)
    if target > rate:
        times = numpy.arange(int((len(frame) - 1) * target / rate + 1e-6) + 1) / target
        at = numpy.arange(len(frame)) / rate
        # NaN of either neighbour is NaN, but for a sample exactly at one that is known.
        expected = numpy.stack([numpy.interp(times, at, frame[c]) for c in frame], 1)
    else:
        # Periods of a whole number of nanoseconds are pandas' own.
        exact = (numpy.arange(len(frame)) * target / rate + 1e-9).astype(int)
        expected = frame.groupby(exact).mean().to_numpy()
        if 1e9 / target == round(1e9 / target) and rate in (500.0, 125.0):
            expected = frame.resample(pandas.Timedelta(round(1e9 / target), "ns")).mean().to_numpy()
    close(signals.resample(signal, target), expected)


def test_gaps_are_filled_as_pandas_fills_them():
    signal, frame = made(125.0, 20.0)
    close(signals.fill(signal), frame.fillna(frame.mean()))
    close(signals.fill(signal, -3.0), frame.fillna(-3.0))
    window = numpy.arange(len(frame)) // 250
    by_window = frame.groupby(window).transform("mean")
    close(signals.fill(signal, window=2.0), frame.fillna(by_window))
    gap = frame[0].isna()
    length = gap.groupby((gap != gap.shift()).cumsum()).transform("sum")
    assert length.max() > 5 > length[gap].min()
    close(signals.fill(signal, window=2.0, within=5 / 125), frame.where(~(gap & (length <= 5)), by_window))
    # A window of gaps alone has no mean.
    empty = Signal([1.0, 2.0, torch.nan, torch.nan, torch.nan], 1)
    assert signals.fill(empty, window=2).values.tolist() == [[1, 2, 0, 0, 0]]


def test_windows_are_normalised_as_pandas_does():
    signal, frame = made(50.0, 31.0)
    window = numpy.arange(len(frame)) // 150
    groups = frame.groupby(window)
    close(signals.normalise(signal, 3.0), (frame - groups.transform("mean")) / groups.std(ddof=0).to_numpy()[window])
    close(signals.normalise(signal), (frame - frame.mean()) / frame.std(ddof=0))
    constant = signals.normalise(Signal(torch.full((1, 6), 0.1), 1, valid=torch.arange(6) != 4), 3)
    assert not constant.values.any() and constant.valid.tolist() == [True] * 4 + [False, True]
    long = signals.normalise(Signal(torch.full((1, 100_001), 0.1), 1, valid=torch.arange(100_001) != 9), 30_000)
    assert not long.values.any() and long.gaps.tolist() == [9]
    single = Signal(torch.randn(1, 60_000) + 1e3, 500)
    oracle = single.values.double().unflatten(1, (-1, 30_000))
    oracle = ((oracle - oracle.mean(-1, True)) / oracle.std(-1, correction=0, keepdim=True)).flatten(1)
    torch.testing.assert_close(signals.normalise(single, 60.0).values.double(), oracle, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("low", "high"), [(0.5, 40.0), (0.0, 10.0), (5.0, 62.5)])
def test_a_band_passes_as_through_scipy(low, high):
    signal, frame = made(125.0, 30.0, gaps=0.002)
    for taps in (101, None):
        found = signals.bandpass(signal, low, high, taps=taps)
        size = taps or 2 * int(numpy.ceil(1.65 * 125 / (low or high))) + 1
        edges = [edge for edge in (low, high) if 0 < edge < 62.5]
        kind = {1: "lowpass" if low == 0 else "highpass"}.get(len(edges), False)
        filter = scipy.signal.firwin(size, edges, fs=125, pass_zero=kind)
        filled, bad = frame.fillna(0).to_numpy(), frame[0].isna().to_numpy()
        expected = numpy.stack([numpy.convolve(channel, filter, "same") for channel in filled.T], 1)
        touched = numpy.convolve(bad, numpy.ones(size), "same") > 0.5
        touched[: size // 2] = touched[len(bad) - size // 2 :] = True
        assert 0 < touched.sum() < len(bad)
        expected[touched] = numpy.nan
        close(found, expected)


def test_rates_are_joined_by_time_as_pandas_does():
    first, _ = made(500.0, 10.0, start=3.0, seed=1)
    for rate, start in ((125.0, 2.0), (500.0, 4.0), (60.0, 3.511), (125.0, 2.999), (1000.0, 3.0)):
        other, _ = made(rate, 8.0, start=start, channels=1, seed=2)
        found = signals.join(first, other)
        left = pandas.DataFrame(plain(first)).assign(time=(first.times * 1e6).round().long().numpy())
        right = pandas.DataFrame(plain(other), columns=[9]).assign(time=(other.times * 1e6).round().long().numpy())
        frame = pandas.merge_asof(left, right, on="time")
        inside = frame[(frame.time >= start * 1e6 - 1) & (frame.time < other.end * 1e6 - 1)]
        expected = inside[[0, 1, 9]].to_numpy().copy()
        expected[numpy.isnan(expected).any(1)] = numpy.nan
        assert found.rate == 500 and abs(found.start - inside.time.iloc[0] / 1e6) < 1e-6
        close(found, expected)
    persons = signals.join([first, first], [other, other])
    assert torch.equal(persons[1].values, found.values) and len(persons) == 2


def test_timestamps_become_a_grid_with_gaps():
    whole, _ = made(125.0, 40.0, start=1.7e9, channels=1)
    noise = torch.Generator().manual_seed(0)
    jitter = (torch.rand(len(whole), generator=noise, dtype=torch.float64) - 0.5) * 0.4 / 125
    at = whole.valid.nonzero().flatten()
    found = signals.from_timestamps((whole.times + jitter)[at], whole.values[:, at], 125.0)
    trimmed = whole.samples(int(at[0]), int(at[-1]) + 1)
    assert torch.equal(found.values, trimmed.values) and torch.equal(found.valid, trimmed.valid)
    assert signals.from_timestamps([1.0, 1.5, 2.0], [1, 2, 3], 2).valid is None
    holed = signals.from_timestamps([0.0, 1.0, 3.0, 4.0], [1, torch.nan, 3, 4], 1)
    assert holed.valid.tolist() == [True, False, False, True, True]
    holed = signals.from_timestamps([0.0, 2.0, 3.0, 6.0, 7.0], [1, 2, torch.nan, torch.nan, 5], 1)
    assert holed.gaps.tolist() == [1, 3, 4, 5, 6] and holed.values.tolist() == [[1, 0, 2, 0, 0, 0, 0, 5]]


def test_windows_are_views_with_the_labels_of_events():
    persons = [
        made(10.0, seconds, start, gaps=0.01, seed=seed)[0]
        for seed, (seconds, start) in enumerate([(30, 5), (47.3, 0), (9.1, 2)])
    ]
    generator = numpy.random.default_rng(0)
    events = []
    for signal in persons:
        times = numpy.sort(generator.choice(int(signal.end - signal.start) * 10, 5, replace=False)) / 10 + signal.start
        events.append((times, generator.integers(0, 9, 5)))
    for length, hop in ((1.0, 0.4), (0.5, 0.5), (0.3, 1.1)):
        found = signals.windows(persons, length, hop, events)
        size, step = round(length * 10), round(hop * 10)
        for signal, (times, labels), rows in zip(persons, events, found.rows, strict=True):
            expected = []
            for begin in range(0, len(signal) - size + 1, step):
                known = signal.valid is None or bool(signal.valid[begin : begin + size].all())
                held = [int((times <= signal.times[i].item() + 1e-9).sum()) for i in (begin, begin + size - 1)]
                if known and held[0] == held[1] > 0:
                    expected.append((begin, int(labels[held[0] - 1])))
            assert len(rows) == len(expected) > 1
            for row, (begin, label) in zip(rows.tolist(), expected, strict=True):
                assert torch.equal(found.values[row], signal.values[:, begin : begin + size])
                assert found.labels[row] == label and found.times[row] == pytest.approx(signal.start + begin / 10)
    # All windows together hold each sample once.
    assert found.values.untyped_storage().nbytes() <= 8 * 2 * sum(len(signal) + step for signal in persons)
    alone = signals.windows(persons[0], 1.0, 0.4)
    assert alone.labels is None and torch.equal(alone.values[alone.rows[0]][0], persons[0].values[:, :10])


def test_a_loader_deals_windows_to_persons():
    persons = [Signal(torch.arange(10.0 * (p + 2)) + 1000 * p, 10) for p in range(3)]
    found = signals.windows(persons, 0.5, 0.2, [([0, 0.9], [p, p]) for p in range(3)])
    loader = hfta.ArrayLoader((found.values, found.labels), 4, seeds=[3, 4, 5], rows=found.rows)
    assert loader.data[0].data_ptr() == found.values.data_ptr() and loader.data[0].stride() == found.values.stride()
    for values, labels in loader:
        assert values.shape == (3, 4, 1, 5) and (labels == torch.arange(3)[:, None]).all()
        assert (values // 1000 == labels[..., None, None]).all() and (values.diff() == 1).all()


def test_columns_of_tables_are_read_in_order():
    frame = pandas.DataFrame({"time": [2.0, 0.0, 1.0], "value": [3.0, 1.0, 2.0]}, index=[7, 8, 9]).sort_values("time")
    assert signals.from_timestamps(frame["time"], frame["value"], 1).values.tolist() == [[1.0, 2.0, 3.0]]
    events = frame[["time", "value"]].to_numpy().T
    cut = signals.windows([Signal(torch.ones(4), 1)] * 2, 1, 1, [tuple(events), tuple(events)])
    assert cut.labels is not None and cut.labels[cut.rows[1]].tolist() == [1.0, 2.0, 3.0, 3.0]


def test_lists_are_persons_of_any_lengths():
    persons = [made(50.0, seconds, seed=int(seconds))[0] for seconds in (4.0, 9.0, 6.5)]
    results = signals.normalise(signals.fill(persons, window=1.0), 1.0)
    for signal, result in zip(persons, results, strict=True):
        assert torch.equal(signals.normalise(signals.fill(signal, window=1.0), 1.0).values, result.values)
    pieces = signals.chop(persons, 2.0)
    assert [len(piece) for piece in pieces[1]] == [100] * 4 + [50] and pieces[1][2].start == 4.0
    assert pieces[1][2].values.data_ptr() == persons[1].values[:, 200:].data_ptr()


at, cut = signals.from_timestamps, signals.windows
FINE, GAPS = Signal(torch.arange(8.0), 2), Signal(torch.full((8,), torch.nan), 2)
BAD = {
    "values": (lambda: Signal(torch.ones(2, 3, 4), 1), r"values is \[2, 3, 4\]; a signal needs samples \[T\]"),
    "valid": (lambda: Signal([1.0, 2.0], 1, valid=[1.0, 0.0]), r"valid is \[2\] of torch.float32; give one boolean"),
    "rate": (lambda: Signal([1.0], 0), "rate is 0 and start 0.0; give finite numbers, and a positive rate"),
    "table": (lambda: Signal(pandas.DataFrame({"a": [1.0, 2.0]}), 1), "values is a table"),
    "unsorted": (lambda: at([0, 2, 1], [1, 2, 3], 1), "samples 1 and 2 are at 2 and 1 s; sort them"),
    "double": (lambda: at([0, 1, 1], [1, 2, 3], 1), "at 1 and 1 s; .* keep one sample of each time"),
    "faster": (lambda: at(torch.arange(9) / 5, torch.ones(9), 1), "s; say 5 Hz, not 1; .* give the rate"),
    "a little faster": (lambda: at(torch.arange(999) / 100.5, torch.ones(999), 100), "say 100.50"),
    "slower": (lambda: at(torch.arange(9) * 1.25, torch.ones(9), 1), "times of samples say 0.8 Hz, but rate is 1"),
    "no time": (lambda: at([0, torch.nan], [1, 2], 1), "times must be finite"),
    "times": (lambda: at([0.0], [1, 2], 1), r"times is \[1\] for 2 samples"),
    "all gaps": (lambda: signals.fill([FINE, GAPS]), r"person 1: all of Signal\(.* 100.0 % missing\) is gaps"),
    "gaps": (lambda: cut([FINE, GAPS], 1, 1), "person 1: .* has no whole window of 1 s without a gap; leave the"),
    "rates": (
        lambda: cut([FINE, Signal([1.0, 2.0], 1)], 1, 1),
        "1 channels at 1 Hz but person 0 has 1 channels at 2 Hz",
    ),
    "hop": (lambda: cut(FINE, 1, 0.3), "hop is 0.3 s, which is 0.6 samples at 2 Hz; give a whole number"),
    "window": (lambda: signals.normalise([FINE], 0.75), "person 0: window is 0.75 s, which is 1.5 samples"),
    "endless": (lambda: signals.normalise(FINE, torch.inf), "window is inf s"),
    "before": (lambda: cut(FINE, 1, 1, ([-1, 1], [1, 2])), "event 0 is at -1 s, outside of"),
    "order": (lambda: cut(FINE, 1, 1, ([1, 0], [1, 2])), "times of events must ascend"),
    "labels": (lambda: cut(FINE, 1, 1, ([0, 1], [1])), r"events have times \[2\] and labels \[1\]"),
    "no label": (lambda: cut(FINE, 2, 1, ([0, 1, 2, 3], [0, 1, 2, 3])), "no window of .* has one label throughout"),
    "apart": (lambda: signals.join([FINE], [Signal([1.0], 1, start=9)]), "no time in common: 0 to 4 s, 9 to 10 s"),
    "persons": (lambda: signals.join([FINE], [FINE, FINE]), "must have one signal a person each"),
    "target": (lambda: signals.resample(FINE, -1), "rate is -1; give a positive number"),
    "value": (lambda: signals.fill(GAPS, "median"), "value is 'median'; give a number, or 'mean'"),
    "nan": (lambda: signals.fill(GAPS, torch.nan), "value is nan; give a number"),
    "band": (lambda: signals.bandpass(FINE, 0.5, 2), "low is 0.5 and high 2 Hz; give 0 <= low < high <= 1"),
    "taps": (lambda: signals.bandpass(FINE, 0.5, 1, taps=8), "taps is 8; give an odd number"),
    "between": (lambda: FINE.between(9, 10), "there is no sample from 9 until 10 s"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, message = BAD[case]
    with pytest.raises(hfta.errors.BatchError, match=message):
        call()
