"""`accelerate launch --pretend`: ordinary scripts as one rank of 16,384, and a model of 8 billion parameters."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.checkpointing.manifest import format_bytes
from tests.slow import slow_for
from tests.torch_needed import FSDP2_ON_CPU

pytestmark = pytest.mark.timeout(900)
slow = slow_for("half a minute of a processor")
LLAMA = Path(__file__).with_name("llama_8b.py")
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(torch.nn.Sequential):
    tp_plan = {f"{n}.{name}": kind for n in range(2) for name, kind in (("up", "colwise"), ("down", "rowwise"))}


sizes = {name: int(size) for name, size in (each.split("=") for each in sys.argv[1:])}
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block"
)
torch.manual_seed(0)
model = Stack(Block(), Block())
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(10000, 64), torch.randn(10000))
loader = DataLoader(data, batch_size=2, shuffle=True)
accelerator = Accelerator(
    cpu=True,
    fsdp_plugin=plugin if sizes else None,
    parallelism_config=ParallelismConfig(**sizes) if sizes else None,
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
while True:
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x).mean(-1), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.2f}, {accelerator.gather_for_metrics(loss.detach()).mean():.2f}, {len(x)} rows")
        accelerator.save_state("never_written")
        torch.save(accelerator.unwrap_model(model).state_dict(), "best.pt")
"""


def launch(folder: Path, script: str | Path, *flags: str, arguments: tuple[str, ...] = ()) -> str:
    """Return what the launch printed; it ended well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--pretend", *flags, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An ordinary script, which has no end of its own."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_replicas_print_save_and_end(script: Path, tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_text("of an earlier run")
    out = launch(tmp_path, script, "16384", "--rank", "7777", "--num_steps", "2")
    assert (tmp_path / "best.pt").read_text() == "of an earlier run" and "torch.save(best.pt)" in out
    assert "loss 1.00, 1.00, 2 rows\n" in out
    assert "Rank 7777 of 16384 (local rank 1 of 8 on host 972), DataParallel: 2 steps" in out
    assert re.search(r"all-reduce +1 x +264.7 kB  \(16384 ranks on 2048 hosts\)", out)
    assert re.search(r"parameters +264.7 kB of 264.7 kB", out) and re.search(r"optimizer state +529.[45] kB", out)
    assert "Loader 0: a step of all ranks takes 32768 samples, and there are 10000" in out
    assert "random_states_7777.json" in out and "model.safetensors" not in out
    assert "save_state(never_written)" in out and not (tmp_path / "never_written").exists()


SAVED = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    accelerator.save_state("saved")  # the scheduler hasn't stepped yet
    scheduler.step()
    break
accelerator.end_training()
"""


@slow
def test_the_listed_files_are_those_of_a_real_save(tmp_path: Path) -> None:
    """By name and size. Only rank 0 writes what is the same on all ranks, and the manifest."""
    (tmp_path / "train.py").write_text(SAVED)
    listed: dict[str, str] = {}
    for rank in ("0", "1"):
        out = launch(tmp_path, "train.py", "2", "--rank", rank)
        assert ("beside the manifest" in out) == (rank == "0")
        files = out.partition("Files of save_state")[2].splitlines()[1:]
        listed |= dict(re.findall(r"^  ([\w.]+) +(\d.* k?B)$", "\n".join(files), re.MULTILINE))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    real = {path.name: path.stat().st_size for path in (tmp_path / "saved").iterdir()}
    assert {*listed, "manifest.json"} == set(real) and "scheduler.json" in listed
    for name, size in listed.items():
        if "random_states" not in name:  # numbers in JSON: their digits differ
            assert size == format_bytes(real[name]), name


FEW_BITS = """
import sys
import torch
import torchao.optim
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.compile(torch.nn.Linear(256, 256)))
optimizer = getattr(torchao.optim, sys.argv[1])(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
while True:
    accelerator.backward(model(torch.randn(4, 256)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kind", "held", "written"),
    [
        ("AdamW4bit", "143.6 kB", r"27[4-7]\.\d kB"),
        pytest.param("AdamW8bit", "274.4 kB", r"27[0-2]\.\d kB", marks=slow),
        pytest.param("_AdamW", "1.1 MB", "1.1 MB", marks=slow),
    ],
)
def test_state_in_few_bits(kind: str, held: str, written: str, tmp_path: Path) -> None:
    """Of torchao, whose update is compiled: codes, scales and a table; biases are too small, and have full state."""
    pytest.importorskip("torchao.optim", reason="the extra fp8 installs it")
    (tmp_path / "train.py").write_text(FEW_BITS)
    out = launch(tmp_path, "train.py", "4", "--num_steps", "2", arguments=(kind,))
    assert "Rank 0 of 4 (local rank 0 of 4 on host 0), DataParallel: 2 steps" in out
    assert re.search(rf"optimizer state +{held}\n", out)
    assert re.search(rf"optimizer.safetensors +{written}\n", out)


@FSDP2_ON_CPU
def test_shards_of_replicas_of_tensor_parallel_layers(script: Path, tmp_path: Path) -> None:
    sizes = ("dp_replicate_size=32", "dp_shard_size=64", "tp_size=8")
    out = launch(tmp_path, script, "16384", "--rank", "7777", arguments=sizes)
    assert re.search(r"dp_replicate +15 of 32", out) and re.search(r"dp_shard +12 of 64", out)
    assert re.search(r"tp +1 of 8 +ranks 7776, .*7783, on 1 host\n", out)
    # Of 32 x 64 and 64 x 32 weights of a rank of 8, one row each, with its bias: 2 x (65 + 33) numbers of 4 bytes.
    assert re.search(r"parameters +784 B of 264.7 kB", out)
    assert re.search(r"dp_shard +all-gather +4 x", out) and re.search(r"dp_shard +reduce-scatter +2 x", out)
    assert re.search(r"dp_replicate +all-reduce +2 x", out) and re.search(r"tp +all-reduce +4 x", out)
    assert "optimizer_0/ranks_07000/__7777_0.distcp" in out


@slow
@FSDP2_ON_CPU
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("dp_shard_size=16384",), "4 of 8 parameters have no shard on this rank|8 of 8 parameters have no shard"),
        (("dp_shard_size=1024", "tp_size=16"), "tp_size=16: the group of this rank lies on 2 hosts of 8 processes"),
        (("dp_replicate_size=32", "dp_shard_size=64", "cp_size=8"), r"dp_shard x cp +all-gather"),
    ],
    ids=["fsdp", "tp over hosts", "cp"],
)
def test_other_meshes(script: Path, tmp_path: Path, sizes: tuple[str, ...], words: str) -> None:
    assert re.search(words, launch(tmp_path, script, "16384", "--rank", "7777", arguments=sizes))


@slow
@FSDP2_ON_CPU
def test_a_model_of_8_billion_parameters_fits_into_4_gigabytes(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = launch(tmp_path, LLAMA, "16384", "--rank", "7777")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_maxrss < 4 << 20  # kB
    assert after.ru_utime - before.ru_utime < 60
    assert re.search(r"parameters +120.2 MB of 32.1 GB", out)
    assert re.search(r"tp +all-reduce +225 x", out)
