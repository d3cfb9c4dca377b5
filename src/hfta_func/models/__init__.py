"""Ordinary modules to stacked trees of tensors and back, and to pure functions of them."""
