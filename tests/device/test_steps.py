"""What a step makes the host wait for, and steps that fp16 skips."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs
from tests.device.devices import on_cpu, on_devices
from tests.device.test_training import accelerator_for, prepared

#: FSDP 1 waits for the unit before the last, so that gathered units don't take all memory (limit_all_gathers).
TORCHS_RATE_LIMITER = "event.synchronize()"


def stacks_of_steps(kind: str, precision: str = "no") -> tuple[list[str], dict[str, int], int]:
    """Where the host waited for the device in accumulated steps of an epoch, and what was counted."""
    configuration = DataLoaderConfiguration(non_blocking=True)
    accelerator = accelerator_for(
        kind,
        precision,
        gradient_accumulation_steps=2,
        dataloader_config=configuration,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model, optimizer, schedule, data = prepared(accelerator, kind, pin_memory=True)
    for _epoch in range(2):  # the second is steady
        batches = iter(data)
        batch: Any = next(batches)  # an epoch begins with the order of the samples, which all ranks agree on
        with torch.sim.stacks_of_synchronizations() as found, torch.sim.counting() as counted:
            while batch is not None:
                rows, targets = batch
                with accelerator.accumulate(model):
                    accelerator.backward((model(rows) - targets).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                batch = next(batches, None)
    return found, counted, len(data)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_steady_step_of_two_ranks_waits_for_nothing(kind: str) -> None:
    for stacks, counted, steps in on_devices(stacks_of_steps, 2, kind):
        ours = [stack for stack in stacks if TORCHS_RATE_LIMITER not in stack]
        assert not ours, ours[0]
        assert counted["scalars_read"] == counted["device_to_host"] == 0
        assert counted["host_to_device"] == counted["asynchronous_copies"] == 2 * (steps - 1)  # the first came before


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_fp16_waits_once_per_update(kind: str) -> None:
    for stacks, _, steps in on_devices(stacks_of_steps, 2, kind, "fp16"):
        assert len(stacks) <= steps // 2, "\n\n".join(stacks)


def skipped_steps(kind: str) -> list[tuple[float, float, bool, list[float]]]:
    """Scale, rate, whether the step was skipped and the weights, after steps of which one overflows on one rank."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    accelerator = accelerator_for(kind, "fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer, schedule, data = prepared(accelerator, kind)
    seen = []
    for step, (rows, targets) in enumerate(data):
        loss = (model(rows) - targets).square().mean()
        if step == 2 and accelerator.is_last_process:
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        scaler: Any = accelerator.scaler
        state = accelerator.get_state_dict(model)
        weights = [value.float().sum().item() for name, value in state.items() if not name.startswith("norm")]
        seen.append((scaler.get_scale(), schedule.get_last_lr()[0], optimizer.step_was_skipped, weights))
        if step == 3:
            break
    return seen


@pytest.mark.nonfinite
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_an_overflow_on_one_rank_skips_the_step_of_all(kind: str) -> None:
    found = on_devices(skipped_steps, 2, kind)
    assert found == on_cpu(skipped_steps, 2, kind)
    for seen in found:
        scales, rates, skips, weights = zip(*seen, strict=True)
        assert skips == (False, False, True, False)
        assert scales == (1024.0, 1024.0, 512.0, 512.0)
        assert rates[1] == rates[2] > rates[3]
        if weights[0]:  # the whole model is rank 0's
            assert weights[0] != weights[1] == weights[2] != weights[3]
