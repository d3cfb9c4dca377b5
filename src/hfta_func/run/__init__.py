"""Training runs: data, the loop, its history, and the number of models to train at once."""
