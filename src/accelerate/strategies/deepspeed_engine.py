"""DeepSpeed's engine, optimizer and scheduler, as the loop sees them: the engine's own step is the only one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, final

import torch

from ..errors import PreparationError
from ..optional import require
from .stepped import SteppedOptimizer, SteppedScheduler

#: Optimizers of torch and others, and what DeepSpeed computes on the CPU in their place: module, class, options.
_ON_CPU: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "Adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "AdamW": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
    "Adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", {}),
    "Lion": ("deepspeed.ops.lion", "DeepSpeedCPULion", {}),
}


@final
class DeepSpeedEngineWrapper:
    """The engine that ``accelerator.backward`` goes through: it reduces, clips, steps and clears by itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._held = 0  # how many no_sync blocks are open
        # Without ZeRO and in full precision the engine steps torch's own optimizer, and keeps no norm.
        self._is_plain = not (engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled())
        self._plain_norm: torch.Tensor | None = None

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Gradients of ``loss`` (divided by the accumulation steps) are added; at a boundary, parameters have moved.

        Args:
            kwargs: for the engine's own ``backward``; ``scale_wrt_gas=False`` leaves the division out.
        """
        is_boundary = sync_gradients and not self._held
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        self.engine.backward(loss, **kwargs)
        if is_boundary:
            if self._is_plain:
                gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
                self._plain_norm = torch.nn.utils.get_total_norm(gradients)
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """The norm of all gradients at the last step, before clipping; None before the first."""
        norm = self._plain_norm if self._is_plain else self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    @contextmanager
    def hold(self) -> Generator[None]:
        """A block in which no backward is a boundary."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def follow_clipping(self, max_norm: float) -> None:
        """From the next step on gradients are clipped to ``max_norm``."""
        self.engine._config.gradient_clipping = max_norm
        for optimizer in (self.engine.optimizer, getattr(self.engine.optimizer, "optimizer", None)):
            if getattr(optimizer, "clip_grad", None) is not None:
                optimizer.clip_grad = max_norm  # pyright: ignore[reportOptionalMemberAccess]


@final
class DeepSpeedOptimizerWrapper(SteppedOptimizer):
    """The engine's optimizer: ``step`` and ``zero_grad`` have already happened, in ``accelerator.backward``."""

    _skipped = "overflow"


@final
class DeepSpeedSchedulerWrapper(SteppedScheduler):
    """The engine's scheduler: ``step`` has already happened, in ``accelerator.backward``."""


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """DeepSpeed's optimizer on the CPU with the parameter groups of ``optimizer``; ``optimizer`` itself if none fits.

    Raises:
        MissingDependency: DeepSpeed isn't installed.
        PreparationError: ``optimizer`` has state already, which would be lost.
    """
    found = _ON_CPU.get(type(optimizer).__name__)
    if found is None:
        return optimizer
    if optimizer.state:
        raise PreparationError(
            f"{type(optimizer).__name__} has state already, and DeepSpeed's optimizer on the CPU would start without "
            "it. Prepare it before its first step, or set zero_force_ds_cpu_optimizer to false in the DeepSpeed config."
        )
    module, name, options = found
    library = require(module, "deepspeed", purpose="offloading the optimizer to the CPU (offload_optimizer_device)")
    defaults = {key: value for key, value in optimizer.defaults.items() if key in _known_options(name)}
    # The groups stay the same dictionaries, so that a scheduler over them goes on working.
    return getattr(library, name)(optimizer.param_groups, **defaults, **options)


def _known_options(name: str) -> tuple[str, ...]:
    common = ("lr", "weight_decay")
    return (*common, *{"DeepSpeedCPUAdagrad": ("eps",), "DeepSpeedCPULion": ("betas",)}.get(name, ("betas", "eps")))


def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """A block in which ``params`` are whole (ZeRO stage 3); nothing, where they are not in pieces.

    Changes that rank ``modifier_rank`` makes in the block are those of all ranks afterwards.
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not any(is_partitioned(parameter) for parameter in given):
        return nullcontext()
    gather: Callable[..., AbstractContextManager[Any]] = require("deepspeed").zero.GatheredParameters
    return gather(given, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled)


def is_partitioned(parameter: Any) -> bool:
    """Whether ``parameter`` is one of ZeRO stage 3, of which each rank has a piece."""
    return getattr(parameter, "ds_id", None) is not None
