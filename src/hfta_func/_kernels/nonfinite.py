"""One kernel that finds the members whose tensors hold a value that is NaN or infinite."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hfta_func._kernels import native

# NaN and infinity have all bits of the exponent set. Four streams of values are read faster than one.
_HEAD = """
#define EXPONENT ((T){1}u)
typedef uint{0}_t T;
static int has_failed(const T *x, int64_t length)
{{
    const int64_t part = length / 4;
    const T *a = x, *b = x + part, *c = b + part, *d = c + part;
    T most = 0;
    for (int64_t i = 0; i < part; i++) {{
        const T p = a[i] & EXPONENT, q = b[i] & EXPONENT, r = c[i] & EXPONENT, s = d[i] & EXPONENT;
        const T pq = p > q ? p : q, rs = r > s ? r : s, most_of_four = pq > rs ? pq : rs;
        most = most_of_four > most ? most_of_four : most;
    }}
    for (int64_t i = 4 * part; i < length; i++) {{
        const T exponent = x[i] & EXPONENT;
        most = exponent > most ? exponent : most;
    }}
    return most == EXPONENT;
}}
"""
# What the first leaf holds counts more, in whatever order threads come.
_LEAF = """if (has_failed((const T *)values[leaf] + model * sizes[leaf] + low, high - low)) {
                    if (leaf)
                        __sync_bool_compare_and_swap(failed + model, 0, 2);
                    else
                        __atomic_store_n(failed + model, 1, __ATOMIC_RELAXED);
                }"""
_MASKS = {torch.float64: 0x7FF << 52, torch.float32: 0xFF << 23, torch.bfloat16: 0xFF << 7, torch.float16: 0x1F << 10}


@functools.cache
def program(dtype: torch.dtype) -> Any:
    """``run(sizes, models, [leaves, failed])`` marks in ``failed``, ``int64[M]`` of zeros, members with such a value.

    By 1 if it is in the first leaf, else by 2. None where there is no program for the dtype.
    """
    if dtype not in _MASKS:
        return None
    head = _HEAD.format(8 * dtype.itemsize, _MASKS[dtype])
    return native.program(native.shared_out(head, "const char **values, int64_t *failed", _LEAF))
