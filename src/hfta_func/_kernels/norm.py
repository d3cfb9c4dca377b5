"""The gradient of batch normalisation by one kernel, in half the memory that PyTorch's takes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hfta_func._kernels import native
from hfta_func._kernels.operators import define_operator

# Sixteen sums at a time, as a compiler must not reorder them by itself, and few values of each in single precision.
_HEAD = """
typedef float wide __attribute__((vector_size(64), aligned(4)));
static void channel(const float *x, const float *g, float w, float mean, float invstd, float *restrict dx, float *dw,
                    float *db, int64_t rows, int64_t stride, int64_t length)
{
    double sum = 0, dot = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < length; at += 1024) {
            const float *a = x + row * stride + at, *b = g + row * stride + at;
            const int64_t end = length - at < 1024 ? length - at : 1024;
            wide sums = {0}, dots = {0};
            int64_t i = 0;
            for (; i + 16 <= end; i += 16) {
                const wide value = *(const wide *)(b + i);
                sums += value;
                dots += value * (*(const wide *)(a + i) - mean);
            }
            for (; i < end; i++) {
                sum += b[i];
                dot += b[i] * (a[i] - mean);
            }
            for (int k = 0; k < 16; k++) {
                sum += sums[k];
                dot += dots[k];
            }
        }
    *db = sum;
    *dw = dot * invstd;
    const float count = rows * length, slope = dot * invstd * invstd / count, shift = sum / count, by = invstd * w;
    for (int64_t row = 0; row < rows; row++) {
        const float *a = x + row * stride, *b = g + row * stride;
        float *into = dx + row * stride;
        for (int64_t i = 0; i < length; i++)
            into[i] = (b[i] - (a[i] - mean) * slope - shift) * by;
    }
}
"""
_EACH = """for (int64_t c = low; c < high; c++)
                        channel(x + c * shape[2], g + c * shape[2], w ? w[c] : 1, mean[c], invstd[c], dx + c * shape[2], dw + c,
                                db + c, shape[0], shape[1] * shape[2], shape[2])"""
_ARGUMENTS = (
    "const float *g, const float *x, const float *w, const float *mean, const float *invstd, float *dx, float *dw, "
    "float *db, const int64_t *shape"
)


def batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor) -> Any:
    """Gradients of the input ``[N,C,...]``, the weights and the biases ``[C]``, from the statistics of the batch."""
    return torch.ops.hfta_func.batch_norm_backward(grad, x, weight, mean, invstd)


@functools.cache
def is_defined() -> bool:
    """Define the operator; False if the kernel cannot be compiled."""
    program = native.program(native.shared_out(_HEAD, _ARGUMENTS, _EACH, small=16))
    if program is None:
        return False

    def gradients(grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor) -> Any:
        outputs = fake(grad, x, weight, mean, invstd)
        rows, channels = x.shape[:2]
        shape = torch.tensor([rows, channels, x[0, 0].numel()])
        vectors = None if weight is None else weight.contiguous(), mean, invstd
        program([channels], 1, [grad.contiguous(), x.contiguous(), *vectors, *outputs, shape])
        return outputs

    def fake(grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor) -> Any:
        return x.new_empty(x.shape), torch.empty_like(mean), torch.empty_like(mean)

    schema = "batch_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd)"
    define_operator(f"{schema} -> (Tensor, Tensor, Tensor)", {"CPU": gradients}, fake=fake)
    return True
