"""Errors that name the member, the path and the cure.

Each class also derives from the built-in error that a reader would expect, so
that ordinary ``except ValueError`` code keeps working.
"""


class HFTAError(Exception):
    """Base class of every error that this package raises on purpose."""


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
    """A member whose loss or gradient is NaN or infinite, where that is not to be tolerated."""


class CheckpointError(HFTAError, OSError):
    """A file that is not a whole checkpoint, or could not be written."""


class RandomnessError(HFTAError, RuntimeError):
    """A random operator that is not drawn from the member's own key."""


class TraceError(HFTAError, RuntimeError):
    """Model code that needs the value of a tensor while the members run as one."""
