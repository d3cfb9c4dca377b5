"""Training code of other packages, run as an array."""
