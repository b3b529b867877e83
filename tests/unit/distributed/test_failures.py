from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from accelerate.distributed.failures import (
    Failure,
    Frame,
    MemoryWatch,
    ScriptEnd,
    first_cause,
    parse_traceback,
    record_uncaught,
    report,
    signal_name,
    write_error_file,
)

TEXT = """progress 10%Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    main()
  File "/home/me/train.py", line 8, in main
    loss = 1 / 0
           ~~^~~
  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 3, in forward
    raise ValueError("a\\nb")
ValueError: a
b
"""


def failure(rank: int, seconds: float, text: str = "", **kwargs: object) -> Failure:
    values: dict[str, object] = {
        "rank": rank,
        "host": "h",
        "pid": 100 + rank,
        "returncode": 1,
        "seconds": seconds,
        "traceback": parse_traceback(text),
        **kwargs,
    }
    return Failure(**values)  # type: ignore[arg-type]


def raised(message: str) -> str:
    return f'Traceback (most recent call last):\n  File "/home/me/t.py", line 3, in f\n    x()\n{message}\n'


CLOSED = 'File "/lib/torch/autograd/graph.py", line 9, in run\n    run()\nRuntimeError: Connection closed by peer'
WAITED = f"Traceback (most recent call last):\n  {CLOSED}\n"


@pytest.mark.parametrize(
    ("failures", "ended", "cause"),
    [
        ([failure(1, 5.0, WAITED)], [ScriptEnd(0, 4.9, "t.py:41")], 0),
        ([failure(1, 5.0, WAITED)], [ScriptEnd(0, 9.0)], 1),  # long after
        ([failure(1, 5.0, WAITED), failure(2, 5.1, WAITED)], [ScriptEnd(3, 4.0), ScriptEnd(0, 4.5)], 3),
        ([failure(1, 5.0, WAITED), failure(0, 5.5, returncode=-15, stopped=True)], [ScriptEnd(0, 4.9)], 0),
        ([failure(1, 5.0, WAITED), failure(0, 5.5, returncode=3)], [ScriptEnd(0, 4.9)], 0),  # by its code
        ([failure(1, 5.0, WAITED), failure(2, 6.0, raised("ValueError: x"))], [ScriptEnd(0, 4.9)], 2),
        ([failure(1, 5.0, raised("MySQLError: Connection closed"))], [ScriptEnd(0, 4.9)], 1),  # the script's own
        ([failure(1, 5.0, WAITED)], [], 1),
    ],
)
def test_a_rank_that_ended_well_while_others_waited_is_the_cause(
    failures: list[Failure], ended: list[ScriptEnd], cause: int
) -> None:
    text = report(failures, 4, ended=ended)
    assert text.startswith(f"First cause: rank {cause} of 4 "), text
    if ended and ended[0].place:
        assert "left the script at t.py:41 after 4.9 s, while rank 1 was at graph.py:9." in text


def test_a_rank_that_still_ran_when_another_timed_out_is_the_cause() -> None:
    late = WAITED.replace("Connection closed by peer", "Timed out waiting 5000ms for recv operation to complete")
    hung = failure(1, 9.0, returncode=-15, stopped=True)
    text = report([failure(0, 5.0, late), hung], 3)
    assert text.startswith("First cause: rank 1 of 3 (host h, pid 101) still ran after 5.0 s, and didn't come"), text
    own = raised("requests.Timeout: timed out")
    assert report([failure(0, 5.0, own), hung], 3).startswith("First cause: rank 0 "), "the script's own"


def test_a_traceback_is_read_with_its_frames_sources_and_whole_message() -> None:
    found = parse_traceback(TEXT)
    assert found is not None
    assert [(frame.file, frame.line) for frame in found.frames][:2] == [
        ("/home/me/train.py", 12),
        ("/home/me/train.py", 8),
    ]
    assert found.frames[1].source == "loss = 1 / 0"
    assert found.message == "ValueError: a\nb"
    assert found.exception == "ValueError: a"


def test_the_users_own_frames_are_shown_and_where_it_was_raised() -> None:
    found = parse_traceback(TEXT)
    assert found is not None
    assert [frame.line for frame in found.shown_frames] == [12, 8, 3]


def test_the_last_of_several_tracebacks_counts() -> None:
    found = parse_traceback(
        raised("KeyError: 1") + "\nDuring handling of the above exception, another...\n\n" + raised("OSError: 2")
    )
    assert found is not None and found.message == "OSError: 2"


def test_a_traceback_that_torch_has_marked_with_the_rank_is_read() -> None:
    marked = "".join(f"[rank1]: {line}\n" for line in raised("ValueError: a\nb").splitlines())
    found = parse_traceback(f"[W] warning\n{marked}terminate called without an active exception\n")
    assert found is not None
    assert (found.frames[0].file, found.message) == ("/home/me/t.py", "ValueError: a\nb")


@pytest.mark.parametrize("text", ["", "no traceback here", "Traceback (most recent call last):\n  File"])
def test_what_is_no_whole_traceback_gives_none(text: str) -> None:
    assert parse_traceback(text) is None


def test_a_real_interpreters_traceback_is_read(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text("def f():\n    {}['missing']\nf()\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    found = parse_traceback(run.stderr)
    assert found is not None
    assert found.exception == "KeyError: 'missing'"
    assert (found.frames[-1].line, found.frames[-1].function, found.frames[-1].source) == (2, "f", "{}['missing']")


def test_the_earliest_failure_is_the_first_cause() -> None:
    failures = [failure(0, 2.0, raised("ValueError: late")), failure(1, 1.0, raised("ValueError: early"))]
    assert first_cause(failures) is failures[1]


def test_a_lost_connection_is_a_consequence_even_when_it_is_seen_first() -> None:
    lost = failure(0, 1.0, raised("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:5"))
    cause = failure(1, 1.1, raised("ValueError: bad"))
    assert first_cause([lost, cause]) is cause


def test_a_rank_that_the_launcher_stopped_is_never_the_first_cause() -> None:
    stopped = failure(0, 0.5, returncode=-15, stopped=True)
    cause = failure(1, 3.0, raised("ValueError: bad"))
    assert first_cause([stopped, cause]) is cause
    assert first_cause([]) is None


def test_a_rank_that_had_raised_before_it_was_stopped_may_be_the_first_cause() -> None:
    slow = failure(0, 0.5, raised("ValueError: first"), returncode=-15)
    quick = failure(1, 0.6, raised("ValueError: second"))
    assert first_cause([quick, slow]) is slow


GROUP = """ValueError: inner

The above exception was the direct cause of the following exception:

  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 6, in main
  |     raise ExceptionGroup("several", errors) from error
  | ExceptionGroup: several (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/data.py", line 3, in read
    |     raise OSError("one")
    | OSError: one
    +---------------- 2 ----------------
    | KeyError: 'two'
    +------------------------------------
"""


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
@pytest.mark.parametrize("after", ["", "done\n"])
def test_an_exception_group_is_read_with_its_members(prefix: str, after: str) -> None:
    found = parse_traceback("".join(f"{prefix}{line}\n" for line in GROUP.splitlines()) + after)
    assert found is not None
    assert [(frame.file, frame.line) for frame in found.frames] == [("/home/me/train.py", 6)]
    assert found.message.splitlines()[:3] == [
        "ExceptionGroup: several (2 sub-exceptions)",
        "OSError: one",
        "KeyError: 'two'",
    ]


def test_what_failed_after_an_exception_group_counts() -> None:
    found = parse_traceback(GROUP + TEXT)
    assert found is not None and found.exception == "ValueError: a"


def test_the_report_fits_on_a_screen_and_begins_with_the_first_cause() -> None:
    long = raised("ValueError: " + "\n".join(["x" * 500] * 40))
    failures = [failure(rank, rank + 1.0, long) for rank in range(64)]
    lines = report(failures, 64).splitlines()
    assert len(lines) <= 14
    assert lines[0].startswith("First cause: rank 0 of 64 (host h, pid 100) raised and exited with code 1 after 1.0 s.")
    assert "  /home/me/t.py:3, in f" in lines
    assert lines[3] == "ValueError: " + "x" * 500, "the cause is cut"
    assert all(len(line) <= 160 for line in lines[6:])


def test_a_killed_rank_is_reported_with_its_signal_and_memory() -> None:
    killed = failure(0, 1.0, returncode=-9, peak_memory_mib=512.4, memory="Out of memory: the kernel killed 1.")
    text = report([killed, failure(1, 1.2, returncode=-15, stopped=True)], 2)
    assert "was killed by SIGKILL after" in text and "Its peak memory was 512 MiB." in text
    assert "Out of memory: the kernel killed 1." in text
    assert "Rank 1 was stopped by the launcher with SIGTERM" in text
    assert killed.exit_code == 137


def test_signals_without_a_name_are_numbered() -> None:
    assert (signal_name(9), signal_name(99)) == ("SIGKILL", "signal 99")


def test_out_of_memory_kills_since_the_start_are_evidence(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 0\noom_kill 3\n")
    (tmp_path / "memory.max").write_text(f"{512 * 2**20}\n")
    watch = MemoryWatch(tmp_path, tmp_path / "vmstat", {"": "/"})
    assert "no out-of-memory kill" in watch.evidence()
    events.write_text("low 0\noom 0\noom_kill 5\n")
    assert "killed 2 process(es)" in watch.evidence()
    assert "limit is 512 MiB" in watch.evidence()


def test_where_the_kernel_tells_nothing_the_evidence_says_so(tmp_path: Path) -> None:
    assert "can't be read" in MemoryWatch(tmp_path, tmp_path / "vmstat", {}).evidence()


def test_an_uncaught_exception_is_written_where_the_launcher_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *details: shown.append(details[1]))
    record_uncaught({"TORCHELASTIC_ERROR_FILE": str(path)}.get)
    record_uncaught({"TORCHELASTIC_ERROR_FILE": str(path)}.get)  # a second time changes nothing
    try:
        raise ValueError("bad")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    details = json.loads(path.read_text())["message"]
    assert details["message"] == "ValueError: bad"
    assert "in test_an_uncaught" in details["extraInfo"]["py_callstack"]
    assert int(details["extraInfo"]["timestamp"]) > 0
    assert len(shown) == 1


def test_without_a_launcher_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    record_uncaught({}.get)
    assert sys.excepthook is before


IN_A_WORKER = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    for batch in loader:
  File "/usr/lib/python3/site-packages/torch/_utils.py", line 785, in reraise
    raise exception
LookupError: Caught LookupError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch
    data = [self.dataset[idx] for idx in possibly_batched_index]
  File "/home/me/data.py", line 8, in __getitem__
    raise LookupError("row 5 is damaged")
LookupError: row 5 is damaged

"""


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "[default1]:"])
def test_the_cause_inside_a_worker_of_a_loader_is_shown(prefix: str) -> None:
    text = "".join(f"{prefix}{line}".rstrip() + "\n" for line in IN_A_WORKER.splitlines())
    found = parse_traceback(text + "another line\n" * bool(prefix))
    assert found is not None
    assert found.exception == "LookupError: row 5 is damaged"
    assert found.shown_frames[-1] == Frame(
        "/home/me/data.py", 8, "__getitem__", 'raise LookupError("row 5 is damaged")'
    )


def test_the_file_of_an_exception_is_whole_at_any_moment(tmp_path: Path) -> None:
    """torch's agent reads it once the process is gone, which may have been ended while it wrote."""
    path, error = tmp_path / "error.json", ValueError("x" * 3_000_000)
    writing = threading.Thread(target=write_error_file, args=(path, error))
    writing.start()
    while not path.exists():
        assert writing.is_alive() or path.exists()
    assert json.loads(path.read_text())["message"]["message"].startswith("ValueError: xxx")
    writing.join()
    assert [one.name for one in tmp_path.iterdir()] == ["error.json"]
    write_error_file(path, KeyError("later"))
    assert "KeyError" not in path.read_text(), "the first one is kept"
