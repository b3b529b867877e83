"""Where the repository of this clone lies: the header of the site links it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit


def origin(folder: Path) -> str:
    """Return the remote that ``folder`` was cloned from; empty without git or without a remote."""
    try:
        command = ["git", "-C", str(folder), "config", "--get", "remote.origin.url"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def web_address(remote: str) -> str | None:
    """Return the https address of a git remote, without user and password; None if it has none."""
    if "://" not in remote and (scp := re.match(r"(?:[^@/]+@)?([^:/]+):(.+)", remote)):
        remote = f"ssh://{scp[1]}/{scp[2]}"
    parts = urlsplit(remote)
    if parts.scheme not in ("https", "http", "ssh", "git") or not parts.hostname:
        return None
    return f"https://{parts.hostname}/{parts.path.strip('/').removesuffix('.git')}"
