"""Weights in the layout that other libraries load: `from_pretrained` of transformers, adapters as PEFT reads them.

A folder of transformers is ``config.json`` beside ``model.safetensors`` (or shards and their index); one of PEFT is
``adapter_config.json`` beside ``adapter_model.safetensors``, whose names don't contain the adapter's own. A model that
can write itself (``save_pretrained``) is asked to: it knows best what its names are on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import CheckpointError
from .agreement import written_by_main
from .draft import Create
from .selection import EVERYTHING, Selection
from .tensor_files import write_tensors
from .weights import clean_state_dict_for_safetensors, new_files, write_weights

if TYPE_CHECKING:
    from ..world import World

ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
_CONFIGS: Final = (("config", "config.json"), ("generation_config", "generation_config.json"))


def export_model(
    model: Any,
    state_dict: Mapping[str, Any],
    save_directory: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    select: Selection | None = None,
    world: World | None = None,
    moment: str = "",
) -> None:
    """``save_directory`` can be loaded with ``from_pretrained``, on every rank's return.

    With ``Selection(adapters_only=True)`` it holds the adapters of a PEFT model, else the whole model. Called by all
    ranks, or by the main process alone; ``moment`` tells this call from others that are made from the same line.

    Raises:
        CheckpointError: on every rank, when the main process couldn't write; also for a model without configuration.
    """
    select = select or EVERYTHING

    def write() -> None:
        with new_files(Path(save_directory)) as (staging, create):
            if select.adapters_only:
                _write_adapters(model, state_dict, select, create)
            elif callable(getattr(model, "save_pretrained", None)):
                # the model's own tensors would be written where no state dict is given: parts may be sharded
                chosen = dict(select.of(state_dict))
                model.save_pretrained(str(staging), state_dict=chosen, max_shard_size=max_shard_size)
            else:
                _write_configs(model, create)
                write_weights(create, select.of(state_dict), max_shard_size=max_shard_size)

    what = f"export the model to {save_directory}"
    written_by_main(world, "export_model", str(save_directory), write, what, moment=moment)


def _write_configs(model: Any, create: Create) -> None:
    found = {name: _as_dict(getattr(model, attribute, None)) for attribute, name in _CONFIGS}
    if found["config.json"] is None:
        raise CheckpointError(
            f"{type(model).__qualname__} has no `config` that can be written as config.json, which from_pretrained "
            "needs. save_model() writes the weights alone."
        )
    for name, content in found.items():
        if content is not None:
            _write_json(create, name, content)


def _as_dict(config: Any) -> dict[str, Any] | None:
    to_dict: Callable[[], Any] | None = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    return dict(config) if isinstance(config, Mapping) else None


def _write_json(create: Create, name: str, content: dict[str, Any]) -> None:
    with create(name) as file:
        file.write((json.dumps(content, indent=2, sort_keys=True, default=_plain) + "\n").encode())


def _plain(value: Any) -> Any:
    """What JSON has no word for, in configurations of others: sets, enum members, dtypes."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", None) or str(value).removeprefix("torch.")


def _adapter_of(model: Any) -> tuple[str, dict[str, Any]]:
    """The name of a model's active adapter, and its configuration."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        raise CheckpointError(f"{type(model).__qualname__} has no `peft_config`: it is no model with PEFT adapters")
    name = getattr(model, "active_adapter", None)
    name = name if isinstance(name, str) and name in configs else next(iter(configs))
    content = _as_dict(configs[name])
    if content is None:
        raise CheckpointError(f"the configuration of adapter {name!r} can't be written ({type(configs[name])})")
    return name, content


def _write_adapters(model: Any, state_dict: Mapping[str, Any], select: Selection, create: Create) -> None:
    name, content = _adapter_of(model)
    own = {key: value for key, value in select.of(state_dict).items() if f".{name}" in key}
    if not own:
        raise CheckpointError(f"the model holds no weights of adapter {name!r}")
    named = {key.replace(f".{name}", "").replace("modules_to_save.", ""): value for key, value in own.items()}
    with create(ADAPTER_WEIGHTS_NAME) as file:
        write_tensors(file, clean_state_dict_for_safetensors(named), {"format": "pt"})
    _write_json(create, ADAPTER_CONFIG_NAME, {**content, "inference_mode": True})
