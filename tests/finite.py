"""Training in a test stays finite: a run that reaches NaN compares NaN with NaN, or passes on one processor only.

The check is a hook of torch's that runs after every step of every optimizer, so each test that trains has it, on
the forked ranks too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook


def assert_finite(parameters: Any) -> None:
    """Check that every value of every parameter on the CPU is a finite number; fake tensors have no values.

    Raises:
        AssertionError: one holds NaN or an infinity.
    """
    for place, parameter in enumerate(parameters):
        local = getattr(parameter, "to_local", lambda value=parameter: value)()
        if not isinstance(local, torch.Tensor) or isinstance(local, FakeTensor):
            continue
        if local.is_floating_point() and local.device.type == "cpu":
            values = local.detach()
            assert torch.isfinite(values.float() if values.element_size() == 1 else values).all(), (
                f"Training left the finite numbers: parameter {place} of shape {tuple(values.shape)} after a step. A "
                "test may not rest on how one processor rounds: train less, slower, or on a problem that has a "
                "minimum. A test of overflows itself is marked `nonfinite`."
            )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert_finite(parameter for group in optimizer.param_groups for parameter in group["params"])


def watch_steps() -> Any:
    """Check the parameters after each step of each optimizer until ``.remove()`` of what is returned."""
    return register_optimizer_step_post_hook(_after_step)
