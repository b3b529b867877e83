"""The program of ``accelerate launch --preflight``, run on every rank: who is where, with which device, versions, clock
and disk; whether all meet; how fast they talk.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from ..errors import WorldError

if TYPE_CHECKING:
    from ..world import World

_MEETING_SECONDS: Final = 60
_CLOCK_SECONDS: Final = 1.0
_DISK_BYTES: Final = 2**30
_CONTRADICTION: Final = 3
_REPEATS: Final = 5


# --------------------------------------------------------------------------------------- what a rank tells


@final
@dataclass(frozen=True)
class Facts:
    """What one rank knows of itself."""

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
    """What can't be right, one line each."""
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
    return "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in groups.items())


def _by_host(found: Sequence[Facts]) -> dict[str, list[Facts]]:
    hosts: dict[str, list[Facts]] = {}
    for facts in found:
        hosts.setdefault(facts.host, []).append(facts)
    return hosts


def table(found: Sequence[Facts]) -> str:
    """One line a rank."""
    lines = ["rank  host              device    python   torch          accelerate  clock     free disk"]
    lines += [
        f"{facts.rank:>4}  {facts.host:<16.16}  {facts.device:<8}  {facts.python:<7}  {facts.torch:<13}  "
        f"{facts.accelerate:<10}  {facts.clock:>+7.3f} s {facts.free_bytes / 2**30:>7.1f} GiB"
        for facts in found
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- in each rank


def main(words: Sequence[str] | None = None) -> int:
    """0 when nothing contradicts anything, 3 otherwise; rank 0 has printed what was found."""
    parser = argparse.ArgumentParser(prog="accelerate launch --preflight", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--megabytes", type=int, default=16)
    args = parser.parse_args(words)
    from ..settings import env
    from ..world import join_world, leave_world

    started = time.monotonic()
    try:
        world = join_world(cpu=env.flag("ACCELERATE_USE_CPU"), timeout=timedelta(seconds=_MEETING_SECONDS))
    except WorldError as error:
        print(f"accelerate launch --preflight: {error}", file=sys.stderr)
        return _CONTRADICTION
    met = time.monotonic() - started
    found = gather_facts(world, args.folder)
    speed = bandwidth(world, args.megabytes) if world.size > 1 else None
    wrong = contradictions(found)
    if world.is_main:
        print(table(found))
        print(f"all {world.size} rank(s) met after {met:.1f} s" + (f"; {speed}" if speed else ""))
        print("\n".join([f"contradiction: {line}" for line in wrong] or ["nothing contradicts anything"]), flush=True)
    leave_world()
    return _CONTRADICTION if wrong else 0


def gather_facts(world: World, folder: Path) -> list[Facts]:
    """What every rank told, in rank order."""
    import torch

    from .. import __version__
    from ..collectives import gather_object
    from ..devices import CPU, count_devices

    place = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    own = Facts(
        rank=world.rank,
        local_rank=world.local_rank,
        host=socket.gethostname(),
        device=str(world.device),
        num_devices=0 if world.kind is CPU else count_devices(world.kind),
        python=platform.python_version(),
        torch=torch.__version__,
        accelerate=__version__,
        free_bytes=shutil.disk_usage(place).free,
        clock=clock_ahead(world),
    )
    if world.size == 1:
        return [own]
    return [Facts(**facts) for facts in gather_object([asdict(own)], world=world)]


def clock_ahead(world: World) -> float:
    """Seconds by which this host's clock is ahead of rank 0's, as exactly as a barrier is."""
    if world.size == 1:
        return 0.0
    import torch

    from ..collectives import broadcast
    from ..processes import wait_for_everyone

    differences: list[float] = []
    for _ in range(_REPEATS):
        wait_for_everyone(world)
        now = time.time_ns()
        first = broadcast(torch.tensor([now], dtype=torch.int64, device=world.device), world=world)
        differences.append((now - int(first.item())) / 1e9)
    return statistics.median(differences)


def bandwidth(world: World, megabytes: int) -> str:
    """The speed of an all-reduce, in words."""
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
    took = statistics.median(seconds[1:])  # the first one opens the connections
    bus = megabytes * 2**20 / took * 2 * (world.size - 1) / world.size
    return f"all-reduce of {megabytes} MiB: {took * 1000:.1f} ms, {bus / 1e9:.2f} GB/s on the bus"


if __name__ == "__main__":
    sys.exit(main())
