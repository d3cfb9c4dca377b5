"""Keep large CPU blocks in the process instead of returning them to the system at every free.

glibc returns blocks above 32 MB to the operating system when they are freed. A stacked tensor is M times as large as one
model's, so it often exceeds that size, and then every step pays for page faults: on wide models more than for arithmetic.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX of glibc's malloc.h: nothing is trimmed, or mapped by itself.
_SETTINGS = {-1: -1, -3: 1 << 30, -4: 0}

_is_decided = False
"""Whether :func:`keep_memory` was called."""


def keep_memory(enabled: bool = True) -> bool:
    """Set up glibc's allocator for array training; the first ``step.init`` on a CPU does so unless this was called before.

    The process then keeps its peak memory until it ends. To opt out, call ``keep_memory(False)`` first, which leaves the
    allocator as it is.

    Returns:
        Whether the allocator was set up; always False where the C library is not glibc.

    References:
        mallopt(3).
    """
    global _is_decided
    _is_decided = True
    if not (enabled and sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"):
        return False
    return all([ctypes.CDLL(None).mallopt(name, value) == 1 for name, value in _SETTINGS.items()])


def keep_memory_once() -> None:
    """Set up the allocator unless :func:`keep_memory` was called before."""
    if not _is_decided:
        keep_memory()
