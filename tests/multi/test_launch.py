"""One script under every launcher, and functions launched from a running interpreter: real gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.errors import LaunchError
from accelerate.launch import fork, functions
from accelerate.launch.functions import debug_launcher, notebook_launcher
from tests.python_path import python_path
from tests.ranks import free_port
from tests.slow import IS_SLOW

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import json, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(32.0).view(16, 2) / 32, torch.ones(16, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    with open(sys.argv[-1], "w") as file:  # torch.distributed.launch puts --local-rank first
        json.dump({"size": accelerator.num_processes, "weights": weights}, file)
accelerator.end_training()
"""


def run(tmp_path: Path, *command: str) -> dict[str, Any]:
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": python_path(), "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, *command, str(script), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "torch.distributed.launch": ["-m", "torch.distributed.launch", "--nproc-per-node", "2"],
    "accelerate launch": [
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ],
    "accelerate launch, restartable": [
        *["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"],
        *["--max_restarts", "1", "--main_process_port", "0"],
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run of the script without a launcher."""
    return run(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", LAUNCHERS if IS_SLOW else ["accelerate launch"])
def test_the_same_script_gives_the_same_weights_under_every_launcher(
    name: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    words = list(LAUNCHERS[name])
    if "torch.distributed" in words[1]:
        words += ["--master-port", str(free_port())]
    together = run(tmp_path, *words)
    assert (alone["size"], together["size"]) == (1, 2)
    assert together["weights"] == pytest.approx(alone["weights"], rel=1e-5)


def launch(
    tmp_path: Path, body: str, *flags: str, script_arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(body)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    return subprocess.run(
        [*command, "--main_process_port", "0", *flags, str(script), *script_arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=110,
    )


FAILING = """\
from accelerate import Accelerator
accelerator = Accelerator()
if accelerator.process_index == 1:
    raise KeyError("the reason")
accelerator.wait_for_everyone()
accelerator.gather(__import__("torch").ones(1))
"""


@pytest.mark.parametrize("flags", [[], ["--max_restarts", "1"]] if IS_SLOW else [[]])
def test_the_first_cause_of_a_failed_training_is_within_the_last_lines(flags: list[str], tmp_path: Path) -> None:
    done = launch(tmp_path, FAILING, *flags)
    assert done.returncode == 1
    last = "\n".join(done.stderr.splitlines()[-15:])
    assert "First cause: rank 1" in last
    assert "script.py:4" in last
    assert "KeyError: 'the reason'" in last


def test_the_agent_that_slurm_and_kubernetes_start_reports_the_same(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    environment = {**os.environ, "PYTHONPATH": python_path(), "ACCELERATE_USE_CPU": "true"}
    words = ["-m", "accelerate.launch.agent", "--nproc-per-node", "2", "--master-port", str(free_port()), "script.py"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=110
    )
    assert done.returncode == 1
    last = "\n".join(done.stderr.splitlines()[-15:])
    assert "First cause: rank 1" in last and "script.py:4" in last and "KeyError: 'the reason'" in last


DAMAGED = """\
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

kind, how = sys.argv[1:]

class Unpicklable(Exception):
    def __init__(self, row, lock):
        super().__init__(f"row {row} is damaged")
        self.lock = lock

def read(row):
    if row == 5:
        if how == "a key":
            raise KeyError("row 5 is damaged")
        if how == "own class":
            raise Unpicklable(5, __import__("threading").Lock())
        raise LookupError("row 5 is damaged")
    return torch.ones(1)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return row if how == "collate_fn" else read(row)

class Files(torch.utils.data.IterableDataset):
    def __init__(self, files=(0, 1)):
        self.files = files
    num_shards = property(lambda self: len(self.files))
    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards])
    def __iter__(self):
        for file in self.files:
            yield from map(read, range(4 * file, 4 * file + 4))

def collate(rows):
    return torch.stack([read(row) for row in rows])

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(
    dispatch_batches=kind == "dispatched", use_stateful_dataloader=kind == "stateful"))
loader = torch.utils.data.DataLoader(
    Files() if kind == "sharded" else Rows(), batch_size=2, num_workers=1,
    collate_fn=collate if how == "collate_fn" else None)
for batch in accelerator.prepare(loader):
    accelerator.gather(batch)
"""
#: What raises in a worker -> how its line ends on the screen.
RAISED = {
    "dataset": "LookupError: row 5 is damaged",
    "collate_fn": "LookupError: row 5 is damaged",
    "a key": "KeyError: 'row 5 is damaged'",
    "own class": "Unpicklable: row 5 is damaged",
}


FAILURES = [
    *((kind, "dataset", number) for kind in ("plain", "dispatched", "sharded", "stateful") for number in "12"),
    *(("plain", how, "2") for how in RAISED if how != "dataset"),
    ("dispatched", "own class", "2"),
]
QUICK_FAILURES = [("plain", "dataset", "1"), ("dispatched", "own class", "2")]


@pytest.mark.parametrize(("kind", "how", "num_processes"), FAILURES if IS_SLOW else QUICK_FAILURES)
def test_the_last_screen_shows_the_line_that_failed_in_a_worker_of_a_loader(
    kind: str, how: str, num_processes: str, tmp_path: Path
) -> None:
    if kind == "stateful":
        pytest.importorskip("torchdata")
    done = launch(tmp_path, DAMAGED, "--num_processes", num_processes, script_arguments=[kind, how])
    assert done.returncode != 0
    last = done.stderr.splitlines()[-14:]
    assert any(line.endswith(RAISED[how]) for line in last), done.stderr
    raised = {"a key": 'raise KeyError("row 5 is damaged")', "own class": "raise Unpicklable(5,"}
    assert any(raised.get(how, 'raise LookupError("row 5 is damaged")') in line for line in last), done.stderr


def test_two_machines_on_this_host_form_one_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\na = Accelerator()\n"
        "print('SUM', int(a.reduce(torch.ones(1), 'sum')), a.num_processes, flush=True)\na.end_training()\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    machines = [
        subprocess.Popen(
            [*command, "--machine_rank", str(rank), str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    for machine in machines:
        out, err = machine.communicate(timeout=110)
        assert machine.returncode == 0, err[-3000:]
        assert "SUM 2 2" in out


# From a running interpreter


def gathered(offset: int) -> tuple[int, int, list[int]]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    values = accelerator.gather(torch.tensor([accelerator.process_index + offset]))
    return accelerator.process_index, accelerator.num_processes, values.tolist()


def test_debug_launcher_returns_what_each_rank_returned() -> None:
    assert debug_launcher(gathered, (10,)) == [(0, 2, [10, 11]), (1, 2, [10, 11])]


def test_notebook_launcher_joins_its_ranks_on_a_host_without_accelerators(capfd: pytest.CaptureFixture[str]) -> None:
    kept = {"x": 5}
    results = notebook_launcher(lambda: (gathered(0), kept["x"]), num_processes=2, use_port=0)
    assert results == [((0, 2, [0, 1]), 5), ((1, 2, [0, 1]), 5)]
    assert "2 CPU processes" in capfd.readouterr().out


def test_where_a_fork_is_unsafe_the_function_travels_to_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    monkeypatch.setattr(functions, "fork_is_safe", lambda: False)
    kept = torch.ones(2)

    def function() -> tuple[int, float]:
        import os

        import torch

        assert torch.distributed.is_available()
        return int(os.environ["RANK"]), float(kept.sum())

    assert notebook_launcher(function, num_processes=2, use_port=0) == [(0, 2.0), (1, 2.0)]


@pytest.mark.parametrize("launcher", [debug_launcher, partial(notebook_launcher, num_processes=2, use_port=0)])
def test_plain_results_need_no_cloudpickle(
    launcher: Callable[[Callable[[], object]], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fork, "is_installed", lambda name: False)
    monkeypatch.setattr(fork, "require", None)

    def function() -> object:
        rank = int(os.environ["RANK"])
        plain = [0.1, float("inf"), -3, 2**80, True, "text", None, b"bytes", (1, [2]), {"name": {3: {4}}}]
        return {"rank": rank, "plain": plain, "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + rank}

    for rank, result in enumerate(launcher(function)):
        assert result["rank"] == rank
        assert result["plain"] == [
            *(0.1, float("inf"), -3, 2**80, True, "text", None, b"bytes", (1, [2]), {"name": {3: {4}}})
        ]
        assert torch.equal(result["tensor"], torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + rank)
    assert launcher(lambda: 0.5) == [0.5, 0.5] and launcher(lambda: torch.ones(2))[1].tolist() == [1, 1]
    capfd.readouterr()
    assert launcher(lambda: object()) == [None, None]
    assert capfd.readouterr().err.count('Install cloudpickle to get it: pip install "accelerate[notebook]"') == 1


def test_an_initialised_accelerator_makes_a_fork_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork.fork_is_safe()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not fork.fork_is_safe()


def test_a_failure_in_a_launched_function_is_raised_with_its_first_cause() -> None:
    def function() -> None:
        from accelerate import Accelerator

        accelerator = Accelerator()
        if accelerator.process_index == 1:
            raise KeyError("the reason")
        accelerator.wait_for_everyone()

    with pytest.raises(LaunchError, match=r"rank 1 of 2[\s\S]*KeyError: 'the reason'"):
        debug_launcher(function)


def test_one_process_is_a_plain_call(capsys: pytest.CaptureFixture[str]) -> None:
    def function(value: int) -> tuple[int, str]:
        return value, os.environ["ACCELERATE_MIXED_PRECISION"]

    assert notebook_launcher(function, (3,), num_processes=1, mixed_precision="bf16") == (3, "bf16")
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    capsys.readouterr()


def test_one_process_goes_on_with_the_accelerator_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    assert notebook_launcher(lambda: Accelerator().device, num_processes=1) == accelerator.device
    with pytest.raises(ValueError, match="should only be initialized inside your training function"):
        notebook_launcher(lambda: None, num_processes=2)
    capsys.readouterr()


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="num_processes"):
        notebook_launcher(print)
    with pytest.raises(ValueError, match="mixed_precision='half'"):
        notebook_launcher(print, num_processes=2, mixed_precision="half")
    with pytest.raises(ValueError, match="at least 1"):
        notebook_launcher(print, num_processes=0)


def test_elastic_options_go_through_torchs_agent() -> None:
    assert notebook_launcher(gathered, (0,), num_processes=2, use_port=free_port(), max_restarts=1) == [
        (0, 2, [0, 1]),
        (1, 2, [0, 1]),
    ]


@pytest.mark.parametrize("flags", [["--num_processes", "2", "--main_process_port", "0"], *([[]] if IS_SLOW else [])])
def test_the_packaged_sanity_script_succeeds(flags: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "accelerate.commands.main", "test", "--cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Test is a success!" in done.stdout
