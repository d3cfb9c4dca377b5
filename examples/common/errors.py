"""Why an example ends before it is done."""

from __future__ import annotations

import importlib
from typing import Any


class BadInput(Exception):
    """What the user gave is at fault; the message is one line and ends the program with status 2."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a run.

    Args:
        history: The metrics of the epochs that are finished.
    """

    def __init__(self, history: list[dict[str, Any]]):
        super().__init__()
        self.history = history


def is_out_of_memory(error: BaseException) -> bool:
    """The package's own, imported only when there is an error: plain PyTorch trains without the package."""
    return importlib.import_module("hfta_func").run.is_out_of_memory(error)


def optional(module: str, use: str) -> Any:
    """Import a module that only some examples use.

    Args:
        module: For example ``"sklearn.datasets"``.
        use: What it is for, in the plural, as the message names it.

    Raises:
        BadInput: if it, or something that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise BadInput(f"{use} need {package}, which is not installed; pip install 'hfta_func[examples]'") from None


def first_line(error: BaseException) -> str:
    """What a message begins with, or else the name of the error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
