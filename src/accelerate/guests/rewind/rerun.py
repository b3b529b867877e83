"""Start a recorded script again, in processes of its own, from one of its checkpoints up to an update.

The script's files are read as they were when the checkpoint was written: newer checkpoints are hidden, and everything
that the script writes goes to a folder of the replay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from ...errors import AccelerateError
from ...settings.env import snapshot

REQUEST: Final = "request.json"
#: The default observer: ``(Accelerator, options)`` -> an `UpdateObserver`, called in every rank.
OBSERVER: Final = "accelerate.guests.rewind.observe:Observer"
_RANK_FILE: Final = "rank_{}.jsonl"
_OUTPUT: Final = "output.txt"
_NUM_LINES: Final = 30
#: Environment variables of one rank, which a replay has to get anew.
_OF_A_RANK: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "ACCELERATE_MONITOR",
)  # fmt: skip

Facts = dict[str, Any]


class RerunError(AccelerateError, RuntimeError):
    """The error for a script that can't be started again, or doesn't reach the requested update."""


@final
@dataclass(frozen=True)
class Request:
    """The conditions of one replay, handed from the command to its processes.

    Attributes:
        project: the run's folder.
        checkpoint: the checkpoint to start from; "" starts from nothing.
        until_update: the update after which to end; None ends with the script.
        until_step: end after the script has logged this step.
        observe: ``module:function``, called on each rank with the Accelerator and the options. It returns an
            `accelerate.guests.rewind.child.UpdateObserver`.
        options: the observer's options.
        save_to: the folder in which to save the state at the end; "" saves nothing.
        without_samples: indices of samples that are left out of their batches.
        changes: options of the optimizers by name, set when the checkpoint is loaded.
    """

    project: str
    checkpoint: str = ""
    until_update: int | None = None
    until_step: int | None = None
    observe: str = OBSERVER
    options: Facts = field(default_factory=dict[str, Any])
    save_to: str = ""
    without_samples: list[int] = field(default_factory=list[int])
    changes: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Read the request from the replay's folder."""
        return cls(**json.loads((folder / REQUEST).read_text()))

    def write(self, folder: Path) -> None:
        """Write the request to the replay's folder."""
        (folder / REQUEST).write_text(json.dumps(asdict(self)))


@final
@dataclass(frozen=True)
class Observed:
    """A replay that has ended.

    Attributes:
        folder: the folder of the replay.
        ranks: for each rank, the facts of each update in order; each has ``update`` and, by step, ``logged``.
        exit_code: the exit code of the launcher; a failed script's facts end with the update in which it failed.
        last_lines: a sentence about the last lines that the script printed.
    """

    folder: Path
    ranks: list[list[Facts]]
    exit_code: int
    last_lines: str

    def mirrored(self, path: Path) -> Path:
        """Return the place of a file that the script has written at ``path``."""
        return self.folder / "files" / path.resolve().relative_to(path.resolve().anchor)

    def link_of(self, place: Path) -> Path | None:
        """Return the target of a link made by the script. None: a file, or a link that the mirror has made."""
        root = self.folder.resolve() / "files"
        to = Path(os.readlink(place)) if place.is_symlink() else root.parent
        return Path(to.anchor, to.relative_to(root)) if to.is_relative_to(root) else None


def rerun(
    command: Sequence[str],
    *,
    project: Path,
    from_checkpoint: Path | None = None,
    until_update: int | None = None,
    num_processes: int = 1,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    working_folder: str | None = None,
    **conditions: Any,
) -> Observed:
    """Run a training script from a checkpoint up to an update, and return what an observer has seen.

    Args:
        command: the script and its arguments, after flags of ``accelerate launch``, if there are any.
        project: the run's folder; the script may read and write it, but its files don't change.
        from_checkpoint: a checkpoint in ``project``; None starts from nothing, with no checkpoint to be seen.
        until_update: the update after which all ranks end.
        num_processes: the number of ranks, unless the flags say it.
        folder: a new folder for the replay's files, alone in its parent.
        environment: variables of the recorded run, set in the replay.
        working_folder: the folder in which the script is started; None means the current one.
        conditions: other attributes of `Request`.

    Raises:
        RerunError: the command names no script, or the script failed before its first update.
    """
    flags, program = split_command(command)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    request = Request(
        str(project.resolve()),
        "" if from_checkpoint is None else str(from_checkpoint.resolve()),
        until_update,
        **conditions,
    )
    request.write(folder)
    if not any(flag.split("=")[0].replace("-", "_") == "__num_processes" for flag in flags):
        flags += ["--num_processes", str(num_processes)]
    words = ["-m", "accelerate.commands.launch", *flags, "-m", f"{__package__}.child", str(folder), *program]
    temporary = folder.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    variables = {name: value for name, value in snapshot().items() if name not in _OF_A_RANK}
    variables |= dict(environment or {}) | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    exit_code = start(words, variables, working_folder, folder / _OUTPUT)
    found = Observed(folder, list(_records(folder)), exit_code, _last_lines(folder / _OUTPUT))
    if exit_code and not any(found.ranks):
        raise RerunError(
            f"{' '.join(program)}: the script was started again, and failed with exit code {exit_code} before "
            f"its first update. Give the run's own script and arguments, after --.{found.last_lines}"
        )
    return found


def start(words: Sequence[str], variables: Mapping[str, str], folder: str | None, output: Path) -> int:
    """Run Python with these arguments until it ends; return its exit code."""
    with output.open("wb") as file:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ).returncode


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return flags of ``accelerate launch``, and the script with its arguments.

    Raises:
        RerunError: no word is a Python file, or a module after ``-m``.
    """
    words = list(command)
    if words[:2] == ["accelerate", "launch"]:
        words = words[2:]
    elif words and os.path.basename(words[0]).startswith("python"):
        words = words[1:]
    for place, word in enumerate(words):
        if word.endswith(".py") or (word == "-m" and len(words) > place + 1):
            return words[:place], words[place:]
    raise RerunError(
        f"{' '.join(command) or 'No command'}: no script is named. Give the run's command after --, such as "
        "-- train.py --epochs 3."
    )


def _records(folder: Path) -> Iterator[list[Facts]]:
    rank = 0
    while (path := folder / _RANK_FILE.format(rank)).exists():
        yield [json.loads(line) for line in path.read_text().splitlines()]
        rank += 1


def _last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").rstrip().splitlines()[-_NUM_LINES:]
    return " Its last lines:\n" + "\n".join(lines) if lines else " It printed nothing."
