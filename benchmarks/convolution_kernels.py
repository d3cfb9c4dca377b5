"""A convolution in groups by hand, to compare with: 3x3, stride 1, of all models at once, in C and for a GPU in Triton.

Channels of a pixel are next to each other, ``[M, N, H, W, C]``, and filters are ``[M, 3, 3, C, O]``: a vector holds channels,
and no layout is converted. Loops are over constants, so that each shape is compiled for itself.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.util import find_spec

from torch import Tensor, nn

from hfta_func._kernels import native

# A tile of P pixels and of vectors of channels stays in registers.
_SOURCE = """
#pragma GCC optimize("fp-contract=fast")
#include <stdint.h>
enum {{ N = {n}, C = {c}, O = {o}, H = {h}, W = {w}, L = O % 16 ? 8 : 16, V = O % 32 ? 1 : 2, P = {pixels}, Q = {inputs} }};
typedef float vector __attribute__((vector_size(4 * L), aligned(4), may_alias));

void forward(const float *x, const float *weight, float *y, int64_t models)
{{
    for (int64_t row = 0; row < models * N * H; row++) {{
        const float *w = weight + row / (N * H) * 9 * C * O;
        const float *top = x + (row / H * (H + 2) + row % H) * (W + 2) * C;
        for (int64_t at = 0; at < W; at += P)
            for (int64_t o = 0; o < O; o += L * V) {{
                vector sums[P][V] = {{0}};
                for (int64_t i = 0; i < 3; i++)
                    for (int64_t j = 0; j < 3; j++)
                        for (int64_t c = 0; c < C; c++) {{
                            const float *from = top + (i * (W + 2) + at + j) * C + c;
                            const vector *by = (const vector *)(w + ((i * 3 + j) * C + c) * O + o);
#pragma GCC unroll 16
                            for (int64_t p = 0; p < P; p++)
#pragma GCC unroll 2
                                for (int64_t v = 0; v < V; v++)
                                    sums[p][v] += from[p * C] * by[v];
                        }}
                for (int64_t p = 0; p < P; p++)
                    for (int64_t v = 0; v < V; v++)
                        *(vector *)(y + (row * W + at + p) * O + o + v * L) = sums[p][v];
            }}
    }}
}}

void weight_grad(const float *x, const float *grad, float *out, int64_t models)
{{
    for (int64_t m = 0; m < models; m++)
        for (int64_t ij = 0; ij < 9; ij++)
            for (int64_t c = 0; c < C; c += Q)
                for (int64_t o = 0; o < O; o += L * V) {{
                    vector sums[Q][V] = {{0}};
                    for (int64_t row = m * N * H; row < (m + 1) * N * H; row++) {{
                        const float *from = x + ((row / H * (H + 2) + row % H + ij / 3) * (W + 2) + ij % 3) * C + c;
                        for (int64_t at = 0; at < W; at++) {{
                            const vector *by = (const vector *)(grad + (row * W + at) * O + o);
#pragma GCC unroll 16
                            for (int64_t q = 0; q < Q; q++)
#pragma GCC unroll 2
                                for (int64_t v = 0; v < V; v++)
                                    sums[q][v] += from[at * C + q] * by[v];
                        }}
                    }}
                    for (int64_t q = 0; q < Q; q++)
                        for (int64_t v = 0; v < V; v++)
                            *(vector *)(out + ((m * 9 + ij) * C + c + q) * O + o + v * L) = sums[q][v];
                }}
}}
"""


@functools.cache
def _library(samples: int, height: int, width: int, inputs: int, outputs: int) -> ctypes.CDLL | None:
    tiles = {"pixels": 8 if width % 8 == 0 else 1, "inputs": 8 if inputs % 8 == 0 else 1}
    return native.load(_SOURCE.format(n=samples, c=inputs, o=outputs, h=height, w=width, **tiles))


def _run(name: str, x: Tensor, other: Tensor, out: Tensor, outputs: int) -> Tensor:
    models, samples, height, width, inputs = x.shape
    library = _library(samples, height - 2, width - 2, inputs, outputs)
    if library is None:
        raise RuntimeError("there is no compiler of C")
    pointers = [ctypes.c_void_p(leaf.data_ptr()) for leaf in (x, other, out)]
    getattr(library, name)(*pointers, ctypes.c_int64(models))
    return out


def _padded(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 1, 1, 1, 1))


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """``[M, N, H, W, C], [M, 3, 3, C, O] -> [M, N, H, W, O]``, channels a multiple of 8, in float32."""
    outputs = weight.shape[-1]
    return _run("forward", _padded(x), weight.contiguous(), x.new_empty(*x.shape[:-1], outputs), outputs)


def input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """``[M, N, H, W, O], [M, 3, 3, C, O] -> [M, N, H, W, C]``."""
    return forward(grad, weight.flip(1, 2).transpose(-1, -2))


def weight_grad(x: Tensor, grad: Tensor) -> Tensor:
    """``[M, N, H, W, C], [M, N, H, W, O] -> [M, 3, 3, C, O]``."""
    outputs = grad.shape[-1]
    return _run("weight_grad", _padded(x), grad, x.new_empty(len(x), 3, 3, x.shape[-1], outputs), outputs)


if find_spec("triton"):
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def triton_kernel(x, weight, y, N, H, W, C: tl.constexpr, O: tl.constexpr, PIXELS: tl.constexpr):  # noqa: E741
        """A block of the pixels of all samples of a model, for all outputs: nine products of pixels and channels."""
        model = tl.program_id(0)
        at = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
        row, column = at // W % H, at % W
        inputs, outputs = tl.arange(0, C), tl.arange(0, O)
        sums = tl.zeros((PIXELS, O), dtype=tl.float32)
        for tap in tl.static_range(9):
            i, j = tap // 3 - 1, tap % 3 - 1
            inside = (at < N * H * W) & (row + i >= 0) & (row + i < H) & (column + j >= 0) & (column + j < W)
            places = (model * N * H * W + at + i * W + j)[:, None] * C + inputs[None, :]
            pixels = tl.load(x + places, mask=inside[:, None], other=0.0)
            filters = tl.load(weight + ((model * 9 + tap) * C + inputs[:, None]) * O + outputs[None, :])
            sums += tl.dot(pixels, filters, input_precision="ieee")
        places = (model * N * H * W + at)[:, None] * O + outputs[None, :]
        tl.store(y + places, sums, mask=(at < N * H * W)[:, None])


def triton_forward(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`forward`, on a GPU; channels are powers of 2 from 16, and all of them fit into a block.

    Raises:
        NameError: without Triton.
    """
    models, samples, height, width, inputs = x.shape
    pixels, outputs = 64, weight.shape[-1]
    y = x.new_empty(*x.shape[:-1], outputs)
    grid = models, -(-samples * height * width // pixels)
    triton_kernel[grid](x, weight, y, samples, height, width, inputs, outputs, pixels)  # pyright: ignore[reportIndexIssue]
    return y
