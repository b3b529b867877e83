"""Checks inference through a pipeline: each process computes some layers, and all see the output of the whole model."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.distributed.random import set_seed
from accelerate.inference import prepare_pippy
from accelerate.state import PartialState


class Layers(nn.Module):
    """A sequence of equal layers."""

    def __init__(self, count: int = 8, width: int = 16) -> None:
        super().__init__()
        self.layers: nn.ModuleList = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


def test_the_pipeline_computes_what_the_model_does() -> None:
    """Check that every process gets the model's own output with ``gather_output``."""
    state = PartialState()
    set_seed(42)
    model, inputs = Layers(), torch.randn(4, 16)
    with torch.no_grad():
        expected = model(inputs)
    staged = prepare_pippy(model, split_points="auto", example_args=(inputs,), gather_output=True)
    with torch.no_grad():
        output = staged(inputs.to(state.device))
    torch.testing.assert_close(output.cpu(), expected)
    state.print(f"a pipeline of {state.num_processes} computes what the model does")


def main() -> None:
    """Run the check; one process has no pipeline, and skips it."""
    state = PartialState()
    if state.num_processes == 1:
        state.print("One process has no pipeline.")
        return
    test_the_pipeline_computes_what_the_model_does()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
