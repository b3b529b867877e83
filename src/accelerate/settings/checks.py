"""Checks for contradictions between settings; each error names the values, their sources and a fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .. import seams
from ..errors import SettingError
from .fsdp import RESHARDS, FsdpOptions
from .option import nearest, options_of
from .parallelism import ATTENTION_KINDS
from .tree import GROUPS, PARADIGMS, ROWS, Settings

#: Options of the core that ask for something of a guest -> its folder.
_OPTIONS_OF_GUESTS: Final = {
    f"{name}.{option.name}": option.guest for name, cls in GROUPS.items() for option in options_of(cls) if option.guest
}
RENDEZVOUS: Final = ("static", "c10d", "etcd", "etcd-v2")
#: Launchers that find the machines, and so the rendezvous address, themselves.
LAUNCHERS_WITH_RENDEZVOUS: Final = ("mpirun", "slurm", "kubernetes", "ray")


def check(settings: Settings) -> None:
    """Raise SettingError where settings contradict each other."""
    for one in _CHECKS:
        one(settings)


def check_launchable(settings: Settings, *, has_allocation: bool = False) -> None:
    """Raise SettingError unless the settings are complete enough to start processes.

    In the allocation of a scheduler the machines are known, and with them the rendezvous address.
    """
    launch = settings.launch
    by_engine = (
        settings.cluster.launcher in LAUNCHERS_WITH_RENDEZVOUS
        or (has_allocation and settings.cluster.launcher is None and launch.main_process_ip is None)
        or settings.sagemaker
        or settings.tpu.tpu_use_cluster
        or launch.pretend is not None
    )
    if launch.num_machines > 1 and settings.host_file is None and not by_engine:
        for name in ("main_process_ip", "main_process_port"):
            if getattr(launch, name) is None:
                raise SettingError(
                    f"{settings.quote('launch.num_machines')} needs `{name}`: the machines rendezvous at the address "
                    f"and port of machine 0. Give `--{name}`, or set `{name}` in the configuration file."
                )
    is_tpu = launch.use_tpu or launch.distributed_type in ("TPU", "XLA")
    if is_tpu and settings.tpu.tpu_use_cluster and (settings.tpu.tpu_name is None or settings.tpu.tpu_zone is None):
        raise SettingError(
            f"{settings.quote('tpu.tpu_use_cluster')} needs `tpu_name` and `tpu_zone`: set them in the "
            "configuration file."
        )
    if settings.sagemaker is not None:
        _check_sagemaker(settings)


def check_world(settings: Settings, world_size: int) -> None:
    """Raise SettingError unless the degrees of parallelism multiply to the number of processes."""
    parallelism = settings.parallelism
    if parallelism is None:
        return
    if settings.engine and parallelism.sp_size > 1:  # the other degrees are the engine's
        if world_size % parallelism.sp_size:
            raise SettingError(
                f"{settings.quote('parallelism.sp_size')} doesn't divide the {world_size} processes into groups that "
                "compute one sequence together. Choose a divisor, or start another number of processes."
            )
        return
    names = ("pp_size", "dp_replicate_size", "dp_shard_size", "ep_size", "cp_size", "sp_size", "tp_size")
    total = 1
    for name in names:
        total *= getattr(parallelism, name)
    if total not in (1, world_size):
        product = " x ".join(f"{name}={getattr(parallelism, name)}" for name in names)
        raise SettingError(
            f"The degrees of parallelism multiply to {total} ({product}), but there are {world_size} processes. Start "
            f"{total} processes, or change a degree so that the product is {world_size}."
        )


def _check_guests(settings: Settings) -> None:
    """Refuse options whose guest isn't there."""
    for address, guest in _OPTIONS_OF_GUESTS.items():
        if settings.was_given(address) and _value(settings, address):
            seams.check_is_there(guest, settings.quote(address))


def _check_hardware(settings: Settings) -> None:
    """Refuse more than one kind of hardware for the processes."""
    run, launch = settings.run, settings.launch
    hardware = {"run.use_cpu": run.use_cpu, "launch.multi_gpu": launch.multi_gpu, "launch.use_tpu": launch.use_tpu}
    asked = [address for address, is_on in hardware.items() if is_on and settings.was_given(address)]
    asked = [address for address in asked if settings.source_of(address).kind in ("flag", "argument")] or asked
    if len(asked) > 1:
        quoted = " and ".join(settings.quote(address) for address in asked)
        raise SettingError(f"{quoted} exclude each other. Keep one of `--cpu`, `--multi_gpu` and `--tpu`.")
    if not asked or settings.source_of(asked[0]).kind != "flag":
        return
    # FSDP runs on CPU processes too, and Megatron-LM on the devices of multi_gpu
    together = {("run.use_cpu", "paradigm.use_fsdp"), ("launch.multi_gpu", "paradigm.use_megatron_lm")}
    for engine in PARADIGMS.values():
        is_asked = settings.source_of(engine).kind == "flag"
        if is_asked and (asked[0], engine) not in together:
            raise SettingError(
                f"{settings.quote(asked[0])} and {settings.quote(engine)} exclude each other: the engine chooses its "
                f"devices itself. Leave `{settings.source_of(asked[0]).where}` out."
            )


def _check_processes(settings: Settings) -> None:
    launch = settings.launch
    processes, machines = launch.num_processes, launch.num_machines
    if launch.machine_rank >= machines:
        raise SettingError(
            f"{settings.quote('launch.machine_rank')} does not exist with "
            f"{settings.quote('launch.num_machines')}: "
            f"ranks of machines go from 0 to {machines - 1}."
        )
    if processes is None:
        return
    if processes % machines != 0 and settings.was_given("launch.num_processes"):
        raise SettingError(
            f"{settings.quote('launch.num_processes')} is the total over all machines, and cannot be split evenly over "
            f"{settings.quote('launch.num_machines')}. Give a multiple of {machines}."
        )
    both = [settings.source_of(address).kind for address in ("launch.multi_gpu", "launch.num_processes")]
    if launch.multi_gpu and processes < 2 and both == ["flag", "flag"]:  # files with MULTI_GPU may say 1 process
        raise SettingError(
            f"{settings.quote('launch.multi_gpu')} needs at least 2 processes, but there is "
            f"{settings.quote('launch.num_processes')}. Give `--num_processes 2` or more, or leave "
            "`--multi_gpu` out."
        )


def _check_devices(settings: Settings) -> None:
    launch = settings.launch
    if launch.gpu_ids is None or launch.gpu_ids.strip().lower() == "all":
        return
    quoted = settings.quote("launch.gpu_ids")
    ids = [part.strip() for part in launch.gpu_ids.split(",")]
    if not all(ids) or any(" " in part or (part[0] in "-+" or "." in part) for part in ids):
        raise SettingError(f"{quoted} is not a list of devices. Give ids separated by commas, such as 0,1; or all.")
    if len(set(ids)) < len(ids):
        raise SettingError(f"{quoted} names a device twice. Name each device once.")
    if launch.num_machines != 1 or settings.run.use_cpu:
        return
    if launch.multi_gpu and len(ids) < 2 and launch.num_processes != 1:
        raise SettingError(
            f"{quoted} is fewer than the 2 devices that {settings.quote('launch.multi_gpu')} needs. "
            "Name more devices, or leave `--multi_gpu` out."
        )
    if launch.multi_gpu and launch.num_processes is not None and launch.num_processes > len(ids):
        raise SettingError(
            f"{settings.quote('launch.num_processes')} is more than the {len(ids)} devices of {quoted}. "
            "Each process needs a device of its own."
        )


def _check_launcher(settings: Settings) -> None:
    launch = settings.launch
    if launch.module and launch.no_python:
        raise SettingError(
            f"{settings.quote('launch.module')} and {settings.quote('launch.no_python')} exclude each other: "
            "a module is run by python. Keep one of them."
        )
    is_torchs = launch.rdzv_backend in RENDEZVOUS
    if not is_torchs and (near := nearest(launch.rdzv_backend, RENDEZVOUS)) is not None:
        raise SettingError(
            f"{settings.quote('launch.rdzv_backend')} is not a rendezvous backend that torch has. "
            f"Did you mean {near!r}? It has {', '.join(RENDEZVOUS)}."
        )
    for pair in filter(None, launch.rdzv_conf.split(",")):
        if "=" not in pair:
            raise SettingError(f"{settings.quote('launch.rdzv_conf')} holds {pair!r}. Give key1=value1,key2=value2.")
    for pair in settings.tpu.tpu_env or ():
        if "=" not in pair:
            raise SettingError(f"{settings.quote('tpu.tpu_env')} holds {pair!r}. Give NAME=value.")
    is_cluster = launch.num_machines > 1 and launch.main_process_port == 0
    if is_cluster:
        raise SettingError(
            f"{settings.quote('launch.main_process_port')} chooses a free port, but "
            f"{settings.quote('launch.num_machines')} have to know the same one. Give a fixed port, such as "
            "29500."
        )


def _check_cluster(settings: Settings) -> None:
    """Refuse flags of one cluster's engine where another one starts the run."""
    for group in ("slurm", "kubernetes", "ray"):
        given = [
            name for name, source in settings.sources.items() if source.kind == "flag" and name.startswith(f"{group}.")
        ]
        if given and settings.cluster.launcher != group:
            raise SettingError(
                f"{settings.quote(given[0])} was given, but the run isn't started through {group}, so that it would "
                f"have no effect. Give `--launcher {group}`, or leave it out."
            )


def _check_fsdp(settings: Settings) -> None:
    fsdp = settings.fsdp
    if fsdp is None or settings.source_of("fsdp.fsdp_version").kind == "argument":
        return  # an object that the caller built has been checked by its class
    version = settings.quote("fsdp.fsdp_version")
    if fsdp.fsdp_version == 2:
        _check_fsdp2(settings, fsdp, version)
    elif fsdp.activation_checkpointing_offload:
        raise SettingError(
            f"{settings.quote('fsdp.activation_checkpointing_offload')} needs version 2, but there is {version}. Give "
            "`--fsdp_version 2`."
        )
    if fsdp.activation_checkpointing_offload and not fsdp.activation_checkpointing:
        raise SettingError(
            f"{settings.quote('fsdp.activation_checkpointing_offload')} needs "
            "`fsdp_activation_checkpointing`: it sets "
            "where checkpointed inputs are kept. Turn both on."
        )


def _check_fsdp2(settings: Settings, fsdp: FsdpOptions, version: str) -> None:
    if fsdp.state_dict_type == "LOCAL_STATE_DICT":
        raise SettingError(
            f"{settings.quote('fsdp.state_dict_type')} does not exist in {version}. "
            "Give FULL_STATE_DICT or SHARDED_STATE_DICT."
        )
    unsharded = [name for name in ("sharding_strategy", "reshard_after_forward") if getattr(fsdp, name) == "NO_SHARD"]
    if unsharded:
        raise SettingError(
            f"{settings.quote(f'fsdp.{unsharded[0]}')} has no equal in {version}, which always shards. Leave FSDP out "
            "(DDP trains without sharding), or use version 1."
        )
    if fsdp.reshard_after_forward is not None and not isinstance(fsdp.reshard_after_forward, bool):
        meant = "true" if RESHARDS[fsdp.reshard_after_forward] else "false"
        raise SettingError(
            f"{settings.quote('fsdp.reshard_after_forward')} is a value of version 1, but there is {version}. "
            f"Give true or false; {fsdp.reshard_after_forward} is {meant}."
        )


def _check_groups(settings: Settings) -> None:
    """Check the groups in use by the functions of their rows."""
    for row in ROWS:
        if row.check is not None and getattr(settings, row.name) is not None:
            row.check(settings)


def _check_parallelism(settings: Settings) -> None:
    parallelism = settings.parallelism
    if parallelism is None:
        return
    if parallelism.cp_size > 1 and parallelism.sp_size > 1:
        raise SettingError(
            f"{settings.quote('parallelism.cp_size')} and {settings.quote('parallelism.sp_size')} both split the "
            "sequence. Set one of them to 1."
        )
    splits = "parallelism.tp_size" if parallelism.tp_size > 1 else "parallelism.cp_size"
    if _value(settings, splits) > 1 and parallelism.dp_replicate_size > 1 and parallelism.dp_shard_size == 1:
        raise SettingError(
            f"{settings.quote(splits)} cannot be combined with "
            f"{settings.quote('parallelism.dp_replicate_size')} while "
            "`dp_shard_size` is 1. Use dp_shard_size instead of dp_replicate_size, or both."
        )
    from_launcher = settings.source_of("paradigm.use_parallelism_config").kind in ("flag", "file")
    if from_launcher:
        _check_parallelism_engine(settings)
        if settings.launch.num_processes is not None:
            check_world(settings, settings.launch.num_processes)
    _check_sequence(settings)


def _check_parallelism_engine(settings: Settings) -> None:
    """Refuse launched parallelism with an engine that has no device mesh."""
    asked = settings.quote("paradigm.use_parallelism_config")
    if settings.engine or (settings.fsdp is None and _value(settings, "parallelism.pp_size") > 1):
        return
    if settings.fsdp is None:
        raise SettingError(f"{asked} needs FSDP version 2. Give `--use_fsdp --fsdp_version 2`.")
    if settings.fsdp.fsdp_version != 2:
        raise SettingError(
            f"{asked} needs FSDP version 2, but there is {settings.quote('fsdp.fsdp_version')}. Give "
            "`--fsdp_version 2`."
        )


def _check_sequence(settings: Settings) -> None:
    parallelism, sequence = settings.parallelism, settings.sequence
    if parallelism is None or sequence is None or parallelism.sp_size == 1:
        return
    if not sequence.sp_seq_length_is_variable and sequence.sp_seq_length is None:
        raise SettingError(
            f"{settings.quote('sequence.sp_seq_length_is_variable')} needs `sp_seq_length`: give the length, or let it "
            "be variable."
        )
    attention = sequence.sp_attn_implementation
    if attention is not None and attention not in ATTENTION_KINDS and "/" not in attention:
        raise SettingError(
            f"{settings.quote('sequence.sp_attn_implementation')} does not work with sequence parallelism. "
            f"Give {', '.join(ATTENTION_KINDS)}, or a flash attention kernel of the hub."
        )


def _check_sagemaker(settings: Settings) -> None:
    sagemaker = settings.sagemaker
    assert sagemaker is not None
    for name in ("iam_role_name", "ec2_instance_type"):
        if getattr(sagemaker, name) is None:
            raise SettingError(f"A SageMaker job needs `{name}`: set it in the configuration file.")
    for name in ("module", "no_python"):
        if getattr(settings.launch, name):
            raise SettingError(
                f"{settings.quote(f'launch.{name}')} does not work with SageMaker, which runs a .py file. Leave it out."
            )


def _value(settings: Settings, address: str) -> Any:
    group, _, name = address.partition(".")
    return getattr(getattr(settings, group), name)


_CHECKS: Final[tuple[Callable[[Settings], None], ...]] = (
    _check_guests,
    _check_hardware,
    _check_processes,
    _check_devices,
    _check_launcher,
    _check_cluster,
    _check_fsdp,
    _check_groups,
    _check_parallelism,
)
