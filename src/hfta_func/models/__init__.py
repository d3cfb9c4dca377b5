"""Conversions between ordinary modules, stacked trees of tensors, and pure functions of these."""
