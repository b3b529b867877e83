"""Launchers of functions from a running interpreter (a notebook, a test), which return the ranks' results.

The ranks are forked where that is safe, so that the function may be anything at all. Where an accelerator is
already initialised it isn't (a driver doesn't survive a fork): fresh interpreters are started then, and the
function is pickled by value for them (cloudpickle), closures and the notebook's own definitions included.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cores import num_cores, threads_per_rank
from ..distributed.failures import report
from ..errors import LaunchError, SettingError
from ..optional import is_installed, require
from ..ports import DEFAULT_PORT, claim_port, get_free_port, is_port_in_use, release_ports
from ..settings import env
from ..settings.run_options import PRECISIONS
from .fork import PickledFunction, fork_is_safe, read_result, start_fork, write_function
from .plan import LaunchPlan
from .supervisor import Supervisor, start_command

#: The world that a launch of one process, which runs in this interpreter, joined and left behind.
_left_by_launch: object | None = None


def plan_ranks(num_processes: int, *, cpu: bool, mixed_precision: str, port: int) -> LaunchPlan:
    """Plan ``num_processes`` ranks of this host, started from this interpreter."""
    environment = {
        "ACCELERATE_MIXED_PRECISION": mixed_precision,
        "ACCELERATE_USE_CPU": "true" if cpu else "false",
        "FORK_LAUNCHED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    ranks = tuple({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes))
    return LaunchPlan(
        engine="functions",
        argv=(sys.executable, "-m", "accelerate.launch.worker"),
        environment=environment,
        ranks=ranks,
        rendezvous=f"127.0.0.1:{port}",
    )


def run_ranks(function: Callable[..., object], args: Sequence[object], plan: LaunchPlan, *, fork: bool) -> list[Any]:
    """Run ``function(*args)`` on each rank and return the results in rank order.

    Raises:
        LaunchError: a rank failed; the text is the report of the first cause.
        KeyboardInterrupt: the run was interrupted here; every rank has ended.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate_ranks_") as name:
        folder = Path(name)
        if fork:
            start = start_fork(function, args, folder)
        else:
            write_function(folder, function, args)
            start = start_command(dataclasses.replace(plan, argv=(*plan.argv, name)))
        base = {**env.snapshot(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if "OMP_NUM_THREADS" not in base:
            base["OMP_NUM_THREADS"] = str(threads_per_rank(len(plan.ranks), num_cores()))
        supervisor = Supervisor(plan, start, base, _writer_to("stdout"), _writer_to("stderr"), report_failures=False)
        code = supervisor.run()
        if supervisor.received == signal.SIGINT:
            raise KeyboardInterrupt
        if code != 0:
            raise LaunchError(
                report(supervisor.failures, plan.num_processes, hint="", ended=supervisor.ended)
                or f"The run ended with code {code}."
            )
        return [read_result(folder, rank) for rank in range(len(plan.ranks))]


def _writer_to(name: str) -> Callable[[bytes], None] | None:
    """Return a writer to ``sys.stdout`` or ``sys.stderr``; None if it is the process's own output."""
    stream = getattr(sys, name)
    try:
        if stream.fileno() in (1, 2) and not is_notebook():
            return None
    except (OSError, ValueError, AttributeError):  # an object that only looks like a file
        pass

    def show(data: bytes) -> None:
        stream.write(data.decode("utf-8", errors="replace"))
        stream.flush()

    return show


def is_notebook() -> bool:
    """Return whether this interpreter is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def refuse_existing_state() -> None:
    """Raise if a world has been joined in this process already; forget the one that a launch of one process left.

    Raises:
        SettingError: an Accelerator (or PartialState) was made in this process before the launch.
    """
    world = _joined_world()
    state = sys.modules.get("accelerate.state")
    if world is not None and world is _left_by_launch and state is not None and not _is_state_alive():
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    elif world is not None:
        raise SettingError(
            "An Accelerator was already created in this process, so it can't start ranks. The `Accelerator` should "
            "only be initialized inside your training function: create it inside the function that is launched, and "
            "restart the notebook's kernel if it was created in a cell."
        )


def _is_state_alive() -> bool:
    """Return whether something that was made of the joined world, such as an Accelerator, is still in use."""
    names = (("accelerate.accelerator", "Accelerator"), ("accelerate.state", "AcceleratorState PartialState"))
    classes = tuple(
        getattr(sys.modules[module], name) for module, found in names if module in sys.modules for name in found.split()
    )
    gc.collect()
    return any(issubclass(type(each), classes) for each in gc.get_objects())


def _joined_world() -> object | None:
    """Return the world joined by this process, without imports: one of them could join a world."""
    module = sys.modules.get("accelerate.distributed.world")
    return None if module is None else module.current_world()


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Run ``function(*args)`` on each rank of this host and return the list of results; with one process, its result.

    Raises:
        ValueError: ``num_processes`` is missing, or the precision is unknown.
        LaunchError: a rank failed; the text names the first cause.
    """
    if mixed_precision.lower() not in PRECISIONS:
        raise SettingError(
            f"notebook_launcher(mixed_precision={mixed_precision!r}) is unknown: give one of {', '.join(PRECISIONS)}."
        )
    if num_processes is None:
        raise SettingError("notebook_launcher needs num_processes: the number of processes to start, such as 2.")
    if num_processes < 1:
        raise SettingError(f"notebook_launcher(num_processes={num_processes}): give at least 1.")
    if num_processes == 1 and num_nodes == 1:
        return _call_here(function, args, mixed_precision)
    refuse_existing_state()
    if num_nodes > 1 or max_restarts > 0 or rdzv_backend != "static":
        from .torchrun import elastic_call

        of_static = {"rank": node_rank} if rdzv_backend == "static" else {}
        by_value = not fork_is_safe() and is_installed("cloudpickle")
        results = elastic_call(
            PickledFunction(function) if by_value else function,
            args,
            mixed_precision=mixed_precision.lower(),
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=num_processes,
            run_id=rdzv_id,
            rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{use_port}",
            rdzv_backend=rdzv_backend,
            rdzv_configs={**(rdzv_conf or {}), **of_static},
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
        )
        return [require("cloudpickle").loads(result) for result in results] if by_value else results
    from ..devices.table import CPU, present

    found, _ = present()
    cpu = env.flag("ACCELERATE_USE_CPU") or found is CPU
    port = _port(use_port)
    plan = plan_ranks(num_processes, cpu=cpu, mixed_precision=mixed_precision.lower(), port=port)
    kind = "CPU processes" if cpu else f"{found.name} devices"
    print(f"Launching training on {num_processes} {kind}.")
    try:
        return run_ranks(function, args, plan, fork=fork_is_safe())
    finally:
        release_ports()


def _port(use_port: str | int) -> int:
    """Return the given port, or a free one where it is 0 or the documented default is taken."""
    port = int(use_port)
    if port == 0 or (port == DEFAULT_PORT and (is_port_in_use(port) or not claim_port(port))):
        return get_free_port()
    if is_port_in_use(port):
        raise SettingError(
            f"notebook_launcher(use_port={port}): something on this host already listens there. "
            "Give another port, or 0 for any free one."
        )
    return port


def _call_here(function: Callable[..., object], args: Sequence[object], mixed_precision: str) -> Any:
    from ..devices.table import present

    name = present()[0].name
    print(f"Launching training on {'the CPU' if name == 'cpu' else f'one {name} device'}.")
    global _left_by_launch
    before = _joined_world()
    try:
        with env.patched(ACCELERATE_MIXED_PRECISION=mixed_precision.lower()):
            return function(*args)
    finally:
        if before is None:
            _left_by_launch = _joined_world()


def debug_launcher(function: Callable[..., object], args: Sequence[object] = (), num_processes: int = 2) -> list[Any]:
    """Run ``function(*args)`` on ``num_processes`` CPU ranks joined by gloo on the loopback; return the results."""
    refuse_existing_state()
    plan = plan_ranks(num_processes, cpu=True, mixed_precision="no", port=get_free_port())
    return run_ranks(function, args, plan, fork=fork_is_safe())


def test_launch() -> None:
    """Join the world in a rank of a trial launch (``ACCELERATE_DEBUG_MODE``, before a notebook's real launch)."""
    from ..distributed.world import join_world

    join_world()


test_launch.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  (not a test)
