"""Real architectures, built from their configurations with random weights, split in every way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.big_models.sizes import compute_module_sizes
from accelerate.checkpointing import save_model
from accelerate.hooks.align import get_state_dict_offloaded_model

transformers = pytest.importorskip("transformers")

SMALL: Any = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED: Any = SMALL | {"num_key_value_heads": 2}
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 64},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        | {"image_size": 16, "patch_size": 4},
    ),
}

pytestmark = [
    pytest.mark.parametrize("name", list(CONFIGURATIONS)),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def build(name: str) -> nn.Module:
    model_class, config_class, options = CONFIGURATIONS[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**options)).eval()


def output(model: Any, name: str) -> torch.Tensor:
    ids = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, torch.Tensor] = {"input_ids": ids}
    if name == "t5":
        inputs["decoder_input_ids"] = ids[:, :5]
    elif name == "vit":
        inputs = {"pixel_values": torch.ones(2, 3, 16, 16)}
    with torch.no_grad():
        return model(**inputs).logits


def some_map(model: Any, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    total = compute_module_sizes(model)[""]
    no_split = rng.choice([None, list(model._no_split_modules or [])])
    return infer_auto_device_map(
        model, {"cpu": int(total * rng.uniform(0.35, 0.9))}, no_split, method=rng.choice(["greedy", "exact"])
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_split_gives_the_same_outputs(tmp_path: Path, name: str, seed: int) -> None:
    model, expected = build(name), output(build(name), name)
    device_map = some_map(model, seed)
    assert len(set(device_map.values())) == 2
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model = dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(output(model, name), expected)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("seed", range(3))
def test_a_checkpoint_on_disk_gives_the_same_outputs(tmp_path: Path, name: str, seed: int) -> None:
    model, expected = build(name), output(build(name), name)
    save_model(model.state_dict(), tmp_path, max_shard_size="60KB")
    with init_empty_weights():
        empty: Any = build(name)
    empty.tie_weights()
    empty = load_checkpoint_and_dispatch(empty, tmp_path, some_map(model, seed))
    assert torch.equal(output(empty, name), expected)


def test_whole_models_can_be_offloaded(tmp_path: Path, name: str) -> None:
    expected = output(build(name), name)
    assert torch.equal(output(cpu_offload(build(name)), name), expected)
    assert torch.equal(output(disk_offload(build(name), tmp_path), name), expected)


def test_from_pretrained_spreads_and_saves_again(tmp_path: Path, name: str) -> None:
    model: Any = build(name)
    expected, device_map = output(model, name), some_map(model, 5)
    model.save_pretrained(tmp_path / "first", max_shard_size="60KB")
    spread = type(model).from_pretrained(tmp_path / "first", device_map=device_map, offload_folder=tmp_path / "disk")
    assert torch.equal(output(spread.eval(), name), expected)
    assert set(spread.hf_device_map.values()) == {"cpu", "disk"}
    spread.save_pretrained(tmp_path / "second")
    assert torch.equal(output(type(model).from_pretrained(tmp_path / "second").eval(), name), expected)
    auto = type(model).from_pretrained(tmp_path / "first", device_map="auto").eval()
    assert torch.equal(output(auto, name), expected)
