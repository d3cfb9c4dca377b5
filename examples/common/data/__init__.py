"""Data of the examples: embedded, generated, or read from the original archives."""

import importlib.util

if importlib.util.find_spec("numpy") is None:
    # PyTorch does not depend on it.
    raise SystemExit("the examples need numpy, which is not installed; pip install 'hfta_func[examples]'")
