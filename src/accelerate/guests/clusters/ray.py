"""Launch with Ray Train: one Ray worker per rank, on an existing cluster.

Ray places the workers and assigns their ranks. The program is a child process of its worker, under the same supervisor
as local ranks, so it starts like a local rank and ends with the worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ...errors import LaunchError
from ...launch.engine import LaunchEngine, base_environment, is_cpu_run
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import spread
from ...ports import get_free_port

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

#: The cluster that runs on this machine, or that RAY_ADDRESS names.
_EXISTING: Final = "auto"
_CONNECT_TIMEOUT_SECONDS: Final = 10


@final
class RayTrain(LaunchEngine):
    """A TorchTrainer whose training loop runs the program."""

    name = "ray"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether Ray was selected."""
        return settings.cluster.launcher == "ray"

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the workers and options of Ray's trainer."""
        options = settings.ray
        total, per_host = spread(settings, host, settings.launch.num_machines)
        cpus = options.cpus_per_worker
        return LaunchPlan(
            engine=f"{self.name}: {total} workers of Ray Train",
            argv=program.argv("python"),
            environment=base_environment(settings, host, per_host),
            rendezvous="the first worker, by Ray Train",
            engine_options={
                "address": options.address or host.environment.get("RAY_ADDRESS", _EXISTING),
                "num_workers": total,
                "use_gpu": not is_cpu_run(settings) and host.num_devices > 0,
                "resources_per_worker": None if cpus is None else {"CPU": cpus},
                "max_failures": settings.launch.max_restarts,
                "storage_path": options.storage_path,
                "upload": options.upload,
                "kind": program.kind,
            },
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the program on all workers; return 0 if each succeeded, else 1.

        Raises:
            MissingDependency: ``ray[train]`` isn't installed.
            LaunchError: the cluster doesn't exist.
        """
        from ...optional import require

        ray = require("ray", "ray", purpose="Launching through Ray")
        train, torch_trainer = require("ray.train", "ray"), require("ray.train.torch", "ray")
        options = plan.engine_options
        if not ray.is_initialized():
            _connect(ray, plan)
        trainer = torch_trainer.TorchTrainer(
            run_program,
            train_loop_config={
                "argv": list(plan.argv),
                "kind": options["kind"],
                "environment": dict(plan.environment),
                "folder": str(plan.cwd),
                "upload": options["upload"],
            },
            scaling_config=train.ScalingConfig(
                num_workers=options["num_workers"],
                use_gpu=options["use_gpu"],
                resources_per_worker=options["resources_per_worker"],
            ),
            # The workers themselves need a rendezvous only; the program's own group has the devices' backend.
            torch_config=torch_trainer.TorchConfig(backend="gloo"),
            run_config=train.RunConfig(
                storage_path=options["storage_path"],
                failure_config=train.FailureConfig(max_failures=options["max_failures"]),
            ),
        )
        return _exit_code(trainer)


def _connect(ray: Any, plan: LaunchPlan) -> None:
    runtime: dict[str, Any] = {"env_vars": dict(plan.environment)}
    if plan.engine_options["upload"]:
        runtime["working_dir"] = str(plan.cwd)
    address = str(plan.engine_options["address"])
    try:
        _check_reachable(address)
        ray.init(address=address, runtime_env=runtime)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"There is no Ray cluster at {address}: {error}. Start one with `ray start --head`, name another with "
            "--ray_address, or give --ray_address local for one that lives as long as this run."
        ) from error


def _check_reachable(address: str) -> None:
    """Raise OSError unless a program listens at HOST:PORT; Ray itself would try for minutes."""
    import socket

    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_SECONDS).close()


def _exit_code(trainer: Any) -> int:
    try:
        result = trainer.fit()
    except Exception as error:  # the class in which Ray wraps an error depends on its version
        print(f"accelerate launch: a worker of Ray failed: {_last_line(error)}", file=sys.stderr)
        return 1
    return 0 if result.error is None else 1


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


class ProgramFailed(LaunchError):
    """The error for a program that ended with a nonzero exit code on a Ray worker; its text is the report."""


def run_program(config: Mapping[str, Any]) -> None:
    """Run the program in its own process and raise if it fails; called in each Ray worker."""
    from ...distributed.failures import report
    from ...launch.supervisor import supervise

    world = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    own = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK")}
    world["MASTER_PORT"] = str(_common_port())
    argv = list(config["argv"])
    if config["kind"] != "command":
        argv[0] = sys.executable
    # Ray has changed the working directory; the uploaded folder comes first in the PYTHONPATH that it set.
    folder = os.environ["PYTHONPATH"].partition(os.pathsep)[0] if config["upload"] else config["folder"]
    plan = LaunchPlan("ray", tuple(argv), {**config["environment"], **world}, ranks=(own,), cwd=Path(folder))
    code, failures = supervise(plan, dict(os.environ))
    if code != 0:
        raise ProgramFailed(report(failures, plan.num_processes) or f"exit code {code}")


def _common_port() -> int:
    """Broadcast a free port of the first worker's host; Ray's own process group keeps its port."""
    import torch.distributed as dist

    port: list[int] = [get_free_port()]
    dist.broadcast_object_list(port, src=0)
    return port[0]
