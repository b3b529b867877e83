"""Helpers of the engines that reach other machines: processes per machine, hostfiles, forwarded variables, secrets."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ..errors import MissingDependency, SettingError
from .engine import device_ids, is_cpu_run
from .local import OneProcess

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .plan import LaunchPlan, Program
    from .preflight import Host

#: Variables of the launching shell that a process on another machine needs as well.
_FORWARDED: Final = (
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|LANG|TMPDIR|"
    r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|TORCH|TORCHINDUCTOR|NCCL|GLOO|TP_SOCKET|UCX|FI|OMP|KMP|MKL|"
    r"CUDA|HF|TRANSFORMERS|TOKENIZERS|PYTHON|WANDB|MLFLOW|PYTORCH)_\w+"
)
_SECRET: Final = r"(?i)TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE"


@final
class Secret:
    """A value in a plan that is never shown."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def looks_secret(name: str) -> bool:
    """Return whether a variable of this name usually holds a secret, which must not be copied to other machines."""
    return re.search(_SECRET, name) is not None and not name.startswith("TOKENIZERS_")


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launching shell that processes on other machines get too, never a secret."""
    return {
        name: value
        for name, value in environment.items()
        if re.fullmatch(_FORWARDED, name) and not looks_secret(name) and "\n" not in value
    }


def spread(settings: Settings, host: Host, num_machines: int, *, devices: int | None = None) -> tuple[int, int]:
    """Return (processes in all, processes per machine), one per device unless a number was given.

    ``devices`` is the number of each machine where that is known; else this host's stands for all.

    Raises:
        SettingError: the number can't be spread evenly.
    """
    total = settings.launch.num_processes
    # A launch of one machine defaults to 1 process where no number was given, which isn't the default of several.
    if total is None or not settings.was_given("launch.num_processes"):
        known = len(device_ids(settings)) or (host.num_devices if devices is None else devices)
        return (num_machines * max(1, known), max(1, known)) if not is_cpu_run(settings) else (num_machines, 1)
    if total % num_machines:
        raise SettingError(
            f"num_processes={total} ({settings.source_of('launch.num_processes')}) is the total over all machines, and "
            f"can't be spread evenly over {num_machines} of them. Give a multiple of {num_machines}."
        )
    return total, total // num_machines


def named_file(path: str, option: str, settings: Settings) -> Path:
    """Return the path of the existing file named by an option."""
    found = Path(path).expanduser()
    if not found.is_file():
        raise SettingError(
            f"{settings.quote(option)}: there is no such file (looked for it from {Path.cwd()}). "
            "Give the path of one that exists."
        )
    return found


def hosts_of(text: str) -> list[str]:
    """Return the hosts that a hostfile of any MPI or of DeepSpeed lists, each once, in order."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(fields[0].partition(":")[0] for fields in lines if fields))


def job_name(program: Program) -> str:
    """Return the program's name in letters, digits and hyphens, as schedulers and DNS accept it."""
    stem = Path(program.target).stem if program.kind == "script" else program.target.rpartition(".")[2]
    name = re.sub(r"[^a-z0-9]+", "-", Path(stem).name.lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"job-{name}".strip("-")


def write_files(plan: LaunchPlan) -> None:
    """Write the files of the plan."""
    for name, text in plan.files.items():
        path = plan.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run_command(plan: LaunchPlan, needs: str) -> int:
    """Run the plan's command, pass signals on to it and return its exit code.

    Raises:
        MissingDependency: the command isn't on the PATH; ``needs`` says what brings it.
    """
    if shutil.which(plan.argv[0]) is None:
        raise MissingDependency(f"This launch needs the command {plan.argv[0]} on the PATH: {needs}.")
    return OneProcess().run(plan)
