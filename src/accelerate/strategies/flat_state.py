"""The state of models under FSDP 1, whose parameters are pieces of flat ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from ..checkpointing.sharded import StateAccess
from ..errors import CheckpointError
from ..torch_private.fsdp import handle_of, names_in
from ..world import World
from .compile import uncompiled
from .rebind import canonical_name, inner_optimizer

#: Where a wrapper keeps the names of the parameters in the order of the user's own model.
_ORDER = "_names_in_order"
#: And names of tied parameters, each with the first name of the same one.
_TIES = "_tied_names"


def names_of(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters of ``model`` in their order, and which are tied: attributes for its wrapper to keep."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return {_ORDER: list(first.values()), _TIES: ties}


def flat_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """What an optimizer of ``model`` trains, under every name of the user's own model: flat parameters have many."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        handle = handle_of(module) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        for name in names_in(handle):
            yield canonical_name(f"{prefix}.{name}".lstrip(".")), handle.flat_param
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith("_flat_param"):
            yield canonical_name(name), parameter


@contextmanager
def _in_form(*arguments: Any) -> Iterator[None]:
    """State dicts of a model have a form for the block. torch warns of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(*arguments):
            yield


@final
class FlatAccess(StateAccess):
    """Models under FSDP 1, through torch's own functions for their state."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._offloads = world.device.type != "cpu"  # torch can't "offload" what is in CPU memory already

    def _whole(self, model: Any, *, rank0_only: bool = False) -> AbstractContextManager[Any]:
        return _in_form(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=self._offloads, rank0_only=rank0_only),
            FullOptimStateDictConfig(offload_to_cpu=self._offloads, rank0_only=rank0_only),
        )

    def _cut(self, model: Any) -> AbstractContextManager[Any]:
        return _in_form(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=self._offloads),
            ShardedOptimStateDictConfig(offload_to_cpu=self._offloads),
        )

    def receiver(self, model: Any) -> Any:
        """Something that gathers and cuts whole tensors."""
        return _Whole(self._whole, uncompiled(model))

    def whole_model(self, model: Any, keeps: bool) -> dict[str, Any]:
        """The state dict that torch gathers."""
        with self._whole(uncompiled(model), rank0_only=self._offloads):
            state = uncompiled(model).state_dict()
        return {canonical_name(name): _on_cpu(value) for name, value in state.items()} if keeps else {}

    def model_shards(self, model: Any) -> dict[str, Any]:
        """Pieces of the user's own parameters."""
        with self._cut(uncompiled(model)):
            return uncompiled(model).state_dict()

    def take_model(self, model: Any, shards: dict[str, Any]) -> None:
        """The pieces are in the flat parameters."""
        with self._cut(uncompiled(model)):
            uncompiled(model).load_state_dict(shards)

    def layouts(self, models: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The pieces of the parameters."""
        return {
            name: value
            for model in models
            for name, value in self.model_shards(model).items()
            if isinstance(value, torch.Tensor)
        }

    def optimizer_shards(self, optimizer: Any, models: Sequence[Any]) -> dict[str, Any]:
        """By name, in pieces."""
        model = _trained_by(optimizer, models)
        with self._cut(model):
            return FullyShardedDataParallel.optim_state_dict(model, inner_optimizer(optimizer))

    def take_optimizer(self, optimizer: Any, models: Sequence[Any], shards: dict[str, Any]) -> None:
        """The pieces are in the state of the flat parameters."""
        model = _trained_by(optimizer, models)
        with self._cut(model):
            self._load(model, optimizer, shards)

    def _load(self, model: Any, optimizer: Any, named: dict[str, Any]) -> None:
        inner = inner_optimizer(optimizer)
        inner.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, inner, named))

    def whole_optimizer(self, optimizer: Any, models: Sequence[Any], keeps: bool) -> dict[str, Any]:
        """Gathered by name, then numbered as an optimizer of the user's own model numbers."""
        model = _trained_by(optimizer, models)
        with self._whole(model, rank0_only=self._offloads):
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

    def take_whole_optimizer(self, optimizer: Any, models: Sequence[Any], state: dict[str, Any]) -> None:
        """Numbers become names, which torch cuts into pieces."""
        model = _trained_by(optimizer, models)
        groups = _names_by_group(optimizer, model)
        by_number = dict(enumerate(name for names in groups for name in names))
        named = {
            "state": {by_number.get(key, key): value for key, value in state["state"].items()},
            "param_groups": [
                {**saved, "params": names} for saved, names in zip(state["param_groups"], groups, strict=True)
            ],
        }
        with self._whole(model):
            self._load(model, optimizer, named)


@final
class _Whole:
    """A model under FSDP 1 as something that whole tensors can be loaded into."""

    def __init__(self, gathering: Callable[[Any], AbstractContextManager[Any]], model: torch.nn.Module) -> None:
        self._gathering = gathering
        self._model = model

    def state_dict(self, keep_vars: bool = True) -> dict[str, Any]:
        """Names only matter here, and what is tied: nothing is gathered."""
        return dict.fromkeys(self._model.__dict__.get(_ORDER, ()))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        """The model has ``state``."""
        whole = dict(state)
        for name, first in self._model.__dict__.get(_TIES, {}).items():  # a file holds one of the two
            if first in whole:
                whole.setdefault(name, whole[first])
            elif name in whole:
                whole[first] = whole[name]
        with self._gathering(self._model):
            return self._model.load_state_dict(whole, strict=strict)


def _on_cpu(value: Any) -> Any:
    # A copy: torch hands out views of one gathered buffer.
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _trained_by(optimizer: Any, models: Sequence[Any]) -> Any:
    """The one model of ``models`` that ``optimizer`` trains."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    wrapped = [uncompiled(model) for model in models]
    owners = [model for model in wrapped if any(id(parameter) in held for _, parameter in flat_parameters(model))]
    if len(owners) != 1:
        raise CheckpointError(
            f"With FSDP1, a saved optimizer trains one prepared model; this one trains {len(owners)}. Give "
            "each model its own optimizer, or use fsdp_version=2."
        )
    return owners[0]


def _names_by_group(optimizer: Any, model: torch.nn.Module) -> list[list[str]]:
    """The names of the parameters in each group, in the order of the user's own model."""
    names: dict[int, list[str]] = {}
    order = {name: position for position, name in enumerate(model.__dict__.get(_ORDER, ()))}
    for name, parameter in flat_parameters(model):
        if name in order:  # tied parameters count once, under their first name
            names.setdefault(id(parameter), []).append(name)
    return [
        sorted((name for p in group["params"] for name in names.get(id(p), ())), key=order.__getitem__)
        for group in optimizer.param_groups
    ]
