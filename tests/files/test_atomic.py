"""Files under several writers, killed writers, planted links; runs that hold their files."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest
import torch

import hfta_func as hfta
from hfta_func.files import atomic

SEEDS = [5, 3]
STALE = "state.0123456789abcdef.tmp"
ONES, ZEROS = {"a": torch.ones(2, 3)}, {"a": torch.zeros(2, 3)}


class Meanwhile(torch.Tensor):
    """A tensor during whose copying something happens."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            args[1].action()
        return super().__torch_function__(func, types, args, kwargs)


def during(action):
    tensor = torch.ones(2, 3).as_subclass(Meanwhile)
    tensor.detach = lambda: tensor
    tensor.action = action
    return {"a": tensor}


def holds(path, tree):
    return torch.equal(hfta.load(path, like=ZEROS)["a"], tree["a"])


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_writers_the_last_one_that_does_not_fail_wins(tmp_path, fails):
    path = tmp_path / "state"

    def save_other():
        hfta.save(ZEROS, path)
        assert holds(path, ZEROS)
        if fails:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        hfta.save(during(save_other), path)
    assert holds(path, ZEROS if fails else ONES) and os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_only_regular_files_are_replaced(tmp_path, make):
    path = tmp_path / "state"
    make(path)
    before, there = os.lstat(path), sorted(os.listdir(tmp_path))
    message = "state is a directory, device, pipe or socket; pass the name"
    for write in (lambda: hfta.save(ONES, path), lambda: fit(path, never)):
        with pytest.raises(hfta.errors.CheckpointError, match=message):
            write()
    assert os.path.samestat(os.lstat(path), before) and sorted(os.listdir(tmp_path)) == there


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path):
    path = tmp_path / "state"
    path.symlink_to("there")
    for content in (ONES, ZEROS):
        hfta.save(content, path)
        assert path.is_symlink() and holds(tmp_path / "there", content)
        assert sorted(os.listdir(tmp_path)) == ["state", "there"]


def test_folders_may_be_links_and_paths_relative(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    hfta.save(ONES, tmp_path / "link" / "state")
    monkeypatch.chdir(tmp_path / "folder")
    hfta.save(ZEROS, "state")
    assert holds("state", ZEROS) and os.listdir() == ["state"]
    with pytest.raises(hfta.errors.CheckpointError, match="is a directory, device"):
        hfta.save(ZEROS, "")


def test_permissions_are_those_of_a_plain_file(tmp_path):
    before = os.umask(0o027)
    try:
        hfta.save(ONES, tmp_path / "state")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "state").st_mode == os.stat(tmp_path / "plain").st_mode


def test_what_killed_writers_left_is_removed(tmp_path):
    others = ["state.0123456789abcde.tmp", f"{STALE}.tmp", f"my-{STALE}", "state.tmp"]
    for name in [STALE, *others]:
        (tmp_path / name).touch()
    hfta.save(ONES, tmp_path / "state")
    # Another process may still be writing it.
    assert sorted(os.listdir(tmp_path)) == sorted([STALE, *others, "state"])
    os.utime(tmp_path / STALE, (0, 0))
    hfta.save(ONES, tmp_path / "state")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "state"])
    (tmp_path / STALE).touch()
    # Nobody else writes what a run holds.
    with atomic.holding(tmp_path / "state"):
        assert not (tmp_path / STALE).exists()


def training():
    step = hfta.make_train_step(
        torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), hfta.sgd(lr=[0.1, 0.2])
    )
    return step, step.init(*hfta.init_params(lambda: torch.nn.Linear(4, 1), SEEDS), seeds=SEEDS)


def never(state, batch):
    pytest.fail("a step was made")


def fit(path, step=None, loader=None, epochs=1):
    own, state = training()
    loader = [torch.ones(2, 3, 4)] if loader is None else loader
    return hfta.fit(step or own, state, loader, epochs=epochs, resume=path, progress=False)


@pytest.mark.parametrize("existing", [False, True])
def test_a_second_run_on_the_same_file_is_refused(tmp_path, existing):
    path = tmp_path / "run"
    if existing:
        fit(path)
    before = (path.read_bytes(), os.stat(path).st_mtime_ns) if existing else None
    step, _ = training()
    message = f"^{path} belongs to a run that has not ended; wait until.*$"

    def again(state, batch):
        for _ in range(2):
            with pytest.raises(hfta.errors.CheckpointError, match=message):
                fit(path, never)
        # Another file in the folder is free, and so is plain saving.
        fit(tmp_path / "other")
        assert ((path.read_bytes(), os.stat(path).st_mtime_ns) if path.exists() else None) == before
        return step(state, batch)

    state, _ = fit(path, again, epochs=1 + existing)
    assert hfta.load(path, like=state).step.tolist() == [1 + existing] * 2
    assert sorted(os.listdir(tmp_path)) == ["other", "run"]


def test_a_run_that_fails_lets_go_of_its_file(tmp_path):
    for error in (ZeroDivisionError, KeyboardInterrupt, hfta.errors.CheckpointError):

        def step(state, batch, error=error):
            raise error

        with pytest.raises(error):
            fit(tmp_path / "run", step)
        assert os.listdir(tmp_path) == []
    fit(tmp_path / "run")


HOLDING = """
import os, signal, sys, time
from hfta_func.files import atomic

with atomic.holding(sys.argv[1]):
    # A worker, such as a loader's, that outlives its parent.
    if os.fork():
        with atomic.replacing(sys.argv[1]) as file:
            file.write(b"half")
            file.flush()
            print("ready", flush=True)
            signal.pause()
    time.sleep(60)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_lets_go_of_its_file(tmp_path):
    path = tmp_path / "run"
    command = [sys.executable, "-c", HOLDING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            left = sorted(os.listdir(tmp_path))
            assert len(left) == 2 and left[1] == "run.hfta-lock"
            with pytest.raises(hfta.errors.CheckpointError, match="belongs to a run that has not ended"):
                fit(path, never)
            assert sorted(os.listdir(tmp_path)) == left
            process.kill()
            process.wait()
            assert sorted(os.listdir(tmp_path)) == left
            fit(path)
            assert os.listdir(tmp_path) == ["run"]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_lock_of_somebody_else_stays(tmp_path):
    lock = tmp_path / "run.hfta-lock"
    with atomic.holding(tmp_path / "run"):
        lock.unlink()
        lock.write_text("of another run")
    assert lock.exists()
    lock.unlink()


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="the file system of .*run has no locks; start no second run") as found:
        state, _ = fit(tmp_path / "run")
    assert found[0].filename == __file__
    assert hfta.load(tmp_path / "run", like=state).step.tolist() == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["run"]


@pytest.mark.parametrize(("name", "cause"), [("file/run", "Not a directory"), ("x" * 253, "File name too long")])
def test_files_that_cannot_be_written_are_refused_before_the_first_step(tmp_path, name, cause):
    (tmp_path / "file").touch()
    with pytest.raises(hfta.errors.CheckpointError, match=f"cannot be written: {cause}; its former content is unchang"):
        fit(tmp_path / name, never)
    assert os.listdir(tmp_path) == ["file"]


class Loader(list):
    """Batches, and a position of any kind."""

    def __init__(self, position):
        super().__init__([torch.ones(2, 3, 4)])
        self.position = position

    def state_dict(self):
        return self.position

    def load_state_dict(self, position):
        assert position == self.position


@pytest.mark.parametrize(
    ("position", "error", "message"),
    [
        ({0: 1}, TypeError, "metadata has the key 0; use strings"),
        ({"scale": float("inf")}, ValueError, "Out of range float"),
        ({"set": {1}}, TypeError, "a set cannot be saved; use numbers, strings, lists, dicts or tensors"),
    ],
)
def test_runs_that_cannot_be_saved_are_refused_before_the_first_step(tmp_path, position, error, message):
    with pytest.raises(error, match=message):
        fit(tmp_path / "run", never, Loader(position))
    assert os.listdir(tmp_path) == []
    for epochs in (1, 2):
        fit(tmp_path / "run", loader=Loader({"0": 1}), epochs=epochs)


def test_states_that_cannot_be_saved_are_refused_before_the_first_step(tmp_path):
    _, state = training()
    state = state._replace(buffers={"wide": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(hfta.errors.CheckpointError, match=r"is torch\.complex128, which safetensors does not support"):
        hfta.fit(never, state, [torch.ones(2, 3, 4)], epochs=1, resume=tmp_path / "run", progress=False)
    assert os.listdir(tmp_path) == []
