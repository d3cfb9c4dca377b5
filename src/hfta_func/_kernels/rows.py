"""The frame of a program that does the same to every element of all leaves, as the rule of an optimizer does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfta_func._kernels import native

_HEAD = """
#define T {type}
static void run_row(char **columns, int64_t leaves, int64_t start, int64_t length, const double *numbers, int64_t models,
                    int keep)
{{
{declarations}
    if (!keep) {{
        for (int64_t i = 0; i < length; i++) {{ {kept} }}
        return;
    }}
#pragma GCC ivdep
    for (int64_t i = 0; i < length; i++) {{
{body}
    }}
}}
"""
_ROW = """run_row(columns + leaf, leaves, model * sizes[leaf] + low, high - low, numbers + model, models,
                            !keep || keep[model])"""


def source(
    dtype: torch.dtype, columns: Sequence[str], num_numbers: int, body: Sequence[str], kept: Sequence[str]
) -> str:
    """The program, with arguments ``columns``, all leaves of one after the other, ``numbers`` and ``keep``.

    Element ``i`` of ``param`` is ``param_[i]``, and a member's numbers are ``number0``, ``number1`` and so on. ``body`` are
    statements for element ``i``, and ``kept`` those of a member that stays as it is.
    """
    declarations = [f"T *{name}_ = (T *)columns[{i} * leaves] + start;" for i, name in enumerate(columns)]
    declarations += [f"const T number{i} = (T)numbers[{i} * models];" for i in range(num_numbers)]
    head = _HEAD.format(
        type=native.TYPES[dtype],
        declarations="\n".join(f"    {line}" for line in declarations),
        body="\n".join(f"        {line}" for line in body),
        kept=" ".join(kept),
    )
    arguments = "char **columns, const double *numbers, const char *keep"
    return native.shared_out(head, arguments, _ROW)
