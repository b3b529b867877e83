"""Preparation of a model for FSDP: upcast parameters, broadcast from rank 0, replicate tensors, keep 4-bit weights."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...checkpointing.quantized_state import packed_layers
from ...distributed.world import World
from ...errors import MissingDependency, PreparationError
from ...logging import MultiProcessAdapter, get_logger
from ...modules import move_tensor, parameter_places, put_parameter
from ...plugins.fsdp import FullyShardedDataParallelPlugin
from ...precision import Precision
from ...settings.labels import DistributedType
from ...torch_private.modules import takes_data_of
from ...versions import is_torch_version
from ..base import Strategy
from ..gradient_norm import local_tensor
from ..replicas import broadcast

logger: MultiProcessAdapter = get_logger(__name__)
#: The first torch whose fully_shard runs on CPU ranks; on accelerators 2.6 will do.
OLDEST_ON_CPU: Final = "2.9.0"


class FSDPStrategy(Strategy, ABC):
    """The type and the settings that both versions of FSDP have."""

    @property
    def label(self) -> DistributedType:
        """The distributed type: FSDP."""
        return DistributedType.FSDP

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """The current FullyShardedDataParallelPlugin."""
        plugin = self.options.plugins.fsdp
        assert plugin is not None  # this strategy is chosen for it
        return plugin


def refuse_old_torch(device: torch.device) -> None:
    """Raise if the installed torch can't train under ``fully_shard`` on ``device``.

    Raises:
        MissingDependency: names the version that can, and the alternative.
    """
    if device.type == "cpu" and not is_torch_version(">=", OLDEST_ON_CPU):
        raise MissingDependency(
            f"FSDP version 2 on CPU needs torch {OLDEST_ON_CPU} or newer, installed is {torch.__version__}, whose "
            "fully_shard fails there, or adds gradients up instead of averaging them. Install a newer torch, or "
            "use FSDP version 1 (fsdp_version=1)."
        )


def set_mixed_precision(plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module, precision: Precision) -> None:
    """Set mixed precision on ``plugin``, and cast trainable parameters of ``model`` from half precision to float32.

    Half precision loses small updates.
    """
    if precision.label == "no":
        return
    plugin.set_mixed_precision(precision.label)
    low = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16)
    ]
    if not low:
        return
    for name in low:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(torch.float32)
    logger.warning(
        "%d trainable parameters in half precision were made float32, among them %r: mixed precision computes in half "
        "precision all the same. Load the model in float32 to silence this warning.",
        len(low),
        low[0],
    )


def move_unit(unit: torch.nn.Module, device: torch.device) -> None:
    """Move ``unit`` to the device if FSDP can't: extension devices refuse new data on another device.

    Sharded parameters stay in place: offloaded shards belong in host memory.
    """
    for tensor in [*unit.parameters(), *unit.buffers()]:
        if isinstance(tensor, DTensor):
            continue
        if tensor.device.type not in ("meta", device.type) and not takes_data_of(tensor, device):
            move_tensor(tensor, device)


def broadcast_from_main(model: torch.nn.Module, unit: torch.nn.Module, world: World) -> None:
    """Broadcast the unsharded parameters of ``unit`` from rank 0 to the device of every rank; a collective.

    The parameters of other ranks, which are on the meta device or have no values, are replaced everywhere in ``model``,
    so that tied parameters stay tied.
    """
    places = parameter_places(model)
    seen: set[int] = set()
    for parameter in list(unit.parameters()):
        if id(parameter) in seen or isinstance(parameter, DTensor):
            continue
        seen.add(id(parameter))
        data = parameter.detach().to(world.device) if world.is_main else _empty_like(parameter, world.device)
        data = data.contiguous()
        dist.broadcast(data, 0)
        new = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
        for attribute, value in parameter.__dict__.items():
            setattr(new, attribute, value)
        put_parameter(places[id(parameter)], new)
    for module in unit.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != world.device:
                module._buffers[name] = buffer.to(world.device) if world.is_main else _empty_like(buffer, world.device)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def replicate_unsharded(model: torch.nn.Module, mesh: DeviceMesh, world: World) -> None:
    """Broadcast unsharded tensors from the first rank of ``world``, and shards to their replicas.

    A collective.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor):
            move_tensor(tensor, world.device)
            broadcast(tensor.detach(), world.group, world.device)
    if mesh.ndim == 1:
        return
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            broadcast(parameter.to_local().detach(), mesh.get_group(0), world.device)


def average_ignored(
    modules: Iterable[torch.nn.Module], group: dist.ProcessGroup | None, size: int, reduces: Callable[[], bool]
) -> None:
    """Average gradients of parameters that ``fully_shard`` ignores over the ``size`` ranks of ``group``.

    Torch doesn't reduce them, so they would differ between ranks.

    Args:
        group: None for all processes.
        reduces: returns whether the running backward pass completes the gradients.
    """

    def average(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and reduces():
            own = local_tensor(parameter.grad)
            dist.all_reduce(own, group=group)
            own.div_(size)

    for parameter in {id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values():
        parameter.register_post_accumulate_grad_hook(average)


# --------------------------------------------------------------------------------------------------
# 4-bit weights (bitsandbytes): packed bits, which must not be cast, and quantization statistics
#
# Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023. Each rank keeps all statistics.


def store_packed(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """View packed weights as ``dtype``, so that casts to it keep their bits.

    Also stop bitsandbytes from repacking them for the CPU in evaluation, because the gathered weights belong to FSDP.

    Raises:
        PreparationError: the weights of a layer that should be in 4 bits aren't quantized yet.
    """
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if type(weight).__name__ == "Params4bit" and not getattr(weight, "bnb_quantized", True):
            raise PreparationError(
                f"The weight of {name} is to be in 4 bits, but has {weight.dtype} numbers on {weight.device} still: "
                "bitsandbytes quantizes when a model is moved. Call model.to(accelerator.device) before prepare, or "
                "load the model by load_and_quantize_model."
            )
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
