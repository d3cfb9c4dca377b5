"""The commonest jobs: each as an array, and beside it, in a file that ends in ``_loop``, as a loop in ordinary PyTorch."""
