"""Checks that a function runs in several processes, as from a notebook, and its errors arrive."""

from __future__ import annotations

from accelerate.launchers import notebook_launcher
from accelerate.state import PartialState
from accelerate.test_utils.testing import assert_exception

NUM_PROCESSES = 2


def basic_function() -> None:
    """Check that every process has its rank."""
    state = PartialState()
    assert state.num_processes == NUM_PROCESSES, state.num_processes
    print(f"process {state.process_index} of {state.num_processes}")


def failing_function() -> None:
    """Raise in every process."""
    raise RuntimeError("a failure on purpose")


def test_can_initialize() -> None:
    """Check that a function runs in two processes."""
    notebook_launcher(basic_function, (), num_processes=NUM_PROCESSES)


def test_errors_arrive() -> None:
    """Check that the error of a process is raised by the call."""
    with assert_exception(Exception, "a failure on purpose"):
        notebook_launcher(failing_function, (), num_processes=NUM_PROCESSES)


def main() -> None:
    """Run all checks."""
    test_can_initialize()
    test_errors_arrive()


if __name__ == "__main__":
    main()
