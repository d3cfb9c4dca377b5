"""Examples to run: ``python examples/digits.py``, ``python -m examples.resnet.main --help``."""
