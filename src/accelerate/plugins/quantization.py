"""The options of bitsandbytes and torchao for weights in 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SettingError
from ..settings.labels import CustomDtype
from ..settings.training import BnbOptions

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TYPES_OF_4_BIT = ("fp4", "nf4")


@dataclass
class TorchAoQuantizationConfig:
    """The torchao format of the linear layers, and the modules that stay in full precision.

    Args:
        config: a config of torchao, such as ``torchao.quantization.Int8WeightOnlyConfig()``.
        torch_dtype: the dtype of the other parameters; None keeps the model's.
        skip_modules: names of modules to keep unchanged; by default, the head and the modules tied to it.
        keep_in_fp32_modules: names of modules to keep in fp32.
    """

    config: Any
    torch_dtype: torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        module = type(self.config).__module__
        if not module.startswith("torchao"):
            raise SettingError(
                f"TorchAoQuantizationConfig(config={self.config!r}): one of torchao.quantization's is needed, such as "
                "Int8WeightOnlyConfig()."
            )
        #: The dtype of the weights for the sizes in a device map.
        self.target_dtype: torch.dtype | CustomDtype = torch.int8
        if "Int4" in type(self.config).__name__:
            self.target_dtype = CustomDtype.INT4


@dataclass(repr=False, eq=False)
class BnbQuantizationConfig(BnbOptions):
    """The bitsandbytes format of the linear layers, and the modules that stay in full precision.

    The constructor converts ``bnb_4bit_compute_dtype`` and ``torch_dtype`` to torch dtypes; ``target_dtype`` is the
    dtype of the stored weights.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both True" if self.load_in_8bit else "both False"
            raise SettingError(f"BnbQuantizationConfig: load_in_4bit and load_in_8bit can't be {both}: choose one.")
        threshold = self.llm_int8_threshold
        self._check("llm_int8_threshold", isinstance(threshold, (int, float)), "a float or an int")
        self._check("bnb_4bit_quant_type", self.bnb_4bit_quant_type in _TYPES_OF_4_BIT, "one of 'fp4', 'nf4'")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            self._check(
                name,
                getattr(self, name) is None or isinstance(getattr(self, name), list),
                "a list of strings",
            )
        self.bnb_4bit_compute_dtype: Any = self._dtype("bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype: torch.dtype = self._dtype("torch_dtype")
        self.target_dtype: torch.dtype | CustomDtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _dtype(self, name: str) -> torch.dtype:
        given = getattr(self, name)
        self._check(
            name,
            isinstance(given, torch.dtype) or given in _DTYPES,
            f"one of {', '.join(_DTYPES)} or a dtype",
        )
        return given if isinstance(given, torch.dtype) else _DTYPES[given]

    def _check(self, name: str, holds: bool, legal: str) -> None:
        if not holds:
            raise SettingError(f"BnbQuantizationConfig({name}={getattr(self, name)!r}): `{name}` must be {legal}.")
