"""Convolutions by hand, which benchmarks compare with, compute what PyTorch's do."""

import importlib
import pathlib

import pytest
import torch

from hfta_func._kernels import native


@pytest.fixture
def kernels(monkeypatch):
    """Those of the benchmarks, which are no installed package."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2])
    return importlib.import_module("benchmarks.convolution_kernels")


@pytest.mark.skipif(native.compiler() is None, reason="there is no compiler of C")
@pytest.mark.parametrize(("inputs", "outputs", "width"), [(8, 16, 8), (16, 8, 5), (3, 32, 16)])
def test_a_convolution_and_its_gradients(kernels, inputs, outputs, width):
    x = torch.randn(3, 2, 6, width, inputs)
    weight = torch.randn(3, 3, 3, inputs, outputs)
    grad = torch.randn(3, 2, 6, width, outputs)
    for member in range(3):
        plain = x[member].double().permute(0, 3, 1, 2).requires_grad_()
        filters = weight[member].double().permute(3, 2, 0, 1).requires_grad_()
        expected = torch.conv2d(plain, filters, padding=1)
        expected.backward(grad[member].double().permute(0, 3, 1, 2))
        wanted = expected.permute(0, 2, 3, 1), filters.grad.permute(2, 3, 1, 0)
        results = kernels.forward(x, weight)[member], kernels.weight_grad(x, grad)[member]
        if inputs % 8 == 0:
            wanted, results = (
                (*wanted, plain.grad.permute(0, 2, 3, 1)),
                (*results, kernels.input_grad(grad, weight)[member]),
            )
        for one, result in zip(wanted, results, strict=True):
            torch.testing.assert_close(result.double(), one.detach(), rtol=1e-5, atol=1e-4)


def test_the_kernel_in_triton_is_written_for_the_triton_that_is_installed(kernels):
    pytest.importorskip("triton")
    assert kernels.triton_kernel.arg_names[:3] == ["x", "weight", "y"]
