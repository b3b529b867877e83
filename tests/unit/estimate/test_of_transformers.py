"""Real architectures: what is estimated is what a step takes. Skipped where transformers isn't installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.guests.estimate.subject import find_subject
from accelerate.guests.estimate.trace import trace_training
from benchmarks.estimates import compare, of_transformers

pytest.importorskip("transformers")
# transformers and what it imports warn of each other's changes.
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "MixtralForCausalLM",
    "BertForMaskedLM",
    "DistilBertForSequenceClassification",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "ResNetForImageClassification",
    "WhisperForConditionalGeneration",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"autocast": torch.bfloat16}, {"recompute": True}], ids=["plain", "autocast", "recompute"]
)
def test_the_estimate_is_the_measured_peak(name: str, options: dict[str, Any]) -> None:
    if name.startswith("ResNet") and "autocast" in options and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("without bf16 instructions, torch unfolds the inputs of each convolution into memory of its own")
    (row,) = compare([subject for subject in of_transformers() if subject.name == name], **options)
    assert abs(row.error) < 0.05, row


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_with_a_configuration_is_enough(name: str, tmp_path: Path) -> None:
    (subject,) = [each for each in of_transformers() if each.name == name]
    model = subject.build()
    model.config.architectures = [name]  # pyright: ignore[reportAttributeAccessIssue]
    model.config.save_pretrained(tmp_path)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    options: dict[str, Any] = {"batch": 2, "sequence": 32, "device": "cpu"}
    found, expected = trace_training(find_subject(str(tmp_path)), **options), trace_training(subject, **options)
    assert (found.weights, found.peak) == (expected.weights, expected.peak)
