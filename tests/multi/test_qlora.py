"""Adapters of a model in 4 bits (QLoRA) under FSDP2: trained, saved and resumed as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.ranks import RankFailed, run_on_ranks

bnb: Any = pytest.importorskip("bitsandbytes", reason="make clients installs it")
peft: Any = pytest.importorskip("peft", reason="make clients installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of both libraries

STORAGES = (torch.float32, torch.bfloat16, torch.uint8)


class Block(nn.Module):
    """Two layers with a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block."""
        return hidden + self.down(torch.relu(self.up(hidden)))


class Network(nn.Module):
    """Two blocks between an entrance and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance, self.head = nn.Linear(8, 64), nn.Linear(64, 4)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return four numbers a row."""
        return self.head(self.blocks(self.entrance(inputs))).tanh()


def quantized(storage: torch.dtype, values: bool = True) -> Any:
    """The network, its blocks in 4 bits and with adapters; without ``values`` on the meta device, not yet in 4 bits."""
    torch.manual_seed(0)
    with torch.device("cpu" if values else "meta"):
        network = Network()
        for block in network.blocks:
            for name in ("up", "down"):
                plain = getattr(block, name)
                layer = bnb.nn.Linear4bit(*reversed(plain.weight.shape), quant_type="nf4", quant_storage=storage)
                if values:
                    layer.load_state_dict(plain.state_dict())
                setattr(block, name, layer)
    if values:
        network = network.to("cpu")  # where bitsandbytes quantizes
    return peft.get_peft_model(network, peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))


def trained(
    folder: str | None = None,
    *,
    version: int = 2,
    storage: torch.dtype = torch.float32,
    load: bool = False,
    values: bool = True,
    precision: Any = "no",
    **options: Any,
) -> Any:
    """Losses of three updates; saved to ``folder``, or resumed from there; then those of three more."""
    chosen: dict[str, Any] = {"fsdp_version": 1, "use_orig_params": True} if version == 1 else {"fsdp_version": 2}
    blocks = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(**chosen, **blocks, **options) if version else None
    run = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
    model = quantized(storage, values or bool(run.is_main_process))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer = run.prepare(model, optimizer)

    def train(first: int) -> list[float]:
        losses: list[float] = []
        for number in range(first, first + 3):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            share = 4 // run.num_processes
            rows = rows[run.process_index * share : (run.process_index + 1) * share]
            loss = model(rows).square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(run.reduce(loss.detach(), "mean")))
        return losses

    before = [] if load else train(0)
    if folder is not None and load:
        run.load_state(folder)
    elif folder is not None:
        run.save_state(folder)
    model.eval()
    if version:  # alone on some processors bitsandbytes' own evaluation fails
        with torch.no_grad():
            model(torch.ones(2, 8))
    model.train()
    after = train(3)
    return before + after, sorted(name for name in run.get_state_dict(model) if ".0.up.base" in name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_and_resume_like_one(ranks: int, tmp_path: Path) -> None:
    """In shards and gathered; statistics of the 4-bit weights are in the checkpoint, as one process has them there."""
    one = str(tmp_path / "one")
    expected, names = run_on_ranks(lambda: trained(one, version=0), 1)[0]
    for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        folder = str(tmp_path / form)
        (losses, found), *others = run_on_ranks(lambda f=folder, s=form: trained(f, state_dict_type=s), ranks)
        assert all(same == losses for same, _ in others)
        assert losses == pytest.approx(expected, rel=1e-4)
        assert found == names and any("absmax" in name for name in names)
        resumed = run_on_ranks(lambda f=folder, s=form: trained(f, state_dict_type=s, load=True), ranks)[0][0]
        assert resumed == losses[3:]  # bit by bit
    alone = run_on_ranks(lambda: trained(folder, version=0, load=True), 1)[0][0]
    assert alone == pytest.approx(expected[3:], rel=1e-4)
    from_one = run_on_ranks(lambda: trained(one, load=True), ranks)[0][0]
    assert from_one == pytest.approx(expected[3:], rel=1e-4)


def test_mixed_precision_leaves_the_bits() -> None:
    """FSDP2 casts what it gathers: packed numbers are stored as what it casts to, in whatever they came."""
    expected = run_on_ranks(lambda: trained(version=0, precision="bf16"), 1)[0][0]
    found = run_on_ranks(
        lambda: [trained(storage=one, precision="bf16", activation_checkpointing=True)[0] for one in STORAGES], 2
    )[0]
    assert found[0] == found[1] == found[2] == pytest.approx(expected, rel=5e-2)


def test_ranks_without_values_get_those_of_rank_0() -> None:
    """With their statistics; the others never quantize."""
    expected = run_on_ranks(trained, 2)[0][0]
    found = run_on_ranks(lambda: trained(values=False, cpu_ram_efficient_loading=True), 2)[0][0]
    assert found == expected


def test_what_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"is to be in 4 bits, but has torch\.float32 numbers on meta still"):
        run_on_ranks(lambda: trained(values=False), 2)
    with pytest.raises(RankFailed, match=r"FSDP version 1 casts to torch\.bfloat16"):
        run_on_ranks(lambda: trained(version=1, precision="bf16"), 2)
