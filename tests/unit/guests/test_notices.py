"""Notices of preemption to one process: signals, an address that gives one, and forked children."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from accelerate.guests.preemption import notices as module
from accelerate.guests.preemption.notices import Notices
from tests.ranks import run_on_ranks


def taken(notices: Notices, seconds: float = 10.0) -> str | None:
    """The next notice."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (found := notices.take(0.05)) is not None:
            return found
    return None


def child_of_seconds(seconds: float) -> int:
    """Fork a child that ends with code 7 after that time, if no signal ends it; return once it runs."""
    ready, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"1")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
        os._exit(7)
    os.read(ready, 1)
    return child


def test_a_signal_is_noticed_and_handlers_are_restored() -> None:
    def run() -> tuple[str | None, bool, bool]:
        before = signal.getsignal(signal.SIGUSR1)
        notices = Notices(("SIGUSR1", "SIGNONE"))
        assert notices.start()
        assert notices.take(0.0) is None
        notices.stop()
        is_restored = signal.getsignal(signal.SIGUSR1) == before and signal.set_wakeup_fd(-1) == -1
        again = Notices(("SIGUSR1",))
        again.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        found = taken(again)
        again.ignore()
        again.stop()
        os.kill(os.getpid(), signal.SIGUSR1)  # a scheduler that insists doesn't disturb the end
        return found, is_restored, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN

    assert run_on_ranks(run, 1) == [("SIGUSR1", True, True)]


@pytest.mark.parametrize(("to_parent", "code"), [(True, 7), (False, -signal.SIGTERM)])
def test_a_forked_child_lives_on_where_its_parent_was_signalled_too(to_parent: bool, code: int) -> None:
    def run() -> tuple[str | None, int]:
        notices = Notices(("SIGTERM",))
        notices.start()
        child = child_of_seconds(1.5)
        for pid in (child, os.getpid()) if to_parent else (child,):
            os.kill(pid, signal.SIGTERM)
        found = taken(notices, 10.0 if to_parent else 0.3)
        return found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_on_ranks(run, 1) == [("SIGTERM" if to_parent else None, code)]


def test_a_signal_is_noticed_after_asyncio_took_the_wakeup_descriptor() -> None:
    async def watch() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)

    def run() -> str | None:
        notices = Notices(("SIGUSR1",))
        notices.start()
        asyncio.run(watch())
        os.kill(os.getpid(), signal.SIGUSR1)
        return taken(notices)

    assert run_on_ranks(run, 1) == ["SIGUSR1"]


def test_a_forked_child_ends_by_a_signal_once_the_notice_is_settled() -> None:
    def run() -> tuple[str | None, int]:
        notices = Notices(("SIGTERM",))
        notices.start()
        child = child_of_seconds(60)
        os.kill(os.getpid(), signal.SIGTERM)
        found = taken(notices)
        notices.ignore()
        os.kill(child, signal.SIGTERM)  # as multiprocessing does at the end of the program
        return found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_on_ranks(run, 1) == [("SIGTERM", -signal.SIGTERM)]


def test_an_address_gives_a_notice_once_its_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_URL_SECONDS", 0.02)
    answers = [(404, b""), (200, b"FALSE"), (200, b'{"action": "terminate"}')]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        notices = Notices((), url=f"http://127.0.0.1:{server.server_port}/action")
        notices.start()
        assert taken(notices) == f"the notice at http://127.0.0.1:{server.server_port}/action"
        assert len(answers) == 1
        notices.stop()
    finally:
        server.shutdown()
        server.server_close()
