"""The cores that this process may use, and the threads of one of N ranks on a host.

A core is a physical one (hyper-threads of a core share its arithmetic units) that the process is allowed on: by its
affinity (`taskset`, Slurm, a container's cpuset) and by the CPU quota of its control group (a container's `--cpus`).
Where a system doesn't tell one of these, it doesn't limit.
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
    if affinity is None:
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(affinity(pid))


def num_cores(cpus: Collection[int] | None = None) -> int:
    """Return the number of physical cores behind these logical CPUs (default: those of this process), at least 1.

    No more than the CPU quota of this process's control group pays for, rounded down.
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
    quota = _quota()
    return max(1, len(found) if quota is None else min(len(found), int(quota)))


def threads_per_rank(num_ranks: int, num_cores: int) -> int:
    """Return how many threads each of ``num_ranks`` processes that share ``num_cores`` computes with, at least 1."""
    return max(1, num_cores // num_ranks)


def threads_of_this_rank(local_size: int) -> int:
    """Return the number of threads for this process, one of ``local_size`` ranks on this host, at least 1.

    The ranks share the cores of what started them. A launcher may have bound each rank to its part of those
    (``mpirun --bind-to``, ``srun``, ``numactl``): the affinity is this rank's share then, and isn't divided again.
    Both follow from the parent's affinity: an even share of the parent's cores, and no more than this process may use.
    A shell between the launcher and the rank is bound like the rank, which then takes an even share of its own cores.
    """
    own = num_cores()
    return own if local_size <= 1 else min(own, threads_per_rank(local_size, num_cores(_parents_cpus())))


def _parents_cpus() -> frozenset[int]:
    """Return the CPUs of the parent process and this one; only this one's if the parent's are unknown."""
    own = usable_cpus()
    try:
        return usable_cpus(os.getppid()) | own
    except OSError:  # it has ended, or belongs to somebody else
        return own


def _core_by_topology(cpu: int) -> Core | None:
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        socket = (folder / "physical_package_id").read_text(encoding="ascii").strip()
        return socket, (folder / "core_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _cores_by_cpuinfo() -> dict[int, Core]:
    """Map each logical CPU to its core; leave out those without ``core id`` (virtual machines, most of ARM)."""
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


def _quota() -> float | None:
    """Return how many CPUs' worth of time this process's control groups allow it; None without a limit."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    """Yield the limit of each control group around this process, in either version of the control groups' files."""
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
