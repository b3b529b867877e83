"""The weights of a model to stream: under the names of its state dict, or with PEFT's adapters merged into them.

A merged weight is ``W + scaling * B @ A``, as in PEFT's ``merge_and_unload``, computed by the receiver from whole
matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, final, get_args

import torch

from ...checkpointing.weights import adapter_names
from ...errors import NotBuilt, SettingError
from ..held_tensors import HeldTensor
from ..rebind import canonical_name

#: How to stream the adapters of a PEFT model: beside the base weights, merged into them, or alone.
Adapters: TypeAlias = Literal["kept", "merged", "only"]
_PREFIX: Final = "base_model.model."


@final
@dataclass(frozen=True)
class StreamedWeight:
    """One weight of the stream.

    Attributes:
        names: its names in the stream; several if it is tied.
        numbers: the numbers of the tensors it is computed from; the first has its shape.
        merge: computes it from them in place of the first; None if there is only one.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None


def streamed_weights(
    model: torch.nn.Module, held: Sequence[HeldTensor], adapters: Adapters = "kept"
) -> list[StreamedWeight]:
    """Return the weights to stream from ``model``, the user's own, whose tensors are ``held``.

    Raises:
        SettingError: ``adapters`` is invalid, or the model has no adapters.
        NotBuilt: these adapters can't be merged.
    """
    if adapters not in get_args(Adapters):
        raise SettingError(f"adapters={adapters!r}: choose one of {', '.join(map(repr, get_args(Adapters)))}.")
    if adapters == "kept":
        return [StreamedWeight(tensor.names, (number,)) for number, tensor in enumerate(held)]
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise SettingError(
            f"adapters={adapters!r}: {type(model).__name__} is no model with adapters of PEFT's. Leave it out."
        )
    if adapters == "merged":
        return list(_merged(model, held, peft))
    short = adapter_names(model, [name for tensor in held for name in tensor.names])
    found = (
        (tuple(short[name] for name in tensor.names if name in short), number) for number, tensor in enumerate(held)
    )
    return [StreamedWeight(names, (number,)) for names, number in found if names]


def _merged(model: Any, held: Sequence[HeldTensor], peft: Any) -> Iterator[StreamedWeight]:
    numbers = {name: number for number, tensor in enumerate(held) for name in tensor.names}
    merges: dict[int, tuple[tuple[int, ...], Callable[[Sequence[torch.Tensor]], torch.Tensor]]] = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            factors = _factors(canonical_name(prefix), layer, peft)
            if factors:
                base = numbers[f"{canonical_name(prefix)}.base_layer.weight"]
                parts = (base, *(numbers[name] for name in factors))
                is_embedding = isinstance(layer, peft.tuners.lora.Embedding)
                swapped = is_embedding or bool(getattr(layer, "fan_in_fan_out", False))
                merges[base] = parts, partial(_merge, tuple(factors.values())[::2], swapped)
    active = model.active_adapter
    saved = {active} if isinstance(active, str) else set(active)
    for number, tensor in enumerate(held):
        names = tuple(found for name in tensor.names if (found := _without_adapters(name, saved)))
        if names:
            parts, merge = merges.get(number, ((number,), None))
            yield StreamedWeight(names, parts, merge)


def _factors(prefix: str, layer: Any, peft: Any) -> Mapping[str, float]:
    """Return the names of A and B of each active adapter of ``layer``, with the adapter's scaling.

    Raises:
        NotBuilt: the adapters aren't LoRA, or are a variant of it.
    """
    lora = peft.tuners.lora
    active = (
        [] if layer.disable_adapters else [one for one in layer.active_adapters if one not in layer.merged_adapters]
    )
    if not isinstance(layer, (lora.Linear, lora.Embedding)) or any(
        one in layer.lora_variant or layer.lora_bias.get(one, False) for one in active
    ):
        raise NotBuilt(
            f'adapters="merged" merges LoRA of linear layers and embeddings, without variants such as DoRA; {prefix!r} '
            f'is {type(layer).__module__}.{type(layer).__name__}. Stream adapters="only", or save the model, and let '
            "PEFT merge them (merge_and_unload)."
        )
    is_embedding = isinstance(layer, lora.Embedding)
    kind, end = ("lora_embedding_", "") if is_embedding else ("lora_", ".weight")
    return {
        f"{prefix}.{kind}{factor}.{one}{end}": float(layer.scaling[one])
        for one in active
        if one in layer.scaling
        for factor in "AB"
    }


def _merge(scalings: Sequence[float], swapped: bool, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    base, *factors = tensors
    for first, second, scaling in zip(factors[::2], factors[1::2], scalings, strict=True):
        product = second.float() @ first.float() if second.dtype.itemsize < 4 else second @ first
        change = (product.T if swapped else product) * scaling
        base += change.to(second.dtype)
    return base


def _without_adapters(name: str, active: set[str]) -> str:
    """Return ``name`` as in the model without adapters; empty if it isn't there.

    Raises:
        NotBuilt: it belongs to individually trained tokens.
    """
    parts = name.removeprefix(_PREFIX).split(".")
    if any(part.startswith("trainable_tokens_") for part in parts):
        raise NotBuilt(f'adapters="merged" doesn\'t merge single trained tokens ({name!r}). Stream adapters="only".')
    if any(part.startswith("lora_") for part in parts) or "original_module" in parts:
        return ""
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        if parts[place + 1] not in active:
            return ""
        del parts[place : place + 2]
    return ".".join(part for part in parts if part != "base_layer")
