"""The environment codec, and the documented functions on environment variables."""

from __future__ import annotations

import asyncio
import os
import unittest
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerate.errors import SettingError
from accelerate.guests.deepspeed.options import DeepSpeedOptions
from accelerate.settings import env
from accelerate.settings.fp8 import Fp8Options
from accelerate.settings.fsdp import FsdpOptions
from accelerate.settings.labels import DynamoBackend
from accelerate.settings.option import OptionGroup
from accelerate.settings.run_options import RunOptions
from accelerate.settings.training import DynamoOptions
from accelerate.settings.tree import GROUPS
from tests.unit.settings.strategies import groups


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("cls", GROUPS.values(), ids=GROUPS)
@given(data=st.data())
def test_decoding_what_was_encoded_gives_the_same_group(cls: type[OptionGroup], data: st.DataObject) -> None:
    group = data.draw(groups(cls))
    variables = env.encode(group)
    assert all(isinstance(text, str) and text for text in variables.values())
    assert cls(**env.decode(cls, variables)) == group


def test_booleans_travel_as_true_and_false() -> None:
    assert env.encode(FsdpOptions(cpu_offload=True))["FSDP_OFFLOAD_PARAMS"] == "true"
    assert env.encode(FsdpOptions())["FSDP_OFFLOAD_PARAMS"] == "false"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("OFF", False)])
def test_booleans_are_read_in_every_documented_spelling(text: str, value: bool) -> None:
    assert env.decode(FsdpOptions, {"FSDP_OFFLOAD_PARAMS": text}) == {"cpu_offload": value}


def test_decoding_gives_only_what_was_given() -> None:
    assert env.decode(RunOptions, {"ACCELERATE_MIXED_PRECISION": "", "OTHER": "x"}) == {}


def test_positions_stand_for_names_in_old_variables() -> None:
    given = env.decode(FsdpOptions, {"FSDP_SHARDING_STRATEGY": "4", "FSDP_STATE_DICT_TYPE": "3"})
    assert given == {"sharding_strategy": "HYBRID_SHARD", "state_dict_type": "SHARDED_STATE_DICT"}


def test_reshard_after_forward_is_a_boolean_or_an_old_strategy() -> None:
    assert env.decode(FsdpOptions, {"FSDP_RESHARD_AFTER_FORWARD": "False"}) == {"reshard_after_forward": False}
    assert env.decode(FsdpOptions, {"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}) == {
        "reshard_after_forward": "FULL_SHARD"
    }


def test_one_option_may_be_spread_over_three_variables() -> None:
    variables = env.encode(Fp8Options(override_linear_precision=(True, False, True)))
    names = [f"ACCELERATE_FP8_OVERRIDE_{part}" for part in ("FPROP", "DGRAD", "WGRAD")]
    assert [variables[name] for name in names] == ["true", "false", "true"]
    assert env.decode(Fp8Options, {names[1]: "1"})["override_linear_precision"] == (False, True, False)


def test_documents_travel_as_paths_or_json() -> None:
    for config in ("ds.json", {"zero_optimization": {"stage": 3}}):
        variables = env.encode(DeepSpeedOptions(hf_ds_config=config))
        assert env.decode(DeepSpeedOptions, variables)["hf_ds_config"] == config
    assert "hf_ds_config" not in env.decode(DeepSpeedOptions, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"})


def test_auto_is_deepspeeds_word_and_nothing_given_elsewhere() -> None:
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto", "ACCELERATE_GRADIENT_CLIPPING": "auto"}
    assert env.decode(DeepSpeedOptions, variables)["gradient_accumulation_steps"] == "auto"
    assert env.decode(RunOptions, variables) == {}


def test_a_bad_variable_is_refused_by_its_name() -> None:
    with pytest.raises(SettingError, match=r"`FSDP_VERSION` cannot be '3'.*environment variable FSDP_VERSION.*1, 2"):
        env.decode(FsdpOptions, {"FSDP_VERSION": "3"})


def test_fill_unset_takes_the_environment_only_for_what_is_none() -> None:
    class Plugin(FsdpOptions):
        def __post_init__(self) -> None:
            env.fill_unset(self, {"FSDP_VERSION": "2", "FSDP_USE_ORIG_PARAMS": "true"})

    assert Plugin().fsdp_version == 2
    explicit = Plugin(fsdp_version=1, use_orig_params=False)
    assert (explicit.fsdp_version, explicit.use_orig_params) == (1, False)
    assert explicit.cpu_offload is False


def test_enum_members_are_encoded_by_value_and_objects_left_out() -> None:
    group: Any = DynamoOptions(backend=DynamoBackend.INDUCTOR)  # type: ignore[arg-type]
    assert env.encode(group)["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    fsdp: Any = FsdpOptions()
    fsdp.auto_wrap_policy = lambda module: True
    assert "FSDP_AUTO_WRAP_POLICY" not in env.encode(fsdp)


def test_publish_sets_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_A", "old")
    monkeypatch.delenv("ACCELERATE_B", raising=False)
    with env.patched(ACCELERATE_A=None, ACCELERATE_B=True):
        assert "ACCELERATE_A" not in os.environ and env.read("ACCELERATE_B") == "true"
    assert env.read("ACCELERATE_A") == "old" and "ACCELERATE_B" not in os.environ


def test_patched_is_undone_when_the_block_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_C", raising=False)
    with pytest.raises(KeyError), env.patched(ACCELERATE_C=1):
        raise KeyError
    assert env.snapshot().get("ACCELERATE_C") is None


def test_flag_reads_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_C", "on")
    assert env.flag("ACCELERATE_C") is True
    monkeypatch.setenv("ACCELERATE_C", "")
    assert env.flag("ACCELERATE_C", True) is True
    monkeypatch.setenv("ACCELERATE_C", "perhaps")
    with pytest.raises(SettingError, match=r"ACCELERATE_C is .perhaps.*true or false"):
        env.flag("ACCELERATE_C")


# The documented functions


@pytest.mark.parametrize("text", ["y", "yes", "t", "true", "on", "1", "YES"])
def test_str_to_bool_is_one_for_true_words(text: str) -> None:
    assert env.str_to_bool(text) == 1 and type(env.str_to_bool(text)) is int
    assert env.str_to_bool(text, to_bool=True) is True


@pytest.mark.parametrize("text", ["n", "no", "f", "false", "off", "0", "Off"])
def test_str_to_bool_is_zero_for_false_words(text: str) -> None:
    assert env.str_to_bool(text) == 0
    assert env.str_to_bool(text, to_bool=True) is False


@pytest.mark.parametrize("text", ["maybe", "", "2"])
def test_str_to_bool_refuses_other_words(text: str) -> None:
    with pytest.raises(ValueError, match="truth value"):
        env.str_to_bool(text)


def test_get_int_from_env_takes_the_first_number_that_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "-1")
    monkeypatch.setenv("B", "3")
    assert env.get_int_from_env(["A", "B"], 7) == 3
    assert env.get_int_from_env(["A", "NOT_THERE"], 7) == 7
    monkeypatch.setenv("A", "many")
    with pytest.raises(ValueError, match=r"A is .many."):
        env.get_int_from_env(["A", "B"], 7)


def test_parse_flag_and_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("F", "true")
    assert env.parse_flag_from_env("F") is True
    assert env.parse_flag_from_env("NOT_THERE", True) is True
    assert env.parse_choice_from_env("F") == "true"
    assert env.parse_choice_from_env("NOT_THERE") == "no"


def test_patch_environment_upper_cases_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHED_B", "before")
    with env.patch_environment(patched_a=1, PATCHED_B=False):
        assert (os.environ["PATCHED_A"], os.environ["PATCHED_B"]) == ("1", "false")
    assert "PATCHED_A" not in os.environ and os.environ["PATCHED_B"] == "before"


def test_clear_environment_restores_whatever_the_block_did() -> None:
    before = dict(os.environ)
    with env.clear_environment():
        assert dict(os.environ) == {}
        os.environ["LEFT_BEHIND"] = "1"
    assert dict(os.environ) == before


def test_purge_restores_after_functions_coroutines_and_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEEP", "before")

    def soil() -> None:
        os.environ["ACCELERATE_NEW"] = "1"
        os.environ["ACCELERATE_KEEP"] = "after"

    @env.purge_accelerate_environment
    def plain() -> None:
        soil()

    @env.purge_accelerate_environment
    async def coroutine() -> None:
        soil()

    @env.purge_accelerate_environment
    def generator() -> Any:
        soil()
        yield 1

    plain()
    asyncio.run(coroutine())
    assert list(generator()) == [1]
    assert "ACCELERATE_NEW" not in os.environ and os.environ["ACCELERATE_KEEP"] == "before"


def test_purge_on_a_class_covers_its_tests_and_those_of_subclasses() -> None:
    @env.purge_accelerate_environment
    class Base(unittest.TestCase):
        def test_one(self) -> None:
            os.environ["ACCELERATE_SOILED"] = "1"

    class Derived(Base):
        def test_two(self) -> None:
            os.environ["ACCELERATE_SOILED"] = "1"

    for method in ("test_one", "test_two"):
        getattr(Derived(method), method)()
        assert "ACCELERATE_SOILED" not in os.environ


def test_environment_files_leave_out_what_they_cannot_carry() -> None:
    with pytest.warns(UserWarning, match="left out of the environment file"):
        lines = env.convert_dict_to_env_variables({"A": "b", "C": "d e", "E": "", "G": "h;", "I": "<", "J": "k\nl"})
    assert lines == ["A=b\n"]


def test_initialized_libraries_are_those_imported() -> None:
    assert env.are_libraries_initialized("os", "a_library_that_is_not_there") == ["os"]
