"""One declaration gives the environment name, the key, the flags, the reader and the writer."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import pytest

from accelerate.errors import SettingError
from accelerate.settings.option import OptionGroup, Source, nearest, option, option_of, options_of, parse_bool
from accelerate.settings.tree import GROUPS


@dataclass
class Heating(OptionGroup, title="Heating", env="HEAT_", section="heating", key="heat_", flag="heat_"):
    enabled: bool = option(True, "Heat at all.")
    target: int = option(20, "Degrees.", stem="degrees", minimum=5, maximum=30)
    mode: str = option("eco", "How.", choices=("eco", "fast"))
    rooms: list[str] | None = option(None, "Where.", flag="--rooms", env="ROOMS")
    valves: tuple[bool, bool, bool] = option((False, False, False), "Which.", env=("V1", "V2", "V3"))
    plan: Any = option(None, "A callable.", kind="object")
    silent: bool = option(False, "No noise.", env=None, switch=True)
    extra: dict[str, Any] = option(factory=dict, help="More.", env=None)


class Colour(str, Enum):
    RED = "red"


def heating(name: str) -> Any:
    return option_of(Heating, name)


def test_names_are_derived_from_the_field_and_its_group() -> None:
    row = heating("enabled")
    assert (row.env, row.section, row.key, row.flag) == (("HEAT_ENABLED",), "heating", "heat_enabled", "--heat_enabled")
    assert row.flags == ("--heat_enabled", "--heat-enabled")
    assert row.dest == "heat_enabled"


def test_a_stem_takes_the_place_of_the_field_name() -> None:
    row = heating("target")
    assert (row.env, row.key, row.flag) == (("HEAT_DEGREES",), "heat_degrees", "--heat_degrees")


def test_odd_names_are_spelled_at_the_field() -> None:
    assert heating("rooms").flag == "--rooms"
    assert heating("rooms").env == ("ROOMS",)
    assert heating("rooms").key == "heat_rooms"


def test_python_objects_have_no_outside_name() -> None:
    row = heating("plan")
    assert (row.env, row.key, row.flag) == ((), None, None)


def test_what_the_environment_can_give_is_none_until_given_and_complete_after() -> None:
    declared = {field.name: field.default for field in fields(Heating)}
    assert declared["enabled"] is None
    assert declared["silent"] is False
    assert Heating() == Heating(enabled=True, target=20, mode="eco", valves=(False, False, False))
    assert Heating().extra == {} and Heating().extra is not Heating().extra


def test_subclasses_keep_the_options_also_of_redeclared_fields() -> None:
    @dataclass
    class Smart(Heating):
        target: Any = None

    assert options_of(Smart) == options_of(Heating)
    assert Smart().target == 20


@pytest.mark.parametrize("text", ["true", "1", "YES", "On", "y", "T", True])
def test_true_words(text: object) -> None:
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["false", "0", "No", "OFF", "n", "f", False])
def test_false_words(text: object) -> None:
    assert parse_bool(text) is False


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("target", "21", 21),
        ("target", "1e1", 10),
        ("target", 12.0, 12),
        ("mode", "ECO", "eco"),
        ("mode", " fast ", "fast"),
        ("rooms", "a, b,,c", ["a", "b", "c"]),
        ("rooms", ["a"], ["a"]),
        ("valves", "true,no,1", (True, False, True)),
        ("valves", [True, False, False], (True, False, False)),
        ("extra", '{"a": 1}', {"a": 1}),
        ("enabled", "", None),
        ("enabled", None, None),
    ],
)
def test_values_are_read_from_text_and_from_yaml(name: str, raw: object, value: object) -> None:
    assert heating(name).read(raw) == value


def test_enums_are_read_by_value() -> None:
    @dataclass
    class Paint(OptionGroup, env="PAINT_"):
        colour: str = option("red", "Which.", choices=Colour)

    assert option_of(Paint, "colour").read(Colour.RED) == "red"


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("target", "warm"),
        ("target", "20.5"),
        ("target", True),
        ("target", 4),
        ("target", 31),
        ("target", "1e999"),
        ("mode", "turbo"),
        ("mode", ["eco"]),
        ("enabled", "maybe"),
        ("valves", "true,false"),
        ("rooms", 3),
        ("extra", "{"),
    ],
)
def test_a_bad_value_is_refused_with_value_source_and_what_is_legal(name: str, raw: object) -> None:
    with pytest.raises(SettingError) as refusal:
        heating(name).read(raw, Source("file", "house.yaml:3"))
    text = str(refusal.value)
    assert repr(raw) in text and "file house.yaml:3" in text and heating(name).legal() in text


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(SettingError, match="Did you mean 'fast'"):
        heating("mode").read("fsat", Source("flag", "--heat_mode"))
    assert nearest("num_proceses", ["num_processes", "num_machines"]) == "num_processes"
    assert nearest("zebra", ["num_processes"]) is None


def test_secrets_are_not_shown_in_refusals() -> None:
    @dataclass
    class Safe(OptionGroup, env="SAFE_"):
        code: int = option(None, "The code.", secret=True)

    with pytest.raises(SettingError) as refusal:
        option_of(Safe, "code").read("hunter2", Source("environment", "SAFE_CODE"))
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "spelled"),
    [
        (Source("environment", "HEAT_MODE"), "HEAT_MODE=eco"),
        (Source("flag", "--heat_mode"), "--heat_mode eco"),
        (Source("file", "a.yaml:1"), "heating.heat_mode: eco"),
        (Source("argument", "mode"), "mode=eco"),
        (Source("argument", "heat_plugin"), "heat_plugin.mode=eco"),
        (Source("default"), "mode: eco"),
    ],
)
def test_a_value_is_quoted_in_the_language_of_its_source(kind: Source, spelled: str) -> None:
    assert heating("mode").spell("eco", kind) == spelled


@pytest.mark.parametrize("group", GROUPS)
def test_declared_defaults_are_canonical(group: str) -> None:
    """The classes that users construct read only what differs from the default."""
    for row in options_of(GROUPS[group]):
        assert row.read(row.default) in (row.default, None), f"{group}.{row.name}"


def test_literals_are_the_choices() -> None:
    """An annotation that names choices names exactly those that the option takes."""
    checked = 0
    for cls in GROUPS.values():
        annotations = {field.name: str(field.type) for field in fields(cls)}
        for row in options_of(cls):
            if annotations[row.name].startswith("Literal["):
                named = ast.literal_eval(f"({annotations[row.name][len('Literal[') : -1]},)")
                assert tuple(map(str, named)) == row.choices, row.name
                checked += 1
    assert checked >= 8
