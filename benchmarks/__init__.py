"""Ratios measured side by side in one run: ``python -m benchmarks [sweep|ops|optim|predict|lowerings|reach|report]``."""
