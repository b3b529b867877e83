"""The bitsandbytes configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.errors import SettingError
from accelerate.plugins.quantization import BnbQuantizationConfig
from accelerate.settings.labels import CustomDtype


def test_8_bit_computes_in_half_precision_and_stores_int8() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert (config.torch_dtype, config.target_dtype) == (torch.float16, torch.int8)


@pytest.mark.parametrize("given", ["bf16", torch.bfloat16])
def test_4_bit_keeps_the_rest_in_the_compute_dtype(given: Any) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=given)
    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (torch.bfloat16, torch.bfloat16)
    assert config.target_dtype is CustomDtype.INT4


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"load_in_8bit": True, "load_in_4bit": True},
        {"load_in_4bit": 1},
        {"load_in_8bit": True, "llm_int8_threshold": "x"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "x"},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": "x"},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "x"},
        {"load_in_4bit": True, "torch_dtype": "int8"},
        {"load_in_4bit": True, "skip_modules": "head"},
        {"load_in_4bit": True, "keep_in_fp32_modules": "head"},
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=list(arguments)[-1] if arguments else "both False"):
        BnbQuantizationConfig(**arguments)
