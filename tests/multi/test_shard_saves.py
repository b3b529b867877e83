"""Checkpoints in shards, saved while training goes on: the same files, no tearing, no lost failure."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from accelerate import Accelerator
from accelerate.checkpointing import dcp as shard_files
from accelerate.errors import CheckpointError
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.torch_private.distributed import shard_locally
from tests.ranks import run_on_ranks
from tests.sharded_runs import BLOCKS, Network

V1 = {"fsdp_version": 1, **BLOCKS, "use_orig_params": True, "state_dict_type": "SHARDED_STATE_DICT"}
V2 = {"fsdp_version": 2, **BLOCKS}


def begin(options: dict[str, Any]) -> tuple[Accelerator, nn.Module, Any]:
    run = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    torch.manual_seed(0)
    model = Network()
    return run, *run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def step(run: Accelerator, model: nn.Module, optimizer: Any) -> float:
    torch.manual_seed(run.process_index)
    loss = model(torch.randn(4, 8)).square().mean()
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(run.reduce(loss.detach(), "mean"))


def sums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.mark.parametrize("options", [V1, V2], ids=["FSDP1", "FSDP2"])
def test_the_files_are_the_same_and_are_of_the_moment_of_saving(options: dict[str, Any], tmp_path: Path) -> None:
    def go() -> tuple[list[float], list[float]]:
        run, model, optimizer = begin(options)
        step(run, model, optimizer)
        run.save_state(str(tmp_path / "now"))
        run.save_state(str(tmp_path / "later"), asynchronous=True)
        expected = [step(run, model, optimizer) for _ in range(3)]  # changes every tensor while files are written
        run.wait_for_checkpoint()
        run.load_state(str(tmp_path / "later"))
        return expected, [step(run, model, optimizer) for _ in range(3)]

    for expected, found in run_on_ranks(go, 2):
        assert found == expected
    now, later = sums(tmp_path / "now"), sums(tmp_path / "later")
    assert now == later
    assert {"pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"} <= set(now)


def test_a_rank_that_cannot_write_is_named_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    def go() -> str:
        run, model, optimizer = begin(V2)
        step(run, model, optimizer)
        _, writer = shard_files._save_classes()
        write = writer.write_data

        def fail(self: Any, *arguments: Any) -> Any:
            if run.process_index == 1:
                raise OSError(28, "No space left on device")
            return write(self, *arguments)

        writer.write_data = fail  # type: ignore[attr-defined]
        run.save_state(str(tmp_path / "ck"), asynchronous=True)
        run._background.finish()
        with pytest.raises(CheckpointError) as caught:
            step(run, model, optimizer)
        writer.write_data = write  # type: ignore[attr-defined]
        run.save_state(str(tmp_path / "next"), asynchronous=True)
        run.wait_for_checkpoint()
        return str(caught.value)

    assert all("rank 1: OSError: [Errno 28] No space left on device" in text for text in run_on_ranks(go, 2))
    assert sorted(os.listdir(tmp_path)) == ["next"]


def test_a_missing_file_of_a_rank_is_the_reason_why_a_checkpoint_is_refused(tmp_path: Path) -> None:
    def save() -> None:
        run, model, optimizer = begin(V2)
        step(run, model, optimizer)
        run.save_state(str(tmp_path / "ck"))

    def load() -> str:
        run, _, _ = begin(V2)
        with pytest.raises(CheckpointError) as caught:
            run.load_state(str(tmp_path / "ck"))
        return str(caught.value)

    run_on_ranks(save, 2)
    (tmp_path / "ck" / "optimizer_0" / "__1_0.distcp").unlink()
    assert all("optimizer_0/__1_0.distcp" in text and "missing" in text for text in run_on_ranks(load, 2))


def cut() -> list[bool]:
    rank = Accelerator(cpu=True).process_index
    mesh = init_device_mesh("cpu", (2,))
    equal = []
    for shape, dim in (((4, 3), 0), ((3, 5), 1), ((3,), 0)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        piece = shard_locally(whole, mesh, [Shard(dim)])
        equal.append(torch.equal(piece.to_local(), whole.chunk(2, dim)[rank]) and piece.placements == (Shard(dim),))
    return [*equal, torch.equal(shard_locally(torch.ones(2), mesh, [Replicate()]).to_local(), torch.ones(2))]


def test_each_rank_cuts_its_own_piece_of_what_all_have() -> None:
    """Also under torch 2.6, whose distribute_tensor can only send."""
    assert run_on_ranks(cut, 2) == [[True] * 4] * 2
