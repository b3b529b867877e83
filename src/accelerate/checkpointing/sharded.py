"""Sharded state: every rank writes its shards, and any number of ranks reads them (torch's distributed checkpoint).

`pytorch_model_fsdp_{i}/` has the weights of model ``i``, `optimizer_{i}/` the state of optimizer ``i``, by the names of
the parameters. A :class:`StateAccess` gets and loads the shards of an object.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from ..distributed.world import current_world
from ..errors import CheckpointError
from ..modules import is_sharded
from ..names import FSDP_MODEL_NAME, OPTIMIZER_NAME
from ..torch_private.distributed import shard_locally
from ..torch_private.modules import loaded
from .agreement import Ranks
from .dcp import ShardsItem, read_into, read_metadata
from .fit import OptimizerLayout, check_entry, check_groups, check_settings, other_parameters, require_fit
from .layout import MAX_RANKS
from .quantized_state import (
    is_split,
    is_statistic,
    join_state,
    load_statistics,
    packed_layers,
    split_optimizer,
    split_state,
)
from .run_state import StateDict, StrategyState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import STORAGE_TYPES

    from .weights import LoadTarget

# ------------------------------------------------------------------------------------ saving and loading shards

NamedParameters = Callable[[torch.nn.Module], Iterable[tuple[str, torch.Tensor]]]


def weights_folder(folder: str | PathLike[str], index: int = 0) -> Path:
    """Return the folder of the sharded weights of model ``index``."""
    return Path(folder) / f"{FSDP_MODEL_NAME}_{index}"


def optimizer_folder(folder: str | PathLike[str], index: int = 0) -> Path:
    """Return the folder of the sharded state of optimizer ``index``."""
    return Path(folder) / f"{OPTIMIZER_NAME}_{index}"


def classic_weights(folder: str | PathLike[str], index: int = 0) -> Path:
    """Return the path of the pickle with all weights of a sharded model ``index``."""
    return Path(folder) / f"{FSDP_MODEL_NAME}{f'_{index}' if index else ''}.bin"


# ------------------------------------------------------------------------------------------------- writing


def write_shards(folder: Path, **state: StateDict) -> None:
    """Write the shards of a model (``model=``) or an optimizer (``optimizer=``) into ``folder``; a collective."""
    ShardsItem(folder, state, Ranks(None if _alone() else current_world())).write()


def _alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _reads_alone() -> bool:
    """Return whether each rank plans its reading alone, because rank 0 would gather the plans of too many ranks."""
    return _alone() or torch.distributed.get_world_size() > MAX_RANKS


# ------------------------------------------------------------------------------------------------- reading


def read_model_shards(
    access: StateAccess, model: torch.nn.Module, folder: Path, *, strict: bool = True, **_: object
) -> Callable[[], None]:
    """Return a function that loads the weights in ``folder`` into ``model``; the function is a collective.

    Raises:
        CheckpointError: a tensor has another shape or, with ``strict``, names are missing on either side.
    """
    shards = access.model_shards(model)
    metadata, paths = _saved(folder)
    saved = {str(path[1]): key for key, path in paths.items() if path[0] == "model" and len(path) > 1}
    packed = {f"{name}.weight" for name, _ in packed_layers(model)}
    try:
        require_fit(
            shards, {name: _described(metadata[key]) for name, key in saved.items()}, strict=strict, packed=packed
        )
    except RuntimeError as error:
        raise CheckpointError(f"{folder} doesn't fit the model: {error}") from error
    found = {
        name: _empty(metadata[saved[name]], None) if is_statistic(name) else value
        for name, value in own_shards(shards).items()
        if name in saved
    }

    def read() -> None:
        state: StateDict = {"model": found}
        _read(folder, state)
        access.load_model_shards(model, {**shards, **found})

    return read


def own_shards(shards: Mapping[str, Any]) -> StateDict:
    """Return the ``shards`` that are at least partly on this rank."""
    return {name: value for name, value in shards.items() if not (isinstance(value, torch.Tensor) and value.is_meta)}


def read_optimizer_shards(
    access: StateAccess, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], folder: Path
) -> Callable[[], None]:
    """Return a function that loads the state in ``folder`` into ``optimizer``; the function is a collective.

    Raises:
        CheckpointError: the folder has state of parameters that the models or the optimizer don't have.
    """
    layouts = access.layouts(models)
    metadata, paths = _saved(folder)
    saved = {key: path[1:] for key, path in paths.items() if path[0] == "optimizer" and len(path) > 1}
    for key, path in saved.items():
        if path[0] != "state":
            continue
        if path[1] not in layouts:
            raise CheckpointError(f"{folder} holds optimizer state of {path[1]!r}, which the models don't have")
        entry, own = _described(metadata[key]), layouts[str(path[1])].shape
        if len(path) == 3 and entry is not None:
            check_entry(repr(path[1]), path[2], entry.shape, own, folder.name)
    _require_same_parameters(access, optimizer, models, folder, saved)

    def read() -> None:
        state: dict[str, Any] = {}
        target: dict[str, Any] = {"optimizer": state}
        for key, path in saved.items():
            layout = layouts[str(path[1])] if path[0] == "state" else None
            if layout is None or not layout.is_meta:  # else it is of another pipeline stage
                _put(state, path, _empty(metadata[key], layout))
        _read(folder, target)
        access.load_optimizer_shards(optimizer, models, {"state": {}, "param_groups": [], **target["optimizer"]})

    return read


def _require_same_parameters(
    access: StateAccess,
    optimizer: torch.optim.Optimizer,
    models: Sequence[torch.nn.Module],
    folder: Path,
    saved: Mapping[str, tuple[str | int, ...]],
) -> None:
    """Raise CheckpointError unless ``optimizer`` trains the same parameters as the saved one."""
    live = [[name for name, _ in group] for group in access.optimizer_layout(optimizer, models)]
    of_live, of_state = set(chain(*live)), {path[1] for path in saved.values() if path[0] == "state"}
    if not of_live or None in of_live:
        return
    target: dict[str, Any] = {"optimizer": {}}
    for path in saved.values():
        if path[0] == "param_groups" and len(path) > 2:
            _put(target["optimizer"], path, None)
    groups: list[dict[str, Any]] = [group or {} for group in target["optimizer"].get("param_groups", ())]
    check_settings(groups, optimizer, folder.name)
    for group in groups:
        for name in group.keys() - {"params"}:
            del group[name]  # the settings aren't read here
    read_into(folder, target, alone=True)
    names: list[list[str]] = [list(group.get("params") or ()) for group in groups]
    of_saved = set(chain(*names)) or of_state  # the groups also list parameters without state
    if of_saved != of_live:
        raise CheckpointError(other_parameters(folder.name, of_saved, of_live))
    if any(names):
        check_groups(names, live, folder.name)


def _put(tree: Any, path: Sequence[Any], value: object) -> None:
    """Put ``value`` into ``tree`` at ``path``; a number in it is a list index."""
    for position, key in enumerate(path):
        last = position == len(path) - 1
        new = value if last else ([] if isinstance(path[position + 1], int) else {})
        if isinstance(tree, list):
            tree.extend([None] * (key + 1 - len(tree)))
            if last or tree[key] is None:
                tree[key] = new
        elif last or key not in tree:
            tree[key] = new
        tree = tree[key]


def _empty(metadata: STORAGE_TYPES, layout: torch.Tensor | None) -> torch.Tensor | None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(metadata, TensorStorageMetadata):
        return None  # not a tensor: replaced when read
    size, dtype = metadata.size, metadata.properties.dtype
    if layout is not None and layout.shape == size:
        return torch.zeros_like(layout, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype)


def _described(metadata: STORAGE_TYPES) -> torch.Tensor | None:
    """Return a meta tensor of the saved shape; None if the entry isn't a tensor."""
    size: torch.Size | None = getattr(metadata, "size", None)
    return None if size is None else torch.empty(size, device="meta")


def _saved(folder: Path) -> tuple[dict[str, STORAGE_TYPES], dict[str, tuple[str | int, ...]]]:
    """Return the entries of the checkpoint in ``folder`` by key, and the path of each key in the state dict."""
    metadata = read_metadata(folder)
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    entries = metadata.state_dict_metadata
    return entries, {key: tuple(paths.get(key, key.split(".", 1))) for key in entries}


def _read(folder: Path, state: StateDict) -> None:
    read_into(folder, state, alone=_reads_alone())


# ------------------------------------------------------------------------------------ the state of live objects


def _named_parameters(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return model.named_parameters(remove_duplicate=False)


class StateAccess(ABC):  # noqa: B024  (every member has a default)
    """Access to the state of models and optimizers, which may be sharded over the ranks.

    It is for models whose parameters are plain tensors or DTensors. Strategies with other models override methods.

    Args:
        named_parameters: returns the parameters of a model under every name of the user's own model.
        canonical: returns the name in the user's own model for a name in the prepared model's state dict.
    """

    #: Whether to read DeepSpeed's files, which are pickles, without ``weights_only=False``.
    trusts_engine: bool = False

    def __init__(
        self, named_parameters: NamedParameters = _named_parameters, canonical: Callable[[str], str] = str
    ) -> None:
        self._named = named_parameters
        self.canonical = canonical

    def broadcasts_buffers(self, model: torch.nn.Module) -> bool:
        """Return whether the main process's buffers replace those of the other ranks before the next forward."""
        return False

    def keep_buffers(self, model: torch.nn.Module) -> None:
        """Make each rank keep its buffers in the next forward, as after a forward without gradient reduction."""

    def buffers(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the live, unsharded buffers in the state dict of ``model``, by the user's names."""
        return {
            self.canonical(name): value
            for name, value in model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
            and not isinstance(value, torch.nn.Parameter)
            and not (value.is_meta or is_sharded(value) or is_statistic(name))
        }

    def restorer(
        self, model: torch.nn.Module, folder: Path, index: int, *, model_only: bool = False, **options: object
    ) -> Callable[[], object] | None:
        """Return a function that loads ``model`` from the strategy's own format; None if ``folder`` has none."""
        return None

    def load_target(self, model: torch.nn.Module) -> LoadTarget:
        """Return an object with ``state_dict`` and ``load_state_dict(state, strict=)`` for full tensors.

        It is the model itself, or a wrapper that shards full tensors if the model has DTensors.
        """
        has_pieces = isinstance(model, torch.nn.Module) and any(map(is_sharded, model.parameters()))
        return ShardedModel(self, model) if has_pieces else model

    def full_model_state(self, model: torch.nn.Module, keeps: bool) -> StateDict:
        """Return the state dict of ``model`` with full tensors in CPU memory if ``keeps``; else an empty one.

        Tensors are gathered one at a time; tied names share one tensor in the result too.
        """
        gathered: dict[int, Any] = {}
        state: dict[str, Any] = {}
        for name, value in self.model_shards(model).items():
            if id(value) not in gathered:
                gathered[id(value)] = gather_to_cpu(value, keeps)
            if keeps:
                state[name] = gathered[id(value)]
        return state

    def model_shards(self, model: torch.nn.Module) -> StateDict:
        """Return this rank's shards by name; tensors of other ranks are on the meta device (:func:`own_shards`).

        They are the detached live tensors; tied names have the same object.
        """
        state = model.state_dict(keep_vars=True)
        detached = {id(value): value.detach() if isinstance(value, torch.Tensor) else value for value in state.values()}
        return {self.canonical(name): detached[id(value)] for name, value in state.items()}

    def load_model_shards(self, model: torch.nn.Module, shards: StateDict) -> None:
        """Load ``shards``, which hold the values read, into ``model``.

        Here these are only the statistics of packed weights; the other tensors have been read in place.
        """
        load_statistics(model, shards, self.canonical)

    def layouts(self, models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
        """Return, by parameter name, a tensor of the parameter's full shape that is sharded as its optimizer state."""
        return {name: parameter.detach() for parameter, name in self._names(models)}

    def parameter_names(self, models: Sequence[torch.nn.Module]) -> Container[str]:
        """Return the names of all parameters of ``models``."""
        return {name for _, name in self._names(models)}

    def optimizer_layout(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> OptimizerLayout:
        """Return names and shapes of the optimizer's parameters."""
        names, groups = self._name_of(models), getattr(optimizer, "param_groups", ())
        return [[(names.get(id(one)), one.shape) for one in group["params"]] for group in groups]

    def _names(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.Tensor, str]]:
        taken: set[str] = set()
        for number, model in enumerate(models):
            for name, parameter in self._named(model):
                unique = name if name not in taken else f"{number}.{name}"
                taken.add(unique)
                yield parameter, unique

    def _name_of(self, models: Sequence[torch.nn.Module]) -> dict[int, str]:
        names: dict[int, str] = {}
        for parameter, name in self._names(models):
            names.setdefault(id(parameter), name)
        return names

    def optimizer_shards(self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> StateDict:
        """Return ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, with live tensors."""
        names = self._name_of(models)
        strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if strange:
            raise CheckpointError(
                f"The optimizer trains {len(strange)} parameters that no prepared model has, of shapes "
                f"{[list(p.shape) for p in strange[:3]]}: they have no name to be saved under. Put them into the model."
            )
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {
            "state": {names[id(p)]: split_state(state, optimizer) for p, state in optimizer.state.items()},
            "param_groups": groups,
        }

    def load_optimizer_shards(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], shards: StateDict
    ) -> None:
        """Load ``shards`` into ``optimizer`` as ``load_state_dict`` does, with names instead of numbers."""
        names = self._name_of(models)
        settings = {name: group for group in shards["param_groups"] for name in group.get("params", ())}
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        number = 0
        for group in optimizer.param_groups:
            held = [names[id(parameter)] for parameter in group["params"]]
            saved = next((settings[name] for name in held if name in settings), group)
            groups.append({**saved, "params": list(range(number, number + len(held)))})
            for name, parameter in zip(held, group["params"], strict=True):
                if name in shards["state"]:
                    state[number] = join_state(shards["state"][name], parameter, optimizer)
                number += 1
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], keeps: bool
    ) -> StateDict:
        """Return the optimizer's state dict with full tensors on the CPU if ``keeps``; else an empty one."""
        state = split_optimizer(optimizer.state_dict(), optimizer)
        gathered = {
            number: {name: gather_to_cpu(value, keeps) for name, value in entries.items()}
            for number, entries in state["state"].items()
        }
        return {**state, "state": gathered} if keeps else {}

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], state: StateDict
    ) -> None:
        """Load ``state``, a state dict of full tensors; those of a parameter's shape are sharded as it is."""
        parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        if _is_named(state):  # FSDP's classic format
            layouts = self.layouts(models)
            named = {
                name: {key: shard_like(value, layouts[name]) for key, value in entries.items()}
                for name, entries in state["state"].items()
            }
            self.load_optimizer_shards(optimizer, models, {**state, "state": named})
            return
        if not any(map(is_sharded, parameters)) and not is_split(state):
            optimizer.load_state_dict(state)
            return
        inner = getattr(optimizer, "optimizer", optimizer)
        cut: dict[int, StateDict] = {}
        for number, entries in state["state"].items():
            parameter = parameters[number]
            own = {name: shard_like(value, parameter) for name, value in entries.items()}
            cut[number] = join_state(own, parameter, inner)
        optimizer.load_state_dict({**state, "state": cut})


@final
class InPlace(StateAccess):
    """Access to models of which every tensor has values on this rank, or shards on all ranks."""


@dataclass(frozen=True)
@final
class GivenState:
    """The state of a run without a strategy, extracted from models and optimizers by the caller."""

    state: StrategyState = field(default_factory=StrategyState)
    access: StateAccess = field(default_factory=InPlace, init=False)

    def checkpoint_state(self, *_: object, **__: object) -> StrategyState:
        """Return the given state."""
        return self.state

    def restorable(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Return all of ``optimizers``."""
        return optimizers


@final
class ShardedModel:
    """A wrapper of a model with DTensors or tensors of other ranks, into which full tensors can be loaded."""

    def __init__(self, access: StateAccess, model: torch.nn.Module) -> None:
        self._access = access
        self._model = model

    def state_dict(self, keep_vars: bool = True) -> StateDict:
        """Return the live tensors; those of other ranks are on the meta device."""
        return self._access.model_shards(self._model)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True, **_: object) -> object:
        """Copy to every tensor its shard of the value of the same name."""
        own = {name: value for name, value in self.state_dict().items() if not is_statistic(name)}
        packed = {f"{name}.weight" for name, _ in packed_layers(self._model)}
        missing, unexpected = require_fit(own, state, strict=strict, packed=packed)
        state = load_statistics(self._model, state, self._access.canonical)
        for name, tensor in own.items():
            if name in state and isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                tensor.copy_(shard_like(state[name].to(tensor.dtype), tensor))
        return loaded(missing, unexpected)


def _is_named(state: StateDict) -> bool:
    return isinstance(state, Mapping) and any(isinstance(key, str) for key in state.get("state") or ())


def gather_to_cpu(value: object, keeps: bool) -> object:
    """Return ``value`` gathered from all ranks, in CPU memory, if ``keeps``; a collective for sharded tensors."""
    if not isinstance(value, torch.Tensor):
        return value
    value = gather_tensor(value)
    return value.cpu() if keeps else None


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of ``tensor`` on its compute device; a collective for sharded tensors."""
    data: Any = tensor.detach()
    if not is_sharded(data):
        return data
    if data.to_local().device.type != data.device_mesh.device_type:  # offloaded
        data = data.to(data.device_mesh.device_type)
    return data.full_tensor()


def shard_like(value: Any, tensor: torch.Tensor) -> Any:
    """Return ``value``, a full tensor on every rank, sharded and placed like ``tensor`` if the shapes are equal."""
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or is_sharded(value):
        return value
    data: Any = tensor.detach()
    if not is_sharded(data):
        return value.to(data.device)
    home = data.to_local().device
    mesh = data.device_mesh
    laid = shard_locally(value.to(mesh.device_type), mesh, data.placements)
    return laid if laid.to_local().device == home else laid.to(home)
