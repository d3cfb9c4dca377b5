"""Workers that are the ranks of torchrun, with gloo on this machine."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("optuna", reason="needs optuna; pip install 'hfta_func[tune]'")

from hfta_func import cluster
from processes import environment

PROGRAM = """
import os, pathlib, signal, sys, time
import hfta_func as hfta
from hfta_func import cluster, tune
from hfta_func.testing import assert_executor
from kills import once
from studies import SPACE, STUDY, build, told

folder, kills = pathlib.Path(sys.argv[1]), sys.argv[2] == "kill"
options = STUDY | {"scheduler": tune.hyperband(), "max_models": 4, "resume": folder / "study"}

def build_noted(fixed, members):
    found = build(fixed, members)
    def step(state, batch):
        (folder / f"rank {os.environ['RANK']}").touch()
        index = folder / "study" / "members.json"
        if kills and os.environ["RANK"] == "1" and index.exists() and b'"trajectory": [[' in index.read_bytes():
            os.kill(os.getpid(), signal.SIGKILL)
        return found.step(state, batch)
    return found._replace(step=step)

def main(executor):
    assert executor.count == 2 and os.environ["RANK"] == "0"
    try:
        study = tune.run(build_noted, SPACE, executor=executor, **options)
    except hfta.errors.WorkerError as error:
        print(error, flush=True)
        raise
    expected = tune.run(build, SPACE, **options | {"resume": None})
    assert told(study) == told(expected) and once(study)
    assert_executor(executor)
    return "equal"

result = cluster.torchrun(main)
assert result == (None if os.environ["RANK"] == "1" else "equal")
if result:
    print(result)
"""


def launched(folder: pathlib.Path, how: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    order = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    order += ["--master-port", str(29500 + os.getpid() % 1000), str(program), str(folder), how]
    own = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return subprocess.run(order, env=own, capture_output=True, text=True, timeout=200)


@pytest.mark.exhaustive
def test_ranks_find_the_same_and_a_rank_that_dies_loses_nothing(tmp_path: pathlib.Path) -> None:
    done = launched(tmp_path, "kill")
    assert done.returncode != 0 and "equal" not in done.stdout
    assert b'"trajectory": [[' in (tmp_path / "study" / "members.json").read_bytes()
    done = launched(tmp_path, "go on")
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr[-3000:]
    assert (tmp_path / "rank 0").exists() and (tmp_path / "rank 1").exists()


def test_a_program_that_torchrun_did_not_start_is_refused() -> None:
    with pytest.raises(RuntimeError, match="was not started by torchrun; use torchrun"):
        cluster.torchrun(lambda executor: None)
