"""The measurement of a GPU within a budget, rehearsed on a CPU, and what comes of its rows."""

import importlib
import json
import pathlib
import re
import shutil
import subprocess
import types
import warnings

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")
GPU = {"cpu": "some CPU", "cores": 16, "torch": "2.11.0+cu130", "threads": 16, "date": "2026-12-01"}
GPU["gpu"] = "NVIDIA H100"


@pytest.fixture
def bench(monkeypatch):
    """A part of the benchmarks, which are no installed package."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def rehearse(bench, folder, *more):
    return bench("gpu").main(["--device", "cpu", "--quick", "--budget", "2000", "--out", str(folder), *more])


def lasting(bench, folder):
    """What does not depend on time, of all rows by stage and key."""
    rows = bench("gpu.ledger").newest(bench("gpu.ledger").read(folder / "gpu.jsonl"))
    names = (
        *("outcome", "difference", "difference in float32", "alike", "largest", "error", "code"),
        "models",
        "batch_size",
    )
    found = {}
    for row in rows:
        own = {name: row[name] for name in names if name in row}
        if row["stage"] in ("updates", "lowerings"):
            measured = row["found"]
            own["found"] = sorted(measured["ratios"] if "ratios" in measured else measured)
        found[row["stage"], row["key"]] = own
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The rows of a run that nobody ends, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    order = "gpu --device cpu --quick --budget 2000 --out".split()
    command = [pathlib.Path(torch.sys.executable), "-m", "benchmarks", *order, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.soak
def test_every_stage_runs(bench, whole):
    folder, said = whole
    found = lasting(bench, folder)
    assert {stage for stage, _ in found} == {*bench("gpu").SHARES}
    assert all("error" not in row for row in found.values())
    assert "left for the next budget: nothing" in said
    modes = {key.split(": ")[1] for stage, key in found if stage == "cells"}
    assert modes == {"serial", "array", "stock vmap", "processes"}
    assert all(
        row["difference"] < 1e-6 for (stage, key), row in found.items() if stage == "cells" and "difference" in row
    )
    # Nothing is measured twice.
    before = (folder / "gpu.jsonl").read_text()
    assert rehearse(bench, folder) == 0 and (folder / "gpu.jsonl").read_text() == before


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["tests", "cells", "updates", "lowerings", "busy", "largest"])
def test_a_run_that_ends_in_the_middle_of_a_stage_goes_on(bench, whole, monkeypatch, tmp_path, stage):
    stages, ended = bench("gpu.stages"), []
    clock = bench("gpu.clock")
    measure = stages.measure

    class Ends(clock.Clock):
        """In the second single, in the third round of a cell, or after the first test."""

        checks = {"cells": 5, "largest": 1}.get(stage, 2)

        def check(self, seconds=0.0):
            self.checks -= 1
            if self.checks == 0:
                ended.append(stage)
                raise clock.TimeUp

        def left(self):
            over = stage == "tests" and '"tests"' in (tmp_path / "gpu.jsonl").read_text()
            ended.extend([stage] * over)
            return 0.0 if over else 1000.0

    def cut(own, args, given, ledger, env):
        if ended:
            raise clock.TimeUp
        measure(own, args, Ends(1000) if own == stage else given, ledger, env)

    (tmp_path / "gpu.jsonl").touch()
    monkeypatch.setattr(stages, "measure", cut)
    rehearse(bench, tmp_path, "--stages", stage)
    assert ended
    expected = {key: row for key, row in lasting(bench, whole[0]).items() if key[0] == stage}
    assert len(lasting(bench, tmp_path)) < len(expected)
    monkeypatch.setattr(stages, "measure", measure)
    rehearse(bench, tmp_path, "--stages", stage)
    assert lasting(bench, tmp_path) == expected


def test_rows_are_read_back(bench, tmp_path, monkeypatch):
    ledger = bench("gpu.ledger")
    committed = tmp_path / "committed.jsonl"
    about = {"machine": bench("_measure").machine()}
    rows = [
        {"stage": "updates", "key": "a", "code": "1", **about},
        {"stage": "updates", "key": "b", "code": "1", **about, "late": True},
        {"stage": "updates", "key": "c", "code": "1", "machine": GPU},
        {"stage": "updates", "key": "d", "code": "0", **about},
    ]
    # The last line was cut off when time was up.
    committed.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"stage": "upd')
    one = ledger.Ledger(tmp_path / "new", (committed,))
    assert one.others == ["NVIDIA H100"]
    assert one.left("updates", "abcd", lambda key: (key, "1")) == ["c", "b", "d"]
    one.add("updates", "c", "1", {})
    one.add("updates", "e", "1", {"outcome": "failed"})
    assert one.left("updates", "eabcd", lambda key: (key, "1")) == ["e", "b", "d"]
    assert ledger.Ledger(tmp_path / "new", ()).state("updates", "c", "1") == "done"
    committed.write_text("no row\n" + json.dumps(rows[0]) + "\n")
    with pytest.raises(SystemExit, match=r"committed.jsonl:1 is no row of results; take the line out"):
        ledger.read(committed)


def test_rows_are_added_to_the_committed_ones(bench, tmp_path, monkeypatch):
    stages, file = bench("gpu.stages"), tmp_path / "new.jsonl"
    monkeypatch.setattr(stages, "COMMITTED", tmp_path / "gpu.jsonl")
    row = {"stage": "busy", "key": "a", "machine": GPU, "busy": 0.1}
    for value in (0.1, 0.2):
        file.write_text(json.dumps({**row, "busy": value}) + "\n")
        assert bench("gpu").main(["--add", str(file)]) == 0
    assert [json.loads(line)["busy"] for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == [0.2]
    file.write_text(json.dumps({**row, "quick": True}) + "\n")
    with pytest.raises(SystemExit, match="rows of --quick"):
        bench("gpu").main(["--add", str(file)])
    with pytest.raises(SystemExit, match=r"nothing.jsonl does not exist"):
        bench("gpu").main(["--add", str(tmp_path / "nothing.jsonl")])


@pytest.fixture
def measured(bench, monkeypatch, tmp_path):
    """A cell's modes without processes: each answers at once, but for those that ``full`` says run out of memory."""
    cells, stages = bench("gpu.cells"), bench("gpu.stages")
    state = types.SimpleNamespace(full={}, open=set(), wrong=set(), slow={})

    class Measured(bench("_processes").Measured):
        def __init__(self, mode, spec, row, *more):
            self.mode, self.device, self.calls, self.row, self._workers = mode, "cpu", 1, row, []
            state.open.add(mode)

        def ask(self, order, *args, limit=None):
            full = state.full.get(self.mode)
            if full == "always" or (full == "beside" and len(state.open) > 2):
                raise RuntimeError("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
            if order == "losses":
                return [[[1.0 + (self.mode in state.wrong)] * 2] * args[2] if len(args) > 2 else [[1.0, 1.0]] * 3]
            return {"start": [(0.5, [[1.0, 1.0]] * 2)], "memory": [8]}[order]

        def time(self, calls):
            return state.slow.get(self.mode, 0.01), 0.0

        def close(self):
            state.open.discard(self.mode)

    monkeypatch.setattr(cells, "Measured", Measured)
    monkeypatch.setattr(cells, "modes", lambda spec, has, quick: ("serial", "array", "dense", "stock vmap"))
    ledger = stages.opened(types.SimpleNamespace(out=tmp_path, quick=True, commit=None))

    def run(clock=None):
        cells.run(cells.left(ledger, "cpu", [], True), clock or bench("gpu.clock").Clock(1000), ledger, True, {})
        return {row["mode"]: row for row in ledger.of("cells")}

    state.run = run
    return state


@pytest.mark.parametrize(
    ("what", "modes", "wrong"),
    [
        ({"full": {"dense": "beside"}}, {"dense"}, None),
        ({"full": {"dense": "always"}}, {"dense"}, "out of memory"),
        # Without a loop there are no ratios.
        ({"full": {"serial": "always"}}, {"serial", "array", "dense", "stock vmap"}, "out of memory"),
        ({"wrong": {"array"}}, {"array"}, "differ from the loop's"),
        ({"slow": {"dense": 100.0}}, {"dense"}, "too much of a cell's"),
    ],
)
def test_a_cell_goes_on_without_modes_that_fail(measured, what, modes, wrong):
    vars(measured).update(what)
    rows = measured.run()
    if wrong is None:
        assert all("ratio" in row for row in rows.values()) and modes == {
            mode for mode in rows if "beside" in rows[mode]
        }
        return
    assert all(wrong in rows[mode]["error"] and "ratio" not in rows[mode] for mode in modes)
    assert all("ratio" in row for mode, row in rows.items() if mode not in modes)


def test_a_budget_too_short_for_a_cell_leaves_it(bench, measured):
    with pytest.raises(bench("gpu.clock").TimeUp):
        measured.run(bench("gpu.clock").Clock(1.0))
    assert not measured.open


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["--device", "cuda"], r"--device cuda: PyTorch .* was built without CUDA|--device cuda: "),
        (["--device", "cpu", "--budget", "0"], "--budget: 0 s are no time"),
        (["--device", "cpu", "--hfta-source", "nowhere"], "--hfta-source: nowhere has no folder hfta/ops"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_orders_that_cannot_be_carried_out(bench, capsys, order, message):
    with pytest.raises(SystemExit):
        bench("gpu").main(order)
    said = capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said


def test_a_missing_package_and_an_old_driver_are_named(bench, monkeypatch, capsys):
    gpu = bench("gpu")
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "not installed here: no_such_package; python -m benchmarks carry" in capsys.readouterr().err

    def old():
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert gpu.why_no_cuda() == "The NVIDIA driver on your system is too old (found version 11040)."


def rows_of_a_card(bench, gpu="NVIDIA H100"):
    cells, code = bench("gpu.cells"), bench("_code")
    about = {"machine": {**GPU, "gpu": gpu}, "commit": "0123456789abcdef", "dirty": False}
    rows = []
    for size, amp in (("small", False), ("paper", False), ("paper", True)):
        spec = bench("workloads").Spec("resnet", size, 16, 128, "cuda", amp)
        for mode, ratio in {"serial": 1.0, "array": 2.0, "array replayed": 9.0, "serial replayed": 3.0}.items():
            row = {"seconds": [1, 2, 3], "ratio": ratio, "alike": 0.0, "bytes": 100, "first step": 3.0}
            row |= {"rounds": 9, "measured": 1.0, "gpu": {}}
            own = {**bench("sweep").settings(spec), "workload": "resnet", "size": size, "models": 16, "mode": mode}
            key = f"{cells.name(spec)}: {mode}"
            rows.append({"stage": "cells", "key": key, **about, "code": code.code(mode), **own, **row})
    one = {"workload": "mlp", "size": "small", "num_models": 16, "amp": False}
    times = {"groups": 2e-3, "matmul": 1e-3, "serial": 5e-3}
    found = {"agrees": True, "ratios": {"array, donated": {"M x torch.optim": 5.0}, "array": {"M x torch.optim": 4.0}}}
    more = [
        ("busy", "b", {**one, "mode": "array", "wall": 1e-3, "kernels": 2e-4, "busy": 0.2}),
        ("largest", "l", {**one, "largest": 4096}),
        ("lowerings", "w", {"found": {"convolution: M 4, x": {"chosen": "groups", "times": times}}}),
        ("updates", "mlp, adam", {"found": found}),
        ("updates", "resnet18, adam", {"found": found}),
        ("busy", "broken", {"error": "out of memory"}),
    ]
    return rows + [{"stage": stage, "key": key, **about, "code": "x", **row} for stage, key, row in more]


def test_pages_show_the_rows(bench, tmp_path):
    report, tables, x = bench("report"), bench("gpu.tables"), bench("_tables").TIMES
    file = tmp_path / "gpu.jsonl"
    assert report.gpus(tmp_path) == tables.NOTHING
    # Another card has tables of its own, and rows of other code are named.
    rows = rows_of_a_card(bench) + rows_of_a_card(bench, "NVIDIA H200")
    rows[len(rows) // 2 + 1]["code"] = "another"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = report.gpus(tmp_path)
    kinds = "small versions", "published sizes", "published sizes, bfloat16"
    assert all(f"### On one NVIDIA {card}, {kind}\n" in page for card in ("H100", "H200") for kind in kinds)
    assert f"| ResNet-18 | 16 {x} 128 | 2.0{x} | 9.0{x} | 3.0{x} |" in page
    assert f"| adam | 5.0{x} | 5.0{x} |" in page and "| 4,096 |" in page and "| 1.00 | 0.20 | 20% |" in page
    assert f"| convolution: M 4, x | groups 2.000 | matmul 1.000 | 2.00{x} |" in page
    assert report.older(report.results(tmp_path)) == ["nvidia-h200-small: resnet, M = 16: array"]


def test_what_a_lent_machine_needs_is_packed(bench, monkeypatch, tmp_path, capsys):
    carry, folder = bench("carry"), ".carry-of-a-test"
    source = tmp_path / "hfta-checkout"
    (source / "hfta" / "ops").mkdir(parents=True)
    (source / "hfta" / "ops" / "linear.py").write_text("pass")
    (source / "hfta" / "large.bin").write_text("x" * 100)
    run = subprocess.run

    def answer(command, **options):
        """Of git as it is, but for changes; of the downloader what it would leave."""
        if "download" in command:
            (pathlib.Path(command[command.index("-d") + 1]) / "some.whl").write_text("wheel")
            return types.SimpleNamespace(
                returncode="absent" in command[-1], stderr="x\nERROR: No matching distribution"
            )
        if "status" in command or "check-ignore" in command:
            return types.SimpleNamespace(returncode=0, stdout="")
        return run(command, **options)

    monkeypatch.setattr(carry.subprocess, "run", answer)
    try:
        assert carry.main(["--out", folder, "--hfta-source", str(source)]) == 0
        files = {f"{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert files == {"wheels/some.whl", "hfta-source/hfta/ops/linear.py", "run.sh"}
        script = (ROOT / folder / "run.sh").read_text()
        assert f"--hfta-source {folder}/hfta-source" in script and " --commit " in script
        assert run(["bash", "-n", ROOT / folder / "run.sh"]).returncode == 0
        with pytest.raises(SystemExit, match="more than may travel; the largest files are"):
            carry.main(["--out", folder, "--limit", "0.1"])
        with pytest.raises(SystemExit, match=r"no wheel of absent for Python 3\.12: ERROR: No matching distribution"):
            carry.main(["--out", folder, "--packages", "absent"])
    finally:
        shutil.rmtree(ROOT / folder, ignore_errors=True)
