"""The page of a run, live: one server on this machine, the standard library only."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Final, final
from urllib.parse import parse_qs, urlsplit

from .comparing import state_of
from .document import Document
from .reading import RunFiles
from .snapshot import snapshot

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_PLACEHOLDER: Final = "/*DATA*/null/*DATA*/"


def page(content: Document | None = None) -> str:
    """Return the HTML of the page: a live one, or with ``content`` one that contains its data."""
    html = resources.files(__package__ or "accelerate.tools.monitor").joinpath("page.html").read_text("utf-8")
    if content is None:
        return html
    # "</script>" inside a text of the run must not end the element that holds it.
    text = json.dumps(content).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return html.replace(_PLACEHOLDER, text, 1)


@final
class Server(ThreadingHTTPServer):
    """A server of ``/`` and ``/data`` of one run; ``port`` 0 takes a free one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, run: RunFiles, host: str, port: int) -> None:
        self.run = run
        self.lock: threading.Lock = threading.Lock()
        self.host = host
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page for a browser."""
        shown = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host
        return f"http://{shown}:{self.server_address[1]}/"

    def is_addressed_by(self, header: str | None) -> bool:
        """Return whether the Host header names this server, not a foreign page's name for its address."""
        if self.host not in ("127.0.0.1", "localhost", "::1"):
            return True  # a server that is open to the network has other names
        name = (header or "").rpartition(":")[0] or (header or "")
        return name.strip("[]") in ("127.0.0.1", "localhost", "::1")


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
        elif parts.path == "/data":
            self._data(parse_qs(parts.query))
        else:
            self._answer(404, "text/plain", b"There is only / and /data.\n")

    def _data(self, query: dict[str, list[str]]) -> None:
        with self.server.lock:
            run = self.server.run
            run.refresh()
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
        """Ignore requests, which are not worth a line in the terminal."""
