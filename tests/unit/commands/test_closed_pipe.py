"""A reader that closes the pipe, like ``accelerate ... | head -1``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from accelerate.commands.parser import command_parser, run_command


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["--version"]])
def test_a_closed_pipe_ends_a_command_without_a_word(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "accelerate.commands.main", *arguments]
    reader, writer = os.pipe()
    os.close(reader)  # before the command starts, which may print before this process runs again
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_pipe_that_is_closed_while_a_command_prints_is_no_error_of_its_own() -> None:
    def show(_: argparse.Namespace) -> None:
        raise BrokenPipeError

    parser = command_parser("monitor", "")
    parser.set_defaults(func=show)
    with pytest.raises(BrokenPipeError):  # which main() answers
        run_command(parser, [])
