"""Settings of the C library's allocator, by a C library that only records them, and once by the real one."""

import platform
import subprocess
import sys

import pytest
import torch

import hfta_func as hfta
from hfta_func.step import allocator


class Library:
    def __init__(self):
        self.settings = {}

    def mallopt(self, name, value):
        self.settings[name] = value
        return 1


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(allocator, "_is_decided", False)
    return found


# From malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4


def test_large_blocks_are_kept_unless_told_otherwise(library):
    assert hfta.step.keep_memory(False) is False
    assert library.settings == {}
    assert hfta.step.keep_memory() is True
    assert library.settings == {TRIM_THRESHOLD: -1, MMAP_THRESHOLD: 2**30, MMAP_MAX: 0}


@pytest.mark.parametrize(
    ("platform", "libc"), [("darwin", ("", "")), ("linux", ("musl", "1.2")), ("win32", ("glibc", "2.36"))]
)
def test_other_systems_are_left_alone(library, monkeypatch, platform, libc):
    monkeypatch.setattr(allocator.sys, "platform", platform)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: libc)
    assert hfta.step.keep_memory() is False
    assert library.settings == {}


@pytest.mark.parametrize("opted_out", [False, True])
def test_the_first_state_sets_it_up_unless_told_otherwise(library, opted_out):
    if opted_out:
        hfta.step.keep_memory(False)
    library.settings.clear()
    step = hfta.make_train_step(torch.nn.Linear(2, 1), lambda model, x: model(x).mean(), hfta.sgd(lr=0.1))
    assert library.settings == {}
    step.init(*hfta.stack_params([torch.nn.Linear(2, 1)]), seeds=[0])
    assert bool(library.settings) is not opted_out
    library.settings.clear()
    step.init(*hfta.stack_params([torch.nn.Linear(2, 1)]), seeds=[0])
    assert library.settings == {}


REAL = """
import sys, torch, hfta_func as hfta

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

hfta.step.keep_memory(sys.argv[1] == "True")
block = torch.ones(50 << 20)
held = resident()
del block
print(held - resident() > 100 << 20)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("enabled", [False, True])
def test_where_a_freed_block_goes(enabled):
    command = [sys.executable, "-c", REAL, str(enabled)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(not enabled)
