"""States in files, and plain PyTorch models out of an array and into one."""
