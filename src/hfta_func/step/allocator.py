"""Keep large CPU blocks in the process instead of handing them back at every free.

Public: :func:`keep_memory`.

glibc returns blocks above 32 MB to the operating system when they are freed. A stacked tensor is M times as large as one
model's and so is often above that size, and then every step pays for faulting in its pages anew: on wide models that
costs more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4

_decided = False


def keep_memory(enabled: bool = True) -> bool:
    """Set up glibc's allocator for array training; the first ``step.init`` on a CPU does so unless this was called before.

    The process keeps its peak memory until it ends. ``keep_memory(False)`` keeps or restores glibc's defaults; call it
    before that to opt out.

    Returns:
        Whether the allocator was set up; always False where the C library is not glibc.

    References:
        mallopt(3).
    """
    global _decided
    _decided = True
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_MMAP_THRESHOLD: 1 << 30 if enabled else 128 << 10,
        _M_TRIM_THRESHOLD: -1 if enabled else 128 << 10,
        _M_MMAP_MAX: 0 if enabled else 65536,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()]) and enabled


def keep_memory_once() -> None:
    """What a step does when it makes its first state on a CPU."""
    if not _decided:
        keep_memory()
