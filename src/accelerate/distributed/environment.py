"""The rank, world size and address of this process, read from the environment by an ordered tuple of detectors.

The environment is an argument, so tests can pass a recorded one for every launcher. torch's own variables (RANK,
WORLD_SIZE, ...) come first, because their launcher may itself have been started by one of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from ..errors import WorldError

Environment = Mapping[str, str]

DEFAULT_PORT: Final = 29500
LOCALHOST: Final = "127.0.0.1"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

# Slurm numbers its special steps (batch script, interactive shell, extern) from the top of 32 bits.
_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
# Ports below Linux's range of ephemeral ports.
_JOB_PORTS: Final = range(12000, 32000)


@final
@dataclass(frozen=True)
class ProcessIdentity:
    """A process's rank, world size, local rank and local size, and the address of rank 0."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str  # where rank 0 listens
    port: int
    name: str  # the launcher that set the variables
    attempt: int = 0  # how often the launcher has restarted the job


def detect(environ: Environment) -> ProcessIdentity | None:
    """Return the identity that the environment describes; None for a process started alone.

    Raises:
        WorldError: variables are missing, malformed, or contradict each other; the text names them with their values.
    """
    for detector in DETECTORS:
        identity = detector(environ)
        if identity is not None:
            _check_against_plain_variables(identity, environ)
            return identity
    return _refuse_partial_identity(environ)


# -- the detectors -----------------------------------------------------------------------------------------


def _torch_variables(environ: Environment) -> ProcessIdentity | None:
    """Read the variables of torchrun, `accelerate launch`, Kubeflow's PyTorchJob, or those set by hand."""
    if not (_given(environ, "RANK") and _given(environ, "WORLD_SIZE")):
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank, local_size = _local_rank_and_size(environ, rank, size)
    return _checked_identity(
        environ,
        "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size},
    )


def _local_rank_and_size(environ: Environment, rank: int, size: int) -> tuple[int, int]:
    if _given(environ, "LOCAL_RANK"):
        local_rank = _number(environ, "LOCAL_RANK")
        if _given(environ, "LOCAL_WORLD_SIZE"):
            return local_rank, _number(environ, "LOCAL_WORLD_SIZE")
        return local_rank, size if local_rank == rank else local_rank + 1
    if "KUBERNETES_SERVICE_HOST" in environ:
        return 0, 1  # one process per pod; there, MASTER_ADDR may well be a loopback address
    if size == 1 or environ.get("MASTER_ADDR", LOCALHOST) in _LOOPBACK:
        return rank, size
    raise WorldError(
        f"{_shown(environ, 'RANK', 'WORLD_SIZE', 'MASTER_ADDR')}: a world of {size} over several hosts, but LOCAL_RANK "
        "isn't set, so this process can't know which device of its host is its own. Set LOCAL_RANK (0 for the first "
        "process of a host), or start the processes with torchrun or `accelerate launch`."
    )


def _lsf(environ: Environment) -> ProcessIdentity | None:
    """Read the variables of IBM LSF's jsrun; it sets Open MPI's variables too, so it comes before Open MPI."""
    if not (_given(environ, "LSB_JOBID") and _given(environ, "JSM_NAMESPACE_RANK")):
        return None
    hosts = environ.get("LSB_HOSTS", "").split()
    if len(set(hosts)) > 1 and hosts.count(hosts[0]) == 1:
        hosts = hosts[1:]  # the launch node takes one slot and runs no rank
    values = _numbers(environ, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK")
    local_size = max(1, values["JSM_NAMESPACE_SIZE"] // max(1, len(set(hosts))))
    values["JSM_NAMESPACE_LOCAL_SIZE"] = _number(environ, "JSM_NAMESPACE_LOCAL_SIZE", local_size)
    return _checked_identity(environ, "LSF", values, address=hosts[0] if hosts else None, job=environ["LSB_JOBID"])


def _open_mpi(environ: Environment, name: str = "Open MPI", prefix: str = "OMPI_COMM_WORLD_") -> ProcessIdentity | None:
    """Read the variables of Open MPI, or of another MPI with these names."""
    return _mpi(environ, name, *(prefix + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _mpich(environ: Environment) -> ProcessIdentity | None:
    """Read the variables of MPICH and Intel MPI (hydra).

    Return None if only Slurm, which supports the same protocol, gives the local rank.
    """
    if _given(environ, "PMI_RANK") and not _given(environ, "MPI_LOCALRANKID") and _given(environ, "SLURM_LOCALID"):
        return None
    return _mpi(environ, "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpi(environ: Environment, name: str, *names: str) -> ProcessIdentity | None:
    """Read the variables of these names: the rank, the size, the local rank and the local size."""
    rank, size, local_rank, _ = names
    if not (_given(environ, rank) or _given(environ, size)):
        return None
    if _number(environ, size) == 1 and not _given(environ, local_rank):
        return _checked_identity(environ, name, dict(zip(names, (0, 1, 0, 1), strict=True)))
    return _checked_identity(environ, name, _numbers(environ, *names))


def _slurm(environ: Environment) -> ProcessIdentity | None:
    """Read the variables of an srun task; return None in an allocation's shell and in the batch script."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not (_given(environ, "SLURM_PROCID") and is_task(environ)):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if _given(environ, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = _number(environ, size_name, 1)
    if size == 1 or "SLURM_PTY_PORT" in environ:
        return None
    counts = expand_task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "")))
    node = _number(environ, "SLURM_NODEID", 0)
    hosts = expand_host_list(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    local_size = counts[node] if node < len(counts) else local_rank + 1
    return _checked_identity(
        environ,
        "Slurm",
        {"SLURM_PROCID": rank, size_name: size, "SLURM_LOCALID": local_rank, "SLURM_STEP_TASKS_PER_NODE": local_size},
        address=hosts[0] if hosts else None,
        job=environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID")),
        step=int(step),
    )


#: First match wins.
DETECTORS: Final[tuple[Callable[[Environment], ProcessIdentity | None], ...]] = (
    _torch_variables,
    _lsf,
    _open_mpi,
    partial(_open_mpi, name="MVAPICH", prefix="MV2_COMM_WORLD_"),  # it may use MPICH's process manager
    _mpich,
    _slurm,
)


# -- Slurm's lists -----------------------------------------------------------------------------------------


def expand_host_list(text: str) -> list[str]:
    """Expand `gpu[01-03,7],login` to `["gpu01", "gpu02", "gpu03", "gpu7", "login"]`."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        hosts.extend(_expand_brackets(entry))
    return hosts


def _expand_brackets(entry: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", entry)
    if found is None:
        return [entry]
    names: list[str] = []
    for part in found[1].split(","):
        first, dash, last = part.partition("-")
        numbers = range(int(first), int(last) + 1) if dash else range(int(first), int(first) + 1)
        names += [entry[: found.start()] + f"{number:0{len(first)}d}" + entry[found.end() :] for number in numbers]
    return [expanded for name in names for expanded in _expand_brackets(name)]


def expand_task_counts(text: str) -> list[int]:
    """Expand `2(x3),1` to `[2, 2, 2, 1]`: the number of tasks of every node."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


# -- reading and checking variables ------------------------------------------------------------------------


def _given(environ: Environment, name: str) -> bool:
    return environ.get(name, "").strip() not in ("", "-1")  # old launchers write -1 for "not set"


def _number(environ: Environment, name: str, default: int | None = None) -> int:
    if not _given(environ, name):
        if default is not None:
            return default
        near = {
            key: value for key, value in environ.items() if _family(key) == _family(name) and _is_rank_variable(key)
        }
        raise WorldError(
            f"{name} isn't set, although {_shown(near, *sorted(near)) or 'its companions are'}. The launcher has to "
            f"set it; when the variables come from an older run, unset them."
        )
    text = environ[name].strip()
    if not text.isdigit():
        raise WorldError(f"{name}={text!r} has to be a whole number >= 0. Correct or unset it.")
    return int(text)


def _numbers(environ: Environment, *names: str) -> dict[str, int]:
    return {name: _number(environ, name) for name in names}


def _family(name: str) -> str:
    for prefix in ("OMPI", "MV2", "PMI", "MPI", "SLURM", "JSM"):
        if name.startswith(prefix + "_"):
            return "PMI" if prefix == "MPI" else prefix
    return ""


def _is_rank_variable(name: str) -> bool:
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or (
        bool(_family(name)) and name.endswith(("RANK", "SIZE", "RANKID", "NRANKS", "PROCID", "NTASKS", "LOCALID"))
    )


def _shown(environ: Environment, *names: str) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _checked_identity(
    environ: Environment,
    name: str,
    values: Mapping[str, int],
    *,
    address: str | None = None,
    job: str | None = None,
    step: int = 0,
) -> ProcessIdentity:
    """Make the identity; raise WorldError if its values contradict each other.

    Args:
        values: rank, size, local rank and local size, in this order, by the variables that say so.
    """
    rank, size, local_rank, local_size = values.items()
    for (rank_name, number), (count_name, count) in ((rank, size), (local_rank, local_size)):
        if number >= count:
            raise WorldError(
                f"{rank_name}={number} and {count_name}={count} contradict each other: ranks are counted from 0 to "
                f"{count_name} - 1. Correct the launcher's numbers; variables from an older run have to be unset."
            )
    if local_size[1] > size[1]:
        raise WorldError(
            f"{local_size[0]}={local_size[1]} and {size[0]}={size[1]} contradict each other: one host can't hold more "
            "processes than the world. Correct the launcher's numbers."
        )
    address = _address(environ, name, size[1], local_size[1], address)
    attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    numbers = (rank[1], size[1], local_rank[1], local_size[1])
    return ProcessIdentity(*numbers, address, _port(environ, job, step), name, attempt)


def _address(environ: Environment, name: str, size: int, local_size: int, known: str | None) -> str:
    given = environ.get("MASTER_ADDR", "").strip()
    if given:
        return given
    if known is not None:
        return known
    if local_size == size or name == "environment":
        return LOCALHOST
    raise WorldError(
        f"{name} started {size} processes over several hosts ({local_size} on this one), but MASTER_ADDR isn't set. "
        "Set it, for all of them, to the host of rank 0."
    )


def _port(environ: Environment, job: str | None, step: int) -> int:
    if _given(environ, "MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise WorldError(f"MASTER_PORT={port} is no port: choose one from 1 to 65535.")
        return port
    digits = re.sub(r"\D", "", job or "")
    if digits:
        return _JOB_PORTS[(int(digits) * 7 + step) % len(_JOB_PORTS)]
    return DEFAULT_PORT


def _check_against_plain_variables(identity: ProcessIdentity, environ: Environment) -> None:
    """Raise WorldError if RANK or WORLD_SIZE is set and contradicts another launcher's identity."""
    for name, value in (("RANK", identity.rank), ("WORLD_SIZE", identity.size)):
        if (
            identity.name not in ("torchrun", "environment")
            and _given(environ, name)
            and _number(environ, name) != value
        ):
            raise WorldError(
                f"{name}={environ[name]}, but {identity.name} says that it is {value} (rank {identity.rank} of "
                f"{identity.size}). Unset {name}, or start as many processes as it says."
            )


def _refuse_partial_identity(environ: Environment) -> None:
    """Raise WorldError if the environment sets only a part of an identity."""
    rank, size = _given(environ, "RANK"), _given(environ, "WORLD_SIZE")
    if size and not rank and _number(environ, "WORLD_SIZE") > 1:
        raise WorldError(
            f"{_shown(environ, 'WORLD_SIZE', 'LOCAL_RANK')}, but RANK isn't set: this process can't know which of the "
            f"{environ['WORLD_SIZE']} it is. Start it with torchrun or `accelerate launch`, or unset WORLD_SIZE."
        )
    if (
        not size
        and (rank or _given(environ, "LOCAL_RANK"))
        and (_number(environ, "RANK", 0) > 0 or _number(environ, "LOCAL_RANK", 0) > 0)
    ):
        raise WorldError(
            f"{_shown(environ, 'RANK', 'LOCAL_RANK')}, but WORLD_SIZE isn't set: this process can't know how many "
            "there are. Start it with torchrun or `accelerate launch`, or unset these variables."
        )


# -- the documented summary --------------------------------------------------------------------------------


@dataclass
class CPUInformation:
    """This process's rank and world size, global and local, under the documented name."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's rank and size from its environment; rank 0 of 1 if it was started alone."""
    from ..settings.env import snapshot

    identity = detect(snapshot())
    if identity is None:
        return CPUInformation()
    return CPUInformation(identity.rank, identity.size, identity.local_rank, identity.local_size)


def in_batch_script(environment: Mapping[str, str]) -> bool:
    """Return whether this process is the batch script or the shell of a Slurm allocation."""
    return "SLURM_JOB_ID" in environment and not is_task(environment)


def is_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of its tasks."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in environment and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
