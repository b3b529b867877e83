"""A record's file: what is appended, what a kill leaves, and that each changed bit shows."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from accelerate.guests.reproduce.chain import ChainFile, read_chain


def write(path: Path, *numbers: int) -> None:
    for number in numbers:
        ChainFile(path).append({"kind": "update", "launch": "", "updates": number, "weights": ""}, is_durable=False)


def test_entries_are_read_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.lock.json"
    write(path, 1, 2, 3)
    chain = read_chain(path)
    assert [entry["updates"] for entry in chain.entries] == [1, 2, 3]
    assert [entry["previous"] for entry in chain.entries] == ["", *(entry["hash"] for entry in chain.entries[:-1])]
    assert (chain.problems, chain.notes, chain.head) == ([], [], chain.entries[-1]["hash"])
    assert read_chain(tmp_path / "none").entries == []


def test_each_changed_bit_shows(tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    write(path, 1, 2)
    data = path.read_bytes()
    unnoticed = []
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        if not read_chain(path).problems:
            unnoticed.append(bit)
    assert not unnoticed


def test_a_line_that_is_removed_moved_or_added_shows(tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    write(path, 1, 2, 3)
    one, two, three = path.read_bytes().splitlines(keepends=True)
    for lines in ([one, three], [two, three], [two, one, three], [one, two, two, three], [one, two, three, one]):
        path.write_bytes(b"".join(lines))
        assert read_chain(path).problems, lines
    # An entry whose own hash was made right again, but not that of the next one.
    forged = tmp_path / "forged"
    write(forged, 9)
    path.write_bytes(forged.read_bytes() + two + three)
    assert read_chain(path).problems


@pytest.mark.parametrize("added", [b"null\n", b"{}\n", b"[1]\n", b"a note\n", b'{"kind": "end"}\n'])
def test_a_line_that_is_no_torn_entry_was_added(added: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    write(path, 1, 2)
    one, two = path.read_bytes().splitlines(keepends=True)
    for lines in (added + one + two, one + added + two, one + two + added):
        path.write_bytes(lines)
        assert read_chain(path).problems, lines


@pytest.mark.parametrize("torn", [b'{"ki', b"\0\0\0\0", b'{"kind": "update", "upda'])
def test_what_a_lost_disk_or_process_leaves_is_told_as_torn(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    write(path, 1, 2)
    one, two = path.read_bytes().splitlines(keepends=True)
    for lines in (one + torn + b"\n" + two, one + two + torn):
        path.write_bytes(lines)
        chain = read_chain(path)
        assert not chain.problems and len(chain.notes) == 1, lines


@pytest.mark.parametrize("left", [1, 20, 60, 100])
def test_a_torn_last_line_is_told_and_the_lines_before_hold(left: int, tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    write(path, 1, 2, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:left])
    torn = read_chain(path)
    assert [entry["updates"] for entry in torn.entries] == [1, 2]
    assert not torn.problems and len(torn.notes) == 1 and "Line 3" in torn.notes[0]
    write(path, 4)  # the run goes on
    resumed = read_chain(path)
    assert [entry["updates"] for entry in resumed.entries] == [1, 2, 4]
    assert not resumed.problems and len(resumed.notes) == 1
    write(path, 5)
    assert not read_chain(path).problems


def test_only_the_end_of_the_line_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    write(path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    write(path, 2)
    chain = read_chain(path)
    assert [entry["updates"] for entry in chain.entries] == [1, 2] and not chain.problems and not chain.notes


def append_many(path: Path, first: int) -> None:
    file = ChainFile(path)
    for number in range(first, first + 50):
        file.append({"kind": "update", "launch": "", "updates": number, "weights": ""}, is_durable=False)


def test_two_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, first)) for first in (0, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    chain = read_chain(path)
    assert not chain.problems and not chain.notes
    assert sorted(entry["updates"] for entry in chain.entries) == [*range(50), *range(100, 150)]


def test_each_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "run.lock.json"
    ChainFile(path).append({"kind": "update", "text": 'line\nbreak "quoted" \u00e9'}, is_durable=True)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["text"] == 'line\nbreak "quoted" \u00e9'
