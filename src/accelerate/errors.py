"""The exceptions of this package, as one tree.

Each is also the built-in exception that callers of the documented interface already catch, so that
``except ValueError`` around a constructor keeps working::

    AccelerateError
    ├── SettingError          (ValueError)           a value that was asked for can't be honoured
    │   ├── ConfigFileNotFound (FileNotFoundError)   the configuration file isn't there
    │   ├── InputEnded                               the answers ended before the questions
    │   └── PortInUse         (ConnectionError)      something listens on the port already
    ├── PreparationError      (ValueError)           objects that can't be prepared together
    ├── MissingDependency     (ImportError)          an optional package is absent or too old
    ├── NotBuilt              (NotImplementedError)  a documented feature that this version doesn't have
    ├── WorldError            (RuntimeError)         the processes can't form, or no longer form, one world
    ├── CollectiveError       (RuntimeError)         ranks disagree about a collective operation
    │   └── UnequalTensors                           the same operation, with tensors of different shapes
    ├── MemoryExhausted       (RuntimeError)         memory ran out, and smaller parts don't help
    ├── RunStopped            (RuntimeError)         all ranks agreed to end the run
    ├── ReplicaError          (RuntimeError)         ranks that should hold the same parameters don't
    ├── HardwareError         (RuntimeError)         a rank computes or remembers wrong
    ├── CannotQuantize        (RuntimeError)         a model can't be quantized as asked
    ├── Refused               (ValueError)           a script can't be migrated
    ├── VerificationError     (RuntimeError)         a script couldn't be run for a comparison
    ├── LaunchError           (RuntimeError)         processes couldn't be started, or died
    │   ├── ProcessFailed     (CalledProcessError)   the only process of a launch failed
    │   └── ProgramFailed                            the program failed under another engine
    └── CheckpointError       (RuntimeError)         a checkpoint can't be written, read or trusted
        ├── CheckpointNotFound (FileNotFoundError, ValueError)
        ├── CheckpointMismatch (ValueError)          names or shapes differ from the model's
        ├── EncodingError     (TypeError)            a value has no exact form without pickle
        └── SizeError         (ValueError)           a size that is no size of a file
"""

from __future__ import annotations


class AccelerateError(Exception):
    """The base of every error that this package raises on purpose."""


class SettingError(AccelerateError, ValueError):
    """A requested value can't be honoured; the text says where it came from and how to correct it."""


class PreparationError(AccelerateError, ValueError):
    """The objects given to ``prepare`` can't be prepared together."""


class MissingDependency(AccelerateError, ImportError):
    """An optional package is absent or too old."""


class NotBuilt(AccelerateError, NotImplementedError):
    """A documented feature that this version doesn't have yet; refused by name, never ignored."""


class WorldError(AccelerateError, RuntimeError):
    """The processes can't form one world, or no longer form one."""


class CollectiveError(AccelerateError, RuntimeError):
    """Ranks disagree about a collective operation."""


class UnequalTensors(CollectiveError):
    """Ranks are in the same operation with different tensors; raised on every rank."""


class MemoryExhausted(AccelerateError, RuntimeError):
    """Memory ran out, and smaller parts don't help."""


class RunStopped(AccelerateError, RuntimeError):
    """All ranks have agreed to end the run, because of its loss or because a rank asked for it."""


class ReplicaError(AccelerateError, RuntimeError):
    """Ranks that should hold the same parameters and optimizer states don't; the text names tensor and rank."""


class HardwareError(AccelerateError, RuntimeError):
    """A rank computes or remembers wrong; raised on every rank, and the text names rank, tensor and update."""


class LaunchError(AccelerateError, RuntimeError):
    """Processes couldn't be started, or died."""


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint can't be written, read or trusted."""


class CheckpointNotFound(CheckpointError, FileNotFoundError, ValueError):
    """No checkpoint lies where one was looked for."""


#: The documented name of :class:`CollectiveError`.
DistributedOperationException = CollectiveError


class ReplicaWarning(UserWarning):
    """Ranks that should hold the same parameters and optimizer states don't; the text names tensor and rank."""


class HardwareWarning(UserWarning):
    """A rank computes or remembers wrong, or what it computes can't be compared; the text names the tensor."""


class ResumeWarning(UserWarning):
    """A saved position couldn't be continued exactly; the text says why."""
