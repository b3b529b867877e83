from __future__ import annotations

import shutil
import subprocess

import pytest

from accelerate.commands.completion import SHELLS, main, script


def complete(*words: str) -> list[str]:
    """What bash offers for the last of the words."""
    program = script("bash") + (
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _accelerate; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    run = subprocess.run(["bash", "-c", program, "bash", *words], capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["accelerate", "la"], ["launch"]),
        (["accelerate", "launch", "--num_pro"], ["--num_processes"]),
        (["accelerate", "launch", "--mixed_precision", "b"], ["bf16"]),
        (["accelerate", "launch", "--mixed-precision", ""], ["no", "fp16", "bf16", "fp8"]),
        (["accelerate", "config", ""], ["default", "update", "show"]),
        (["accelerate", "launch", "train"], []),
    ],
)
def test_bash_completes_commands_options_and_values(words: list[str], expected: list[str]) -> None:
    assert complete(*words) == expected


def test_there_is_a_script_for_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main([shell]) == 0
        assert "_accelerate" in capsys.readouterr().out
