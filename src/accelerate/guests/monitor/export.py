"""Export the page of a run: as self-contained HTML, or as a picture drawn by an installed browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

from ...errors import MissingDependency, SettingError
from .document import Document
from .reading import Curve, RunFiles
from .snapshot import snapshot

_PLACEHOLDER: Final = "/*DATA*/null/*DATA*/"
#: The page and the files inlined into it, so that a saved page is one self-contained file.
_PARTS: Final = ("page.html", "page.css", "charts.js", "page.js", "list.js", "sweep.js", "runs.js")
_STYLE: Final = "/*STYLE*/"
_SCRIPT: Final = "/*SCRIPT*/"


def page(content: Document | None = None) -> str:
    """Return the HTML of the page: a live one, or with ``content`` one that contains its data."""
    files = resources.files(__package__ or "accelerate.guests.monitor")
    html, style, *scripts = (files.joinpath(name).read_text("utf-8") for name in _PARTS)
    html = html.replace(_STYLE, style, 1).replace(_SCRIPT, "\n".join(scripts), 1)
    if content is None:
        return html
    # "</script>" inside a text of the run must not end the element that holds it.
    text = json.dumps(content).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return html.replace(_PLACEHOLDER, text, 1)


_BROWSERS: Final = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge",
    "brave-browser",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)  # fmt: skip
#: The size of a picture in pixels.
WIDTH: Final = 1440
_SECONDS: Final = 60


def export(run: RunFiles, target: Path, *, theme: str = "light") -> None:
    """Write the current state of the run to ``target`` (.html, .png, .json or .csv).

    Raises:
        SettingError: the suffix is another one.
        MissingDependency: there is no browser to draw a .png.
    """
    kind = target.suffix.lower()
    if kind not in (".html", ".png", ".json", ".csv"):
        raise SettingError(f"--export {target}: give a name that ends with .html, .png, .json or .csv, for the format.")
    target.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".csv":
        target.write_text(csv_text(run), encoding="utf-8")
        return
    content = snapshot(run)
    if kind == ".json":
        target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    elif kind == ".html":
        target.write_text(page(content), encoding="utf-8")
    else:
        picture(page(content), target, theme=theme)


def csv_text(run: RunFiles) -> str:
    """Return all numbers of the run as CSV, with one row per step and one column per number, which may be empty."""
    main = run.main
    curves: dict[str, Curve] = {"time": main.times, "epoch": main.epochs, **main.curves} if run.ranks else {}
    for name, curve in run.logged.items():
        curves.setdefault(name, curve)
    columns = {name: dict(zip(curve.steps, curve.values, strict=True)) for name, curve in curves.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *columns])
    for step in sorted(set[int]().union(*columns.values())):
        writer.writerow([step, *(column.get(step, "") for column in columns.values())])
    return text.getvalue()


def find_browser() -> str | None:
    """Return the program of a browser that can draw without a screen, or None."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def picture(html: str, target: Path, *, theme: str = "light") -> None:
    """Draw ``html`` as the PNG file ``target``.

    Raises:
        MissingDependency: there is no browser, or it failed to draw.
    """
    browser = find_browser()
    if browser is None:
        raise MissingDependency(
            "--export to .png needs Chromium, Chrome or Edge on this machine. Export .html, or press PNG on the page."
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "run.html"
        source.write_text(html, encoding="utf-8")
        drawn = Path(folder) / "run.png"
        argv = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", "--virtual-time-budget=2000",
        ]  # fmt: skip
        address = f"{source.as_uri()}?theme={theme}&still"
        height = _height(_run([*argv, f"--window-size={WIDTH},1200", "--dump-dom", address]).stdout)
        done = _run([*argv, f"--window-size={WIDTH},{height}", f"--screenshot={drawn}", address])
        if not drawn.is_file():
            raise MissingDependency(f"{browser} drew nothing (exit code {done.returncode}): {done.stderr[-300:]}")
        shutil.copyfile(drawn, target)


def _height(document: str) -> int:
    """Return the height that the page reports, in pixels, limited to 400 to 12,000."""
    found = re.search(r'data-height="(\d+)"', document)
    return min(max(int(found[1]), 400), 12000) if found else 1600


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
