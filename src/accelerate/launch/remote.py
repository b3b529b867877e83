"""What engines that reach other machines have in common: how many processes each gets, and which variables
travel.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ..errors import MissingDependency, SettingError
from .engine import device_ids, is_cpu_run
from .simple import OneProcess

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .host import Host
    from .plan import LaunchPlan, Program

#: Variables of the launching shell that a process on another machine needs as well.
_TRAVELLING: Final = (
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|LANG|TMPDIR|"
    r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|TORCH|TORCHINDUCTOR|NCCL|GLOO|TP_SOCKET|UCX|FI|OMP|KMP|MKL|"
    r"CUDA|HF|TRANSFORMERS|TOKENIZERS|PYTHON|WANDB|MLFLOW|PYTORCH)_\w+"
)
_SECRET: Final = r"(?i)TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE"


@final
class Secret:
    """A value that a plan carries but never shows."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def looks_secret(name: str) -> bool:
    """Whether a variable of this name usually holds something that must not be copied around."""
    return re.search(_SECRET, name) is not None and not name.startswith("TOKENIZERS_")


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the launching shell that processes on other machines get too; never a secret."""
    return {
        name: value
        for name, value in environment.items()
        if re.fullmatch(_TRAVELLING, name) and not looks_secret(name) and "\n" not in value
    }


def spread(settings: Settings, host: Host, num_machines: int, *, devices: int | None = None) -> tuple[int, int]:
    """(processes in all, processes of each machine), one a device unless a number was asked for.

    ``devices`` is the number of each machine where that is known; else this host's stands for all.

    Raises:
        SettingError: the number can't be spread evenly.
    """
    total = settings.launch.num_processes
    # A launch of one machine settles on 1 process where nobody gave a number; that says nothing about several.
    if total is None or not settings.was_given("launch.num_processes"):
        known = len(device_ids(settings)) or (host.num_devices if devices is None else devices)
        return (num_machines * max(1, known), max(1, known)) if not is_cpu_run(settings) else (num_machines, 1)
    if total % num_machines:
        raise SettingError(
            f"num_processes={total} ({settings.source_of('launch.num_processes')}) is the total over all "
            "machines, "
            f"and can't be spread evenly over {num_machines} of them. Give a multiple of {num_machines}."
        )
    return total, total // num_machines


def named_file(path: str, option: str, settings: Settings) -> Path:
    """The file that an option names, which exists."""
    found = Path(path).expanduser()
    if not found.is_file():
        raise SettingError(
            f"{settings.quote(option)}: there is no such file (looked for it from {Path.cwd()}). "
            "Give the path of one that exists."
        )
    return found


def hosts_of(text: str) -> list[str]:
    """The hosts that a hostfile lists, each once, in order; the formats of all MPIs and of DeepSpeed are
    read.
    """
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))


def job_name(program: Program) -> str:
    """The program's name in letters, digits and hyphens, as schedulers and DNS accept it."""
    stem = Path(program.target).stem if program.kind == "script" else program.target.rpartition(".")[2]
    name = re.sub(r"[^a-z0-9]+", "-", Path(stem).name.lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"job-{name}".strip("-")


def write_files(plan: LaunchPlan) -> None:
    """The files of the plan are there."""
    for name, text in plan.files.items():
        path = plan.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run_command(plan: LaunchPlan, needs: str) -> int:
    """The exit code of the plan's command; signals reach it.

    Raises:
        MissingDependency: the command isn't on the PATH; ``needs`` says what brings it.
    """
    if shutil.which(plan.argv[0]) is None:
        raise MissingDependency(f"This launch needs the command {plan.argv[0]} on the PATH: {needs}.")
    return OneProcess().run(plan)
