"""TPUs: the command for one host, gcloud's for a pod, and the program that calls a script's function."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples

from accelerate.errors import LaunchError, MissingDependency, SettingError
from accelerate.guests.xla import launcher as tpu
from accelerate.guests.xla.launcher import Tpu
from accelerate.launch.choose import choose
from accelerate.launch.plan import LaunchPlan, Program
from tests.unit.launch.plans import CPU_HOST, NASTY, PROGRAM, argument_lists, settings


def pod_file(folder: Path, *more: str) -> Path:
    path = folder / "pod.yaml"
    lines = ["distributed_type: TPU", "tpu_name: my-pod", "tpu_zone: us-central1-a", "tpu_use_cluster: true", *more]
    path.write_text("\n".join([*lines, ""]))
    return path


def plan(program: Program = PROGRAM, **flags: Any) -> LaunchPlan:
    return Tpu().plan(settings(tpu=True, **flags), program, CPU_HOST)


def test_one_host_calls_the_scripts_function() -> None:
    made = plan(num_processes=8, main_training_function="train")
    argv = (
        "-m",
        "accelerate.guests.xla.launcher",
        "--function",
        "train",
        "--num_processes",
        "8",
        "train.py",
        "--lr",
        "1",
    )
    assert made.argv == (sys.executable, *argv)
    assert choose(settings(tpu=True), CPU_HOST).name == "tpu"


def test_a_module_stays_one() -> None:
    assert plan(Program("a.b", kind="module")).argv[-2:] == ("--module", "a.b")


def test_a_command_has_no_function() -> None:
    with pytest.raises(SettingError, match="--no_python"):
        plan(Program("a", kind="command"))


def remote_words(made: LaunchPlan) -> list[str]:
    return shlex.split(made.argv[made.argv.index("--command") + 1])


def test_a_pod_is_reached_through_gcloud(tmp_path: Path) -> None:
    chosen = settings(file=pod_file(tmp_path), vm=["w0", "w1"], env=["X=a b", "Y=1"], tpu_use_sudo=True)
    made = Tpu().plan(chosen, PROGRAM, CPU_HOST)
    where = ("--zone", "us-central1-a", "--worker", "w0,w1")
    assert made.argv[:-2] == ("gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-pod", *where)
    remote = remote_words(made)
    assert remote[:2] == ["sudo", "env"] and {"X=a b", "Y=1", "ACCELERATE_IN_TPU_POD=1"} <= set(remote)
    assert remote[-3:] == ["train.py", "--lr", "1"] and "--no_tpu_cluster" in remote


def test_all_machines_of_a_pod_are_the_default(tmp_path: Path) -> None:
    made = Tpu().plan(settings(file=pod_file(tmp_path)), PROGRAM, CPU_HOST)
    assert made.argv[made.argv.index("--worker") + 1] == "all"


def test_a_machine_of_the_pod_starts_its_own_processes(tmp_path: Path) -> None:
    inside = settings({"ACCELERATE_IN_TPU_POD": "1"}, file=pod_file(tmp_path))
    assert Tpu().plan(inside, PROGRAM, CPU_HOST).argv[0] == sys.executable


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@given(argument_lists)
@examples(max_examples=20, deadline=None)
def test_the_remote_shell_hands_every_word_on_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    chosen = settings(file=pod_file(folder), env=["X=" + "".join(NASTY)])
    made = Tpu().plan(chosen, Program("train.py", tuple(arguments)), CPU_HOST)
    tools = folder / "pod tools"
    tools.mkdir(exist_ok=True)
    (tools / "python3").write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$X"\n')
    (tools / "python3").chmod(0o755)
    remote = made.argv[made.argv.index("--command") + 1]
    done = subprocess.run(
        ["sh", "-c", remote], env={"PATH": f"{tools}:/usr/bin:/bin"}, cwd=folder, capture_output=True, check=True
    )
    *found, value = done.stdout.decode().split("\0")[:-1]
    assert found[len(found) - len(arguments) :] == arguments and value == "".join(NASTY)
    assert not (folder / "pwned").exists()


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """A torch_xla whose spawn calls the function twice, here."""
    calls: list[tuple[Any, Any]] = []

    def spawn(function: Any, args: Any = (), nprocs: int | None = None) -> None:
        calls.append((args, nprocs))
        for index in range(2):
            function(index, *args)

    package, distributed, module = (ModuleType(name) for name in ("torch_xla", "distributed", "xla_multiprocessing"))
    module.__dict__["spawn"] = spawn
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.distributed", distributed)
    monkeypatch.setitem(sys.modules, "torch_xla.distributed.xla_multiprocessing", module)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return calls


def test_each_process_calls_the_function_with_the_scripts_own_arguments(
    tmp_path: Path, torch_xla: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "tpu_script.py"
    script.write_text("import sys\ndef train():\n    print(sys.argv[1:])\n")
    tpu.main(["--function", "train", "--num_processes", "8", str(script), "--function", "x", "a b"])
    assert capsys.readouterr().out.splitlines() == ["['--function', 'x', 'a b']"] * 2
    assert torch_xla[0][1] is None


def test_a_script_without_the_function_is_refused(tmp_path: Path, torch_xla: list[Any]) -> None:
    script = tmp_path / "tpu_empty.py"
    script.write_text("x = 1\n")
    with pytest.raises(LaunchError, match=r"no function main\(\).*--main_training_function"):
        tpu.main([str(script)])


def test_without_torch_xla_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="torch_xla"):
        tpu.main(["x.py"])
