"""The name, tags and note of a run: from the script's configuration, or as edited on the page."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Final, cast

from .document import Facts, RunNote
from .reading import RunFiles

#: The file of edited notes, beside the script's own logs. The last line counts.
FILE: Final = "notes.jsonl"


def note_of(run: RunFiles) -> RunNote:
    """Return the name, tags and note of ``run``, each empty if it has none.

    A script gives them as ``run_name``, ``tags`` and ``notes`` of its trackers' configuration.
    """
    config = run.config
    given = {"name": config.get("run_name"), "tags": config.get("tags"), "note": config.get("notes")}
    return _checked({**given, **run.note})


def write_note(run: RunFiles, content: object) -> None:
    """Write ``content`` as the note of ``run``.

    Raises:
        ValueError: it isn't an object.
        OSError: the folder can't be written.
    """
    if not isinstance(content, dict):
        raise ValueError("a note is an object with name, tags and note")
    line = {"time": round(time.time(), 3), "note": _checked(cast("Facts", content))}
    with (run.logs / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _checked(given: Mapping[str, object]) -> RunNote:
    name, tags, note = given.get("name"), given.get("tags"), given.get("note")
    return {
        "name": name.strip() if isinstance(name, str) else "",
        "tags": [str(tag) for tag in cast("list[object]", tags)] if isinstance(tags, list) else [],
        "note": note.strip() if isinstance(note, str) else "",
    }
