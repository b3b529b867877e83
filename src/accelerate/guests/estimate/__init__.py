"""Estimates of the memory that a model needs for training, before any is allocated.

- `subject`: the model to estimate: by its name on the hub, its folder, the function that builds it, or a training
  script; and the inputs of models of known libraries.
- `trace`: one training step on tensors without values, with every allocation counted.
- `plan`: the memory of each parallel layout per rank, and the choice among the layouts.
- `report`: an estimate as tables, JSON and a chart.
"""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "estimate-memory",
            f"{__name__}.command",
            "estimate_command_parser",
            "Say how much memory a model needs.",
        ),
        Command(
            "plan",
            f"{__name__}.plan_command",
            "plan_command_parser",
            "Propose how to spread a training run over GPUs, by the memory it needs.",
        ),
    )
)
