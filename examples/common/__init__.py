"""What the examples share: command line, data, and the two ways to train, as an array and one model by itself."""
