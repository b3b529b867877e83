"""Wrappers of DeepSpeed's engine, optimizer and scheduler; only the engine itself steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, TypeGuard, final

import torch

from ...errors import PreparationError
from ...optional import require
from ...parallel.base import SteppedOptimizer, SteppedScheduler

#: Optimizers of torch and others -> DeepSpeed's CPU optimizer for each: module, class, options, and defaults to keep.
_ON_CPU: Final[dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]]] = {
    "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False}, ("lr", "weight_decay", "betas", "eps")),
    "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}, ("lr", "weight_decay", "betas", "eps")),
    "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", {}, ("lr", "weight_decay", "eps")),
    "Lion": ("deepspeed.ops.lion", "DeepSpeedCPULion", {}, ("lr", "weight_decay", "betas")),
}


class Engine(Protocol):
    """The attributes of DeepSpeed's engine (a module) that its strategy uses."""

    module: torch.nn.Module
    optimizer: Any  # ZeRO's, whose attributes depend on the stage
    _config: Any

    def backward(self, loss: torch.Tensor, **options: Any) -> object: ...
    def step(self) -> None: ...
    def destroy(self) -> None: ...
    def compile(self, *, backend: object, compile_kwargs: dict[str, Any]) -> None: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    def gradient_clipping(self) -> float: ...
    def get_global_grad_norm(self) -> float | torch.Tensor | None: ...
    def bfloat16_enabled(self) -> bool: ...
    def fp16_enabled(self) -> bool: ...
    def zero_optimization(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...
    def zero_optimization_partition_weights(self) -> bool: ...
    def zero_reduce_scatter(self) -> bool: ...
    def save_checkpoint(self, save_dir: str, tag: str) -> object: ...
    def _consolidated_16bit_state_dict(self) -> dict[str, object] | None: ...
    def load_checkpoint(self, load_dir: str, tag: str, **options: bool) -> tuple[str | None, object]: ...


def is_engine(model: object) -> TypeGuard[Engine]:
    """Return True if ``model`` is a DeepSpeed engine."""
    return callable(getattr(type(model), "set_gradient_accumulation_boundary", None))


@final
class DeepSpeedEngineWrapper:
    """The engine used by ``accelerator.backward``; it also reduces, clips, steps and clears gradients."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_no_sync = 0  # how many no_sync blocks are open
        # Without ZeRO and in full precision the engine steps torch's own optimizer, and keeps no norm.
        self._is_plain = not (engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled())
        self._plain_norm: torch.Tensor | None = None

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Accumulate the gradients of ``loss`` (divided by the accumulation steps); step at a boundary.

        Args:
            kwargs: arguments of the engine's own ``backward``; ``scale_wrt_gas=False`` skips the division.
        """
        is_boundary = sync_gradients and not self._num_no_sync
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        self.engine.backward(loss, **kwargs)
        if is_boundary:
            if self._is_plain:
                gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
                self._plain_norm = torch.nn.utils.get_total_norm(gradients)
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients at the last step, before clipping; None before the first."""
        norm = self._plain_norm if self._is_plain else self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    @contextmanager
    def no_boundary(self) -> Generator[None]:
        """Enter a context in which no backward is at a boundary."""
        self._num_no_sync += 1
        try:
            yield
        finally:
            self._num_no_sync -= 1

    def set_gradient_clipping(self, max_norm: float) -> None:
        """Clip gradients to ``max_norm`` from the next step on."""
        self.engine._config.gradient_clipping = max_norm
        for optimizer in (self.engine.optimizer, getattr(self.engine.optimizer, "optimizer", None)):
            if getattr(optimizer, "clip_grad", None) is not None:
                optimizer.clip_grad = max_norm  # pyright: ignore[reportOptionalMemberAccess]


@final
class DeepSpeedOptimizerWrapper(SteppedOptimizer):
    """The engine's optimizer; ``accelerator.backward`` already includes ``step`` and ``zero_grad``."""

    _skipped = "overflow"


@final
class DeepSpeedSchedulerWrapper(SteppedScheduler):
    """The engine's scheduler; ``accelerator.backward`` already steps it."""


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return DeepSpeed's CPU optimizer for the parameter groups of ``optimizer``; ``optimizer`` if there is none.

    Raises:
        MissingDependency: DeepSpeed isn't installed.
        PreparationError: ``optimizer`` already has state, which would be lost.
    """
    found = _ON_CPU.get(type(optimizer).__name__)
    if found is None:
        return optimizer
    if optimizer.state:
        raise PreparationError(
            f"{type(optimizer).__name__} has state already, and DeepSpeed's optimizer on the CPU would start without "
            "it. Prepare it before its first step, or set zero_force_ds_cpu_optimizer to false in the DeepSpeed config."
        )
    module, name, options, kept = found
    library = require(module, "deepspeed", purpose="offloading the optimizer to the CPU (offload_optimizer_device)")
    defaults = {key: value for key, value in optimizer.defaults.items() if key in kept}
    # The groups stay the same dictionaries, so that a scheduler over them goes on working.
    return getattr(library, name)(optimizer.param_groups, **defaults, **options)


def GatheredParameters(
    params: Iterable[torch.Tensor] | torch.Tensor,
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[object]:
    """Enter a context in which ZeRO stage 3 parameters ``params`` are gathered; other parameters don't change.

    Changes by rank ``modifier_rank`` in the block are broadcast to all ranks.
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not any(is_partitioned(parameter) for parameter in given):
        return nullcontext()
    gather: Callable[..., AbstractContextManager[object]] = require("deepspeed").zero.GatheredParameters
    return gather(given, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled)


class PartitionedParameter(Protocol):
    """A parameter of ZeRO stage 3."""

    ds_shape: torch.Size
    ds_process_group: torch.distributed.ProcessGroup


def is_partitioned(parameter: object) -> TypeGuard[PartitionedParameter]:
    """Return True if ``parameter`` is sharded by ZeRO stage 3."""
    return getattr(parameter, "ds_id", None) is not None
