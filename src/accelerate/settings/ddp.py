"""Options of DDP, process group, gradient scaler, autocast, accumulation, profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.settings.labels import DDPCommunicationHookType
from accelerate.settings.option import OptionGroup, option


@dataclass
class DdpOptions(OptionGroup, title="DDP"):
    """Arguments of DistributedDataParallel, and how gradients are compressed on their way."""

    dim: int = option(0, "The dimension along which tensors are scattered.")
    broadcast_buffers: bool = option(True, "Send rank 0's buffers to all ranks before each forward pass.")
    bucket_cap_mb: int = option(25, "The size of gradient buckets, in MB.")
    find_unused_parameters: bool = option(False, "Look for parameters that take no part in the loss.")
    check_reduction: bool = option(False, "Check that reductions finish before the next forward pass.")
    gradient_as_bucket_view: bool = option(False, "Let gradients share memory with the buckets.")
    static_graph: bool = option(False, "The graph is the same in every step.")
    comm_hook: Any = option("no", "How gradients are compressed.", kind="str", choices=DDPCommunicationHookType)
    comm_wrapper: Any = option(
        "no", "The precision of what the compression sends.", kind="str", choices=("no", "fp16", "bf16")
    )
    comm_state_option: dict[str, Any] = option(factory=dict, help="Arguments of the PowerSGD state.")


@dataclass
class ProcessGroupOptions(OptionGroup, title="Process group"):
    """Arguments of init_process_group."""

    backend: str | None = option("nccl", "The communication backend; the device's own when it is not given.")
    init_method: str | None = option(None, "The address at which ranks meet.")
    timeout: Any = option(None, "How long a collective may take (a timedelta).", kind="object")


@dataclass
class GradScalerOptions(OptionGroup, title="Gradient scaler"):
    """Arguments of the gradient scaler of fp16."""

    init_scale: float = option(65536.0, "The first scale.")
    growth_factor: float = option(2.0, "What the scale is multiplied by after enough good steps.")
    backoff_factor: float = option(0.5, "What the scale is multiplied by after an overflow.")
    growth_interval: int = option(2000, "Good steps before the scale grows.")
    enabled: bool = option(True, "Scale at all.")


@dataclass
class AutocastOptions(OptionGroup, title="Autocast"):
    """Arguments of autocast."""

    enabled: bool = option(True, "Autocast at all.")
    cache_enabled: bool | None = option(None, "Keep casted weights within one pass; None: torch's choice.")


@dataclass
class AccumulationOptions(OptionGroup, title="Gradient accumulation"):
    """How gradients of several batches make one optimizer step."""

    num_steps: int | None = option(None, "Batches per optimizer step.", minimum=1)
    adjust_scheduler: bool = option(True, "Count the batches without a step in the scheduler's step count.")
    sync_with_dataloader: bool = option(True, "Step at the end of the data loader, full window or not.")
    sync_each_batch: bool = option(False, "Synchronise gradients on every batch: more traffic, less memory.")


@dataclass
class ProfileOptions(OptionGroup, title="Profiler"):
    """Arguments of torch's profiler."""

    activities: list[str] | None = option(None, "What is recorded: cpu, cuda, xpu, mtia, hpu.")
    schedule_option: dict[str, int] | None = option(None, "wait, warmup, active, repeat, skip_first.")
    on_trace_ready: Any = option(None, "Called with the profiler when a trace is ready.", kind="object")
    record_shapes: bool = option(False, "Record the shapes of inputs.")
    profile_memory: bool = option(False, "Record memory.")
    with_stack: bool = option(False, "Record source lines.")
    with_flops: bool = option(False, "Estimate floating point operations.")
    with_modules: bool = option(False, "Record module names.")
    output_trace_dir: str | None = option(None, "The folder of Chrome traces, one per process.")
