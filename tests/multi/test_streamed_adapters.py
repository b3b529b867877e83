"""``stream_weights`` of models with adapters (PEFT): beside the base, merged into it, or alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.errors import NotBuilt
from tests.mesh_runs import accelerator
from tests.ranks import run_on_ranks

peft: Any = pytest.importorskip("peft", reason="make clients installs it")

STRATEGIES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True},
    "fsdp2": {"fsdp_version": 2},
}


class Network(nn.Module):
    """An embedding, two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.head(self.second(torch.relu(self.first(self.words(words)))))


def adapted(**options: Any) -> Any:
    """The network with adapters of its embedding and of one layer, whose head is trained whole."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["words", "first"], modules_to_save=["head"], **options)
    model = peft.get_peft_model(Network(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    return model


def stream(adapters: str, fsdp: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """What the second rank gets."""
    run = accelerator(fsdp=fsdp)
    model = adapted()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    options: dict[str, Any] = {"adapters": adapters, "bucket_bytes": 300}
    return dict(run.stream_weights(model, ranks=[1], **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapters", ["merged", "only"])
def test_adapters_leave_as_peft_saves_or_merges_them(adapters: str, strategy: str) -> None:
    """Under the names that a server loads."""
    found = run_on_ranks(lambda: stream(adapters, STRATEGIES[strategy]), 2)[1]
    model = adapted()
    if adapters == "merged":
        expected = model.merge_and_unload().state_dict()
    else:
        expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_variants_that_are_not_merged_here_are_refused() -> None:
    """By name, with the way out."""
    run = accelerator()
    model = adapted(use_dora=True)
    with pytest.raises(NotBuilt, match=r"without variants such as DoRA; 'base_model\.model\.words'"):
        run.stream_weights(model, adapters="merged")
    with model.disable_adapter():
        names = [name for name, _ in run.stream_weights(model, adapters="merged")]
    assert "words.weight" in names and not any("lora" in name for name in names)
