"""How a program tells the test what came out: one JSON line, by rank 0."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

ASSETS = os.environ.get("CLIENT_ASSETS", "")
OUTPUT = os.environ.get("CLIENT_OUTPUT", "")


def weight_of(model: torch.nn.Module) -> float:
    """A number that changes when any parameter does."""
    return sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())


def report(**results: Any) -> None:
    """The test has been told, once."""
    if int(os.environ.get("RANK", "0")) == 0:
        os.write(1, f"\nRESULT {json.dumps(results)}\n".encode())
