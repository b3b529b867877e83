"""A pretended rank draws the random numbers of a real one, reads its samples, and writes files of its sizes."""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.slow import slow
from tests.torch_needed import FSDP2_ON_CPU

SCRIPT = Path(__file__).with_name("drawing.py")


#: Saves into memory, as programs that keep their best weights do, and a checkpoint.
SAVING = """
import copy, io, os, sys
import torch
from torch import nn
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed

kind = sys.argv[2]
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind) if kind != "ddp" else None
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
set_seed(0)
model = nn.Sequential(nn.Linear(31, 41), nn.BatchNorm1d(41), nn.Linear(41, 7, dtype=torch.float32))
optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.1}])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
loader = torch.utils.data.DataLoader(range(64), batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in loader:
    accelerator.backward(model(torch.ones(4, 31)).sum())
    best = io.BytesIO()
    torch.save({"model": {name: each.shape for name, each in model.named_parameters()}, "loss": torch.ones(3)}, best)
    if kind == "ddp":
        torch.save(copy.deepcopy(accelerator.unwrap_model(model)), io.BytesIO())
    best.seek(0)
    assert torch.load(best)["loss"].tolist() == [1.0] * 3
    accelerator.save_state(sys.argv[1])
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if sys.argv[3] == "real":
        accelerator.save_state(sys.argv[1])
    break
"""


def real(folder: Path) -> dict[str, list[list[int]]]:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads((folder / f"{os.environ['RANK']}.json").read_text())


def pretended(folder: Path) -> tuple[dict[str, list[list[int]]], list[Any], str]:
    """Return what the script has read, and what the report says."""
    from accelerate.guests.pretend.run import run_as_rank

    report = run_as_rank([str(SCRIPT), str(folder)], 1)
    read = json.loads((folder / f"{os.environ['RANK']}.json").read_text())
    return read, [loader.positions for loader in report.loaders], str(report)


def place(rank: int, size: int) -> dict[str, str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {**own, "ACCELERATE_USE_CPU": "true", "ACCELERATE_HANG_SECONDS": "0"}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=slow)])
def test_a_pretended_rank_reads_the_samples_of_the_real_one(num_ranks: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path)])
    expected = run_on_ranks(real, num_ranks, tmp_path, timeout_seconds=300)
    for rank in (1, num_ranks - 1) if num_ranks == 4 else (0, 1):
        environment = place(rank, num_ranks)
        read, said, text = run_on_ranks(pretended, 1, tmp_path, environment=environment, timeout_seconds=300)[0]
        other = {name for name in read if read[name] != expected[rank][name]}
        assert other <= {"rrelu, with replacement"} and "rrelu_with_noise draws as many random numbers as" in text
        assert said == [*read.values()]
        assert f"batch 2: {', '.join(map(str, said[-1][2]))}" in text


def saved(folder: Path, kind: str) -> None:
    sys.argv = ["saving.py", str(folder / "state"), kind, "real"]
    runpy.run_path(str(folder / "saving.py"), run_name="__main__")


def predicted(folder: Path, kind: str) -> tuple[dict[str, int], str]:
    from accelerate.guests.pretend.run import run_as_rank

    warnings.simplefilter("ignore")  # as in a process of its own
    report = run_as_rank([str(folder / "saving.py"), str(folder / "state"), kind, "pretended"], 1)
    return {file.name: file.num_bytes for file in report.files}, str(report)


@FSDP2_ON_CPU
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "ddp"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=slow)])
def test_the_sizes_of_files_are_those_of_a_real_checkpoint(kind: str, num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    run_on_ranks(saved, num_ranks, tmp_path, kind)
    folder, found = tmp_path / "state", dict[str, int]()
    written = {str(each.relative_to(folder)): each.stat().st_size for each in folder.rglob("*") if each.is_file()}
    for rank in range(num_ranks):
        files, text = run_on_ranks(predicted, 1, tmp_path, kind, environment=place(rank, num_ranks))[0]
        assert "BytesIO" not in text and text.count("save_state(") == 1
        found |= files
    described = {name for name in written if name.endswith((".metadata", "manifest.json"))}
    assert found == {name: size for name, size in written.items() if name not in described}


DISPATCHING = """
import json, os, sys
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

split, size = sys.argv[2] == "split", int(sys.argv[3])
config = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
accelerator = Accelerator(cpu=True, dataloader_config=config)
set_seed(0)
model = accelerator.prepare(torch.nn.Linear(1, 1))
loader = accelerator.prepare(torch.utils.data.DataLoader(range(size), batch_size=6, shuffle=True))
read = [batch.tolist() for _, batch in zip(range(3), loader)]
if sys.argv[1]:
    json.dump(read, open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w"))
"""


def dispatched(folder: Path, form: str, size: str, is_real: bool) -> Any:
    from accelerate.guests.pretend.run import run_as_rank

    arguments = [str(folder / "dispatching.py"), str(folder) if is_real else "", form, size]
    if not is_real:
        report = run_as_rank(arguments, 1)
        share = report.loaders[0]
        assert share.is_received == ("read by rank 0, which sends this rank its part" in str(report))
        return share.positions, share.is_received
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return json.loads((folder / f"{os.environ['RANK']}.json").read_text())


@pytest.mark.parametrize(("form", "size"), [("whole", "48"), ("split", "48"), ("whole", "30"), ("split", "15")])
def test_rank_0_shows_its_part_of_what_it_dispatches_and_others_say_that_they_receive_theirs(
    form: str, size: str, tmp_path: Path
) -> None:
    (tmp_path / "dispatching.py").write_text(DISPATCHING)
    expected = run_on_ranks(dispatched, 2, tmp_path, form, size, True)[0]
    shares = [
        run_on_ranks(dispatched, 1, tmp_path, form, size, False, environment=place(rank, 2))[0] for rank in range(2)
    ]
    assert shares == [(expected, False), (None, True)]
