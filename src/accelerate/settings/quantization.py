"""Options of models in 8 and 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.settings.option import OptionGroup, option


@dataclass
class BnbOptions(OptionGroup, title="Quantization"):
    """How bitsandbytes quantizes a model: exactly one of 8 and 4 bits."""

    load_in_8bit: bool = option(False, "Linear layers in 8 bits.")
    llm_int8_threshold: float = option(6.0, "The size from which activations are outliers and stay in 16 bits.")
    load_in_4bit: bool = option(False, "Linear layers in 4 bits.")
    bnb_4bit_quant_type: str = option("fp4", "The 4-bit type.", choices=("fp4", "nf4"))
    bnb_4bit_use_double_quant: bool = option(False, "Quantize the quantization constants too.")
    bnb_4bit_compute_dtype: Any = option("fp16", "The precision of computation: fp32, fp16, bf16.", kind="object")
    torch_dtype: Any = option(None, "The precision of the layers that are not quantized.", kind="object")
    skip_modules: list[str] | None = option(None, "Modules that are not quantized.")
    keep_in_fp32_modules: list[str] | None = option(None, "Modules that stay in fp32.")
