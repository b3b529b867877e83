"""Checks that every communication hook of data-parallel training gives equal gradients on all processes."""

from __future__ import annotations

import torch

from accelerate.accelerator import Accelerator
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from accelerate.settings.labels import DDPCommunicationHookType
from accelerate.test_utils.testing import are_the_same_tensors

HOOKS = tuple(DDPCommunicationHookType)


def test_hook(hook: DDPCommunicationHookType) -> None:
    """Check that with ``hook`` gradients are equal on every process after one backward."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(8, 8))
    torch.manual_seed(accelerator.process_index)
    accelerator.backward(model(torch.randn(4, 8, device=accelerator.device)).square().mean())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and are_the_same_tensors(parameter.grad), (hook, name)
    accelerator.free_memory()


def main() -> None:
    """Run all checks."""
    for hook in HOOKS:
        test_hook(hook)
    Accelerator().end_training()


if __name__ == "__main__":
    main()
