import importlib
import itertools
import json
import pathlib
import re
import sys
import time
import types

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize(
    "name", ["mlp", "resnet", "mobilenet-v2", "mobilenet-v3l", "pointnet-seg", "dcgan", "transformer", "bert"]
)
def test_every_way_to_train_gives_the_losses_of_the_loop(bench, name):
    worker, sweep, workloads = bench("worker"), bench("sweep"), bench("workloads")
    spec = workloads.Spec(name, "small", 2, 4)
    expected = worker.Desk("serial", spec).losses()
    assert len(expected) == 3 and len(expected[0]) == 2 and expected[0][0] != expected[0][1]
    for mode in ("array", "stock vmap"):
        assert sweep.difference(worker.Desk(mode, spec).losses(), expected) < sweep.TOLERANCE
    alone = worker.Desk("processes", spec._replace(num_models=1, first=1)).losses()
    assert sweep.difference(alone, [losses[1:] for losses in expected]) < sweep.TOLERANCE


# HFTA's own, where it is compiled at import.
@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")
@pytest.mark.parametrize("mode", ["JAX", "HFTA"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_other_packages_give_the_losses_of_the_loop(bench, name, mode):
    pytest.importorskip(mode.lower(), reason=f"needs {mode}")
    worker, sweep, workloads = bench("worker"), bench("sweep"), bench("workloads")
    spec = workloads.Spec(name, "small", 2, 4)
    expected = worker.Desk("serial", spec).losses()
    assert sweep.difference(worker.Desk(mode, spec).losses(), expected) < sweep.TOLERANCE


def test_a_sweep_adds_rows_to_its_file(bench, capsys, tmp_path):
    sweep, file = bench("sweep"), tmp_path / "results" / "cpu-small.json"
    order = ["--workloads", "mlp", "--size", "small", "--models", "2", "--rounds", "2", "--json", str(file), "--modes"]
    assert sweep.main([*order, "serial", "array", "processes"]) == 0
    assert sweep.main([*order, "dense"]) == 0
    rows = json.loads(file.read_text())["mlp"]["2"]["rows"]
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


@pytest.mark.parametrize("counters", [True, False])
def test_how_busy_a_gpu_is(bench, monkeypatch, counters):
    shares, samples = itertools.cycle([30, 50]), iter(["first", "second"])
    freed, query = [], types.SimpleNamespace(metrics=[types.SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    class NVMLError(Exception):
        pass

    def support(handle):
        if not counters:
            raise NVMLError
        return types.SimpleNamespace(isSupportedDevice=1)

    def read(query):
        assert (query.version, query.numMetrics, query.metrics[0].metricId) == (1, 1, 2)
        assert [query.sample1["at"], query.sample2["at"]] == ["first", "second"]
        query.metrics[0].value = 25.0

    nvml = types.ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=NVMLError,
        NVML_GPM_METRICS_GET_VERSION=1,
        NVML_GPM_METRIC_SM_UTIL=2,
        NVML_SUCCESS=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: freed.append("library"),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=next(shares)),
        nvmlGpmQueryDeviceSupport=support,
        nvmlGpmSampleAlloc=dict,
        nvmlGpmSampleGet=lambda handle, sample: sample.update(at=next(samples)),
        nvmlGpmSampleFree=lambda sample: freed.append(sample["at"]),
        c_nvmlGpmMetricsGet_t=lambda: query,
        nvmlGpmMetricsGet=read,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with bench("_gpu").watched("cuda", 0.001) as found:
        time.sleep(0.1)
    assert 0.3 <= found["kernels"] <= 0.5
    assert found.get("sm") == (0.25 if counters else None)
    assert freed == (["first", "second", "library"] if counters else ["library"])
    with bench("_gpu").watched("cpu") as found:
        pass
    assert found == {}


@pytest.mark.parametrize(
    ("mode", "order", "factor"),
    [("array", "losses", 1.01), ("array", "losses", float("nan")), ("array compiled", "start", 1.01)],
)
def test_a_mode_whose_losses_differ_gets_no_ratio(bench, capsys, monkeypatch, mode, order, factor):
    sweep = bench("sweep")

    class Wrong(sweep.Measured):
        def ask(self, asked, *args):
            answers = super().ask(asked, *args)
            if (asked, self.mode) == (order, mode):
                losses = answers[0] if order == "losses" else answers[0][1]
                losses[0][1] *= factor
            return answers

    monkeypatch.setattr(sweep, "Measured", Wrong)
    results = sweep.measure(
        sweep.parse(["--workloads", "mlp", "--size", "small", "--models", "2", "--modes", mode, "--rounds", "2"])
    )
    assert "ratio" not in results["mlp"]["2"]["rows"][mode]
    out = capsys.readouterr().out
    assert "losses differ from the " in out and not re.search(r"\d+x\b", out)


def test_a_process_that_fails_says_why(bench):
    worker, workloads = bench("worker"), bench("workloads")
    one = worker.Worker("JAX", workloads.Spec("dcgan", "small", 2, 4), 1)
    try:
        with pytest.raises(RuntimeError, match=r"not written for this workload|No module named 'jax'"):
            one.ask("start")
        one._process.kill()
        with pytest.raises(RuntimeError, match="ended with status -9"):
            one.ask("start")
    finally:
        one.close()


def _results(bench):
    rows = {
        "serial": {"seconds": [1, 2, 3], "ratio": 1.0, "bytes": 100},
        "array": {"seconds": [1, 2, 3], "ratio": 3.25, "bytes": 104},
        "array compiled": {"seconds": [1, 2, 3], "ratio": 0.5, "bytes": 98, "first step": 20.4},
        "stock vmap": {"difference": 2.0, "error": "losses differ"},
    }
    machine = {"cpu": "some CPU", "threads": 2, "torch": "2.13.0+cpu"}
    one = {"batch_size": 8, "machine": machine, "rows": rows}
    return {"cpu-small": {"resnet": {"2": one, "16": one}}}


def test_the_report_shows_the_largest_array_and_what_has_a_ratio(bench):
    lines = bench("report").tables(_results(bench)).splitlines()
    assert "some CPU, 2 cores, PyTorch 2.13.0" in lines[0]
    x = bench("report").TIMES
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells == ["ResNet-18", f"16 {x} 8", f"3.2{x}", f"0.50{x}", "", "", "", "1.04 / 0.98", "20 s"]
    assert bench("report").picture(_results(bench)["cpu-small"]).axes[0].lines


def test_the_readme_shows_the_committed_results(bench):
    report = bench("report")
    readme = report.README.read_text()
    assert report.BEGIN in readme and report.replaced(readme, report.tables(report.results())) == readme
    for key in report.results():
        assert f"docs/speed-{key}.png" in readme and (report.DOCS / f"speed-{key}.png").exists()


def test_what_is_predicted_is_measured(bench, capsys, tmp_path):
    file = tmp_path / "plan.json"
    assert bench("predict").main(["--workloads", "mlp", "--rounds", "2", "--json", str(file)]) == 0
    assert capsys.readouterr().out.count("mlp") >= 2
    for row in json.loads(file.read_text())["mlp"]["rows"].values():
        assert row["predicted"][1] == pytest.approx(row["measured"][1], rel=0.15)
