"""Each change of a recorded run is noticed: of each field of each entry, and of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.main import main
from accelerate.guests.reproduce.chain import LOCK, read_chain
from accelerate.guests.reproduce.runs import check_files


def problems(folder: Path) -> list[str]:
    chain = read_chain(folder / LOCK)
    check_files(folder, chain)
    return chain.problems


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields inside of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from fields(item, (*path, key))


def changed(entry: Any, path: tuple[Any, ...]) -> Any:
    """The entry with another value at ``path``."""
    copy = json.loads(json.dumps(entry))
    *outer, last = path
    holder = copy
    for key in outer:
        holder = holder[key]
    value = holder[last]
    holder[last] = value + 1 if isinstance(value, int) else f"{value}x" if isinstance(value, str) else ["other"]
    return copy


def test_an_untouched_run_has_no_problems(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(copied) == []
    assert main(["reproduce", str(copied), "--verify_only"]) == 0
    assert main(["reproduce", str(copied), "--verify-only"]) == 0
    out = capsys.readouterr().out
    assert "1 run, 1 launch, 2 checkpoints. The record is whole" in out


def test_each_field_of_each_entry_is_guarded(copied: Path) -> None:
    path = copied / LOCK
    lines = path.read_text().splitlines()
    unnoticed, count = [], 0
    for number, line in enumerate(lines):
        entry = json.loads(line)
        for field in fields(entry):
            count += 1
            lines[number] = json.dumps(changed(entry, field))
            path.write_text("\n".join(lines) + "\n")
            if not read_chain(path).problems:
                unnoticed.append((number, field))
        lines[number] = line
    assert count > 200 and not unnoticed


def test_each_file_of_the_record_and_of_checkpoints_is_guarded(copied: Path) -> None:
    files = [path for path in copied.rglob("*") if path.is_file() and not re.match(r"result_|\.", path.name)]
    names = {path.relative_to(copied).parts[0] for path in files}
    assert names == {"checkpoints", LOCK} and len(files) > 10
    unnoticed = []
    for path in files:
        data = path.read_bytes()
        for place in {0, len(data) // 2, len(data) - 1} if data else ():
            for bit in (0, 6):
                flipped = bytearray(data)
                flipped[place] ^= 1 << bit
                path.write_bytes(flipped)
                if not problems(copied):
                    unnoticed.append((path, place, bit))
        path.write_bytes(data)
    assert not unnoticed and problems(copied) == []


def test_a_change_ends_the_command_with_1_and_names_the_file(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((copied / "checkpoints" / "checkpoint_1").glob("model*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["reproduce", str(copied)]) == 1  # and nothing runs
    out = capsys.readouterr().out
    assert path.name in out and "Running" not in out


def test_a_removed_checkpoint_is_told(copied: Path) -> None:
    (copied / "checkpoints" / "checkpoint_0").rename(copied / "moved")
    chain = read_chain(copied / LOCK)
    check_files(copied, chain)
    assert not chain.problems and ["checkpoint_0" in note for note in chain.notes] == [True]
