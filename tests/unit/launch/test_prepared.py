"""The documented functions that say what a launch would run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from accelerate.commands.config.config_args import SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.guests.xla.launcher import install_xla
from accelerate.launch.prepared import (
    PrepareForLaunch,
    _filter_args,
    convert_nargs_to_dict,
    env_var_path_add,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)
from accelerate.settings.labels import ComputeEnvironment, SageMakerDistributedType


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("")
    return "s.py"


def test_a_simple_launch_is_a_command_and_a_whole_environment(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", script, "--lr", "1"])
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, script, "--lr", "1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["PATH"] == os.environ["PATH"]


def test_several_ranks_share_an_environment(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "2", script])
    assert prepare_multi_gpu_env(args)["ACCELERATE_USE_CPU"] == "true"


def test_bf16_on_a_tpu_is_a_variable(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", script])
    assert prepare_tpu(args, {})[1]["XLA_USE_BF16"] == "1"


@pytest.mark.parametrize("is_parsed", [True, False], ids=["parsed", "by hand"])
@pytest.mark.parametrize(
    ("flags", "values", "expected"),
    [
        (["--mixed_precision", "bf16"], {"mixed_precision": "bf16"}, {"XLA_USE_BF16": "1"}),
        (
            ["--mixed_precision", "bf16", "--downcast_bf16"],
            {"mixed_precision": "bf16", "downcast_bf16": True},
            {"XLA_DOWNCAST_BF16": "1"},
        ),
        (["--debug"], {"mixed_precision": None, "debug": True}, {"ACCELERATE_DEBUG_MODE": "true"}),
        ([], {"mixed_precision": "no"}, {}),
    ],
)
def test_tpu_workers_are_described_by_parsed_arguments_and_by_those_made_by_hand(
    script: str, flags: list[str], values: dict[str, object], expected: dict[str, str], is_parsed: bool
) -> None:
    by_hand = {"downcast_bf16": False, "debug": False, "tpu_vm": ["a"], "tpu_name": "pod", "vm": None, "tpu": True}
    args = argparse.Namespace(**{**by_hand, **values})
    if is_parsed:
        args = launch_command_parser().parse_args([*flags, "--tpu", "--vm", "a", script])
        args.tpu_name = "pod"  # from the configuration file, never from the command line
    given = {"KEPT": "1"}
    told, environment = prepare_tpu(args, given, pod=True)
    assert told is args and environment is given and environment == {"KEPT": "1", **expected}
    assert (args.vm, args.tpu) == (["a"], "pod")


def test_arguments_become_the_hyper_parameters_of_a_job() -> None:
    words = ["--lr", "1e-3", "--steps=5", "--offset", "-2", "--name", "a b", "--fast", "True"]
    assert convert_nargs_to_dict(words) == {"lr": 1e-3, "steps": 5, "offset": -2, "name": "a b", "fast": True}


@pytest.mark.parametrize("words", [["--fast"], ["--fast", "--lr", "1"], ["stray"]])
def test_options_without_a_value_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="without"):
        convert_nargs_to_dict(words)


def test_a_prepared_function_knows_its_rank() -> None:
    seen: list[tuple[str | None, ...]] = []
    names = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")
    os.environ.update({"NPROC": "4", "NODE_RANK": "1"})
    PrepareForLaunch(lambda word: seen.append((word, *map(os.environ.get, names))), "MULTI_GPU")(2, "x")
    assert seen == [("x", "6", "2", "1")]


def test_a_path_is_added_to_a_list_of_paths() -> None:
    os.environ["SOME_PATHS"] = "/a"
    assert env_var_path_add("SOME_PATHS", "/b") == "/a:/b"
    assert env_var_path_add("NO_PATHS", "/b") == "/b"
    assert os.environ["SOME_PATHS"] == "/a"


def test_deepspeed_on_one_host_leaves_the_ranks_to_torchrun(script: str) -> None:
    args = launch_command_parser().parse_args(["--use_deepspeed", "--zero_stage", "3", "--num_processes", "2", script])
    command, environment = prepare_deepspeed_cmd_env(args)
    assert command is None
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_deepspeed_on_several_hosts_is_started_by_its_own_launcher(script: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    words = ["--use_deepspeed", "--deepspeed_hostfile", str(hosts), "--deepspeed_multinode_launcher", "pdsh"]
    machines = ["--num_machines", "2", "--num_processes", "4", "--main_process_ip", "a", "--main_process_port", "29500"]
    command, environment = prepare_deepspeed_cmd_env(
        launch_command_parser().parse_args([*words, *machines, script, "--lr", "1"])
    )
    assert command is not None and command[0] == "deepspeed"
    assert str(hosts) in command
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"


def test_a_sagemaker_job_is_the_arguments_of_an_estimator(script: str, tmp_path: Path) -> None:
    channels = tmp_path / "channels.tsv"
    channels.write_text("channel_name\tdata_location\ntrain\ts3://bucket/train\n")
    described = SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType.DATA_PARALLEL,
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        ec2_instance_type="ml.p4d.24xlarge",
        iam_role_name="trainer",
        num_machines=2,
        sagemaker_inputs_file=str(channels),
    )
    args = launch_command_parser().parse_args(["--mixed_precision", "bf16", script, "--lr", "0.1"])
    estimator, inputs = prepare_sagemager_args_inputs(described, args)
    assert inputs == {"train": "s3://bucket/train"}
    assert (estimator["entry_point"], estimator["role"], estimator["instance_count"]) == ("s.py", "trainer", 2)
    assert estimator["distribution"] == {"torch_distributed": {"enabled": True}}
    assert estimator["hyperparameters"] == {"lr": "0.1"}
    assert estimator["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_a_sagemaker_job_is_described_by_parsed_arguments_and_by_those_made_by_hand(script: str) -> None:
    described = SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType.NO,
        mixed_precision="fp16",
        use_cpu=False,
        debug=False,
        ec2_instance_type="ml.p3.2xlarge",
        iam_role_name="trainer",
    )
    parsed = launch_command_parser().parse_args(["--mixed_precision", "fp16", script, "--lr", "0.1"])
    by_hand = argparse.Namespace(
        mixed_precision="fp16",
        training_script=script,
        training_script_args=["--lr", "0.1"],
        module=False,
        no_python=False,
        dynamo_backend="no",
        dynamo_mode="default",
        dynamo_use_fullgraph=False,
        dynamo_use_dynamic=False,
        dynamo_use_regional_compilation=False,
        aws_access_key_id=None,
        aws_secret_access_key=None,
    )
    (estimator, inputs), (other, others) = (
        prepare_sagemager_args_inputs(described, args) for args in (parsed, by_hand)
    )
    assert estimator["entry_point"] == "s.py" and estimator["environment"]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert inputs is None and others is None
    different = {name: (estimator[name], other[name]) for name in estimator if estimator[name] != other.get(name)}
    assert not different and estimator.keys() == other.keys()


def test_arguments_are_filtered_by_what_another_parser_knows() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", default="1:1")
    parser.add_argument("--tee", default="0")
    known = _filter_args(argparse.Namespace(nnodes="2", mixed_precision="bf16"), parser)
    assert vars(known) == {"nnodes": "2", "tee": "0"}


def test_xla_is_installed_in_colab_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Colab"):
        install_xla()
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> object:
        commands.append(command)
        return SimpleNamespace(returncode=len(commands) - 1)

    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setattr("subprocess.run", run)
    install_xla(upgrade=True)
    assert commands[0][1:4] == ["-m", "pip", "install"] and commands[0][-1].startswith("torch_xla[tpu]==2.")
    with pytest.raises(RuntimeError, match="pip"):
        install_xla(upgrade=True)
