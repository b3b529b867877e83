"""Options of runs on TPUs."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import OptionGroup, option


@dataclass
class TpuOptions(OptionGroup, title="TPU", key="", flag=""):
    """Which TPU, and how to reach its machines."""

    tpu_name: str | None = option(
        None, "The name of the TPU.", flag=None, question="What is the name of your cloud TPU?"
    )
    tpu_zone: str | None = option(None, "The zone of the TPU.", flag=None, question="What zone is your cloud TPU in?")
    tpu_use_cluster: bool = option(
        False,
        "Start on every machine of a TPU pod.",
        flag="--tpu_cluster",
        off_flag="--no_tpu_cluster",
        switch=True,
        question="Are you using a TPU cluster?",
    )
    tpu_use_sudo: bool = option(
        False,
        "Use sudo on the TPU's machines.",
        switch=True,
        question="Do you want to run the commands with sudo?",
    )
    tpu_vm: list[str] | None = option(
        None, "A machine of the pod (may be given several times).", flag="--vm", repeat=True
    )
    tpu_env: list[str] | None = option(
        None, "NAME=value for the pod's machines (may be given several times).", flag="--env", repeat=True
    )
    command_file: str | None = option(
        None,
        "A file of commands to run on the machines at start-up.",
        flag=None,
        question="What is the path to your script?",
    )
    commands: list[str] | None = option(
        None,
        "Commands to run on the machines at start-up.",
        flag=None,
        question="What command should be run?",
    )
    in_tpu_pod: bool = option(
        False,
        "This process runs on a machine of a TPU pod.",
        env="ACCELERATE_IN_TPU_POD",
        key=None,
        flag=None,
        quiet=True,
    )
