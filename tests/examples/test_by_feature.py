"""Each example differs from the base in its feature alone, runs on real data, and learns."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import sklearn.datasets  # noqa: F401  (here, so that forked runs find it imported)
import yaml

import accelerate.accelerator  # noqa: F401  (likewise)
from accelerate.commands.launch import main as launch
from accelerate.settings import file
from tests.ranks import free_port, run_on_ranks
from tests.slow import mostly_slow

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
FEATURES = sorted(path.stem for path in (EXAMPLES / "by_feature").glob("*.py"))
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Scripts with data of their own stand alone.
ALONE = ("base", "gradient_accumulation_for_autoregressive_models")
#: What has to be installed first, or takes another environment: script -> module.
NEEDS: dict[str, str] = {
    "schedule_free": "schedulefree",
    "fp8": "torchao",
    "deepspeed_with_config_support": "deepspeed",
}
#: The commands that install it, and run the example.
TARGETS: dict[str, str] = {"deepspeed": "make deepspeed"}
#: Run on two ranks besides.
ON_TWO_RANKS = (
    "base",
    "gradient_accumulation",
    "automatic_micro_batches",
    "local_sgd",
    "ddp_comm_hook",
    "fsdp_with_peak_mem_tracking",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "deepspeed_with_config_support",
)
#: `make deepspeed` runs the last one.
QUICK_ON_TWO_RANKS = (
    *("base", "fsdp_with_peak_mem_tracking", "pipeline_parallel", "context_parallel"),
    "deepspeed_with_config_support",
)


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def trained(name: str, folder: Path, *words: str) -> Callable[[], float]:
    """A run of one example in ``folder``, for a forked process."""

    def run() -> float:
        if os.environ["WORLD_SIZE"] == "1":
            for variable in LAUNCHED:
                os.environ.pop(variable, None)
        os.chdir(folder)
        module = load(EXAMPLES / "by_feature" / f"{name}.py")
        return module.training_function(module.parser().parse_args(["--num_epochs", "1", *words]))

    return run


def changes(name: str) -> tuple[list[str], list[str]]:
    """(lines of the base that a feature takes away, lines that it adds), indentation and documentation aside."""

    def lines(stem: str) -> list[str]:
        text = (EXAMPLES / "by_feature" / f"{stem}.py").read_text()
        text = re.sub(r'\A""".*?"""\n', "", text, flags=re.DOTALL)
        return [line.strip() for line in text.splitlines() if line.strip()]

    difference = list(difflib.ndiff(lines("base"), lines(name)))
    return [row[2:] for row in difference if row[0] == "-"], [row[2:] for row in difference if row[0] == "+"]


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ALONE])
def test_an_example_is_the_base_and_one_feature(name: str) -> None:
    gone, new = changes(name)
    assert len(gone) <= 12, gone
    assert 0 < len(new) <= 45, new


def need_what_it_takes(name: str) -> None:
    """The test is skipped where a package is missing, and says by which command it runs."""
    if name in NEEDS:
        module = NEEDS[name]
        pytest.importorskip(module, reason=f"{module} isn't installed: {TARGETS.get(module, 'pip install it')}")


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "profiler"])  # below, with its trace
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    need_what_it_takes(name)
    (result,) = run_on_ranks(trained(name, tmp_path), 1, timeout_seconds=90)
    if name == "gradient_accumulation_for_autoregressive_models":
        assert result < 4.2  # a guess costs log(256) = 5.5
    else:
        assert result > 0.75  # a guess is right once in ten


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.distributed.*:FutureWarning")  # DeepSpeed calls what torch has renamed
@pytest.mark.parametrize("name", mostly_slow(ON_TWO_RANKS, QUICK_ON_TWO_RANKS))
def test_an_example_learns_on_two_ranks(name: str, tmp_path: Path) -> None:
    need_what_it_takes(name)
    first, second = run_on_ranks(trained(name, tmp_path, "--cpu", "--batch_size", "16"), 2, timeout_seconds=90)
    assert first == second > 0.75


def test_shards_are_computed_in_parts_too(tmp_path: Path) -> None:
    words = ("--cpu", "--batch_size", "16", "--sharded")
    first, second = run_on_ranks(trained("automatic_micro_batches", tmp_path, *words), 2, timeout_seconds=90)
    assert first == second > 0.75


def test_the_checkpointing_example_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    words = ("--project_dir", "run", "--checkpointing_steps", "25", "--num_epochs", "2")
    expected = run_on_ranks(trained("checkpointing", whole, *words), 1, timeout_seconds=90)
    run_on_ranks(trained("checkpointing", halves, *words[:-1], "1"), 1, timeout_seconds=90)
    assert run_on_ranks(trained("checkpointing", halves, *words), 1, timeout_seconds=90) == expected


#: Nothing is trained, or there are no options: `accelerate launch --monitor` watches what trains.
NOT_WATCHED = {"before", "after", "big_model", "distributed"}
#: They have no options of their own: data, plots, the option itself.
PARTS = {"curves", "offline_data", "watch_option"}


def test_every_example_takes_watch() -> None:
    scripts = {path.stem: path for path in EXAMPLES.rglob("*.py") if path.stem not in NOT_WATCHED | PARTS}
    assert len(scripts) >= 27
    for path in scripts.values():
        text = path.read_text()
        assert "    add_watch(" in text or '.add_argument("--watch"' in text, path


def test_a_watched_example_keeps_its_numbers(tmp_path: Path) -> None:
    run_on_ranks(
        trained("cross_validation", tmp_path, "--num_folds", "2", "--watch", "runs/first"), 1, timeout_seconds=90
    )
    record = tmp_path / "runs" / "first" / "monitor" / "rank_0.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[0]["watched_by"] == "launcher"
    assert sum("loss" in line for line in lines) >= 2


def test_the_ranks_of_a_launch_watch_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    option = load(EXAMPLES / "watch_option.py")
    monkeypatch.setattr(sys, "argv", ["examples/by_feature/base.py"])
    monkeypatch.setitem(os.environ, "RANK", "3")
    assert option.default_folder() == f"runs/base_{os.getppid()}"
    monkeypatch.delitem(os.environ, "RANK")
    assert option.default_folder() == f"runs/base_{os.getpid()}"


def test_tracked_numbers_are_in_the_log_of_lines(tmp_path: Path) -> None:
    run_on_ranks(trained("tracking", tmp_path, "--project_dir", "run"), 1, timeout_seconds=90)
    rows = [json.loads(line) for path in (tmp_path / "run").rglob("*.jsonl") for line in path.read_text().splitlines()]
    text = json.dumps(rows)
    assert text.count('"loss"') >= 3
    assert text.count('"accuracy"') == 1


def test_the_profiler_example_learns_and_leaves_a_trace(tmp_path: Path) -> None:
    (accuracy,) = run_on_ranks(trained("profiler", tmp_path), 1, timeout_seconds=90)
    assert accuracy > 0.75
    (trace,) = (tmp_path / "traces").iterdir()
    assert "conv2d" in trace.read_text()


def test_distributed_inference_answers_in_the_order_of_the_questions(tmp_path: Path) -> None:
    def run() -> list[int]:
        module = load(EXAMPLES / "inference" / "distributed.py")
        return module.inference_function(module.parser().parse_args(["--num_images", "11"]))

    alone = run_on_ranks(run, 1)[0]
    assert len(alone) == 11
    assert run_on_ranks(run, 2) == [alone, alone]


def test_the_offloaded_model_says_what_the_whole_one_says(tmp_path: Path) -> None:
    def run() -> float:
        module = load(EXAMPLES / "inference" / "big_model.py")
        return module.inference_function(module.parser().parse_args([]), tmp_path)

    assert run_on_ranks(run, 1) == [0.0]


# -- templates --------------------------------------------------------------------------------------------------

TEMPLATES = sorted((EXAMPLES / "config_yaml_templates").glob("*.yaml"))


@pytest.mark.parametrize("template", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_a_template_is_a_configuration_that_can_be_launched(
    template: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file.load(template)
    words = ["--main_process_port", str(free_port())]  # others may listen at the usual one meanwhile
    assert launch(["--config_file", str(template), *words, "--dry-run", "examples/by_feature/base.py"]) == 0
    assert "examples/by_feature/base.py" in capsys.readouterr().out


@pytest.mark.parametrize("script", sorted((EXAMPLES / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_a_batch_script_asks_for_what_it_starts(script: Path, tmp_path: Path) -> None:
    """The script runs with a launcher that writes down its words: the launcher knows all of them."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "accelerate"
    stand_in.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    stand_in.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "4",
        "SLURM_NTASKS": "16",
    }
    subprocess.run(["bash", script], env=environment, cwd=ROOT, check=True, timeout=30)
    command, *words = (tmp_path / "words").read_text().splitlines()
    assert command == "launch"
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--dry-run", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "examples/by_feature/" in done.stdout


@pytest.mark.parametrize(("manifest", "kind"), [("pytorchjob", "PyTorchJob"), ("jobset", "JobSet")])
def test_a_manifest_is_what_the_launcher_writes(
    manifest: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--launcher", "kubernetes", "--k8s_kind", kind, "--k8s_image", "registry.example/train:1"]
    words += ["--k8s_device_resource", "nvidia.com/gpu", "--num_machines", "2", "--num_processes", "16"]
    words += ["--k8s_manifest", str(tmp_path / "new.yaml"), "--dry-run", "examples/by_feature/base.py"]
    assert launch(words) == 0
    written = yaml.safe_load((EXAMPLES / "kubernetes" / f"{manifest}.yaml").read_text())
    assert written == yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert written["kind"] == kind
