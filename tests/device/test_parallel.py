"""Long sequences, experts, offloaded shards and averages on the device: the CPU's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from tests.device.devices import on_cpu, on_devices
from tests.mesh_runs import V2, train
from tests.ranks import RankFailed

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "cp": (2, {"fsdp": V2, "degrees": {"cp": 2}}),
    "cp x fsdp": (4, {"fsdp": V2, "degrees": {"cp": 2, "dp_shard": 2}}),
    "sp": (2, {"degrees": {"sp": 2}}),
    "ep": (2, {"fsdp": V2, "degrees": {"ep": 2}, "mixture": True}),
    "fsdp2 offloaded": (2, {"fsdp": {**V2, "cpu_offload": True}}),
}


def train_with_one_attention(**options: Any) -> dict[str, Any]:
    """Train with the algorithm of attention that the device has too."""
    with sdpa_kernel(SDPBackend.MATH):
        return train(cpu=False, **options)


@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_gives_the_cpus_numbers(case: str) -> None:
    num_ranks, options = MESHES[case]
    expected = on_cpu(train_with_one_attention, num_ranks, updates=3, **options)
    found = on_devices(train_with_one_attention, num_ranks, updates=3, **options)
    for seen, right in zip(found, expected, strict=True):
        # Kernels of attention for a mask are others than the device's: not bit by bit.
        assert seen["losses"] == pytest.approx(right["losses"], rel=1e-5)
        assert seen["norms"] == pytest.approx(right["norms"], rel=1e-4)
        assert seen["weights"].keys() == right["weights"].keys()


def ring_of_a_foreign_device() -> None:
    train(cpu=False, updates=1, fsdp=V2, degrees={"cp": 2}, communication="alltoall")


def test_a_ring_is_refused_where_it_has_no_kernels() -> None:
    with pytest.raises(RankFailed, match="cp_comm_strategy='alltoall' on sim: a ring of ranks has kernels for CUDA"):
        on_devices(ring_of_a_foreign_device, 2)


def averaged(steps: int) -> tuple[list[float], list[float]]:
    """A weight under LocalSGD, and the average of it, after each step."""
    accelerator = Accelerator()
    set_seed(5, device_specific=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = accelerator.average_weights(model, 0.5)
    seen: list[float] = []
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for _ in range(steps):
            rows = torch.rand(4, 3).to(accelerator.device)
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            average.update()
            seen.append(accelerator.unwrap_model(model).weight.sum().item())
    return seen, [value.sum().item() for value in average.weights().values()]


def test_local_steps_and_averages_are_the_cpus() -> None:
    found = on_devices(averaged, 2, 4)
    assert found == on_cpu(averaged, 2, 4)
    assert found[0][0][0] != found[1][0][0]
    assert found[0][0][-1] == found[1][0][-1]
