"""A run's folder: the numbers that its script has logged, conditions of them, its checkpoints, and how it began."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

from ...checkpointing.manifest import updates_in
from ...checkpointing.series import Entry, list_checkpoints
from ...errors import SettingError
from ...names import CHECKPOINTS_FOLDER

_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_COMPARED: Final = re.compile(r"([\w./-]+)\s*(>=|<=|==|!=|>|<)\s*([-+\w.]+)")
_NOT_FINITE: Final = re.compile(r"(?:([\w./-]+)\s+)?not\s+finite")
_SAME: Final = {"gradient_norm": "grad_norm", "learning_rate": "lr"}


@final
@dataclass(frozen=True)
class Condition:
    """A comparison of one number of an update; without a name, of all of them.

    Attributes:
        sign: a comparison; "" looks for a number that isn't finite.
    """

    text: str
    name: str
    sign: str = ""
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            SettingError: it is none.
        """
        found = _NOT_FINITE.fullmatch(text.strip())
        if found:
            return cls(text, standard_name(found[1] or ""))
        found = _COMPARED.fullmatch(text.strip())
        try:
            if found:
                return cls(text, standard_name(found[1]), found[2], float(found[3]))
        except ValueError:
            pass
        raise SettingError(
            f'--when "{text}": this is no condition. Write a name of the log, a comparison and a number, such as '
            '"grad_norm > 10", or "not finite".'
        )

    def holds(self, values: Mapping[str, float]) -> bool | None:
        """Return whether the condition holds for an update; None if its number isn't known.

        A value that isn't a number holds any comparison, because it is past each limit.
        """
        known = {standard_name(name): value for name, value in values.items()}
        if not self.sign:
            looked = [value for name, value in known.items() if self.name in ("", name)]
            return not all(map(math.isfinite, looked)) if looked else None
        value = known.get(self.name)
        return None if value is None else math.isnan(value) or _COMPARISONS[self.sign](value, self.value)


def standard_name(name: str) -> str:
    """Return the shortest of the names that a quantity has in logs."""
    return _SAME.get(name, name)


LOCK: Final = "run.lock.json"
_FACTS: Final = ("packages", "machine", "variables", "switches")
_NO_NUMBERS: Final = ("time", "step", "epoch", "total_steps", "eta_seconds")
#: Numbers that differ between equal runs.
_MEASURED: Final = ("seconds", "per_second", "memory", "mfu", "utilization", "time")
_OF_A_RANK: Final = "rank_"
_START: Final = '"event": "start"'


@final
@dataclass(frozen=True)
class Line:
    """The numbers that were logged at one step, and when."""

    step: int
    time: float
    values: Mapping[str, float]

    @property
    def lasting(self) -> dict[str, float]:
        """The numbers that an equal run logs too."""
        return {name: value for name, value in self.values.items() if not any(word in name for word in _MEASURED)}


@final
@dataclass(frozen=True)
class Log:
    """One file of logged numbers, by step in ascending order; `facts` are those of the run's last start."""

    path: Path
    lines: list[Line]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def read(cls, path: Path, *, only_last: bool = False) -> Log:
        """Read a file of JSON lines; after a restart, new lines replace those of the same and later steps.

        Args:
            only_last: read the lines since the last start.
        """
        lines, facts = list[Line](), dict[str, Any]()
        whole = path.read_text(errors="replace")
        for text in (whole.rpartition(_START)[2] if only_last else whole).splitlines():
            try:
                found = json.loads(text)
            except ValueError:  # a torn line
                continue
            if not isinstance(found, dict):
                continue
            if found.get("event") == "start":
                facts = found
            if "event" in found or not isinstance(found.get("step"), int):
                continue
            values = {name: value for name, each in found.items() if (value := _number(name, each)) is not None}
            while lines and lines[-1].step > found["step"]:
                lines.pop()
            if lines and lines[-1].step == found["step"]:
                values = {**lines.pop().values, **values}
            lines.append(Line(found["step"], float(found.get("time", math.inf)), values))
        return cls(path, lines, facts)

    @property
    def is_of_monitor(self) -> bool:
        """Whether a monitor has written it; its steps are updates."""
        return self.path.stem == "rank_0"

    @property
    def is_complete(self) -> bool:
        """Whether no step is left out between the first and the last one."""
        return bool(self.lines) and len(self.lines) == self.lines[-1].step - self.lines[0].step + 1

    def first(self, condition: Condition) -> tuple[Line | None, Line | None]:
        """Return the last line before the condition first holds, and the one at which it does."""
        before = None
        for line in self.lines:
            holds = condition.holds(line.values)
            if holds:
                return before, line
            if holds is not None:
                before = line
        return before, None

    def tells(self, condition: Condition) -> int:
        """Return for how many steps the log decides the condition."""
        return sum(condition.holds(line.values) is not None for line in self.lines)


@final
@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Raises:
        SettingError: there is no such folder.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise SettingError(f"{self.path} is no folder. Give the project's folder: Accelerator(project_dir=...).")

    @cached_property
    def logs(self) -> list[Log]:
        """The logs of the main rank that have numbers."""
        return [log for path in self._log_files() if (log := Log.read(path)).lines or log.facts]

    def _log_files(self) -> Iterator[Path]:
        for path in sorted(self.path.rglob("*.jsonl")):
            folders = path.relative_to(self.path).parts
            if CHECKPOINTS_FOLDER not in folders and (not path.stem.startswith(_OF_A_RANK) or path.stem == "rank_0"):
                yield path

    @cached_property
    def checkpoints(self) -> list[Entry]:
        """The valid checkpoints, oldest first."""
        return [entry for entry in list_checkpoints(self.path) if entry.problem is None and entry.manifest]

    def checkpoints_before(self, time: float) -> list[Entry]:
        """Return the checkpoints that were committed before a time in seconds, oldest first."""
        return [one for one in self.checkpoints if one.manifest and _seconds(one.manifest.written_at) < time]

    @cached_property
    def recorded(self) -> Recorded | None:
        """The record of the last launch; None without one."""
        return Recorded.read(self.path)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the packages and the machine of the last start."""
        if self.recorded is not None:
            return self.recorded.facts
        start = next((log.facts for log in reversed(self.logs) if log.facts), {})
        return {name: start[name] for name in ("torch", "python", "host") if name in start}

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        manifests = [entry.manifest for entry in self.checkpoints if entry.manifest]
        if manifests or self.recorded is None:
            return manifests[-1].world_size if manifests else 1
        return self.recorded.num_processes


def updates_of(entry: Entry | None) -> int:
    """Return the number of updates that a checkpoint was written after; 0 for none."""
    return 0 if entry is None or entry.manifest is None else updates_in(entry.manifest.details)


def path_of(entry: Entry | None) -> Path | None:
    """Return a checkpoint's folder."""
    return None if entry is None else Path(str(entry.storage))


@final
@dataclass(frozen=True)
class Recorded:
    """How a run was started, by its ``run.lock.json``.

    Attributes:
        words: the script and its arguments.
        variables: the variables of the environment that matter.
        facts: what else was recorded of its packages, machine and code, by names in words.
        weights: fingerprints of the weights by update.
    """

    words: list[str]
    folder: str
    num_processes: int
    variables: dict[str, str]
    facts: dict[str, Any]
    weights: dict[int, str]

    @classmethod
    def read(cls, project: Path, *, only_last: bool = False) -> Recorded | None:
        """Read the record's last launch; None if there is none.

        Args:
            only_last: leave out the fingerprints of launches before.
        """
        path, entries = project / LOCK, list[dict[str, Any]]()
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
            with suppress(ValueError):  # a torn line
                entries.append(json.loads(line))
        launches = [entry for entry in entries if entry.get("kind") == "launch" and entry.get("command")]
        if not launches:
            return None
        last = launches[-1]
        groups = {name: last.get(name) or {} for name in _FACTS} | {"file": (last.get("code") or {}).get("files") or {}}
        return cls(
            last["command"]["words"],
            last["command"]["folder"],
            int(last["ranks"]),
            dict(last.get("variables") or {}),
            {f"{group} {name}": value for group, values in groups.items() for name, value in values.items()},
            {
                each["updates"]: each["weights"]
                for each in entries
                if each.get("kind") == "update" and (not only_last or each["launch"] == last["launch"])
            },
        )


def _number(name: str, value: object) -> float | None:
    if name in _NO_NUMBERS or isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def _seconds(written_at: str) -> float:
    return datetime.fromisoformat(written_at).timestamp() if written_at else math.inf
