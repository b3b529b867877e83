"""Real processes, without torch: who fails first, who is told, who is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate.errors import LaunchError
from accelerate.launch import streams
from accelerate.launch import supervisor as supervision
from accelerate.launch.plan import LaunchPlan, Logs, Program, parse_tee
from accelerate.launch.supervisor import Supervisor, start_command, supervise
from accelerate.settings import env
from tests.python_path import python_path

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body)
        )
        return path

    return make


def plan_of(script: Path, num_processes: int = 2, logs: Logs | None = None, *arguments: str) -> LaunchPlan:
    return LaunchPlan(
        engine="local",
        argv=Program(str(script), arguments).argv(),
        environment={"WORLD_SIZE": str(num_processes), "PYTHONUNBUFFERED": ""},
        ranks=tuple({"RANK": str(rank)} for rank in range(num_processes)),
        cwd=script.parent,
        logs=logs or Logs(),
    )


def test_success_is_code_0_and_silence(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    code, failures = supervise(plan_of(write("print('rank', rank)")), env.snapshot())
    out, err = capfd.readouterr()
    assert (code, list(failures), err) == (0, [], "")
    assert sorted(out.splitlines()) == ["rank 0", "rank 1"]


def test_the_first_cause_is_printed_last_with_rank_line_and_code(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        """
        if rank == 1:
            raise SystemExit(7) if len(sys.argv) > 1 else ValueError("the reason")
        time.sleep(30)
        """
    )
    started = time.monotonic()
    code, failures = supervise(plan_of(script, 3), env.snapshot())
    assert time.monotonic() - started < 10
    lines = capfd.readouterr().err.splitlines()[-15:]
    assert code == 1
    assert any(line.startswith("First cause: rank 1 of 3") for line in lines)
    assert f"  {script}:5, in <module>" in lines
    assert "ValueError: the reason" in lines
    assert sorted(failure.rank for failure in failures) == [0, 1, 2]


def test_the_exit_code_is_the_first_causes(write: Write) -> None:
    code, _ = supervise(plan_of(write("sys.exit(7) if rank == 1 else time.sleep(30)")), env.snapshot())
    assert code == 7


def test_a_rank_that_only_lost_its_peer_is_not_the_first_cause(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(
        """
        raised = __file__ + ".raised"
        if rank == 0:
            while not os.path.exists(raised):
                time.sleep(0.01)
            raise RuntimeError("[gloo] Connection closed by peer")
        try:
            raise ValueError("the real one")
        except ValueError:
            import traceback
            traceback.print_exc()
            sys.stderr.flush()
            open(raised, "w").close()
            time.sleep(0.2)  # a slow interpreter shutdown
            os._exit(3)
        """
    )
    code, _ = supervise(plan_of(script), env.snapshot())
    assert code == 3
    assert "First cause: rank 1 of 2" in capfd.readouterr().err


def test_a_killed_rank_is_reported_with_its_signal_and_what_the_kernel_knows(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    code, failures = supervise(
        plan_of(write("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(30)")), env.snapshot()
    )
    err = capfd.readouterr().err
    assert code == 137
    assert "rank 0 of 2" in err and "was killed by SIGKILL after" in err and "Its peak memory was" in err
    assert "memory" in err.splitlines()[1] or "out-of-memory" in err
    assert failures[0].peak_memory_mib and failures[0].peak_memory_mib > 1


def test_arguments_and_environment_reach_every_rank_unchanged(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write("print(repr((sys.argv[1:], os.environ['ODD'])))")
    plan = plan_of(script, 2, None, "$HOME", "a b", "`x`", "")
    supervise(plan, {**env.snapshot(), "ODD": "; rm -rf $X\n'\""})
    expected = repr((["$HOME", "a b", "`x`", ""], "; rm -rf $X\n'\""))
    assert capfd.readouterr().out.splitlines() == [expected] * 2


def test_logs_hold_each_ranks_outputs_and_the_terminal_shows_them_too(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write("print('out', rank); print('err', rank, file=sys.stderr)")
    supervise(plan_of(script, 2, Logs(tmp_path / "logs")), env.snapshot())
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["out 0", "out 1"]
    assert sorted(err.splitlines()) == ["err 0", "err 1"]
    assert (tmp_path / "logs/1/stdout.log").read_text() == "out 1\n"
    assert (tmp_path / "logs/0/stderr.log").read_text() == "err 0\n"


def test_lines_that_are_written_in_pieces_dont_mix(
    write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HOLD_SECONDS", 10.0)  # however slow this machine is
    script = write("""
        for piece in 20 * ["a", "b", "c\\n"]:
            os.write(2, piece.encode())
            time.sleep(0.002)
    """)
    supervise(plan_of(script, 4), env.snapshot())
    assert capfd.readouterr().err == 80 * "abc\n"


def test_an_unfinished_line_is_shown_soon_and_the_report_begins_on_a_line_of_its_own(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write("""
        if rank == 0:
            os.write(2, b"50%|####")
            time.sleep(30)
        time.sleep(1)
        sys.exit(3)
    """)
    shown: list[tuple[float, bytes]] = []
    plan = plan_of(script)
    start = time.monotonic()
    Supervisor(
        plan, start_command(plan), env.snapshot(), show_err=lambda data: shown.append((time.monotonic() - start, data))
    ).run()
    assert shown[0][1] == b"50%|####" and shown[1][0] - shown[0][0] > 0.5
    assert shown[1][1].startswith(b"\nFirst cause: rank 1 of 2")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_the_log_and_not_the_run(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs/0").mkdir(parents=True)
    (tmp_path / "logs/0/stdout.log").symlink_to("/dev/full")
    code, _ = supervise(plan_of(write("print('out', rank)"), 2, Logs(tmp_path / "logs")), env.snapshot())
    out = capfd.readouterr().out
    assert code == 0 and {"out 0", "out 1"} <= set(out.splitlines())
    assert "stdout.log ends here: No space left on device. The run continues without it." in out
    assert (tmp_path / "logs/1/stdout.log").read_text() == "out 1\n"


def test_a_folder_that_no_log_can_be_written_to_is_refused(write: Write) -> None:
    with pytest.raises(LaunchError, match=r"--log_dir: /dev/null/logs/0/stdout.log can't be written"):
        supervise(plan_of(write("pass"), 2, Logs(Path("/dev/null/logs"))), env.snapshot())


def test_a_rank_that_goes_on_long_after_the_others_is_named(
    write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "STRAGGLER_SECONDS", 0.2)
    script = write("if rank == 1: time.sleep(2)")
    code, _ = supervise(plan_of(script, 3), env.snapshot())
    assert code == 0
    # On a busy machine rank 2, or rank 0, may still begin when the other has ended.
    said = capfd.readouterr().err
    assert re.search(
        r"ranks 0 and 2 ended with code 0 \d+ s ago, rank 1 still runs\. If it waits for the others, Ctrl-C ends it|"
        r"rank [02] ended with code 0 \d+ s ago, ranks (0 and 1|1 and 2) still run\. If they wait for the other, ",
        said,
    ), said


def test_teed_lines_carry_role_and_rank_also_unfinished_ones(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write("print('a\\nb', end='')")
    supervise(plan_of(script, 2, Logs(None, parse_tee("1"), "trainer")), env.snapshot())
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["[trainer0]:a", "[trainer0]:b", "[trainer1]:a", "[trainer1]:b"]


def test_only_the_teed_ranks_are_prefixed(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    supervise(plan_of(write("print('a')"), 2, Logs(None, parse_tee("1:1"))), env.snapshot())
    assert sorted(capfd.readouterr().out.splitlines()) == ["[default1]:a", "a"]


def test_a_program_that_cant_be_started_leaves_nothing(tmp_path: Path) -> None:
    plan = LaunchPlan("local", ("/no/such/program",), {}, ({"RANK": "0"}, {"RANK": "1"}), cwd=tmp_path)
    with pytest.raises(LaunchError, match="/no/such/program can't be started"):
        supervise(plan, env.snapshot())


def test_outputs_can_be_shown_elsewhere(write: Write) -> None:
    shown: list[bytes] = []
    plan = plan_of(write("print('hello')"))
    Supervisor(plan, start_command(plan), env.snapshot(), shown.append, shown.append).run()
    assert b"".join(shown) == b"hello\nhello\n"


# With a launcher process of its own

LAUNCHER = """
import sys
from pathlib import Path
from accelerate.launch.plan import LaunchPlan, Program
from accelerate.launch.supervisor import Supervisor, start_command
from accelerate.settings import env
plan = LaunchPlan("local", Program(sys.argv[1]).argv(), {"WORLD_SIZE": "2"}, ({"RANK": "0"}, {"RANK": "1"}))
sys.exit(Supervisor(plan, start_command(plan), env.snapshot(), stop_grace_seconds=float(sys.argv[2])).run())
"""


def launch(script: Path, grace_seconds: float = 5.0, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(script), str(grace_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
    )
    return process


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


FAMILY = """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("victim", ["launcher", "rank", "child"])
def test_a_kill_leaves_no_orphans(write: Write, victim: str) -> None:
    script = write(FAMILY if victim != "child" else FAMILY.replace("time.sleep(60)\n", "sys.exit(child.wait())\n"))
    launcher = launch(script)
    families = [[int(pid) for pid in line.split()] for line in read_lines(launcher, 2)]
    target = {"launcher": launcher.pid, "rank": families[0][0], "child": families[0][1]}[victim]
    os.kill(target, signal.SIGKILL)
    _, err = launcher.communicate(timeout=20)
    assert wait_until_gone([pid for family in families for pid in family]) == []
    if victim == "rank":
        assert "was killed by SIGKILL" in "\n".join(err.splitlines()[-15:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_which_may_finish_its_work(write: Write, number: int) -> None:
    script = write(
        """
        def stop(number, frame):
            os.write(1, f"saved {rank}\\n".encode())  # print() may be the very thing that was interrupted
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    launcher = launch(script)
    read_lines(launcher, 2)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert launcher.returncode == 0
    assert "passed on to 2 process(es)" in err


def test_ranks_that_ignore_a_signal_are_killed_after_the_grace_period(write: Write) -> None:
    script = write("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)")
    launcher = launch(script, grace_seconds=0.5)
    read_lines(launcher, 2)
    started = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert 0.4 < time.monotonic() - started < 8
    assert launcher.returncode == 137


def test_a_second_signal_kills_at_once(write: Write) -> None:
    script = write("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)")
    launcher = launch(script, grace_seconds=50)
    read_lines(launcher, 2)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=10)
    assert launcher.returncode == 137


def test_an_unhandled_signal_gives_the_shells_exit_code(write: Write) -> None:
    launcher = launch(write("print('ready', flush=True); time.sleep(60)"))
    read_lines(launcher, 2)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signal.SIGTERM


SAVING = """
    def save(number, frame):
        time.sleep(0.3 * rank)
        os.write(1, f"saved {rank}\\n".encode())
        os._exit(75)
    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(getattr(signal, name), save)
    print("ready", flush=True)
    time.sleep(60)
    """


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preempted_run_says_so_and_gives_the_code_for_another_start(write: Write, number: int) -> None:
    launcher = launch(write(SAVING), ACCELERATE_SAVE_ON_SIGNAL="true")
    read_lines(launcher, 2)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert launcher.returncode == 75
    assert f"received {signal.Signals(number).name}, passed on to 2 process(es)" in err
    assert "preempted: ranks 0 and 1 saved, and ended with exit code 75. Started again, the script resumes" in err
    assert "First cause" not in err


def test_a_rank_that_was_preempted_alone_gives_the_others_time_to_save(write: Write) -> None:
    launcher = launch(
        write("time.sleep(1.0 * rank); print(rank, flush=True); sys.exit(75)"), ACCELERATE_SAVE_ON_SIGNAL="true"
    )
    out, err = launcher.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["0", "1"]
    assert launcher.returncode == 75 and "ranks 0 and 1 saved" in err


def test_a_rank_that_failed_while_another_was_preempted_is_the_cause(write: Write) -> None:
    launcher = launch(
        write("time.sleep(0.5 * rank); sys.exit(75 if rank == 0 else 3)"), ACCELERATE_SAVE_ON_SIGNAL="true"
    )
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 3
    assert "preempted: rank 0 saved, and ended with exit code 75; rank 1 ended otherwise." in err
    assert "First cause: rank 1 of 2" in err


def test_a_script_that_exits_with_75_for_its_own_reason_failed(write: Write) -> None:
    launcher = launch(write("sys.exit(75)"))
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 75
    assert "preempted" not in err and " exited with code 75 after " in err


@pytest.mark.parametrize("code", [75, 99])
def test_ranks_that_recorded_their_save_were_preempted_without_the_variable(write: Write, code: int) -> None:
    """Also those with an exit code of their own choice."""
    mark = "open(os.path.join(os.environ['ACCELERATE_RECORDS_FOLDER'], f'saved_{rank}'), 'w')"
    launcher = launch(write(f"{mark}.write('{code}'); sys.exit({code})"))
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == code and f"ended with exit code {code}" in err
    assert "preempted: rank" in err and "First cause" not in err
