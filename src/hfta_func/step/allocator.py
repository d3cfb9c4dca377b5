"""Keep large CPU blocks in the process instead of returning them to the system at every free.

glibc returns blocks above 32 MB to the operating system when they are freed. A stacked tensor is M times as large as one
model's, so it often exceeds that size, and then every step pays for page faults: on wide models more than for arithmetic.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE = 32 << 20
"""Up to where glibc raises its threshold by itself; it gives back what is free at the end of the heap above twice of it."""

_kept: bool | None = None
"""What was last asked for, if anything was."""


def keep_memory(enabled: bool = True) -> bool:
    """Set up glibc's allocator for array training; the first ``step.init`` on a CPU does so unless this was called before.

    The process then keeps its peak memory until it ends. To opt out, call ``keep_memory(False)`` first, which leaves the
    allocator as it is. Called later, it has blocks above 32 MB given back again.

    Returns:
        Whether the allocator was set up; always False where the C library is not glibc.

    References:
        mallopt(3).
    """
    global _kept
    before, _kept = _kept, enabled
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    if not (enabled or before):
        # Left alone, thresholds grow with the blocks that a process frees; setting one, even to its default, ends that.
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_MMAP_THRESHOLD: 1 << 30 if enabled else _LARGE,
        _M_TRIM_THRESHOLD: -1 if enabled else 2 * _LARGE,
        _M_MMAP_MAX: 0 if enabled else 65536,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()]) and enabled


def keep_memory_once() -> None:
    """Set up the allocator unless :func:`keep_memory` was called before."""
    if _kept is None:
        keep_memory()
