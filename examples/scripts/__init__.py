"""Training scripts of usual kinds, before and after a move to arrays."""
