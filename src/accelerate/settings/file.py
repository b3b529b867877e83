"""Loading and saving settings as YAML and JSON. Files of all releases are read; errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from . import env
from .document import (
    ConfigFileNotFound,
    layer_of,
    layer_of_mapping,
    options_with_groups,
    read_entries,
    without_locations,
)
from .fsdp import ONLY_VERSION_1
from .option import OptionInfo, plain
from .run import collect
from .tree import Settings, option_at

__all__ = ["ConfigFileNotFound", "default_config_file", "load", "parse", "read", "save", "to_document"]

#: Keys that a saved file always has.
ALWAYS_SAVED: Final = (
    "launch.compute_environment",
    "launch.distributed_type",
    "run.mixed_precision",
    "launch.num_processes",
    "launch.num_machines",
    "launch.machine_rank",
    "run.use_cpu",
    "run.debug",
    "launch.rdzv_backend",
    "launch.same_network",
    "launch.main_training_function",
    "run.cpu_affinity",
    "run.downcast_bf16",
)

_ONLY_LOCAL: Final = ("run.downcast_bf16",)


def default_config_file() -> Path:
    """Return the path that `config` saves to and `launch` reads: $HF_HOME/accelerate/default_config.yaml."""
    cache = env.read("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    home = env.read("HF_HOME") or str(Path(cache) / "huggingface")
    folder = Path(home).expanduser() / "accelerate"
    yaml_file, json_file = folder / "default_config.yaml", folder / "default_config.json"
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


def load(path: str | Path) -> Settings:
    """Read the settings that a configuration file describes. Raises SettingError with file and line."""
    return collect({}, {}, file=path)


def parse(document: Mapping[str, object], where: str) -> Settings:
    """Return the settings in the content of a configuration file; `where` names the file in errors."""
    return collect({}, {}, file=layer_of_mapping(document, where))


def read(path: str | Path) -> dict[str, Any]:
    """Read the content of a configuration file as it is; unknown keys and values are refused."""
    entries = read_entries(path)
    layer_of(entries, str(path))
    return {entry.key: without_locations(entry.value) for entry in entries}


def save(settings: Settings, path: str | Path) -> None:
    """Save the settings to a file that `load` reads back."""
    path = Path(path)
    document = to_document(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return
    import yaml

    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def to_document(settings: Settings) -> dict[str, Any]:
    """Return the content of a file of these settings: no Nones, no empty sections, no secrets."""
    document: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    addresses = list(ALWAYS_SAVED)
    addresses += [f"{group}.{option.name}" for group, option in options_with_groups() if option.key is not None]
    for address in dict.fromkeys(addresses):
        options, option = getattr(settings, address.partition(".")[0]), option_at(address)
        if options is None or option.secret or option.key is None or _is_left_out(settings, address):
            continue
        value = _plain(getattr(options, option.name))
        if option.kind == "list" and option.env and value:
            value = option.write(value)  # a list that may come from a variable is text in files too
        is_default = value == _plain(_default(settings, option)) and not settings.was_given(address)
        if value is None or value in ([], {}, "") or (is_default and address not in ALWAYS_SAVED):
            continue
        target = document if option.section is None else sections.setdefault(option.section, {})
        target.setdefault(option.key, value)
    for section, keys in settings.foreign.items():
        sections.setdefault(section, {}).update(keys)
    return {**document, **sections}


def _default(settings: Settings, option: OptionInfo) -> object:
    """Return the value that loading gives when the file doesn't have the option."""
    fsdp = settings.fsdp
    if fsdp is not None and fsdp.fsdp_version == 2 and option.name in ONLY_VERSION_1:
        return option.default
    if fsdp is not None and fsdp.fsdp_version == 1 and option.name == "reshard_after_forward":
        return option.default
    return option.launched


def _is_left_out(settings: Settings, address: str) -> bool:
    """Return whether the file of a SageMaker job doesn't have the key, or has it for the job."""
    if settings.sagemaker is None:
        return False
    return address in _ONLY_LOCAL or (address.startswith("launch.") and address != "launch.compute_environment")


def _plain(value: object) -> object:
    """Convert the value for YAML: enums by value, tuples as lists."""
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else plain(value)
