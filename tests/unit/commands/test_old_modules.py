"""The documented modules and functions of the commands: importable, with the documented arguments, and working."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands import estimate, launch
from accelerate.commands.accelerate_cli import main
from accelerate.commands.config import get_config_parser
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.config.config_utils import (
    SubcommandHelpFormatter,
    _ask_field,
    _ask_options,
    _convert_compute_environment,
    _convert_distributed_mode,
    _convert_dynamo_backend,
    _convert_fp8_backend,
    _convert_mixed_precision,
    _convert_sagemaker_distributed_mode,
    _convert_yes_no_to_bool,
)
from accelerate.commands.config.sagemaker import get_sagemaker_input
from accelerate.commands.menu import BulletMenu
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

DOCUMENTED: dict[Callable[..., Any], str] = {
    launch.simple_launcher: "args",
    launch.multi_gpu_launcher: "args",
    launch.deepspeed_launcher: "args",
    launch.tpu_launcher: "args",
    launch.tpu_pod_launcher: "args",
    launch.sagemaker_launcher: "sagemaker_config args",
    get_config_parser: "subparsers",
    estimate.create_empty_model: "model_name library_name trust_remote_code access_token",
    estimate.create_ascii_table: "headers rows title",
    estimate.check_has_model: "error",
    estimate.verify_on_hub: "repo token",
    estimate.estimate_training_usage: "bytes mixed_precision msamp_config",
    _ask_field: "input_text convert_value default error_message",
    _ask_options: "input_text options convert_value default",
    BulletMenu: "prompt choices",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "def main():\n    pass\n"
        "names = ('RANK', 'WORLD_SIZE', 'ACCELERATE_MIXED_PRECISION', 'ACCELERATE_USE_CPU')\n"
        "with open(f\"{sys.argv[1]}{os.environ.get('RANK', '')}\", 'w') as file:\n"
        "    json.dump([os.environ.get(name) for name in names], file)\n"
    )
    return tmp_path


@pytest.mark.parametrize("function", DOCUMENTED, ids=lambda function: function.__name__)
def test_documented_functions_have_the_documented_arguments(function: Callable[..., Any]) -> None:
    assert list(inspect.signature(function).parameters) == DOCUMENTED[function].split()


def test_the_command_runs_under_its_documented_module_name() -> None:
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    done = subprocess.run([*words, "to-fsdp2", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "version 2" in done.stdout
    assert subprocess.run(words, capture_output=True).returncode == 1
    assert callable(main)


def parsed(*words: str) -> Namespace:
    return launch.launch_command_parser().parse_args([*words, "train.py", "out"])


def test_a_simple_launch_runs_the_program_once(folder: Path) -> None:
    launch.simple_launcher(parsed("--cpu", "--mixed_precision", "bf16", "--num_processes", "1"))
    assert json.loads((folder / "out").read_text())[2:] == ["bf16", "true"]
    with pytest.raises(subprocess.CalledProcessError):
        launch.simple_launcher(parsed("--cpu", "--num_processes", "1", "-m"))


def test_a_launch_on_several_processes_runs_every_rank(folder: Path) -> None:
    args, _, _ = launch._validate_launch_command(parsed("--cpu", "--num_processes", "2", "--main_process_port", "0"))
    launch.multi_gpu_launcher(args)
    assert [json.loads((folder / f"out{rank}").read_text())[:2] for rank in (0, 1)] == [["0", "2"], ["1", "2"]]


@pytest.mark.parametrize(
    ("start", "word"), [(launch.tpu_launcher, "accelerate.guests.xla.launcher"), (launch.tpu_pod_launcher, "gcloud")]
)
def test_tpu_launches_are_planned(
    folder: Path, capsys: pytest.CaptureFixture[str], start: Callable[[Namespace], None], word: str
) -> None:
    (folder / "tpu.yaml").write_text("distributed_type: XLA\ntpu_name: t\ntpu_zone: z\nnum_processes: 8\n")
    start(parsed("--config_file", "tpu.yaml", "--dry-run"))
    assert word in capsys.readouterr().out


def test_a_deepspeed_launch_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch.deepspeed_launcher(parsed("--zero_stage", "3", "--num_processes", "2", "--use_deepspeed", "--dry-run"))
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE=3" in capsys.readouterr().out


def test_a_sagemaker_job_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = SageMakerConfig("AMAZON_SAGEMAKER", "NO", "bf16", False, False, "ml.p4d.24xlarge", "role")  # type: ignore[arg-type]
    args = launch.launch_command_parser().parse_args(["--dry-run", "train.py", "--out", "x"])
    launch.sagemaker_launcher(job, args)
    assert "ml.p4d.24xlarge" in capsys.readouterr().out


def test_a_launch_is_a_subcommand_of_any_parser(folder: Path) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    parser = launch.launch_command_parser(commands)
    args = parser.parse_args(["--num-processes", "1", "--cpu", "train.py", "--lr", "1"])
    assert args.func is launch.launch_command
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command[1:] == ["train.py", "--lr", "1"] and environment["ACCELERATE_USE_CPU"] == "true"


def test_the_parser_of_config_knows_its_subcommands() -> None:
    parser = get_config_parser()
    args = parser.parse_args(["default", "--mixed_precision", "bf16"])
    assert (args.subcommand, args.mixed_precision) == ("default", "bf16") and callable(args.func)
    assert parser.parse_args([]).func.__name__ == "config_command"


def answers(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_interviews_return_the_configuration_that_the_answers_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, *[""] * 12)
    assert isinstance(get_cluster_input(), ClusterConfig)
    answers(monkeypatch, *[""] * 12)
    assert isinstance(get_user_input(), ClusterConfig)
    answers(monkeypatch, *[""] * 16)
    job = get_sagemaker_input()
    assert isinstance(job, SageMakerConfig) and job.py_version == "py312"


def test_single_questions_are_asked_until_they_can_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "perhaps", "YES", "")
    assert _ask_field("Sure? ", _convert_yes_no_to_bool, error_message="yes or no") is True
    assert _ask_field("How many? ", int, default=3) == 3
    answers(monkeypatch, "7", "1", "")
    assert BulletMenu("Which?", ["a", "b"]).run() == 1
    assert _ask_options("Which?", ["no", "fp16", "bf16"], _convert_mixed_precision, default=2) == "bf16"


def test_numbers_stand_for_the_documented_answers() -> None:
    assert _convert_compute_environment("1").value == "AMAZON_SAGEMAKER"
    assert [_convert_distributed_mode(n).value for n in ("0", "4", "10")] == ["NO", "MULTI_GPU", "XLA"]
    assert [_convert_dynamo_backend(n) for n in ("0", 2)] == ["EAGER", "INDUCTOR"]
    assert _convert_mixed_precision(3).value == "fp8"
    assert _convert_sagemaker_distributed_mode("1").value == "DATA_PARALLEL"
    assert [_convert_fp8_backend(n).value for n in (0, 1)] == ["AO", "TE"]
    with pytest.raises(ValueError, match="0 to 2"):
        _convert_fp8_backend("3")


def test_options_have_both_spellings_in_parsers_of_others() -> None:
    parser = CustomArgumentParser("x")
    parser.add_argument("--foo_bar", type=int)
    parser.add_argument("-s", "--some-switch", action="store_true")
    parser.add_argument_group("more").add_argument("--ba_z")
    assert vars(parser.parse_args(["--foo-bar", "4", "--some_switch", "--ba-z", "1"])) == {
        "foo_bar": 4,
        "some_switch": True,
        "ba_z": "1",
    }


def test_help_lists_subcommands_without_their_names_in_one_line() -> None:
    parser = argparse.ArgumentParser(formatter_class=SubcommandHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("one", help="the first")
    assert "{one}\n" not in parser.format_help() and "the first" in parser.format_help()


def test_a_table_has_a_frame_and_a_title() -> None:
    rows = [["float32", "1 GB"], ["int8", "250 MB"]]
    assert estimate.create_ascii_table(["dtype", "Largest Layer"], rows, "Memory").split("\n") == [
        "┌─────────────────────┐",
        "│        Memory       │",
        "├───────┬─────────────┤",
        "│ dtype │Largest Layer│",
        "├───────┼─────────────┤",
        "│float32│     1 GB    │",
        "│  int8 │    250 MB   │",
        "└───────┴─────────────┘",
    ]


def test_training_with_adam_takes_what_is_documented() -> None:
    usage = estimate.estimate_training_usage
    assert usage(1000, "float32") == {"model": 1000, "optimizer": 2000, "gradients": 1000, "step": 4000}
    assert usage(1000, "float16") == {"model": 1000, "optimizer": 2000, "gradients": 1500, "step": 2000}
    assert set(usage(1000, "int8").values()) == {-1}


def test_an_empty_model_is_built_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
                    "intermediate_size": 8, "vocab_size": 16, "architectures": ["BertModel"]})
    )  # fmt: skip
    model = estimate.create_empty_model(str(tmp_path), library_name="transformers")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_errors_say_which_library_lacks_the_model() -> None:
    assert estimate.check_has_model(OSError("x does not appear to have a file named model.bin")) == "transformers"
    assert estimate.check_has_model(ValueError("x")) == "unknown"


def test_the_old_addresses_of_extensions_are_importable() -> None:
    from accelerate.utils import rich, torch_xla

    assert callable(rich.install_rich_tracebacks) and callable(torch_xla.install_xla)
    assert os.environ.get("ACCELERATE_ENABLE_RICH") is None


def test_the_estimates_stand_at_their_public_address() -> None:
    from accelerate import estimate
    from accelerate.guests.estimate import plan, subject, trace

    assert estimate.footprint is plan.footprint and estimate.Layout is plan.Layout
    assert estimate.find_subject is subject.find_subject
    assert estimate.trace_training is trace.trace_training
