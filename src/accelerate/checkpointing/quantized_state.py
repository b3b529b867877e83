"""Quantized weights (bitsandbytes) and low-bit optimizer state (torchao) as plain tensors in checkpoints.

A state dict has the packed 4-bit values of a layer as ``weight``, and the data to dequantize them (scales, a table, a
description) as ``weight.absmax``, ``weight.quant_map``, ``weight.quant_state.bitsandbytes__nf4``, .... The layers of
bitsandbytes write these statistics to state dicts, but don't read them.

A low-bit tensor of an optimizer (4-bit, 8-bit and fp8) has codes and one scale per block of codes; the first block
begins at the start of each rank's shard. In a checkpoint ``exp_avg`` becomes ``exp_avg.codes``, of the parameter's
shape, and ``exp_avg.scale``, with one scale per segment of a row (a block's scale is repeated for each of its
segments). So both can be sharded along the rows. If the blocks are the same on the ranks that read as on those that
wrote, the state is bit-identical; elsewhere it is quantized again.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from ..errors import CheckpointError, PreparationError
from ..modules import is_sharded
from ..torch_private.distributed import shard_locally

_STATISTIC: Final = re.compile(
    r"(?P<layer>.*)\.weight\.(?P<key>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)

_CODES: Final = ".codes"
_SCALE: Final = ".scale"
#: The values of ranks whose shards aren't quantized while others' are; zeros elsewhere.
_VALUES: Final = ".values"
#: torchao doesn't quantize smaller shards.
_SMALLEST: Final = 4096
#: The scale of values that aren't quantized.
_WHOLE: Final = -1.0


# ----------------------------------------------------------------------------------- weights of bitsandbytes


def packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the names and layers of ``model`` with 4-bit weights."""
    for name, module in model.named_modules():
        state = module.__dict__.get("quant_state") or getattr(module._parameters.get("weight"), "quant_state", None)
        if state is not None and callable(getattr(state, "as_dict", None)):
            yield name, module


def is_statistic(name: str) -> bool:
    """Return whether ``name`` in a state dict names a statistic of packed weights."""
    return _STATISTIC.fullmatch(name) is not None


def load_statistics(model: object, state: Mapping[str, Any], canonical: Callable[[str], str] = str) -> dict[str, Any]:
    """Set the statistics in ``state`` on the layers of ``model``, and return the other entries.

    The result includes statistics of layers that aren't in 4 bits here.
    """
    if not isinstance(model, torch.nn.Module):
        return dict(state)
    layers = {canonical(name): layer for name, layer in packed_layers(model)}
    found: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in state.items():
        match = _STATISTIC.fullmatch(name) if layers else None
        if match is None or match["layer"] not in layers:
            owner, _, own = name.rpartition(".")
            rest[name] = _stored_as(layers[owner], value) if own == "weight" and owner in layers else value
        else:
            found.setdefault(match["layer"], {})[match["key"]] = value
    for name, statistics in found.items():
        layer = layers[name]
        if any(key.startswith("quant_state.") for key in statistics):  # complete, not those of another version
            known = layer.quant_state or layer.weight.quant_state
            copies = {key: value.clone() for key, value in statistics.items()}
            layer.quant_state = layer.weight.quant_state = type(known).from_dict(copies, device=known.absmax.device)
    return rest


def _stored_as(layer: Any, value: Any) -> Any:
    """Return the packed values ``value`` in the dtype and shape of those of ``layer``."""
    kind: torch.dtype = layer.weight.dtype
    if type(value) is not torch.Tensor or value.dtype == kind or value.nbytes % kind.itemsize:
        return value
    return value.reshape(-1).view(torch.uint8).view(kind).reshape(-1, 1)


# ------------------------------------------------------------------------------- optimizer state of torchao


def split_state(entries: Mapping[str, object], optimizer: object) -> dict[str, object]:
    """Return the state of one parameter with plain tensors in place of low-bit ones.

    Raises:
        CheckpointError: one isn't sharded along its rows.
    """
    found: dict[str, object] = {}
    for name, value in entries.items():
        if _is_packed(value) or _is_packed_elsewhere(value, optimizer):
            found |= {f"{name}{part}": tensor for part, tensor in _split(name, value, optimizer).items()}
        else:
            found[name] = value
    return found


def split_optimizer(state: Mapping[str, object], optimizer: object) -> dict[str, Any]:
    """Return an optimizer's state dict with plain tensors in place of low-bit ones."""
    states = state.get("state")
    if not isinstance(states, Mapping) or not all(isinstance(entries, Mapping) for entries in states.values()):
        return dict(state)
    return {**state, "state": {key: split_state(entries, optimizer) for key, entries in states.items()}}


def is_split(state: Mapping[str, object]) -> bool:
    """Return whether :func:`split_optimizer` replaced low-bit tensors in the optimizer's state dict ``state``."""
    states = state.get("state")
    entries = states.values() if isinstance(states, Mapping) else ()
    return any(str(name).endswith(_CODES) for one in entries if isinstance(one, Mapping) for name in one)


def join_state(entries: Mapping[str, object], parameter: torch.Tensor, optimizer: Any) -> dict[str, object]:
    """Reverse :func:`split_state` for this rank's shard of ``parameter``.

    Raises:
        CheckpointError: ``optimizer`` has no low-bit state.
    """
    packed = [name.removesuffix(_CODES) for name in entries if isinstance(name, str) and name.endswith(_CODES)]
    parts = {f"{name}{part}" for name in packed for part in (_CODES, _SCALE, _VALUES)}
    found = {name: value for name, value in entries.items() if name not in parts}
    for name in packed:
        if not _keeps_few_bits(optimizer):
            raise CheckpointError(
                f"{name!r} was saved in few bits, but {type(optimizer).__name__} keeps full precision. "
                "Make the optimizer that saved it (torchao.optim.AdamW8bit, ...), or leave the optimizer out."
            )
        fresh = optimizer._new_buffer(parameter, name == "exp_avg")
        _fill(_local(fresh), parameter, entries, name, optimizer)
        found[name] = fresh
    return found


def refuse_half_weights(optimizer: Any) -> None:
    """Raise if ``optimizer`` would keep low-bit state for a bf16 or fp16 shard, because torchao's step fails then.

    Raises:
        PreparationError: the text has the shape and dtype of the first such parameter.
    """
    if not _keeps_few_bits(optimizer):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not is_sharded(parameter) or parameter.dtype == torch.float32 or parameter.ndim == 0:
            continue
        cuts = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        rows = -(-parameter.shape[0] // math.prod(size for placement, size in cuts if placement.is_shard()))
        num_held = rows * math.prod(parameter.shape[1:])  # of the first rank, so that all ranks raise
        if num_held >= _SMALLEST and num_held % _block(optimizer) == 0:
            raise PreparationError(
                f"{type(optimizer).__name__} got a sharded weight of shape {tuple(parameter.shape)} in "
                f"{parameter.dtype}, whose state it would keep in few bits: torchao's step fails there. Leave the "
                'weights in float32, with mixed_precision="bf16", or use an optimizer with full state.'
            )


def _keeps_few_bits(optimizer: object) -> bool:
    has_them = all(callable(getattr(optimizer, name, None)) for name in ("_subclass_zeros", "_new_buffer"))
    return has_them and getattr(optimizer, "block_size", math.inf) < math.inf  # torchao's _AdamW: full state


def _local(value: Any) -> Any:
    """Return this rank's shard of ``value``, or ``value`` itself if it isn't sharded."""
    return value.to_local() if is_sharded(value) else value


def _is_packed(value: object) -> bool:
    local = _local(value)
    codes = getattr(local, "codes", None) if isinstance(local, torch.Tensor) else None
    return codes is not None and (codes.shape == local.shape or _has_pairs(local))


def _has_pairs(local: Any) -> bool:
    """Return whether each code of ``local`` holds two 4-bit values."""
    return local.codes.ndim == 1 and 2 * local.codes.numel() == local.numel()


def _codes(local: Any) -> torch.Tensor:
    """Return one code per element, in the shape of ``local``."""
    if not _has_pairs(local):
        return local.codes
    return torch.stack([local.codes >> 4, local.codes & 0b1111], dim=-1).view(local.shape)


def _set_codes(local: Any, codes: torch.Tensor) -> None:
    """Set the codes of ``local`` to those that :func:`_codes` returned."""
    if _has_pairs(local):
        high, low = codes.reshape(-1, 2).unbind(-1)
        codes = high << 4 | low
    local.codes.copy_(codes)


def _is_packed_elsewhere(value: Any, optimizer: object) -> bool:
    """Return whether the shards of ``value`` differ in size, so that only those of some ranks may be quantized."""
    if not is_sharded(value) or not _keeps_few_bits(optimizer) or value.ndim == 0:
        return False
    return _is_uneven(value) and value.numel() >= _block(optimizer)


def _is_uneven(value: Any) -> bool:
    cuts = zip(value.placements, value.device_mesh.shape, strict=True)
    return value.shape[0] % math.prod(size for placement, size in cuts if placement.is_shard()) != 0


def _block(optimizer: object) -> int:
    return int(getattr(optimizer, "block_size", 0))


def _segment(shape: torch.Size, block: int) -> int:
    """Return the longest part of a row that is always within one block, wherever the rows are sharded."""
    return math.gcd(math.prod(shape[1:]), block)


def _split(name: str, value: Any, optimizer: object) -> dict[str, torch.Tensor]:
    if is_sharded(value) and any(not (one.is_replicate() or one.is_shard(0)) for one in value.placements):
        raise CheckpointError(
            f"{name!r} of {type(optimizer).__name__} is in few bits and sharded as {value.placements}: only shards "
            "along the first dimension, as FSDP2 makes them, can be saved. Use an optimizer with full state there."
        )
    local = _local(value)
    packed = _is_packed(local)
    block = local.block_size if packed else _block(optimizer)
    segment = _segment(value.shape, block)
    rows = (local.shape[0], math.prod(value.shape[1:]) // segment)
    if packed:
        scale = local.scale.repeat_interleave(block // segment).reshape(rows)
    else:
        scale = torch.full(rows, _WHOLE, device=local.device)
    codes = _codes(local) if packed else torch.zeros(local.shape, dtype=_code_dtype(optimizer), device=local.device)
    found = {_CODES: codes, _SCALE: scale}
    if is_sharded(value) and _is_uneven(value):
        found[_VALUES] = torch.zeros(local.shape, device=local.device) if packed else local
    return {part: _sharded_as(value, tensor) for part, tensor in found.items()}


def _code_dtype(optimizer: Any) -> torch.dtype:
    block = _block(optimizer)
    return optimizer._subclass_zeros(torch.empty(block), True, block).codes.dtype


def _sharded_as(value: Any, local: torch.Tensor) -> torch.Tensor:
    if not is_sharded(value):
        return local
    from torch.distributed.tensor import DTensor

    shape = torch.Size((value.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)


def _fill(fresh: Any, parameter: Any, entries: Mapping[str, object], name: str, optimizer: Any) -> None:
    """Set the shard ``fresh``, low-bit or not, to the saved values of ``name`` in ``entries``."""
    block = _block(optimizer)
    segment = _segment(parameter.shape, block)
    codes, scale = (_own(entries[f"{name}{part}"], parameter) for part in (_CODES, _SCALE))
    values = _own(entries[f"{name}{_VALUES}"], parameter) if f"{name}{_VALUES}" in entries else None
    if _is_packed(fresh):
        blocks = scale.reshape(-1, block // segment)
        if bool((blocks == blocks[:, :1]).all()) and bool((blocks[:, 0] != _WHOLE).all()):
            _set_codes(fresh, codes)
            fresh.scale.copy_(blocks[:, 0])
            return
    table = getattr(optimizer._subclass_zeros(torch.empty(block), name == "exp_avg", block), "qmap", None)
    numbers = codes.float() if table is None else table.to(codes.device)[codes.int()]
    scales = scale.repeat_interleave(segment, dim=1).reshape(codes.shape)
    numbers = numbers * scales
    fresh.copy_(numbers if values is None else torch.where(scales == _WHOLE, values.float(), numbers))


def _own(value: Any, parameter: Any) -> torch.Tensor:
    """Return the part of ``value``, sharded or not, for this rank's shard of ``parameter``."""
    if is_sharded(value) or not is_sharded(parameter):
        return _local(value)
    return _local(
        shard_locally(value.to(parameter.device_mesh.device_type), parameter.device_mesh, parameter.placements)
    )
