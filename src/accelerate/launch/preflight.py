"""What is looked at before a run: contradictions that can be seen at once; the rest by ``--preflight``."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import SettingError
from .plan import Program
from .slurm import is_task

if TYPE_CHECKING:
    from ..settings.tree import Settings


def program_of(settings: Settings) -> Program:
    """The program that ``--preflight`` runs instead of the script."""
    folder = settings.project.project_dir or "."
    return Program("accelerate.launch.probe", ("--folder", str(folder)), "module")


def check_cheap(settings: Settings, environment: Mapping[str, str]) -> None:
    """Nothing that can be seen at once speaks against the run.

    Raises:
        SettingError: the settings contradict the scheduler or the network; one line for each contradiction.
    """
    found = [*_against_slurm(settings, environment), *_unknown_address(settings)]
    if found:
        raise SettingError("\n".join(found))


def _against_slurm(settings: Settings, environment: Mapping[str, str]) -> Iterable[str]:
    launch = settings.launch
    if launch.num_machines == 1 or not is_task(environment):
        return
    nodes, node = environment.get("SLURM_STEP_NUM_NODES", ""), environment.get("SLURM_NODEID", "")
    job = environment.get("SLURM_JOB_ID", "")
    if nodes.isdigit() and int(nodes) != launch.num_machines:
        yield (
            f"{settings.quote('launch.num_machines')}, but this step of job {job} runs on {nodes} node(s) "
            f"(SLURM_STEP_NUM_NODES={nodes}). Give the same number to both."
        )
    elif node.isdigit() and int(node) != launch.machine_rank:
        yield (
            f"{settings.quote('launch.machine_rank')}, but this is node {node} (SLURM_NODEID={node}). Was "
            "$SLURM_NODEID replaced by the shell that called srun? Put the command in single quotes: "
            "srun bash -c '...'."
        )


def _unknown_address(settings: Settings) -> Iterable[str]:
    launch = settings.launch
    if (
        launch.num_machines == 1
        or launch.main_process_ip is None
        or settings.cluster.launcher not in (None, "torchrun")
    ):
        return
    try:
        socket.getaddrinfo(launch.main_process_ip, launch.main_process_port)
    except socket.gaierror as error:
        yield (
            f"{settings.quote('launch.main_process_ip')} can't be resolved on {socket.gethostname()}: "
            f"{error.strerror}. "
            "Give an address, or a name that this machine knows."
        )
