"""Run programs in processes that have imported torch, and nothing of this package: most of a start is torch's import.

For programs whose start isn't what is tested. Each is forked from one process that waits, which every test session
has at most once; arguments, environment, folder, exit code and what is printed are those of a new interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_waiting: subprocess.Popen[bytes] | None = None


def run_fresh(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout_seconds: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """The finished ``python -c program arguments``, in the environment and the folder of the caller.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout_seconds``.
    """
    global _waiting
    if _waiting is None or _waiting.poll() is not None:
        _waiting = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        atexit.register(_waiting.kill)
    assert _waiting.stdin is not None and _waiting.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        job = {
            "program": program,
            "arguments": arguments,
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd()),
            "outputs": outputs,
        }
        _waiting.stdin.write(json.dumps(job).encode() + b"\n")
        _waiting.stdin.flush()
        if not select.select([_waiting.stdout], [], [], timeout_seconds)[0]:
            os.killpg(_waiting.pid, 9)
            _waiting.wait()
            said = [Path(path).read_bytes() if Path(path).exists() else b"" for path in outputs]
            raise subprocess.TimeoutExpired([program, *arguments], timeout_seconds, *said)
        code = int(_waiting.stdout.readline())
        stdout, stderr = (Path(path).read_text() for path in outputs)
    return subprocess.CompletedProcess([program, *arguments], code, stdout, stderr)


def _serve() -> None:
    import torch
    import torch._dynamo  # the first step of an optimizer imports it

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    for line in iter(sys.stdin.buffer.readline, b""):
        process = os.fork()
        if process == 0:
            _become(json.loads(line))
        answers.write(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _become(job: dict[str, Any]) -> NoReturn:
    """Be a new interpreter of the program, and end as one does."""
    import random

    import numpy as np

    for number, path in enumerate([os.devnull, *job["outputs"]]):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    random.seed()
    np.random.seed()
    sys.argv[:] = ["-c", *job["arguments"]]
    folders = filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = ["", *folders, *sys.path[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 1
    try:
        exec(compile(job["program"], "<string>", "exec"), main.__dict__)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # the program's frames alone
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    sys.path.insert(0, "")
    _serve()
