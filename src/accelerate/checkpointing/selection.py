"""A part of a run: some of the weights, in another precision, without the rest of the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, final

import torch

from ..errors import CheckpointError, SettingError
from .weights import shared_names

#: How the parts of a weight's name begin that adapter libraries add to a model.
ADAPTER_PREFIXES: Final = (
    *("lora_", "adapter_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_lambda_", "randlora_", "fourierft_"),
    *("hra_", "bone_", "prompt_encoder", "prompt_embeddings", "prefix_", "modules_to_save", "trainable_tokens_"),
)


@dataclass(frozen=True)
@final
class Selection:
    """What ``save_state`` and ``save_model`` leave out, and what they convert.

    Attributes:
        exclude: weights whose names match one of these patterns (``"*.bias"``, ``"teacher.*"``) are left out.
        dtype: floating-point weights are saved in this precision (``"bfloat16"``).
        adapters_only: of the weights, only those that adapter libraries add.
        model_only: no optimizers, schedulers, loaders, random streams and registered objects.
    """

    exclude: tuple[str, ...] = ()
    dtype: torch.dtype | str | None = None
    adapters_only: bool = False
    model_only: bool = False

    def __post_init__(self) -> None:
        patterns = (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)
        object.__setattr__(self, "exclude", patterns)
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _dtype_of(self.dtype))

    def holds(self, name: str) -> bool:
        """Whether a weight of that name is saved."""
        if self.adapters_only and not is_adapter(name):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def leaves_out(self, name: str) -> bool:
        """Whether a weight of that name is not saved."""
        return not self.holds(name)

    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The selected weights of a state dict; the argument is unchanged.

        Raises:
            CheckpointError: nothing is left.
        """
        chosen = {name: value for name, value in state.items() if self.holds(name)}
        if state and not chosen:
            raise CheckpointError(
                f"{self} leaves none of the {len(state)} weights of the model (the first is {next(iter(state))!r})"
            )
        first = shared_names(chosen)  # tied weights stay tied
        converted = {name: self._converted(value) for name, value in chosen.items() if name not in first}
        return {name: converted[first.get(name, name)] for name in chosen}

    def _converted(self, value: Any) -> Any:
        if isinstance(self.dtype, torch.dtype) and isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().to(self.dtype)
        return value

    def to_details(self) -> dict[str, Any]:
        """What a manifest records: the fields that differ from "everything as it is"."""
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        fields = {
            "exclude": list(self.exclude),
            "dtype": dtype,
            "adapters_only": self.adapters_only,
            "model_only": self.model_only,
        }
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Selection:
        """The selection that a manifest records; everything where it records none."""
        return cls(**details.get("selection", {}))


EVERYTHING: Final = Selection()


def is_adapter(name: str) -> bool:
    """Whether a weight of that name belongs to an adapter."""
    return any(part.startswith(ADAPTER_PREFIXES) for part in name.split("."))


def _dtype_of(name: str) -> torch.dtype:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    dtype = vars(torch).get(short.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"Selection(dtype={name!r}): no such dtype; expected one such as 'bfloat16' or 'float16'.")
    return dtype
