"""Reading configuration files of all releases: values of options, each with its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from ..errors import SettingError
from .option import OptionInfo, Source, nearest, options_of, parse_bool
from .tree import GROUPS, ROWS, Layer

#: Keys that older releases wrote and that have no effect any more, each with its replacement.
OLD_KEYS: Final[dict[str, str]] = {
    "use_mps_device": "an Apple device is found by itself",
    "use_xpu": "an Intel device is found by itself",
    "use_ipex": "torch does without it",
    "ipex_config": "torch does without it",
    "mpirun_config.mpirun_ccl": "the backend is gloo or MPI",
    "tp_config": "tensor parallelism is `parallelism_config_tp_size` in `parallelism_config`",
}
#: By section whose unknown keys are kept for another program: the option that lists the keys that a file has of ours.
_KEYS_OF_FILE: Final = {row.options.option_group.section: row.keys_of_file for row in ROWS if row.keys_of_file}
#: The entry of a layer that holds the unknown keys.
FOREIGN: Final = "foreign"
#: The entry of a layer that holds the warnings about keys without effect.
WARNINGS: Final = "remarks"


class ConfigFileNotFound(SettingError, FileNotFoundError):
    """The error that there is no configuration file at the given path."""


@dataclass(frozen=True)
class Entry:
    """One key of a file, with its value (for a section: its entries) and its location, "path:line"."""

    key: str
    value: Any
    location: str


def read_layer(path: str | Path) -> Layer:
    """Read a configuration file as a layer, each value with its line. Raises SettingError with file and line."""
    return layer_of(read_entries(path), str(path))


def read_whole_layer(path: str | Path) -> Layer:
    """Read a configuration file that `accelerate config` or a user has finished.

    Raises:
        SettingError: as `read_layer`; also where `distributed_type` is missing, which every release writes.
    """
    entries = read_entries(path)
    layer = layer_of(entries, str(path))
    if not any(address.endswith(".distributed_type") for address in layer):
        raise SettingError(
            f"{entries[-1].location}: the configuration ends here without `distributed_type`, which each has to have: "
            "was it cut off? Add it, such as `distributed_type: 'NO'`, or write the file anew with `accelerate config`."
        )
    return layer


def layer_of_mapping(document: Mapping[str, object], where: str) -> Layer:
    """Convert the content of a configuration file that isn't in a file (yet) to a layer."""
    return layer_of(_mapping_entries(document, lambda _: where), where)


def layer_of(entries: list[Entry], where: str) -> Layer:
    """Convert the keys of one file to a layer, by "group.option"."""
    is_sagemaker = any(entry.key == "compute_environment" and entry.value == "AMAZON_SAGEMAKER" for entry in entries)
    return _Reader(where, is_sagemaker).layer(entries)


def read_entries(path: str | Path) -> list[Entry]:
    """Read the keys of a configuration file, in order."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigFileNotFound(
            f"There is no configuration file {path}. Create one with `accelerate config --config_file {path}`, "
            "or name one that exists."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"The configuration file {path} can't be read: {error}") from error
    try:
        entries = _entries(path, text)
    except RecursionError:
        raise SettingError(f"{path}: the configuration file is nested too deeply. {_anew(path)}") from None
    if not entries:
        raise SettingError(
            f"{path}:{max(1, len(text.splitlines()))}: the configuration file is empty. Write it anew with "
            f"`accelerate config --config_file {path}`, or leave it out."
        )
    return entries


def options_with_groups() -> Iterator[tuple[str, OptionInfo]]:
    """Yield all options of all groups, with the group's name."""
    for group, cls in GROUPS.items():
        for option in options_of(cls):
            yield group, option


def without_locations(value: object) -> Any:
    """Return the value as plain dicts and lists, without the locations of its keys."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if items and all(isinstance(item, Entry) for item in items):
            return {item.key: without_locations(item.value) for item in items}
        return [without_locations(item) for item in items]
    return value


# ------------------------------------------------------------------------------------------------ keys to options


class _Reader:
    """A converter of the entries of one file to values of options."""

    def __init__(self, where: str, is_sagemaker: bool) -> None:
        self.where = where
        self.known: dict[str | None, dict[str, tuple[str, OptionInfo]]] = {None: {}}
        # in the file of a SageMaker job, keys that both kinds of file have are the job's
        rows = sorted(options_with_groups(), key=lambda row: row[0] != "sagemaker")
        for group, option in rows:
            if option.key is None or (group == "sagemaker" and not is_sagemaker):
                continue
            section = self.known.setdefault(option.section, {})
            for spelling in _spellings(group, option):
                section.setdefault(spelling, (group, option))
        self.known[None].setdefault("dynamo_backend", self.known["dynamo_config"]["dynamo_backend"])

    def layer(self, entries: Iterable[Entry]) -> Layer:
        """Return all values of the file, by "group.option"."""
        values: dict[str, tuple[object, Source]] = {}
        foreign: dict[str, dict[str, object]] = {}
        taken: dict[str, list[str]] = {}
        unused: list[str] = []
        for entry in entries:
            if entry.key == "fp16":
                self._read_fp16(entry, values)
            elif entry.key in OLD_KEYS:
                unused.append(f"`{entry.key}` ({entry.location}): {OLD_KEYS[entry.key]}")
            elif entry.key in self.known:
                for inner in _section(entry):
                    if self._take(inner, entry.key, values):
                        taken.setdefault(entry.key, []).append(inner.key)
                        continue
                    unused += self._warnings_of(inner, entry.key)
                    if entry.key in _KEYS_OF_FILE:
                        foreign.setdefault(entry.key, {})[inner.key] = without_locations(inner.value)
            else:
                self._take(entry, None, values)
        if unused:
            values[WARNINGS] = (unused, Source("file", self.where))
        if foreign:
            values[FOREIGN] = (foreign, Source("file", self.where))
        for section, address in _KEYS_OF_FILE.items():
            if section in taken:
                values[address] = (sorted(taken[section]), Source("file", self.where))
        return values

    def _take(self, entry: Entry, section: str | None, values: dict[str, tuple[object, Source]]) -> bool:
        """Put the entry's value into `values`; return False when no option of its section has the key."""
        found = self.known[section].get(entry.key)
        if found is None:
            if section is not None:
                return False
            raise self._unknown_key_error(entry)
        group, option = found
        source = Source("file", entry.location)
        value = option.read(without_locations(entry.value), source)
        if value is not None and not (isinstance(value, (list, dict)) and not value):
            values[f"{group}.{option.name}"] = (value, source)
        return True

    def _read_fp16(self, entry: Entry, values: dict[str, tuple[object, Source]]) -> None:
        """Read `fp16: true`, with which old files ask for mixed precision."""
        try:
            wanted = parse_bool(entry.value)
        except ValueError:
            raise SettingError(
                f"{entry.location}: `fp16` has to be true or false, not {without_locations(entry.value)!r}."
            ) from None
        values.setdefault("run.mixed_precision", ("fp16" if wanted else "no", Source("file", entry.location)))

    def _warnings_of(self, entry: Entry, section: str) -> list[str]:
        """Explain a section's unknown key; return [] if it may belong to another program.

        Sections of all releases hold such keys, and the launches went on.

        Raises:
            SettingError: the key is a misspelt one, or that of another section: its value would be lost.
        """
        name = f"{section}.{entry.key}"
        if name in OLD_KEYS:
            return [f"`{name}` ({entry.location}): {OLD_KEYS[name]}"]
        hint = self._hint(entry.key, section, self.known[section], 0.85)
        if hint:
            raise SettingError(
                f"{entry.location}: unknown key `{entry.key}` in `{section}`.{hint} Correct or remove it."
            )
        return [] if section in _KEYS_OF_FILE else [f"`{name}` ({entry.location}): no option has this name"]

    def _hint(self, key: str, section: str | None, candidates: Iterable[str], cutoff: float) -> str:
        """Return a sentence about what was probably meant by an unknown key, after a space; empty if there is none."""
        owners = (name for name, keys in self.known.items() if name and name != section and key in keys)
        if (owner := next(owners, None)) is not None:
            return f" It belongs into the section `{owner}`."
        near = nearest(key, candidates, cutoff=cutoff)
        return f" Did you mean `{near}`?" if near else ""

    def _unknown_key_error(self, entry: Entry) -> SettingError:
        """Return the error for an unknown top-level key, which no release wrote."""
        sections = [name for name in self.known if name is not None]
        # all sections end alike, which alone doesn't make one the likely meaning
        cutoff = 0.8 if entry.key.endswith("_config") else 0.6
        hint = self._hint(entry.key, None, [*self.known[None], *sections], cutoff)
        keys = {option.key for _, option in self.known[None].values() if option.key}
        return SettingError(
            f"{entry.location}: unknown key `{entry.key}`.{hint} Correct or remove it; a newer version of "
            f"accelerate may know it. Known keys at the top level: {', '.join(sorted(keys.union(sections)))}."
        )


def _spellings(group: str, option: OptionInfo) -> list[str]:
    """Return the key, its older spellings, and each without and with the prefix of its section."""
    assert option.key is not None
    keys = [option.key, *option.key_aliases]
    prefix = "fp8_" if option.section == "fp8_config" else GROUPS[group].option_group.key
    if prefix:
        keys += [key.removeprefix(prefix) for key in keys] + [prefix + key.removeprefix(prefix) for key in keys]
    return keys


def _section(entry: Entry) -> list[Entry]:
    value: Any = entry.value
    if value is None:
        return []
    inner = cast("list[Any]", value) if isinstance(value, list) else [value]
    if all(isinstance(one, Entry) for one in inner):
        return inner
    raise SettingError(
        f"{entry.location}: `{entry.key}` has to be a section of keys and values, not "
        f"{without_locations(cast('object', value))!r}."
    )


# ------------------------------------------------------------------------------------------------ text to entries


def _entries(path: Path, text: str) -> list[Entry]:
    """Return the keys of the file in order. Raises SettingError when it isn't a file of keys and values."""
    if text.lstrip().startswith("{"):
        try:
            document = cast("dict[str, Any]", json.loads(text))
        except json.JSONDecodeError as error:
            if path.suffix == ".json":
                raise SettingError(f"{path}:{error.lineno}: this is not JSON: {error.msg}. {_anew(path)}") from error
        else:
            lines = text.splitlines()
            return _mapping_entries(document, lambda key: f"{path}:{_line_of(key, lines)}")
    return _yaml_entries(path, text)


def _mapping_entries(document: Mapping[str, object], location: Callable[[str], str]) -> list[Entry]:
    entries: list[Entry] = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            value = _mapping_entries(cast("Mapping[str, object]", value), location) or None
        entries.append(Entry(str(key), value, location(str(key))))
    return entries


def _line_of(key: str, lines: list[str]) -> int:
    """Return the number of the first line that holds the key of a JSON document."""
    quoted = json.dumps(key)
    return next((number for number, line in enumerate(lines, start=1) if quoted in line), 1)


def _anew(path: Path) -> str:
    return f"Correct it, or write the file anew with `accelerate config --config_file {path}`."


def _yaml_entries(path: Path, text: str) -> list[Entry]:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            found = "a list" if isinstance(root, yaml.SequenceNode) else repr(root.value)
            where = f"{path}:{root.start_mark.line + 1}"
            raise SettingError(f"{where}: a configuration file holds keys and values, not {found}. {_anew(path)}")
        _NodeCheck(path, loader).check(root)
        entries = _node_entries(path, loader, root)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingError(f"{path}:{line}: this is not YAML: {error.reason}. {_anew(path)}") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise SettingError(f"{path}{line}: this is not YAML: {error.problem}. {_anew(path)}") from error
    last = _last_of(entries)
    if last is not None and last.value is None and not text.endswith("\n"):
        raise SettingError(f"{last.location}: the configuration file was cut off after `{last.key}:`.")
    return entries


def _last_of(entries: object) -> Entry | None:
    """Return the entry that the text ends with, in whichever section."""
    if not isinstance(entries, list) or not entries or not isinstance(entries[-1], Entry):
        return None
    return _last_of(entries[-1].value) or entries[-1]


class _NodeCheck:
    """A check of the nodes of a YAML document, which puts the keys of a merge (``<<: *x``) in its place."""

    def __init__(self, path: Path, loader: Any) -> None:
        self._path, self._loader = path, loader
        self._checked: set[Any] = set()

    def check(self, node: Any, name: str = "", location: str = "", above: tuple[Any, ...] = ()) -> None:
        """Check the value of the key ``name``, inside of the nodes ``above``.

        Raises:
            SettingError: a value contains itself, or a key isn't text or stands twice.
        """
        if node in above:
            raise SettingError(f"{location}: `{name}` is an alias to a value that contains it. {_anew(self._path)}")
        if node.id == "scalar" or node in self._checked:
            return
        self._checked.add(node)
        if node.id == "sequence":
            for item in node.value:
                self.check(item, name, location, (*above, node))
            return
        own: dict[str, str] = {}
        for key_node, value_node in node.value:
            line = f"{self._path}:{key_node.start_mark.line + 1}"
            if key_node.id != "scalar":
                kind = {"sequence": "list"}.get(key_node.id, key_node.id)
                raise SettingError(f"{line}: a key has to be text, not a {kind}. {_anew(self._path)}")
            key = key_node.value
            if key in own:
                raise SettingError(f"{line}: `{key}` stands here a second time (the first is {own[key]}).")
            own[key] = line
            self.check(value_node, key, line, (*above, node))
        self._loader.flatten_mapping(node)
        node.value = list({key_node.value: (key_node, value_node) for key_node, value_node in node.value}.values())


def _node_entries(path: Path, loader: Any, node: Any) -> list[Entry]:
    entries: list[Entry] = []
    for key_node, value_node in node.value:
        key, location = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if value_node.id == "mapping":
            entries.append(Entry(key, _node_entries(path, loader, value_node) or None, location))
            continue
        try:
            entries.append(Entry(key, loader.construct_object(value_node, deep=True), location))
        except (ValueError, AttributeError, LookupError) as error:  # PyYAML's, for a number or a date that is none
            raise SettingError(f"{location}: the value of `{key}` can't be read: {error}. {_anew(path)}") from error
    return entries
