"""A training script, before and after a move to arrays."""
