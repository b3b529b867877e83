"""Checks that a function runs in several processes, as from a notebook, and that its errors arrive."""

from __future__ import annotations

from accelerate.launchers import notebook_launcher
from accelerate.state import PartialState
from accelerate.test_utils.testing import assert_exception

NUM_PROCESSES = 2


def basic_function() -> None:
    """Every process knows its place."""
    state = PartialState()
    assert state.num_processes == NUM_PROCESSES, state.num_processes
    print(f"process {state.process_index} of {state.num_processes}")


def failing_function() -> None:
    """Every process fails."""
    raise RuntimeError("a failure on purpose")


def test_can_initialize() -> None:
    """A function runs in two processes."""
    notebook_launcher(basic_function, (), num_processes=NUM_PROCESSES)


def test_errors_arrive() -> None:
    """The error of a process is the error of the call."""
    with assert_exception(Exception, "a failure on purpose"):
        notebook_launcher(failing_function, (), num_processes=NUM_PROCESSES)


def main() -> None:
    """Every check has passed."""
    test_can_initialize()
    test_errors_arrive()


if __name__ == "__main__":
    main()
