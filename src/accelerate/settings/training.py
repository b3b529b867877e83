"""Options of prepared data loaders."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Literal

from .labels import DDPCommunicationHookType, DynamoBackend
from .option import OptionGroup, option, option_group


@option_group
class DataLoaderOptions(OptionGroup, title="Data loaders"):
    """Options of sharding a data loader's batches over the processes."""

    split_batches: bool = option(
        False, "Split each batch over the processes, instead of giving each process a batch of the full size."
    )
    dispatch_batches: bool | None = option(
        None, "Read every batch on the main process and send the parts; None: only for iterable datasets."
    )
    even_batches: bool = option(
        True, "Complete the last batches from the start of the epoch, so that all processes have equal ones."
    )
    use_seedable_sampler: bool = option(False, "Shuffle with a sampler that is seeded anew for every epoch.")
    data_seed: int | None = option(None, "The seed of the seedable sampler; None: torch's initial seed.")
    non_blocking: bool = option(False, "Copy batches to the device without waiting (with pinned memory).")
    use_stateful_dataloader: bool = option(False, "Use torchdata's StatefulDataLoader.")
    index_free_shuffle: bool = option(
        False, "Compute the shuffled order sample by sample instead of keeping it in memory (for very many samples)."
    )
    prefetch_to_device: int = option(
        0, "How many batches are on their way to the device while one is in use; 0: copied when asked for.", minimum=0
    )
    augment_by_sample: bool = option(
        False,
        "Draw the augmentation of a sample from its seed, epoch and place alone: the same on any number of ranks.",
    )
    reseed_workers: bool = option(
        True,
        "Seed the random streams of data workers anew for every batch, so that a resumed run draws alike; "
        "False: workers draw as in torch's own loader.",
    )
    already_sharded: bool | None = option(
        None,
        "Each process's loader reads its own part of the data already, so nothing is divided; None: find out.",
    )
    token_budget: int | None = option(
        None, "Make batches of at most so many tokens, instead of a number of samples.", minimum=1
    )
    balance: bool = option(
        False,
        "Let ranks measure their speeds, and read more or fewer samples of each global batch from the next epoch on.",
        env="ACCELERATE_BALANCE", key="balance", flag="--balance", switch=True, quiet=True, guest="balance",
    )  # fmt: skip
    length_of: Callable[[Any], int] | Sized | str | None = option(
        None,
        "The number of tokens of a sample: a function of it, all lengths, or the name of a column.",
        kind="object",
    )
    packed: bool = option(
        False, "The samples of a batch of token_budget are laid end to end, and not padded to the longest one."
    )


# --------------------------------------------------------------------------------------------------
# Options of the project folder: where checkpoints and logs go


@option_group
class ProjectOptions(OptionGroup, title="Project"):
    """The folder of a run's checkpoints and logs, and which of them are kept."""

    project_dir: str | None = option(None, "The folder of the project.")
    logging_dir: str | None = option(None, "The folder of tracker logs; None: the project's folder.")
    automatic_checkpoint_naming: bool = option(False, "Number checkpoints as checkpoints/checkpoint_<n>.")
    total_limit: int | None = option(None, "How many numbered checkpoints are kept.", minimum=1)
    iteration: int = option(0, "The number of the next checkpoint.", minimum=0)
    save_on_each_node: bool = option(False, "Save on the first process of every machine, not of the run.")
    checkpoint_format: Literal["safe", "classic"] = option(
        "safe",
        "safe: safetensors and JSON; classic: the older file names with pickles.",
        choices=("safe", "classic"),
    )
    keep_every: int | None = option(
        None, "Every checkpoint whose number this divides is kept, beside the newest total_limit.", minimum=1
    )
    best_metric: str | None = option(
        None, "The checkpoints that are best by this metric of save_state(metrics=...) are kept as well."
    )
    best_mode: Literal["min", "max"] = option(
        "min", "Whether less or more of the metric is better.", choices=("min", "max")
    )
    keep_best: int = option(1, "How many of the best checkpoints are kept.", minimum=1)
    save_asynchronously: bool = option(False, "save_state() returns as soon as the state is copied to host memory.")
    compare_replicas: Literal["warn", "raise", "no"] = option(
        "warn",
        "What save_state() does if replicas of a parameter differ.",
        choices=("warn", "raise", "no"),
    )


# --------------------------------------------------------------------------------------------------
# Options of models in 8 and 4 bits


@option_group
class BnbOptions(OptionGroup, title="Quantization"):
    """Options of quantization by bitsandbytes: exactly one of 8 and 4 bits."""

    load_in_8bit: bool = option(False, "Linear layers in 8 bits.")
    llm_int8_threshold: float = option(6.0, "The size from which activations are outliers and stay in 16 bits.")
    load_in_4bit: bool = option(False, "Linear layers in 4 bits.")
    bnb_4bit_quant_type: str = option("fp4", "The 4-bit type.", choices=("fp4", "nf4"))
    bnb_4bit_use_double_quant: bool = option(False, "Quantize the quantization constants too.")
    bnb_4bit_compute_dtype: Any = option("fp16", "The precision of computation: fp32, fp16, bf16.", kind="object")
    torch_dtype: Any = option(None, "The precision of the layers that are not quantized.", kind="object")
    skip_modules: list[str] | None = option(None, "Modules that are not quantized.")
    keep_in_fp32_modules: list[str] | None = option(None, "Modules that stay in fp32.")


# --------------------------------------------------------------------------------------------------
# Options of torch.compile

TORCH_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@option_group
class DynamoOptions(
    OptionGroup,
    title="Compile",
    env="ACCELERATE_DYNAMO_",
    section="dynamo_config",
    key="dynamo_",
    flag="dynamo_",
):
    """Options of compiling prepared models."""

    backend: str = option(
        "NO",
        "The compiler behind torch.compile; no leaves models as they are.",
        choices=DynamoBackend,
        question="Which dynamo backend would you like to use?",
    )
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default",
        "What the compiler optimizes for.",
        choices=TORCH_DYNAMO_MODES,
        question="Which mode do you want to use?",
        flag_default="default",
    )
    fullgraph: bool = option(
        False,
        "Fail instead of breaking the graph.",
        stem="use_fullgraph",
        switch=True,
        question="Do you want the fullgraph mode, or is it ok to break the model into several subgraphs?",
    )
    dynamic: bool | None = option(
        None,
        "Compile for dynamic shapes; not given: the compiler decides.",
        stem="use_dynamic",
        switch=True,
        question="Do you want to enable dynamic shape tracing?",
    )
    options: Any = option(None, "More options of the backend.", kind="object")
    disable: bool = option(False, "Make torch.compile a no-op.", env=None, key=None, flag=None)
    use_regional_compilation: bool = option(
        False,
        "Compile each repeated block instead of the whole model: much faster to compile.",
        switch=True,
        question="Do you want to enable regional compilation?",
    )


# --------------------------------------------------------------------------------------------------
# Options of DDP, process group, gradient scaler, autocast, accumulation, profiler


@option_group
class DdpOptions(OptionGroup, title="DDP"):
    """Arguments of DistributedDataParallel, and the compression of gradients in its all-reduce."""

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


@option_group
class ProcessGroupOptions(OptionGroup, title="Process group"):
    """Arguments of init_process_group."""

    backend: str | None = option("nccl", "The communication backend; the device's own when it is not given.")
    init_method: str | None = option(None, "The address of the rendezvous.")
    timeout: Any = option(None, "How long a collective may take (a timedelta).", kind="object")


@option_group
class GradScalerOptions(OptionGroup, title="Gradient scaler"):
    """Arguments of the gradient scaler of fp16."""

    init_scale: float = option(65536.0, "The first scale.")
    growth_factor: float = option(2.0, "What the scale is multiplied by after enough good steps.")
    backoff_factor: float = option(0.5, "What the scale is multiplied by after an overflow.")
    growth_interval: int = option(2000, "Good steps before the scale grows.")
    enabled: bool = option(True, "Scale at all.")


@option_group
class AutocastOptions(OptionGroup, title="Autocast"):
    """Arguments of autocast."""

    enabled: bool = option(True, "Autocast at all.")
    cache_enabled: bool | None = option(None, "Keep casted weights within one pass; None: torch's choice.")


@option_group
class AccumulationOptions(OptionGroup, title="Gradient accumulation"):
    """Options of accumulating the gradients of several batches for one optimizer step."""

    num_steps: int | None = option(None, "Batches per optimizer step.", minimum=1)
    adjust_scheduler: bool = option(True, "Count the batches without a step in the scheduler's step count.")
    sync_with_dataloader: bool = option(True, "Step at the end of the data loader, full window or not.")
    sync_each_batch: bool = option(False, "Synchronise gradients on every batch: more traffic, less memory.")


@option_group
class RecomputeOptions(OptionGroup, title="Activation checkpointing"):
    """Options of computing activations again in the backward pass."""

    modules: Any = option(None, "The modules that do so; None: FSDP's wrap units, or repeated blocks.", kind="object")
    save_ops: Any = option((), "The operators whose results are kept, or a policy.", kind="object")
    offload: bool = option(False, "Keep the inputs of these modules in CPU memory.")


@option_group
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
