"""The measurement of a GPU within a budget, rehearsed on a CPU, and what comes of its rows."""

import importlib
import pathlib
import re
import shutil
import subprocess
import types

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
    names = "outcome difference alike largest error code models batch_size".split()
    names += ["difference in float32"]
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
    assert all(row.get("difference", 0) < 1e-6 for (stage, _), row in found.items() if stage == "cells")
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
