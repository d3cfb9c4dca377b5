"""Workers that are actors of Ray, on one machine and on a cluster of two nodes of which one is lost."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

import hfta_func as hfta
from hfta_func import tune
from hfta_func.testing import assert_executor
from kills import DRIVER, KILLS, check_killed_drivers, check_kills, once
from processes import local_ray, program
from studies import SCHEDULERS, SPACE, STUDY, build, told

ray = pytest.importorskip("ray", reason="needs Ray; pip install 'hfta_func[cluster]'")

from hfta_func import cluster  # noqa: E402
from hfta_func.cluster import ray_actors  # noqa: E402

# Ray leaves sockets and files to the garbage collector, and says what it will do in later versions.
IGNORED = "ResourceWarning", "FutureWarning", "DeprecationWarning", "pytest.PytestUnraisableExceptionWarning"
pytestmark = pytest.mark.filterwarnings(*(f"ignore::{category}" for category in IGNORED))


@pytest.fixture(scope="module")
def crew() -> Iterator[cluster.RayPool]:
    # Metrics are exported every second.
    with local_ray(num_cpus=2, _system_config={"metrics_report_interval_ms": 1000}), cluster.ray() as found:
        yield found


@pytest.mark.exhaustive
def test_actors_keep_the_laws_of_executors(crew: cluster.RayPool) -> None:
    assert crew.count == 2
    assert_executor(crew, restarts=True)


@pytest.mark.exhaustive
def test_a_study_finds_the_same(crew: cluster.RayPool) -> None:
    options = STUDY | {"scheduler": SCHEDULERS["hyperband"], "max_models": 4}
    study, expected = (tune.run(build, SPACE, executor=executor, **options) for executor in (crew, None))
    assert told(study) == told(expected) and study.best.number == expected.best.number and once(study)


@pytest.mark.exhaustive
@pytest.mark.soak(ids="64")
@pytest.mark.parametrize(("trials", "kills"), [(11, 1), (64, 10)])
def test_actors_that_are_killed_change_nothing(crew: cluster.RayPool, trials: int, kills: int) -> None:
    check_kills(crew, trials, kills)


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp6"), reason="needs Linux's list of sockets")
def test_nothing_listens_beyond_this_machine(crew: cluster.RayPool) -> None:
    own: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                own[fields[9]] = fields[1].split(":")[0]
    found, session = set(), ray._private.worker._global_node.get_session_dir_path().encode()
    for entry in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        try:
            name, program = os.readlink(entry), (entry.parents[1] / "cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith("socket:[") and session in program and name[8:-1] in own:
            found.add(own[name[8:-1]])
    assert found and found <= {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.exhaustive
def test_a_cluster_whose_resources_are_taken_is_not_waited_for(crew: cluster.RayPool) -> None:
    match = r"no worker that needs 1 CPU has started in 0\.5 s; .*2 CPU.* of the cluster, .* are free"
    with pytest.raises(hfta.errors.WorkerError, match=match) as caught:
        cluster.ray(1, timeout=0.5)
    assert " CPU" not in str(caught.value).partition(" of the cluster, ")[2]


@pytest.mark.exhaustive
def test_workers_without_the_package_are_refused(crew: cluster.RayPool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(ray_actors.Actor):
        def __init__(self, *args: Any):
            raise ModuleNotFoundError("No module named 'hfta_func'")

    monkeypatch.setattr(ray_actors, "Actor", Other)
    match = "worker 0 cannot be started .*; install hfta_func on all nodes"
    with pytest.raises(hfta.errors.WorkerError, match=match):
        cluster.ray(1, cpus=0)


@pytest.mark.exhaustive
def test_a_cluster_that_is_gone_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("Version mismatch: 2.9 and 2.60")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as there, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", init)
        address = f"127.0.0.1:{there.getsockname()[1]}"
        match = rf"the Ray cluster {address} cannot be used \("
        with pytest.raises(hfta.errors.WorkerError, match=match + "RuntimeError: Version"):
            cluster.ray(address=address)
    # Nothing listens there any more; Ray itself would ask for two minutes.
    began = time.monotonic()
    with pytest.raises(hfta.errors.WorkerError, match=match + "ConnectionRefusedError: "):
        cluster.ray(address=address)
    assert time.monotonic() - began < 30


NODES = """
import os, pathlib, sys, time, warnings
warnings.simplefilter("ignore")
import ray
from ray.cluster_utils import Cluster
from hfta_func import cluster, tune
from kills import once
from studies import SPACE, STUDY, after, build, told

folder, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
seen = folder / "seen"
seen.mkdir()

def build_slow(fixed, members):
    found = build(fixed, members)
    (seen / ray.get_runtime_context().get_node_id()).touch()
    return found._replace(step=after(lambda *_: time.sleep(0.02), found.step))

def trained(node):
    return (seen / node.node_id).exists()

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
options = STUDY | {"scheduler": tune.hyperband(), "trials": 11 + 5 * kills, "epochs": 27, "max_models": 2}
expected = tune.run(build, SPACE, **options | {"max_models": 16})
there, lost, came = [], [], []

def change(study):
    if not there:
        # The cluster grows while the study runs.
        there.append(nodes.add_node(num_cpus=1))
        came.extend(there)
    elif len(lost) < kills and trained(there[0]) and pool.deaths == len(lost):
        # A node that trains is lost, and another comes instead.
        lost.append(there.pop())
        nodes.remove_node(lost[-1], allow_graceful=False)
        there.append(nodes.add_node(num_cpus=1))
        came.extend(there)
    # It must not be over before all that came have trained.
    end = time.monotonic() + 5
    while time.monotonic() < end and not (all(map(trained, there)) and pool.deaths == len(lost)):
        time.sleep(0.1)

with cluster.ray(2) as pool:
    found = tune.run(build_slow, SPACE, executor=pool, callbacks=[change], resume=folder / "study", **options)
    print("lost", len(lost), "deaths", pool.deaths, "came", [trained(node) for node in came], flush=True)
    assert len(lost) == kills and kills <= pool.deaths
    # The first that came was used; the last one may have come too late.
    assert all(map(trained, came[:-1])) and len(came) == kills + 1
assert told(found) == told(expected) and once(found) and found.best.number == expected.best.number
again = tune.run(build, SPACE, resume=folder / "study", **options)
assert told(again) == told(expected)
ray.shutdown()
nodes.shutdown()
print("the same")
"""


@pytest.mark.soak
def test_nodes_that_come_are_used_and_nodes_that_are_lost_change_nothing(tmp_path: pathlib.Path) -> None:
    with program(NODES, tmp_path, KILLS, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=900)
    assert out.endswith("the same\n"), out + err[-3000:]


HEAD = """
import sys, warnings
warnings.simplefilter("ignore")
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(nodes.address, flush=True)
sys.stdin.read()
nodes.shutdown()
"""
SILENT = "import warnings; warnings.simplefilter('ignore'); from hfta_func import cluster"
RAY_DRIVER = DRIVER.replace("import hfta_func as hfta", SILENT)
RAY_DRIVER = RAY_DRIVER.replace("hfta.workers.WorkerPool(2)", "cluster.ray(2, address=sys.argv[2])")
RAY_DRIVER = RAY_DRIVER.replace('"trials": 64', f'"trials": {64 if KILLS > 2 else 24}')


@pytest.mark.soak
def test_a_driver_that_is_killed_goes_on_and_its_actors_end(tmp_path: pathlib.Path) -> None:
    with program(HEAD, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as head:
        address = head.stdout.readline().strip()
        try:
            check_killed_drivers(RAY_DRIVER, tmp_path / "study", address, seconds=1.0, errors=subprocess.DEVNULL)
        finally:
            head.stdin.close()
            head.wait(60)


FULL = """
import sys, warnings
warnings.simplefilter("ignore")
import ray, torch
from torch import nn
import hfta_func as hfta
from hfta_func import cluster  # noqa: E402
from hfta_func.cluster import ray_actors  # noqa: E402

with ray_actors._on_this_machine():
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
             object_store_memory=80_000_000, _system_config={"local_fs_capacity_threshold": float(sys.argv[1])})

def make():
    return nn.Linear(1000, 7500).double()

def fit(**options):
    step = hfta.make_train_step(make(), lambda model, batch: model(batch).square().mean(), hfta.sgd(lr=[0.1, 0.2]))
    state = step.init(*hfta.init_params(make, range(2)), seeds=range(2))
    loader = hfta.ArrayLoader(torch.ones(4, 1000).double(), 2, seeds=range(2))
    return hfta.fit(step, state, loader, epochs=1, progress=False, **options).state.params["weight"]

with cluster.ray(1) as pool:
    assert fit().nbytes == 120_000_000
    try:
        torch.testing.assert_close(fit(executor=pool), fit())
        print("the same")
    except hfta.errors.WorkerError as error:
        print(error)
    # The worker lives.
    assert pool.count == 1 and pool.deaths == 0
    call = pool.submit(dict, seed=7)
    assert pool.wait(60) == (call, {"seed": 7})
ray.shutdown()
"""
FREE = "models 0 to 1: worker 0 on .*: there is no room in Ray's object store, nor on the disk that it spills to; free"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("threshold", "says"), [(1.0, "the same\n"), (1e-5, FREE)])
def test_states_larger_than_the_object_store_are_spilled_or_refused(threshold: float, says: str) -> None:
    with program(FULL, threshold, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and re.match(says, out), out + err[-3000:]
