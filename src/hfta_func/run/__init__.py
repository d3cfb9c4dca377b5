"""Many steps: data, the loop, its record, and how many models to train at once."""
