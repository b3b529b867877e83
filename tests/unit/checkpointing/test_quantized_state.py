"""Optimizer state in 8 and in 4 bits comes out of a checkpoint as it went in, on any number of ranks (torchao)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.checkpointing.quantized_state import (
    is_split,
    join_state,
    refuse_half_weights,
    split_optimizer,
    split_state,
)
from accelerate.errors import CheckpointError, PreparationError
from tests.ranks import run_on_ranks

optim: Any = pytest.importorskip("torchao.optim", reason="the extra fp8 installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own


def state_of(optimizer: Any, parameter: torch.Tensor) -> dict[str, Any]:
    """The state after some steps, without the compiler that a step waits for."""
    torch.manual_seed(7)
    state = {"step": torch.tensor(3.0)}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        numbers = torch.randn(parameter.shape)
        buffer = optimizer._new_buffer(parameter, signed)
        local = getattr(buffer, "_local_tensor", buffer)
        whole: Any = numbers if signed else numbers.square()
        if local is not buffer:
            whole = shard(whole, buffer.device_mesh)._local_tensor
        local.copy_(whole)
        state[name] = buffer
    return state


def shard(whole: torch.Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(whole, mesh, [Shard(0)])


def numbers(value: Any) -> torch.Tensor:
    """The numbers of this rank's shard."""
    local = getattr(value, "_local_tensor", value)
    return local.dequantize() if hasattr(local, "dequantize") and hasattr(local, "codes") else local


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8", "AdamW4bit"])
@pytest.mark.parametrize("shape", [(128, 64), (64, 384), (8192,), (16, 16, 20)])
def test_one_process_gets_the_same_bits(kind: str, shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = getattr(optim, kind)([parameter])
    state = state_of(optimizer, parameter)
    split = split_state(state, optimizer)
    assert all(type(value) is torch.Tensor for value in split.values()) and "exp_avg.codes" in split
    joined: dict[str, Any] = dict(join_state(split, parameter, optimizer))
    assert sorted(joined) == sorted(state)
    for name in ("exp_avg", "exp_avg_sq"):
        assert type(joined[name]) is type(state[name])
        assert torch.equal(joined[name].codes, state[name].codes) and torch.equal(joined[name].scale, state[name].scale)


def test_plain_state_is_left_alone_and_another_optimizer_is_refused() -> None:
    parameter = nn.Parameter(torch.randn(128, 64))
    plain = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    plain.step()
    assert split_optimizer(plain.state_dict(), plain)["state"][0].keys() == plain.state_dict()["state"][0].keys()
    assert not is_split(split_optimizer(plain.state_dict(), plain))
    low = optim.AdamW8bit([parameter])
    split = split_state(state_of(low, parameter), low)
    assert is_split({"state": {0: split}})
    with pytest.raises(CheckpointError, match=r"'exp_avg' was saved in few bits"):
        join_state(split, parameter, plain)


@pytest.mark.parametrize(
    "kind, rows, error", [("AdamW8bit", 256, 0.15), ("AdamW8bit", 86 * 3 - 2, 0.15), ("AdamW4bit", 86 * 3 - 2, 1.0)]
)
def test_shards_come_back_bit_by_bit_and_go_to_other_ranks(kind: str, rows: int, error: float) -> None:
    """Also where only the last rank's shard fills whole blocks, so that the others' aren't quantized."""

    def run() -> bool:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (3,))
        parameter: Any = nn.Parameter(shard(torch.zeros(rows, 64), mesh))
        optimizer = getattr(optim, kind)([parameter])
        state = state_of(optimizer, parameter)
        split = split_state(state, optimizer)
        again = join_state(split, parameter, optimizer)
        same = all(torch.equal(numbers(again[name]), numbers(state[name])) for name in ("exp_avg", "exp_avg_sq"))
        shards: dict[str, Any] = dict(split)
        whole = {name: shards[name].full_tensor() if name != "step" else shards[name] for name in shards}
        from_whole = join_state(whole, parameter, optimizer)
        same &= all(torch.equal(numbers(from_whole[name]), numbers(state[name])) for name in ("exp_avg", "exp_avg_sq"))
        # One process has other blocks: equal to what 8 bits can say.
        alone = nn.Parameter(torch.zeros(rows, 64))
        one = join_state(whole, alone, getattr(optim, kind)([alone]))
        torch.manual_seed(7)
        expected = torch.randn(rows, 64)
        return bool(same) and bool((numbers(one["exp_avg"]) - expected).abs().max() < error)

    assert run_on_ranks(run, 3) == [True, True, True]


def test_full_state_of_torchao_is_left_alone_in_uneven_shards() -> None:
    """``_AdamW`` has the blocks of its few-bit sisters, of infinite size."""

    def run() -> bool:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (3,))
        parameter: Any = nn.Parameter(shard(torch.zeros(86 * 3 - 2, 64), mesh))
        optimizer = optim._AdamW([parameter])
        state = state_of(optimizer, parameter)
        split = split_state(state, optimizer)
        joined = join_state(split, parameter, optimizer)
        assert all(split[name] is value and joined[name] is value for name, value in state.items())
        refuse_half_weights(optimizer)
        few_bits = split_state(state_of(low := optim.AdamW8bit([parameter]), parameter), low)
        with pytest.raises(CheckpointError, match="in few bits, but _AdamW keeps full precision"):
            join_state(few_bits, parameter, optimizer)
        return sorted(split) == ["exp_avg", "exp_avg_sq", "step"]

    assert run_on_ranks(run, 3) == [True, True, True]


def test_state_of_others_that_is_called_alike_is_kept() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    state = {"momentum.scale": torch.ones(2), "values.values": 3, 7: "by number"}
    assert join_state(state, parameter, torch.optim.SGD([parameter])) == state  # type: ignore[comparison-overlap, arg-type]


def test_sharded_weights_in_bf16_are_refused_where_their_state_would_be_in_few_bits() -> None:
    """And prepared in float32, with small shards, or with full state."""

    def run() -> list[str]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from accelerate import Accelerator
        from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        for rows, dtype, kind in (
            (128, torch.float32, "AdamW8bit"),
            (64, torch.bfloat16, "AdamW8bit"),
            (128, torch.bfloat16, "_AdamW"),
        ):
            weight = nn.Parameter(shard(torch.zeros(rows, 64, dtype=dtype), mesh))
            refuse_half_weights(getattr(optim, kind)([weight]))
        said: list[str] = []
        for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
            model = nn.Linear(64, 128, dtype=torch.bfloat16)
            run = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
            with pytest.raises(PreparationError) as caught:
                run.prepare(model, getattr(optim, kind)(model.parameters()))
            said.append(str(caught.value))
        return said

    first, second = run_on_ranks(run, 2)
    assert first == second
    assert first[1].startswith("AdamW4bit got a sharded weight of shape (128, 64) in torch.bfloat16, whose state")
    assert all("Leave the weights in float32" in one for one in first)
