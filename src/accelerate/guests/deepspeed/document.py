"""DeepSpeed's configuration, with "auto" entries that are filled in from the prepared objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from ...distributed.world import World
from ...errors import PreparationError
from ...logging import MultiProcessAdapter, get_logger
from ...training.accumulation import GradientState
from .plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler

logger: MultiProcessAdapter = get_logger(__name__)

_OFFLOAD: Final = "zero_optimization.offload_optimizer.device"
#: "auto" entries that follow from the width of the model: entry -> value.
_BY_WIDTH: Final = {
    "zero_optimization.reduce_bucket_size": lambda width: width * width,
    "zero_optimization.stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "zero_optimization.stage3_param_persistence_threshold": lambda width: 10 * width,
}


@final
@dataclass
class PreparedObjects:
    """The objects of one ``prepare`` call that determine "auto" entries of the configuration."""

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    loaders: Sequence[Any]
    split_batches: bool
    data_parallel_size: int  # the number of different micro-batches computed at the same time
    #: The number of ranks that share one micro-batch without DeepSpeed's knowledge (sequence parallelism).
    ranks_per_batch: int = 1

    @property
    def takes_optimizer(self) -> bool:
        """Whether the code creates its own optimizer."""
        return self.optimizer is not None and not isinstance(self.optimizer, DummyOptim)


def check(plugin: DeepSpeedPlugin, prepared: PreparedObjects) -> None:
    """Check that exactly one of configuration and code creates the optimizer, and likewise the scheduler.

    Raises:
        PreparationError: both create one, or neither does.
    """
    document, optimizer, scheduler = plugin.deepspeed_config, prepared.optimizer, prepared.scheduler
    if "optimizer" in document and prepared.takes_optimizer:
        raise PreparationError(
            "You cannot specify an optimizer in the config file and in the code at the same time: the DeepSpeed config "
            f"has an `optimizer`, and prepare() got {type(optimizer).__name__}. Remove it from the config, or give "
            "prepare() an `accelerate.utils.DummyOptim` in its place."
        )
    if "optimizer" not in document and isinstance(optimizer, DummyOptim):
        raise PreparationError(
            "You cannot create a `DummyOptim` without specifying an optimizer in the config file: add `optimizer` to "
            "the DeepSpeed config, or give prepare() a torch optimizer."
        )
    if "scheduler" in document and scheduler is not None and not isinstance(scheduler, DummyScheduler):
        raise PreparationError(
            "You cannot specify a scheduler in the config file and in the code at the same time: the DeepSpeed config "
            f"has a `scheduler`, and prepare() got {type(scheduler).__name__}. Remove it from the config, or give "
            "prepare() an `accelerate.utils.DummyScheduler` in its place."
        )
    is_empty = isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None
    if "scheduler" not in document and is_empty:
        raise PreparationError(
            "You cannot create a `DummyScheduler` without specifying a scheduler in the config file: add `scheduler` "
            "to the DeepSpeed config, or give the DummyScheduler an `lr_scheduler_callable`."
        )
    if isinstance(optimizer, DummyOptim) and scheduler is not None and not isinstance(scheduler, DummyScheduler):
        raise PreparationError(
            f"{type(scheduler).__name__} can't schedule an optimizer that DeepSpeed makes from its config. Give "
            "prepare() DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: ...)."
        )


def complete(plugin: DeepSpeedPlugin, prepared: PreparedObjects, world: World, gradient_state: GradientState) -> None:
    """Replace every "auto" in the configuration by a value, and set its accumulation steps in the gradient state.

    Raises:
        SettingError: an entry can't be inferred from the objects.
        PreparationError: the micro-batch size is unknown.
    """
    steps = _accumulation_steps(plugin, gradient_state)
    values: dict[str, Any] = {
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        **_batch_sizes(plugin, prepared, steps, world),
        **_widths(plugin, prepared.model),
        **_of_optimizer(prepared.optimizer),
        **_of_scheduler(prepared),
    }
    document = plugin.deepspeed_config
    if prepared.takes_optimizer:
        document["zero_allow_untested_optimizer"] = True
    is_bf16 = str(document.get("bf16", {}).get("enabled", False)).lower() == "true"
    if getattr(torch.version, "hip", None) and is_bf16:  # bf16 sums are too inaccurate on ROCm
        document.setdefault("communication_data_type", "fp32")
    plugin.deepspeed_config_process(must_match=False, **values)


def replaces_optimizer(plugin: DeepSpeedPlugin) -> bool:
    """Return True if DeepSpeed's CPU optimizers replace torch's for offloaded state."""
    wants_own = plugin.deepspeed_config.get("zero_force_ds_cpu_optimizer", True)
    return plugin.get_value(_OFFLOAD, "none") not in ("none", None) and bool(wants_own)


def _accumulation_steps(plugin: DeepSpeedPlugin, gradient_state: GradientState) -> int:
    given = plugin.deepspeed_config.get("gradient_accumulation_steps", "auto")
    if given == "auto":
        plugin.deepspeed_config["gradient_accumulation_steps"] = gradient_state.num_steps
        return gradient_state.num_steps
    if gradient_state.num_steps not in (1, given):
        logger.warning(
            "Gradient accumulation steps mismatch: the Accelerator has %s, the DeepSpeed config has %s. Using "
            "DeepSpeed's value; write 'auto' there to use the Accelerator's.",
            gradient_state.num_steps,
            given,
        )
    gradient_state.num_steps = int(given)
    return gradient_state.num_steps


def _batch_sizes(plugin: DeepSpeedPlugin, prepared: PreparedObjects, steps: int, world: World) -> dict[str, int]:
    given = plugin.get_value("train_micro_batch_size_per_gpu", "auto")
    if isinstance(given, int):
        micro = given
    elif plugin.get_value("train_batch_size", "auto") != "auto" and "train_micro_batch_size_per_gpu" not in (
        plugin.deepspeed_config
    ):
        return {}  # DeepSpeed derives it from the global batch size
    else:
        sizes = [_batch_size(loader) for loader in prepared.loaders]
        if not sizes:
            raise PreparationError(
                "When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or "
                "evaluation dataloaders with `batch_size` attribute, or alternatively set an integer value in "
                "`train_micro_batch_size_per_gpu` in the DeepSpeed config file or assign it to "
                "`AcceleratorState().deepspeed_plugin.deepspeed_config['train_micro_batch_size_per_gpu']`."
            )
        micro = min(sizes) if plugin.is_train_batch_min else max(sizes)
        if prepared.split_batches:
            micro //= world.size // plugin.tensor_parallel_size
        if len(set(sizes)) > 1:
            logger.info(
                "Of the loaders' batch sizes %s DeepSpeed takes %s (is_train_batch_min=%s).",
                sizes,
                micro,
                plugin.is_train_batch_min,
            )
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro
    # DeepSpeed counts every rank, also those over which one replica's layers are sharded (AutoTP).
    return {
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": micro * steps * world.size // prepared.ranks_per_batch,
    }


def _batch_size(loader: object) -> int:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size is None:
        raise PreparationError(
            "At least one of the dataloaders passed to `accelerate.prepare()` has `None` as batch size. Please set an "
            "integer value in `train_micro_batch_size_per_gpu` in the DeepSpeed config file, or assign it to "
            "`AcceleratorState().deepspeed_plugin.deepspeed_config['train_micro_batch_size_per_gpu']`."
        )
    return int(size)


def _widths(plugin: DeepSpeedPlugin, model: torch.nn.Module) -> dict[str, int]:
    asked = [entry for entry in _BY_WIDTH if plugin.is_auto(entry)]
    if not asked:
        return {}
    width = _width_of(getattr(model, "config", None))
    if width is None:
        raise PreparationError(
            f"Can't find the `hidden_size` of {type(model).__name__} in its config, so the `auto` entries {asked} of "
            "the DeepSpeed config can't be filled in. Write integers in their place."
        )
    return {entry: _BY_WIDTH[entry](width) for entry in asked}


def _width_of(config: Any) -> int | None:
    for part in (config, getattr(config, "text_config", None)):
        if getattr(part, "hidden_size", None) is not None:
            return int(part.hidden_size)  # pyright: ignore[reportOptionalMemberAccess]
        if getattr(part, "hidden_sizes", None):
            return int(max(part.hidden_sizes))  # pyright: ignore[reportOptionalMemberAccess]
    return None


def _of_optimizer(optimizer: object) -> dict[str, object]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    named = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    return {f"optimizer.params.{name}": value for name, value in named.items()}


def _of_scheduler(prepared: PreparedObjects) -> dict[str, object]:
    scheduler = prepared.scheduler
    if not isinstance(scheduler, DummyScheduler):
        return {}
    target = scheduler.optimizer
    highest = target.lr if isinstance(target, DummyOptim) else target.defaults["lr"]
    values = {
        "warmup_min_lr": 0,
        "warmup_max_lr": highest,
        "warmup_num_steps": max(1, scheduler.warmup_num_steps),  # DeepSpeed takes no zero
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        # The engine steps it once per update, where other schedules advance once per process.
        ranks = 1 if prepared.split_batches else prepared.data_parallel_size
        values["total_num_steps"] = math.ceil(scheduler.total_num_steps / ranks)
    return {f"scheduler.params.{name}": value for name, value in values.items()}
