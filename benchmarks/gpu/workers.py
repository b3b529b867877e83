"""Measurements in processes of their own, each of which says first which `accelerate` it has.

python -m benchmarks.gpu.workers ours|peer|none MODULE:FUNCTION '{"an": "option"}'
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".gpu"  # what `make gpu` unpacked from wheels/
MARK = "RESULT "


def check_import(who: str) -> None:
    """Raise unless ``import accelerate`` gives this checkout's ("ours") or another installation's ("peer")."""
    if who == "none":
        return
    import accelerate

    place = Path(str(accelerate.__file__)).resolve()
    if (ROOT in place.parents) != (who == "ours"):
        wanted = "this checkout's" if who == "ours" else "another installation's"
        raise RuntimeError(
            f"{sys.executable} was to measure {wanted} accelerate and imported {place}. Set PEER_PYTHON to an "
            "interpreter with another installation, and start the worker with PYTHONPATH as workers.environment_of does"
        )


def environment_of(who: str, **extra: str) -> dict[str, str]:
    """Return a worker's environment: this checkout on PYTHONPATH for ours, no PYTHONPATH for the peer."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if who != "peer":
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(SITE)])
    return environment | extra


def peer_python() -> str | None:
    """Return the interpreter of another installation: PEER_PYTHON, or this one where it has an `accelerate` itself."""
    if "PEER_PYTHON" in os.environ:
        return os.environ["PEER_PYTHON"] or None
    code = "import importlib.util as u; s = u.find_spec('accelerate'); print(s.origin if s else '')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment_of("peer"), cwd="/", capture_output=True, text=True, check=False
    )
    origin = done.stdout.strip()
    return sys.executable if origin and ROOT not in Path(origin).resolve().parents else None


def start(who: str, function: str, options: dict[str, Any], *, python: str | None = None, **extra: str) -> Any:
    """Start a worker; it stays in the part's process group, which is ended as one."""
    command = [python or sys.executable, "-m", "benchmarks.gpu.workers", who, function, json.dumps(options)]
    return subprocess.Popen(
        command, env=environment_of(who, **extra), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: Any) -> None:
    """Kill a worker, if it still runs, and collect it."""
    process.kill()
    process.communicate()


def answer_of(process: Any, seconds: float, name: str) -> dict[str, Any]:
    """Return what a worker printed; raise with the end of its errors where it failed or took too long."""
    try:
        output, errors = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        end(process)
        raise TimeoutError(f"{name} took more than {seconds:.0f} s") from None
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    raise RuntimeError(f"{name} failed: {last}")


@dataclass(frozen=True)
class Session:
    """Where and for how long a part measures."""

    dry: bool
    device: str
    until: float  # of time.monotonic()
    seconds: float  # that a variant is measured
    peer: str | None

    @property
    def left(self) -> float:
        """The seconds that are left to the part."""
        return self.until - time.monotonic()

    def ask(self, who: str, function: str, *, at_most: float = 240.0, **options: Any) -> dict[str, Any]:
        """Return a worker's answer. A dry run calls it in this process, unless it is the peer's."""
        options |= {"dry": self.dry, "device": self.device}
        if self.dry and who != "peer":
            return _here(who, function, options)
        limit = min(at_most, self.left)
        if limit < 5:
            raise TimeoutError("no time was left for it")
        python = self.peer if who == "peer" else sys.executable
        return answer_of(start(who, function, options, python=python), limit, f"{who} {function}")


def _called(who: str, function: str, options: dict[str, Any]) -> dict[str, Any]:
    check_import(who)
    module, _, name = function.partition(":")
    called: Callable[..., dict[str, Any]] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    return called(**options)


def _here(who: str, function: str, options: dict[str, Any]) -> dict[str, Any]:
    with fresh():
        return _called(who, function, options)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Begin and end without a process group and without an accelerator's state, in the environment from before."""
    import torch

    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(True)
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Call the function, and print its answer on a line of its own."""
    who, function, options = sys.argv[1:]
    answer = _called(who, function, json.loads(options))
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)
    os._exit(0)  # threads of a launcher or of the compiler are not waited for


if __name__ == "__main__":
    main()
