"""Models of transformers on meshes: loaded in pieces, cut by their own plan, their sequences cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig
from tests.ranks import run_on_ranks

transformers: Any = pytest.importorskip("transformers", reason="make clients installs it")
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:Passing `tp_plan` directly:FutureWarning"),
]

LENGTH = 16
FSDP = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    path = tmp_path_factory.mktemp("llama")

    def save() -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(path)

    run_on_ranks(save, 1)
    return path


def train(folder: Path, degrees: dict[str, int], fsdp: bool, loaded_in_pieces: bool = False) -> dict[str, Any]:
    """Six updates: losses, norms, and what it then generates."""
    sizes = {f"{axis}_size": size for axis, size in degrees.items()}
    run = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**FSDP) if fsdp else None,
        parallelism_config=ParallelismConfig(sp_backend="torch", **sizes) if degrees else None,
    )
    pieces: dict[str, Any] = {}
    if loaded_in_pieces:
        pieces = {"tp_plan": "auto", "device_mesh": run.torch_device_mesh["tp"]}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **pieces)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    share = run.mesh.data_share()
    words = torch.randint(0, 64, (6, 4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    norms: list[float] = []
    for batch in words:
        own = batch.chunk(share.count)[share.index]
        inputs, labels = own[:, :-1].contiguous(), own[:, 1:].contiguous()
        places = torch.arange(LENGTH).repeat(len(inputs), 1)
        buffers = [inputs, labels, places]
        with run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
            scores = model(input_ids=inputs, position_ids=places, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
            run.backward(loss)
        norms.append(float(run.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    model.eval()
    prompt = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        told = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    names = list(run.get_state_dict(model))
    return {"losses": losses, "norms": norms, "told": told.tolist(), "names": names}


CASES: dict[str, tuple[int, dict[str, int], bool, bool]] = {
    "tp, by the model's plan": (2, {"tp": 2}, False, False),
    "tp, loaded in pieces": (2, {"tp": 2}, False, True),
    "tp x fsdp": (4, {"tp": 2, "dp_shard": 2}, True, False),
    "cp": (2, {"cp": 2}, True, False),
    "sp": (2, {"sp": 2}, False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_llama_trains_and_generates_as_in_one_process(name: str, folder: Path) -> None:
    """Losses, norms and words."""
    ranks, degrees, fsdp, in_pieces = CASES[name]
    expected = run_on_ranks(lambda: train(folder, {}, False), 1, timeout_seconds=180)[0]
    found = run_on_ranks(lambda: train(folder, degrees, fsdp, in_pieces), ranks, timeout_seconds=180)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["told"] == expected["told"] and found["names"] == expected["names"]
