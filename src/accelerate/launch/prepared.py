"""The command and environment of a launch, computed from the launcher's parsed command line.

The documented functions by which other programs and tests look at a launch without running it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import SettingError
from ..ports import DEFAULT_PORT
from ..settings import env
from ..settings.cluster_options import SageMakerOptions
from ..settings.fp8 import Fp8Options
from ..settings.tree import Settings
from .arguments import program_of, settings_of
from .choose import engine_named
from .engine import LOOPBACK, base_environment, count_processes, is_cpu_run, rendezvous_port
from .preflight import Host, this_host

#: The options of torchrun.
TORCH_LAUNCH_PARAMS: Final = [
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "role",
    "module",
    "m",
    "no_python",
    "run_path",
    "log_dir",
    "r",
    "redirects",
    "t",
    "tee",
    "node_rank",
    "master_addr",
    "master_port",
]


def _settings_and_host(args: argparse.Namespace) -> tuple[Settings, Host]:
    settings = settings_of(args)
    return settings, this_host(env.snapshot(), cpu=is_cpu_run(settings), port=settings.launch.main_process_port)


def _fill_in_torchrun(args: argparse.Namespace, settings: Settings, host: Host) -> None:
    """Set the documented options of torchrun on the Namespace, from which :func:`_filter_args` takes them."""
    launch = settings.launch
    per_host = count_processes(settings, host) // launch.num_machines
    args.nproc_per_node = str(per_host)
    if launch.num_machines > 1:
        port = DEFAULT_PORT if launch.main_process_port is None else launch.main_process_port
        args.nnodes, args.node_rank = str(launch.num_machines), int(launch.machine_rank)
        if launch.same_network:
            args.master_addr, args.master_port = str(launch.main_process_ip), str(port)
        else:
            args.rdzv_endpoint = f"{launch.main_process_ip}:{port}"
        return
    port, _ = rendezvous_port(settings, host)
    args.main_process_port, args.master_port = port, str(port)
    if getattr(args, "filled_in", None) is not None:
        args.filled_in["main_process_port"] = port


def _environment(settings: Settings, host: Host, num_processes: int) -> dict[str, str]:
    return {**env.snapshot(), **base_environment(settings, host, num_processes)}


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment) of a launch of one process, or of one mpirun for all machines.

    The names of variables that mpirun hands to other machines are not part of the documented command line; each MPI
    but Open MPI hands on its whole environment.
    """
    settings, host = _settings_and_host(args)
    program, launch = program_of(args, settings), settings.launch
    if launch.num_machines > 1 and (launch.main_process_ip is None or launch.main_process_port is None):
        raise SettingError("Several machines need main_process_ip and main_process_port.")
    per_host = max(1, (launch.num_processes or 1) // launch.num_machines)
    command: tuple[str, ...] = ()
    if settings.mpi.mpirun_hostfile is not None:
        mpirun: Any = engine_named("mpirun")
        command = mpirun.documented_command(settings, per_host * launch.num_machines, per_host)
    environment = _environment(settings, host, per_host)
    if launch.num_machines > 1 or (launch.num_processes or 1) > 1:
        environment["MASTER_ADDR"] = launch.main_process_ip or LOOPBACK
        environment["MASTER_PORT"] = str(launch.main_process_port or DEFAULT_PORT)
    return [*command, *program.argv()], environment


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment that the ranks of a launch share; set torchrun's options on ``args``."""
    settings, host = _settings_and_host(args)
    _fill_in_torchrun(args, settings, host)
    per_host = count_processes(settings, host) // settings.launch.num_machines
    return _environment(settings, host, per_host)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return (command, or None where torchrun starts the ranks, and environment) of a DeepSpeed launch.

    Where torchrun starts them, its options are set on ``args``.
    """
    settings, host = _settings_and_host(args)
    launcher = engine_named("deepspeed")
    if not launcher.suits(settings, host):
        return None, prepare_multi_gpu_env(args)
    plan = launcher.plan(settings, program_of(args, settings), host)
    return list(plan.argv), {**env.snapshot(), **plan.environment}


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of the parallelism options to ``current_env`` and return it."""
    settings = settings_of(args)
    for options in (settings.parallelism, settings.context, settings.sequence):
        if options is not None:
            current_env.update(env.encode(options))
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    return current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of the fp8 options to ``current_env`` and return it."""
    current_env.update(env.encode(settings_of(args).fp8 or Fp8Options()))
    return current_env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return (args, ``current_env`` with the variables that workers on TPUs read)."""
    settings = settings_of(args)
    if settings.run.mixed_precision == "bf16":
        current_env["XLA_DOWNCAST_BF16" if settings.run.downcast_bf16 else "XLA_USE_BF16"] = "1"
    if settings.run.debug:
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm = args.tpu_vm if getattr(args, "tpu_vm", None) else getattr(args, "vm", None)
        args.tpu = getattr(args, "tpu_name", None)
    return args, current_env


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """Return the arguments known to ``parser``: its own defaults, overridden by the values of ``args``."""
    known, _ = parser.parse_known_args(list(default_args))
    for name, value in vars(args).items():
        if name in vars(known):
            setattr(known, name, value)
    return known


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the value of a variable that lists paths, with one more path at its end; the variable stays unchanged."""
    paths = [path for path in (env.read(env_var_name, "") or "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, str(path_to_add)])


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Return (arguments of the estimator, its inputs) of the SageMaker job that ``sagemaker_config`` describes."""
    settings, host = prepared_for_sagemaker(sagemaker_config, args)
    engine: Any = engine_named("sagemaker")
    plan = engine.plan(settings, program_of(args, settings), host)
    return engine.estimator_arguments(plan), plan.engine_options.get("inputs")


def prepared_for_sagemaker(sagemaker_config: Any, args: argparse.Namespace) -> tuple[Settings, Host]:
    """Return (settings, host) of the SageMaker job that ``sagemaker_config`` describes."""
    settings, host = _settings_and_host(args)
    described = {each.name: getattr(sagemaker_config, each.name, None) for each in dataclasses.fields(SageMakerOptions)}
    keys = {name: getattr(args, name, None) for name in ("aws_access_key_id", "aws_secret_access_key")}
    given = {name: value for name, value in {**described, **keys}.items() if value is not None}
    if "distributed_type" in given:
        given["distributed_type"] = str(getattr(given["distributed_type"], "value", given["distributed_type"]))
    return dataclasses.replace(settings, sagemaker=SageMakerOptions(**given)), host


def convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Parse ``["--lr", "1e-3", "--name", "x"]`` to ``{"lr": 0.001, "name": "x"}``, the hyper-parameters of a job.

    Raises:
        ValueError: an option stands without a value; such a job can't tell it from one that isn't given.
    """
    found: dict[str, Any] = {}
    arguments = list(nargs)
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if not argument.startswith("-"):
            raise SettingError(f"{argument!r} stands without an option; a job takes its arguments as --name value.")
        name, _, value = argument.lstrip("-").partition("=")
        if not value:
            index += 1
            if index >= len(arguments) or _is_option(arguments[index]):
                raise SettingError(
                    f"{argument} stands without a value; a job can't take such options: give {argument} true."
                )
            value = arguments[index]
        found[name] = _typed(value)
        index += 1
    return found


def _is_option(text: str) -> bool:
    return text.startswith("-") and not isinstance(_typed(text), (int, float))


def _typed(text: str) -> bool | int | float | str:
    """Convert the text to the bool, int or float that it spells, else return it."""
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class PrepareForLaunch:
    """A function for a process that has just been started: it sets the rank's variables and calls the launched
    function.
    """

    def __init__(self, launcher: Callable[..., object], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type: str = str(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: object) -> None:
        """Run the launched function as rank ``index`` of this host."""
        if self.debug:
            self._init_process_group_from_file(index)
        elif self.distributed_type != "NO":
            per_host = int(env.read("NPROC", "1") or 1)
            host_rank = int(env.read("NODE_RANK", "0") or 0)
            env.set_variables({"LOCAL_RANK": index, "RANK": per_host * host_rank + index})
        env.set_variables({"FORK_LAUNCHED": "1"})
        self.launcher(*args)

    @staticmethod
    def _init_process_group_from_file(index: int) -> None:
        import torch

        size = int(env.read("WORLD_SIZE", "1") or 1)
        address = f"file://{env.read('ACCELERATE_DEBUG_RDV_FILE')}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=index, world_size=size)
