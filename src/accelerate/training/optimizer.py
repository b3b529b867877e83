"""The optimizer wrapper: it steps when a window's gradients are complete, and reports skipped steps."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch.utils.hooks import RemovableHandle

from ..nested import recursively_apply
from ..torch_private.modules import (
    found_inf_by_device,
    has_scaled_gradients,
    has_stepped,
    loss_scale,
    scaler_decides,
    step_again,
)
from .accumulation import GradientState

T = TypeVar("T")
Closure = Callable[[], Any]


def move_to_device(state: T, device: torch.device | str) -> T:
    """Return ``state`` (any nested container) with every tensor on ``device``."""
    return recursively_apply(lambda tensor: tensor.to(device), state)


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Closure) -> Closure:
    """Wrap ``method`` so that calling it marks ``accelerated_optimizer`` as having stepped.

    Kept for callers of the documented name; :class:`AcceleratedOptimizer` itself doesn't use it.
    """

    def patched_step(*args: object, **kwargs: object) -> object:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return patched_step


@final
class _Updates:
    """A step hook that counts an optimizer's updates."""

    count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


def _of_inner(name: str, text: str) -> Any:
    """Return a property that reads and writes an attribute of the wrapped optimizer."""

    def read(prepared: AcceleratedOptimizer) -> object:
        return getattr(prepared.optimizer, name)

    def write(prepared: AcceleratedOptimizer, value: object) -> None:
        setattr(prepared.optimizer, name, value)

    return property(read, write, doc=text)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer wrapper that steps only when gradients are synchronised.

    ``step()`` inside an incomplete accumulation window does nothing. At the window's end it updates the parameters,
    unless the gradient scaler found an overflow, which sets ``step_was_skipped``.

    Args:
        optimizer: the optimizer to wrap. Its state is moved to ``device``.
        device_placement: whether to move the state.
        scaler: the gradient scaler of fp16 training, if any.
    """

    _is_accelerate_prepared = True  # libraries check prepared objects for it
    _num_updates: int = 0
    _num_skipped: torch.Tensor | None = None  # steps of a fused optimizer among them that the device skipped
    _step_hook: RemovableHandle | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        device: torch.device | None = None,
        gradient_state: GradientState | None = None,
    ) -> None:
        # torch's __init__ is not called: parameter groups, state and defaults are those of the inner optimizer.
        self.optimizer = optimizer
        self.gradient_state: GradientState = gradient_state or GradientState()
        self.device_placement = device_placement
        self._is_overflow: bool | Callable[[], bool] = False
        self._accelerate_step_called = False
        self._has_stepped = False  # since the gradients were cleared
        self._zero_grad_takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        self.scaler = scaler
        if device_placement:
            _place_state(optimizer, device)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; libraries assign their own."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
        self._scaler = scaler
        # Decided here, to keep the step fast.
        self._act: Callable[[Closure | None], float | None] | None = None
        if self.is_fused_into_backward:
            self._act = _do_nothing
        elif scaler is not None:
            self._act = self._scaled_step
        if self._step_hook is not None:
            self._step_hook.remove()
        self._updates, self._step_hook = _Updates(), None
        if self._act == self._scaled_step:
            self.gradient_state.scaled_optimizers.add(self)
            with suppress(AttributeError):  # not torch's class, or its __init__ wasn't run
                self._step_hook = self.optimizer.register_step_post_hook(self._updates)

    @property
    def is_fused_into_backward(self) -> bool:
        """Whether the optimizer already steps during the backward pass (LOMO)."""
        return any(base.__module__.partition(".")[0] == "lomo_optim" for base in type(self.optimizer).__mro__)

    @property
    def num_updates(self) -> int:
        """The number of parameter updates in this run and the runs it resumed from; may synchronise with the device."""
        if self._num_skipped is not None:
            self._num_updates -= int(self._num_skipped.item())
            self._num_skipped = None
        return self._num_updates

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        self._num_updates, self._num_skipped = count, None

    # -- a step ------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters, if this step completes a window and no gradient is infinite."""
        gradient_state = self.gradient_state
        if not gradient_state.awaits_step and self._is_made_ready():
            return self.optimizer.step()
        if not gradient_state.sync_gradients:
            return None
        self._has_stepped = True
        hooks = gradient_state.hooks
        for hook in hooks.before_step:
            hook(self)
        if self._act is not None:
            result = self._act(closure)
        else:
            self._num_updates += 1
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        gradient_state.num_step_calls += 1
        gradient_state.awaits_step = False  # after a closure's backward
        for hook in hooks.after_step:
            hook(self)
        return result

    def _is_made_ready(self) -> bool:
        """Return whether this step is no update: torch's state-dict functions create state so, at a rate of 0."""
        if self.optimizer.state or not all("lr" in group and not group["lr"] for group in self.param_groups):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)

    def before_first_step(self, look: Callable[[], object]) -> None:
        """Call ``look`` before the first update."""
        act = self._act

        def first(closure: Closure | None) -> float | None:
            self._act = act
            look()
            if act is not None:
                return act(closure)
            self._num_updates += 1
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

        self._act = first

    def _scaled_step(self, closure: Closure | None) -> float | None:
        scaler = self._scaler
        assert scaler is not None, "chosen only with a scaler"
        self._updates.count = 0
        if self.gradient_state.update_scaler is not None and has_stepped(scaler, self.optimizer):
            _update_scaler_now(scaler, self.gradient_state)  # a second step without a backward in between
        result = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure=closure)
        found = _overflow_flags(scaler, self.optimizer)
        _update_scaler_once(scaler, self.gradient_state)
        self._num_updates += self._updates.count
        if self._updates.count and scaler_decides(self.optimizer):
            self._is_overflow = False
        else:
            if self._updates.count and found:  # a fused kernel: only the device knows whether it skipped
                self._count_skipped(found)
            # Reading the flags synchronises with the device, so they are read only on demand (by the scheduler).
            self._is_overflow = lambda: any(bool(flag.item()) for flag in found)
        return result

    def _count_skipped(self, found: list[torch.Tensor]) -> None:
        """Add 1 to the skipped steps if one of the flags ``found`` is set, without synchronising with the device."""
        first, *others = found
        if self._num_skipped is None:
            self._num_skipped = torch.zeros_like(first)
        for other in others:
            first = torch.maximum(first, other.to(first.device, non_blocking=True))
        self._num_skipped += first

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clear the gradients, unless an open accumulation window still needs them.

        Inside a window, only gradients that a step has used are cleared.

        Raises:
            ValueError: ``set_to_none`` was given to an optimizer without that argument.
        """
        gradient_state = self.gradient_state
        if gradient_state.protects_gradients or not (self._has_stepped or gradient_state.sync_gradients):
            return
        self._has_stepped = False
        if self._zero_grad_takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)
        elif set_to_none is None:
            self.optimizer.zero_grad()
        else:
            raise ValueError(
                f"zero_grad(set_to_none={set_to_none}): {type(self.optimizer).__name__} has no such argument. "
                "Call zero_grad() without it."
            )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step()`` was skipped because of an fp16 overflow."""
        if callable(self._is_overflow):
            self._is_overflow = self._is_overflow()
        return self._is_overflow

    # -- the inner optimizer's interface -------------------------------------------------------------------

    state: defaultdict[torch.Tensor, Any] = _of_inner("state", "The inner optimizer's state.")
    param_groups: list[dict[str, Any]] = _of_inner("param_groups", "The inner optimizer's parameter groups.")
    defaults: dict[str, Any] = _of_inner("defaults", "The inner optimizer's defaults.")

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add ``param_group`` to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load ``state_dict`` into the inner optimizer; its tensors go to the parameters' devices."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> object:
        """Switch the inner optimizer to training mode (schedule-free optimizers have one)."""
        switch = getattr(self.optimizer, "train", None)
        return switch() if callable(switch) else None

    def eval(self) -> object:
        """Switch the inner optimizer to evaluation mode (schedule-free optimizers have one)."""
        switch = getattr(self.optimizer, "eval", None)
        return switch() if callable(switch) else None

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while unpickling, before __setstate__
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, object]:
        return {
            "optimizer": self.optimizer,
            "gradient_state": self.gradient_state,
            "_scaler": self._scaler,
            "device_placement": self.device_placement,
            "_is_overflow": self.step_was_skipped,
            "_accelerate_step_called": self._accelerate_step_called,
            "_has_stepped": self._has_stepped,
            "_num_updates": self.num_updates,
            "_zero_grad_takes_set_to_none": self._zero_grad_takes_set_to_none,
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        # Older pickles call the count num_updates.
        self.__dict__.update({"_num_updates": state.get("num_updates", 0), **state})
        self.scaler = self._scaler

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _do_nothing(closure: Closure | None) -> None:
    return None


def _overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the overflow flags (``found_inf``) per device of the last ``scaler.step``; empty for a disabled scaler.

    Call it before ``scaler.update()`` clears them. They are valid for plain, foreach and fused optimizers (a fused
    kernel always runs, and reads the flag on the device).
    """
    if not scaler.is_enabled():
        return []
    return list(found_inf_by_device(scaler, optimizer).values())


def _place_state(optimizer: torch.optim.Optimizer, device: torch.device | None) -> None:
    """Move existing optimizer state to the parameters' devices (to ``device`` for parameters on the meta device)."""
    if not optimizer.state:
        return
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # torch keeps step counts on the CPU unless the kernel needs them on the device.
            stays = name == "step" and isinstance(value, torch.Tensor) and value.device.type == "cpu"
            if isinstance(value, torch.Tensor) and not stays:
                state[name] = value.to(device if device and parameter.device.type == "meta" else parameter.device)


# -- the gradient scaler's update --------------------------------------------------------------------------
#
# It comes once, after the step of the last optimizer of a window. `scaler.update()` clears the unscaled state of all
# optimizers, and may change the scale. Between the steps of two optimizers, it would make the second one's gradients
# unscaled twice, or by a wrong scale. So the update waits while another optimizer has gradients that no step has used,
# or a window is open. It comes at the latest before the next backward (a GAN's discriminator has gradients of the
# generator's loss, which no step ever uses).


def _update_scaler_once(scaler: torch.amp.GradScaler, gradient_state: GradientState) -> None:
    """Update ``scaler`` after an optimizer's step; if others still have to step, before the next backward."""
    waits = gradient_state.has_unfinished()
    if scaler.is_enabled() and (waits or next(_waiting(scaler, gradient_state), None) is not None):
        gradient_state.update_scaler = partial(_update_between_windows, scaler, gradient_state)
    else:
        gradient_state.update_scaler = None
        scaler.update()


def _update_scaler_now(scaler: torch.amp.GradScaler, gradient_state: GradientState) -> None:
    """Update ``scaler``, and convert gradients that no step has used to the new scale."""
    gradient_state.update_scaler = None
    unused = list(_waiting(scaler, gradient_state))
    before = loss_scale(scaler)
    stages = [has_scaled_gradients(scaler, optimizer) for optimizer, _ in unused]
    scaler.update()
    for (_, gradient), is_scaled in zip(unused, stages, strict=True):
        factor = loss_scale(scaler) / before if is_scaled else loss_scale(scaler)
        local: Any = getattr(gradient, "to_local", None)
        (gradient if local is None else local()).mul_(factor.to(gradient.device))


def _update_between_windows(scaler: torch.amp.GradScaler, gradient_state: GradientState, before_backward: bool) -> None:
    if not gradient_state.has_unfinished(before_backward=before_backward):
        _update_scaler_now(scaler, gradient_state)
    elif before_backward:  # it adds scaled gradients also for optimizers that have stepped
        for prepared in gradient_state.scaled_optimizers:
            if prepared.scaler is scaler and has_stepped(scaler, prepared.optimizer):
                step_again(scaler, prepared.optimizer)


def _waiting(
    scaler: torch.amp.GradScaler, gradient_state: GradientState
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """Iterate over the optimizers that haven't stepped since the last update of ``scaler``, with their gradients."""
    for prepared in gradient_state.scaled_optimizers:
        optimizer = prepared.optimizer
        if prepared.scaler is scaler and not has_stepped(scaler, optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        yield optimizer, parameter.grad
