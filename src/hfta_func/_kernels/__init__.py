"""Kernels in C."""
