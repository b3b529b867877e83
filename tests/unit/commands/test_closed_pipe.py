"""A reader that closes the pipe, like ``accelerate ... | head -1``."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["--version"], ["completion", "bash"]])
def test_a_closed_pipe_ends_a_command_without_a_word(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "accelerate.commands.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
