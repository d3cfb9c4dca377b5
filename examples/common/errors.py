"""Input that an example cannot work with."""

import torch

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")


class BadInput(Exception):
    """What the user gave is at fault; the message is one line and ends the program with status 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left, in the words of CUDA, the CPU's allocator or XLA."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)
