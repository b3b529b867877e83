"""The FSDP functions with which libraries save, load and shard models step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch

from ...checkpointing.codec import read_pickle, write_pickle
from ...checkpointing.dcp import is_distributed_checkpoint
from ...checkpointing.fit import by_name
from ...checkpointing.layout import OPTIMIZER
from ...checkpointing.sharded import (
    StateAccess,
    classic_weights,
    optimizer_folder,
    own_shards,
    read_model_shards,
    read_optimizer_shards,
    shard_like,
    weights_folder,
    write_shards,
)
from ...distributed.world import join_world
from ...errors import CheckpointNotFound, PreparationError
from ...precision.choose import ShardedScaler
from ...settings import env
from ...training.recompute import recompute_activations
from ..compile import uncompiled
from ..rebind import canonical_name, inner_optimizer
from .wrapping import find_ignored, find_wrap_units

if TYPE_CHECKING:
    from ...distributed.world import World
    from ...plugins.fsdp import FullyShardedDataParallelPlugin
    from ...precision import Precision
    from ..base import Strategy
    from .fsdp2 import FullyShard

Value = TypeVar("Value")

_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


class ShardingAccelerator(Protocol):
    """The attributes of an Accelerator that these functions use."""

    world: World
    strategy: Strategy
    precision: Precision

    def wait_for_everyone(self) -> None:
        """Wait until all ranks reach this call."""
        ...


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell libraries to load weights on rank 0 only."""
    env.set_variables({"ACCELERATE_USE_FSDP": True, _RAM_EFFICIENT: True})


def disable_fsdp_ram_efficient_loading() -> None:
    """Tell libraries to load weights on every rank."""
    env.set_variables({_RAM_EFFICIENT: False})


# -- files -------------------------------------------------------------------------------------------------


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: ShardingAccelerator,
    model: torch.nn.Module,
    output_dir: str | PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of ``model`` to ``output_dir``: `pytorch_model_fsdp.bin`, or in shards `pytorch_model_fsdp_0/`.

    A collective. ``adapter_only`` writes only the adapter's weights (PEFT).
    """
    from torch.distributed.fsdp import StateDictType

    access = accelerator.strategy.state.access
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if fsdp_plugin.state_dict_type is StateDictType.FULL_STATE_DICT:
        state = _of_adapter(access.full_model_state(model, accelerator.world.is_main), model, adapter_only)
        if accelerator.world.is_main:
            with open(classic_weights(output_dir, model_index), "wb") as file:
                write_pickle(state, file)
    else:
        shards = _of_adapter(access.model_shards(model), model, adapter_only)
        write_shards(weights_folder(output_dir, model_index), model=own_shards(shards))
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: ShardingAccelerator,
    model: torch.nn.Module,
    input_dir: str | PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load weights that :func:`save_fsdp_model` wrote, in either form, into ``model``; a collective.

    Raises:
        CheckpointNotFound: ``input_dir`` has neither form.
    """
    accelerator.wait_for_everyone()
    access = accelerator.strategy.state.access
    folder, file = weights_folder(input_dir, model_index), classic_weights(input_dir, model_index)
    adapter = _Adapter(access, model) if adapter_only and _is_adapted(model) else None
    if is_distributed_checkpoint(folder):
        taking: Any = access if adapter is None else adapter
        read_model_shards(taking, model, folder, strict=adapter is not None or not adapter_only)()
    elif file.is_file():
        state = read_pickle(file)
        state = state if adapter is None else {adapter.names.get(name, name): value for name, value in state.items()}
        access.load_target(model).load_state_dict(state, strict=not adapter_only)
    else:
        raise CheckpointNotFound(f"{input_dir} holds neither {folder.name}/ nor {file.name}")


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: ShardingAccelerator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    output_dir: str | PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write ``optimizer``'s state to ``output_dir``: `optimizer.bin`, or in shards `optimizer_0/`; a collective."""
    from torch.distributed.fsdp import StateDictType

    access, inner = accelerator.strategy.state.access, inner_optimizer(optimizer)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if fsdp_plugin.state_dict_type is StateDictType.FULL_STATE_DICT:
        state = access.full_optimizer_state(inner, [model], accelerator.world.is_main)
        if accelerator.world.is_main:
            with open(Path(output_dir) / OPTIMIZER.classic_name(optimizer_index), "wb") as file:
                write_pickle(state, file)
    else:
        write_shards(optimizer_folder(output_dir, optimizer_index), optimizer=access.optimizer_shards(inner, [model]))
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: ShardingAccelerator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    input_dir: str | PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load state that :func:`save_fsdp_optimizer` wrote, in either form, into ``optimizer``; a collective.

    Raises:
        CheckpointNotFound: ``input_dir`` has neither form.
    """
    accelerator.wait_for_everyone()
    access, inner = accelerator.strategy.state.access, inner_optimizer(optimizer)
    folder = optimizer_folder(input_dir, optimizer_index)
    if is_distributed_checkpoint(folder):
        read_optimizer_shards(access, inner, [model], folder)()
    else:
        state, layout = OPTIMIZER.read(Path(input_dir), optimizer_index), access.optimizer_layout(inner, [model])
        state, _ = by_name(state, layout, inner, access.parameter_names([model]), f"optimizer {optimizer_index}")
        access.load_full_optimizer_state(inner, [model], state)


def _is_adapted(model: torch.nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(getattr(model, "module", model), peft.PeftModel)


def _of_adapter(state: dict[str, object], model: torch.nn.Module, adapter_only: bool) -> dict[str, object]:
    if not adapter_only or not _is_adapted(model):
        return state
    inner = getattr(model, "module", model)
    return sys.modules["peft"].get_peft_model_state_dict(inner, state_dict=state, adapter_name=inner.active_adapter)


@final
class _Adapter:
    """The adapter in a model, as a load target for sharded weights.

    PEFT saves weights without the adapter's own name; ``names`` maps the saved names to the model's.
    """

    def __init__(self, access: StateAccess, model: torch.nn.Module) -> None:
        self._access = access
        shards = access.model_shards(model)
        full = {id(value): name for name, value in shards.items()}
        self.names = {name: full[id(value)] for name, value in _of_adapter(shards, model, True).items()}

    def model_shards(self, model: torch.nn.Module) -> dict[str, object]:
        """Return the adapter's weights by their names in files."""
        shards = self._access.model_shards(model)
        return {name: shards[full] for name, full in self.names.items()}

    def load_model_shards(self, model: torch.nn.Module, shards: dict[str, Any]) -> None:
        """Load ``shards`` into the adapter."""
        own = {self.names[name]: value for name, value in shards.items()}
        self._access.load_model_shards(model, {**self._access.model_shards(model), **own})


# -- version 2, step by step ---------------------------------------------------------------------------------


def fsdp2_prepare_model(accelerator: ShardingAccelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Shard ``model`` as the Accelerator's plugin says; return an already sharded one unchanged.

    With ``cpu_ram_efficient_loading``, a library's replacement of ``fsdp2_load_full_state_dict`` loads the weights.

    Raises:
        PreparationError: the Accelerator was not made for FSDP2.
    """
    strategy = _strategy_of(accelerator)
    public = sys.modules.get(f"{__name__.partition('.')[0]}.utils.fsdp_utils")
    load = getattr(public, "fsdp2_load_full_state_dict", fsdp2_load_full_state_dict)
    is_replaced = load is not fsdp2_load_full_state_dict and strategy.plugin.cpu_ram_efficient_loading
    full = dict(model.state_dict()) if is_replaced and not strategy.adopts(model) else None
    placed = strategy.place_model(model, accelerator.precision, True)
    if full is not None:
        from torch.distributed.fsdp import CPUOffloadPolicy

        load(
            accelerator, uncompiled(placed), full, cpu_offload=isinstance(strategy.plugin.cpu_offload, CPUOffloadPolicy)
        )
    return placed


def fsdp2_apply_ac(accelerator: ShardingAccelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Make the wrap units of ``model`` recompute their activations in backward, and return it."""
    plugin = _strategy_of(accelerator).plugin
    plugin.set_auto_wrap_policy(model)
    units = find_wrap_units(model, plugin.auto_wrap_policy, find_ignored(plugin.ignored_modules, model))
    recompute_activations(units, offload=plugin.activation_checkpointing_offload)
    return model


def _strategy_of(accelerator: ShardingAccelerator) -> FullyShard:
    if not accelerator.strategy.sharding_function:
        raise PreparationError(
            "This needs an Accelerator for FSDP2 in a world of processes: launch with `accelerate launch` and give "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    strategy: Any = accelerator.strategy  # that of FSDP2, as checked above
    return strategy


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool] | None:
    """Return a function that is true for wrap units of ``model``; None if the plugin has no policy."""
    fsdp2_plugin.set_auto_wrap_policy(model)
    if fsdp2_plugin.auto_wrap_policy is None:
        return None
    units = set(
        find_wrap_units(model, fsdp2_plugin.auto_wrap_policy, find_ignored(fsdp2_plugin.ignored_modules, model))
    )
    return units.__contains__


def fsdp2_canonicalize_names(named_params: Mapping[str, Value]) -> dict[str, Value]:
    """Return ``named_params`` under the names of the user's own model."""
    return {canonical_name(name): value for name, value in named_params.items()}


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[object, torch.Tensor]) -> None:
    """Replace each parameter ``p`` of ``optimizer`` by ``mapping[p.data_ptr]`` (or ``mapping[p]``).

    Raises:
        KeyError: a parameter has no entry.
    """
    for group in optimizer.param_groups:
        switched = [_switched(parameter, mapping) for parameter in group["params"]]
        group["params"][:] = switched


def _switched(parameter: torch.Tensor, mapping: Mapping[object, torch.Tensor]) -> torch.Tensor:
    for key in (parameter, getattr(parameter, "data_ptr", None)):
        try:
            if key in mapping:
                return mapping[key]
        except TypeError:  # a key that has no hash
            continue
    raise KeyError(
        "A parameter of the optimizer is not among those of the sharded model. Make the optimizer from the parameters "
        "of the model that is prepared with it; tied embeddings count once."
    )


def fsdp2_load_full_state_dict(
    accelerator: ShardingAccelerator,
    model: torch.nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    cpu_offload: bool = False,
) -> torch.nn.Module:
    """Load ``full_sd``, which only rank 0 needs to hold, into the sharded ``model``; a collective."""
    world = accelerator.world
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if world.is_main:
            value = full_sd[canonical_name(name)].detach().to(world.device, tensor.dtype).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        torch.distributed.broadcast(value, 0)
        tensor.copy_(shard_like(value, tensor))
    return model


def get_fsdp2_grad_scaler(**kwargs: Any) -> ShardedScaler:
    """Return a gradient scaler for sharded gradients."""
    return ShardedScaler(join_world(), **kwargs)
