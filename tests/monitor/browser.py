"""A headless Chromium, spoken to over its DevTools pipe: two file descriptors, messages of JSON with a zero between."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

#: A place in an element, in shares of its width and height.
Place = tuple[float, float]


class Page:
    """One tab. ``problems`` holds what its console and its scripts complained about."""

    def __init__(self, browser: str, folder: Path, *, width: int = 1360, height: int = 1000) -> None:
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        self._program = subprocess.Popen(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                "--remote-debugging-pipe", f"--user-data-dir={folder}/profile", "about:blank",
            ],
            preexec_fn=lambda: _as_three_and_four(read_there, write_there),
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.terminate()
        try:
            self._program.wait(10)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(90.0)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError("the browser doesn't answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise AssertionError("the browser has ended")
            self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, address: str) -> None:
        """The page at ``address`` is loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 90.0) -> Any:
        """The first true value of ``expression``."""
        return self.until(lambda: self.ask(expression), expression, seconds)

    def until(self, found: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
        """What ``found()`` returns, once that is true."""
        deadline = time.monotonic() + seconds
        while not (value := found()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}; problems: {self.problems}")
            time.sleep(0.1)
        return value

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """The window has this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def point_at(self, selector: str, right: float = 0.5, down: float = 0.5) -> None:
        """The mouse is over the element, at these shares of its width and height."""
        box = self.ask(
            f"(b => [b.x, b.y, b.width, b.height])(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        x, y = box[0] + right * box[2], box[1] + down * box[3]
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, selector: str, begin: Place, stop: Place, *, shift: bool = False) -> None:
        """The mouse is dragged over the element, between two places in it."""
        left, top, width, height = self.ask(
            f"(b => [b.x, b.y, b.width, b.height])(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for kind, (right, down) in (("mousePressed", begin), ("mouseMoved", stop), ("mouseReleased", stop)):
            place = {"x": left + right * width, "y": top + down * height, "modifiers": 8 * shift}
            self.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)

    def fill(self, selector: str, text: str) -> None:
        """The field has this text, as if it were typed."""
        self.ask(
            f"(e => {{ e.value = {json.dumps(text)}; e.dispatchEvent(new Event('input')) }})"
            f"(document.querySelector({selector!r}))"
        )

    def picture(self, target: Path, *, whole: bool = False) -> None:
        """``target`` is a PNG of what is seen; of the whole page with ``whole``."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(answer["data"]))


def _as_three_and_four(read: int, write: int) -> None:
    """In the browser's process: it reads from descriptor 3 and writes to 4."""
    high_read, high_write = os.dup(read), os.dup(write)
    while min(high_read, high_write) <= 4:
        high_read, high_write = os.dup(high_read), os.dup(high_write)
    os.dup2(high_read, 3)
    os.dup2(high_write, 4)
