from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from accelerate.commands.main import commands, main
from accelerate.guests.completion.command import SHELLS, script
from accelerate.settings.tree import launch_options_of


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
        (["accelerate", "launch", "--nproc"], ["--nproc_per_node"]),
        (["accelerate", "test", "--mixed_precision", "b"], ["bf16"]),
        (["accelerate", "migrate", "--ver"], ["--verify"]),
        (["accelerate", "estimate-memory", "--mixed-precision", "b"], ["bf16"]),
        (["accelerate", "launch", "train"], []),
    ],
)
def test_bash_completes_commands_options_and_values(words: list[str], expected: list[str]) -> None:
    assert complete(*words) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("accelerate la", ["launch"]),
        ("accelerate launch --num_pro", ["--num_processes"]),
        ("accelerate launch --mixed_precision b", ["bf16"]),
        ("accelerate launch --mixed_precision ", ["bf16", "fp16", "fp8", "no"]),
        ("accelerate config ", ["default", "show", "update"]),
        ("accelerate launch --nproc", ["--nproc_per_node"]),
        ("accelerate migrate --ver", ["--verify"]),
        ("accelerate monitor run --theme ", ["dark", "light"]),
    ],
)
def test_fish_completes_commands_options_and_values(line: str, expected: list[str]) -> None:
    program = script("fish") + f"complete -C {shlex.quote(line)}\n"
    run = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert sorted(row.partition("\t")[0] for row in run.stdout.splitlines()) == expected


def test_the_script_of_fish_names_every_flag_once_and_closes_its_quotes() -> None:
    lines = [line for line in script("fish").splitlines() if not line.startswith("#")]
    flags = [(line.split('"')[1], line.split(" -l ")[1].split()[0]) for line in lines if " -l " in line]
    launched = {("__fish_seen_subcommand_from launch test", str(option.flag)[2:]) for option in launch_options_of()}
    assert launched < set(flags) and len(set(flags)) == len(flags)
    assert {names.split()[1] for names, _ in flags} == set(commands()) - {"test"}
    for line in lines:
        unescaped = line.replace("\\\\", "").replace("\\'", "")
        assert unescaped.count("'") % 2 == 0, line


def test_there_is_a_script_for_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert ("complete -c accelerate" if shell == "fish" else "_accelerate") in capsys.readouterr().out
