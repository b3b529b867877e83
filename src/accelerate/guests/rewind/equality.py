"""Whether a replay is equal to its run: logged numbers and checkpoints, compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, final

from ...checkpointing.series import Entry, inspect
from .rerun import Observed
from .run_folder import Log, Recorded, RunFolder, updates_of
from .updates import Update


@final
class Compared(NamedTuple):
    """A number, fingerprint or checkpoint that is in a replay and in its run.

    Attributes:
        update: the update after which it was written.
        difference: how it differs, in words; "" if it is equal bit for bit.
    """

    update: int
    difference: str


def compare(run: RunFolder, replay: Observed) -> Iterator[Compared]:
    """Yield for each number, fingerprint and checkpoint in both whether it is equal."""
    updates = Update.all_of(replay)
    logged = {step: (update.number, values) for update in updates for step, values in update.logged.items()}
    for log in run.logs:
        place, by_step = replay.mirrored(log.path), logged
        if log.is_of_monitor:
            again = Log.read(place, only_last=True).lines if is_written(place, replay) else []
            by_step = {line.step: (line.step, line.lasting) for line in again}
        for line in log.lines:
            update, mine = by_step.get(line.step, (0, {}))
            for name in sorted(mine.keys() & line.lasting.keys()):
                one, its = mine[name], line.lasting[name]
                text = f"At step {line.step}, {name} is {one!r} in the replay, and {its!r} in the run."
                yield Compared(update, text if differ({name: one}, {name: its}) else "")
    again = Recorded.read(replay.mirrored(run.path), only_last=True)
    if again is not None and run.recorded is not None:
        for update in [one.number for one in updates if one.number in again.weights]:
            its = run.recorded.weights.get(update)
            if its is not None:
                text = f"After update {update}, the fingerprint of the weights is another one in the replay."
                yield Compared(update, text if its != again.weights[update] else "")
    for entry in run.checkpoints:
        place = replay.mirrored(Path(str(entry.storage)))
        if is_written(place, replay) and place.is_dir():
            mine, its = contents(inspect(place)), contents(entry)
            names = ", ".join(sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name]))
            text = f"{entry.name} has other contents in the replay: {names}."
            yield Compared(updates_of(entry), text if names else "")


def is_written(place: Path, replay: Observed) -> bool:
    """Return whether a replay has written a file or folder; else its mirror has a link to the run's own."""
    return place.exists() and place.resolve().is_relative_to(replay.folder.resolve())


def other_facts(run: RunFolder, replay: Observed) -> str:
    """Return what is known to be different about the machine, its packages and the code, in words."""
    written = replay.mirrored(run.path)
    then, now = run.facts, RunFolder(written).facts if is_written(written, replay) else {}
    other = [
        f"{name} is {now[name]}, and was {then[name]}" for name in then.keys() & now.keys() if then[name] != now[name]
    ]
    if other:
        return f"{'; '.join(sorted(other))}."
    return (
        "What the run's files tell of versions is the same. The script may keep state that isn't in its checkpoints. "
        "The processor, its threads, the data or the script may be other ones, or the hardware has erred."
    )


def contents(entry: Entry) -> dict[str, int]:
    """Return the checksums of a checkpoint's tensors by file."""
    files = {} if entry.manifest is None else entry.manifest.files
    return {name: record.crc32 for name, record in files.items() if name.endswith(".safetensors")}


def differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether a number of both isn't the same bit for bit."""
    pairs = ((one[name], other[name]) for name in one.keys() & other.keys())
    return any(mine != its and not (math.isnan(mine) and math.isnan(its)) for mine, its in pairs)
