"""`accelerate plan`: the first way that fits, its arithmetic, and a configuration that means it."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.commands.main import main
from accelerate.errors import SettingError
from accelerate.guests.diloco import IslandOptions
from accelerate.guests.estimate import plan_command as command
from accelerate.guests.estimate.plan import footprint, layouts, propose
from accelerate.guests.estimate.trace import TrainingTrace, trace_training
from accelerate.launch.arguments import flags_of, settings_of
from accelerate.settings import file

PROGRAM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(8)))

def build():
    return model(), lambda batch, sequence: torch.zeros(batch, sequence, 64)
"""
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from models_to_plan import model

accelerator = Accelerator(cpu=True)
net = model()
assert net[0].up.weight.is_meta
size = int(sys.argv[1])
loader = DataLoader(TensorDataset(torch.zeros(size * 2, 3, 64), torch.zeros(size * 2)), batch_size=size)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
raise AssertionError("a plan doesn't train")
"""
KB = 1 << 10


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models_to_plan.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "models_to_plan", raising=False)


@functools.cache  # the same program in every test
def _trace(recompute: bool) -> TrainingTrace:
    from accelerate.guests.estimate.subject import find_subject

    subject = find_subject("models_to_plan.py:build")
    return trace_training(subject, batch=4, sequence=16, recompute=recompute, device="cpu")


def _planned(memory: int, gpus: int = 8, gpus_per_host: int = 8, islands: int = 1) -> Any:
    return propose("m", _trace, gpus=gpus, memory=memory, gpus_per_host=gpus_per_host, reserve=0.0, islands=islands)


def test_the_first_way_that_fits_is_chosen() -> None:
    smallest = _planned(1)
    assert smallest.chosen is None and len({way.name for way in smallest.candidates}) == len(smallest.candidates)
    for number, way in enumerate(smallest.candidates):
        earlier = [each.footprint.peak for each in smallest.candidates[:number]]
        if way.footprint.peak < min(earlier, default=way.footprint.peak + 1):
            found = _planned(way.footprint.peak)
            assert found.chosen is not None and found.chosen.name == way.name and len(found.candidates) == number + 1


def test_less_memory_takes_stronger_ways() -> None:
    names = [_planned(memory * KB).chosen.name for memory in (8192, 2600, 1900, 1500, 1100)]
    assert names == ["ddp8", "fsdp-grad8", "fsdp8", "fsdp8, recomputing", "tp2+fsdp4, recomputing"]
    assert any(way.layout.tp > 1 for way in _planned(1).candidates) and any(
        way.layout.cp > 1 for way in _planned(1).candidates
    )
    assert _planned(1).candidates[-1].layout.offload_weights


def test_the_numbers_are_those_of_the_estimate() -> None:
    again = {recompute: _trace.__wrapped__(recompute) for recompute in (False, True)}
    for way in _planned(1).candidates:
        estimated = footprint(again[way.recompute], way.layout)
        if way.layout.cp == 1:
            assert way.footprint == estimated
        else:  # FSDP shards over these ranks too
            assert way.footprint.weights < estimated.weights


@pytest.mark.parametrize(("gpus", "per_host"), [(1, 8), (2, 8), (6, 8), (8, 8), (64, 8), (4096, 8), (12, 4)])
def test_every_way_uses_all_devices_and_splits_matrices_inside_a_host(gpus: int, per_host: int) -> None:
    found = list(layouts(gpus, per_host))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.ranks == gpus and layout.tp <= per_host


def test_four_thousand_devices_are_planned_at_once() -> None:
    assert _planned(1, gpus=4096).candidates[-1].layout.ranks == 4096


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"gpus": 0, "memory": 1}, "--gpus 0"),
        ({"gpus": 12, "memory": 1}, "fills its hosts"),
        ({"gpus": 1, "memory": 0}, "memory=0"),
        ({"gpus": 8, "memory": 1, "islands": 3}, "--islands 3 of 8 GPUs"),
        ({"gpus": 24, "memory": 1, "islands": 2}, "--islands 2 of 24 GPUs on hosts of 8"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers: dict[str, int], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        _planned(**numbers)


@pytest.mark.parametrize("gpus", [1, 8, 16])
def test_every_way_has_a_configuration_that_means_it(gpus: int, tmp_path: Path) -> None:
    for way in _planned(1, gpus=gpus).candidates:
        path = tmp_path / "written.yaml"
        file.save(command.settings_of(way, gpus, 8, "bf16", ["Block"]), path)
        read = file.load(path)
        assert read.launch.num_processes == gpus and read.run.mixed_precision == "bf16"
        if way.layout.sharding != "zero3":  # the package isn't needed to plan with it
            address = ["--main_process_ip", "node0", "--main_process_port", "29500"] if gpus > 8 else []
            flags = flags_of(command.settings_of(way, gpus, 8, "bf16", ["Block"]))
            same = settings_of(launch_command_parser().parse_args([*flags, *address, "train.py"]))
            assert (same.fsdp, same.parallelism) == (read.fsdp, read.parallelism)
        if way.layout.sharding.startswith("fsdp"):
            assert read.fsdp is not None and read.fsdp.activation_checkpointing is way.recompute
            assert bool(read.fsdp.cpu_offload) is way.layout.offload_weights
        if way.layout.tp * way.layout.cp > 1 or (way.layout.shards > 1 and way.layout.replicas > 1):
            sizes = read.parallelism
            assert sizes is not None
            assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (way.layout.replicas, way.layout.shards)
            assert (sizes.tp_size, sizes.cp_size) == (way.layout.tp, way.layout.cp)


def test_the_command_prints_the_table_in_binary_units_and_how_to_launch_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    arguments = ["models_to_plan.py:build", "--gpus", "8", "--memory", "1500KiB", "--batch", "4", "--sequence", "16"]
    arguments += ["--reserve", "0", "--mixed-precision", "no"]
    assert main(["plan", *arguments]) == 0
    out = capsys.readouterr().out
    assert "Chosen: fsdp" in out and "1.46 MiB" in out and not re.search(r"\d [KMGT]B", out)
    assert out.splitlines()[-1].startswith("  accelerate launch --use_fsdp ")
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before
    assert main(["plan", *arguments, "--config_file", "my plan.yaml"]) == 0
    assert "accelerate launch --config_file 'my plan.yaml' SCRIPT.py" in capsys.readouterr().out.splitlines()[-1]
    written = file.read("my plan.yaml")
    assert written["distributed_type"] == "FSDP"
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block"


def test_the_printed_command_launches_the_planned_script_with_its_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "train.py", "--gpus", "2", "--memory", "2MB", "--", "5", "two words"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:2] == ["accelerate", "launch"] and words[-3:] == ["train.py", "5", "two words"]
    read = settings_of(launch_command_parser().parse_args(words[2:]))
    assert read.launch.num_processes == 2 and read.run.mixed_precision == "bf16" and read.fsdp is not None


def test_a_function_that_only_builds_the_model_is_planned_without_activations_and_it_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "models_to_plan.py:model", "--gpus", "2", "--memory", "1GB", "--mixed_precision", "no"]) == 0
    out = capsys.readouterr().out
    assert "Without activations" in out and "inputs(batch, sequence)" in out and "Chosen: ddp2" in out
    assert main(["plan", "models_to_plan.py:model", "--gpus", "2", "--memory", "1GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "inputs(batch, sequence)" in found["activations_left_out"]
    assert found["ways"][0]["weights"] == 4 * 8 * (64 * 256 * 2 + 64 + 256)


def test_programs_get_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "models_to_plan.py:build", "--gpus", "2", "--memory", "80GB", "--json", "--config_file", ""]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "ddp2" and found["memory"] == 80 * 10**9
    for way in found["ways"]:
        parts = ("weights", "buffers", "gradients", "optimizer", "activations", "communication")
        assert way["peak"] == sum(way[part] for part in parts)
    assert not Path("accelerate_config.yaml").exists()


def test_a_script_runs_up_to_prepare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.py", "--gpus", "2", "--memory", "1GB", "--json", "--", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "train.py" and found["batch"] == 5
    numbers = 8 * (64 * 256 * 2 + 64 + 256)
    assert found["ways"][0]["weights"] == 4 * numbers and found["ways"][0]["optimizer"] == 0  # SGD keeps nothing


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("raise OSError('no disk')", "OSError: no disk"),
        ("x = 1", "ended without accelerator.prepare"),
        ("from accelerate import Accelerator\nAccelerator(cpu=True).prepare(3)", "has no model"),
    ],
)
def test_a_script_that_prepares_no_model_says_so(
    program: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(program, encoding="utf-8")
    assert main(["plan", "bad.py", "--gpus", "2", "--memory", "1GB"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_the_command_starts_without_torch() -> None:
    code = "import sys\nfrom accelerate.guests.estimate import plan_command\nplan_command.plan_command_parser()\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("gpus", "islands"), [(2, 2), (8, 2), (8, 4), (32, 2)])
def test_islands_keep_outer_weights_and_send_a_byte_for_each(gpus: int, islands: int, tmp_path: Path) -> None:
    ways, trace = _planned(1, gpus=gpus, islands=islands).candidates, _trace(False)
    assert ways and all(way.layout.islands == islands and way.layout.ranks == gpus for way in ways)
    apart = _planned(1, gpus=gpus // islands)
    inside = {way.name: way.footprint for way in apart.candidates}
    for way in ways:
        path = tmp_path / "written.yaml"
        file.save(command.settings_of(way, gpus, 8, "bf16", ["Block"]), path)
        read = file.load(path)
        if way.layout.sharding == "none":  # its ranks divide the outer weights
            values, found = trace.num_trainable * islands / gpus, read.find(IslandOptions)
            assert found is not None and found.islands == islands
        else:
            values = trace.num_trainable / (way.layout.shards * way.layout.cp * way.layout.tp)
            assert read.parallelism.dp_replicate_size == islands
            alone = replace(way.layout, replicas=1, islands=1)
            outer = way.footprint.optimizer - inside[replace(way, layout=alone).name].optimizer
            assert outer == pytest.approx(12 * values, rel=0.5 if way.layout.tp > 1 else 1e-3)
        assert way.footprint.sent == pytest.approx(values * (1 + 1 / 64), rel=0.5 if way.layout.tp > 1 else 1e-3)


def test_a_plan_of_islands_says_what_they_send(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["models_to_plan.py:build", "--gpus", "8", "--memory", "1GB", "--islands", "2"]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "Chosen: ddp8+islands2" in shown and "to each of 1 other islands, in 8 bits" in shown
    assert "--islands 2" in shown[shown.index("accelerate launch") :]
