"""The exceptions of this package, as one tree.

Each is also the built-in exception that callers of the documented interface catch, so that ``except ValueError``
around a constructor keeps working::

    AccelerateError
    ├── SettingError          (ValueError)           a requested value can't be used
    │   ├── ConfigFileNotFound (FileNotFoundError)   the configuration file doesn't exist
    │   ├── InputEnded                               the input ended before the last question
    │   └── PortInUse         (ConnectionError)      a program already listens on the port
    ├── ArgumentError         (TypeError)            an argument is unknown, or isn't of the documented kind
    ├── PreparationError      (ValueError)           objects can't be prepared together
    ├── MissingDependency     (ImportError)          an optional package is missing or too old
    ├── NotBuilt              (NotImplementedError)  a documented feature isn't implemented
    ├── WorldError            (RuntimeError)         the processes can't form, or no longer form, one world
    ├── CollectiveError       (RuntimeError)         ranks disagree about a collective operation
    │   └── UnequalTensors                           the same operation, with tensors of different shapes
    ├── MemoryExhausted       (RuntimeError)         memory ran out, and smaller parts don't help
    ├── RunStopped            (RuntimeError)         all ranks agreed to end the run
    ├── ReplicaError          (RuntimeError)         replicas of the same parameters differ between ranks
    ├── HardwareError         (RuntimeError)         a rank computes or stores wrong values
    ├── CannotQuantize        (RuntimeError)         a model can't be quantized as asked
    ├── Refused               (ValueError)           a script can't be migrated
    │   └── Unaccelerated                            a script doesn't use the Accelerator
    ├── VerificationError     (RuntimeError)         a script couldn't be run for a comparison
    │   └── LayoutRefused                            a script's model can't be prepared in a layout
    ├── RerunError            (RuntimeError)         a recorded run can't be started again
    ├── LaunchError           (RuntimeError)         processes couldn't be started, or died
    │   ├── ProcessFailed     (CalledProcessError)   the only process of a launch failed
    │   └── ProgramFailed                            the program failed under another engine
    └── CheckpointError       (RuntimeError)         a checkpoint can't be written, read or trusted
        ├── CheckpointNotFound (FileNotFoundError, ValueError)
        ├── CheckpointMismatch (ValueError)          names or shapes differ from the model's
        ├── EncodingError     (TypeError)            a value has no exact form without pickle
        └── SizeError         (ValueError)           an invalid size of a file
"""

from __future__ import annotations


class AccelerateError(Exception):
    """The base class of every error that this package raises deliberately."""


class SettingError(AccelerateError, ValueError):
    """A requested value can't be used; the message names its source and the correction."""


class ArgumentError(AccelerateError, TypeError):
    """The error for an unknown argument, or for one of another type than is documented."""


class PreparationError(AccelerateError, ValueError):
    """The error for objects that can't be prepared together."""


class MissingDependency(AccelerateError, ImportError):
    """The error for an optional package that is missing or too old."""


class NotBuilt(AccelerateError, NotImplementedError):
    """The error for a documented feature that this version doesn't implement yet."""


class WorldError(AccelerateError, RuntimeError):
    """The error raised if the processes can't form one world, or no longer form one."""


class CollectiveError(AccelerateError, RuntimeError):
    """The error raised if ranks disagree about a collective operation."""


class UnequalTensors(CollectiveError):
    """The error for tensors that differ between ranks in the same operation; raised on every rank."""


class MemoryExhausted(AccelerateError, RuntimeError):
    """The error raised if memory runs out and smaller parts don't help."""


class RunStopped(AccelerateError, RuntimeError):
    """The error with which all ranks end a run, because of its loss or because a rank requested it."""


class ReplicaError(AccelerateError, RuntimeError):
    """The error for replicas that differ between ranks; the message names the tensor and the rank."""


class HardwareError(AccelerateError, RuntimeError):
    """The error for a rank with wrong values; raised on every rank, it names the rank, the tensor and the update."""


class LaunchError(AccelerateError, RuntimeError):
    """The error for processes that couldn't be started, or died."""


class CheckpointError(AccelerateError, RuntimeError):
    """The error for a checkpoint that can't be written, read or trusted."""

    #: Whether every rank raises it, with the reasons of all.
    is_on_all_ranks: bool = False


class CheckpointNotFound(CheckpointError, FileNotFoundError, ValueError):
    """The error for a checkpoint that doesn't exist."""


#: The documented name of :class:`CollectiveError`.
DistributedOperationException = CollectiveError


class ReplicaWarning(UserWarning):
    """The warning about replicas that differ between ranks; the message names the tensor and the rank."""


class HardwareWarning(UserWarning):
    """The warning about a rank with wrong values, or about a computation that can't be compared."""


class ResumeWarning(UserWarning):
    """The warning about a saved position that can't be continued exactly; the message says why."""
