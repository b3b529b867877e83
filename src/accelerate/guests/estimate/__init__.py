"""Estimates of the memory for training a model, before any of it is allocated.

- `subject`: the model to estimate, given by its name on the hub, a folder, a function that builds it, or a training
script; and the inputs for models of known libraries.
- `trace`: count every allocation of one training step on tensors without values.
- `plan`: compute the memory per rank of each parallel layout, and choose a layout.
- `report`: show an estimate as tables, JSON and a chart.
"""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "estimate-memory",
            f"{__name__}.command:estimate_command_parser",
            "Say how much memory a model needs.",
        ),
        Command(
            "plan",
            f"{__name__}.plan_command:plan_command_parser",
            "Propose how to spread a training run over GPUs, by the memory it needs.",
        ),
    )
)
