"""4-bit weights (bitsandbytes) under FSDP: packed bits, which must not be cast, and quantization statistics.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023. Each rank keeps all statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from ...checkpointing.packed_weights import packed_layers
from ...distributed.world import World
from ...errors import PreparationError


def check_packed(model: torch.nn.Module) -> None:
    """Raise unless every weight of ``model`` that should be in 4 bits is already quantized.

    Raises:
        PreparationError: a layer's weights aren't quantized yet.
    """
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if type(weight).__name__ == "Params4bit" and not getattr(weight, "bnb_quantized", True):
            raise PreparationError(
                f"The weight of {name} is to be in 4 bits, but has {weight.dtype} numbers on {weight.device} still: "
                "bitsandbytes quantizes when a model is moved. Call model.to(accelerator.device) before prepare, or "
                "load the model by load_and_quantize_model."
            )


def store_as(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """View packed weights as ``dtype``, so that casts to it keep their bits.

    Also stop bitsandbytes from repacking them for the CPU in evaluation, because the gathered weights belong to FSDP.
    """
    for _, layer in packed_layers(model):
        layer.support_avx512bf16_for_cpu = False
        layer.quant_state = layer.quant_state or layer.weight.quant_state
        data = layer.weight.data
        if dtype is None or not data.is_floating_point() or data.dtype == dtype:
            continue
        kind = dtype if data.nbytes % dtype.itemsize == 0 else torch.uint8
        layer.weight.data = data.reshape(-1).view(torch.uint8).view(kind).reshape(-1, 1)
        layer.weight.quant_storage = layer.quant_storage = kind


def refuse_cast(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Raise if mixed precision would cast packed weights of ``model`` to ``dtype``.

    Raises:
        PreparationError: FSDP 1 flattens a unit's parameters into one dtype and casts them all.
    """
    for name, layer in packed_layers(model):
        if dtype is not None and layer.weight.dtype != dtype:
            raise PreparationError(
                f"The 4-bit weight of {name} is stored as {layer.weight.dtype}, which FSDP version 1 casts to {dtype} "
                "in mixed precision: its bits would be lost. Use version 2 (--fsdp_version 2, or "
                "FullyShardedDataParallelPlugin(fsdp_version=2)), or mixed_precision='no'."
            )


def attach_statistics(model: torch.nn.Module) -> None:
    """Attach the quantization statistics to the sharded weights, so that layers write them into state dicts."""
    for _, layer in packed_layers(model):
        layer.weight.quant_state = layer.quant_state


def broadcast_statistics(model: torch.nn.Module, world: World) -> None:
    """Give the quantized layers of rank 0 the same form on the other ranks; a collective.

    Broadcast the statistics and allocate the packed weights; their values are broadcast later, like all weights.
    """
    own = dict(packed_layers(model)) if world.is_main else {}
    described = {
        name: (
            (tuple(layer.weight.shape), layer.weight.dtype),
            {key: (tuple(value.shape), value.dtype) for key, value in layer.quant_state.as_dict(packed=True).items()},
        )
        for name, layer in own.items()
    }
    messages: list[Any] = [described]
    dist.broadcast_object_list(messages, 0)
    for name, ((shape, dtype), entries) in messages[0].items():
        layer: Any = model.get_submodule(name)
        sent = layer.quant_state.as_dict(packed=True) if world.is_main else {}
        statistics: dict[str, torch.Tensor] = {}
        for key, (size, kind) in entries.items():
            value = sent[key].to(world.device).contiguous() if world.is_main else None
            statistics[key] = torch.empty(size, dtype=kind, device=world.device) if value is None else value
            dist.broadcast(statistics[key], 0)
        if not world.is_main:
            data = torch.empty(shape, dtype=dtype, device=world.device)
            layer.weight = type(layer.weight).from_prequantized(data, statistics, device=world.device, module=layer)
            layer.quant_storage = dtype
