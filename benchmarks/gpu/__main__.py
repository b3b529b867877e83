"""Proof and figures of one stay on a CUDA device.

    make gpu                                          every part, at most 25 minutes, then docs/gpu.md
    python3 -m benchmarks.gpu --part b --seconds 30   one part
    python3 -m benchmarks.gpu --limit 120             every part, each for at most two minutes
    python3 -m benchmarks.gpu --part d --only loading some rows of a part; its others stay
    python3 -m benchmarks.gpu --dry                   every part small, on the CPU, in one process
    python3 -m benchmarks.gpu --page docs/gpu.md      only the page, from the JSON that is there

Each part is a process with a limit and writes one JSON; one that fails leaves the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import page, workers
from .sheet import TITLES, Sheet, about_the_machine

PARTS = {"a": "smoke", "b": "step", "c": "overlap", "d": "big", "e": "saves"}
FOUND = workers.ROOT / "benchmarks" / "gpu" / "found"
LIMITS = {"a": 270, "b": 480, "c": 240, "d": 210, "e": 270}  # seconds; 24.5 minutes in all


def limit_of(part: str, arguments: argparse.Namespace) -> float:
    """Return the seconds that a part may take."""
    return min(LIMITS[part], arguments.limit or LIMITS[part])


def run_part(
    part: str, folder: Path, *, dry: bool, seconds: float, limit: float, only: tuple[str, ...] = (), fail: bool = False
) -> None:
    """Run a part for at most ``limit`` seconds in this process and write its JSON, whatever happens in it."""
    import torch

    device = "cuda" if torch.cuda.is_available() and not dry else "cpu"
    earlier = page.read(folder, part) if only else None
    rows = earlier["rows"] if earlier else []
    sheet = Sheet(part, folder / f"{part}.json", dry, about_the_machine(device), rows, only)
    sheet.write()
    # The last seconds are for what is written after the last worker.
    until = time.monotonic() + limit - 10
    peer = None if dry and "PEER_PYTHON" not in os.environ else workers.peer_python()
    try:
        workers.check_import("ours")
        if device == "cpu" and not dry:
            raise RuntimeError("no CUDA device: torch.cuda.is_available() is False; --dry runs every part on the CPU")
        module = importlib.import_module(f"benchmarks.gpu.{PARTS[part]}")
        module.run(sheet, workers.Session(dry, device, until, seconds, peer))
        if fail:
            raise RuntimeError("this part was asked to fail (--fail)")
    except Exception as error:
        sheet.write("failed", f"{type(error).__name__}: {error}")
        print(f"  {part}  failed: {error}", flush=True)
    else:
        sheet.write("done")


def in_a_process(part: str, arguments: argparse.Namespace) -> None:
    """Run a part in a process group of its own, and end it at its limit; what it has found stays."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--part", part, "--out", str(arguments.out.resolve())]
    limit = limit_of(part, arguments)
    command += ["--seconds", str(arguments.seconds), "--limit", str(limit)]
    command += ["--fail", *arguments.fail] if arguments.fail else []
    command += ["--only", *arguments.only] if arguments.only else []
    environment = workers.environment_of("ours")
    if peer := workers.peer_python():
        environment["PEER_PYTHON"] = peer
    if not arguments.only:
        (arguments.out / f"{part}.json").unlink(missing_ok=True)  # that of a run before
    process = subprocess.Popen(command, env=environment, cwd=workers.ROOT, start_new_session=True)
    reason = ""
    try:
        if process.wait(limit) != 0:
            reason = f"the process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"took more than {limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if reason:
        page.mark_failed(arguments.out / f"{part}.json", part, reason)
        print(f"  {part}  {reason}", flush=True)


def main() -> None:
    """Run the parts, and write the page."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=FOUND, help="where the JSON goes")
    parser.add_argument("--only", nargs="+", default=[], help="words: what is measured has one of them in its name")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each variant of a step is measured")
    parser.add_argument("--limit", type=float, help="seconds that a part may take, if fewer than its own limit")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, all parts in one process")
    parser.add_argument("--page", type=Path, help="write this page from the JSON and run nothing")
    parser.add_argument("--fail", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page:
        page.write(arguments.page, arguments.out)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in arguments.part:
        start = time.monotonic()
        if arguments.dry or arguments.here:
            seconds = 0.2 if arguments.dry else arguments.seconds
            limit, fails, only = limit_of(part, arguments), part in arguments.fail, tuple(arguments.only)
            run_part(part, arguments.out, dry=arguments.dry, seconds=seconds, limit=limit, only=only, fail=fails)
        else:
            print(f"{part}. {TITLES[part]} (at most {limit_of(part, arguments):.0f} s)", flush=True)
            in_a_process(part, arguments)
        print(f"  {part}  {time.monotonic() - start:.0f} s", flush=True)
    sys.stdout.flush()
    if not arguments.here and not page.all_done(arguments.out, arguments.part):
        sys.exit(1)


if __name__ == "__main__":
    main()
