"""The CPU cores that this process may use, and the number of threads of one of N ranks on a host.

A core is a physical core (hyper-threads of a core share its arithmetic units). The process may use it if its affinity
(`taskset`, Slurm, a container's cpuset) and the CPU quota of its control group (a container's `--cpus`) allow it. A
limit that the system doesn't report is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
_CPUINFO: Final = Path("/proc/cpuinfo")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")

Core = tuple[str, str]  # (the socket, the core of it)


def usable_cpus(pid: int = 0) -> frozenset[int]:
    """Return the logical CPUs available to a process (0: this one); all CPUs of the host if unknown."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(range(os.cpu_count() or 1) if affinity is None else affinity(pid))


def num_cores(cpus: Collection[int] | None = None) -> int:
    """Return the number of physical cores of these logical CPUs (default: those of this process), at least 1.

    The CPU quota of this process's control group, rounded down, limits it.
    """
    cpus = usable_cpus() if cpus is None else cpus
    by_cpu: dict[int, Core] | None = None  # /proc/cpuinfo is long: read once, and only where /sys lacks it
    found: set[Core] = set()
    for cpu in cpus:
        core = _core_by_topology(cpu)
        if core is None:
            by_cpu = _cores_by_cpuinfo() if by_cpu is None else by_cpu
            core = by_cpu.get(cpu, ("", f"cpu{cpu}"))  # unknown: every CPU counts as a core
        found.add(core)
    quota = min(_quotas(), default=None)
    return max(1, len(found) if quota is None else min(len(found), int(quota)))


def threads_per_rank(num_ranks: int, num_cores: int) -> int:
    """Return the number of threads for each of ``num_ranks`` processes that share ``num_cores``, at least 1."""
    return max(1, num_cores // num_ranks)


def threads_of_this_rank(local_size: int) -> int:
    """Return the number of threads for this process, one of ``local_size`` ranks on this host, at least 1.

    The ranks share the cores of the process that started them. A launcher may have bound each rank to its part of them
    (``mpirun --bind-to``, ``srun``, ``numactl``); then the affinity is this rank's part, and isn't divided again. So a
    rank gets an even part of its parent's cores, but no more than it may use itself. A shell between the launcher and
    the rank has the rank's affinity; the rank then gets an even part of its own cores.
    """
    own = num_cores()
    return own if local_size <= 1 else min(own, threads_per_rank(local_size, num_cores(_parents_cpus())))


def _parents_cpus() -> frozenset[int]:
    """Return the CPUs of the parent process and of this one; only this one's if the parent's are unknown."""
    own = usable_cpus()
    try:
        return usable_cpus(os.getppid()) | own
    except OSError:  # the process has ended, or belongs to another user
        return own


def _core_by_topology(cpu: int) -> Core | None:
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        socket = (folder / "physical_package_id").read_text(encoding="ascii").strip()
        return socket, (folder / "core_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _cores_by_cpuinfo() -> dict[int, Core]:
    """Return the core of each logical CPU, without CPUs that have no ``core id`` (virtual machines, most of ARM)."""
    try:
        blocks = _CPUINFO.read_text(encoding="utf-8").strip().split("\n\n")
    except OSError:
        return {}
    cores: dict[int, Core] = {}
    for block in blocks:
        lines = (line.partition(":") for line in block.splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        if facts.get("processor", "").isdigit() and "core id" in facts:
            cores[int(facts["processor"])] = (facts.get("physical id", ""), facts["core id"])
    return cores


def _quotas() -> Iterator[float]:
    """Yield the number of CPUs that each control group of this process allows (files of version 1 or 2)."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _GROUPS / controllers if controllers else _GROUPS
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):  # every group around it limits it too
            quota = _quota_of(root / folder)
            if quota is not None:
                yield quota


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file; or `max`: no limit
        return None
