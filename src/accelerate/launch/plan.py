"""The plan of a launch as a value, which can be printed, compared and tested without starting anything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag
from pathlib import Path
from typing import Final, Literal, final

from ..errors import SettingError


class Stream(Flag):
    """The outputs of a process: none, one or both."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


#: By the numbers of ``--tee``. Not ``Stream(9)``: some Pythons (3.11.0 to 3.11.2) take any number for a flag.
_STREAMS: Final[Mapping[str, Stream]] = {"0": Stream.NONE, "1": Stream.OUT, "2": Stream.ERR, "3": Stream.BOTH}


@final
@dataclass(frozen=True)
class Program:
    """The user's program: a script, a module (``-m``) or any command (``--no_python``), and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "command"] = "script"

    def argv(self, python: str | None = None) -> tuple[str, ...]:
        """Return the command line that runs the program; its arguments are passed on unchanged, never quoted again."""
        interpreter = python or sys.executable
        if self.kind == "command":
            return (self.target, *self.arguments)
        if self.kind == "module":
            return (interpreter, "-m", self.target, *self.arguments)
        return (interpreter, self.target, *self.arguments)


@final
@dataclass(frozen=True)
class Logs:
    """The destinations of the ranks' outputs besides the terminal."""

    #: One folder a rank is made here: ``<directory>/<rank>/stdout.log`` and ``stderr.log``.
    directory: Path | None = None
    #: Outputs shown with a ``[role rank]:`` prefix, by local rank; the key None stands for every other rank.
    tee: Mapping[int | None, Stream] = field(default_factory=dict)
    role: str = "default"

    def teed(self, local_rank: int) -> Stream:
        """Return which outputs of this rank carry a prefix."""
        return self.tee.get(local_rank, self.tee.get(None, Stream.NONE))

    def file(self, rank: int, name: str) -> Path | None:
        """Return the log file of one rank, or None without ``--log_dir``."""
        return None if self.directory is None else self.directory / str(rank) / f"{name}.log"


def parse_tee(text: str) -> dict[int | None, Stream]:
    """Parse ``--tee``: ``"3"`` is both outputs of all ranks, ``"0:1,1:2"`` names ranks.

    Raises:
        SettingError: the text is neither, or names a rank below 0 or twice.
    """
    try:
        if ":" not in text:
            return {None: _STREAMS[text.strip()]}
        pairs = [
            (int(rank), _STREAMS[stream.strip()]) for rank, stream in (pair.split(":") for pair in text.split(","))
        ]
    except (ValueError, KeyError):
        raise SettingError(
            f"--tee {text} isn't understood: give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), "
            "or RANK:NUMBER pairs such as 0:3,1:2."
        ) from None
    ranks = [rank for rank, _ in pairs]
    if min(ranks) < 0:
        raise SettingError(f"--tee {text} names rank {min(ranks)}, but the first local rank is 0.")
    if twice := [rank for rank in ranks if ranks.count(rank) > 1]:
        raise SettingError(f"--tee {text} names rank {twice[0]} twice. Name each rank once: 3 is stdout and stderr.")
    return dict(pairs)


@final
@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch: the engine's input, and the output of ``--dry-run``."""

    engine: str
    argv: tuple[str, ...]
    #: Set for every process, on top of the environment that the launcher itself runs in.
    environment: Mapping[str, str]
    #: Set for one process of this host each; empty where another program (torchrun, mpirun) makes the ranks.
    ranks: tuple[Mapping[str, str], ...] = ()
    #: Whether all ranks are processes that run on this machine, for as long as the launch does.
    is_here: bool = False
    rendezvous: str = ""
    cwd: Path = field(default_factory=Path.cwd)
    logs: Logs = field(default_factory=Logs)
    #: Options for the program that makes the ranks, by that program's names.
    engine_options: Mapping[str, object] = field(default_factory=dict)
    #: Files to write before anything starts, by path: a batch script, a manifest.
    files: Mapping[str, str] = field(default_factory=dict)
    #: Decisions made for the user; printed once before the start.
    notes: tuple[str, ...] = ()
    #: How long ranks that are signaled to stop may go on.
    grace_seconds: float = 30.0
    #: Whether the others go on when a rank is lost, so that they gather nothing from each other.
    survives_lost_ranks: bool = False

    def environments(self, base: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yield the whole environment of each process of this host."""
        for own in self.ranks or ({},):
            yield {**base, **self.environment, **own}

    @property
    def num_processes(self) -> int:
        """Number of processes over all hosts."""
        return int(self.environment.get("WORLD_SIZE", max(1, len(self.ranks))))

    def show(self) -> str:
        """Return the plan as text for a person to read."""
        lines = [f"engine       {self.engine}", f"command      {shlex.join(self.argv)}", f"directory    {self.cwd}"]
        if self.rendezvous:
            lines.append(f"rendezvous   {self.rendezvous}")
        if self.logs.directory is not None:
            lines.append(f"logs         {self.logs.directory}/<rank>/{{stdout,stderr}}.log")
        if self.engine_options:
            lines.append("options")
            lines += [f"  {name} = {value}" for name, value in self.engine_options.items()]
        lines.append("environment of every process")
        lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        for own in self.ranks:
            values = " ".join(f"{name}={shlex.quote(value)}" for name, value in own.items())
            lines.append(f"process      {values}")
        for path, content in self.files.items():
            lines.append(f"file         {path}")
            lines += [f"  {line}" for line in content.rstrip().splitlines()]
        lines += [f"note         {note}" for note in self.notes]
        return "\n".join(lines)
