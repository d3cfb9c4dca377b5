"""One kernel that finds where a clock skips, in one pass over the times."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hfta_func._kernels import native

# Blocks without a break, which are most, are left without a branch for each step.
_SOURCE = """
#include <stdint.h>
int64_t breaks(const double *times, int64_t steps, double low, double high, int64_t *out)
{
    int64_t count = 0;
    for (int64_t begin = 0; begin < steps; begin += 1024) {
        const int64_t end = begin + 1024 < steps ? begin + 1024 : steps;
        int64_t wrong = 0, far = 0;
        for (int64_t i = begin; i < end; i++) {
            const double step = times[i + 1] - times[i];
            wrong |= !(step > low);
            far |= step > high;
        }
        if (wrong)
            return -1;
        for (int64_t i = begin; far && i < end; i++)
            if (times[i + 1] - times[i] > high)
                out[count++] = i + 1;
    }
    return count;
}
"""


def breaks(times: Tensor, low: float, high: float) -> Tensor | None:
    """The times ``float64[n]`` more than ``high`` later than those before, by number; None if one isn't later by ``low``."""
    library = native.load(_SOURCE) if times.device.type == "cpu" else None
    if library is None:
        steps = times.diff()
        return (steps > high).nonzero().flatten() + 1 if bool((steps > low).all()) else None
    times, out = times.contiguous(), torch.empty(len(times), dtype=torch.int64)
    library.breaks.restype = ctypes.c_int64
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (times, out)]
    limits = ctypes.c_double(low), ctypes.c_double(high)
    count = library.breaks(pointers[0], ctypes.c_int64(len(times) - 1), *limits, pointers[1])
    return None if count < 0 else out[:count].clone()
