"""The documented functions take the Namespace of the own parser, before and after validation, and hand-made ones."""

from __future__ import annotations

import os
import stat
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    _filter_args,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

FILES = {
    "fsdp": "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n",
    "deepspeed": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3}\nuse_cpu: true\n",
    "multi": "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\ngpu_ids: 0,1\n",
    "mpi": "distributed_type: MULTI_CPU\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 0\nuse_cpu: true\n"
    "main_process_ip: 10.0.0.1\nmain_process_port: 29500\nmpirun_config: {mpirun_hostfile: /home/user/hostfile}\n",
    "one": "distributed_type: 'NO'\nnum_processes: 1\n",
}
#: What other programs fill in by hand: all that the documented functions read, most of it with its default.
BY_HAND: dict[str, Any] = {
    "num_processes": 2,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": 0,
    "same_network": False,
    "rdzv_backend": "static",
    "gpu_ids": "all",
    "mixed_precision": "no",
    "dynamo_backend": "NO",
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
    "use_fsdp": False,
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_version": "1",
    "use_deepspeed": False,
    "use_megatron_lm": False,
    "use_parallelism_config": False,
    "num_cpu_threads_per_process": 1,
    "enable_cpu_affinity": False,
    "module": False,
    "no_python": False,
    "debug": False,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(f"compute_environment: LOCAL_MACHINE\n{text}")
    return tmp_path


def parsed(*words: str) -> Namespace:
    return launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])


PREPARE = {
    "simple": prepare_simple_launcher_cmd_env,
    "multi": prepare_multi_gpu_env,
    "deepspeed": prepare_deepspeed_cmd_env,
}


@pytest.mark.parametrize("prepare", PREPARE)
@pytest.mark.parametrize("name", FILES)
def test_validation_changes_nothing_of_what_is_prepared_and_is_silent(name: str, prepare: str) -> None:
    if name == "mpi" and prepare == "deepspeed":
        pytest.skip("mpirun and DeepSpeed are two launchers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = PREPARE[prepare](parsed("--config_file", f"{name}.yaml"))
        args = _validate_launch_command(parsed("--config_file", f"{name}.yaml"))[0]
        assert PREPARE[prepare](args) == before
        again = _validate_launch_command(args)[0]
        assert PREPARE[prepare](Namespace(**vars(again))) == before


def test_validation_completes_from_the_file_and_says_what_came_from_there() -> None:
    args, configuration, has_precision = _validate_launch_command(parsed("--config_file", "multi.yaml", "--tee", "3"))
    assert (args.multi_gpu, args.num_processes, args.gpu_ids, args.mixed_precision) == (True, 2, "0,1", "bf16")
    assert (args.tee, args.fsdp_version, args.num_machines, args.use_fsdp, args.use_cpu) == ("3", "1", 1, False, False)
    assert isinstance(configuration, ClusterConfig) and configuration.num_processes == 2
    assert has_precision is True
    args = _validate_launch_command(parsed("--config_file", "fsdp.yaml"))[0]
    assert (args.use_fsdp, args.multi_gpu, args.fsdp_offload_params, args.fsdp_version) == (True, False, True, 2)


def test_values_of_the_file_have_their_types_and_the_script_need_not_exist(folder: Path) -> None:
    section = "fsdp_use_orig_params: false, fsdp_min_num_params: 100, fsdp_transformer_layer_cls_to_wrap: 'A,B'"
    (folder / "typed.yaml").write_text(
        f"distributed_type: FSDP\nnum_processes: 2\ndebug: true\nfsdp_config: {{{section}}}\n"
    )
    parser = launch_command_parser()
    args = _validate_launch_command(parser.parse_args(["--config_file", "typed.yaml", "not_there.py"]))[0]
    assert (args.num_processes, args.debug, args.fsdp_use_orig_params, args.fsdp_min_num_params) == (
        2,
        True,
        False,
        100,
    )
    assert args.fsdp_transformer_layer_cls_to_wrap == "A,B"
    assert args.training_script == "not_there.py"


def test_what_is_changed_after_validation_counts() -> None:
    args = _validate_launch_command(parsed("--config_file", "multi.yaml"))[0]
    args.mixed_precision = "fp16"
    assert prepare_multi_gpu_env(args)["ACCELERATE_MIXED_PRECISION"] == "fp16"


def test_a_hand_made_namespace_is_taken_without_a_remark() -> None:
    args = Namespace(**BY_HAND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment = prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "ACCELERATE_USE_FSDP" not in environment
    assert args.nproc_per_node == "2"
    assert 0 < args.main_process_port == int(args.master_port)
    command, environment = prepare_simple_launcher_cmd_env(
        Namespace(**{**BY_HAND, "num_processes": 1, "training_script": "train.py", "training_script_args": ["--x"]})
    )
    assert command == [sys.executable, "train.py", "--x"]
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_machine_among_several_is_told_where_to_meet() -> None:
    several = {**BY_HAND, "num_machines": 2, "num_processes": 4, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
    args = Namespace(**{**several, "main_process_port": 29501, "same_network": True})
    prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("2", "2", 1)
    assert (args.master_addr, args.master_port) == ("10.0.0.1", "29501")
    args = Namespace(**{**several, "main_process_port": 29501})
    prepare_multi_gpu_env(args)
    assert args.rdzv_endpoint == "10.0.0.1:29501"
    assert not hasattr(args, "master_addr")


def test_the_prepared_namespace_is_what_torchruns_parser_takes() -> None:
    from torch.distributed.run import get_args_parser

    args = _validate_launch_command(parsed("--config_file", "multi.yaml", "--max_restarts", "2"))[0]
    prepare_multi_gpu_env(args)
    found = _filter_args(args, get_args_parser(), ["--module", "train"])
    assert (found.nproc_per_node, found.max_restarts, found.training_script) == ("2", 2, "train.py")


MPIS = {
    "Intel(R) MPI Library for Linux* OS, Version 2021": ["-f", "/home/user/hostfile", "-ppn", "4", "-n", "8"],
    "mpirun (Open MPI) 4.1.4": [
        *("--hostfile", "/home/user/hostfile", "--npernode", "4", "-n", "8"),
        *("--bind-to", "socket"),
    ],
}


@pytest.mark.parametrize("version", MPIS)
@pytest.mark.parametrize("validated", [False, True])
def test_one_mpirun_starts_the_processes_of_all_machines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, validated: bool
) -> None:
    mpirun = folder / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(mpirun.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}")
    args = parsed("--config_file", "mpi.yaml")
    args = _validate_launch_command(args)[0] if validated else args
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command == ["mpirun", *MPIS[version], sys.executable, "train.py", "--lr", "1"]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert environment["ACCELERATE_USE_CPU"] == "true"


def test_a_file_without_a_type_is_refused_with_its_last_line(folder: Path) -> None:
    (folder / "cut.yaml").write_text("compute_environment: LOCAL_MACHINE\ndebug: false\n")
    with pytest.raises(ValueError, match=r"cut.yaml:2: .*`distributed_type`.*cut off"):
        _validate_launch_command(parsed("--config_file", "cut.yaml"))
