"""Access to the state of models under FSDP 1, whose parameters are views of flat ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from ...checkpointing.fit import OptimizerLayout
from ...checkpointing.run_state import StateDict
from ...checkpointing.sharded import StateAccess
from ...distributed.world import World
from ...errors import CheckpointError
from ...torch_private.fsdp import (
    all_flat_parameters,
    buffer_dtypes,
    flat_parameter_names,
    flat_shard,
    handle_of,
    parts_of_flat,
    places_in_flat,
)
from ...torch_private.modules import non_persistent_buffers, takes_data_of
from ..compile import uncompiled
from ..rebind import canonical_name, inner_optimizer, parameters_by_name
from ..state import HeldTensor, held_tensors

#: Where a wrapper keeps the names of the parameters in the order of the user's own model.
_ORDER = "_names_in_order"
#: Where it keeps the names of tied parameters, each mapped to the parameter's first name.
_TIES = "_tied_names"


def names_of(model: torch.nn.Module) -> dict[str, object]:
    """Return the order and the ties of the parameters in ``model``, as attributes for its wrapper.

    Parameters that are inside flat ones already count as the user's own.
    """
    places = places_in_flat(model)
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        held, inside = dict(module.named_parameters(recurse=False)), places.get(module, {})
        for own in dict.fromkeys((*held, *inside)):
            if own == "_flat_param":
                continue
            name = canonical_name(f"{prefix}.{own}".lstrip("."))
            known = first.setdefault(inside.get(own) or id(held[own]), name)
            if known != name:
                ties[name] = known
    return {_ORDER: list(first.values()), _TIES: ties}


def flat_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Iterate over an optimizer's parameters by the user's names; a flat parameter has several."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        handle = handle_of(module) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        for name in flat_parameter_names(handle):
            yield canonical_name(f"{prefix}.{name}".lstrip(".")), handle.flat_param
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith("_flat_param"):
            yield canonical_name(name), parameter


def flat_held_tensors(model: torch.nn.Module) -> list[HeldTensor]:
    """Return the tensors of the user's own model, each with the elements that this rank's shards hold."""
    ties: dict[str, list[str]] = {}
    for name, first in model.__dict__.get(_TIES, {}).items():
        ties.setdefault(first, []).append(name)
    found: list[HeldTensor] = []
    for prefix, module in model.named_modules():
        handle = handle_of(module) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        shard, offset = flat_shard(handle)
        for part in parts_of_flat(handle):
            name = canonical_name(f"{prefix}.{part.name}".lstrip("."))
            begin, end = max(part.begin, offset), min(part.end, offset + shard.numel())
            is_here = begin < end
            found.append(
                HeldTensor(
                    (name, *ties.get(name, ())),
                    part.shape,
                    shard.dtype,
                    shard[begin - offset : end - offset] if is_here else None,
                    ((begin - part.begin, end - part.begin),) if is_here else None,
                    part.strides,
                )
            )
    return found + held_tensors(_unsharded(model))


def _unsharded(model: torch.nn.Module) -> dict[str, object]:
    """Return the buffers in a state dict, and the parameters of ignored modules."""
    flat, dtypes = all_flat_parameters(model), buffer_dtypes(model)
    found: dict[str, object] = {name: one for name, one in parameters_by_name(model) if one not in flat}
    return found | {name: buffer.to(dtypes.get(name, buffer.dtype)) for name, buffer in _buffers(model)}


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the buffers in a state dict by the names of the user's own model."""
    for prefix, module in model.named_modules():
        left_out = non_persistent_buffers(module)
        for own, buffer in module.named_buffers(recurse=False):
            if own not in left_out:
                yield canonical_name(f"{prefix}.{own}".lstrip(".")), buffer


@contextmanager
def _state_dict_type(*arguments: Any) -> Iterator[None]:
    """Enter a context in which FSDP's state dicts have the given type, without torch's deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(*arguments):
            yield


@final
class FlatAccess(StateAccess):
    """Access to the state of models under FSDP 1, through FSDP's own functions."""

    def __init__(self, world: World) -> None:
        super().__init__()
        # Torch can't "offload" tensors that are in CPU memory already, nor those of extension devices.
        on_device = torch.empty(0, device=world.device)
        self._offloads = world.device.type != "cpu" and takes_data_of(on_device, torch.device("cpu"))

    def buffers(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the live buffers in a state dict by the user's names."""
        return dict(_buffers(uncompiled(model)))

    def _full(self, model: torch.nn.Module, *, rank0_only: bool = False) -> AbstractContextManager[object]:
        return _state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=self._offloads, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=self._offloads, rank0_only=rank0_only),
        )

    def _sharded(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        return _state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=self._offloads),
            ShardedOptimStateDictConfig(offload_to_cpu=self._offloads),
        )

    def load_target(self, model: torch.nn.Module) -> _FullStateReceiver:
        """Return a load target that takes full tensors and shards them."""
        return _FullStateReceiver(self._full, uncompiled(model))

    def full_model_state(self, model: torch.nn.Module, keeps: bool) -> dict[str, object]:
        """Return the gathered state dict on ranks where ``keeps`` is true; a collective."""
        with self._full(uncompiled(model), rank0_only=self._offloads):
            state = uncompiled(model).state_dict()
        return {canonical_name(name): _on_cpu(value) for name, value in state.items()} if keeps else {}

    def model_shards(self, model: torch.nn.Module) -> dict[str, object]:
        """Return shards of the user's own parameters."""
        with self._sharded(uncompiled(model)):
            return uncompiled(model).state_dict()

    def load_model_shards(self, model: torch.nn.Module, shards: dict[str, Any]) -> None:
        """Load ``shards`` into the flat parameters."""
        with self._sharded(uncompiled(model)):
            uncompiled(model).load_state_dict(shards)

    def layouts(self, models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
        """Return the parameters' shards by name."""
        return {
            name: value
            for model in models
            for name, value in self.model_shards(model).items()
            if isinstance(value, torch.Tensor)
        }

    def optimizer_shards(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]
    ) -> dict[str, object]:
        """Return the optimizer's state by parameter name, in shards."""
        model = _trained_by(optimizer, models)
        with self._sharded(model):
            return FullyShardedDataParallel.optim_state_dict(model, inner_optimizer(optimizer))

    def load_optimizer_shards(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], shards: dict[str, Any]
    ) -> None:
        """Load ``shards`` into the state of the flat parameters."""
        model = _trained_by(optimizer, models)
        with self._sharded(model):
            self._load(model, optimizer, shards)

    def _load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, named: dict[str, Any]) -> None:
        inner = inner_optimizer(optimizer)
        inner.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, inner, named))

    def full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], keeps: bool
    ) -> dict[str, object]:
        """Return the gathered optimizer state, numbered as for the user's own model; a collective."""
        model = _trained_by(optimizer, models)
        with self._full(model, rank0_only=self._offloads):
            named = FullyShardedDataParallel.optim_state_dict(model, inner_optimizer(optimizer))
        if not keeps:
            return {}
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, names in zip(named["param_groups"], _names_by_group(optimizer, model), strict=True):
            groups.append({**group, "params": list(range(number, number + len(names)))})
            for name in names:
                if name in named["state"]:
                    state[number] = {key: _on_cpu(value) for key, value in named["state"][name].items()}
                number += 1
        return {"state": state, "param_groups": groups}

    def parameter_names(self, models: Sequence[torch.nn.Module]) -> Container[str]:
        """Return the names of all parameters of ``models``."""
        return {name for model in models for name, _ in flat_parameters(uncompiled(model))}

    def optimizer_layout(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> OptimizerLayout:
        """Return names and shapes of the user's own parameters in the optimizer."""
        model: Any = _trained_by(optimizer, models)
        shapes = {name: torch.Size(held.shape) for held in flat_held_tensors(model) for name in held.names}
        return [[(name, shapes[name]) for name in names] for names in _names_by_group(optimizer, model)]

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], state: dict[str, Any]
    ) -> None:
        """Load a state dict keyed by parameter number into the sharded optimizer."""
        model = _trained_by(optimizer, models)
        groups = _names_by_group(optimizer, model)
        by_number = dict(enumerate(name for names in groups for name in names))
        named = {
            "state": {by_number.get(key, key): value for key, value in state["state"].items()},
            "param_groups": [
                {**saved, "params": names} for saved, names in zip(state["param_groups"], groups, strict=True)
            ],
        }
        with self._full(model):
            self._load(model, optimizer, named)


@final
class _FullStateReceiver:
    """A model under FSDP 1 as a load target for full tensors."""

    def __init__(
        self, gathering: Callable[[torch.nn.Module], AbstractContextManager[object]], model: torch.nn.Module
    ) -> None:
        self._gathering = gathering
        self._model = model

    def state_dict(self, keep_vars: bool = True) -> StateDict:
        """Return meta tensors in the shapes of the user's own model; tied names share one."""
        model: Any = self._model
        if not isinstance(model, FullyShardedDataParallel):
            return model.state_dict(keep_vars=keep_vars)
        found: StateDict = {}
        for held in flat_held_tensors(model):
            found |= dict.fromkeys(held.names, torch.empty(held.shape, dtype=held.dtype, device="meta"))
        return found

    def load_state_dict(self, state: StateDict, strict: bool = True, **_: object) -> object:
        """Load ``state`` into the model."""
        whole = dict(state)
        for name, first in self._model.__dict__.get(_TIES, {}).items():  # a file holds one of the two
            if first in whole:
                whole.setdefault(name, whole[first])
            elif name in whole:
                whole[first] = whole[name]
        with self._gathering(self._model):
            return self._model.load_state_dict(whole, strict=strict)


def _on_cpu(value: object) -> object:
    # A copy: torch hands out views of one gathered buffer.
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _trained_by(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return the one of ``models`` that ``optimizer`` trains."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    wrapped = [uncompiled(model) for model in models]
    owners = [model for model in wrapped if any(id(parameter) in trained for _, parameter in flat_parameters(model))]
    if len(owners) != 1:
        raise CheckpointError(
            f"With FSDP1, a saved optimizer trains one prepared model; this one trains {len(owners)}. Give "
            "each model its own optimizer, or use fsdp_version=2."
        )
    return owners[0]


def _names_by_group(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[list[str]]:
    """Return the names of the parameters in each group, in the order of the user's own model."""
    names: dict[int, list[str]] = {}
    order = {name: position for position, name in enumerate(model.__dict__.get(_ORDER, ()))}
    for name, parameter in flat_parameters(model):
        if name in order:  # tied parameters count once, under their first name
            names.setdefault(id(parameter), []).append(name)
    return [
        sorted((name for p in group["params"] for name in names.get(id(p), ())), key=order.__getitem__)
        for group in optimizer.param_groups
    ]
