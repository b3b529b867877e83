"""Statistics of weights in 4 bits, which bitsandbytes writes into state dicts and doesn't read; by an imitation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.checkpointing.quantized_state import is_statistic, load_statistics


class Statistics:
    """Scales and a description, as bitsandbytes' QuantState has them."""

    def __init__(self, absmax: torch.Tensor) -> None:
        self.absmax = absmax

    def as_dict(self, packed: bool = False) -> dict[str, torch.Tensor]:
        return {"absmax": self.absmax, "quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}

    @classmethod
    def from_dict(cls, entries: dict[str, torch.Tensor], device: torch.device) -> Statistics:
        return cls(entries["absmax"].to(device))


class Packed(nn.Module):
    """A layer of 32 packed bytes, that writes its statistics."""

    def __init__(self, scale: float, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        data = torch.arange(32, dtype=torch.uint8).view(storage).reshape(-1, 1)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.quant_state: Any = Statistics(torch.full((2,), scale))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.quant_state.as_dict(packed=True).items():
            destination[f"{prefix}weight.{name}"] = value


def test_a_state_dict_gives_a_layer_its_statistics() -> None:
    """In whatever dtype the bytes are stored here and there."""
    saved = nn.ModuleDict({"a": Packed(3.0), "b": nn.Linear(2, 2)})
    assert is_statistic("a.weight.absmax") and not is_statistic("b.weight")
    layer = Packed(1.0, torch.float32)
    model = nn.ModuleDict({"a": layer, "b": nn.Linear(2, 2)})
    rest = load_statistics(model, saved.state_dict())
    assert sorted(rest) == ["a.weight", "b.bias", "b.weight"]
    assert layer.quant_state.absmax.tolist() == [3.0, 3.0]
    model.load_state_dict(rest)
    assert layer.weight.detach().view(torch.uint8).flatten().tolist() == list(range(32))


def test_statistics_of_other_layers_stay() -> None:
    """The model says of them that it doesn't know them."""
    state = {"a.weight": torch.zeros(2, 2), "a.weight.absmax": torch.zeros(1)}
    assert load_statistics(nn.ModuleDict({"a": nn.Linear(2, 2)}), state) == state
