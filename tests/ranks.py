"""Run a function on N real processes joined by gloo, and hand back what each returned.

The processes are forked, so ``import torch`` is paid once by the test session and closures need no pickling.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch
import torch._dynamo  # torch imports it with the first DDP or optimizer step: more than a second for each rank
import torch.distributed.fsdp
from torch.utils._pytree import tree_map_only

import accelerate
from accelerate.ports import get_free_port as free_port

#: Parts of the package that no rank of a test needs, or that say something when they are imported.
_NOT_FOR_RANKS = ("commands", "launch", "memory_utils", "test_utils")
#: "sim" gives ranks imitated accelerators, "cuda" gives all of them one (tests/device/plugin.py).
_DEVICE = os.environ.get("TEST_DEVICE")
#: Beside other work, a limit of time is at most so many times as long.
_MOST_LOAD = 8.0
#: How long ranks may go on when one has died without an answer.
_AFTER_A_DEATH_SECONDS = 60.0


def _import_what_ranks_use() -> None:
    """Import here, once, what every forked rank would import again when it makes its Accelerator."""
    pending = [accelerate.__name__]
    for package in pending:
        module = importlib.import_module(package)
        for found in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{package}."):
            if found.name.split(".")[1] not in _NOT_FOR_RANKS:
                pending.append(found.name)


_import_what_ranks_use()
# The first backward starts a thread for each device that torch counts, and ranks forked after that can't call backward.
# A torch built for CUDA counts eight where there is none, once something was compiled (it brings FakeTensorMode along).
if torch.version.cuda is not None and not torch.accelerator.is_available():
    torch.zeros((), requires_grad=True).backward()


class RankFailed(AssertionError):
    """The error of a rank that raised or died; the text holds its traceback."""


def _environment(rank: int, num_processes: int, port: int, extra: Mapping[str, str] | None) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **({"ACCELERATE_USE_CPU": "true"} if _DEVICE is None else {"SIM_DEVICES": str(num_processes)}),
        **(extra or {}),
    }


def _child(
    function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], pipe: Connection, stacks: int
) -> None:
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR2, file=stacks)
    torch.set_num_threads(1)
    gc.freeze()  # a rank's own collections then leave the session's objects, and the memory shared with it, alone
    _forget_the_parents_world()
    if _DEVICE == "sim":
        torch.sim.allow_after_fork()  # pyright: ignore[reportAttributeAccessIssue]
        torch.sim.set_device_count(int(environment.get("SIM_DEVICES", "1")))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        answer: tuple[bool, Any] = (True, function(*args))
        if _DEVICE == "cuda":  # the test's process, once it holds a tensor there, can fork no other ranks
            answer = tree_map_only(torch.Tensor, torch.Tensor.cpu, answer)
        payload = pickle.dumps(answer)
    except BaseException:  # everything, SystemExit included, is reported to the parent
        payload = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(payload)
    pipe.close()
    try:
        from accelerate.distributed.world import leave_world

        leave_world()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the parent's atexit hooks (pytest's, coverage's) are not ours to run


def _forget_the_parents_world() -> None:
    """Reset the world of the parent, which a forked child would take for its own."""
    from accelerate.distributed.world import leave_world
    from accelerate.state import AcceleratorState, GradientState

    leave_world()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _where_it_stands(pid: int, stacks: IO[bytes]) -> str:
    """Return the Python stacks of a rank that doesn't answer, and the commands of its child processes."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(1)
    stacks.seek(0)
    commands, parents = {}, {pid}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                parents.add(int(folder.name))
                commands[folder.name] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return f"{stacks.read().decode()}\nits processes: {commands}"


def _answers(pipe: Connection, began: float, seconds: float, deadline: float | None, processes: Sequence[Any]) -> bool:
    """Wait for a rank until ``deadline``, or else for so many seconds times the load of a processor core.

    After the death of another rank, which a launcher would notice, it has a minute.
    """
    while True:
        if deadline is None and any(process.exitcode not in (None, 0) for process in processes):
            deadline = time.monotonic() + _AFTER_A_DEATH_SECONDS
        load = min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_LOAD)
        left = (began + seconds * load if deadline is None else deadline) - time.monotonic()
        if pipe.poll(max(0.0, min(left, 5.0))):
            return True
        if left <= 0:
            return False


def run_on_ranks(
    function: Callable[..., Any],
    num_processes: int = 2,
    *args: Any,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return what ``function(*args)`` returned on each of ``num_processes`` forked ranks, in rank order.

    Raises:
        RankFailed: a rank raised, died, or took longer than ``timeout_seconds``, and longer still on a loaded machine.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes: list[Connection] = []
    processes: list[Any] = []
    stacks = [tempfile.TemporaryFile() for _rank in range(num_processes)]  # noqa: SIM115 (closed below)
    for rank in range(num_processes):
        receiver, sender = context.Pipe(duplex=False)
        own = _environment(rank, num_processes, port, environment)
        process = context.Process(target=_child, args=(function, args, own, sender, stacks[rank].fileno()))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    began, deadline = time.monotonic(), None
    results: list[Any] = []
    failures: list[str] = []
    try:
        for rank, pipe in enumerate(pipes):
            try:
                if not _answers(pipe, began, timeout_seconds, deadline, processes):
                    where = _where_it_stands(processes[rank].pid, stacks[rank])
                    failures.append(f"rank {rank}: no answer within {timeout_seconds} s\n{where}")
                    continue
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                failures.append(f"rank {rank}: died with exit code {processes[rank].exitcode}")
                continue
            if succeeded:
                results.append(value)
            else:
                failures.append(f"rank {rank}:\n{value}")
                deadline = deadline or time.monotonic() + 5  # the others may wait for the one that failed
    finally:
        for process in processes:
            process.join(0.0 if failures else 5.0)
            if process.is_alive():
                process.kill()
                process.join()
        for file in stacks:
            file.close()
    if failures:
        raise RankFailed("\n".join(failures))
    return results
