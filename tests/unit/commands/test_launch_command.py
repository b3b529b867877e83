"""The launcher's command line: what is read, what is refused, what reaches the script."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate.commands import launch, main
from accelerate.commands.launch import launch_command, launch_command_parser, plan_launch
from accelerate.guests.megatron import options as megatron_options
from accelerate.launch import preflight
from accelerate.launch.arguments import settings_of
from accelerate.launch.engine import count_processes
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.preflight import Host, check_cheap
from accelerate.optional import can_be_found, installed_version
from accelerate.ports import get_free_port
from accelerate.settings.tree import launch_options_of
from tests.python_path import python_path

ROOT = Path(__file__).resolve().parents[3]
MULTI = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_processes: 3
num_machines: 1
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
use_cpu: false
debug: false
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    monkeypatch.chdir(tmp_path)
    return path


def parsed(*words: str) -> Any:
    return launch_command_parser().parse_args(list(words))


def plan(*words: str) -> LaunchPlan:
    """Plan as on a machine on which nothing listens; another test's launch may hold the default port meanwhile."""
    with mock.patch.object(preflight, "is_port_in_use", return_value=False):
        return plan_launch(parsed(*words))[2]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code = launch.main(list(words))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2, (out, err)
    assert "Traceback" not in err
    assert 1 <= len(err.splitlines()) <= 5
    return err


# The command line


def test_every_option_is_accepted_in_both_spellings() -> None:
    parser = launch_command_parser()
    known = parser._option_string_actions
    for option in launch_options_of():
        assert option.flag is not None
        assert known[option.flag] is known["--" + option.flag[2:].replace("_", "-")]
    assert len(launch_options_of()) >= 110


def test_abbreviations_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no option --num_proc" in refused(capsys, "--num_proc", "2", "s.py")


def test_a_misspelt_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean --num_processes?" in refused(capsys, "--num-procesess", "2", "s.py")
    assert "Did you mean --mixed_precision?" in refused(capsys, "--mixed_precison=bf16", "s.py")


def test_arguments_of_the_script_are_left_alone() -> None:
    words = ["--num_processes", "4", "--cpu", "--", "-m", "--help", "--config_file", "x", "--unknown=1", ""]
    args = parsed("--cpu", "s.py", *words)
    assert args.training_script == "s.py"
    assert args.training_script_args == words
    assert args.num_processes is None


def test_a_value_may_follow_or_be_joined() -> None:
    assert parsed("--num_processes=2", "s.py").num_processes == 2
    assert parsed("--num-processes", "2", "s.py", "x").num_processes == 2
    assert parsed("-m", "package.module", "x").training_script == "package.module"
    assert parsed("-t", "3", "s.py").tee == "3"
    assert parsed("--", "s.py", "--cpu").training_script_args == ["--cpu"]


text = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=20)
#: Words that a shell, a launcher or an argument parser could be tempted to read.
nasty = st.one_of(
    text, st.sampled_from(["$HOME", "`id`", "; ls", "--cpu", "--", "-h", "*", "a b", "'", '"', "\\n", "=", "@f"])
)


@given(st.lists(nasty, max_size=6))
def test_any_words_after_the_script_are_its_arguments(words: list[str]) -> None:
    assert parsed("--cpu", "s.py", *words).training_script_args == words


@given(words=st.lists(nasty.filter(lambda word: "\x00" not in word), max_size=6))
@settings(max_examples=15, deadline=None)
def test_any_words_reach_the_script_unchanged_and_unevaluated(
    words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "s.py").write_text("import json, sys, os\nopen(os.environ['OUT'], 'w').write(json.dumps(sys.argv[1:]))\n")
    environment = {**os.environ, "PYTHONPATH": python_path(), "OUT": str(folder / "out"), "ODD": "$(touch pwned)"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "s.py", *words]
    subprocess.run(command, check=True, cwd=folder, env=environment, timeout=30)
    import json

    assert json.loads((folder / "out").read_text()) == words
    assert sorted(path.name for path in folder.iterdir()) == ["out", "s.py"]


def test_no_words_give_the_help_the_reason_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([]) == 1
    shown = capsys.readouterr()
    assert "Usage" in shown.out and "no script was given" in shown.err


# One process per device


@pytest.mark.parametrize("spelling", [("--num_processes", "-1"), ("--num-processes=-1",), ("--num_processes", " -1 ")])
def test_minus_one_is_one_process_per_device(script: Path, spelling: tuple[str, ...]) -> None:
    args = parsed("--multi_gpu", *spelling, str(script))
    assert count_processes(settings_of(args), Host(kind="cuda", num_devices=4)) == 4
    assert plan("--cpu", *spelling, str(script)) == plan("--cpu", str(script))


def test_minus_one_comes_before_the_number_of_the_file(script: Path) -> None:
    Path("three.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n")
    Path("minus.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: -1\nuse_cpu: true\n")
    Path("bare.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\n")
    bare = plan("--config_file", "bare.yaml", str(script))
    assert plan("--config_file", "three.yaml", "--num_processes", "-1", str(script)) == bare
    assert plan("--config_file", "minus.yaml", str(script)) == bare
    by_hand = parsed("--config_file", "three.yaml", str(script))
    by_hand.num_processes = -1
    assert count_processes(settings_of(by_hand), Host()) == 1


def test_the_help_says_what_minus_one_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    assert "-1, or not given: one per device" in " ".join(capsys.readouterr().out.split())


# torchrun's spellings


@pytest.mark.parametrize("dash", ["_", "-"])
def test_torchruns_names_mean_the_same(script: Path, dash: str) -> None:
    theirs = "--nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500"
    ours = "--num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29500"
    flags = [word.replace("_", dash) if word.startswith("--") else word for word in theirs.split()]
    assert plan("--cpu", *flags, str(script)) == plan("--cpu", *ours.split(), str(script))


def test_torchruns_count_is_that_of_one_machine_of_the_file(script: Path) -> None:
    Path("c.yaml").write_text(
        "distributed_type: MULTI_CPU\nnum_machines: 2\nmachine_rank: 0\nnum_processes: 2\nmain_process_ip: 10.0.0.1\n"
        "main_process_port: 29500\nuse_cpu: true\n"
    )
    assert plan("--config_file", "c.yaml", "--nproc_per_node", "3", str(script)) == plan(
        "--config_file", "c.yaml", "--num_processes", "6", str(script)
    )
    assert plan("--cpu", "--nproc_per_node", "auto", str(script)) == plan("--cpu", str(script))
    Path("one.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n")
    Path("bare.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\n")
    assert plan("--config_file", "one.yaml", "--nproc_per_node", "auto", str(script)) == plan(
        "--config_file", "bare.yaml", str(script)
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--nproc_per_node", "2", "--num_processes", "3"), "counts the processes of all machines"),
        (("--nproc_per_node", "0"), "no number of processes"),
        (("--nproc_per_node", "many"), "no number of processes"),
    ],
)
def test_torchruns_count_is_refused_where_it_cannot_be(
    script: Path, words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refused(capsys, "--cpu", *words, str(script))


@pytest.mark.skipif(installed_version("deepspeed") is not None, reason="DeepSpeed is installed")
def test_an_engine_that_is_missing_is_said_before_anything_starts(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'deepspeed' isn't installed" in refused(capsys, "--use_deepspeed", "--num_processes", "2", str(script))


@pytest.mark.skipif(can_be_found("megatron.training"), reason="Megatron-LM is installed")
def test_a_missing_megatron_is_said_too(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--use_megatron_lm", "--num_processes", "2", str(script))
    said = refused(capsys, *words)
    assert "(flag --use_megatron_lm), but Megatron-LM" in said and "NVIDIA/Megatron-LM" in said
    monkeypatch.setattr(megatron_options, "can_be_found", lambda name: name == "megatron.training")
    check_cheap(plan_launch(parsed(*words))[0], {})


@pytest.mark.parametrize("flag", ["--help-all", "--help_all"])
def test_the_short_help_fits_two_screens_and_the_full_one_has_every_option(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for word in ("--help", flag):
        with contextlib.suppress(SystemExit):
            launch.main([word])
    short, full = capsys.readouterr().out.split("more options: accelerate launch --help-all")
    assert len(short.splitlines()) <= 60
    for option in launch_options_of():
        assert str(option.flag) in full


# Precedence


def precision(*words: str) -> str:
    return plan(*words).environment["ACCELERATE_MIXED_PRECISION"]


@pytest.mark.parametrize("flag", [None, "fp16"])
@pytest.mark.parametrize("in_file", [None, "bf16"])
@pytest.mark.parametrize("in_environment", [None, "no", "fp16"])
def test_flag_wins_over_file_over_environment_over_default(
    script: Path,
    flag: str | None,
    in_file: str | None,
    in_environment: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [] if flag is None else ["--mixed_precision", flag]
    if in_file is not None:
        Path("c.yaml").write_text(f"distributed_type: 'NO'\nmixed_precision: {in_file}\n")
        words += ["--config_file", "c.yaml"]
    if in_environment is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", in_environment)
    expected = next(value for value in (flag, in_file, in_environment, "no") if value is not None)
    assert precision(*words, str(script)) == expected


def test_an_edited_file_takes_effect(script: Path) -> None:
    path = Path("c.yaml")
    path.write_text(MULTI)
    assert len(plan("--config_file", "c.yaml", str(script)).ranks) == 3
    path.write_text(MULTI.replace("num_processes: 3", "num_processes: 2"))
    assert len(plan("--config_file", "c.yaml", str(script)).ranks) == 2


def test_the_default_file_is_read_unless_the_cpu_is_asked_for(script: Path) -> None:
    home = Path(os.environ["HF_HOME"]) / "accelerate"
    home.mkdir(parents=True)
    (home / "default_config.yaml").write_text(MULTI)
    assert precision(str(script)) == "bf16"
    assert precision("--cpu", str(script)) == "no"


def test_the_old_precision_flag_works(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert precision("--cpu", "--fp16", str(script)) == "fp16"
    assert "--mixed_precision fp16" in capsys.readouterr().err


def test_explain_names_the_source_of_a_value(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(MULTI)
    assert launch.main(["--config_file", "c.yaml", "--num_processes", "2", "--explain", str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("mixed_precision" in line and "bf16" in line and "c.yaml:3" in line for line in lines)
    assert any("num_processes" in line and "2" in line and "--num_processes" in line for line in lines)


def test_dry_run_prints_the_plan_and_starts_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("open('started', 'w')")
    port = str(get_free_port())
    words = ["--cpu", "--num_processes", "2", "--main_process_port", port, "--dry-run", str(script), "a b"]
    assert launch.main(words) == 0
    out = capsys.readouterr().out
    assert "'a b'" in out and "RANK=1 LOCAL_RANK=1" in out and f"127.0.0.1:{port}" in out
    assert not Path("started").exists()


# Mistakes

MISTAKES = {
    "no script": (["--cpu"], "no script to launch"),
    "missing script": (["--cpu", "nowhere.py"], "'nowhere.py' doesn't exist"),
    "text for a number": (["--num_processes", "two", "s"], "whole number"),
    "zero processes": (["--num_processes", "0", "s"], "at least 1 or -1 for the default"),
    "negative processes": (["--num_processes", "-2", "s"], "at least 1 or -1 for the default"),
    "fraction": (["--num_processes", "1.5", "s"], "whole number"),
    "negative machines": (["--num_machines", "-1", "s"], "at least 1"),
    "unknown precision": (["--mixed_precision", "bf61", "s"], "Did you mean 'bf16'?"),
    "port out of range": (["--main_process_port", "70000", "s"], "at most 65535"),
    "two devices": (["--cpu", "--multi_gpu", "--num_processes", "2", "s"], "exclude each other"),
    "two engines": (["--use_fsdp", "--use_deepspeed", "s"], "exclude each other"),
    "one gpu": (["--multi_gpu", "--num_processes", "1", "s"], "at least 2 processes"),
    "uneven machines": (
        ["--num_machines", "2", "--num_processes", "3", "--main_process_ip", "a", "--main_process_port", "1", "s"],
        "multiple of 2",
    ),
    "no address": (["--num_machines", "2", "--num_processes", "2", "s"], "main_process_ip"),
    "rank too high": (
        ["--num_machines", "2", "--machine_rank", "2", "--main_process_ip", "a", "--main_process_port", "1", "s"],
        "machine_rank",
    ),
    "module and no_python": (["-m", "--no_python", "s"], "exclude each other"),
    "no such command": (["--no_python", "no-such-command"], "no such command"),
    "not executable": (["--no_python", "s"], "chmod +x"),
    "a folder": (["--cpu", "."], "no `__main__.py`"),
    "bad tee": (["--cpu", "--tee", "x", "s"], "--tee x"),
    "tee of a rank that isn't there": (
        ["--cpu", "--num_processes", "2", "--tee", "0:1,5:3", "s"],
        "names rank 5, but a machine of this run has 2",
    ),
    "tee of one process": (["--cpu", "--tee", "1:3", "s"], "its last local rank is 0"),
    "tee of a rank of another machine": (
        [
            "--cpu",
            "--num_machines",
            "2",
            "--num_processes",
            "4",
            "--main_process_ip",
            "a",
            "--main_process_port",
            "1",
            "--tee",
            "2:3",
            "s",
        ],
        "its last local rank is 1",
    ),
    "tee of a negative rank": (["--cpu", "--tee=-1:3", "s"], "the first local rank is 0"),
    "tee of a rank twice": (["--cpu", "--tee", "0:1,0:2", "s"], "names rank 0 twice"),
    "tee under torchrun": (
        ["--cpu", "--num_processes", "2", "--max_restarts", "1", "--tee", "2:3", "s"],
        "names rank 2",
    ),
    "missing file": (["--config_file", "nowhere.yaml", "s"], "nowhere.yaml"),
    "no torch_xla": (["--tpu", "s"], 'pip install "torch_xla"'),
    "no port": (["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "a", "s"], "main_process_port"),
    "free port for several": (
        ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "a", "--main_process_port", "0", "s"],
        "fixed port",
    ),
    "device twice": (["--gpu_ids", "0,0", "s"], "twice"),
    "device list": (["--gpu_ids", "0,,1", "s"], "not a list of devices"),
    "restarts": (["--max_restarts", "-1", "s"], "at least 0"),
    "threads": (["--num_cpu_threads_per_process", "0", "s"], "at least 1"),
    "rendezvous": (["--rdzv_backend", "statc", "s"], "Did you mean 'static'?"),
    "rendezvous settings": (["--rdzv_conf", "timeout", "s"], "key1=value1"),
    "unknown backend": (["--dynamo_backend", "inductr", "s"], "INDUCTOR"),
    "option of another program": (["--learning_rate", "1", "s"], "no option --learning_rate"),
    "value missing": (["--num_processes"], "expected one argument"),
    "empty name": (["--cpu", ""], "doesn't exist"),
    "fsdp switch": (["--use_fsdp", "--fsdp_offload_params", "maybe", "s"], "true or false"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_the_command_line_is_refused_before_anything_starts(
    name: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected = MISTAKES[name]
    script.write_text("open('started', 'w')")
    words = [str(script) if word == "s" else word for word in words]
    assert expected in refused(capsys, *words)
    assert not Path("started").exists()


FILE_MISTAKES = {
    "unknown key": ("num_proceses: 2", "c.yaml:2: unknown key `num_proceses`. Did you mean `num_processes`?"),
    "bad value": ("num_processes: many", "c.yaml:2"),
    "bad precision": ("mixed_precision: fp61", "c.yaml:2"),
    "bad type": ("num_machines: 0", "c.yaml:2"),
    "not YAML": ("a: b: c", "c.yaml:2"),
    "twice": ("debug: true\ndebug: false", "c.yaml:3"),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_a_mistake_in_the_file_is_refused_with_file_and_line(
    name: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, expected = FILE_MISTAKES[name]
    Path("c.yaml").write_text(f"distributed_type: MULTI_CPU\n{text}\n")
    assert expected in refused(capsys, "--config_file", "c.yaml", str(script))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ACCELERATE_MIXED_PRECISION", "half"), ("ACCELERATE_USE_CPU", "perhaps"), ("ACCELERATE_DEBUG_MODE", "2")],
)
def test_a_mistake_in_the_environment_is_refused_with_the_variable(
    variable: str, value: str, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert variable in refused(capsys, str(script))


def test_a_rank_that_writes_to_a_terminal_still_does(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    (tmp_path / "s.py").write_text("import os; os.write(2, f'terminal {os.isatty(2)}\\n'.encode())")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    words = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", "0", "s.py"]
    child = pexpect.spawn(sys.executable, words, cwd=tmp_path, env=environment, timeout=30, encoding="utf-8")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert child.before.count("terminal True") == 2


def test_a_busy_port_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        err = refused(capsys, "--cpu", "--num_processes", "2", "--main_process_port", port, str(script))
    assert f"Port {port} (flag --main_process_port) is in use" in err


# Running


def test_a_warning_of_the_command_is_one_line_without_our_source(script: Path) -> None:
    Path("c.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\nfp8_config: {backend: TE}\n")
    words = ["--config_file", "c.yaml", "--dry-run", str(script)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    (line,) = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert line.startswith(
        "accelerate launch: UserWarning: Given without effect in this run: `fp8_config.backend` (c.yaml:3)"
    )


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--num_processes", "2"], "", "--num_processes"),
        (["--num-processes=2", "--use_fsdp"], "print(accelerator.num_processes)", "--num-processes and --use_fsdp"),
        (["--mixed_precision", "bf16"], "", "--mixed_precision"),
        (["--monitor"], "", "--monitor"),
        (["--mixed_precision", "bf16"], "parser.add_argument('--mixed_precision')", ""),
        (["--mixed_precision", "bf16"], "parser.add_argument('--mixed-precision')", ""),
        (["--mixed_precision", "bf16"], "class Arguments:\n    mixed_precision: str = 'no'", ""),
        (["--", "--num_processes", "2"], "", ""),
        (["--learning_rate", "1", "num_processes"], "", ""),
        (["--fp16", "--debug", "--help", "--gradient_accumulation_steps", "2"], "", ""),  # transformers' own
    ],
)
def test_an_option_that_went_to_the_script_is_remarked_on_once(
    script: Path, words: list[str], code: str, named: str
) -> None:
    script.write_text(code)
    said = f"{script} gets {named} as its own: options of `accelerate launch` come before the script"
    made = plan_launch(parsed("--cpu", str(script), *words))[2]
    assert made.notes == (said,) * bool(named) and made.argv[2:] == tuple(words)


def test_the_monitor_may_be_given_a_folder() -> None:
    assert parsed("script.py").monitor is False
    for words in (["--monitor"], ["--monitor", "--cpu"], ["--cpu", "--monitor"]):
        assert parsed(*words, "script.py", "a").monitor is True
        assert parsed(*words, "script.py", "a").training_script_args == ["a"]
    assert parsed("--monitor=run", "script.py").monitor == "run"
    own = argparse.ArgumentParser()  # of another program, which takes the command in
    launch_command_parser(own.add_subparsers())
    args = own.parse_args(["launch", "--monitor", "script.py", "--monitor"])
    assert args.monitor is True and (args.training_script, args.training_script_args) == ("script.py", ["--monitor"])


@pytest.mark.filterwarnings("always:Given without effect:UserWarning")
@pytest.mark.parametrize(
    ("flags", "config", "named"),
    [
        (["--cpu", "--gpu_ids", "0,1"], "", "`--gpu_ids 0,1` (flag --gpu_ids)"),
        ([], "distributed_type: MULTI_CPU\nnum_processes: 2\ngpu_ids: 1,3\n", "`gpu_ids: 1,3` (file c.yaml:3)"),
        (["--cpu"], "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '0'\n", "`gpu_ids: 0` (file c.yaml:3)"),
        (["--cpu", "--gpu_ids", "all"], "", ""),
        (["--cpu"], "distributed_type: 'NO'\ngpu_ids: all\n", ""),
        (["--cpu"], "distributed_type: 'NO'\ngpu_ids: null\n", ""),
        (["--gpu_ids", "0"], "distributed_type: 'NO'\nuse_cpu: false\n", ""),
    ],
)
def test_devices_that_are_named_for_a_run_on_the_cpu_are_remarked_on_once(
    script: Path, recwarn: pytest.WarningsRecorder, flags: list[str], config: str, named: str
) -> None:
    Path("c.yaml").write_text(config)
    assert launch.main([*flags, *(["--config_file", "c.yaml"] if config else []), "--dry-run", str(script)]) == 0
    said = f"Given without effect in this run: {named}: the run is on the CPU. Remove what isn't meant."
    assert [str(one.message) for one in recwarn if "gpu_ids" in str(one.message)] == [said] * bool(named)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="claims are Linux's")
def test_two_launches_at_once_dont_choose_one_port(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = get_free_port()
    config = Path("c.yaml")
    config.write_text(f"distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmain_process_port: {port}\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0accelerate/port/{port}")  # a launch whose rank 0 doesn't listen yet
        assert launch.main(["--config_file", str(config), "--dry-run", str(script)]) == 0
        out = capsys.readouterr().out
        assert f"port {port} is in use" in out and f"MASTER_PORT={port}" not in out
        said = refused(capsys, "--config_file", str(config), "--main_process_port", str(port), str(script))
        assert f"Port {port}" in said and "maybe by another run" in said
    assert launch.main(["--config_file", str(config), "--dry-run", str(script)]) == 0
    assert f"MASTER_PORT={port}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("number", ["1", "2"])
def test_a_launch_without_outputs_is_a_launch(closed: str, number: str, tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import os\nos.write(1, b'x')\nopen(os.environ.get('RANK', '0'), 'w')\n")
    port = get_free_port()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", number]
    line = f"{shlex.join(command)} --main_process_port {port} s.py {closed}"
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path).returncode == 0
    assert (tmp_path / str(int(number) - 1)).exists()


def test_in_process_callers_get_control_back_and_an_exception_on_failure(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text("import sys; print('ran', sys.argv[1]); sys.exit(int(sys.argv[1]))")
    launch_command(parsed("--cpu", str(script), "0"))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launch_command(parsed("--cpu", str(script), "3"))
    assert caught.value.returncode == 3
    with pytest.raises(SystemExit) as stopped:
        launch_command(parsed("--cpu", "--quiet", str(script), "4"))
    assert stopped.value.code == 4
    assert capfd.readouterr().out.splitlines() == ["ran 0", "ran 3", "ran 4"]


@pytest.mark.parametrize("num_processes", ["1", "2"])
@pytest.mark.parametrize("kind", [[], ["-m"], ["--no_python"]])
def test_a_script_a_module_and_a_command_are_run(
    kind: list[str],
    num_processes: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    Path("thing.py").write_text("import sys\nprint('ran', sys.argv[-1])\n")
    target = {"": ["thing.py"], "-m": ["thing"], "--no_python": [sys.executable, "thing.py"]}["".join(kind)]
    launch_command(parsed("--cpu", "--num_processes", num_processes, *kind, *target, "a b"))
    assert capfd.readouterr().out.splitlines() == ["ran a b"] * int(num_processes)


def test_a_caller_from_python_is_never_replaced(script: Path) -> None:
    script.write_text("import os, sys; sys.exit(int(os.getppid() != int(sys.argv[1])))")
    assert launch.main(["--cpu", str(script), str(os.getpid())]) == 0
    assert main.main(["launch", "--cpu", str(script), str(os.getpid())]) == 0


def run_cli(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "accelerate.commands.main", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=60)


def test_the_exit_code_of_the_command_is_the_programs(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys; sys.exit(5)")
    assert run_cli("launch", "--cpu", "s.py", cwd=tmp_path).returncode == 5
    assert run_cli("launch", "--cpu", "--num_processes", "2", "s.py", cwd=tmp_path).returncode == 5


@pytest.mark.parametrize("command", [["launch"], ["main", "launch"]])
def test_one_process_takes_the_place_of_the_launcher(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os; print(os.getpid())")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", f"accelerate.commands.{command[0]}", *command[1:], "--cpu", "s.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    out, _ = process.communicate(timeout=60)
    assert int(out) == process.pid


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["launch", "--help-all"],
        ["launch", "--cpu", "--num_processes", "2", "s.py"],
        ["launch", "--cpu", "--dry-run", "s.py"],
        ["launch", "--config_file", "c.yaml", "--dry-run", "s.py"],
        ["config", "--help"],
        ["config", "default", "--config_file", "new.yaml"],
        ["config", "show", "--config_file", "c.yaml"],
        ["to-fsdp2", "--help"],
    ],
)
def test_torch_is_never_imported(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    (tmp_path / "c.yaml").write_text(MULTI)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-X", "importtime", "-m", "accelerate.commands.main", *words]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    imported = {line.rsplit("|", 1)[1].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in imported or words == ["--help"]
    assert not {name for name in imported if name == "torch" or name.startswith(("torch.", "numpy"))}


# The command of commands


def test_without_a_subcommand_the_help_is_shown_and_the_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 1
    out = capsys.readouterr().out
    for name in ("config", "launch", "test", "env", "estimate-memory", "merge-weights", "to-fsdp2", "tpu-config"):
        assert f"  {name} " in out


def test_a_misspelt_subcommand_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["lanch"]) == 2
    assert "Did you mean 'launch'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", main.commands())
def test_every_subcommand_has_a_help(name: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stopped:
        main.main([name, "--help"])
    assert stopped.value.code in (0, None)
    usage, _, rest = out.getvalue().partition("\n\n")
    assert usage.startswith(f"Usage: accelerate {name} ") and "(default:" not in rest
    assert max(map(len, rest.splitlines())) <= 110


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plan"], "  --gpus_per_host N               How many a host has. [8]"),
        (["plan"], "Usage: accelerate plan --gpus N --memory SIZE [options] SCRIPT_OR_MODEL"),
        (["estimate-memory"], "  --num_processes N ...           Numbers of ranks. [1 8]"),
        (["checkpoints"], "  --best_mode {min,max}           Which value of it is better. [min]"),
        (["checkpoints"], "  --json                          Print a list of objects for programs."),
        (
            ["config", "show"],
            "  --config_file FILE              The file to show. [the one that `accelerate config` writes]",
        ),
        (["migrate"], "  --help                          Show this help."),
    ],
)
def test_the_help_of_all_commands_has_the_launchers_style_with_defaults(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main.main([*words, "--help"])
    assert line in out.getvalue().splitlines()
