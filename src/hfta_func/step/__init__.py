"""One step of an array: training and evaluation."""
