"""Settings of a process that results and compiled graphs depend on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hfta_func.rules._extend import adopt, outside_rules


def _precision() -> str:
    with warnings.catch_warnings():
        # PyTorch 2.9 warns when it is read.
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision()


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (outside_rules, adopt),
)
"""The functions that read and that set each of them."""


def settle(wanted: Mapping[str, Any]) -> None:
    """Take over the :func:`settings` of another process."""
    for get, put in SETTINGS:
        # Graphs remember whether a precision was ever set.
        if get.__name__ in wanted and get() != wanted[get.__name__]:
            put(wanted[get.__name__])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """A block in which PyTorch computes with this number of threads, at least one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settings() -> dict[str, Any]:
    """The settings of this process by name, without its number of threads."""
    return {get.__name__: get() for get, _ in SETTINGS[1:]}
