"""Errors and warnings of the package.

Each error also derives from a built-in one, so that ``except ValueError`` and the like keep working.
"""


class HFTAError(Exception):
    """Base class of this package's own errors."""


class StackError(HFTAError, ValueError):
    """Models, trees or members that cannot form one array."""


class HyperparameterError(HFTAError, ValueError):
    """A hyperparameter or seed that is unknown, out of range or of the wrong length."""


class BatchError(HFTAError, ValueError):
    """A batch that does not fit the array."""


class LossError(HFTAError, ValueError):
    """A loss function whose result cannot be minimised per member."""


class StateError(HFTAError, ValueError):
    """A state that belongs to another model, optimizer or step."""


class NonFiniteError(HFTAError, FloatingPointError):
    """A member whose loss or gradient is NaN or infinite, under ``nonfinite="raise"``."""


class CheckpointError(HFTAError, OSError):
    """A file that is not a complete checkpoint, or cannot be written."""


class RandomnessError(HFTAError, RuntimeError):
    """A random call that cannot draw from the member's own key."""


class TraceError(HFTAError, RuntimeError):
    """Model code that reads the value of a tensor while all members run together."""


class VerifyError(HFTAError, RuntimeError):
    """An array that computes something else than its members alone."""


class WorkerError(HFTAError, RuntimeError):
    """A process that trains a part of an array and cannot go on."""


class CompileWarning(UserWarning):
    """A step that cannot be compiled in the background and goes on eagerly; given once."""


class LoopWarning(UserWarning):
    """Members that run apart: at an operator without a batching rule, or where they branch differently; given once each."""


class VersionWarning(UserWarning):
    """A release of PyTorch newer than those that this package is tested with; given once, at import."""
