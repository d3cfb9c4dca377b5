"""Examples to run: ``python examples/digits.py``, ``python examples/resnet/main.py --help``."""
