"""The supervisor of one host's ranks: no process is left behind, and the first cause of a failure is printed last.

Torch-free. Every rank leads a session (so a process group) of its own; on Linux the kernel kills it when this
process dies, and everywhere a reaper process kills its whole group. SIGINT, SIGTERM and SIGHUP are passed on to
every rank, which then has a grace period, SIGUSR1 and SIGUSR2 without one. When one rank fails, the others are stopped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Final, Protocol, final

from ..distributed.failures import (
    Failure,
    MemoryWatch,
    ScriptEnd,
    ended_preempted,
    first_cause,
    parse_traceback,
    report,
    signal_name,
)
from ..errors import LaunchError
from ..seams import members
from ..wording import by_number, some_ranks
from .plan import LaunchPlan, Stream
from .records import EndRecords
from .streams import HOLD_SECONDS, OutputStream, write_all

#: A rank that is stopped by the user or the scheduler may save its work for this long.
STOP_GRACE_SECONDS: Final = 30.0
#: A rank that is stopped because another one failed has less to save.
FAILURE_GRACE_SECONDS: Final = 10.0
#: After the first failure the other ranks have this long to print their own errors before they are stopped.
OUTPUT_GRACE_SECONDS: Final = 0.3
#: Ranks usually end together. This long after the first end, one line names the ranks that still run.
STRAGGLER_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_FORWARDED: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
#: Notices, which are passed on: what ranks do with them is theirs.
_NOTICES: Final = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> Callable[[], None]:
    """Return a function for a new process to call, so that the kernel kills it when its parent dies (Linux; elsewhere a
    no-op).
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arrange


class Starter(Protocol):
    """A function that starts one rank, as leader of a session of its own, and returns its process id."""

    def __call__(
        self, local_rank: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> int: ...


def start_command(plan: LaunchPlan) -> Starter:
    """Return a starter that runs the plan's command as a new program."""
    tie_to_parent = die_with_parent()

    def start(local_rank: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> int:
        try:
            process = subprocess.Popen(
                plan.argv,
                env=dict(environment),
                cwd=plan.cwd,
                stdin=None if local_rank == 0 else subprocess.DEVNULL,  # one terminal has one reader
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=tie_to_parent,
            )
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} can't be started: {error}") from error
        process.returncode = 0  # the supervisor waits for it, with wait4; Popen shall not
        return process.pid

    return start


@final
class Reaper:
    """The reaper process: it outlives this one by just long enough to kill the process groups that are left."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("reaper.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed; on Linux the kernel still kills the ranks with this process
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def add(self, pid: int) -> None:
        """Register the process group of ``pid`` to be killed when this process dies."""
        self._send(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Unregister the process group of ``pid``, which has ended."""
        self._send(f"-{pid}\n")

    def remove_at_end(self, folder: Path) -> None:
        """Register ``folder`` to be removed when this process dies."""
        self._send(f"={folder}\n")

    def close(self) -> None:
        """Let the reaper kill what is still registered, and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


@final
@dataclass
class Rank:
    """The process of one rank and, after its end, its exit code and usage."""

    rank: int
    pid: int
    streams: list[OutputStream]
    log: Path | None
    returncode: int | None = None
    ended_at: float = 0.0
    peak_memory_mib: float = 0.0
    #: When this process was first signaled to stop, by us.
    stopped_at: float | None = None
    pidfd: int | None = None
    failure: Failure | None = None
    #: It ended, and the run goes on without it, or with another process in its place.
    is_given_up: bool = False

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    def send(self, number: int) -> None:
        """Send the signal to the rank's process only, which forwards it to its children."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the rank's whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@final
@dataclass
class _Stop:
    """A stop in progress: the signal that was received, whether the ranks were signaled, and their deadline."""

    deadline: float
    #: The signal that this process received; None when a rank failed.
    received: int | None = None
    sent: bool = False


@final
@dataclass(frozen=True)
class Loss:
    """The decision about a run after the process of one of its ranks has ended.

    Attributes:
        goes_on: the others go on without it, although it has failed.
        message: what is said about that.
        replacement: the environment of a new process in its place; None: there is none.
        given_up: further ranks of which the run needs nothing any more.
    """

    goes_on: bool = False
    message: str = ""
    replacement: Mapping[str, str] | None = None
    given_up: Collection[int] = ()


class LossPolicy(ABC):
    """Decides what becomes of a run when one of its ranks is lost. Without one, the run ends."""

    @abstractmethod
    def begin(self, selector: selectors.BaseSelector, reaper: Reaper) -> None:
        """Prepare what the ranks need, before the first is started."""

    @abstractmethod
    def environment(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one rank, whose ``plan`` says the others."""

    @abstractmethod
    def ended(self, rank: int, code: int, plan: Mapping[str, str], *, has_saved: bool, may_go_on: bool) -> Loss:
        """Return what becomes of the run after ``rank`` has ended with exit code ``code``.

        Args:
            plan: the variables of the rank.
            has_saved: it has saved, to be started again.
            may_go_on: it has failed, and the run isn't being stopped.
        """

    @abstractmethod
    def missed(self, well: Collection[int]) -> str:
        """Describe the missing work of a run whose ranks ``well`` ended with code 0; "" without any."""


@final
@dataclass
class Supervisor:
    """The supervisor of a plan's ranks on this host."""

    plan: LaunchPlan
    start: Starter
    environment: Mapping[str, str]
    show_out: Callable[[bytes], None] | None = None
    show_err: Callable[[bytes], None] | None = None
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS
    #: Print the first cause at the end; callers that raise it leave it to the exception.
    report_failures: bool = True
    #: What becomes of the run when a rank is lost; None: it ends.
    losses: LossPolicy | None = None
    failures: list[Failure] = field(default_factory=list)
    _records: EndRecords = field(default_factory=EndRecords)
    _ranks: list[Rank] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _stop: _Stop | None = None
    _first_end: float | None = None
    #: When to print which ranks still run, while that is due.
    _straggler_report_at: float | None = None
    _started_at: float = 0.0
    _started: float = 0.0  # by the clock that ranks have too
    #: Ranks whose scripts ended without an exception, known at the end.
    ended: list[ScriptEnd] = field(default_factory=list)

    @property
    def received(self) -> int | None:
        """The signal from outside that ended the run, None if there was none."""
        return None if self._stop is None else self._stop.received

    @property
    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.is_running]

    # the run

    def run(self) -> int:
        """Run all ranks until none is left and return the exit code of the whole run.

        Raises:
            LaunchError: this system lacks what processes are supervised with.
        """
        if not hasattr(os, "wait4"):
            raise LaunchError(
                f"Several processes are supervised on POSIX systems only, and this one ({sys.platform}) isn't one. "
                "Launch one process, or start the ranks with torchrun, which `Accelerator()` joins as well."
            )
        memory = MemoryWatch()
        reaper = Reaper()
        try:
            with self._signals() as signals:
                self._selector.register(signals, selectors.EVENT_READ, None)
                if self.losses is not None:
                    self.losses.begin(self._selector, reaper)
                self._start_all(reaper)
                while self._running:
                    self._wait(signals)
                    self._reap(reaper, memory)
                    self._advance_stop()
                self._finish(memory)
        finally:
            for rank in self._ranks:
                if rank.is_running or self._stop is not None:
                    rank.kill_group()
                if rank.is_running:
                    os.waitpid(rank.pid, 0)
            reaper.close()
            self._close()
            self._records.close()
        return self._exit_code()

    def _start_all(self, reaper: Reaper) -> None:
        self._started_at, self._started = time.monotonic(), time.time()
        self._records.note_logs(self.plan.logs.directory)
        for local_rank, environment in enumerate(self.plan.environments(self.environment)):
            self._start(local_rank, self._environment_of(environment), reaper)

    def _environment_of(self, plan: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one rank, whose ``plan`` says the others."""
        if self.losses is not None:
            return self.losses.environment(plan)
        around = members()  # of a launch around this one
        return {name: value for name, value in plan.items() if name not in around}

    def _start(self, local_rank: int, environment: dict[str, str], reaper: Reaper) -> None:
        """Start the process of one rank."""
        environment |= self._records.environment
        number = int(environment.get("RANK", local_rank))
        with contextlib.ExitStack() as child_side:
            streams, stdout, stderr = self._streams(local_rank, number, child_side)
            pid = self.start(local_rank, environment, stdout, stderr)
        reaper.add(pid)
        rank = Rank(number, pid, streams, self.plan.logs.file(number, "stderr"))
        self._ranks.append(rank)
        for stream in streams:
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # not on this kernel: polling does it
                rank.pidfd = os.pidfd_open(pid)
                self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    def _streams(
        self, local_rank: int, rank: int, child_side: contextlib.ExitStack
    ) -> tuple[list[OutputStream], int | None, int | None]:
        """Return the output streams to read here and the child's (stdout, stderr) descriptors, None to inherit."""
        logs, teed = self.plan.logs, self.plan.logs.teed(local_rank)
        appends = any(before.rank == rank for before in self._ranks)  # to the log of the process that was lost
        streams: list[OutputStream] = []
        of_child: list[int | None] = [None, None]
        outputs = ((1, "stdout", Stream.OUT, self.show_out), (2, "stderr", Stream.ERR, self.show_err))
        for index, (like, name, output, show) in enumerate(outputs):
            prefix = f"[{logs.role}{rank}]:" if output in teed else ""
            # the errors are always read here, for the report of a failure
            if output is Stream.OUT and not prefix and logs.directory is None and show is None:
                continue
            ours, theirs = open_channel(like)
            child_side.callback(os.close, theirs)
            of_child[index] = theirs
            show = show or functools.partial(write_all, like)
            streams.append(OutputStream(ours, show, prefix=prefix, log=logs.file(rank, name), appends=appends))
        return streams, of_child[0], of_child[1]

    def _wait(self, signals: int) -> None:
        """Wait until a rank writes or ends or a signal arrives, at most until the next deadline, and handle it."""
        streams = [stream for rank in self._ranks for stream in rank.streams]
        waits: list[float] = []
        if any(rank.pidfd is None for rank in self._running):
            waits.append(_POLL_SECONDS)
        if self._stop is not None:
            waits += [self._stop.deadline - time.monotonic(), OUTPUT_GRACE_SECONDS]
        if self._straggler_report_at is not None:
            waits.append(self._straggler_report_at - time.monotonic())
        if any(stream.holds for stream in streams):
            waits.append(HOLD_SECONDS)
        for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
            if key.fd == signals:
                for number in os.read(signals, 64):
                    self._receive(number)
            elif isinstance(key.data, OutputStream) and not key.data.read():
                self._selector.unregister(key.fd)
            elif isinstance(key.data, FunctionType | MethodType):
                key.data()
        for stream in streams:
            stream.release()

    def _reap(self, reaper: Reaper, memory: MemoryWatch) -> None:
        """Record the ranks that have ended, and begin to stop the others after a failure."""
        ended: list[Rank] = []
        for rank in self._running:
            pid, status, usage = os.wait4(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            rank.returncode = os.waitstatus_to_exitcode(status)
            rank.ended_at = time.monotonic()
            rank.peak_memory_mib = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
            if rank.pidfd is not None:
                self._selector.unregister(rank.pidfd)
                os.close(rank.pidfd)
            ended.append(rank)
        ended = [rank for rank in ended if not self._goes_on_without(rank, reaper)]
        self._report_stragglers(ended)
        for rank in ended:
            if rank.returncode != 0 and self._stop is None:
                has_saved = self._is_preempted(rank)  # as the others are about to be
                grace = self.stop_grace_seconds if has_saved else OUTPUT_GRACE_SECONDS
                self._stop = _Stop(time.monotonic() + grace)
            if rank.returncode != 0:
                rank.kill_group()
            reaper.remove(rank.pid)

    def _goes_on_without(self, rank: Rank, reaper: Reaper) -> bool:
        """Return whether the others go on without ``rank``, which has ended; another process may take its place."""
        if self.losses is None:
            return False
        plan = next(one for one in self.plan.environments(self.environment) if int(one["RANK"]) == rank.rank)
        code, may_go_on = rank.returncode or 0, bool(rank.returncode) and self._stop is None
        loss = self.losses.ended(rank.rank, code, plan, has_saved=self._is_preempted(rank), may_go_on=may_go_on)
        for other in self._running:
            if other.rank in loss.given_up:
                other.is_given_up = True
                other.kill_group()
        if not loss.goes_on:
            return False
        rank.is_given_up = True
        self._print(f"accelerate launch: rank {rank.rank} was lost ({_how_it_ended(rank)}); {loss.message}")
        rank.kill_group()
        reaper.remove(rank.pid)
        if loss.replacement is not None:
            self._start(int(plan["LOCAL_RANK"]), dict(loss.replacement), reaper)
        return True

    def _report_stragglers(self, ended: Sequence[Rank]) -> None:
        """Print once which ranks still run a while after another has ended with code 0."""
        now = time.monotonic()
        if self._first_end is None and ended:
            self._first_end = now
            self._straggler_report_at = now + STRAGGLER_SECONDS
        if self._straggler_report_at is None or now < self._straggler_report_at:
            return
        self._straggler_report_at = None
        running = [rank.rank for rank in self._running]
        done = [rank.rank for rank in self._ranks if not rank.is_running]
        if self._stop is None and running:
            self._print(
                f"accelerate launch: {some_ranks(done)} ended with code 0 {now - (self._first_end or now):.0f} s ago, "
                f"{some_ranks(running)} still {by_number(running, 'runs. If it waits', 'run. If they wait')} for "
                f"{by_number(done, 'the other', 'the others')}, Ctrl-C ends {by_number(running, 'it', 'them')}."
            )

    # stopping

    def _receive(self, number: int) -> None:
        """Pass a signal from outside on to all ranks; the second one kills them, unless these are notices."""
        now = time.monotonic()
        if number in _NOTICES:
            self._print(
                f"accelerate launch: received {signal_name(number)}, passed on to {len(self._running)} process(es)."
            )
            for rank in self._ranks:
                rank.send(number)
            return
        if self._stop is not None and self._stop.received is not None:
            self._stop.deadline = now
            return
        self._stop = _Stop(now + self.stop_grace_seconds, received=number, sent=True)
        self._print(
            f"accelerate launch: received {signal_name(number)}, passed on to {len(self._running)} process(es); "
            f"they have {self.stop_grace_seconds:.0f} s to finish. Send it again to kill them now."
        )
        self._signal_running(number)

    def _advance_stop(self) -> None:
        if self._stop is None or time.monotonic() < self._stop.deadline:
            return
        if not self._stop.sent:
            self._stop = _Stop(time.monotonic() + self.failure_grace_seconds, self._stop.received, sent=True)
            self._signal_running(signal.SIGTERM)
            return
        self._signal_running(signal.SIGKILL)
        self._stop.deadline = time.monotonic() + 1.0

    def _signal_running(self, number: int) -> None:
        """Signal the ranks that run to stop; SIGKILL kills their process groups."""
        for rank in self._running:
            rank.stopped_at = rank.stopped_at or time.monotonic()
            if number == signal.SIGKILL:
                rank.kill_group()
            else:
                rank.send(number)

    # the end

    def _finish(self, memory: MemoryWatch) -> None:
        """Show the rest of all outputs, collect the failures and report them."""
        for rank in self._ranks:
            for stream in rank.streams:
                stream.drain()
                stream.flush()
        self.failures = [failure for rank in self._ranks if (failure := self._failure_of(rank, memory)) is not None]
        self._records.write(self.failures)
        well = [rank for rank in self._ranks if rank.returncode == 0]
        self.ended = self._records.script_ends(
            self._started, [ScriptEnd(rank.rank, rank.ended_at - self._started_at, pid=rank.pid) for rank in well]
        )
        if preempted := ended_preempted(self.failures):
            self._print(f"accelerate launch: {preempted}")
        if self._stop is not None and self._stop.received is not None:
            return
        first = first_cause(self.failures)
        if first is not None and not first.is_preempted and self.report_failures:
            is_inside_line = any(stream.is_inside_line for rank in self._ranks for stream in rank.streams)
            self._print("\n" * is_inside_line + report(self.failures, self.plan.num_processes, ended=self.ended))

    def _failure_of(self, rank: Rank, memory: MemoryWatch) -> Failure | None:
        if not rank.returncode or rank.is_given_up:
            return None
        errors = rank.streams[-1]
        traceback = parse_traceback(errors.text()) if rank.returncode > 0 or errors.traceback_at else None
        seen_at = rank.ended_at
        if traceback is not None and errors.traceback_at is not None:
            seen_at = min(seen_at, errors.traceback_at)
        stopped = rank.stopped_at is not None and rank.stopped_at <= seen_at
        raised_before = rank.stopped_at is not None and not stopped and rank.returncode < 0
        killed = rank.returncode == -signal.SIGKILL and not stopped and not raised_before
        return Failure(
            rank=rank.rank,
            host=socket.gethostname(),
            pid=rank.pid,
            returncode=rank.returncode,
            seconds=seen_at - self._started_at,
            traceback=traceback,
            last_lines=tuple(line for line in errors.text().splitlines()[-8:] if line.strip()),
            peak_memory_mib=rank.peak_memory_mib if killed else None,
            memory=memory.evidence(rank.pid) if killed else "",
            stopped=stopped,
            was_leaving=raised_before and self.received is None,
            log=rank.log,
            is_preempted=self._is_preempted(rank),
        )

    def _is_preempted(self, rank: Rank) -> bool:
        return self._records.is_preempted(rank.rank, rank.returncode, {**self.environment, **self.plan.environment})

    def _exit_code(self) -> int:
        """Return the exit code of the first cause, 0 without one; 1 where a lost rank is missed."""
        first = first_cause(self.failures)
        if first is not None:
            return first.exit_code
        missed = self.losses.missed([rank.rank for rank in self._ranks if rank.returncode == 0]) if self.losses else ""
        if missed:
            self._print(f"accelerate launch: {missed}")
        return int(bool(missed))

    def _print(self, text: str) -> None:
        show = self.show_err or functools.partial(write_all, 2)
        show(f"{text}\n".encode())

    def _close(self) -> None:
        self._selector.close()
        for rank in self._ranks:
            for stream in rank.streams:
                stream.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """Catch the forwarded signals in this block and yield a descriptor on which their numbers arrive."""
        read_end, write_end = os.pipe()

        def note(number: int, _frame: FrameType | None) -> None:
            os.write(write_end, bytes([number]))

        before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in (*_FORWARDED, *_NOTICES):
                before[number] = signal.signal(number, note)
        try:
            yield read_end
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read_end)
            os.close(write_end)


def _how_it_ended(rank: Rank) -> str:
    code = rank.returncode or 0
    return signal_name(-code) if code < 0 else f"exit code {code}"


def open_channel(like: int) -> tuple[int, int]:
    """Open (our end, the child's end) of a channel: a terminal where descriptor ``like`` is one, else a pipe.

    A progress bar that asks whether it writes to a terminal gets the same answer as without a launcher.
    """
    if not os.isatty(like):
        ours, theirs = os.pipe()
    else:
        import fcntl
        import pty
        import termios
        import tty

        ours, theirs = pty.openpty()
        tty.setraw(theirs)
        with contextlib.suppress(OSError):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    os.set_blocking(ours, False)
    return ours, theirs


def supervise(plan: LaunchPlan, environment: Mapping[str, str]) -> tuple[int, Sequence[Failure]]:
    """Run the plan's command once for each of its ranks and return (exit code, failures)."""
    supervisor = Supervisor(plan, start_command(plan), environment, stop_grace_seconds=plan.grace_seconds)
    return supervisor.run(), supervisor.failures
