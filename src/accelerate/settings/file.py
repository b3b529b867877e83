"""YAML and JSON <-> Settings. Files of every age are read; errors say file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from accelerate.errors import SettingError
from accelerate.settings import env
from accelerate.settings.fsdp import ONLY_VERSION_1
from accelerate.settings.option import OptionInfo, Source, nearest, options_of, truth
from accelerate.settings.run import collect
from accelerate.settings.tree import GROUPS, Layer, Settings

#: Keys of older versions that have no meaning any more.
FORGOTTEN_KEYS: Final = ("use_mps_device", "use_xpu", "ipex_config", "use_ipex")
#: Sections whose unknown keys are kept and passed over, because another program knows them.
TOLERANT_SECTIONS: Final = ("deepspeed_config",)
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
_FOREIGN: Final = "foreign"


class ConfigFileNotFound(SettingError, FileNotFoundError):
    """No configuration file lies where one was named."""


@dataclass(frozen=True)
class _Entry:
    """One key of a file, with its value and its line."""

    key: str
    value: Any
    line: int


def default_config_file() -> Path:
    """Where `config` saves and `launch` looks: $HF_HOME/accelerate/default_config.yaml."""
    cache = env.read("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    home = env.read("HF_HOME") or str(Path(cache) / "huggingface")
    folder = Path(home).expanduser() / "accelerate"
    yaml_file, json_file = folder / "default_config.yaml", folder / "default_config.json"
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


def load(path: str | Path) -> Settings:
    """The settings that a configuration file describes. Raises SettingError with file and line."""
    return collect({}, {}, file=read(path))


def read(path: str | Path) -> Layer:
    """What a configuration file gives, each value with its line; for `collect(file=...)`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigFileNotFound(
            f"There is no configuration file {path}. Create one with `accelerate config --config_file "
            f"{path}`, "
            "or name one that exists."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"The configuration file {path} can't be read: {error}") from error
    return _Reader(path, _is_sagemaker(text)).layer(_entries(path, text))


def save(settings: Settings, path: str | Path) -> None:
    """The file describes the settings; `load` gives them back."""
    path = Path(path)
    document = to_document(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return
    import yaml

    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def to_document(settings: Settings) -> dict[str, Any]:
    """What a file of these settings holds: no Nones, no empty sections, no secrets."""
    document: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    addresses = list(ALWAYS_SAVED)
    addresses += [f"{group}.{option.name}" for group, option in _options() if option.key is not None]
    for address in dict.fromkeys(addresses):
        group, _, name = address.partition(".")
        options = getattr(settings, group)
        option = next(option for option in options_of(GROUPS[group]) if option.name == name)
        if options is None or option.secret or option.key is None or _hidden(settings, address):
            continue
        value = _plain(getattr(options, name))
        is_default = value == _plain(_default(settings, option)) and not settings.was_given(address)
        if value is None or value in ([], {}, "") or (is_default and address not in ALWAYS_SAVED):
            continue
        target = document if option.section is None else sections.setdefault(option.section, {})
        target.setdefault(option.key, value)
    if settings.foreign:
        sections.setdefault("deepspeed_config", {}).update(settings.foreign)
    return {**document, **sections}


def _default(settings: Settings, option: OptionInfo) -> Any:
    """What loading gives when the file says nothing."""
    fsdp = settings.fsdp
    if fsdp is not None and fsdp.fsdp_version == 2 and option.name in ONLY_VERSION_1:
        return option.default
    if fsdp is not None and fsdp.fsdp_version == 1 and option.name == "reshard_after_forward":
        return option.default
    return option.launched


def _hidden(settings: Settings, address: str) -> bool:
    """Keys that mean something else in a file of the other kind."""
    shared = ("num_machines", "gpu_ids", "distributed_type")
    return settings.sagemaker is not None and address in {f"launch.{name}" for name in shared}


def _plain(value: Any) -> Any:
    """The value as YAML can hold it: enums by value, tuples as lists."""
    if hasattr(value, "value") and hasattr(value, "name"):
        return value.value if isinstance(value.value, str) else value.name
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value


def _options() -> Iterator[tuple[str, OptionInfo]]:
    for group, cls in GROUPS.items():
        for option in options_of(cls):
            yield group, option


def _is_sagemaker(text: str) -> bool:
    return (
        re.search(r"^[\s{\"']*compute_environment[\"']?\s*:\s*[\"']?AMAZON_SAGEMAKER", text, re.MULTILINE) is not None
    )


# Keys to options


class _Reader:
    """Turns the entries of one file into values of options."""

    def __init__(self, path: Path, is_sagemaker: bool) -> None:
        self.path = path
        self.known: dict[str | None, dict[str, tuple[str, OptionInfo]]] = {None: {}}
        first, second = (_options(), iter(())) if not is_sagemaker else (_sagemaker_options(), _options())
        for group, option in (*first, *second):
            if option.key is None or (group == "sagemaker" and not is_sagemaker):
                continue
            section = self.known.setdefault(option.section, {})
            prefix = GROUPS[group].option_group.key or ""
            bare = option.key.removeprefix(prefix).removeprefix("fp8_")
            for spelling in (option.key, *option.key_aliases, bare, *self._prefixed(option)):
                section.setdefault(spelling, (group, option))
        self.known[None].setdefault("dynamo_backend", self.known["dynamo_config"]["dynamo_backend"])

    @staticmethod
    def _prefixed(option: OptionInfo) -> tuple[str, ...]:
        if option.section != "fp8_config":
            return ()
        return tuple(f"fp8_{key}" for key in (option.key, *option.key_aliases))

    def layer(self, entries: list[_Entry]) -> Layer:
        """Every value of the file, by "group.option"."""
        values: dict[str, tuple[Any, Source]] = {}
        foreign: dict[str, Any] = {}
        for entry in entries:
            if entry.key == "fp16":
                self._read_fp16(entry, values)
            elif entry.key in self.known:
                for inner in self._section(entry):
                    if not self._take(inner, entry.key, values):
                        foreign[inner.key] = inner.value
            elif entry.key not in FORGOTTEN_KEYS:
                self._take(entry, None, values)
        if foreign:
            values[_FOREIGN] = (foreign, Source("file", str(self.path)))
        ours = [entry.key for entry in self._deepspeed(entries) if entry.key not in foreign]
        if ours:
            values["deepspeed_launch.config_fields"] = (ours, Source("file", str(self.path)))
        return values

    def _deepspeed(self, entries: list[_Entry]) -> list[_Entry]:
        return [inner for entry in entries if entry.key == "deepspeed_config" for inner in self._section(entry)]

    def _section(self, entry: _Entry) -> list[_Entry]:
        if entry.value is None:
            return []
        inner = cast("list[Any]", entry.value) if isinstance(entry.value, list) else [entry.value]
        if all(isinstance(one, _Entry) for one in inner):
            return inner
        raise SettingError(
            f"{self.path}:{entry.line}: `{entry.key}` has to be a section of keys and values, "
            f"not {_bare(cast('Any', entry.value))!r}."
        )

    def _take(self, entry: _Entry, section: str | None, values: dict[str, tuple[Any, Source]]) -> bool:
        """The entry's value stands in `values`; False when the key is another program's."""
        found = self.known[section].get(entry.key)
        if found is None:
            if section in TOLERANT_SECTIONS:
                return False
            raise self._unknown(entry, section)
        group, option = found
        source = Source("file", f"{self.path}:{entry.line}")
        value = option.read(_bare(entry.value), source)
        if value is not None and not (isinstance(value, (list, dict)) and not value):
            values[f"{group}.{option.name}"] = (value, source)
        return True

    def _read_fp16(self, entry: _Entry, values: dict[str, tuple[Any, Source]]) -> None:
        """`fp16: true` is how old files ask for mixed precision."""
        source = Source("file", f"{self.path}:{entry.line}")
        try:
            wanted = truth(entry.value)
        except ValueError:
            raise SettingError(f"{source.where}: `fp16` has to be true or false, not {_bare(entry.value)!r}.") from None
        values.setdefault("run.mixed_precision", ("fp16" if wanted else "no", source))

    def _unknown(self, entry: _Entry, section: str | None) -> SettingError:
        names = list(self.known[section])
        if section is None:
            names += [name for name in self.known if name is not None]
        near = nearest(entry.key, names)
        place = f" in `{section}`" if section else ""
        message = f"{self.path}:{entry.line}: unknown key `{entry.key}`{place}."
        if near is not None:
            message += f" Did you mean `{near}`?"
        elsewhere = next(
            (name for name, keys in self.known.items() if name and name != section and entry.key in keys),
            None,
        )
        if near is None and elsewhere is not None:
            message += f" It belongs into the section `{elsewhere}`."
        legal = ", ".join(sorted({option.key for _, option in self.known[section].values() if option.key}))
        return SettingError(f"{message} Correct or remove it. Known keys{place or ' at the top level'}: {legal}.")


def _sagemaker_options() -> Iterator[tuple[str, OptionInfo]]:
    return ((group, option) for group, option in _options() if group == "sagemaker")


def _bare(value: Any) -> Any:
    """The value without line numbers."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if items and all(isinstance(item, _Entry) for item in items):
            return {item.key: _bare(item.value) for item in items}
        return [_bare(item) for item in items]
    return value


# Text to entries


def _entries(path: Path, text: str) -> list[_Entry]:
    """The keys of the file in order. Raises SettingError when it isn't a file of keys and values."""
    if text.lstrip().startswith("{"):
        try:
            return _json_entries(json.loads(text), text)
        except json.JSONDecodeError as error:
            if path.suffix == ".json":
                raise SettingError(f"{path}:{error.lineno}: this is not JSON: {error.msg}.") from error
    return _yaml_entries(path, text)


def _json_entries(document: Mapping[str, Any], text: str) -> list[_Entry]:
    entries: list[_Entry] = []
    for key, value in document.items():
        position = max(text.find(json.dumps(key)), 0)
        is_section = isinstance(value, dict)
        inner = _json_entries(cast("Mapping[str, Any]", value), text) or None if is_section else value
        entries.append(_Entry(key, inner, text.count("\n", 0, position) + 1))
    return entries


def _yaml_entries(path: Path, text: str) -> list[_Entry]:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise SettingError(f"{path}:1: a configuration file holds keys and values, not {root.value!r}.")
        return _node_entries(path, loader, root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise SettingError(f"{path}{line}: this is not YAML: {getattr(error, 'problem', error)}.") from error


def _node_entries(path: Path, loader: Any, node: Any) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        key, line = str(loader.construct_object(key_node)), key_node.start_mark.line + 1
        if key in entries:
            raise SettingError(f"{path}:{line}: `{key}` stands here a second time (first in line {entries[key].line}).")
        if value_node.id == "mapping":
            entries[key] = _Entry(key, _node_entries(path, loader, value_node) or None, line)
        else:
            entries[key] = _Entry(key, loader.construct_object(value_node, deep=True), line)
    return list(entries.values())
