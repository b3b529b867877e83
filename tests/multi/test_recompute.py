"""Training with activation checkpointing equals training without it, bit by bit, however parameters are distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, ActivationCheckpointing, FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import TorchDynamoPlugin
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW, slow_for


class Block(nn.Module):
    """Attention and two layers, with dropout in and between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block."""
        query, key, value = (part.unsqueeze(1) for part in self.mix(hidden).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1 if self.training else 0.0)
        hidden = hidden + self.dropout(mixed.squeeze(1))
        return hidden + self.dropout(self.down(torch.relu(self.up(hidden))))


class Network(nn.Module):
    """Three blocks between an entrance and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.entrance, self.head = nn.Linear(4, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one number for each token."""
        hidden = self.entrance(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).tanh()


def trained(
    strategy: str, recompute: ActivationCheckpointing | None, plugin: bool = False, compiles: bool = False
) -> Any:
    """Losses and weights of four micro-batches in two updates, and how often the second block ran in each."""
    fsdp = None
    if strategy.startswith("fsdp"):
        options: dict[str, Any] = {"use_orig_params": True} if strategy == "fsdp1" else {"fsdp_version": 2}
        fsdp = FullyShardedDataParallelPlugin(
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Block"],
            activation_checkpointing=plugin,
            **options,
        )
    handlers: list[Any] = [] if recompute is None else [recompute]
    dynamo = TorchDynamoPlugin(backend="aot_eager") if compiles else None
    run = Accelerator(
        cpu=True, fsdp_plugin=fsdp, kwargs_handlers=handlers, gradient_accumulation_steps=2, dynamo_plugin=dynamo
    )
    torch.manual_seed(0)
    model = Network()
    runs: list[int] = []
    if not compiles:
        model.get_submodule("blocks.1.up").register_forward_hook(lambda *_: runs.append(1))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(10 + run.process_index)
    losses: list[float] = []
    for _ in range(4):
        with run.accumulate(model):
            loss = model(torch.randn(2, 5, 4)).square().mean()
            losses.append(loss.item())
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    weights = run.get_state_dict(model)
    return losses, {name: value.tolist() for name, value in weights.items()}, len(runs)


FOUR_RANKS = [("fsdp2", 4)] if IS_SLOW else []
WAYS = {
    "all": ActivationCheckpointing(),
    "ops": ActivationCheckpointing(save_ops=("mm", "sdpa")),
    "modules": ActivationCheckpointing(modules=r"blocks\.[12]", offload=True),
}


@pytest.mark.parametrize(("strategy", "ranks"), [("one", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), *FOUR_RANKS])
def test_training_is_the_same_bit_by_bit(strategy: str, ranks: int) -> None:
    """With dropout in attention and beside it, accumulation and AdamW; and the modules do run twice."""

    def compare() -> list[tuple[bool, bool, int]]:
        expected = trained(strategy, None)
        assert expected[2] == 4
        found = [trained(strategy, way) for way in WAYS.values()]
        if strategy.startswith("fsdp"):
            found.append(trained(strategy, None, plugin=True))
        return [(one[0] == expected[0], one[1] == expected[1], one[2]) for one in found]

    for results in run_on_ranks(compare, ranks):
        assert set(results) == {(True, True, 8)}


@slow_for("compiles for seconds")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize(("strategy", "ranks"), [("one", 1), ("ddp", 2), ("fsdp2", 2)])
def test_compiled_training_is_the_same(strategy: str, ranks: int) -> None:
    """The compiler takes the policy over."""

    def compare() -> list[bool]:
        expected = trained(strategy, None, compiles=True)
        return [trained(strategy, way, compiles=True)[:2] == expected[:2] for way in (WAYS["all"], WAYS["ops"])]

    for results in run_on_ranks(compare, ranks, timeout_seconds=200):
        assert all(results)
