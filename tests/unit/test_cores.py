"""How many cores this process may use, and how many are for one of N ranks, on hosts that are made of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate import cores

PARENT = 4242
Bind = Callable[..., None]


@pytest.fixture(autouse=True)
def bare_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host that tells nothing but the affinity, until a test writes its files."""
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(cores, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "own_groups")
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "groups")
    return tmp_path


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Bind:
    """Where this process may run, and the one that started it."""

    def set_affinity(own: range | set[int], parents: range | set[int] | None = None) -> None:
        masks = {0: set(own), PARENT: set(own if parents is None else parents)}
        monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__, raising=False)
        monkeypatch.setattr(os, "getppid", lambda: PARENT)

    return set_affinity


def two_threads_per_core(host: Path, num_sockets: int, cores_per_socket: int) -> None:
    """/sys of a host whose second hyper-threads come after all the first ones."""
    num_cores = num_sockets * cores_per_socket
    for cpu in range(2 * num_cores):
        folder = host / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        core = cpu % num_cores
        (folder / "physical_package_id").write_text(f"{core // cores_per_socket}\n")
        (folder / "core_id").write_text(f"{core % cores_per_socket}\n")


def group(host: Path, line: str, **files: str) -> None:
    """This process is in the control group of ``line``; ``folder__file=content`` are the limits."""
    (host / "own_groups").write_text(line + "\n")
    for name, content in files.items():
        path = host / "groups" / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def test_two_hyper_threads_of_a_core_count_once(bare_host: Path, bind: Bind) -> None:
    two_threads_per_core(bare_host, 2, 4)
    bind(range(16))
    assert cores.num_cores() == 8
    bind({0, 8})  # both threads of one core
    assert cores.num_cores() == 1
    bind({0, 4, 8})  # core 0 of both sockets
    assert cores.num_cores() == 2


def test_without_sys_the_cores_are_told_by_cpuinfo(bare_host: Path, bind: Bind) -> None:
    told = (f"processor\t: {cpu}\nphysical id\t: 0\ncore id\t\t: {cpu % 4}\nflags\t: a b" for cpu in range(8))
    (bare_host / "cpuinfo").write_text("\n\n".join(told) + "\n\n")
    bind(range(8))
    assert cores.num_cores() == 4
    bind({1, 5, 2})
    assert cores.num_cores() == 2


def test_where_cores_are_not_told_every_cpu_counts(bare_host: Path, bind: Bind) -> None:
    bind({3, 5, 7})
    assert cores.num_cores() == 3
    (bare_host / "cpuinfo").write_text("processor\t: 3\nBogoMIPS\t: 50.0\n\nprocessor\t: 5\nBogoMIPS\t: 50.0\n")
    assert cores.num_cores() == 3


def test_a_system_without_affinities_is_asked_for_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores.num_cores() == 6
    assert cores.threads_of_this_rank(2) == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.num_cores() == 1


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", {"cpu_max": "250000 100000"}),
        ("0::/a/b", {"a__b__cpu_max": "max 100000", "a__cpu_max": "200000 100000"}),
        ("0::/seen/from/the/host", {"cpu_max": "200000 100000"}),  # inside a container its group is the root
        ("4:cpu,foo:/j", {"cpu,foo__j__cpu_cfs_quota_us": "200000", "cpu,foo__j__cpu_cfs_period_us": "100000"}),
    ],
)
def test_the_quota_of_a_control_group_limits(bare_host: Path, bind: Bind, line: str, files: dict[str, str]) -> None:
    bind(range(8))
    group(bare_host, line, **files)
    assert cores.num_cores() == 2
    assert cores.threads_of_this_rank(2) == 1


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", {"cpu_max": "max 100000"}),
        ("0::/", {"cpu_max": "nonsense"}),
        ("0::/", {}),
        ("3:cpu:/", {"cpu__cpu_cfs_quota_us": "-1", "cpu__cpu_cfs_period_us": "100000"}),
        ("3:memory:/", {"memory__cpu_cfs_quota_us": "100000", "memory__cpu_cfs_period_us": "100000"}),
    ],
)
def test_a_group_without_a_quota_does_not_limit(bare_host: Path, bind: Bind, line: str, files: dict[str, str]) -> None:
    bind(range(8))
    group(bare_host, line, **files)
    assert cores.num_cores() == 8


def test_less_than_one_core_is_one(bare_host: Path, bind: Bind) -> None:
    bind(range(8))
    group(bare_host, "0::/", cpu_max="50000 100000")
    assert cores.num_cores() == 1
    assert cores.threads_per_rank(16, 8) == 1


@pytest.mark.parametrize(
    ("own", "parents", "local_size", "threads"),
    [
        (range(8), range(8), 1, 8),
        (range(8), range(8), 2, 4),  # nobody has bound anything
        (range(8), range(8), 3, 2),
        (range(4), range(4), 2, 2),  # the whole run is bound, by taskset or Slurm
        (range(2), range(8), 4, 2),  # mpirun --bind-to core:2, srun --cpus-per-task 2
        ({5}, range(8), 2, 1),  # mpirun --bind-to core leaves cores idle
        (range(4), range(8), 4, 2),  # mpirun --bind-to socket: two ranks share each
        (range(8), range(2), 2, 4),  # what started it has a smaller mask of its own
    ],
)
def test_a_rank_takes_its_even_share_and_no_more_than_it_is_bound_to(
    bind: Bind, own: range | set[int], parents: range, local_size: int, threads: int
) -> None:
    bind(own, parents)
    assert cores.threads_of_this_rank(local_size) == threads


def test_a_parent_that_has_ended_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(pid: int) -> set[int]:
        if pid:
            raise ProcessLookupError(pid)
        return {0, 1, 2, 3}

    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    assert cores.threads_of_this_rank(2) == 2
