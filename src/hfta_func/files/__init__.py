"""States in files, and plain PyTorch models out of an array."""

from hfta_func.files.checkpoint import read_metadata as read_metadata
from hfta_func.files.storage import read_rows as read_rows
from hfta_func.files.storage import write_rows as write_rows
