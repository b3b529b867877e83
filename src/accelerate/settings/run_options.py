"""Options of the run itself: precision, device, accumulation, engine; and switches that only the environment has."""

from __future__ import annotations

from .labels import PrecisionType
from .option import OptionGroup, option, option_group

PRECISIONS = ("no", "fp16", "bf16", "fp8")
assert set(PRECISIONS) == set(PrecisionType.list())


@option_group
class RunOptions(OptionGroup, title="Resources", env="ACCELERATE_", key="", flag=""):
    """Precision, device and accumulation of the training itself."""

    mixed_precision: str = option(
        "no",
        "The precision of forward passes. fp16 and bf16 run in autocast, with fp32 weights.",
        choices=PRECISIONS,
        question="Do you wish to use mixed precision?",
    )
    use_cpu: bool = option(
        False,
        "Train on the CPU, even where there is another device.",
        flag="--cpu",
        switch=True,
        question="Do you want to run your training on CPU only, even if another device is there?",
    )
    debug: bool = option(
        False,
        "Check the shapes that ranks bring to a collective operation, and report differences instead of hanging.",
        env="ACCELERATE_DEBUG_MODE",
        switch=True,
        quiet=True,
        question="Should collective operations be checked while running? It is slower, and helps against hangs.",
        flag_default=None,
    )
    gradient_accumulation_steps: int = option(
        1,
        "The number of batches whose gradients make one optimizer step.",
        key=None,
        minimum=1,
        unset=("auto",),
        quiet=True,
    )
    gradient_clipping: float | None = option(
        None, "The largest allowed norm of the gradients.", key=None, unset=("auto", "none"), minimum=0
    )
    downcast_bf16: bool = option(
        False,
        "On TPU with bf16: float becomes bfloat16 and double becomes float32.",
        env="ACCELERATE_DOWNCAST_BF16",
        switch=True,
        quiet=True,
        question="Should `torch.float` be cast as `bfloat16` and `torch.double` remain `float32` on TPUs?",
    )
    torch_device: str | None = option(
        None, "The device to use, as torch spells it, such as cuda:1.", key=None, flag=None
    )
    cpu_affinity: bool = option(
        False,
        "Bind each process to the CPU cores that are nearest to its device.",
        key="enable_cpu_affinity",
        flag="--enable_cpu_affinity",
        switch=True,
        quiet=True,
        question="Would you like to enable numa efficiency (NVIDIA hardware only)?",
    )


@option_group
class ParadigmOptions(OptionGroup, title="Training paradigm", env="ACCELERATE_", flag=""):
    """The engine that distributes the model over the processes: at most one, and none means plain data parallel."""

    use_deepspeed: bool = option(
        False, "Use DeepSpeed.", switch=True, quiet=True, question="Do you want to use DeepSpeed?", guest="deepspeed"
    )
    use_fsdp: bool = option(
        False,
        "Use fully sharded data parallel.",
        switch=True,
        quiet=True,
        question="Do you want to use FullyShardedDataParallel?",
    )
    use_parallelism_config: bool = option(
        False,
        "Combine data, tensor, context or sequence parallelism as the parallelism options say.",
        switch=True,
        quiet=True,
        question="Do you want to use the parallelism config?",
    )
    use_megatron_lm: bool = option(
        False, "Use Megatron-LM.", switch=True, quiet=True, question="Do you want to use Megatron-LM?", guest="megatron"
    )
    use_sagemaker: bool = option(False, "The run is a SageMaker job.", flag=None, quiet=True)


@option_group
class SwitchOptions(OptionGroup, title="Switches", env="ACCELERATE_"):
    """Switches that only the environment has."""

    log_level: str | None = option(None, "The level of loggers made by `get_logger` without one.")
    enable_rich: bool = option(False, "Show tracebacks through rich, when it is installed.", quiet=True)
    init_include_buffers: bool = option(
        False, "Put buffers on the meta device too in `init_empty_weights`.", quiet=True
    )
    bypass_device_map: bool = option(False, "Allow a model with a device map in a distributed run.", quiet=True)
    allow_cp_standalone: bool = option(False, "Allow context parallelism without FSDP2.", quiet=True)
    debug_rdv_file: str | None = option(None, "The rendezvous file of `debug_launcher` processes.")
    fork_launched: bool = option(
        False, "This process was forked by one of the launchers.", env="FORK_LAUNCHED", quiet=True
    )
    use_torch_xla: bool = option(True, "Use torch_xla when it is installed.", env="USE_TORCH_XLA", quiet=True)
