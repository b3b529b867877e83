"""Checks that model shards saved by all processes merge into the weights of a single process."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import nn

from accelerate.accelerator import Accelerator
from accelerate.checkpointing import merge_fsdp_weights
from accelerate.distributed.collectives import broadcast_object_list
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin

MODEL_FOLDER = "pytorch_model_fsdp_0"


def network() -> nn.Module:
    """Return two layers, the same ones in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 5))


def test_merged_shards_are_the_whole_weights(folder: Path, fsdp_version: Literal[1, 2]) -> None:
    """Check that ``merge_fsdp_weights`` merges the shards into the weights of the whole model."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp_version, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(4, 8, device=accelerator.device)).sum())
    optimizer.step()
    whole = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        merge_fsdp_weights(folder / MODEL_FOLDER, folder / "merged", safe_serialization=True)
        merged = load_file(folder / "merged" / "model.safetensors")
        assert set(merged) == set(whole)
        for name, tensor in whole.items():
            torch.testing.assert_close(merged[name], tensor.cpu(), rtol=0, atol=0)
        accelerator.print(f"FSDP{fsdp_version}: {len(merged)} tensors merged")
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def main() -> None:
    """Run all checks; one process has no shards, and skips them."""
    accelerator = Accelerator()
    if accelerator.num_processes == 1:
        accelerator.print("One process holds whole weights: nothing to merge.")
        return
    where = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    broadcast_object_list(where)
    accelerator.state._reset_state()
    for fsdp_version in (1, 2):
        test_merged_shards_are_the_whole_weights(Path(where[0]) / str(fsdp_version), fsdp_version)
        Accelerator().state._reset_state()
    if Accelerator().is_main_process:
        shutil.rmtree(where[0])


if __name__ == "__main__":
    main()
