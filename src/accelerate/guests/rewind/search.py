"""The search for the first update of a run at which a condition holds, by its log and by replays."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from ...checkpointing.series import Entry, inspect
from ...errors import SettingError
from ...settings.option import nearest
from .rerun import Observed, RerunError, rerun
from .run_folder import Condition, RunFolder, path_of, standard_name, updates_of
from .updates import Compared, Finding, Update, compare, contents, differ, first_difference, other_facts, stands_out

#: As many updates before the one in question make the history of its norms.
_NUM_HISTORY: Final = 5
#: The exit codes of a check, as of ``git bisect run``: the state can't be tested, and the largest one that is bad.
_SKIP, _LAST_BAD = 125, 127


@final
@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        number: the first update at which the condition holds; None if it doesn't.
        how: how it was found, in words.
        values: the numbers of that update.
        before: those of the update before; in a comparison, those of the other run.
        finding: the part of the update that stands out or differs.
        checks: how the replay differs from the run, in words; empty if nothing known of it differs.
    """

    number: int | None
    how: str
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    before: Mapping[str, float] = field(default_factory=dict[str, float])
    finding: Finding | None = None
    checks: list[str] = field(default_factory=list[str])


@final
@dataclass
class Search:
    """A search in one run, whose replays are counted.

    Args:
        workspace: a folder for the replays, each in one of its own.
    """

    run: RunFolder
    command: Sequence[str]
    num_processes: int
    workspace: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    working_folder: str | None = None
    num_replays: int = 0
    last: Observed | None = None

    def replay(self, start: Path | None, until_update: int | None = None, **conditions: Any) -> list[Update]:
        """Replay the run from a checkpoint, and return its updates."""
        self.num_replays += 1
        until = f"update {until_update}" if until_update else "the end"
        if conditions.get("until_step") is not None:
            until = f"step {conditions['until_step']} of the log"
        _say(f"Replaying from {'the start' if start is None else start.name} to {until} ...")
        self.last = rerun(
            self.command,
            project=self.run.path,
            from_checkpoint=start,
            until_update=until_update,
            num_processes=self.num_processes,
            folder=self._folder(self.num_replays) / "replay",
            environment=self.environment,
            working_folder=self.working_folder,
            **conditions,
        )
        return Update.all_of(self.last)

    def _folder(self, replay: int) -> Path:
        return self.workspace / f"replay_{replay}"

    def state_after(self, update: int, start: Path | None) -> Path:
        """Return a checkpoint of the state after an update, saved by a replay.

        Raises:
            RerunError: the script ends earlier.
        """
        state = self._folder(self.num_replays + 1) / "state"
        updates = self.replay(start, update, save_to=str(state))
        if not state.is_dir():
            last = f"after update {updates[-1].number if updates else updates_of(start and inspect(start))}"
            last_lines = self.last.last_lines if self.last else ""
            raise RerunError(f"Update {update} isn't reached: the script ended {last}.{last_lines}")
        return state

    # -- a condition of numbers ------------------------------------------------------------------------

    def first(self, condition: Condition) -> Found:
        """Return the first update at which a condition holds.

        Raises:
            SettingError: neither a log nor a replay has the number.
        """
        names = {standard_name(name) for log in self.run.logs for line in log.lines for name in line.values}
        if names and condition.name not in (names := {"", "loss", "grad_norm", "lr", *names}):
            meant = nearest(condition.name, names)
            hint = f" Did you mean {meant}?" if meant else ""
            known = ", ".join(sorted(names - {""}))
            raise SettingError(f'--when "{condition.text}": no log has {condition.name}.{hint} There are {known}.')
        logs = sorted(self.run.logs, key=lambda log: log.tells(condition))
        log = logs[-1] if logs and logs[-1].tells(condition) else None
        before, hit = log.first(condition) if log is not None else (None, None)
        if log is not None and hit is None and log.is_complete:
            return Found(None, f"In the log, it holds at none of {len(log.lines)} steps.")
        if log is None or hit is None:
            updates, start = self._without_log(condition)
            how = "The log doesn't tell"
        else:
            older = self.run.checkpoints_before(-math.inf if before is None else before.time)
            start = path_of(older[-1]) if older else None
            until = "until_update" if log.is_of_monitor else "until_step"
            updates = self.replay(start, **{until: hit.step})
            how = f"In the log, it holds first at step {hit.step}"
        number = first_update(condition, updates)
        if not updates:
            raise RerunError(f"{' '.join(self.command)}: the script made no update. Give the run's own command.")
        if number is None and self.last is not None and self.last.exit_code:
            raise RerunError(f"The replay failed before the condition held.{self.last.last_lines}")
        if number is None:
            other = self._differences()
            how = f"{self._told(how)} It doesn't hold in the replay."
            return Found(other[0].update if other else None, how, checks=self._checks())
        return self._explained(number, updates, start, how)

    def _without_log(self, condition: Condition) -> tuple[list[Update], Path | None]:
        """Return the updates of a replay in which the condition may hold for the first time, and where it began.

        One update after each checkpoint tells on which side to look, as long as the condition goes on to hold.
        """
        starts: list[Entry | None] = [None, *self.run.checkpoints]
        low, high = 0, len(starts)  # it doesn't hold at `low`, or that isn't known; it holds at `high`
        while high - low > 1:
            middle = (low + high) // 2
            updates = self.replay(path_of(starts[middle]), updates_of(starts[middle]) + 1)
            holds = [condition.holds(update.values) for update in updates]
            low, high = (low, middle) if True in holds else (middle, high)
        until = updates_of(starts[high]) + 1 if high < len(starts) else None
        updates = self.replay(path_of(starts[low]), until)
        if first_update(condition, updates) is None and low and until is None:  # it held for a while only
            low, updates = 0, self.replay(None)
        return updates, path_of(starts[low])

    def _explained(self, number: int, updates: list[Update], start: Path | None, how: str) -> Found:
        """Return the result, with what stands out in the update."""
        checks = self._checks()
        if start is not None and number - updates[0].number < _NUM_HISTORY:
            older = [entry for entry in self.run.checkpoints if updates_of(entry) <= number - 1 - _NUM_HISTORY]
            start = path_of(older[-1]) if older else None
            updates = self.replay(start, number) or updates
        by_number = {update.number: update for update in updates}
        previous = by_number.get(number - 1)
        return Found(
            number,
            self._told(how),
            by_number[number].values,
            {} if previous is None else previous.values,
            stands_out(updates, number),
            checks,
        )

    def _told(self, how: str) -> str:
        return f"{how}; {self.num_replays} replay{'s' * (self.num_replays != 1)}."

    # -- a check of the user's -------------------------------------------------------------------------

    def first_by_script(self, check: Path) -> Found:
        """Return the first update after whose state a script ends with an exit code other than 0.

        Raises:
            RerunError: there is no checkpoint, or the newest one is good.
            SettingError: the script isn't there.
        """
        if not check.is_file():
            raise SettingError(f"--script {check}: there is no such file.")
        entries = self.run.checkpoints
        if not entries:
            raise RerunError(f"--script {check}: {self.run.path} has no checkpoint, so it isn't known where to begin.")
        low, high = -1, len(entries) - 1
        if not self._is_bad(check, entries[high]):
            raise RerunError(f"--script {check}: it ends with 0 for the newest checkpoint, {entries[high].name}.")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_bad(check, entries[middle]) else (middle, high)
        good = path_of(entries[low]) if low >= 0 else None
        first, last = (updates_of(entries[low]) if low >= 0 else 0), updates_of(entries[high])
        while last - first > 1:
            middle = (first + last) // 2
            state = self.state_after(middle, good)
            if self._is_bad(check, state):
                last = middle
            else:
                first, good = middle, state
        start = [entry for entry in entries if updates_of(entry) < last - _NUM_HISTORY]
        begin = path_of(start[-1]) if start else None
        return self._explained(last, self.replay(begin, last), begin, f"{check.name} tells")

    def _is_bad(self, check: Path, state: Entry | Path) -> bool:
        folder = state if isinstance(state, Path) else path_of(state)
        words = [str(check)] if check.suffix != ".py" else [sys.executable, str(check)]
        code = subprocess.run([*words, str(folder)], stdin=subprocess.DEVNULL).returncode
        _say(f"{check.name} {folder}: exit code {code}")
        if code == _SKIP or not 0 <= code <= _LAST_BAD:
            raise RerunError(f"--script {check}: it ended with {code} for {folder}, so the search can't go on.")
        return code != 0

    # -- another run -----------------------------------------------------------------------------------

    def first_against(self, other: Search) -> Found:
        """Return the first update in which two runs differ; they should be equal."""
        if self.run.path.resolve() == other.run.path.resolve():
            raise SettingError(f"--against {other.run.path}: this is the run itself. Give the folder of another run.")
        until, equal_until, how = self._first_other(other)
        if not until and not self._shares_anything(other):
            raise SettingError(
                f"--against {other.run.path}: no step of a log and no checkpoint of it is in {self.run.path} too, so "
                "there is nothing to compare. Give the folder of a run that has got so far."
            )
        if not until:
            return Found(None, "The logs and checkpoints of both runs are equal.")
        equal = [
            (path_of(mine), path_of(its))
            for mine in self.run.checkpoints_before(equal_until)
            for its in other.run.checkpoints
            if updates_of(mine) == updates_of(its) and contents(mine) == contents(its)
        ]
        mine, its = equal[-1] if equal else (None, None)
        first, second = (
            search.replay(start, **until, options={"hashes": True}) for search, start in ((self, mine), (other, its))
        )
        finding = first_difference(first, second)
        checks = [*self._checks(), *other._checks()]
        how = f"{how}; {self.num_replays + other.num_replays} replays."
        if finding is None:
            return Found(None, f"{how} The replays of both are equal.", checks=checks)
        values, others = ({one.number: one.values for one in each} for each in (first, second))
        return Found(finding.update, how, values[finding.update], others[finding.update], finding, checks)

    def _shares_anything(self, other: Search) -> bool:
        """Return whether a logged step or a checkpoint is in both runs."""
        steps = [
            {(log.path.name, line.step) for log in run.logs for line in log.lines} for run in (self.run, other.run)
        ]
        updates = [set(map(updates_of, run.checkpoints)) for run in (self.run, other.run)]
        return bool(steps[0] & steps[1] or updates[0] & updates[1])

    def _first_other(self, other: Search) -> tuple[dict[str, int], float, str]:
        """Return until when to replay both, the time until which they were equal, and how that is known.

        The first is empty if the logs and checkpoints are equal.
        """
        equal_until = -math.inf
        for log in self.run.logs:
            its = next((one for one in other.run.logs if one.path.name == log.path.name), None)
            lines = {} if its is None else {line.step: line.lasting for line in its.lines}
            for line in log.lines:
                if differ(line.lasting, lines.get(line.step, {})):
                    until = "until_update" if log.is_of_monitor else "until_step"
                    return {until: line.step}, equal_until, f"In the logs, they differ first at step {line.step}"
                equal_until = line.time if line.step in lines else equal_until
        for mine in self.run.checkpoints:
            for its in other.run.checkpoints:
                if updates_of(mine) == updates_of(its) and contents(mine) != contents(its):
                    return {"until_update": updates_of(mine)}, -math.inf, f"The checkpoints {mine.name} differ"
        return {}, equal_until, ""

    def _differences(self) -> list[Compared]:
        """Return the numbers of the last replay that differ from the run's, the earliest first."""
        compared = [] if self.last is None else compare(self.run, self.last)
        return sorted((one for one in compared if one.difference), key=lambda one: one.update)

    def _checks(self) -> list[str]:
        """Return how the last replay differs from the run, in words; empty if nothing known of it differs."""
        differences = self._differences()
        if not differences or self.last is None:
            return []
        return [f"{self.run.path.name}: {differences[0].difference}", other_facts(self.run, self.last)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first_update(condition: Condition, updates: Sequence[Update]) -> int | None:
    """Return the first update at which a condition holds, by its own numbers or by those logged after it."""
    for update in updates:
        if any(condition.holds(values) for values in (update.values, *update.logged.values())):
            return update.number
    return None
