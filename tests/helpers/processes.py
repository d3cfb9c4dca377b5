"""Programs of Python, and Ray, in processes of their own that find what the tests are made of, wherever those run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


def environment(**own: str) -> dict[str, str]:
    """That of a process which finds what this one imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **own}


def output(code: str, *arguments: Any, **own: str) -> str:
    """What a program prints that ends well, with variables of its own in the environment."""
    order = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(order, env=environment(**own), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def program(code: str, *arguments: Any, **options: Any) -> Iterator[Any]:
    """A program that runs on one thread, and whose output is read meanwhile."""
    order, env = [sys.executable, "-c", code, *map(str, arguments)], environment(OMP_NUM_THREADS="1")
    with subprocess.Popen(order, env=env, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        except BaseException:
            # One that hangs would not end by itself.
            process.kill()
            raise


@contextlib.contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Ray on this machine alone."""
    ray = pytest.importorskip("ray", reason="needs Ray; pip install 'hfta_func[cluster]'")
    from hfta_func.cluster import ray_actors

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        with ray_actors._on_this_machine(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False, **options)
        try:
            yield
        finally:
            ray.shutdown()
