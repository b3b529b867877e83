"""A configuration file that can't be read ends in a message with file, line and reason, never in a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.to_fsdp2 import to_fsdp2_command_parser
from accelerate.errors import SettingError
from accelerate.settings.document import read_layer, read_whole_layer

#: By name: a document, and the part of the message with its line and its reason.
MALFORMED: dict[str, tuple[str, str]] = {
    "list": ("- num_processes: 2\n- a: {b: [c]}\n", ":1: a configuration file holds keys and values, not a list"),
    "text": ("num_processes\n", ":1: a configuration file holds keys and values, not 'num_processes'"),
    "number": ("\n3\n", ":2: a configuration file holds keys and values, not '3'"),
    "alias to itself": ("a: &x\n  b: *x\n", ":2: `b` is an alias to a value that contains it"),
    "list with itself": ("machine_rank: &x [1, *x]\n", ":1: `machine_rank` is an alias to a value that contains it"),
    "whole document": ("&x\na: 1\nb: *x\n", ":3: `b` is an alias to a value that contains it"),
    "list as key": ("? [a, b]\n: 1\n", ":1: a key has to be text, not a list"),
    "mapping as key": ("num_machines: 1\n? {a: b}\n: 1\n", ":2: a key has to be text, not a mapping"),
    "merge of a number": ("<<: 3\n", ":1: this is not YAML: expected a mapping or list of mappings"),
    "merge of itself": ("&x\n<<: *x\n", ":2: `<<` is an alias to a value that contains it"),
    "unknown alias": ("a: *x\n", ":1: "),
    "unknown tag": ("a: !!python/object:os.system 1\n", ":1: "),
    "tag of another type": ("a: 1\nnum_machines: !!int many\n", ":2: "),
    "date": ("num_machines: 2020-13-45\n", ":1: "),
    "two documents": ("a: 1\n---\nb: 2\n", ":2: "),
    "tab": ("a:\n\tb: 1\n", ":2: "),
    "control character": ("a: \x00\n", ":1: "),
    "deep": ("[" * 1000 + "\n", "nested too deeply"),
    "json list": ("[1, 2]\n", ":1: a configuration file holds keys and values, not a list"),
    "json of depth": ('{"a": ' + "[" * 100_000, "nested too deeply"),
}


def message_of(text: str, tmp_path: Path, name: str = "config.yaml") -> str | None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    try:
        read_layer(path)
    except SettingError as error:
        assert str(path) in str(error) and "Node(" not in str(error), error
        return str(error)
    return None


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_with_its_line_and_reason(tmp_path: Path, name: str) -> None:
    text, expected = MALFORMED[name]
    assert expected in (message_of(text, tmp_path) or "")


@pytest.mark.parametrize("name", MALFORMED)
def test_every_reader_of_configuration_files_refuses_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MALFORMED[name][0], encoding="utf-8")
    convert = to_fsdp2_command_parser().parse_args(["--config_file", str(path), "--overwrite"])
    for read in (read_whole_layer, load_config_from_file, lambda _: convert.func(convert)):
        with pytest.raises(SettingError, match=r"config\.yaml"):
            read(str(path))


def test_a_merge_key_takes_the_keys_of_another_section(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "fsdp_config: &shared\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
        "fp8_config: {}\n<<: {num_machines: 2, num_processes: 8}\nnum_processes: 4\n"
    )
    layer = read_layer(path)
    assert layer["launch.num_processes"][0] == 4 and layer["launch.num_machines"][0] == 2
    assert layer["launch.num_processes"][1].where == f"{path}:6"


PARTS = [
    *("a", "num_processes", "fsdp_config:\n ", ": ", ":", "- ", "? ", "&x ", "*x", "<<: ", "\n", "\n ", "---\n", "..."),
    *("[", "]", "{", "}", ", ", "! ", "!!set ", "!!int ", "!!timestamp ", "!!bool ", "'", '"', "|", ">", "#", "%"),
    *("\t", "\x07", "1", "null", "é"),
]  # fmt: skip


def test_no_text_ends_in_anything_but_a_message(tmp_path: Path) -> None:
    draw = random.Random(0)
    for name in ("config.yaml", "config.json"):
        for _ in range(400):
            text = "".join(draw.choices(PARTS, k=draw.randint(1, 14)))
            try:
                message_of(text, tmp_path, name)
            except Exception as error:
                raise AssertionError(f"{name}: {text!r}") from error


def test_no_value_of_json_ends_in_anything_but_a_message(tmp_path: Path) -> None:
    values: list[Any] = [None, True, 3, 1.5, "text", [], [1], {}, {"a": [{}]}, [[]], {"a": {"b": None}}]
    for value in values:
        for document in (value, {"num_processes": value}, {"fsdp_config": value}, {"fsdp_config": {"a": value}}):
            message_of(json.dumps(document), tmp_path, "config.json")
