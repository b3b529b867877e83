"""State in shards: every rank writes its own pieces, any number of ranks reads them (torch's distributed checkpoint).

`pytorch_model_fsdp_{i}/` holds the weights of model ``i``, `optimizer_{i}/` the state of optimizer ``i``, under the
names of the parameters. How an object gives and takes its pieces is a :class:`StateAccess`; the one for tensors that
lie in place, whole or as DTensors, is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch

from ..errors import CheckpointError
from ..names import FSDP_MODEL_NAME, OPTIMIZER_NAME
from ..torch_private.distributed import cut_locally
from ..torch_private.modules import loaded
from ..world import current_world
from .agreement import Ranks
from .dcp import is_distributed_checkpoint, read_into, read_metadata
from .shard_files import Shards

NamedParameters = Callable[[Any], Iterable[tuple[str, torch.Tensor]]]


def weights_folder(folder: str | PathLike[str], index: int = 0) -> Path:
    """Where the weights of model ``index`` lie in shards."""
    return Path(folder) / f"{FSDP_MODEL_NAME}_{index}"


def optimizer_folder(folder: str | PathLike[str], index: int = 0) -> Path:
    """Where the state of optimizer ``index`` lies in shards."""
    return Path(folder) / f"{OPTIMIZER_NAME}_{index}"


def classic_weights(folder: str | PathLike[str], index: int = 0) -> Path:
    """The pickle with all weights of a sharded model ``index``."""
    return Path(folder) / f"{FSDP_MODEL_NAME}{f'_{index}' if index else ''}.bin"


def is_sharded(folder: Path) -> bool:
    """Whether ``folder`` is one that shards were written into."""
    return is_distributed_checkpoint(folder)


class StateAccess(ABC):
    """How the state of a model or an optimizer that lies over the ranks is given and taken. Everything here is a
    collective."""

    #: Whether files of DeepSpeed's engine, which are pickles, are read without being asked.
    trusts_engine: bool = False

    def restore(self, model: Any, folder: Path, index: int, *, model_only: bool = False, **options: Any) -> bool:
        """Whether ``folder`` held the state of ``model`` in a form of the strategy's own, and ``model`` now has it."""
        return False

    @abstractmethod
    def receiver(self, model: Any) -> Any:
        """An object with ``state_dict`` and ``load_state_dict(state, strict=)`` for whole tensors."""

    @abstractmethod
    def whole_model(self, model: Any, keeps: bool) -> dict[str, Any]:
        """The state dict of ``model`` with whole tensors in CPU memory where ``keeps``; empty elsewhere."""

    @abstractmethod
    def model_shards(self, model: Any) -> dict[str, Any]:
        """This rank's pieces by name; what lies on other ranks alone is on the meta device (:func:`own_shards`)."""

    @abstractmethod
    def take_model(self, model: Any, shards: dict[str, Any]) -> None:
        """``model`` has what was read into ``shards``."""

    @abstractmethod
    def layouts(self, models: Sequence[Any]) -> dict[str, torch.Tensor]:
        """By parameter name a tensor of the parameter's whole shape, cut as optimizer state for it is."""

    @abstractmethod
    def optimizer_shards(self, optimizer: Any, models: Sequence[Any]) -> dict[str, Any]:
        """``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, tensors in pieces."""

    @abstractmethod
    def take_optimizer(self, optimizer: Any, models: Sequence[Any], shards: dict[str, Any]) -> None:
        """``optimizer`` has ``shards``."""

    @abstractmethod
    def whole_optimizer(self, optimizer: Any, models: Sequence[Any], keeps: bool) -> dict[str, Any]:
        """The state dict of an optimizer of whole tensors, where ``keeps``."""

    @abstractmethod
    def take_whole_optimizer(self, optimizer: Any, models: Sequence[Any], state: dict[str, Any]) -> None:
        """``optimizer`` has ``state``, the state dict of an optimizer of whole tensors."""


# ------------------------------------------------------------------------------------------------- writing


def write_model_shards(folder: Path, shards: Mapping[str, Any]) -> None:
    """``folder`` holds the weights; a collective."""
    _write(folder, {"model": own_shards(shards)})


def write_optimizer_shards(folder: Path, shards: Mapping[str, Any]) -> None:
    """``folder`` holds the optimizer's state; a collective."""
    _write(folder, {"optimizer": dict(shards)})


def _write(folder: Path, state: dict[str, Any]) -> None:
    Shards(folder, state, Ranks(None if _alone() else current_world())).write(_no_file)


def _no_file(name: str, *, pickle: bool = False) -> Any:
    raise AssertionError(f"shards open their own files, {name!r} is none of them")


def _alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


# ------------------------------------------------------------------------------------------------- reading


def read_model_shards(access: StateAccess, model: Any, folder: Path, *, strict: bool = True, **_: Any) -> None:
    """``model`` has the weights in ``folder``; a collective.

    Raises:
        CheckpointError: with ``strict``, names that are missing on either side.
    """
    shards = access.model_shards(model)
    saved = {path[1]: key for key, path in _saved(folder).items() if path[0] == "model" and len(path) > 1}
    ties = _shared(shards)
    missing = [name for name in shards if name not in saved and ties.get(name) not in saved]
    unexpected = [name for name in saved if name not in shards]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{folder} doesn't fit the model: {_listed('missing', missing)}{_listed('unexpected', unexpected)}"
        )
    found = {name: value for name, value in own_shards(shards).items() if name in saved}
    _read(folder, {"model": found})
    access.take_model(model, {**shards, **found})


def own_shards(shards: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``shards`` of which something lies on this rank."""
    return {name: value for name, value in shards.items() if not (isinstance(value, torch.Tensor) and value.is_meta)}


def _listed(what: str, names: list[str]) -> str:
    return f" {what} {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}." if names else ""


def _shared(state: Mapping[str, Any]) -> dict[str, str]:
    """Of names of one tensor, the others' by each."""
    first: dict[int, str] = {}
    other: dict[str, str] = {}
    for name, value in state.items():
        known = first.setdefault(id(value), name)
        if known != name:
            other[name], other[known] = known, name
    return other


def read_optimizer_shards(access: StateAccess, optimizer: Any, models: Sequence[Any], folder: Path) -> None:
    """``optimizer`` has the state in ``folder``; a collective.

    Raises:
        CheckpointError: the folder holds state of parameters that the models don't have.
    """
    layouts = access.layouts(models)
    state: dict[str, Any] = {}
    target: dict[str, Any] = {"optimizer": state}
    for key, (root, *path) in _saved(folder).items():
        if root != "optimizer" or not path:
            continue
        if path[0] == "state" and path[1] not in layouts:
            raise CheckpointError(f"{folder} holds optimizer state of {path[1]!r}, which the models don't have")
        layout = layouts[str(path[1])] if path[0] == "state" else None
        if layout is not None and layout.is_meta:
            continue  # of another stage
        _put(state, path, _empty(_metadata(folder)[key], layout))
    _read(folder, target)
    access.take_optimizer(optimizer, models, {"state": {}, "param_groups": [], **target["optimizer"]})


def _put(tree: Any, path: Sequence[Any], value: Any) -> None:
    """``value`` is in ``tree`` at ``path``, where a number is a place in a list."""
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


def _empty(metadata: Any, layout: torch.Tensor | None) -> Any:
    size = getattr(metadata, "size", None)
    if size is None:
        return None  # no tensor: replaced when read
    dtype = metadata.properties.dtype
    if layout is not None and layout.shape == size:
        return torch.zeros_like(layout, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype)


def _metadata(folder: Path) -> dict[str, Any]:
    return read_metadata(folder).state_dict_metadata


def _saved(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What ``folder`` holds: by key the path that leads to it."""
    metadata = read_metadata(folder)
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    return {key: tuple(paths.get(key, key.split(".", 1))) for key in metadata.state_dict_metadata}


def _read(folder: Path, state: dict[str, Any]) -> None:
    read_into(folder, state, alone=_alone())


# ------------------------------------------------------------------------------------------ tensors in place


@final
class InPlace(StateAccess):
    """Models whose parameters are ordinary tensors or DTensors, and optimizers over them.

    Args:
        named_parameters: the parameters of a model under every name of the user's own model.
        canonical: a name in a model's state dict as the user's own model has it.
        restores: takes the place of :meth:`restore`: ``(model, folder, index)``.
    """

    def __init__(
        self,
        named_parameters: NamedParameters | None = None,
        canonical: Callable[[str], str] | None = None,
        restores: Callable[[Any, Path, int], bool] | None = None,
    ) -> None:
        self._named = named_parameters or _named_parameters
        self._canonical = canonical or str
        self._restores = restores

    def restore(self, model: Any, folder: Path, index: int, *, model_only: bool = False, **options: Any) -> bool:
        """Whether an engine has taken its own form of state."""
        return self._restores is not None and self._restores(model, folder, index)

    def receiver(self, model: Any) -> Any:
        """The model itself, unless it has DTensors."""
        has_pieces = isinstance(model, torch.nn.Module) and any(map(_is_dtensor, model.parameters()))
        return _Pieces(self, model) if has_pieces else model

    def whole_model(self, model: Any, keeps: bool) -> dict[str, Any]:
        """One tensor after the other is gathered; tied names share one tensor in the result too."""
        gathered: dict[int, Any] = {}
        state: dict[str, Any] = {}
        for name, value in self.model_shards(model).items():
            if id(value) not in gathered:
                gathered[id(value)] = whole(value, keeps)
            if keeps:
                state[name] = gathered[id(value)]
        return state

    def model_shards(self, model: Any) -> dict[str, Any]:
        """The live tensors, detached from gradients; tied names have the same object."""
        state = model.state_dict(keep_vars=True)
        detached = {id(value): value.detach() if isinstance(value, torch.Tensor) else value for value in state.values()}
        return {self._canonical(name): detached[id(value)] for name, value in state.items()}

    def take_model(self, model: Any, shards: dict[str, Any]) -> None:
        """The tensors are the model's own: they have been read in place."""

    def layouts(self, models: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The parameters themselves."""
        return {name: parameter.detach() for parameter, name in self._names(models)}

    def _names(self, models: Sequence[Any]) -> Iterator[tuple[torch.Tensor, str]]:
        taken: set[str] = set()
        for number, model in enumerate(models):
            for name, parameter in self._named(model):
                unique = name if name not in taken else f"{number}.{name}"
                taken.add(unique)
                yield parameter, unique

    def _name_of(self, models: Sequence[Any]) -> dict[int, str]:
        names: dict[int, str] = {}
        for parameter, name in self._names(models):
            names.setdefault(id(parameter), name)
        return names

    def optimizer_shards(self, optimizer: Any, models: Sequence[Any]) -> dict[str, Any]:
        """The live tensors under the parameters' names."""
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
        return {"state": {names[id(p)]: dict(state) for p, state in optimizer.state.items()}, "param_groups": groups}

    def take_optimizer(self, optimizer: Any, models: Sequence[Any], shards: dict[str, Any]) -> None:
        """As ``load_state_dict`` would, with names in place of numbers."""
        names = self._name_of(models)
        settings = {name: group for group in shards["param_groups"] for name in group.get("params", ())}
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        number = 0
        for group in optimizer.param_groups:
            held = [names[id(parameter)] for parameter in group["params"]]
            saved = next((settings[name] for name in held if name in settings), group)
            groups.append({**saved, "params": list(range(number, number + len(held)))})
            for name in held:
                if name in shards["state"]:
                    state[number] = shards["state"][name]
                number += 1
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def whole_optimizer(self, optimizer: Any, models: Sequence[Any], keeps: bool) -> dict[str, Any]:
        """The optimizer's state dict with every tensor whole, on the CPU."""
        state = optimizer.state_dict()
        gathered = {
            number: {name: whole(value, keeps) for name, value in entries.items()}
            for number, entries in state["state"].items()
        }
        return {**state, "state": gathered} if keeps else {}

    def take_whole_optimizer(self, optimizer: Any, models: Sequence[Any], state: dict[str, Any]) -> None:
        """Tensors of a parameter's shape are cut as the parameter is."""
        parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        if _is_named(state):  # the classic form of FSDP
            layouts = self.layouts(models)
            named = {
                name: {key: laid_like(value, layouts[name]) for key, value in entries.items()}
                for name, entries in state["state"].items()
            }
            self.take_optimizer(optimizer, models, {**state, "state": named})
            return
        if not any(map(_is_dtensor, parameters)):
            optimizer.load_state_dict(state)
            return
        cut = {
            number: {name: laid_like(value, parameters[number]) for name, value in entries.items()}
            for number, entries in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": cut})


@final
class _Pieces:
    """A model with DTensors as something that whole tensors can be loaded into."""

    def __init__(self, access: InPlace, model: Any) -> None:
        self._access = access
        self._model = model

    def state_dict(self, keep_vars: bool = True) -> dict[str, Any]:
        """The live tensors."""
        return self._access.model_shards(self._model)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        """Every tensor has its part of the value of its name."""
        own = self.state_dict()
        filled = {id(own[name]) for name in state if name in own}  # a tied tensor comes under one of its names
        missing = [name for name, tensor in own.items() if id(tensor) not in filled]
        unexpected = [name for name in state if name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(f"{_listed('missing', missing)}{_listed('unexpected', unexpected)}")
        for name, tensor in own.items():
            if name in state and isinstance(tensor, torch.Tensor):
                if state[name].shape != tensor.shape:
                    raise RuntimeError(
                        f" {name!r} has shape {list(state[name].shape)} there, and {list(tensor.shape)} here."
                    )
                tensor.copy_(laid_like(state[name].to(tensor.dtype), tensor))
        return loaded(missing, unexpected)


def _is_named(state: Any) -> bool:
    return isinstance(state, Mapping) and any(isinstance(key, str) for key in state.get("state") or ())


def _named_parameters(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return model.named_parameters(remove_duplicate=False)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(value: Any, keeps: bool) -> Any:
    """``value`` with the pieces of all ranks together, in CPU memory, where ``keeps``. A collective for pieces."""
    if not isinstance(value, torch.Tensor):
        return value
    value = together(value)
    return value.cpu() if keeps else None


def together(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of ``tensor``, where it computes. A collective for pieces."""
    piece: Any = tensor.detach()
    if not _is_dtensor(piece):
        return piece
    if piece.to_local().device.type != piece.device_mesh.device_type:  # offloaded
        piece = piece.to(piece.device_mesh.device_type)
    return piece.full_tensor()


def laid_like(value: Any, tensor: torch.Tensor) -> Any:
    """``value``, whole on every rank, in the pieces and on the device in which ``tensor`` of its shape lies."""
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or _is_dtensor(value):
        return value
    data: Any = tensor.detach()
    if not _is_dtensor(data):
        return value.to(data.device)
    home = data.to_local().device
    mesh = data.device_mesh
    laid = cut_locally(value.to(mesh.device_type), mesh, data.placements)
    return laid if laid.to_local().device == home else laid.to(home)
