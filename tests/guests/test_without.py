"""Without a guest's folder, the core and every other guest work as before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import accelerate
from accelerate.ports import get_free_port
from tests.fresh import run_fresh
from tests.python_path import QUICK_START, python_path

PACKAGE = Path(accelerate.__file__).parent
GUESTS = sorted(path.parent.name for path in (PACKAGE / "guests").glob("*/__init__.py"))

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

def trained(accelerator, resumes):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumes:
        accelerator.load_state(sys.argv[1])
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if not resumes:
        accelerator.save_state(sys.argv[1])
    return accelerator.gather(next(model.parameters()).detach().sum()[None]).tolist()

accelerator = Accelerator()
first = trained(accelerator, False)
accelerator.free_memory()
again = trained(accelerator, True)
assert len(first) == accelerator.num_processes and first != again, (first, again)
unasked = [name for name in sys.modules if name.startswith("accelerate.guests.") and name.count(".") > 2]
assert all(name.endswith((".options", ".groups")) for name in unasked), unasked  # the declarations of settings
accelerator.print("trained", accelerator.num_processes)
accelerator.end_training()
"""

#: After training: every other guest is imported whole, and says its commands.
LOOK = """
import importlib, pkgutil, sys
from accelerate.commands.main import commands, main
from accelerate.launch.choose import engines
from accelerate.seams import guests, load
import accelerate.guests

assert sys.argv[2] not in guests()
for found in pkgutil.walk_packages(accelerate.guests.__path__, "accelerate.guests."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
for command in commands().values():
    load(command.parser)()
assert main(["--help"]) == 0 and main(["launch", "--cpu", "--num_processes", "2", "--dry-run", "-m", "json.tool"]) == 0
assert engines()

# Public addresses of the others' names, as the names of a guest are imported when they are used.
import accelerate.utils
for found in pkgutil.iter_modules(accelerate.utils.__path__, "accelerate.utils."):
    importlib.import_module(found.name)
assert accelerate.utils.FullyShardedDataParallelPlugin and accelerate.utils.other.save
"""


def without(names: list[str], folder: Path) -> dict[str, str]:
    """Copy the package without these guests; return an environment that imports the copy."""
    # Its bytecode too, which saves half a second of each start; others may be writing some.
    shutil.copytree(PACKAGE, folder / "accelerate", ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in names:
        shutil.rmtree(folder / "accelerate" / "guests" / name)
    path = os.pathsep.join([str(folder), str(QUICK_START)])
    return {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "PYTHONDONTWRITEBYTECODE": "1"}


#: Its plugin is asked for where its guest is missing.
REFUSE = """
import sys
from accelerate import Accelerator
try:
    Accelerator(cpu=True)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("name", "switch"), [("deepspeed", "USE_DEEPSPEED"), ("megatron", "USE_MEGATRON_LM")])
def test_an_engine_without_its_guest_is_refused_by_name(name: str, switch: str, tmp_path: Path) -> None:
    environment = without([name], tmp_path) | {f"ACCELERATE_{switch}": "true"}
    refused = run_fresh(REFUSE, environment=environment)
    assert f"ACCELERATE_{switch}" in refused.stdout and f"guests/{name}" in refused.stdout, refused


@pytest.mark.parametrize("name", GUESTS)
def test_all_others_work_without(name: str, tmp_path: Path) -> None:
    ran = run_fresh(TRAIN + LOOK, str(tmp_path / "state"), name, environment=without([name], tmp_path / "source"))
    assert ran.returncode == 0 and "trained 1" in ran.stdout, ran.stderr


#: What an Accelerator says that is asked for something of a guest that isn't there: guest -> a script, and how it asks.
ASKED = {
    "preemption": ("import os\nos.environ['ACCELERATE_SAVE_ON_SIGNAL'] = 'true'\nAccelerator(project_dir='.')",),
    "balance": (
        "from accelerate.utils import DataLoaderConfiguration\n"
        "Accelerator(dataloader_config=DataLoaderConfiguration(balance=True))",
    ),
    "monitor": ("Accelerator().watch_run()",),
    "checks": (
        "Accelerator().compare_replicas()",
        "Accelerator().watch_run(sdc_check=2)",
        "Accelerator().watch_run(compare_replicas=2)",
        "from accelerate.utils import ProjectConfiguration\n"
        "Accelerator(project_config=ProjectConfiguration(compare_replicas='raise'))",
    ),
}


@pytest.mark.parametrize(("name", "asked"), [(name, asked) for name, scripts in ASKED.items() for asked in scripts])
def test_who_asks_for_a_guest_that_is_not_there_is_told(name: str, asked: str, tmp_path: Path) -> None:
    environment = without([name], tmp_path / "source")
    ran = run_fresh(f"from accelerate import Accelerator\n{asked}", environment=environment)
    assert ran.returncode == 1 and "SettingError" in ran.stderr, ran.stderr
    assert f"needs the folder accelerate/guests/{name}, which this installation doesn't have" in ran.stderr


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("fault_tolerance", ["--keep_replicas", "1"]),
        ("fault_tolerance", ["--min_replicas", "2"]),
        ("balance", ["--balance"]),
        ("pretend", ["--pretend", "8"]),
        ("deepspeed", ["--use_deepspeed"]),
        ("megatron", ["--use_megatron_lm"]),
    ],
)
def test_a_flag_of_a_guest_that_is_not_there_is_refused(name: str, flags: list[str], tmp_path: Path) -> None:
    environment = without([name], tmp_path / "source")
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    ran = subprocess.run(
        [*command, *flags, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 2 and f"`{' '.join(flags)}` (flag {flags[0]}) needs the folder" in ran.stderr, ran.stderr


def test_the_core_trains_on_two_ranks_without_any(tmp_path: Path) -> None:
    environment = without(GUESTS, tmp_path / "source")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    ran = subprocess.run(
        [*command, "train.py", "state"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0 and "trained 2" in ran.stdout, ran.stderr


SHARDED = """
import torch
from torch.distributed.fsdp import fully_shard
from accelerate import Accelerator

accelerator = Accelerator()
try:
    accelerator.prepare(fully_shard(torch.nn.Linear(4, 4)))
except NotImplementedError as error:
    accelerator.print(error)
accelerator.end_training()
"""


def test_a_model_that_came_sharded_is_refused_without_its_guest(tmp_path: Path) -> None:
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    ran = run_fresh(SHARDED, environment=without(["adopted"], tmp_path / "source") | one_rank | place)
    assert ran.returncode == 0 and "FSDPLinear came sharded: the part of accelerate" in ran.stdout, ran.stderr


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_guest_of_another_distribution_adds_its_command(tmp_path: Path, is_archive: bool) -> None:
    (tmp_path / "visitor.py").write_text(
        "import argparse\n"
        "from accelerate.seams import Command, Guest\n"
        "GUEST = Guest(commands=(Command('greet', 'visitor:greet_parser', 'Greet.'),))\n"
        "def greet_parser():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('name')\n"
        "    parser.set_defaults(func=greet)\n"
        "    return parser\n"
        "def greet(args):\n    print('hello', args.name)\n    return 7\n"
    )
    info = tmp_path / "visitor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: visitor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accelerate.guests]\nvisitor = visitor:GUEST\n")
    source = Path(shutil.make_archive(str(tmp_path.with_suffix("")), "zip", tmp_path)) if is_archive else tmp_path
    environment = {**os.environ, "PYTHONPATH": python_path(source)}
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    ran = subprocess.run([*command, "greet", "you"], env=environment, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout.strip()) == (7, "hello you"), ran.stderr
    usage = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, timeout=100)
    assert "greet" in usage.stdout and "Greet." in usage.stdout
