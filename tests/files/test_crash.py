"""Training that is killed at random moments, also while it saves, ends as one that is not."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import optree
import pytest
import torch
import torch.nn.functional as F
import tqdm

import hfta_func as hfta

EPOCHS, SEEDS = 6, [5, 3, 8, 1]


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            *(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.2)),
            torch.nn.Linear(64, 2),
        )


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def data():
    torch.manual_seed(0)
    return torch.randn(48, 8), torch.randn(48, 2)


class Training:
    """One and the same training, as often as wanted."""

    def __init__(self):
        self.data = data()
        self.step = hfta.make_train_step(Net(), loss_fn, hfta.adam(lr=[0.01, 0.02, 0.03, 0.04]))
        self.first = self.step.init(*hfta.init_params(Net, SEEDS), seeds=SEEDS)

    def run(self, folder):
        """Train, going on from what is in the folder."""
        return hfta.fit(
            self.step,
            self.first,
            hfta.ArrayLoader(
                self.data, 8, seeds=SEEDS, transform=lambda batch: (batch[0] + 0.1 * torch.randn(8), batch[1])
            ),
            epochs=EPOCHS,
            callbacks=[hfta.callbacks.keep_best(folder / "best", "loss")],
            progress=False,
            resume=folder / "run",
            save_every=1,
        )

    def steps(self, folder):
        """Steps that the file in the folder holds, which must be whole if it is there."""
        return int(hfta.load(folder / "run", like=self.first).step[0]) if (folder / "run").exists() else 0

    def check(self, folder, result, whole, expected):
        """Compare what a broken training came to with what a whole one did."""
        assert same(result.state, expected.state)
        assert same(result.history.epochs, expected.history.epochs)
        assert same(*(hfta.load(where / "best", like=self.first) for where in (folder, whole)))


def same(a, b):
    return optree.tree_structure(a) == optree.tree_structure(b) and all(
        map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b))
    )


def kill_training(training, own, delay, moment):
    """Whether a forked training was killed after a delay or, given a moment, in the first save that begins after it."""
    child = os.fork()
    if child == 0:
        try:
            if moment is not None:
                die_in_a_save(os.path.realpath(own), time.monotonic() + delay, moment)
            training.run(own)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if moment is None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return False
    return True


def die_in_a_save(folder, begin, moment):
    """End this process in its first save to a folder from some time on.

    The kernel ends it at a moment after the new file is there, however busy the machine is; at the latest, the process
    ends itself before the file has its final name.
    """

    def watch(event, args):
        if event not in ("open", "os.rename") or time.monotonic() < begin:
            return
        path = os.fspath(args[0]) if isinstance(args[0], str | os.PathLike) else ""
        if not path.endswith(".tmp") or os.path.realpath(os.path.dirname(path)) != folder:
            return
        if event == "os.rename":
            os.kill(os.getpid(), signal.SIGKILL)
        elif args[2] & os.O_EXCL:
            signal.setitimer(signal.ITIMER_REAL, moment)

    sys.addaudithook(watch)


def writing(folder):
    """The saves that are being written to a folder, or were when somebody was killed."""
    return {*folder.glob("*.tmp")}


def serve(training, folder, kills):
    """Fork a training from this warm process, kill it, look at what it left; so many times."""
    # Threads would not be there in a forked process, and what they lock would stay locked.
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    # tqdm's own lock is one for all forked processes; one that is killed while it holds the lock would leave it locked.
    tqdm.tqdm.set_lock(threading.RLock())
    chance = random.Random(0)
    for name in ("warm", "whole"):
        (folder / name).mkdir()
        started = time.perf_counter()
        expected = training.run(folder / name)
        seconds = time.perf_counter() - started
    report = {"kills": 0, "in a save": 0, "before the first save": 0, "runs": []}
    while report["kills"] < kills:
        own = folder / f"run {len(report['runs'])}"
        own.mkdir()
        steps, longest, before = [], seconds / 4, set()
        # Every other kill comes at any moment, every other one is aimed at a save, which takes some milliseconds.
        while report["kills"] < kills and kill_training(
            *(training, own, chance.uniform(0, longest)),
            moment=chance.uniform(1e-4, 0.004) if report["kills"] % 2 else None,
        ):
            report["kills"] += 1
            report["in a save"] += bool(writing(own) - before)
            before = writing(own)
            report["before the first save"] += not (own / "run").exists()
            steps.append(training.steps(own))
            # On a machine that has become slower than it was, a training is given the time to get on.
            longest = seconds / 4 if steps[-1:] != steps[-2:-1] else 2 * longest
        report["runs"].append(steps)
        training.check(own, training.run(own), folder / "whole", expected)
        left = [name for name in os.listdir(own) if not re.fullmatch(r"best|run|best\..*\.tmp", name)]
        assert not left, left
    print(json.dumps(report))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [8, 60])
def test_what_is_killed_goes_on_to_the_same_bits(kills):
    # In memory where that can be had: the system keeps what a killed process wrote, so a disk would only make it slow.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        done = subprocess.run([sys.executable, __file__, folder, str(kills)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] >= kills
    # A good share hit in the middle of saves, and after many different ones; none took back what was saved.
    assert report["in a save"] >= kills / 4
    assert sum(len(set(run)) for run in report["runs"]) >= kills / 6
    assert all(run == sorted(run) for run in report["runs"])


if __name__ == "__main__":
    serve(Training(), pathlib.Path(sys.argv[1]), int(sys.argv[2]))
