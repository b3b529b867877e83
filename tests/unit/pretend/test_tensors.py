"""Tensors without values: only parameters of modules, and what is computed from them."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.guests.pretend.run import PretendedRun
from accelerate.torch_private.tracing import fake_tensor_class


def test_only_parameters_of_modules_lose_their_values() -> None:
    run = PretendedRun(1)
    with run.mode.around_script():
        batch = torch.tensor([3, 1]).detach()
        weights = nn.Parameter(torch.tensor([0.5, 2.0])).data
        of_module = nn.Linear(2, 1).weight.detach()
    assert (batch.tolist(), weights.tolist()) == ([3, 1], [0.5, 2.0])
    assert isinstance(of_module, fake_tensor_class())
