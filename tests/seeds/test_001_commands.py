"""The blog post that introduced the library: the two commands, and the launchers that were there before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.ranks import free_port
from tests.seeds.tools import ACCELERATE, environment, launcher, run
from tests.slow import slow

row = pytest.mark.row

# What the seven questions of the common path are answered with in the second article.
ARTICLE_ANSWERS = "0\n2\n1\nno\nno\n2\nno\n"

STATE = """
import json, os, sys
from accelerate import Accelerator
accelerator = Accelerator()
told = {
    "num_processes": accelerator.num_processes,
    "process_index": accelerator.process_index,
    "device": accelerator.device.type,
    "mixed_precision": accelerator.mixed_precision,
    "distributed_type": str(accelerator.distributed_type).split(".")[-1],
    "arguments": sys.argv[1:],
}
ranks = accelerator.gather(__import__("torch").tensor([accelerator.process_index])).tolist()
sys.stdout.write(f"TOLD {json.dumps({**told, 'ranks': ranks})}\\n")  # one write: lines of two processes stay whole
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "told.py"
    path.write_text(STATE)
    return path


def told(stdout: str) -> list[dict[str, object]]:
    """What each process said, in rank order."""
    lines = [line.removeprefix("TOLD ") for line in stdout.splitlines() if line.startswith("TOLD ")]
    return sorted((json.loads(line) for line in lines), key=lambda facts: facts["process_index"])


def with_own_port(path: Path) -> Path:
    """The file also names a free port, so that tests side by side don't meet on the default one."""
    path.write_text(f"{path.read_text()}main_process_port: {free_port()}\n")
    return path


@row("001-03", "002-02")
@slow
def test_two_launches_on_one_machine_make_two_machines(script: Path) -> None:
    port = str(free_port())
    started = [
        subprocess.Popen(
            [
                *ACCELERATE, "launch", "--cpu", "--num_machines", "2", "--num_processes", "2",
                "--machine_rank", str(rank),
                "--main_process_ip", "127.0.0.1", "--main_process_port", port, str(script),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=90) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    facts = told("".join(out for out, _ in said))
    assert [fact["process_index"] for fact in facts] == [0, 1]
    assert all(fact["num_processes"] == 2 and fact["ranks"] == [0, 1] for fact in facts)


@row("001-17")
def test_the_launcher_sets_the_names_that_hand_written_scripts_read(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text(
        "import os, sys\n"
        "local_rank = int(os.environ.get('LOCAL_RANK', -1))\n"
        "names = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')]\n"
        "sys.stdout.write(f'NAMES {local_rank} {chr(32).join(names)}\\n')\n"
    )
    said = run([*launcher("accelerate"), script]).stdout
    lines = sorted(line.partition("NAMES ")[2] for line in said.splitlines() if "NAMES" in line)
    assert [line.split()[:3] for line in lines] == [["0", "0", "2"], ["1", "1", "2"]]
    assert all(line.split()[3] in ("127.0.0.1", "localhost") and line.split()[4].isdigit() for line in lines)


@row("001-24", "002-16", "001-54")
@pytest.mark.parametrize(("flags", "precision"), [(["--mixed_precision", "bf16"], "bf16"), (["--fp16"], "fp16")])
def test_flags_of_the_launcher_and_arguments_reach_the_script(script: Path, flags: list[str], precision: str) -> None:
    words = ["--num_processes", "7", "--cpu", "a b", "--config_file=x", "$HOME;ls", "--", "-m", ""]
    (facts,) = told(run([*ACCELERATE, "launch", "--cpu", "--num_processes", "1", *flags, script, *words]).stdout)
    assert (facts["device"], facts["mixed_precision"]) == ("cpu", precision)
    assert facts["arguments"] == words


@row("001-49")
@slow
def test_the_names_of_mpirun_join_one_world(script: Path) -> None:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**shared, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK=str(rank)),
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=90) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert [fact["ranks"] for fact in told("".join(out for out, _ in said))] == [[0, 1], [0, 1]]


@row("001-49", "001-19", "001-21")
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=slow) for name in ("torchrun", "torch.distributed.launch")), "accelerate"]
)
def test_every_launcher_joins_one_world_without_a_word_about_the_cpu(script: Path, name: str) -> None:
    facts = told(run([*launcher(name), script]).stdout)
    assert [fact["ranks"] for fact in facts] == [[0, 1], [0, 1]]
    assert {fact["distributed_type"] for fact in facts} == {"MULTI_CPU"}
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert os.fspath(script) not in left


@row("001-50", "001-51", "002-28", "002-36")
def test_config_then_launch(script: Path, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "home")}
    run([*ACCELERATE, "config"], typed="0\n1\n1\n2\nbf16\n", **home)  # this machine, multi-CPU, 1 machine, 2, bf16
    with_own_port(tmp_path / "home" / "accelerate" / "default_config.yaml")
    facts = told(run([*ACCELERATE, "launch", script.name], folder=tmp_path, **home).stdout)
    assert [fact["ranks"] for fact in facts] == [[0, 1], [0, 1]]
    assert {fact["mixed_precision"] for fact in facts} == {"bf16"}


@row("001-52")
@slow
def test_the_file_can_be_edited_and_an_unknown_key_is_named_with_its_line(script: Path, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "home")}
    run([*ACCELERATE, "config", "default"], **home)
    path = tmp_path / "home" / "accelerate" / "default_config.yaml"
    known = yaml.safe_load(path.read_text())
    known.update(distributed_type="MULTI_CPU", num_processes=2, use_cpu=True)
    path.write_text(yaml.safe_dump(known))
    with_own_port(path)
    assert len(told(run([*ACCELERATE, "launch", script], **home).stdout)) == 2
    path.write_text(path.read_text() + "num_procesess: 3\n")
    refused = run([*ACCELERATE, "launch", script], expect=None, **home)
    assert refused.returncode != 0
    line = len(path.read_text().splitlines())
    assert "num_procesess" in refused.stderr and "num_processes" in refused.stderr
    assert f"{path.name}:{line}" in refused.stderr


@row("001-53", "002-36")
@slow
def test_flag_beats_file_beats_environment(script: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nmixed_precision: bf16\n"
    )
    plain = [*ACCELERATE, "launch", "--config_file", config]
    outside = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    (by_file,) = told(run([*plain, script], **outside).stdout)
    (by_flag,) = told(run([*plain, "--mixed_precision", "no", script], **outside).stdout)
    (by_environment,) = told(run([sys.executable, script], **outside).stdout)
    assert [by_flag["mixed_precision"], by_file["mixed_precision"], by_environment["mixed_precision"]] == [
        "no",
        "bf16",
        "fp16",
    ]


@row("001-56")
def test_the_other_ways_to_install_are_documented() -> None:
    from tests.seeds.tools import ROOT

    text = (ROOT / "README.md").read_text()
    assert "pip install" in text and "make setup" in text
