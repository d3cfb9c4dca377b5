import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import hfta_func as hfta

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.exhaustive]


def bench_workloads():
    """Names, without importing anything for them."""
    source = (ROOT / "benchmarks" / "workloads.py").read_text()
    return re.findall(r'^    "([\w-]+)": Workload\(', source, re.M)


@pytest.fixture
def bench(monkeypatch):
    """A part of the benchmarks, which are no installed package."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def slow_path():
    """PyTorch's own rules have gaps, which it closes slowly."""
    functorch = torch._C._functorch
    functorch._set_vmap_fallback_enabled(True)
    yield
    functorch._set_vmap_fallback_enabled(False)


@pytest.mark.soak(unless="^(mlp|dcgan)$")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("name", bench_workloads())
def test_every_way_to_train_gives_the_losses_of_the_loop(bench, name):
    worker, sweep, workloads = bench("worker"), bench("sweep"), bench("workloads")
    spec = workloads.Spec(name, "small", 2, 4)
    expected = worker.Desk("serial", spec).losses()
    assert len(expected) == 3 and len(expected[0]) == 2 and expected[0][0] != expected[0][1]
    missing = [mode for mode, names in bench("modes").NOT_FOR.items() if name in names]
    for mode in ("serial foreach", "serial, default optimizer", "array", "array auto", "stock vmap"):
        if mode not in missing:
            assert sweep.difference(worker.Desk(mode, spec).losses(), expected) < sweep.TOLERANCE
            assert hfta.rules.is_installed() == (mode != "stock vmap")
    alone = worker.Desk("processes", spec._replace(num_models=1, first=1)).losses()
    assert sweep.difference(alone, [losses[1:] for losses in expected]) < sweep.TOLERANCE


# HFTA's own, where it is compiled at import.
@pytest.mark.soak(unless="^(mlp|dcgan|transformer)-HFTA-2$|^(mlp|dcgan)-JAX-2$")
@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")
@pytest.mark.parametrize(("peer", "num_models"), [("JAX", 2), ("HFTA", 1), ("HFTA", 2)])
@pytest.mark.parametrize("name", bench_workloads())
def test_peers_give_the_losses_of_the_loop(bench, name, peer, num_models):
    pytest.importorskip({"JAX": "jax", "HFTA": "hfta.ops"}[peer], reason=f"needs {peer}, HFTA in PYTHONPATH")
    worker, sweep, workloads = bench("worker"), bench("sweep"), bench("workloads")
    if name in bench("modes").NOT_FOR[peer]:
        pytest.skip(f"is not written for {peer}")
    # In smaller batches MobileNet V3 makes much of PyTorch's constant of hard sigmoid, which has single precision.
    rows = workloads.batch_size(name, "small", "cpu") if peer == "JAX" else 4
    spec = workloads.Spec(name, "small", num_models, rows)
    expected = worker.Desk("serial", spec).losses()
    assert sweep.difference(worker.Desk(peer, spec).losses(), expected) < sweep.TOLERANCE


@pytest.mark.soak
def test_a_sweep_adds_rows_to_its_file(bench, capsys, tmp_path):
    sweep, file = bench("sweep"), tmp_path / "results" / "cpu-small.json"
    order = ["--workloads", "mlp", "--size", "small", "--models", "2", "--quick", "--json", str(file), "--modes"]
    assert sweep.main([*order, "serial", "array", "processes"]) == 0
    assert sweep.main([*order, "dense"]) == 0
    rows = json.loads(file.read_text())["mlp"]["2"]["rows"]
    assert all(row["rounds"] == sweep.QUICK and row["measured"] > 0 and "first step" in row for row in rows.values())
    assert rows["array"]["code"] == bench("_code").code("array") and rows["serial"]["code"] is None
    assert set(rows) == {"serial", "array", "processes", "dense"}
    assert rows["serial"]["ratio"] == 1 and rows["array"]["difference"] < sweep.TOLERANCE
    for row in rows.values():
        low, median, high = row["seconds"]
        assert 0 < low <= median <= high and row["ratio"] > 0 and row["bytes"] > 0 and 0 <= row["busy"] <= 1.2
    # Each of the processes has one of the two models.
    assert rows["processes"]["bytes"] == pytest.approx(rows["serial"]["bytes"], rel=0.3)
    printed = [
        float(match[1]) for line in capsys.readouterr().out.splitlines() if (match := re.search(r"([\d.]+)x", line))
    ]
    assert len(printed) == 4
    settings = sweep.settings(bench("workloads").Spec("mlp", "small", 2, 32))
    sweep.save(file, "mlp", "2", {**settings, "rows": {}}, replace=True)
    assert json.loads(file.read_text())["mlp"]["2"]["rows"] == {}


@pytest.mark.parametrize(
    ("command", "order", "says"),
    [
        ("sweep", ["--device", "cuda"], "no CUDA device"),
        ("sweep", ["--rounds", "8"], "9 rounds"),
        ("sweep", ["--quick", "--json", str(ROOT / "benchmarks" / "results" / "cpu-small.json")], "too little"),
        ("sweep", ["--hfta-source", "."], "no folder hfta/ops"),
        ("training", [], "invalid choice"),
    ],
)
def test_bad_command_lines(bench, capsys, monkeypatch, command, order, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        bench("__main__").main([command, *order])
    assert raised.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def agree(found):
    return found and all(row.get("agrees", True) for row in found.values())


def bases_are_shared(found):
    (row,) = found.values()
    held = {way: measured["held"] for way, measured in row["ways"].items()}
    assert (
        held.keys() == {"loop", "array", "array in chunks", "array, rows by index", "array of bases"}
        and abs(held["array"] - held["loop"]) < 1000
    )
    return held["array of bases"] > held["array"] + 1.9 * row["base"]


def less_is_kept(found):
    (row,) = found.values()
    return row["both"]["memory"] <= row['save="less"']["memory"] < row["array"]["memory"] == row["array"]["time"] == 1


ALONE = ["--quick", "--no-compile", "--filter"]
COMMANDS = {
    "ops small": ([*ALONE, "small"], agree),
    "ops pool": ([*ALONE, "pool"], agree),
    "optim mlp": ([*ALONE, "mlp"], agree),
    "lowerings dcgan": ([*ALONE, "dcgan 512"], agree),
    "lowerings square": ([*ALONE, "32→32 3x3"], agree),
    "adapters": ("--base tiny --adapters 3 --batch 1 --length 8 --rounds 1 --bases".split(), bases_are_shared),
    "memory": ("--workloads transformer --models 2 --rounds 1".split(), less_is_kept),
    "ensembles": (
        "--models 3 --batches 2 --critics 3 --widths 8 --rounds 1 --calls 1 --no-compile".split(),
        lambda found: len(found) == 2 and all(map(agree, found.values())),
    ),
    "signals": (
        "--persons 2 --seconds 150 --rounds 1 --batch 4".split(),
        lambda found: len(found) == 3 and max(row["difference"] for row in found.values()) < 1e-5,
    ),
    "lbfgs": (
        "--models 3 --points 20 --width 6 --rounds 1".split(),
        lambda found: found["20"]["difference"] < 1e-2 and min(found["20"][way] for way in ("loop", "array")) > 0,
    ),
    "jobs": (
        ["--rounds", "1", "--jobs", "heads", "adapters", "data", "hidden state", "target", "nested"],
        lambda found: len(found) == 6 and all(row["lines"]["array"] < row["lines"]["loop"] for row in found.values()),
    ),
    "es": (
        "--widths 8 --population 8 --rows 4 --rounds 1".split(),
        lambda found: found["difference"] < 1e-10 and min(found["widths"]["8"].values()) > 0,
    ),
    # Accuracies; plain PyTorch deals the data in another order.
    "tune": (
        "--trials 3 --epochs 3 --max-models 4 --rounds 1".split(),
        lambda found: found["arrays"]["ratio"] == 1 and all(0.5 < row["best"] <= 1 for row in found.values()),
    ),
}


@pytest.mark.soak(ids="ops small|lowerings dcgan|tune")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_measured_by_itself(bench, tmp_path, name):
    (order, check), file = COMMANDS[name], tmp_path / "found.json"
    if name in ("adapters", "jobs"):
        pytest.importorskip("peft", reason="needs peft; pip install 'hfta_func[adapters]'")
    command = name.split()[0]
    assert bench("__main__").main([command, *order, "--json", str(file)]) == 0
    assert check(json.loads(file.read_text())[command])


@pytest.mark.soak
def test_a_later_process_does_not_compile(bench, capsys):
    assert bench("compiling").main(["--workloads", "mlp", "--models", "2"]) == 0
    *_, made, later, _, _ = (re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.strip().splitlines())
    assert [made[2], later[2]] == ["kept", "later process"] and float(later[5]) < 0.1 < float(made[5])


@pytest.mark.soak
def test_what_executors_cost(tmp_path):
    pytest.importorskip("ray", reason="needs Ray; pip install 'hfta_func[cluster]'")
    file = tmp_path / "executors.json"
    order = [*"--workers 1 --seconds 0.1 --megabytes 0.1 --rounds 1 --compute --trials 5 --json".split(), str(file)]
    command = [sys.executable, "-m", "benchmarks", "executors", *order]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["start"].keys() == found["rate"]["0.001"].keys() == {"processes", "ray"}
    assert found["trials"].keys() == {"1", "16"} and all(rate > 0 for rate in found["trials"]["16"].values())
    assert [*found["overhead"]] == ["0.1"] and "a segment of 0.1 s, 0.1 MB" in done.stdout


@pytest.mark.soak
def test_compiled_agents_and_jax_learn_as_plain_scripts(bench, capsys):
    pytest.importorskip("jax", reason="needs jax")
    order = ["--models", "16", "--widths", "--rounds", "2", "--ways", "compiled", "JAX", "processes"]
    assert bench("rl").main(order) == 0, capsys.readouterr().out


def test_a_process_that_fails_says_why(bench):
    worker, workloads = bench("worker"), bench("workloads")
    one = worker.Worker("JAX", workloads.Spec("mlp", "small", 2, 4, amp=True), 1)
    try:
        with pytest.raises(RuntimeError, match=r"not written for lower precision|jax is not installed; pip install"):
            one.ask("start")
        if sys.platform == "linux":
            # Where memory ends, it goes before the loop.
            assert pathlib.Path(f"/proc/{one._process.pid}/oom_score_adj").read_text() == "500\n"
        one._process.kill()
        with pytest.raises(RuntimeError, match="ended with status -9"):
            one.ask("start")
    finally:
        one.close()


def test_the_documentation_shows_the_committed_results(bench):
    report = bench("report")
    page = report.PAGE.read_text()
    for mark in (report.BEGIN, report.UPDATES, report.OPERATORS, report.PREDICTIONS, report.TO_STEPS):
        assert mark in page
    unmarked = bench("_tables").unmarked
    assert unmarked(report.written(page)) == unmarked(page)
    assert "reach-cpu-small.png" in page and (report.DOCS / "reach-cpu-small.png").exists()
    for key in report.results():
        assert f"speed-{key}.png" in page and (report.DOCS / f"speed-{key}.png").exists()


@pytest.mark.soak
def test_what_is_predicted_is_measured(bench, capsys, tmp_path):
    file = tmp_path / "plan.json"
    assert bench("predict").main(["--workloads", "mlp", "--rounds", "2", "--json", str(file)]) == 0
    assert capsys.readouterr().out.count("mlp") >= 2
    for row in json.loads(file.read_text())["mlp"]["rows"].values():
        assert row["predicted"][1] == pytest.approx(row["measured"][1], rel=0.15)


def test_an_advice_is_followed(bench, capsys):
    profiles = bench("profiles")
    assert profiles.main(["--workloads", "mlp", "--models", "2", "--follow", "1", "--rounds", "2"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"mlp +[\d.]+ +Python takes \d+% +replay=True +[\d.]+x", row)

    assert profiles.followed("its kernels are the limit", None) is None


def test_short_runs_of_many_kinds_of_networks(bench, capsys, tmp_path):
    families, file = bench("families"), tmp_path / "families.json"
    for family in families.FAMILIES.values():
        (batch,) = {tuple(leaf.shape[0] for leaf in batch) for batch in families.data(family, 2)}
        assert set(batch) == {2}
    argv = ["--models", "2", "--steps", "4", "--rounds", "2", "--filter", "linear", "--json", str(file)]
    assert families.main(argv) == 0
    assert "linear, SGD" in capsys.readouterr().out
    assert json.loads(file.read_text())["families"]["linear, SGD: M 2, 4 steps"]["ratio"] > 0
    table = bench("report").families(json.loads(file.read_text()))
    assert "| network | M 2, 4 steps |" in table and "| linear, SGD |" in table


def test_recurrent_networks(bench, capsys, tmp_path):
    file = tmp_path / "recurrent.json"
    argv = ["--kinds", "LSTM", "GRUCell", "--widths", "4", "--batches", "2", "--lengths", "3", "--models", "2"]
    assert bench("recurrent").main([*argv, "--rounds", "1", "--json", str(file)]) == 0
    assert "GRUCell, H 4, N 2, T 3: M 2" in capsys.readouterr().out
    table = bench("report").recurrent(json.loads(file.read_text()))
    assert "| eager / replayed / fit | M 2 |" in table and "| LSTM, H 4, N 2, T 3 |" in table
