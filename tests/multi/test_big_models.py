"""A checkpoint that one rank reads and all of them get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.big_models.load import load_checkpoint_in_model
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[str, dict[str, list[float]]]:
    torch.manual_seed(3)
    state = network().state_dict()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return str(tmp_path), {name: tensor.flatten().tolist() for name, tensor in state.items()}


def _state(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def _broadcast(path: str, dispatch: bool) -> dict[str, list[float]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model, where = network(), path if accelerator.is_main_process else "/there/is/nothing"
    if dispatch:
        load_checkpoint_and_dispatch(model, where, broadcast_from_rank0=True, strict=True)
    else:
        load_checkpoint_in_model(model, where, broadcast_from_rank0=True)
    return _state(model)


@pytest.mark.parametrize("dispatch", [False, True])
def test_only_the_first_rank_reads(checkpoint: tuple[str, dict[str, Any]], dispatch: bool) -> None:
    path, expected = checkpoint
    assert run_on_ranks(_broadcast, 2, path, dispatch) == [expected, expected]


def _sharded(path: str, broadcast: bool) -> dict[str, list[float]]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    torch.manual_seed(accelerator.process_index + 10)
    model = network()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    where = path if accelerator.is_main_process or not broadcast else "/there/is/nothing"
    load_checkpoint_in_model(model, where, broadcast_from_rank0=broadcast, full_state_dict=True)
    gather = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}
    return {name: tensor.flatten().tolist() for name, tensor in gather.items()}


@pytest.mark.parametrize("broadcast", [False, True])
def test_sharded_models_get_their_shards(checkpoint: tuple[str, dict[str, Any]], broadcast: bool) -> None:
    path, expected = checkpoint
    assert run_on_ranks(_sharded, 2, path, broadcast) == [expected, expected]


def test_one_process_reads_for_itself(checkpoint: tuple[str, dict[str, Any]]) -> None:
    path, expected = checkpoint
    with init_empty_weights():
        model = network()
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    assert _state(model) == expected
