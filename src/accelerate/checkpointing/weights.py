"""Files of model weights, with the file names that other programs expect.

``model.safetensors``, or shards ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json``; with
``safe_serialization=False``, ``pytorch_model.bin`` and so on. The second model of a checkpoint adds ``_1``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final
from uuid import uuid4

import torch

from ..errors import CheckpointError, CheckpointNotFound, SettingError
from ..names import MODEL_NAME, SAFE_MODEL_NAME
from .agreement import Ranks, write_on_main
from .codec import read_pickle, view_identity, write_pickle
from .fit import check_module, require_fit
from .quantized_state import is_statistic, load_statistics
from .run_state import StateDict
from .storage import fsync_path, inside
from .store import Create, StagingDirectory
from .tensor_files import TensorFile, check_tensor, open_tensors, write_tensors

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

    from ..distributed.world import World

_log = logging.getLogger(__name__)

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGT])(I?)(B)\s*", re.IGNORECASE)
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4}


def convert_file_size_to_int(size: int | str) -> int:
    """Return the number of bytes of ``size``: ``"1GB"`` is 10**9, ``"1GiB"`` 2**30, ``"1Gb"`` (bits) 125 * 10**6.

    Raises:
        CheckpointError: it isn't such a text (also a ValueError).
    """
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise SizeError(f"size {size!r}: expected a number of bytes, or text with a unit such as '5GB' or '300MiB'")
    number, power, binary, unit = float(match[1]), _POWERS[match[2].upper()], match[3], match[4]
    if binary:
        return int(number * 2 ** (10 * power))
    num_bytes = int(number * 10 ** (3 * power))
    return num_bytes // 8 if unit == "b" else num_bytes


class SizeError(CheckpointError, ValueError):
    """The error for a size that can't be parsed."""


# ----------------------------------------------------------------------------------------------- state dicts


def _identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors of the same memory and view; None for a tensor without memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or not tensor.numel() or tensor.is_meta:
        return None
    return view_identity(tensor)


def shared_names(state_dict: Mapping[str, object]) -> dict[str, str]:
    """Map the further names of each tied tensor to its first name."""
    first: dict[tuple[object, ...], str] = {}
    later: dict[str, str] = {}
    for name, value in state_dict.items():
        identity = _identity(value) if isinstance(value, torch.Tensor) else None
        if identity is not None and first.setdefault(identity, name) != name:
            later[name] = first[identity]
    return later


@cache  # once per run for the same names
def _warn_removed(names: tuple[str, ...]) -> None:
    _log.warning(
        "Tensors with two names are saved once: left out %s. Loading into a model that ties them restores both. "
        "Silence this with logging.getLogger('accelerate.checkpointing').setLevel('ERROR').",
        ", ".join(names),
    )


def clean_state_dict_for_safetensors(state_dict: Mapping[str, object]) -> StateDict:
    """Return ``state_dict`` with one name per tensor, each contiguous; the argument is unchanged."""
    removed = shared_names(state_dict)
    if removed:
        _warn_removed(tuple(removed))
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if name not in removed
    }


def check_weights(state_dict: Mapping[str, object], *, safe_serialization: bool) -> None:
    """Raise if the weights can't be written.

    Raises:
        CheckpointError: a tensor has no values, or the format doesn't support it.
    """
    meta = [name for name, value in state_dict.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if meta:
        raise CheckpointError(
            f"can't save weights without values: {', '.join(meta[:5])}{' ...' if len(meta) > 5 else ''} "
            f"({len(meta)} on the meta device). Load or initialise the model first."
        )
    if not safe_serialization:
        return
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} is a {type(value)}: safetensors files hold tensors only. "
                "Save with safe_serialization=False, or keep it out of the model's state dict."
            )
        check_tensor(name, value)


# ------------------------------------------------------------------------------------------------- the files


@dataclass(frozen=True)
@final
class WeightNames:
    """The names of the weight files of one model."""

    stem: str
    extension: str

    @classmethod
    def of(cls, index: int, *, safe: bool) -> WeightNames:
        """Return the names for the model at ``index`` of a checkpoint."""
        suffix = f"_{index}" if index else ""
        return cls(SAFE_MODEL_NAME + suffix, "safetensors") if safe else cls(MODEL_NAME + suffix, "bin")

    @property
    def whole(self) -> str:
        """The file with all weights if there are no shards."""
        return f"{self.stem}.{self.extension}"

    @property
    def index(self) -> str:
        """The file that lists the shard of each weight."""
        return f"{self.whole}.index.json"

    def shard(self, number: int, count: int) -> str:
        """Return the name of shard ``number`` of ``count``, from 1."""
        return f"{self.stem}-{number:05d}-of-{count:05d}.{self.extension}"

    def owns(self, name: str) -> bool:
        """Return whether ``name`` is a possible file of a model saved under these names."""
        shard = re.fullmatch(rf"{re.escape(self.stem)}-\d{{5}}-of-\d{{5}}\.{re.escape(self.extension)}", name)
        return name in (self.whole, self.index) or shard is not None


def _split(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Divide the names, in order, into shards of sizes below the limit; a tensor above the limit gets its own shard.

    Shards are numbered in the order of their completion, as other writers of this format do.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > max_shard_bytes:
            shards.append([name])
            continue
        if current and filled + size > max_shard_bytes:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*shards, current] if current or not shards else shards


def write_weights(
    create: Create,
    state_dict: Mapping[str, torch.Tensor],
    *,
    index: int = 0,
    safe_serialization: bool = True,
    max_shard_size: int | str | None = None,
) -> None:
    """Write the weights into new files under the documented names; ``create(name, pickle=)`` opens each.

    Raises:
        CheckpointError: a tensor has no values, or the format doesn't support it.
    """
    check_weights(state_dict, safe_serialization=safe_serialization)
    names, tied = WeightNames.of(index, safe=safe_serialization), shared_names(state_dict)
    sizes = {
        name: value.numel() * value.element_size() if isinstance(value, torch.Tensor) and name not in tied else 0
        for name, value in state_dict.items()
        if not (safe_serialization and name in tied)
    }
    shards = [list(sizes)] if max_shard_size is None else _split(sizes, convert_file_size_to_int(max_shard_size))
    files = {
        names.whole if len(shards) == 1 else names.shard(number, len(shards)): shard
        for number, shard in enumerate(shards, start=1)
    }
    for name, keys in files.items():
        part = {key: state_dict[key] for key in keys}
        with create(name, pickle=not safe_serialization) as file:
            if safe_serialization:
                write_tensors(file, part, {"format": "pt"})
            else:
                write_pickle(part, file)
    if len(shards) > 1:
        weight_map = {key: name for name, keys in files.items() for key in keys}
        _write_json(create, names.index, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def save_model(
    state_dict: StateDict,
    save_directory: str | PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    world: World | None = None,
    on_each_node: bool = False,
    moment: str = "",
) -> None:
    """Save these weights to ``save_directory``, and remove older weights there; other files stay.

    Call it on all ranks, or on the main process alone; with ``on_each_node``, on all ranks. ``moment`` tells apart
    calls that are made from the same line.

    Raises:
        CheckpointError: on every rank, if the main process couldn't write; also for meta parameters.
    """

    def write() -> None:
        if safe_serialization and (removed := shared_names(state_dict)):
            _warn_removed(tuple(removed))
        with staged_files(Path(save_directory)) as (_, create):
            write_weights(create, state_dict, safe_serialization=safe_serialization, max_shard_size=max_shard_size)

    what = f"save the model to {save_directory}"
    if not on_each_node or (world is not None and world.members is not None):  # its ranks are on one machine
        write_on_main(world, "save_model", str(save_directory), write, what, moment=moment)
        return
    ranks = Ranks(world)
    with ranks.fail_together(what):
        if ranks.is_local_main:
            write()


@contextmanager
def staged_files(folder: Path) -> Iterator[tuple[Path, Create]]:
    """Enter a context with a staging folder and a function that creates files there; then move them into ``folder``.

    If weights are among them, older weights are removed. Readers find the new ones only when all are there.

    Raises:
        CheckpointError: ``folder`` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: weights are saved into a folder")
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".tmp-{uuid4().hex}"
    staging.mkdir()
    try:
        yield staging, StagingDirectory(staging, True, Ranks()).create
        written = sorted(path.name for path in staging.iterdir())  # an index comes after the shards that it names
        if any(_is_weights(name, 0) for name in written):
            for name in stale_weights(folder, 0, written):
                (folder / name).unlink()
        for name in written:
            fsync_path(staging / name)
            os.replace(staging / name, folder / name)
        fsync_path(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_weights(name: str, index: int) -> bool:
    return any(WeightNames.of(index, safe=safe).owns(name) for safe in (True, False))


def stale_weights(folder: Path, index: int, written: list[str]) -> list[str]:
    """Return the weight files of the model at ``index`` in ``folder`` that aren't among the ones just written."""
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name not in written and _is_weights(name, index)]


# --------------------------------------------------------------------------------------------------- loading


@final
class WeightFiles:
    """The weights of one model in open files, read lazily."""

    def __init__(self, files: dict[str, Path], tensors: Callable[[str], torch.Tensor], keys: list[str]) -> None:
        self.files = files
        self._tensors = tensors
        self.keys = keys

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name; safetensors files are memory-mapped, so copy tensors before the files change."""
        return {key: self._tensors(key) for key in self.keys}


@contextmanager
def open_weights(
    folder: str | PathLike[str],
    index: int = 0,
    *,
    map_location: MAP_LOCATION = "cpu",
    **pickle_options: Any,
) -> Iterator[WeightFiles]:
    """Enter a context with the open weights of the model at ``index`` in ``folder``, which may be a file.

    Safetensors are preferred to pickles, a single file to shards.

    Raises:
        CheckpointNotFound: there are no weight files.
        CheckpointError: they are incomplete, or reading them could run code.
    """
    found = _find(Path(folder), index)
    with ExitStack() as stack:
        where: dict[str, Callable[[str], torch.Tensor]] = {}
        for path in found:
            if path.suffix == ".safetensors":
                opened: TensorFile = stack.enter_context(open_tensors(path))
                where.update(dict.fromkeys(opened.keys(), opened.mapped))
            else:
                state: dict[str, torch.Tensor] = read_pickle(path, map_location=map_location, **pickle_options)
                where.update(dict.fromkeys(state, state.__getitem__))
        files = {path.name: path for path in found}
        yield WeightFiles(files, lambda key: where[key](key), list(where))


def holds_weights(folder: Path, index: int = 0) -> bool:
    """Return whether ``folder`` has a single weight file or an index of the model at ``index``."""
    names = [WeightNames.of(index, safe=safe) for safe in (True, False)]
    return any((folder / name).is_file() for one in names for name in (one.whole, one.index))


def _find(folder: Path, index: int) -> list[Path]:
    if folder.is_file():
        return shards_of(folder) if folder.name.endswith(".index.json") else [folder]
    tried: list[str] = []
    for safe in (True, False):
        names = WeightNames.of(index, safe=safe)
        if (folder / names.whole).is_file():
            return [folder / names.whole]
        if (folder / names.index).is_file():
            return shards_of(folder / names.index)
        tried += [names.whole, names.index]
    raise CheckpointNotFound(f"no weights in {folder}: looked for {', '.join(tried)}")


def shards_of(index: Path) -> list[Path]:
    """Return the files that ``index`` names under ``weight_map``, or as a whole if it has no such entry.

    Raises:
        CheckpointError: it can't be read, or shards are missing.
    """
    try:
        content = json.loads(index.read_bytes())
        names = set(content.get("weight_map", content).values())
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of weights ({type(error).__name__}: {error})") from error
    shards = sorted(inside(index.parent, name, index) for name in names)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}. Copy or download them "
            "again."
        )
    return shards


class LoadTarget(Protocol):
    """A target to load full weights into: a module, or an object that shards them for a module."""

    def state_dict(self, *, keep_vars: bool) -> StateDict:
        """Return the live tensors by name."""
        ...

    @property
    def load_state_dict(self) -> Callable[..., Any]:
        """Load a state dict, ``load_state_dict(state, strict=True)``; a module's own takes ``assign`` too."""
        ...


def loader_of(
    model: LoadTarget,
    state: StateDict,
    source: str,
    *,
    strict: bool = True,
    may_lack: Callable[[str], bool] | None = None,
    **load_state_dict_options: Any,
) -> Callable[[], object]:
    """Return a function that loads ``state``, read from ``source``, into ``model``.

    A tied name that ``state`` leaves out is loaded too, if the model ties it as well. ``may_lack(name)`` is true for
    weights that were left out on purpose: the model keeps its own.

    Raises:
        CheckpointError: the weights don't fit the model, which is unchanged.
    """
    own = model.state_dict(keep_vars=True)
    ties = shared_names(own)
    state |= {first: state[name] for name, first in ties.items() if name in state and first not in state}
    state |= {name: state[first] for name, first in ties.items() if first in state and name not in state}
    if may_lack is not None:
        state |= {name: value for name, value in own.items() if name not in state and may_lack(name)}

    def load() -> object:
        loaded = state
        if load_state_dict_options.get("assign"):  # not tensors that are memory-mapped from files
            loaded = {name: value.clone() for name, value in state.items()}
        loaded = load_statistics(model, loaded)
        with _misfit(source):
            return model.load_state_dict(loaded, strict=strict, **load_state_dict_options)

    with _misfit(source):
        if isinstance(model, torch.nn.Module):
            check_module(model, state, strict=strict)
        else:
            require_fit(own, state, strict=strict)
    return load


@contextmanager
def _misfit(source: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"{source} doesn't fit the model: {error}") from error


# ------------------------------------------------------------- selections: some weights, another dtype, models only

#: Prefixes in parameter names that identify the weights of adapter libraries.
ADAPTER_PREFIXES: Final = (
    *("lora_", "adapter_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_lambda_", "randlora_", "fourierft_"),
    *("hra_", "bone_", "prompt_encoder", "prompt_embeddings", "prefix_", "modules_to_save", "trainable_tokens_"),
)


@dataclass(frozen=True)
@final
class Selection:
    """The state that ``save_state`` and ``save_model`` leave out, and the dtype of the saved weights.

    Attributes:
        exclude: weights whose names match one of these patterns (``"*.bias"``, ``"teacher.*"``) are left out.
        dtype: floating-point weights are saved in this precision (``"bfloat16"``).
        adapters_only: save only the weights that adapter libraries add.
        model_only: leave out optimizers, schedulers, loaders, random streams and registered objects.
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
        """Return whether the weight ``name`` is saved."""
        if self.adapters_only and not is_adapter(name):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def leaves_out(self, name: str) -> bool:
        """Return whether the weight ``name`` is left out."""
        return not self.holds(name)

    def of(self, state: Mapping[str, object]) -> StateDict:
        """Return the selected weights of a state dict; the argument is unchanged.

        Raises:
            CheckpointError: no weights are left.
        """
        if not self.exclude and not self.adapters_only and self.dtype is None:
            return dict(state)
        chosen = {name: value for name, value in state.items() if self.holds(name)}
        if state and not chosen:
            raise CheckpointError(
                f"{self} leaves none of the {len(state)} weights of the model (the first is {next(iter(state))!r})"
            )
        first = shared_names(chosen)  # tied weights stay tied
        # Packed bits in a floating-point tensor, and their statistics, must not be converted.
        packed = {name for name in chosen if is_statistic(name)}
        packed |= {f"{name.rpartition('.weight.')[0]}.weight" for name in packed}
        converted = {
            name: value if name in packed else self._converted(value)
            for name, value in chosen.items()
            if name not in first
        }
        return {name: converted[first.get(name, name)] for name in chosen}

    def _converted(self, value: object) -> object:
        if isinstance(self.dtype, torch.dtype) and isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().to(self.dtype)
        return value

    def to_details(self) -> dict[str, object]:
        """Return the fields that differ from the defaults, as a manifest records them."""
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        fields = {**vars(self), "exclude": list(self.exclude), "dtype": dtype}
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> Selection:
        """Return the selection recorded in a manifest; the default one if it records none."""
        return cls(**details.get("selection", {}))


EVERYTHING: Final = Selection()


def is_adapter(name: str) -> bool:
    """Return whether the weight ``name`` belongs to an adapter."""
    return any(part.startswith(ADAPTER_PREFIXES) for part in name.split("."))


def _dtype_of(name: str) -> torch.dtype:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    dtype = vars(torch).get(short.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise SettingError(f"Selection(dtype={name!r}): no such dtype; expected one such as 'bfloat16' or 'float16'.")
    return dtype


# ---------------------------------------------------------- export for `from_pretrained` of transformers and PEFT
#
# A folder of transformers has ``config.json`` and ``model.safetensors`` (or shards and their index). A folder of PEFT
# has ``adapter_config.json`` and ``adapter_model.safetensors``, without the adapter's name in the weights' names. A
# model with ``save_pretrained`` writes itself, because its names on disk may differ.

ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
_CONFIGS: Final = (("config", "config.json"), ("generation_config", "generation_config.json"))


def export_model(
    model: torch.nn.Module,
    state_dict: Mapping[str, object],
    save_directory: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    select: Selection | None = None,
    world: World | None = None,
    moment: str = "",
) -> None:
    """Write a folder that ``from_pretrained`` can load; it is complete when any rank returns.

    With ``Selection(adapters_only=True)`` it has the adapter of a PEFT model, else the whole model. Call it on all
    ranks, or on the main process alone; ``moment`` tells apart calls that are made from the same line.

    Raises:
        CheckpointError: on every rank, if the main process couldn't write; also for a model without configuration.
    """
    select = select or EVERYTHING

    def write() -> None:
        with staged_files(Path(save_directory)) as (staging, create):
            if select.adapters_only:
                _write_adapters(model, state_dict, select, create)
            elif callable(save_pretrained := getattr(model, "save_pretrained", None)):
                # without a state dict, it would write the model's own tensors, which may be sharded
                chosen = dict(select.of(state_dict))
                save_pretrained(str(staging), state_dict=chosen, max_shard_size=max_shard_size)
            else:
                _write_configs(model, create)
                write_weights(create, select.of(state_dict), max_shard_size=max_shard_size)

    what = f"export the model to {save_directory}"
    write_on_main(world, "export_model", str(save_directory), write, what, moment=moment)


def _write_configs(model: object, create: Create) -> None:
    found = {name: _as_dict(getattr(model, attribute, None)) for attribute, name in _CONFIGS}
    if found["config.json"] is None:
        raise CheckpointError(
            f"{type(model).__qualname__} has no `config` to write as config.json, and from_pretrained needs that file. "
            "save_model() writes the weights alone."
        )
    for name, content in found.items():
        if content is not None:
            _write_json(create, name, content)


def _as_dict(config: object) -> dict[str, object] | None:
    to_dict: Callable[[], Any] | None = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    return dict(config) if isinstance(config, Mapping) else None


def _write_json(create: Create, name: str, content: Mapping[str, object]) -> None:
    with create(name) as file:
        file.write((json.dumps(content, indent=2, sort_keys=True, default=_plain) + "\n").encode())


def _plain(value: object) -> object:
    """Convert values of foreign configurations that JSON can't hold: sets, enum members, dtypes."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", None) or str(value).removeprefix("torch.")


def _adapter_of(model: object) -> tuple[str, dict[str, object]]:
    """Return the name of a model's active adapter, and its configuration."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        raise CheckpointError(f"{type(model).__qualname__} has no `peft_config`: it is no model with PEFT adapters")
    name = getattr(model, "active_adapter", None)
    name = name if isinstance(name, str) and name in configs else next(iter(configs))
    content = _as_dict(configs[name])
    if content is None:
        raise CheckpointError(f"the configuration of adapter {name!r} can't be written ({type(configs[name])})")
    return name, content


def adapter_names(model: object, names: Iterable[str]) -> dict[str, str]:
    """Map the ``names`` that the active adapter of ``model`` adds to their names in PEFT's file.

    Raises:
        CheckpointError: there are none.
    """
    adapter, _ = _adapter_of(model)
    own = [name for name in names if is_adapter(name) and f".{adapter}" in name]
    if not own:
        raise CheckpointError(f"the model holds no weights of adapter {adapter!r}")
    return {name: name.replace(f".{adapter}", "").replace("modules_to_save.", "") for name in own}


def _write_adapters(model: object, state_dict: Mapping[str, object], select: Selection, create: Create) -> None:
    _, content = _adapter_of(model)
    selected = select.of(state_dict)
    named = {short: selected[name] for name, short in adapter_names(model, selected).items()}
    with create(ADAPTER_WEIGHTS_NAME) as file:
        write_tensors(file, clean_state_dict_for_safetensors(named), {"format": "pt"})
    _write_json(create, ADAPTER_CONFIG_NAME, {**content, "inference_mode": True})
