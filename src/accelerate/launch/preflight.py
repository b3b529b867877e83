"""Checks before a run: contradictions that can be seen at once, and the program of ``--preflight``."""

from __future__ import annotations

import argparse
import functools
import platform
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ..cores import num_cores
from ..distributed.environment import is_task
from ..errors import SettingError, WorldError
from ..ports import DEFAULT_PORT, get_free_port, is_port_in_use
from ..settings import env
from ..settings.tree import ROWS
from ..wording import some_ranks
from .plan import Program

if TYPE_CHECKING:
    from ..distributed.world import World
    from ..settings.tree import Settings


# ------------------------------------------------------------------------- the host as plans see it


@final
@dataclass(frozen=True)
class Host:
    """One machine as a plan sees it: name, devices, cores, environment and ports."""

    name: str = "localhost"
    #: The device kind that training would use here, and how many of them there are; ``cpu`` counts as none.
    kind: str = "cpu"
    num_devices: int = 0
    #: The variable that limits which of the devices a process sees.
    visible_devices: str | None = None
    #: The devices have no direct links (P2P, InfiniBand), which NCCL then has to be told by variables.
    lacks_links: bool = False
    #: Cores that a process started here may use.
    num_cores: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Of the ports that the plan may choose, those that something listens on already.
    busy_ports: frozenset[int] = frozenset()
    #: A port that was free when this was read.
    free_port: int = 0

    def is_busy(self, port: int) -> bool:
        """Return whether something listens on the port."""
        return port in self.busy_ports


@functools.cache
def _devices() -> tuple[str, int, str | None, bool]:
    from ..devices.hardware import check_cuda_p2p_ib_support
    from ..devices.table import CPU, present

    kind, count = present()
    num_devices = 0 if kind is CPU else count
    lacks_links = num_devices > 1 and not check_cuda_p2p_ib_support()
    return kind.name, num_devices, kind.visible_devices or None, lacks_links


def this_host(environment: Mapping[str, str], *, cpu: bool, port: int | None) -> Host:
    """Return this machine as it is now; with ``cpu`` no devices are looked for."""
    kind, num_devices, visible_devices, lacks_links = ("cpu", 0, None, False) if cpu else _devices()
    wanted = DEFAULT_PORT if port is None else port
    busy = frozenset({wanted}) if wanted and is_port_in_use(wanted) else frozenset[int]()
    return Host(
        name=socket.gethostname(),
        kind=kind,
        num_devices=num_devices,
        visible_devices=visible_devices,
        lacks_links=lacks_links,
        num_cores=num_cores(),
        environment=environment,
        busy_ports=busy,
        free_port=get_free_port(),
    )


# ----------------------------------------------------------------------- checks before every launch


def program_of(settings: Settings) -> Program:
    """Return the program that ``--preflight`` runs in place of the script."""
    folder = settings.project.project_dir or "."
    return Program("accelerate.launch.preflight", ("--folder", str(folder)), "module")


def check_cheap(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise if the settings contradict the scheduler, the network or the installed packages; only cheap checks.

    Raises:
        SettingError: one line for each contradiction.
    """
    found = [*_against_slurm(settings, environment), *_unknown_address(settings), *_missing_engine(settings)]
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


def _missing_engine(settings: Settings) -> Iterable[str]:
    # Other launchers' processes, and other programs', may have an environment of their own.
    is_here = settings.cluster.launcher in (None, "local", "torchrun") and not settings.launch.no_python
    if not is_here:
        return
    for row in ROWS:
        missing = row.missing() if row.missing is not None and getattr(settings, row.name) is not None else ""
        if missing:
            yield f"{settings.quote(row.condition)}, but {missing}"


# ------------------------------ the program of ``accelerate launch --preflight``, run on every rank

_RENDEZVOUS_TIMEOUT_SECONDS: Final = 60
_CLOCK_SECONDS: Final = 1.0
_DISK_BYTES: Final = 2**30
_CONTRADICTION: Final = 3
_REPEATS: Final = 5


@final
@dataclass(frozen=True)
class Facts:
    """The properties of one rank: host, device, versions, clock and free disk space."""

    rank: int
    local_rank: int
    host: str
    device: str
    #: How many devices of that kind the host has; 0 for the CPU.
    num_devices: int
    python: str
    torch: str
    accelerate: str
    free_bytes: int
    #: Seconds ahead of rank 0's clock.
    clock: float = 0.0


def contradictions(found: Sequence[Facts]) -> list[str]:
    """Return the contradictions between the ranks' facts, one line each."""
    lines = [_differing(found, name) for name in ("torch", "accelerate", "python")]
    kinds = Counter(facts.device.partition(":")[0] for facts in found)
    if len(kinds) > 1:
        lines.append(f"Ranks have different kinds of device: {_ranks_by(found, lambda f: f.device.partition(':')[0])}.")
    for host, members in _by_host(found).items():
        most = max(facts.num_devices for facts in members)
        if most and len(members) > most:
            lines.append(f"Host {host} has {most} device(s) for {len(members)} ranks: start one rank a device.")
        if min(facts.free_bytes for facts in members) < _DISK_BYTES:
            free = min(facts.free_bytes for facts in members)
            lines.append(
                f"Host {host} has {free / 2**30:.2f} GiB free where checkpoints go: free some, or go elsewhere."
            )
    off = [facts for facts in found if abs(facts.clock) > _CLOCK_SECONDS]
    if off:
        shown = ", ".join(f"{facts.host} {facts.clock:+.1f} s" for facts in off)
        lines.append(f"Clocks differ from rank 0's: {shown}. Set them by NTP; logs and timeouts compare times.")
    return [line for line in lines if line]


def _differing(found: Sequence[Facts], name: str) -> str:
    if len({getattr(facts, name) for facts in found}) == 1:
        return ""
    return f"Versions of {name} differ: {_ranks_by(found, lambda facts: getattr(facts, name))}. Install the same."


def _ranks_by(found: Sequence[Facts], key: object) -> str:
    assert callable(key)
    groups: dict[str, list[int]] = {}
    for facts in found:
        groups.setdefault(str(key(facts)), []).append(facts.rank)
    return "; ".join(f"{value} on {some_ranks(ranks)}" for value, ranks in groups.items())


def _by_host(found: Sequence[Facts]) -> dict[str, list[Facts]]:
    hosts: dict[str, list[Facts]] = {}
    for facts in found:
        hosts.setdefault(facts.host, []).append(facts)
    return hosts


def table(found: Sequence[Facts]) -> str:
    """Format the facts as a table with one line per rank."""
    lines = ["rank  host              device    python   torch          accelerate  clock     free disk"]
    lines += [
        f"{facts.rank:>4}  {facts.host:<16.16}  {facts.device:<8}  {facts.python:<7}  {facts.torch:<13}  "
        f"{facts.accelerate:<10}  {facts.clock:>+7.3f} s {facts.free_bytes / 2**30:>7.1f} GiB"
        for facts in found
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the machines of all ranks, print the findings on rank 0 and return 0, or 3 for a contradiction."""
    parser = argparse.ArgumentParser(prog="accelerate launch --preflight", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--megabytes", type=int, default=16)
    args = parser.parse_args(argv)
    from ..distributed.world import join_world, leave_world

    started = time.monotonic()
    try:
        world = join_world(cpu=env.flag("ACCELERATE_USE_CPU"), timeout=timedelta(seconds=_RENDEZVOUS_TIMEOUT_SECONDS))
    except WorldError as error:
        print(f"accelerate launch --preflight: {error}", file=sys.stderr)
        return _CONTRADICTION
    met = time.monotonic() - started
    found = gather_facts(world, args.folder)
    speed = bandwidth(world, args.megabytes) if world.size > 1 else None
    wrong = contradictions(found)
    if world.is_main:
        print(table(found))
        print(f"rendezvous (world size {world.size}): {met:.1f} s" + (f"; {speed}" if speed else ""))
        print("\n".join([f"contradiction: {line}" for line in wrong] or ["no contradictions"]), flush=True)
    leave_world()
    return _CONTRADICTION if wrong else 0


def gather_facts(world: World, folder: Path) -> list[Facts]:
    """Gather the facts of all ranks, in rank order."""
    import torch

    from .. import __version__
    from ..devices.table import CPU, count_devices
    from ..distributed.collectives import gather_object

    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    own = Facts(
        rank=world.rank,
        local_rank=world.local_rank,
        host=socket.gethostname(),
        device=str(world.device),
        num_devices=0 if world.kind is CPU else count_devices(world.kind),
        python=platform.python_version(),
        torch=torch.__version__,
        accelerate=__version__,
        free_bytes=shutil.disk_usage(existing).free,
        clock=clock_ahead(world),
    )
    if world.size == 1:
        return [own]
    return [Facts(**facts) for facts in gather_object([asdict(own)], world=world)]


def clock_ahead(world: World) -> float:
    """Measure the seconds by which this host's clock is ahead of rank 0's, as exactly as a barrier allows."""
    if world.size == 1:
        return 0.0
    import torch

    from ..distributed.collectives import broadcast
    from ..distributed.process_control import wait_for_everyone

    differences: list[float] = []
    for _ in range(_REPEATS):
        wait_for_everyone(world)
        now = time.time_ns()
        first = broadcast(torch.tensor([now], dtype=torch.int64, device=world.device), world=world)
        differences.append((now - int(first.item())) / 1e9)
    return sorted(differences)[_REPEATS // 2]  # the median


def bandwidth(world: World, megabytes: int) -> str:
    """Measure an all-reduce of ``megabytes`` MiB and return its time and bus bandwidth as text."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(megabytes * 2**20 // 4, device=world.device)
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        world.kind.synchronize()
        before = time.perf_counter()
        dist.all_reduce(tensor)
        world.kind.synchronize()
        seconds.append(time.perf_counter() - before)
    took = sorted(seconds[1:])[_REPEATS // 2]  # the median; the first one opens the connections
    bus = megabytes * 2**20 / took * 2 * (world.size - 1) / world.size
    return f"all-reduce of {megabytes} MiB: {took * 1000:.1f} ms, {bus / 1e9:.2f} GB/s on the bus"


if __name__ == "__main__":
    sys.exit(main())
