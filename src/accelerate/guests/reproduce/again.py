"""Run a recorded launch again in a folder of its own, so that nothing of the run changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ...errors import SettingError
from ...seams import LoopHook, function_of
from ...settings import env
from .chain import LOCK, Entry, read_chain
from .masking import MASK
from .recording import Recorder
from .runs import RecordedRun, runs_of
from .surroundings import script_of, variables

if TYPE_CHECKING:
    from ...accelerator import Accelerator


@final
class PointObserver(LoopHook):
    """The observer of a repetition: it adds the points of the run to the repetition's record."""

    def __init__(self, run: Accelerator, options: Mapping[str, Any]) -> None:
        self._run, self._points = run, frozenset[int](options["points"])

    def facts(self, update: int) -> dict[str, Any]:
        """Record a point, if the run has one here."""
        for recorder in self._run.gradient_state.hooks.of(Recorder):
            if recorder.updates in self._points:
                recorder.record_point("update")
                recorder.write()
        return {}


def words_of(launch: Entry, given: Sequence[str]) -> list[str]:
    """Return the words of a launch's command after ``python``, with the given arguments in place of left-out secrets.

    Raises:
        SettingError: the launch can't be repeated, and what to do.
    """
    command, copies = launch["command"], launch["code"]["copies"]
    words: list[str] = command["words"]
    if not words:
        where = " --write_code FOLDER writes its cells." if "notebook cells" in copies else ""
        raise SettingError(
            f"The run was started in {command['started_in']}, so there is no command to repeat. --verify_only checks "
            f"its record.{where}"
        )
    script, folder = script_of(words), Path(command["folder"])
    if not folder.is_dir():
        raise SettingError(f"The run was started in {folder}, which is no longer there. Put the folder back.")
    if script is not None and not script.is_file():
        is_kept = str(script.resolve()) in copies
        where = "what --write_code FOLDER writes" if is_kept else f"commit {launch['code'].get('commit', 'unknown')}"
        raise SettingError(f"The script {script} is no longer there. Put it back from {where}.")
    kept, left_out = _without_masks(words)
    if not {word.partition("=")[0] for word in given}.issuperset(left_out):
        raise SettingError(
            f"The record leaves out arguments that look like secrets ({' '.join(left_out)}). Give them after --, such "
            "as -- --api_key VALUE."
        )
    return [*kept, *given]


def _without_masks(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without secrets and their options, and those options."""
    kept: list[str] = []
    left_out: list[str] = []
    for word in words:
        if MASK not in word:
            kept.append(word)
        elif not word.startswith("-") and kept and kept[-1].startswith("-") and "=" not in kept[-1]:
            left_out.append(kept.pop())  # the option with its value
        else:
            left_out.append(word.partition("=")[0])
    return kept, left_out


def run_again(
    launch: Entry,
    project: Path,
    checkpoint: Path | None,
    points: Sequence[int],
    given: Sequence[str],
    num_processes: int,
) -> tuple[RecordedRun | None, str]:
    """Run the launch from a checkpoint, or from nothing, to the last point; return its record and its last lines.

    Raises:
        SettingError: the launch can't be repeated.
    """
    rerun = function_of("rewind", "rerun", asked="accelerate reproduce, to run a script again,")
    words = words_of(launch, given)
    recorded: dict[str, str] = launch["variables"]
    unset = {name: None for name in variables() if name not in recorded}
    fixed = {"OMP_NUM_THREADS": str(launch["machine"]["threads"]), "ACCELERATE_CONFIG_FILE": os.devnull}
    known = {entry["launch"] for entry in read_chain(project / LOCK).entries}
    with tempfile.TemporaryDirectory(prefix="accelerate_reproduce_") as name, env.patched(**unset):
        found = rerun(
            words,
            project=project,
            from_checkpoint=checkpoint,
            until_update=max(points),
            num_processes=num_processes,
            folder=Path(name) / "replay",
            observe=f"{__name__}:PointObserver",
            options={"points": list(points)},
            environment={**recorded, **fixed},
            working_folder=launch["command"]["folder"],
        )
        entries = read_chain(found.mirrored(Path(launch["project"]) / LOCK)).entries
    runs = runs_of(one | {"resumed": None} for one in entries if one["launch"] not in known and one["kind"] != "load")
    own = [run for run in runs if run.launches[0]["number"] == launch["number"]]
    return (own[-1] if own else None), found.last_lines
