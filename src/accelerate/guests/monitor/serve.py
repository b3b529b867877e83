"""The live page of a run: a server on this machine that needs only the standard library.

With ``accelerate launch --monitor``, the launcher serves the page of the run while the run lasts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, final
from urllib.parse import parse_qs, urlsplit

from ...errors import SettingError
from ...launch.plan import LaunchPlan
from ...settings import env
from .export import csv_text, page
from .reading import write_note
from .records import FOLDER_VARIABLE
from .runs import Runs
from .snapshot import snapshot, state_of

#: The port of a page, unless another one is given.
PORT: Final = 8321
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
#: The maximum size of a note.
_MAX_BYTES: Final = 65536
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


@final
class Server(ThreadingHTTPServer):
    """A server of the page and of the data of the runs in one folder; ``port`` 0 takes a free port."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: Runs, host: str, port: int) -> None:
        self.runs = runs
        self.lock: threading.Lock = threading.Lock()
        self.host = host
        self.asked_at: float = -math.inf  # when a page last requested data
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page for a browser."""
        shown = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host
        return f"http://{shown}:{self.server_address[1]}/"

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches the server; then its page may edit the runs' notes."""
        return self.host in _LOOPBACK

    def is_addressed_by(self, header: str | None) -> bool:
        """Return whether the Host header names this server, and isn't a foreign name for its address."""
        if not self.is_private:
            return True  # a server that is open to the network has other names
        name = (header or "").rpartition(":")[0] or (header or "")
        return name.strip("[]") in _LOOPBACK


def server_of(runs: Runs, host: str = "127.0.0.1", port: int | None = None) -> Server:
    """Return a server on ``port``; by default on the usual one, or on any free one if that is taken.

    Raises:
        OSError: ``port`` is taken.
    """
    try:
        return Server(runs, host, PORT if port is None else port)
    except OSError:  # taken, perhaps by another run's page
        if port is not None:
            raise
        return Server(runs, host, 0)


@final
class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the page, its data, or 404."""
        if not self.server.is_addressed_by(self.headers.get("Host")):
            self._answer(403, "text/plain", b"This server answers to 127.0.0.1 and localhost only.\n")
            return
        parts = urlsplit(self.path)
        if parts.path == "/":
            self._answer(200, "text/html; charset=utf-8", page().encode())
        elif parts.path == "/runs":
            with self.server.lock:
                content = {**self.server.runs.listed(), "is_editable": self.server.is_private}
            self._answer(200, "application/json", json.dumps(content).encode())
        elif parts.path in ("/data", "/csv"):
            self.server.asked_at = time.monotonic()
            self._data(parts.path, parse_qs(parts.query))
        else:
            self._answer(404, "text/plain", b"There is only /, /runs, /data and /csv.\n")

    def do_POST(self) -> None:
        """Write the note of a run; a page of another origin can't send JSON without being asked first."""
        parts, size = urlsplit(self.path), self.headers.get("Content-Length", "")
        content = self.rfile.read(int(size)) if size.isdigit() and int(size) <= _MAX_BYTES else None
        is_json = self.headers.get("Content-Type") == "application/json"
        is_ours = self.server.is_private and self.server.is_addressed_by(self.headers.get("Host"))
        if content is None or parts.path != "/note" or not (is_ours and is_json):
            self.close_connection = content is None
            self._answer(403, "text/plain", b"Notes are written as JSON, by a page on this machine.\n")
            return
        with self.server.lock:
            run = self.server.runs.find(parse_qs(parts.query).get("run", [""])[0])
            if run is None:
                self._answer(404, "text/plain", b"There is no such run here.\n")
                return
            try:
                write_note(run, json.loads(content))
            except (OSError, ValueError) as error:
                self._answer(400, "text/plain", f"The note can't be written: {error}.\n".encode())
                return
        self._answer(204, "text/plain", b"")

    def _data(self, path: str, query: dict[str, list[str]]) -> None:
        with self.server.lock:
            run = self.server.runs.find(query.get("run", [""])[0])
            if run is None:
                self._answer(404, "text/plain", b"There is no such run here.\n")
                return
            run.refresh()
            if path == "/csv":
                self._answer(200, "text/csv; charset=utf-8", csv_text(run).encode())
                return
            # The state is part of the tag, as a run becomes silent without a new version.
            tag = f"{run.version}-{state_of(run, time.time())}"
            content = None if query.get("known") == [tag] else snapshot(run)
        if content is None:
            self._answer(204, "text/plain", b"")
            return
        self._answer(200, "application/json", json.dumps({**content, "tag": tag}).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing, because requests aren't worth a line in the terminal."""


# --------------------------------------------------------------------------------------------------
# The page of a run that `accelerate launch --monitor` starts

_FOLDERS: Final = "runs"
#: How long to wait until an open page has requested the end of the run; it sends one request per second.
_LAST_SECONDS: Final = 2.5


def begin(args: argparse.Namespace) -> Callable[[LaunchPlan], AbstractContextManager[LaunchPlan]]:
    """Choose the new run's folder; return a function that serves its page around the run."""
    folder = folder_of_launch(args)

    def around(plan: LaunchPlan) -> AbstractContextManager[LaunchPlan]:
        check_shown(plan)
        return shown(plan, folder)

    return around


def folder_of_launch(args: argparse.Namespace) -> Path:
    """Return the run's folder: the flag's, the environment's, or ``runs/<script>_<time>``; its outputs go there too."""
    given = getattr(args, "monitor", True)
    named = given if isinstance(given, str) else env.read(FOLDER_VARIABLE)
    if not named:
        named = f"{_FOLDERS}/{Path(str(args.training_script)).stem or 'run'}_{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(named).expanduser().absolute()
    if getattr(args, "log_dir", None) is None:
        args.log_dir = str(folder / "logs")
    return folder


def check_shown(plan: LaunchPlan) -> None:
    """Raise if no page can show the run.

    Raises:
        SettingError: another program starts the ranks, so this machine may not see them; or the run survives lost
            ranks, which share no losses.
    """
    if not plan.is_here:
        raise SettingError(
            f"--monitor shows a run that this launch starts here, and {plan.engine} hands it on. Set "
            f"{FOLDER_VARIABLE}=FOLDER for the ranks, one that this machine sees too, and run `accelerate monitor` "
            "there."
        )
    if plan.survives_lost_ranks:
        raise SettingError(
            f"--monitor shows a mean over all ranks, and those of this launch don't gather it, as any may be lost "
            f"({plan.engine}). Leave one of the two out."
        )


@contextlib.contextmanager
def shown(plan: LaunchPlan, folder: Path) -> Generator[LaunchPlan]:
    """Serve the page of the run in ``folder`` while the block runs; yield the plan whose ranks report there."""
    folder.mkdir(parents=True, exist_ok=True)
    with server_of(Runs(folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        name = os.path.relpath(folder)
        print(f"accelerate launch: showing the run at {server.url} (later: `accelerate monitor {name}`)",
              file=sys.stderr, flush=True)  # fmt: skip
        _open(server.url)
        try:
            yield dataclasses.replace(plan, environment={**plan.environment, FOLDER_VARIABLE: str(folder)})
        finally:
            if time.monotonic() - server.asked_at < _LAST_SECONDS:
                time.sleep(_LAST_SECONDS)
            server.shutdown()


def _open(url: str) -> None:
    """Open a browser if a person is at a terminal with a screen."""
    has_screen = sys.platform in ("darwin", "win32") or env.read("DISPLAY") or env.read("WAYLAND_DISPLAY")
    if has_screen and sys.stderr.isatty():
        import webbrowser

        webbrowser.open(url)
