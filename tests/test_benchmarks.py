import importlib
import json
import pathlib
import re

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads do not pay at this size, and cost much where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(monkeypatch):
    """A part of the benchmarks, which are no installed package."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_training_prints_a_ratio_for_every_row(bench, capsys, tmp_path):
    file = tmp_path / "new" / "numbers.json"
    assert bench("__main__").main(["training", "--quick", "--no-compile", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in lines[0] and f"{torch.get_num_threads()} threads" in lines[0]
    numbers = json.loads(file.read_text())
    rows = {(name, row): own for name, one in numbers["training"].items() for row, own in one["rows"].items()}
    both = {(name, row) for name in ("mlp", "digits") for row in ("serial", "serial, default allocator", "array eager")}
    assert set(rows) == both | {("mlp", "stock vmap eager")}
    printed = [float(match[1]) for line in lines if (match := re.search(r" ([\d.]+)x", line))]
    assert printed == [round(row["ratio"], 2) for row in rows.values()]
    for (_, name), row in rows.items():
        low, median, high = row["seconds"]
        assert 0 < low <= median <= high
        assert row["ratio"] > 0 and (row["ratio"] == 1 or name != "serial")
    assert all(one["agreement"]["parameters"] < 1e-4 for one in numbers["training"].values())


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_no_ratio_where_one_member_is_wrong(bench, capsys, monkeypatch, factor):
    training = bench("training")
    make = training.hfta.make_train_step

    def wrong(*args, **options):
        step = make(*args, **options)

        def run(state, batch):
            state, metrics = step(state, batch)
            scale = torch.where(torch.arange(4) == 2, factor, 1.0)
            params = {path: param * scale.view(-1, *[1] * (param.dim() - 1)) for path, param in state.params.items()}
            return state._replace(params=params), metrics

        run.init = step.init
        return run

    monkeypatch.setattr(training.hfta, "make_train_step", wrong)
    assert bench("__main__").main(["training", "--quick", "--no-compile"]) == 1
    out = capsys.readouterr().out
    assert out.count("NOT below") == 2 and not re.search(r"\d+x\b", out) and "ratio" not in out


def test_stock_vmap_and_serial_loop_train_alike(bench):
    training = bench("training")
    work = training.mlp(3, 5)
    loops = training.stock(work), training.serial(work, work.models())
    assert training.difference(work, *loops) < 1e-5


def test_memory_counts_what_is_alive_at_one_time(bench):
    def work():
        kept = torch.ones(1000)
        for _ in range(3):
            torch.ones(5000)
        return kept

    assert bench("_measure").peak_bytes(work) == pytest.approx(24000, abs=256)


def test_memory_is_positive_and_holds_the_gradients(bench, capsys):
    memory = bench("memory")
    assert bench("__main__").main(["memory", "--quick", "--no-compile"]) == 0
    assert "4 x solo" in capsys.readouterr().out
    work = memory.WORKLOADS["digits"](4, 8)
    resident, peak = memory.solo(work)
    parameters = sum(4 * parameter.numel() for parameter in work.make().parameters())
    assert resident > 3 * parameters and peak > parameters
    resident, peak = memory.array(work, None, False)
    # An array step has the new parameters and averages beside the old ones.
    assert resident > 4 * 3 * parameters and peak > 4 * 3 * parameters
